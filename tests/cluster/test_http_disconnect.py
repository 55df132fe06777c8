"""A client that leaves, at any point, over a real socket: its call is closed within a moment, counted, and nothing is logged as an error."""

import itertools
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.http import build_http_app
from tests.support.fakes import FAKE_MODEL, FakeGateway, FakeReply
from tests.support.http_server import running
from tests.support.waiting import wait_until

CHAT = {"model": FAKE_MODEL, "messages": [{"role": "user", "content": "hi"}]}
BATCH = {"model": FAKE_MODEL, "prompt": ["a", "b", "c"], "n": 2}


def _leave(url: str, path: str, body: dict[str, Any], gateway: FakeGateway, num_calls: int) -> None:
    """Sends the request, waits until all its calls run, and hangs up."""
    parts, payload = httpx.URL(url), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {parts.host}\r\ncontent-length: {len(payload)}\r\n\r\n"
    with socket.create_connection((parts.host, parts.port)) as connection:
        connection.sendall(head.encode() + payload)
        wait_until(lambda: len(gateway.open) == num_calls, "all calls are open", poll_s=0.005)


@pytest.fixture
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield
    assert caplog.records == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 1, 3])
@pytest.mark.parametrize(
    ("path", "body", "num_calls"), [("/v1/chat/completions", CHAT, 1), ("/v1/completions", BATCH, 3)]
)
@pytest.mark.usefixtures("no_errors")
def test_leaving_closes_every_call(
    path: str, body: dict[str, Any], num_calls: int, hold_after: int, stream: bool
) -> None:
    gateway = FakeGateway(FakeReply(hold_after=hold_after))
    with running(build_http_app(gateway, GatewayConfig())) as url:
        _leave(url, path, {**body, "stream": stream}, gateway, num_calls)
        wait_until(lambda: gateway.metrics.disconnects == ["http"], "the disconnect is counted", 2, poll_s=0.005)
        assert gateway.open == set()
        assert len(gateway.aborted) == num_calls
        wait_until(lambda: gateway.metrics.http == [(path, 499)], "the call is counted", poll_s=0.005)


@pytest.mark.usefixtures("no_errors")
def test_leaving_between_keepalives() -> None:
    gateway = FakeGateway(FakeReply(hold_after=0))
    with running(build_http_app(gateway, GatewayConfig(keepalive_s=0.01))) as url:
        with (
            httpx.Client(base_url=url) as client,
            client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
        ):
            assert response.status_code == 200
            lines = response.iter_lines()
            assert next(lines) == ": keepalive"
        wait_until(lambda: gateway.metrics.disconnects == ["http"], "the disconnect is counted", 2, poll_s=0.005)
        assert len(gateway.aborted) == 1


@pytest.mark.usefixtures("no_errors")
def test_leaving_in_the_middle_of_a_stream() -> None:
    gateway = FakeGateway(FakeReply(hold_after=2))
    with running(build_http_app(gateway, GatewayConfig())) as url:
        with (
            httpx.Client(base_url=url) as client,
            client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
        ):
            lines = (line for line in response.iter_lines() if line)
            assert len(list(itertools.islice(lines, 3))) == 3
        wait_until(lambda: gateway.metrics.disconnects == ["http"], "the disconnect is counted", 2, poll_s=0.005)
        assert (gateway.open, len(gateway.aborted)) == (set(), 1)


@pytest.mark.usefixtures("no_errors")
def test_leaving_half_way_through_the_body() -> None:
    gateway = FakeGateway()
    with running(build_http_app(gateway, GatewayConfig())) as url:
        parts = httpx.URL(url)
        with socket.create_connection((parts.host, parts.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        wait_until(lambda: gateway.metrics.http == [("/v1/completions", 499)], "the call is counted", poll_s=0.005)
        assert gateway.calls == []


def test_fifty_leave_and_the_next_is_served() -> None:
    gateway = FakeGateway(*[FakeReply(hold_after=count % 4) for count in range(50)], FakeReply())
    with running(build_http_app(gateway, GatewayConfig())) as url:
        for count in range(50):
            _leave(url, "/v1/chat/completions", {**CHAT, "stream": count % 2 == 0}, gateway, 1)
            wait_until(lambda: not gateway.open, "no call is open", 2, poll_s=0.005)
        with httpx.Client(base_url=url) as client:
            reply = client.post("/v1/chat/completions", json=CHAT).json()
        assert reply["choices"][0]["message"]["content"] == "Hello, world."
        assert len(gateway.aborted) == 50
