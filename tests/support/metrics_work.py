"""Requests to a cluster with a key, and what engines must have counted of them, from their usages alone."""

from dataclasses import dataclass, field
from typing import Any

import httpx
import yaml

from espalier.cluster.ingress.pb import inference_pb2 as pb
from tests.support.cluster_clients import Roads
from tests.support.metrics_stand import MODEL, Key, Stand, key

KEY = "key-of-ada"
HEADERS = {"authorization": f"Bearer {KEY}"}
BATCH_TOKENS = 64


class Client:
    """Requests with a key."""

    def __init__(self, stand: Stand) -> None:
        self._roads = Roads(stand.served.http_url, stand.served.grpc_address, MODEL)
        self._roads.http.headers.update(HEADERS)

    async def __aenter__(self) -> "Client":
        await self._roads.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._roads.__aexit__()

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self._roads.http.get(path, **options)

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self._roads.http.post(path, json=body, headers=headers)

    async def chat(self, content: str, max_tokens: int, session: str | None = None, **fields: Any) -> httpx.Response:
        headers = {"x-session-id": session} if session else {}
        return await self.post("/v1/chat/completions", chat_body(content, max_tokens) | fields, **headers)

    async def stream(self, content: str, max_tokens: int) -> dict[str, Any]:
        """The usage of a streamed reply."""
        body = chat_body(content, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._roads.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
        usage = [event["usage"] for line in lines if (event := yaml.safe_load(line[6:])).get("usage")]
        return usage[-1] if usage else {}

    def generate(self, content: str, max_tokens: int, temperature: float = 0.0, model: str = MODEL) -> Any:
        """A call over gRPC."""
        request = pb.GenerateRequest(
            model=model,
            chat=pb.Chat(messages=[pb.Message(role="user", content=content)]),
            sampling=pb.SamplingParams(temperature=temperature, seed=11),
            stop=pb.StopParams(max_tokens=max_tokens, ignore_eos=True),
        )
        return self._roads.stub.Generate(request, metadata=tuple(HEADERS.items()))

    def unary(self, method: str, request: Any, **options: Any) -> Any:
        return getattr(self._roads.stub, method)(request, **({"metadata": tuple(HEADERS.items())} | options))


def chat_body(content: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


@dataclass
class Work:
    """What replies must have counted, from their usages: (prompt, cached, completion) tokens of each, one after the other."""

    usages: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, usage: dict[str, Any]) -> None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.usages.append((usage["prompt_tokens"], cached, usage["completion_tokens"]))

    def rows(self) -> list[int]:
        """Rows of each round: of the replies, and of their audits, which compute all of it again."""
        rounds = []
        for prompt, cached, completion in self.usages:
            for to_compute in (prompt - cached, prompt):
                whole, rest = divmod(to_compute, BATCH_TOKENS)
                rounds += [BATCH_TOKENS] * whole + [rest] * (rest > 0) + [1] * (completion - 1)
        return rounds

    def counts(self) -> dict[Key, float]:
        """Counters of the engines."""
        prompts, cached, completions = (sum(column) for column in zip(*self.usages, strict=True))
        number, rows = len(self.usages), self.rows()
        requests = [
            *("espalier_time_to_first_token_seconds", "espalier_e2e_request_latency_seconds"),
            *("espalier_request_queue_time_seconds", "espalier_request_prefill_time_seconds"),
            *("espalier_request_decode_time_seconds", "espalier_request_prompt_tokens"),
            "espalier_request_generation_tokens",
        ]
        return {
            **{key(f"{name}_count"): number for name in requests},
            key("espalier_request_prompt_tokens_sum"): prompts,
            key("espalier_request_generation_tokens_sum"): completions,
            key("espalier_inter_token_latency_seconds_count"): completions - number,
            key("espalier_prompt_tokens_total"): prompts,
            key("espalier_generation_tokens_total"): completions,
            key("espalier_prefix_cache_queries_total"): prompts,
            key("espalier_prefix_cache_hits_total"): cached,
            key("espalier_rounds_total"): len(rows),
            key("espalier_rows_per_round_count"): len(rows),
            key("espalier_rows_per_round_sum"): sum(rows),
            key("espalier_decode_rows_total"): rows.count(1),
            key("espalier_prefill_rows_total"): sum(rows) - rows.count(1),
            key("espalier_request_success_total", finished_reason="length"): number,
            key("espalier_audit_total", result="equal"): number,
        }


def requests_by(transport: str, route: str, **by_code: int) -> dict[Key, float]:
    name = "espalier_gateway_requests_total"
    return {
        key(name, transport=transport, route=route, code=code.removeprefix("_")): number
        for code, number in by_code.items()
    }
