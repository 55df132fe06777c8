"""Server-sent events: the wait for a stream's first event, the frames, and the response that sends them. Knows no OpenAI object."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from espalier.cluster.ingress.disconnect import while_connected
from espalier.cluster.ingress.errors import error_body, wire_error

KEEPALIVE = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold events back otherwise.
    (b"x-accel-buffering", b"no"),
]

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
E = TypeVar("E")


class Opening(Generic[E]):
    """A stream whose first event is awaited in slices of time, without losing it when a slice ends.

    Usage: `await within(s)` until it returns True, then iterate over `events()`. Always `aclose()`.
    """

    def __init__(self, stream: AsyncGenerator[E, None]) -> None:
        self._stream = stream
        self._first: asyncio.Task[E | None] | None = None

    async def within(self, seconds: float) -> bool:
        """Waits for the first event, or the end, or the refusal, at most `seconds` more; whether it came. A refusal is raised."""
        if self._first is None:
            self._first = asyncio.create_task(_first(self._stream))
        await asyncio.wait((self._first,), timeout=seconds)
        if self._first.done():
            self._first.result()
        return self._first.done()

    async def events(self) -> AsyncGenerator[E, None]:
        """All events, the first one included."""
        assert self._first is not None and self._first.done(), "the first event has not come yet"
        first = self._first.result()
        if first is not None:
            yield first
            async for event in self._stream:
                yield event

    async def aclose(self) -> None:
        """Closes the stream, wherever it stands."""
        if self._first is not None:
            # A generator that is being awaited cannot be closed: end the wait first. Its outcome is nobody's any more.
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._stream.aclose()


async def _first(stream: AsyncGenerator[E, None]) -> E | None:
    return await anext(stream, None)


def data_frame(value: dict[str, Any]) -> bytes:
    """One event with a JSON object as its data."""
    return b"data: " + _JSON.encode(value).encode() + b"\n\n"


async def sse_frames(
    opening: Opening[E],
    render: Callable[[AsyncGenerator[E, None]], AsyncGenerator[dict[str, Any], None]],
    *,
    keepalive_s: float,
    failed: Callable[[str], None],
) -> AsyncGenerator[bytes, None]:
    """The frames of a reply: a comment every `keepalive_s` until the first event comes, what `render` makes of the events, `[DONE]`.

    The caller has waited once already: when the first event is not there now, a comment is due. An error becomes an error event, and
    `failed` is told its code.
    """
    try:
        came = await opening.within(0.0)
        while not came:
            yield KEEPALIVE
            came = await opening.within(keepalive_s)
        async with aclosing(opening.events()) as events, aclosing(render(events)) as chunks:
            async for chunk in chunks:
                yield data_frame(chunk)
    except Exception as error:
        shown = wire_error(error)
        failed(shown.code)
        yield data_frame(error_body(shown))
    yield DONE


class EventStreamResponse(Generic[E]):
    """An ASGI response of frames, which closes the stream behind them however it ends; raises ClientDisconnectedError when the client leaves."""

    def __init__(self, opening: Opening[E], frames: AsyncGenerator[bytes, None]) -> None:
        self._opening = opening
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._pump(send), receive)
        finally:
            await self._frames.aclose()
            await self._opening.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
