"""The same request over gRPC and over HTTP is the same call to the gateway, and its reply tells the same."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from espalier.cluster.call import GenerateCall
from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.http import build_http_app
from tests.support.asgi_client import ask
from tests.support.fakes import FAKE_MODEL, FakeGateway, fake_model
from tests.support.grpc_serving import Answer, generate, request, serving

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?", "name": "Ann"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": 1}'}}],
    },
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "a": 1}}}]
NUMBERS = {
    "temperature": 0.1,
    "top_k": 7,
    "top_p": 0.3,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.7,
    "frequency_penalty": -0.2,
    "seed": 2**60 + 1,
}
ENDS = {"max_tokens": 9, "min_tokens": 3, "stop": ["a", "bc"], "stop_token_ids": [4, 5], "ignore_eos": True}

# HTTP path, HTTP body, gRPC fields.
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "defaults": (
        "/v1/chat/completions",
        {"messages": MESSAGES[:2], "seed": 5},
        {"chat": {"messages": MESSAGES[:2]}, "sampling": {"seed": 5}},
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": TOOLS, "seed": 5, "chat_template_kwargs": {"x": [1]}},
        {
            "chat": {
                "messages": [
                    *MESSAGES[:2],
                    {"role": "assistant", "tool_calls_json": json.dumps(MESSAGES[2]["tool_calls"])},
                    MESSAGES[3],
                ],
                "tools_json": json.dumps(TOOLS),
                "chat_template_kwargs_json": '{"x": [1]}',
            },
            "sampling": {"seed": 5},
        },
    ),
    "everything": (
        "/v1/completions",
        {
            "prompt": "Once",
            **NUMBERS,
            **ENDS,
            "logit_bias": {"9": 0.1, "3": -2},
            "logprobs": 2,
            "n": 3,
            "priority": -2,
            "session_id": "s",
            "draft": False,
        },
        {
            "prompt": "Once",
            "sampling": {**NUMBERS, "logit_bias": {9: 0.1, 3: -2}},
            "stop": ENDS,
            "output": {"logprobs": 2},
            "n": 3,
            "priority": -2,
            "session_id": "s",
            "draft": False,
        },
    ),
    "token ids": (
        "/v1/completions",
        {"prompt": [1, 2, 300], "seed": 1, "max_tokens": 8},
        {"token_ids": {"ids": [1, 2, 300]}, "sampling": {"seed": 1}, "stop": {"max_tokens": 8}},
    ),
}


def over_http(gateway: FakeGateway, path: str, body: dict[str, Any]) -> tuple[GenerateCall, dict[str, Any]]:
    reply = ask(build_http_app(gateway, GatewayConfig()), "POST", path, json={"model": FAKE_MODEL, **body})
    assert reply.status_code == 200, reply.text
    return gateway.calls[-1], reply.json()


def over_grpc(gateway: FakeGateway, fields: dict[str, Any]) -> tuple[GenerateCall, Answer]:
    async def main() -> Answer:
        async with serving(gateway) as channel:
            return await generate(channel, request(**fields))

    answer = asyncio.run(main())
    assert answer.error is None
    return gateway.calls[-1], answer


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_call(name: str) -> None:
    path, body, fields = PAIRS[name]
    gateway = FakeGateway(models=[fake_model(defaults={"temperature": 0.6, "top_k": 20})])
    http, _ = over_http(gateway, path, body)
    grpc, _ = over_grpc(gateway, fields)
    params = replace(http.params, logit_bias=tuple(sorted(http.params.logit_bias)))
    assert replace(http, call_id="", origin=None, params=params) == replace(grpc, call_id="", origin=None)


def test_the_same_reply() -> None:
    path, body, fields = PAIRS["everything"]
    gateway = FakeGateway()
    _, http = over_http(gateway, path, {**body, "return_token_ids": True})
    _, grpc = over_grpc(gateway, {**fields, "output": {"logprobs": 2, "return_token_ids": True}})
    for index, choice in enumerate(http["choices"]):
        finish = grpc.finish(index)
        assert choice["text"] == grpc.text(index)
        assert choice["token_ids"] == grpc.token_ids(index)
        assert choice["espalier"] == {
            "token_sha256": finish.token_sha256,
            "seed": finish.seed,
            "replica": finish.replica,
            "queue_seconds": finish.timings.queue_seconds,
            "prefill_seconds": finish.timings.prefill_seconds,
            "decode_seconds": finish.timings.decode_seconds,
        }
        entries = [entry for piece in grpc.of(index) for entry in piece.logprobs]
        assert choice["logprobs"]["token_logprobs"] == [entry.chosen.logprob for entry in entries]
    usages = [grpc.finish(index).usage for index in range(3)]
    assert http["usage"]["completion_tokens"] == sum(usage.completion_tokens for usage in usages)
