"""Asks a running cluster the same thing over each road (HTTP whole, HTTP streamed, gRPC) and reads the answers into one shape."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx

from espalier.cluster.ingress.pb import inference_pb2 as pb
from espalier.cluster.ingress.pb.inference_pb2_grpc import InferenceServiceStub
from espalier.replicas.token_hash import token_sha256

WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One chat message and how its answer is drawn; greedy when temperature is 0."""

    content: str = "Tell me about the sea."
    temperature: float = 0.0
    seed: int = 7
    max_tokens: int = 24


@dataclass
class Answer:
    """What came back. error, details: code and message of the error that ended it, if one did. pieces: how many parts it came in."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    sha256: str = ""
    replica: str = ""
    cached_tokens: int = 0
    error: str | None = None
    details: str = ""
    pieces: int = 0

    @property
    def whole(self) -> bool:
        """Whether it ended well, and its hash is that of its tokens."""
        return self.error is None and self.sha256 == token_sha256(self.token_ids)


Road = Callable[["Roads", Ask], Awaitable[Answer]]


class Roads:
    """Clients of one cluster. Use inside `async with`."""

    def __init__(self, http_url: str, grpc_address: str, model: str) -> None:
        self.model = model
        self.http = httpx.AsyncClient(base_url=http_url, timeout=WAIT_S, limits=httpx.Limits(max_connections=200))
        self._channel = grpc.aio.insecure_channel(grpc_address)
        self.stub: Any = InferenceServiceStub(self._channel)

    async def __aenter__(self) -> "Roads":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self._channel.close()

    async def http_whole(self, ask: Ask) -> Answer:
        """One JSON reply."""
        response = await self.http.post("/v1/chat/completions", json=self._body(ask, stream=False))
        body = response.json()
        if "error" in body:
            return Answer(error=body["error"]["code"], details=body["error"]["message"])
        [choice] = body["choices"]
        ours = choice["espalier"]
        return Answer(
            token_ids=choice["token_ids"],
            text=choice["message"]["content"],
            sha256=ours["token_sha256"],
            replica=ours["replica"],
            cached_tokens=body["usage"]["prompt_tokens_details"]["cached_tokens"],
            pieces=1,
        )

    async def http_streamed(self, ask: Ask) -> Answer:
        """Server-sent events."""
        answer = Answer()
        try:
            async with aclosing(self.http_events(ask)) as events:
                async for event in events:
                    self._read(event, answer)
        except httpx.HTTPError as error:
            answer.error = f"broken: {type(error).__name__}"
        return answer

    async def http_events(self, ask: Ask) -> AsyncGenerator[dict[str, Any], None]:
        """The stream's objects. Closing it leaves the server."""
        async with self.http.stream("POST", "/v1/chat/completions", json=self._body(ask, stream=True)) as response:
            if response.status_code != 200:
                yield json.loads(await response.aread())
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    async def grpc_streamed(self, ask: Ask) -> Answer:
        """Generate."""
        answer = Answer()
        try:
            async for piece in self.grpc_call(ask):
                answer.pieces += 1
                answer.text += piece.text
                answer.token_ids += piece.token_ids
                if piece.HasField("finish"):
                    answer.sha256 = piece.finish.token_sha256
                    answer.replica = piece.finish.replica
                    answer.cached_tokens = piece.finish.usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            answer.error = error.code().name
            answer.details = error.details() or ""
        return answer

    def grpc_call(self, ask: Ask) -> Any:
        """The call itself: an iterator of pieces with `cancel`."""
        return self.stub.Generate(
            pb.GenerateRequest(
                model=self.model,
                chat=pb.Chat(messages=[pb.Message(role="user", content=ask.content)]),
                sampling=pb.SamplingParams(temperature=ask.temperature, seed=ask.seed),
                stop=pb.StopParams(max_tokens=ask.max_tokens, ignore_eos=True),
                output=pb.OutputOptions(return_token_ids=True),
            ),
            timeout=WAIT_S,
        )

    async def together(self, asks: list[Ask], road: Road) -> list[Answer]:
        """All at once."""
        return await asyncio.gather(*(road(self, ask) for ask in asks))

    def _body(self, ask: Ask, *, stream: bool) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": ask.content}],
            "temperature": ask.temperature,
            "seed": ask.seed,
            "max_tokens": ask.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        } | ({"stream_options": {"include_usage": True}} if stream else {})

    def _read(self, event: dict[str, Any], answer: Answer) -> None:
        answer.pieces += 1
        if "error" in event:
            answer.error, answer.details = event["error"]["code"], event["error"]["message"]
            return
        if usage := event.get("usage"):
            answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        for choice in event["choices"]:
            answer.token_ids += choice.get("token_ids", [])
            answer.text += choice["delta"].get("content") or ""
        if ours := event.get("espalier"):
            answer.sha256, answer.replica = ours["token_sha256"], ours["replica"]


HTTP_WHOLE: Road = Roads.http_whole
HTTP_STREAMED: Road = Roads.http_streamed
GRPC: Road = Roads.grpc_streamed
