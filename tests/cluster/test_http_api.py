"""Routes, statuses, keys, limits, error bodies, counting and the log line."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress import http_front
from espalier.cluster.ingress.http import build_http_app
from espalier.replicas.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineError,
    QueueFullError,
    ReplicaLostError,
    RequestFailedError,
)
from tests.support.asgi_client import ask, sse_events
from tests.support.fakes import FAKE_MODEL, FakeGateway, FakeReply, fake_model

CHAT = {"model": FAKE_MODEL, "messages": [{"role": "user", "content": "a secret prompt"}]}
KEYED_ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{FAKE_MODEL}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/nowhere"),
]


def _ask(
    gateway: FakeGateway, method: str, path: str, config: GatewayConfig | None = None, **options: Any
) -> httpx.Response:
    return ask(build_http_app(gateway, config or GatewayConfig()), method, path, **options)


def _error(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_models() -> None:
    gateway = FakeGateway(models=[fake_model("a"), fake_model("org/b", max_context=77)])
    listed = _ask(gateway, "GET", "/v1/models").json()
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["a", "org/b"])
    one = _ask(gateway, "GET", "/v1/models/org/b").json()
    assert one == listed["data"][1]
    assert (one["object"], one["max_model_len"], one["espalier"]["quantization"]) == ("model", 77, "exl3")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models/other", None),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "other"}),
        ("POST", "/v1/completions", {"model": "other", "prompt": "x"}),
        ("POST", "/tokenize", {"model": "other", "prompt": "x"}),
        ("POST", "/detokenize", {"model": "other", "tokens": [1]}),
    ],
)
def test_an_unknown_model_is_404(method: str, path: str, body: Any) -> None:
    response = _ask(FakeGateway(), method, path, json=body)
    assert response.status_code == 404
    assert _error(response)["code"] == "model_not_found"


def test_tokenize_and_detokenize() -> None:
    gateway = FakeGateway()

    def post(path: str, **body: Any) -> Any:
        return _ask(gateway, "POST", path, json={"model": FAKE_MODEL, **body}).json()

    assert post("/tokenize", prompt="ab") == {"tokens": [256, 97, 98], "count": 3, "max_model_len": 4096}
    assert post("/tokenize", prompt="ab", add_special_tokens=False)["tokens"] == [97, 98]
    chat = post("/tokenize", messages=CHAT["messages"])["tokens"]
    assert gateway.fake_text.decode(chat).endswith("<|im_start|>assistant\n")
    bare = post("/tokenize", messages=CHAT["messages"], add_generation_prompt=False)["tokens"]
    assert chat[: len(bare)] == bare
    assert post("/detokenize", tokens=[97, 98, 256]) == {"prompt": "ab<|endoftext|>"}
    assert post("/detokenize", tokens=[97, 98, 256], skip_special_tokens=True) == {"prompt": "ab"}


def test_tools_are_left_out_when_the_client_chose_none() -> None:
    gateway = FakeGateway()
    tools = [{"type": "function", "function": {"name": "f"}}]
    _ask(gateway, "POST", "/v1/chat/completions", json={**CHAT, "tools": tools})
    _ask(gateway, "POST", "/v1/chat/completions", json={**CHAT, "tools": tools, "tool_choice": "none"})
    assert [rendered["tools"] for rendered in gateway.fake_text.rendered] == [tools, None]


def test_the_session_header_counts_unless_the_body_names_one() -> None:
    gateway = FakeGateway()
    headers = {"x-session-id": "h"}
    _ask(gateway, "POST", "/v1/chat/completions", json=CHAT, headers=headers)
    _ask(gateway, "POST", "/v1/chat/completions", json={**CHAT, "session_id": "b"}, headers=headers)
    assert [call.session for call in gateway.calls] == ["h", "b"]


def test_health_and_ready() -> None:
    gateway = FakeGateway()
    assert _ask(gateway, "GET", "/health").status_code == 200
    assert _ask(gateway, "HEAD", "/health").status_code == 200
    assert _ask(gateway, "GET", "/ready").json()["ready"] is True
    gateway.ready = False
    response = _ask(gateway, "GET", "/ready")
    assert (response.status_code, response.json()) == (503, {"ready": False, FAKE_MODEL: {"ready_replicas": 0}})
    gateway.ready, gateway.draining = True, True
    assert _ask(gateway, "GET", "/ready").status_code == 503
    assert _ask(gateway, "GET", "/health").status_code == 200


def test_metrics() -> None:
    response = _ask(FakeGateway(), "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert b"espalier_up 1" in response.content


@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("GET", "/v1"), ("POST", "/ready/"), ("GET", "/docs")])
def test_unknown_paths(method: str, path: str) -> None:
    response = _ask(FakeGateway(), method, path)
    assert (response.status_code, _error(response)["code"]) == (404, "unknown_url")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/chat/completions"), ("POST", "/ready"), ("PUT", "/tokenize")]
)
def test_wrong_methods(method: str, path: str) -> None:
    response = _ask(FakeGateway(), method, path)
    assert (response.status_code, _error(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"]


def test_no_cors() -> None:
    headers = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
    response = _ask(FakeGateway(), "OPTIONS", "/v1/chat/completions", headers=headers)
    assert response.status_code == 405
    response = _ask(FakeGateway(), "GET", "/v1/models", headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]


REFUSALS: list[tuple[EngineError, int, str | None]] = [
    (QueueFullError("full", retry_after_s=2.5), 429, "3"),
    (DrainingError("stopping"), 503, "5"),
    (RequestFailedError("failed"), 500, None),
    (ReplicaLostError("lost"), 502, None),
    (DeadlineExceededError("late"), 504, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "retry_after"), REFUSALS)
def test_a_refusal_has_its_status_streamed_or_not(
    error: EngineError, status: int, retry_after: str | None, stream: bool
) -> None:
    gateway = FakeGateway(FakeReply(refusal=error))
    response = _ask(gateway, "POST", "/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert response.headers["content-type"] == "application/json"
    assert (_error(response)["code"], _error(response)["message"]) == (error.code, error.message)
    assert not gateway.open


@pytest.mark.parametrize(
    "reply",
    [
        FakeReply(break_after=1, break_with=ReplicaLostError("lost")),
        FakeReply(end_error=ReplicaLostError("lost")),
    ],
)
def test_an_error_after_the_first_token(reply: FakeReply) -> None:
    response = _ask(FakeGateway(reply), "POST", "/v1/chat/completions", json=CHAT)
    assert (response.status_code, _error(response)["code"]) == (502, "replica_lost")
    response = _ask(FakeGateway(reply), "POST", "/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status_code == 200
    events = sse_events(response.text)
    assert events[1]["choices"][0]["delta"]["content"] == "Hell"
    assert events[-1]["error"]["code"] == "replica_lost"
    assert not any("espalier" in event for event in events)


def test_when_one_choice_fails_the_others_are_closed() -> None:
    gateway = FakeGateway(FakeReply(end_error=RequestFailedError("boom"), chunk=100))
    response = _ask(gateway, "POST", "/v1/chat/completions", json={**CHAT, "n": 3})
    assert response.status_code == 500
    assert len(gateway.aborted) == 1


def test_keepalives_before_a_late_first_token_and_then_an_error_event() -> None:
    config = GatewayConfig(keepalive_s=0.01)
    reply = FakeReply(refusal=QueueFullError("full"), first_delay_s=1.0)
    response = _ask(FakeGateway(reply), "POST", "/v1/chat/completions", config, json={**CHAT, "stream": True})
    assert response.status_code == 200
    assert response.text.startswith(": keepalive\n\n")
    assert sse_events(response.text)[0]["error"]["code"] == "queue_full"


def test_keepalives_stop_with_the_first_token() -> None:
    config = GatewayConfig(keepalive_s=0.01)
    reply = FakeReply(first_delay_s=1.0, gap_s=0.05)
    text = _ask(FakeGateway(reply), "POST", "/v1/chat/completions", config, json={**CHAT, "stream": True}).text
    assert text.startswith(": keepalive\n\n")
    assert ": keepalive" not in text[text.index("data: ") :]
    assert len(sse_events(text)) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_error_is_500_and_shows_nothing(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    gateway = FakeGateway(FakeReply(refusal=RuntimeError("internals")))
    response = _ask(gateway, "POST", "/v1/chat/completions", json={**CHAT, "stream": stream})
    assert (response.status_code, _error(response)["code"]) == (500, "internal_error")
    assert "internals" not in response.text
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_a_body_too_large_is_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_front, "MAX_BODY_BYTES", 1000)
    big = b'{"model": "' + b"x" * 2000 + b'"}'
    response = _ask(FakeGateway(), "POST", "/v1/completions", content=big)
    assert (response.status_code, _error(response)["code"]) == (413, "body_too_large")

    async def unannounced() -> Any:
        for _ in range(20):
            yield b"x" * 100

    response = _ask(FakeGateway(), "POST", "/v1/completions", content=unannounced())
    assert response.status_code == 413


@pytest.fixture
def keyed(tmp_path: Path) -> GatewayConfig:
    path = tmp_path / "keys"
    path.write_text("ada: key-of-ada\n")
    path.chmod(0o600)
    return GatewayConfig(api_key_file=path)


@pytest.mark.parametrize(("method", "path"), KEYED_ROUTES)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}])
def test_no_key_no_entry(keyed: GatewayConfig, method: str, path: str, headers: dict[str, str]) -> None:
    response = _ask(FakeGateway(), method, path, keyed, headers=headers, json=CHAT)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert (_error(response)["type"], _error(response)["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("headers", [{"authorization": "Bearer key-of-ada"}, {"x-api-key": "key-of-ada"}])
def test_a_key_opens(keyed: GatewayConfig, headers: dict[str, str]) -> None:
    assert _ask(FakeGateway(), "POST", "/v1/chat/completions", keyed, json=CHAT, headers=headers).status_code == 200
    assert _ask(FakeGateway(), "GET", "/metrics", keyed, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_no_key(keyed: GatewayConfig, path: str) -> None:
    assert _ask(FakeGateway(), "GET", path, keyed).status_code == 200


def test_accepted_keys_are_told_to_the_metrics(keyed: GatewayConfig) -> None:
    gateway = FakeGateway()
    build_http_app(gateway, GatewayConfig())
    assert gateway.metrics.num_api_keys is None
    build_http_app(gateway, keyed)
    assert gateway.metrics.num_api_keys is not None
    assert gateway.metrics.num_api_keys() == 1


def test_metrics_can_be_open(keyed: GatewayConfig) -> None:
    config = GatewayConfig(api_key_file=keyed.api_key_file, metrics_open=True)
    assert _ask(FakeGateway(), "GET", "/metrics", config).status_code == 200
    assert _ask(FakeGateway(), "GET", "/v1/models", config).status_code == 401


def test_requests_are_counted_by_route_and_status() -> None:
    gateway = FakeGateway()
    app = build_http_app(gateway, GatewayConfig())
    ask(app, "POST", "/v1/chat/completions", json={**CHAT, "stream": True})
    ask(app, "POST", "/v1/completions", json={})
    ask(app, "GET", "/v1/models/other")
    ask(app, "GET", "/v1/models/x%2Fy")
    ask(app, "GET", "/somewhere/else")
    ask(app, "GET", "/tokenize")
    assert gateway.metrics.http == [
        ("/v1/chat/completions", 200),
        ("/v1/completions", 400),
        ("/v1/models/{model}", 404),
        ("/v1/models/{model}", 404),
        ("other", 404),
        ("/tokenize", 405),
    ]


def test_a_served_call_leaves_its_log_line_to_the_gateway_and_names_its_client(
    keyed: GatewayConfig, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = FakeGateway()
    with caplog.at_level(logging.INFO, logger=http_front.__name__):
        headers = {"authorization": "Bearer key-of-ada"}
        response = _ask(gateway, "POST", "/v1/chat/completions", keyed, json=CHAT, headers=headers)
        _ask(gateway, "GET", "/health", keyed)
    assert [record for record in caplog.records if record.name == http_front.__name__] == []
    assert [call.client for call in gateway.calls] == ["ada"]
    assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"


def test_a_refused_request_has_one_log_line_without_prompt_or_key(
    keyed: GatewayConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=http_front.__name__):
        headers = {"authorization": "Bearer key-of-ada"}
        body = {**CHAT, "temperature": -1}
        response = _ask(FakeGateway(), "POST", "/v1/chat/completions", keyed, json=body, headers=headers)
    [line] = [record for record in caplog.records if record.name == http_front.__name__]
    said = {key: vars(line)[key] for key in ("method", "route", "status", "client", "request", "error")}
    assert said == {
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 400,
        "client": "ada",
        "request": response.headers["x-request-id"],
        "error": "invalid_request",
    }
    assert "secret" not in str(vars(line))
    assert "key-of-ada" not in str(vars(line))


def test_the_loop_is_free_while_a_template_is_rendered() -> None:
    """Two requests whose templates wait for each other: on the loop's own thread the first would block the second for ever."""
    barrier = threading.Barrier(2, timeout=10)
    gateway = FakeGateway()
    encode = gateway.fake_text.encode

    def meet(text: str, *, add_special_tokens: bool) -> list[int]:
        barrier.wait()
        return encode(text, add_special_tokens=add_special_tokens)

    gateway.fake_text.encode = meet  # type: ignore[method-assign]

    async def run() -> list[int]:
        transport = httpx.ASGITransport(build_http_app(gateway, GatewayConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT) for _ in range(2)))
        return [reply.status_code for reply in replies]

    assert asyncio.run(run()) == [200, 200]
