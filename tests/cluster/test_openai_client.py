"""The `openai` package as a client, against a real server: what it sends is taken, what it reads is there."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.http import build_http_app
from espalier.replicas.errors import QueueFullError, ReplicaLostError
from espalier.replicas.token_hash import token_sha256
from tests.support.fakes import END_OF_TEXT, FAKE_MODEL, FakeGateway, FakeReply
from tests.support.http_server import running

TEXT = "Paris, of course."
HI: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Capital of France?"}]


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway(FakeReply(texts=(TEXT,), cached_tokens=3))


@pytest.fixture
def client(gateway: FakeGateway) -> Iterator[openai.OpenAI]:
    with (
        running(build_http_app(gateway, GatewayConfig())) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=FAKE_MODEL, messages=HI, temperature=0, user="u", logprobs=True, top_logprobs=1, max_completion_tokens=50
    )
    choice = reply.choices[0]
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert choice.logprobs.content[0].top_logprobs[0].token == "P"
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert choice.model_extra is not None
    assert choice.model_extra["espalier"]["token_sha256"] == token_sha256([*TEXT.encode(), END_OF_TEXT])


def test_a_reply_can_be_sent_back_as_history(client: openai.OpenAI, gateway: FakeGateway) -> None:
    message = client.chat.completions.create(model=FAKE_MODEL, messages=HI).choices[0].message
    history: Any = [*HI, message, {"role": "user", "content": "Thanks."}]
    client.chat.completions.create(model=FAKE_MODEL, messages=history)
    assert gateway.fake_text.rendered[-1]["messages"][2] == {"role": "assistant", "content": TEXT}


def test_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=FAKE_MODEL, messages=HI, stream=True, stream_options={"include_usage": True}, seed=11
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(TEXT) + 1
    ended = chunks[-2]
    assert ended.choices[0].finish_reason == "stop"
    assert ended.model_extra is not None and ended.model_extra["espalier"]["seed"] == 11


def test_own_fields_go_through_extra_body(client: openai.OpenAI, gateway: FakeGateway) -> None:
    reply = client.chat.completions.create(
        model=FAKE_MODEL,
        messages=HI,
        extra_body={"top_k": 5, "min_p": 0.1, "return_token_ids": True, "draft": False, "session_id": "s"},
    )
    assert (gateway.calls[0].params.top_k, gateway.calls[0].session) == (5, "s")
    assert reply.choices[0].model_extra is not None
    assert reply.choices[0].model_extra["token_ids"] == [*TEXT.encode(), END_OF_TEXT]


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=FAKE_MODEL, prompt=["a", "b"], max_tokens=50, logprobs=1)
    assert [choice.text for choice in reply.choices] == [TEXT, TEXT]
    assert reply.choices[1].logprobs is not None and reply.choices[1].logprobs.tokens is not None
    assert reply.choices[1].logprobs.tokens[0] == "P"
    stream = client.completions.create(model=FAKE_MODEL, prompt="a", max_tokens=50, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [FAKE_MODEL]
    assert client.models.retrieve(FAKE_MODEL).owned_by == "espalier"


def test_errors_are_the_kinds_that_clients_catch(client: openai.OpenAI, gateway: FakeGateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=FAKE_MODEL, messages=HI, tool_choice="required")
    assert (caught.value.param, caught.value.code) == ("tool_choice", "invalid_request")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    gateway.replies = [FakeReply(refusal=QueueFullError("full"))]
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=FAKE_MODEL, messages=HI, stream=True)
    gateway.replies = [FakeReply(break_after=2, break_with=ReplicaLostError("its replica was lost"))]
    stream = client.chat.completions.create(model=FAKE_MODEL, messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="its replica was lost"):
        list(stream)
