"""Malformed bodies: each is answered 400 with the name of the field, before any SSE header, and the server goes on."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.http import build_http_app
from espalier.cluster.ingress.openai_models import WireModel
from tests.support.bad_requests import OUT_OF_RANGE
from tests.support.fakes import FAKE_MODEL, FakeGateway
from tests.support.http_server import running

CHAT = {"model": FAKE_MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": FAKE_MODEL, "prompt": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CALL = {"type": "function", "function": {"name": "f", "arguments": "[1]"}}

# (fields on top of a good body, the `param` of the answer)
CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_k": 1.0}, "top_k"),
    ({"top_k": -1}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"1": "2"}}, "logit_bias.1"),
    ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"priority": 2**31}, "priority"),
    ({"timeout": 0}, "timeout"),
    ({"session_id": ""}, "session_id"),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": ["m"]}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "hi", "mood": 1}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 16 * 4096}]}, "messages"),
    ({"tools": [{"type": "search"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"temprature": 1}, "temprature"),
    ({"top_p": 0.9, "": 1}, ""),
    ({"cl\u00e9\n": 1}, "cl\\xe9\\n"),
    ({"x" * 1000: 1}, "x" * 64),
]
COMPLETION_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, 2.5]}, "prompt[1]"),
    ({"prompt": [100_000]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": [1] * 4096}, "prompt"),
    ({"prompt": "x" * (16 * 4096 + 1)}, "prompt"),
    ({"prompt": ["x", "x" * (16 * 4096 + 1)]}, "prompt[1]"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"messages": CHAT["messages"]}, "messages"),
]
# Bodies that are no JSON object at all: nothing to name.
NOT_JSON = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"model": "fake-model", "prompt": "\xff"}',
    b'{"model": "fake-model", "prompt": "\\ud800"}',
    b'{"model": "fake-model", "prompt": "a", "temperature": NaN}',
    b'{"model": "fake-model", "prompt": "a", "temperature": -Infinity}',
    b'{"model": "fake-model", "prompt": "a"} {}',
    b'{"a":' * 20_000,
]


@pytest.fixture(scope="module")
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture(scope="module")
def client(gateway: FakeGateway) -> Iterator[httpx.Client]:
    with running(build_http_app(gateway, GatewayConfig())) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture(autouse=True)
def _server_lives(client: httpx.Client, gateway: FakeGateway) -> Iterator[None]:
    accepted = len(gateway.calls)
    yield
    assert len(gateway.calls) == accepted, "a bad request was accepted"
    assert client.get("/health").status_code == 200


def _refused(response: httpx.Response, param: str | None) -> None:
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "invalid_request")
    assert error["message"]
    assert param is None or error["message"].startswith(param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), CHAT_FAULTS, ids=str)
def test_chat(client: httpx.Client, fields: dict[str, Any], param: str, stream: bool) -> None:
    body = CHAT | ({"stream": True} if stream and "stream_options" not in fields else {}) | fields
    _refused(client.post("/v1/chat/completions", json=body), param)


@pytest.mark.parametrize(("fields", "param"), COMPLETION_FAULTS, ids=lambda value: str(value)[:60])
def test_completions(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    _refused(client.post("/v1/completions", json=TEXT | fields), param)


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE, ids=str)
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_out_of_range(client: httpx.Client, path: str, body: dict[str, Any], field: str, value: Any) -> None:
    if isinstance(value, dict):
        value = {str(token_id): bias for token_id, bias in value.items()}
    _refused(client.post(path, json=body | {field: value}), field)


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: str(body[:60]))
def test_no_json(client: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    _refused(client.post("/v1/completions", content=body, headers=headers), None)


@pytest.mark.parametrize("field", ["model", "messages"])
def test_missing_fields(client: httpx.Client, field: str) -> None:
    _refused(client.post("/v1/chat/completions", json={k: v for k, v in CHAT.items() if k != field}), field)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_another_content_type(client: httpx.Client, content_type: str) -> None:
    response = client.post("/v1/completions", content=b"{}", headers={"content-type": content_type})
    _refused(response, "content-type")


def _kinds(base: type[WireModel] = WireModel) -> Iterator[type[WireModel]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


@pytest.mark.parametrize("kind", list(_kinds()), ids=lambda kind: kind.__name__)
def test_a_large_body_has_few_faults(kind: type[WireModel]) -> None:
    # Making a fault takes microseconds and a kilobyte, on the event loop; a body has room for millions.
    many = {f"key{i}": object() for i in range(5000)}
    bodies = [
        many,
        *({name: [object()] * 5000} for name in kind.model_fields),
        *({name: many} for name in kind.model_fields),
    ]
    for body in bodies:
        try:
            kind.model_validate(body)
        except ValidationError as error:
            assert error.error_count() < 20, error.errors()[:20]


def test_a_number_too_large_for_a_double(client: httpx.Client) -> None:
    body = b'{"model": "fake-model", "prompt": "a", "temperature": 1e999}'
    headers = {"content-type": "application/json; charset=utf-8"}
    _refused(client.post("/v1/completions", content=body, headers=headers), "temperature")


def test_a_session_header_too_long(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json=TEXT, headers={"x-session-id": "s" * 257})
    _refused(response, "x-session-id")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": FAKE_MODEL}, "prompt"),
        ("/tokenize", {"model": FAKE_MODEL, "prompt": 5}, "prompt"),
        ("/tokenize", {"model": FAKE_MODEL, "messages": []}, "messages"),
        ("/tokenize", {"model": FAKE_MODEL, "prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/detokenize", {"model": FAKE_MODEL, "tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"model": FAKE_MODEL, "tokens": [100_000]}, "tokens"),
        ("/detokenize", {"model": FAKE_MODEL, "tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1]}, "model"),
    ],
)
def test_tokenize_and_detokenize(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    _refused(client.post(path, json=body), param)
