"""Generate over gRPC: the stream is the gateway's, the call is what was asked for, and every way to end early ends the gateway's stream too."""

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from espalier.cluster.ingress import grpc_servicer
from espalier.cluster.ingress.pb import inference_pb2 as pb
from espalier.cluster.ingress.pb.inference_pb2_grpc import InferenceServiceStub
from espalier.replicas.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    ReplicaLostError,
    RequestFailedError,
)
from espalier.replicas.request import SamplingParams
from espalier.replicas.token_hash import token_sha256
from tests.support.fakes import END_OF_TEXT, FAKE_MODEL, FakeGateway, FakeReply, fake_model
from tests.support.grpc_serving import Answer, generate, request, serving, until

HELLO = [*b"Hello, world.", END_OF_TEXT]


def ask(gateway: FakeGateway, message: pb.GenerateRequest, **options: Any) -> Answer:
    """One call to a server of its own."""

    async def call() -> Answer:
        async with serving(gateway) as channel:
            return await generate(channel, message, **options)

    return asyncio.run(call())


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_stream_is_the_gateways() -> None:
    gateway = FakeGateway(FakeReply(cached_tokens=3))
    answer = ask(gateway, request(output={"return_token_ids": True}))
    (call,) = gateway.calls
    assert [piece.text for piece in answer.pieces] == ["Hell", "o, w", "orld", "."]
    assert answer.token_ids() == HELLO
    assert {piece.id for piece in answer.pieces} == {call.call_id}
    finish = answer.finish()
    assert finish.reason == pb.FINISH_REASON_STOP
    assert finish.matched_token_id == END_OF_TEXT
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.usage.cached_tokens) == (11, 14, 3)
    assert finish.token_sha256 == token_sha256(HELLO)
    assert finish.seed == call.params.seed
    assert finish.replica == "replica-0"
    timings = finish.timings
    assert (timings.queue_seconds, timings.prefill_seconds, timings.decode_seconds) == (0.25, 0.5, 1.5)
    assert gateway.finished == [call.call_id]
    assert gateway.metrics.grpc == [("Generate", "OK")]


def test_token_ids_and_logprobs_come_only_when_asked_for() -> None:
    answer = ask(FakeGateway(), request())
    assert all(not piece.token_ids and not piece.logprobs for piece in answer.pieces)


def test_pieces_that_tell_nothing_are_not_sent() -> None:
    gateway = FakeGateway(FakeReply(texts=("é",), chunk=1))
    assert [(p.text, p.HasField("finish")) for p in ask(gateway, request()).pieces] == [("é", False), ("", True)]
    answer = ask(gateway, request(output={"return_token_ids": True}))
    assert [list(piece.token_ids) for piece in answer.pieces] == [[0xC3], [0xA9], [END_OF_TEXT]]


def test_length() -> None:
    answer = ask(FakeGateway(), request(stop={"max_tokens": 5}))
    assert answer.text() == "Hello"
    assert answer.finish().reason == pb.FINISH_REASON_LENGTH
    assert answer.finish().WhichOneof("matched") is None


def test_choices_interleave_and_each_one_ends() -> None:
    gateway = FakeGateway(FakeReply(texts=("first one", "second", "3"), chunk=2))
    answer = ask(gateway, request(n=3, output={"return_token_ids": True}))
    assert [answer.text(index) for index in range(3)] == ["first one", "second", "3"]
    assert [piece.index for piece in answer.pieces][:6] == [0, 1, 2, 0, 1, 0]
    for index in range(3):
        assert answer.of(index)[-1].HasField("finish")
        assert answer.finish(index).token_sha256 == token_sha256(answer.token_ids(index))
    assert [answer.finish(index).replica for index in range(3)] == ["replica-0", "replica-1", "replica-0"]


