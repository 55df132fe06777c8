"""The HTTP server of a gateway: how it listens, and how it stops, so that who was on the way in is still answered. Knows no route."""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier.cluster.call import STALLED_S

BACKLOG = 2048
# How long requests that were sent before the door closed may take to arrive: connections that seem idle are closed after it.
LINGER_S = 0.5
# After the drain nothing runs any more; this bounds the wait for requests that do not come in whole.
CLOSE_S = 2.0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # Connections inherit it: the kernel resets one whose peer is dead, or whose window has been shut for so long.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_S * 1000)
    # And this: an event loop may not see that they are TCP, and then small answers wait for the last one's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class HttpServer(uvicorn.Server):
    """Serves an app until `should_exit`. A request on a connection that was open then gets its answer, which the app may make a refusal."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._listens = True
        super().__init__(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=int(CLOSE_S),
            )
        )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and not self._listens:
                # A busy client would send its next request just as its connection is closed.
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_last)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more connections, and closes those that it has: busy ones after their answer, idle ones a little later."""
        for server in self.servers:
            server.close()
        self._listens = False
        await asyncio.sleep(LINGER_S)
        await super().shutdown(sockets)
