"""Replies in OpenAI's shapes: whole, streamed, chat and text; usage, logprobs, token ids and the `espalier` object."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from espalier.cluster.call import GenerateCall
from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.http import build_http_app
from espalier.cluster.ingress.merge import merged_events
from espalier.cluster.ingress.openai_reply import raise_failure
from espalier.cluster.ingress.openai_shapes import ChatShape, CompletionShape, token_string
from espalier.replicas.errors import DrainingError, QueueFullError, RequestFailedError
from espalier.replicas.request import Finish, FinishReason, SamplingParams, Timings, TokenLogprobs, Usage
from espalier.replicas.token_hash import token_sha256
from tests.support.asgi_client import ask, sse_events
from tests.support.fakes import END_OF_TEXT, FAKE_MODEL, FakeGateway, FakeReply, FakeText

CHAT = {"model": FAKE_MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": FAKE_MODEL, "prompt": "hi"}
PROMPT_IDS = FakeText().encode(FakeText().render_chat(CHAT["messages"]), add_special_tokens=False)  # type: ignore[arg-type]
REPLY = "Héllo €!"
REPLY_IDS = [*REPLY.encode(), END_OF_TEXT]


def _whole(body: dict[str, Any], path: str = "/v1/chat/completions", reply: FakeReply | None = None) -> dict[str, Any]:
    app = build_http_app(FakeGateway(reply or FakeReply(texts=(REPLY,), cached_tokens=5)), GatewayConfig())
    response = ask(app, "POST", path, json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def _streamed(
    body: dict[str, Any], path: str = "/v1/chat/completions", reply: FakeReply | None = None
) -> list[dict[str, Any]]:
    app = build_http_app(FakeGateway(reply or FakeReply(texts=(REPLY,), cached_tokens=5)), GatewayConfig())
    response = ask(app, "POST", path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return sse_events(response.text)


def test_a_whole_chat() -> None:
    reply = _whole({**CHAT, "seed": 7})
    choice = reply["choices"][0]
    assert (reply["object"], reply["model"], reply["system_fingerprint"]) == (
        "chat.completion",
        FAKE_MODEL,
        "fake-numerics",
    )
    assert reply["id"].startswith("chatcmpl-")
    assert choice["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert choice["espalier"] == {
        "token_sha256": token_sha256(REPLY_IDS),
        "seed": 7,
        "replica": "replica-0",
        "queue_seconds": 0.25,
        "prefill_seconds": 0.5,
        "decode_seconds": 1.5,
    }
    assert reply["usage"] == {
        "prompt_tokens": len(PROMPT_IDS),
        "completion_tokens": len(REPLY_IDS),
        "total_tokens": len(PROMPT_IDS) + len(REPLY_IDS),
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in choice


def test_a_streamed_chat_is_the_whole_one_in_pieces() -> None:
    chunks = _streamed({**CHAT, "seed": 7})
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {(chunks[0]["id"], "chat.completion.chunk")}
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == REPLY
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert ["espalier" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["espalier"] == _whole({**CHAT, "seed": 7})["choices"][0]["espalier"]
    assert all("usage" not in chunk for chunk in chunks)


def test_the_drawn_seed_is_told() -> None:
    gateway = FakeGateway()
    response = ask(build_http_app(gateway, GatewayConfig()), "POST", "/v1/chat/completions", json=CHAT)
    assert response.json()["choices"][0]["espalier"]["seed"] == gateway.calls[0].params.seed


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_the_usage_chunk_comes_last_and_has_no_choices(path: str, body: dict[str, Any]) -> None:
    chunks = _streamed({**body, "stream_options": {"include_usage": True}}, path)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == _whole(body, path)["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_token_ids_make_the_hash_and_the_prompt_is_told_once() -> None:
    body = {**CHAT, "return_token_ids": True}
    choice = _whole(body)["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (REPLY_IDS, PROMPT_IDS)
    chunks = _streamed(body)
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert token_sha256(ids) == chunks[-1]["espalier"]["token_sha256"]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [PROMPT_IDS] + [None] * (len(chunks) - 1)


def test_choices_are_kept_apart() -> None:
    reply = FakeReply(texts=("one", "two!"))
    whole = _whole({**CHAT, "n": 2, "return_token_ids": True}, reply=reply)
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["one", "two!"]
    assert [choice["espalier"]["replica"] for choice in whole["choices"]] == ["replica-0", "replica-1"]
    assert ["prompt_token_ids" in choice for choice in whole["choices"]] == [True, False]
    assert whole["usage"]["prompt_tokens"] == len(PROMPT_IDS)
    assert whole["usage"]["completion_tokens"] == 4 + 5
    chunks = _streamed({**CHAT, "n": 2}, reply=reply)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert texts == ["one", "two!"]
    assert [chunk["choices"][0]["index"] for chunk in chunks if "espalier" in chunk] == [0, 1]


def test_length_is_told() -> None:
    assert _whole({**CHAT, "max_tokens": 3})["choices"][0]["finish_reason"] == "length"


def test_chat_logprobs_have_one_entry_a_token_streamed_too() -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    entries = _whole(body)["choices"][0]["logprobs"]["content"]
    assert [byte for entry in entries[:-1] for byte in entry["bytes"]] == list(REPLY.encode())
    assert len(entries) == len(REPLY_IDS)
    assert entries[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "I", "logprob": -1.5, "bytes": [73]},
        ],
    }
    streamed = [chunk["choices"][0]["logprobs"] for chunk in _streamed(body)]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == entries


def test_chat_logprobs_without_alternatives() -> None:
    entries = _whole({**CHAT, "logprobs": True})["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[]] * len(REPLY_IDS)


def test_completion_logprobs_streamed_and_whole() -> None:
    body = {**TEXT, "logprobs": 2}
    whole = _whole(body, "/v1/completions", FakeReply(texts=("abcdef",)))["choices"][0]["logprobs"]
    assert whole["tokens"] == [*"abcdef", "<|endoftext|>"]
    assert whole["token_logprobs"] == [-0.5] * 7
    assert whole["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert whole["text_offset"] == [0, 1, 2, 3, 4, 5, 6]
    chunks = _streamed(body, "/v1/completions", FakeReply(texts=("abcdef",), chunk=2))
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert len(pieces) == 4
    for name, values in whole.items():
        assert [value for piece in pieces for value in piece[name]] == values


def test_a_batch_of_prompts_streamed_and_whole() -> None:
    body = {"model": FAKE_MODEL, "prompt": ["a", "bc"], "n": 2, "return_token_ids": True}
    reply = FakeReply(texts=("one", "two!"))
    whole = _whole(body, "/v1/completions", reply)
    assert [choice["text"] for choice in whole["choices"]] == ["one", "two!"] * 2
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice.get("prompt_token_ids") for choice in whole["choices"]] == [[256, 97], None, [256, 98, 99], None]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (5, 18)
    chunks = _streamed(body, "/v1/completions", reply)
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["one", "two!"] * 2
    prompts = {
        chunk["choices"][0]["index"]: chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk
    }
    assert prompts == {0: [256, 97], 2: [256, 98, 99]}


def test_events_without_anything_to_say_make_no_chunk() -> None:
    # One byte an event: the first bytes of "é" and of "€" show nothing yet.
    chunks = _streamed(CHAT, reply=FakeReply(texts=("é€",), chunk=1))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "é"},
        {"content": "€"},
        {},
    ]


def _end(reason: FinishReason, error: RequestFailedError | None = None) -> Finish:
    return Finish(reason, Usage(1, 1, 0), "", Timings(0, 0, 0), error=error)


def test_other_ends_are_errors() -> None:
    raise_failure(_end(FinishReason.STOP))
    raise_failure(_end(FinishReason.LENGTH))
    with pytest.raises(DrainingError):
        raise_failure(_end(FinishReason.CANCELLED))
    with pytest.raises(RequestFailedError, match="boom"):
        raise_failure(_end(FinishReason.ERROR, RequestFailedError("boom")))
    with pytest.raises(RequestFailedError):
        raise_failure(_end(FinishReason.ERROR))


def test_tokens_that_are_part_of_a_character_are_written_as_bytes() -> None:
    assert [token_string(FakeText(), i) for i in (72, 0xE2, END_OF_TEXT)] == ["H", "bytes:\\xe2", "<|endoftext|>"]


def test_minus_infinity_is_written_as_openai_does() -> None:
    entries: Sequence[TokenLogprobs] = [TokenLogprobs(72, -0.1, ((73, float("-inf")),))]
    assert ChatShape(FakeText()).logprobs(entries, 0)["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    assert CompletionShape(FakeText()).logprobs(entries, 0)["top_logprobs"] == [{"H": -0.1, "I": -9999.0}]


def test_alternatives_with_the_same_text_keep_the_chosen_one() -> None:
    class Same(FakeText):
        def token_bytes(self, token_id: int) -> bytes:
            return b"x"

    entries = [TokenLogprobs(5, -2.0, ((1, -0.1), (5, -2.0)))]
    assert CompletionShape(Same()).logprobs(entries, 0)["top_logprobs"] == [{"x": -2.0}]


def _calls(count: int) -> list[GenerateCall]:
    params = SamplingParams()
    return [GenerateCall(call_id=str(i), model=FAKE_MODEL, prompt_token_ids=(1,), params=params) for i in range(count)]


def test_merged_calls_close_when_one_fails_while_the_other_has_an_event_ready() -> None:
    async def run() -> None:
        gateway = FakeGateway(FakeReply(refusal=QueueFullError("full")), FakeReply())
        with pytest.raises(QueueFullError):
            await anext(merged_events(gateway, _calls(2)))
        assert (gateway.open, gateway.aborted) == (set(), ["1"])

    asyncio.run(run())


def test_merged_calls_all_close_when_one_fails() -> None:
    async def run() -> None:
        gateway = FakeGateway(FakeReply(hold_after=1), FakeReply(refusal=QueueFullError("full"), first_delay_s=0.01))
        events = merged_events(gateway, _calls(2))
        assert (await anext(events)).index == 0
        with pytest.raises(QueueFullError):
            await anext(events)
        assert (gateway.open, gateway.aborted) == (set(), ["0"])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