def test_logprobs_have_one_entry_a_token_with_its_bytes() -> None:
    answer = ask(FakeGateway(FakeReply(texts=("é",))), request(output={"logprobs": 2, "return_token_ids": True}))
    entries = [entry for piece in answer.pieces for entry in piece.logprobs]
    assert [entry.chosen.token_id for entry in entries] == answer.token_ids()
    assert entries[0].chosen.token == "\ufffd"
    assert b"".join(entry.chosen.token_bytes for entry in entries[:2]) == "é".encode()
    assert [(top.token_id, top.logprob) for top in entries[0].top] == [(0xC3, -0.5), (0xC4, -1.5)]


def test_zero_logprobs_is_the_chosen_token_alone() -> None:
    answer = ask(FakeGateway(), request(output={"logprobs": 0}))
    assert sum(len(piece.logprobs) for piece in answer.pieces) == len(HELLO)
    assert not any(entry.top for piece in answer.pieces for entry in piece.logprobs)


def test_every_field_reaches_the_call() -> None:
    gateway = FakeGateway()
    message = request(
        prompt="Hi",
        sampling={
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {9: -1.5, 3: 100.0},
            "seed": 2**64 - 1,
        },
        stop={"max_tokens": 12, "min_tokens": 2, "stop": ["\n", "END"], "stop_token_ids": [7, 8], "ignore_eos": True},
        output={"logprobs": 5},
        n=2,
        priority=-3,
        session_id="session",
        draft=False,
    )
    answer = ask(gateway, message)
    (call,) = gateway.calls
    assert call.params == SamplingParams(
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((3, 100.0), (9, -1.5)),
        seed=2**64 - 1,
        max_tokens=12,
        min_tokens=2,
        stop=("\n", "END"),
        stop_token_ids=(7, 8),
        ignore_eos=True,
        logprobs=5,
        draft=False,
    )
    assert (call.model, call.n, call.priority, call.session) == (FAKE_MODEL, 2, -3, "session")
    assert call.prompt_token_ids == (END_OF_TEXT, *b"Hi")
    assert answer.finish().seed == 2**64 - 1


def test_unset_fields_take_the_models_defaults_and_zeros_do_not() -> None:
    info = fake_model(defaults={"temperature": 0.6, "top_k": 20}, max_context=100)
    gateway = FakeGateway(models=[info])
    ask(gateway, request(token_ids={"ids": [1, 2, 3]}))
    ask(gateway, request(token_ids={"ids": [1, 2, 3]}, sampling={"temperature": 0.0, "top_k": 0}))
    unset, zeros = (call.params for call in gateway.calls)
    assert (unset.temperature, unset.top_k, unset.top_p, unset.max_tokens) == (0.6, 20, 1.0, 97)
    assert (zeros.temperature, zeros.top_k) == (0.0, 0)
    assert gateway.calls[0].prompt_token_ids == (1, 2, 3)
    assert gateway.calls[0].session is None


def test_a_seed_is_drawn_and_returned() -> None:
    gateway = FakeGateway()
    seeds = [ask(gateway, request()).finish().seed for _ in range(3)]
    assert seeds == [call.params.seed for call in gateway.calls]
    assert len(set(seeds)) == 3


