"""The wait before the first event, keepalive comments, error events, and that streams are closed."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from espalier.cluster.ingress.sse import DONE, KEEPALIVE, Opening, data_frame, sse_frames
from espalier.replicas.errors import QueueFullError, ReplicaLostError


class _Source:
    """A stream of numbers; `gate` holds the first one back."""

    def __init__(self, count: int = 3, error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.closed = False
        self._count = count
        self._error = error

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            await self.gate.wait()
            for number in range(self._count):
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


async def _render(events: AsyncGenerator[int, None]) -> AsyncGenerator[dict[str, Any], None]:
    async for number in events:
        yield {"number": number}


def _frames(opening: Opening[int], failures: list[str], keepalive_s: float = 60.0) -> AsyncGenerator[bytes, None]:
    return sse_frames(opening, _render, keepalive_s=keepalive_s, failed=failures.append)


def test_events_follow_each_other_and_done() -> None:
    async def run() -> None:
        source, failures = _Source(), []
        source.gate.set()
        opening = Opening(source.stream())
        assert await opening.within(10.0)
        frames = [frame async for frame in _frames(opening, failures)]
        assert frames == [*(data_frame({"number": n}) for n in range(3)), DONE]
        assert failures == []
        assert source.closed

    asyncio.run(run())


def test_comments_until_the_first_event_and_none_lost() -> None:
    async def run() -> None:
        source = _Source()
        opening = Opening(source.stream())
        assert not await opening.within(0.0)
        frames = _frames(opening, [], keepalive_s=0.001)
        assert [await anext(frames) for _ in range(4)] == [KEEPALIVE] * 4
        source.gate.set()
        rest = [frame async for frame in frames if frame != KEEPALIVE]
        assert rest == [*(data_frame({"number": n}) for n in range(3)), DONE]

    asyncio.run(run())


def test_a_refusal_is_raised_by_the_wait() -> None:
    async def run() -> None:
        source = _Source(count=0, error=QueueFullError("full"))
        source.gate.set()
        opening = Opening(source.stream())
        with pytest.raises(QueueFullError):
            await opening.within(10.0)
        await opening.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("count", [0, 2])
def test_a_late_error_is_an_event(count: int) -> None:
    async def run() -> None:
        source, failures = _Source(count, ReplicaLostError("gone")), []
        opening = Opening(source.stream())
        assert not await opening.within(0.0)
        frames = _frames(opening, failures)
        assert await anext(frames) == KEEPALIVE
        source.gate.set()
        rest = [frame async for frame in frames]
        assert len(rest) == count + 2
        assert json.loads(rest[-2].removeprefix(b"data: "))["error"]["code"] == "replica_lost"
        assert rest[-1] == DONE
        assert failures == ["replica_lost"]

    asyncio.run(run())


def test_an_unexpected_error_shows_no_internals() -> None:
    async def run() -> None:
        source = _Source(1, RuntimeError("secret"))
        source.gate.set()
        opening = Opening(source.stream())
        await opening.within(10.0)
        text = b"".join([frame async for frame in _frames(opening, [])])
        assert b"internal_error" in text
        assert b"secret" not in text

    asyncio.run(run())


@pytest.mark.parametrize("state", ["untouched", "waiting", "first there", "half read"])
def test_closing_reaches_the_stream_wherever_it_stands(state: str) -> None:
    async def run() -> None:
        source = _Source()
        opening = Opening(source.stream())
        if state != "untouched":
            await opening.within(0.001)
        if state in ("first there", "half read"):
            source.gate.set()
            assert await opening.within(10.0)
        if state == "half read":
            frames = _frames(opening, [])
            await anext(frames)
            await frames.aclose()
        await opening.aclose()
        assert source.closed == (state != "untouched")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_frames_hold_text_as_it_is() -> None:
    assert data_frame({"a": "é\n\u2028"}) == 'data: {"a":"é\\n\u2028"}\n\n'.encode()
