"""GatewayServer's stop: HTTP connections that are open are answered before it is over."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from espalier.cluster import gateway_server
from espalier.cluster.config import ClusterConfig, GatewayConfig
from espalier.cluster.gateway_server import GatewayServer
from espalier.cluster.ingress import http_server
from espalier.cluster.logs import LogConfig
from tests.support.fake_engine import load_fake_text
from tests.support.local_link import MODEL, until

ASK = b'POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 28\r\n\r\n{"model":"m","prompt":"a b"}'


class EndlessDiscovery:
    """In place of Discovery, which needs Ray."""

    def __init__(self, *_: object) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()


class Kept(GatewayServer):
    """Serve awaits `__del__`; here nobody would."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Coroutine[None, None, Kept]]:
    monkeypatch.setattr(gateway_server, "Discovery", EndlessDiscovery)
    monkeypatch.setattr(http_server, "CLOSE_S", 1.0)

    async def make() -> Kept:
        server = Kept.__new__(Kept)
        config = ClusterConfig(models=(MODEL,), gateway=GatewayConfig(http_port=0, grpc_port=0))
        await server.__init__(config, LogConfig(), load_fake_text)  # type: ignore[misc]
        return server

    return make


def test_it_waits_for_the_http_server(make_server: Callable[[], Coroutine[None, None, Kept]]) -> None:
    async def run() -> None:
        server = await make_server()
        reader, writer = await asyncio.open_connection("127.0.0.1", (await server.ports()).http)
        writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        await reader.readuntil(b'"ok"}')
        stopping = asyncio.create_task(server.close())
        await until(lambda: not server._http.servers[0].is_serving())
        writer.write(ASK)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 4")
        assert not stopping.done()
        await stopping
        assert server._http_task.done()
        writer.close()

    asyncio.run(run())


def test_a_request_that_never_comes_in_whole_is_refused_in_bounded_time(
    make_server: Callable[[], Coroutine[None, None, Kept]],
) -> None:
    async def run() -> None:
        server = await make_server()
        reader, writer = await asyncio.open_connection("127.0.0.1", (await server.ports()).http)
        writer.write(ASK[:-5])
        await until(lambda: bool(server._http.server_state.tasks))
        async with asyncio.timeout(10):
            await server.close()
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503") and b"the gateway is stopping" in answer
        writer.close()

    asyncio.run(run())