def test_chat_is_rendered_with_tools_and_history() -> None:
    gateway = FakeGateway()
    calls = '[{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]'
    messages = [
        pb.Message(role="system", content="Be brief."),
        pb.Message(role="user", content="1 + 1?", name="Ann"),
        pb.Message(role="assistant", tool_calls_json=calls, reasoning_content="Hm."),
        pb.Message(role="tool", content="2", tool_call_id="1"),
    ]
    tools = '[{"type": "function", "function": {"parameters": {"type": "object"}, "name": "add"}}]'
    chat = pb.Chat(messages=messages, tools_json=tools, chat_template_kwargs_json='{"enable_thinking": false}')
    answer = ask(gateway, request(chat=chat))
    (rendered,) = gateway.fake_text.rendered
    assert rendered["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert rendered["tools"] == [{"type": "function", "function": {"parameters": {"type": "object"}, "name": "add"}}]
    assert rendered["template_kwargs"] == {"enable_thinking": False}
    assert gateway.fake_text.decode(gateway.calls[0].prompt_token_ids).endswith("<|im_start|>assistant\n")
    assert answer.code is grpc.StatusCode.OK


def test_chat_without_a_generation_prompt() -> None:
    gateway = FakeGateway()
    chat = pb.Chat(messages=[pb.Message(role="user", content="Hi")], add_generation_prompt=False)
    ask(gateway, request(chat=chat))
    assert gateway.fake_text.decode(gateway.calls[0].prompt_token_ids).endswith("Hi<|im_end|>\n")


ERRORS: list[tuple[EngineError, grpc.StatusCode, dict[str, str]]] = [
    (
        InvalidRequestError("stop: too long", param="stop"),
        grpc.StatusCode.INVALID_ARGUMENT,
        {"espalier-param": "stop"},
    ),
    (ModelNotFoundError("no such model", param="model"), grpc.StatusCode.NOT_FOUND, {"espalier-param": "model"}),
    (QueueFullError("the queue is full", retry_after_s=2.3), grpc.StatusCode.RESOURCE_EXHAUSTED, {"retry-after": "3"}),
    (QueueFullError("the queue is full"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"retry-after": "1"}),
    (DrainingError("stopping"), grpc.StatusCode.UNAVAILABLE, {"retry-after": "5"}),
    (DeadlineExceededError("too late"), grpc.StatusCode.DEADLINE_EXCEEDED, {}),
    (ReplicaLostError("the replica died"), grpc.StatusCode.ABORTED, {}),
    (RequestFailedError("computing this request failed"), grpc.StatusCode.INTERNAL, {}),
]


@pytest.mark.parametrize(("error", "code", "trailing"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("where", ["refusal", "middle", "end"])
def test_errors_are_statuses(error: EngineError, code: grpc.StatusCode, trailing: dict[str, str], where: str) -> None:
    reply = {
        "refusal": FakeReply(refusal=error),
        "middle": FakeReply(break_after=1, break_with=error),
        "end": FakeReply(end_error=error),
    }[where]
    gateway = FakeGateway(reply)
    answer = ask(gateway, request())
    assert answer.code is code
    assert error.message in answer.details
    assert answer.details.startswith(error.param or "")
    assert answer.trailing == trailing
    assert not any(piece.HasField("finish") for piece in answer.pieces)
    assert answer.text() == {"refusal": "", "middle": "Hell", "end": "Hello, world."}[where]
    assert gateway.metrics.grpc == [("Generate", code.name)]
    assert gateway.metrics.disconnects == []
    assert not gateway.open


def test_a_param_in_front_of_a_message_that_lacks_it() -> None:
    answer = ask(FakeGateway(FakeReply(refusal=InvalidRequestError("too long", param="prompt"))), request())
    assert answer.details == "prompt: too long"


def test_unexpected_errors_show_no_internals(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(FakeGateway(FakeReply(refusal=ValueError("secret of the house"))), request())
    assert answer.code is grpc.StatusCode.INTERNAL
    assert "secret" not in answer.details
    assert "Traceback" not in answer.details
    assert "secret of the house" in caplog.text


def test_cancelling_closes_the_gateways_stream_at_once() -> None:
    async def main() -> None:
        gateway = FakeGateway(FakeReply(hold_after=2))
        async with serving(gateway) as channel:
            stream = InferenceServiceStub(channel).Generate(request())
            assert (await stream.read()).text == "Hell"
            await until(lambda: len(gateway.open) == 1)
            stream.cancel()
            await until(lambda: gateway.aborted == [gateway.calls[0].call_id])
            await until(lambda: gateway.metrics.grpc == [("Generate", "CANCELLED")])
            assert gateway.metrics.disconnects == ["grpc"]
            assert not gateway.open

    run(main())


def test_deadline_reaches_the_call_and_ends_it() -> None:
    async def main() -> None:
        gateway = FakeGateway(FakeReply(hold_after=1))
        async with serving(gateway) as channel:
            before = time.time()
            answer = await generate(channel, request(), timeout=0.4)
            assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert [piece.text for piece in answer.pieces] == ["Hell"]
            (call,) = gateway.calls
            assert call.deadline is not None
            assert before + 0.2 < call.deadline < before + 0.6
            await until(lambda: gateway.aborted == [call.call_id])
            await until(lambda: len(gateway.metrics.grpc) == 1)

    run(main())


def test_no_deadline_is_none() -> None:
    gateway = FakeGateway()
    ask(gateway, request())
    assert gateway.calls[0].deadline is None


def test_fifty_clients_that_leave_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    random_points = random.Random(7)

    async def leave(channel: grpc.aio.Channel, pieces: int) -> None:
        stream = InferenceServiceStub(channel).Generate(request(n=2))
        for _ in range(pieces):
            await stream.read()
        stream.cancel()

    async def main() -> None:
        gateway = FakeGateway(FakeReply(texts=("x" * 200,), chunk=1))
        async with serving(gateway) as channel:
            await asyncio.gather(*(leave(channel, random_points.randrange(1, 100)) for _ in range(50)))
            await until(lambda: len(gateway.metrics.grpc) == 50)
            assert not gateway.open
            assert sorted(gateway.aborted) == sorted(call.call_id for call in gateway.calls)
            assert (await generate(channel, request())).text() == "x" * 200
        assert gateway.metrics.disconnects == ["grpc"] * 50

    with caplog.at_level(logging.WARNING):
        run(main())
    assert caplog.records == []


def test_a_write_that_finds_the_call_over_counts_as_a_client_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC may tell of a client's leaving by a failing write before it cancels the handler."""

    async def gone(_self: Any, _message: Any) -> None:
        raise grpc.aio.InternalError("the call is over")

    async def main() -> None:
        gateway = FakeGateway()
        async with serving(gateway) as channel:
            with monkeypatch.context() as patch:
                patch.setattr(grpc_servicer, "_write", _write_to(gone))
                assert (await generate(channel, request())).code is grpc.StatusCode.CANCELLED
            assert gateway.metrics.grpc == [("Generate", "CANCELLED")]
            assert not gateway.open
        assert gateway.metrics.disconnects == ["grpc"]

    run(main())


def _write_to(write: Any) -> Any:
    """The servicer's own write, into a context whose write is this one."""
    own = grpc_servicer._write

    async def into(_context: Any, message: Any) -> None:
        await own(type("Gone", (), {"write": write})(), message)

    return into


def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_servicer, "STALLED_S", 0.2)

    async def main() -> None:
        gateway = FakeGateway(FakeReply(texts=("x" * 4000,), chunk=1))
        # The client's window stays at 64 kB, and nothing asks for more.
        async with serving(gateway, channel_options=[("grpc.http2.bdp_probe", 0)]) as channel:
            stream = InferenceServiceStub(channel).Generate(request(output={"logprobs": 20}))
            await until(lambda: len(gateway.aborted) == 1)
            assert not gateway.open
            stream.cancel()
            assert (await generate(channel, request())).code is grpc.StatusCode.OK
        assert ("Generate", "INTERNAL") in gateway.metrics.grpc

    run(main())


def test_a_stopping_server_lets_calls_finish_and_then_cancels_them() -> None:
    async def main() -> None:
        gateway = FakeGateway(FakeReply(hold_after=1))
        async with serving(gateway) as channel:
            stream = InferenceServiceStub(channel).Generate(request())
            await stream.read()
            gateway.draining = True
        await until(lambda: len(gateway.aborted) == 1)
        await until(lambda: gateway.metrics.grpc == [("Generate", "UNAVAILABLE")])
        assert gateway.metrics.disconnects == []

    run(main())
