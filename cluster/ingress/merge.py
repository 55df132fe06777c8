"""Several generate calls as one stream of events, as a batch of prompts needs it. Knows no wire."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from espalier.cluster.call import ChoiceEvent, GenerateCall, GenerateGateway


async def merged_events(gateway: GenerateGateway, calls: Sequence[GenerateCall]) -> AsyncGenerator[ChoiceEvent, None]:
    """Events of all calls as they come; choice i of call c has index c * n + i, `n` being the same for all.

    The first call that fails ends the stream with its error. However it ends, every call is closed.
    """
    if len(calls) == 1:
        async with aclosing(gateway.generate(calls[0])) as events:
            async for event in events:
                yield event
        return
    streams = [gateway.generate(call) for call in calls]
    waiting = {asyncio.create_task(_next(stream)): position for position, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: waiting[task]):
                position = waiting.pop(task)
                item = task.result()
                if item is not None:
                    waiting[asyncio.create_task(_next(streams[position]))] = position
                    yield replace(item, index=position * calls[position].n + item.index)
    finally:
        # A generator that is being awaited cannot be closed: end the waits first.
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[ChoiceEvent, None]) -> ChoiceEvent | None:
    return await anext(stream, None)
