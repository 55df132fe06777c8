"""Requests that must be refused with INVALID_ARGUMENT and the field's name, and after all of which the server still answers."""

import asyncio
import math
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from espalier.cluster.ingress.pb import inference_pb2 as pb
from tests.support.bad_requests import OUT_OF_RANGE
from tests.support.fakes import FAKE_MODEL, FakeGateway, fake_model
from tests.support.grpc_serving import generate, request, serving

SERVICE = "/espalier.v1.InferenceService/"
SAMPLING = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)
STOP = frozenset(pb.StopParams.DESCRIPTOR.fields_by_name)
OUTPUT = frozenset(pb.OutputOptions.DESCRIPTOR.fields_by_name)
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
MODEL = fake_model(max_context=200)

# Method, request as message or bytes, the field that the refusal names.
Case = tuple[str, Message | bytes, str]


def field(name: str, value: Any) -> Case:
    """A generate request that is wrong in one field, which lies in the group of that name."""
    for group, names in (("sampling", SAMPLING), ("stop", STOP), ("output", OUTPUT)):
        if name in names:
            return "Generate", request(**{group: {name: value}}), name
    return "Generate", request(**{name: value}), name


def chat(param: str, *messages: dict[str, Any], **fields: Any) -> Case:
    """A generate request with that conversation; one user message when there is none."""
    return "Generate", request(chat={"messages": messages or ({"role": "user", "content": "Hi"},), **fields}), param


def tool_call(arguments: str) -> dict[str, str]:
    return {
        "role": "assistant",
        "tool_calls_json": f'[{{"type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}]',
    }


CASES: list[Case] = [
    *(field(name, value) for name, value in OUT_OF_RANGE),
    *(field(name, math.nan) for name in FLOATS),
    field("temperature", math.inf),
    field("top_p", -math.inf),
    field("logit_bias", {7: math.nan}),
    field("logit_bias", {2**32 - 1: 0.5}),
    field("stop_token_ids", [2**32 - 1]),
    field("logprobs", 21),
    field("logprobs", 2**32 - 1),
    field("session_id", "x" * 257),
    field("model", ""),
    field("token_ids", {"ids": []}),
    field("token_ids", {"ids": [1, 512]}),
    field("token_ids", {"ids": [2**32 - 1]}),
    field("token_ids", {"ids": [1] * 200}),
    field("prompt", "x" * 500),
    ("Generate", pb.GenerateRequest(model=FAKE_MODEL), "input"),
    ("Generate", request(chat={}), "messages"),
    chat("messages[0].role", {"content": "Hi"}),
    chat("messages[0].role", {"role": "oracle", "content": "Hi"}),
    chat("messages[0].content", {"role": "user"}),
    chat(
        "messages[1].tool_calls_json", {"role": "user", "content": "a"}, {"role": "assistant", "tool_calls_json": "["}
    ),
    chat("messages[0].tool_calls", {"role": "assistant", "tool_calls_json": '{"name": "f"}'}),
    chat("messages[0].tool_calls", {**tool_call('"{}"'), "role": "user"}),
    chat("messages[0].tool_calls[0].function.arguments", tool_call('"not json"')),
    chat("messages[0].tool_calls[0].function.arguments", tool_call("3")),
    chat("tools_json", tools_json="[{"),
    chat("tools_json", tools_json="[NaN]"),
    chat("tools", tools_json="{}"),
    chat("tools[0].type", tools_json='[{"type": "retrieval", "function": {"name": "f"}}]'),
    chat("tools[0].function.name", tools_json='[{"type": "function", "function": {}}]'),
    chat("chat_template_kwargs_json", chat_template_kwargs_json="enable_thinking"),
    chat("chat_template_kwargs", chat_template_kwargs_json="[1]"),
    chat("chat_template_kwargs", chat_template_kwargs_json='{"messages": []}'),
    ("Generate", b"\x62\x01x", "GenerateRequest"),
    ("Generate", b"\x0a\xff", ""),
    ("Generate", b"\x00", ""),
    ("Tokenize", pb.TokenizeRequest(prompt="p"), "model"),
    ("Tokenize", pb.TokenizeRequest(model=FAKE_MODEL), "input"),
    ("Tokenize", pb.TokenizeRequest(model=FAKE_MODEL, chat={}), "messages"),
    (
        "Tokenize",
        pb.TokenizeRequest(
            model=FAKE_MODEL, chat={"messages": [{"role": "user", "content": ""}]}, add_special_tokens=True
        ),
        "add_special_tokens",
    ),
    ("Detokenize", pb.DetokenizeRequest(model=FAKE_MODEL, token_ids=[512]), "token_ids"),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[1]), "model"),
    ("Detokenize", b"\x12\x05", ""),
    ("ListModels", b"\x0a\x01x", "ListModelsRequest"),
]


async def refusal(channel: grpc.aio.Channel, case: Case) -> grpc.aio.AioRpcError:
    """How the server ended the call."""
    method, message, _ = case
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    try:
        if method == "Generate":
            await channel.unary_stream(SERVICE + method)(raw).read()
        else:
            await channel.unary_unary(SERVICE + method)(raw)
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"{method} was not refused: {message!r}")


def check(case: Case, error: grpc.aio.AioRpcError) -> None:
    _, _, param = case
    assert (error.code(), error.details()) != (None, "")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
    assert (error.details() or "").startswith(param)
    assert dict(error.trailing_metadata()) == ({"espalier-param": param} if param else {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2] or 'bytes'}")
def test_refused_by_name(case: Case) -> None:
    async def main() -> None:
        gateway = FakeGateway(models=[MODEL])
        async with serving(gateway) as channel:
            check(case, await refusal(channel, case))
        assert gateway.calls == []
        assert gateway.metrics.grpc == [(case[0], "INVALID_ARGUMENT")]

    asyncio.run(main())


def test_all_at_once_and_then_a_good_one() -> None:
    async def main() -> None:
        gateway = FakeGateway(models=[MODEL])
        async with serving(gateway) as channel:
            errors = await asyncio.gather(*(refusal(channel, case) for case in CASES))
            for case, error in zip(CASES, errors, strict=True):
                check(case, error)
            assert (await generate(channel, request())).text() == "Hello, world."

    asyncio.run(main())


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize"])
def test_unknown_model_is_not_found(method: str) -> None:
    message = {
        "Generate": request(model="ghost"),
        "Tokenize": pb.TokenizeRequest(model="ghost", prompt="p"),
        "Detokenize": pb.DetokenizeRequest(model="ghost"),
    }[method]

    async def main() -> None:
        async with serving(FakeGateway()) as channel:
            error = await refusal(channel, (method, message, "model"))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert dict(error.trailing_metadata()) == {"espalier-param": "model"}
        assert "ghost" in (error.details() or "")

    asyncio.run(main())


def test_a_request_that_is_too_large_is_refused_before_it_is_read() -> None:
    async def main() -> None:
        async with serving(FakeGateway()) as channel:
            answer = await generate(channel, request(prompt="x" * (17 * 2**20)))
            assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await generate(channel, request())).code is grpc.StatusCode.OK

    asyncio.run(main())


def test_unknown_method_is_unimplemented() -> None:
    async def main() -> None:
        async with serving(FakeGateway()) as channel:
            error = await refusal(channel, ("Embed", b"", ""))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(main())
