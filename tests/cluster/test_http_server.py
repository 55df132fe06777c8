"""HttpServer: connections of clients that hang, ports in use, and requests that arrive while it stops."""

import asyncio
import socket

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from espalier.cluster.call import STALLED_S
from espalier.cluster.ingress.http_server import HttpServer, listen
from tests.support.local_link import until

ASK = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


def test_connections_of_clients_that_take_nothing_are_reset_and_small_answers_do_not_wait() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == STALLED_S * 1000
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_port_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize("used_before", [False, True], ids=["new connection", "idle connection"])
def test_a_request_that_arrives_while_it_stops_is_answered(used_before: bool) -> None:
    async def answer(_: Request) -> PlainTextResponse:
        return PlainTextResponse("the gateway is stopping", status_code=503)

    async def run() -> None:
        listener = listen("127.0.0.1", 0)
        address = listener.getsockname()
        server = HttpServer(Starlette(routes=[Route("/", answer)]))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*address)
        if used_before:
            writer.write(ASK)
            first = await reader.readuntil(b"stopping")
            assert first.startswith(b"HTTP/1.1 503") and b"connection: close" not in first
        else:
            await until(lambda: bool(server.server_state.connections))
        server.should_exit = True
        await until(lambda: not server.servers[0].is_serving())
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        writer.write(ASK)
        last = await reader.readuntil(b"stopping")
        assert last.startswith(b"HTTP/1.1 503") and b"connection: close" in last
        assert await reader.read() == b""
        writer.close()
        await serving

    asyncio.run(run())
