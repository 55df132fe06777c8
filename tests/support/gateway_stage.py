"""A gateway over fake replicas in this process, with a clock that the test moves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from espalier.cluster.call import ChoiceEvent, GenerateCall
from espalier.cluster.config import ClusterConfig, GatewayConfig
from espalier.cluster.gateway import Gateway
from espalier.cluster.metrics import ClusterMetrics
from espalier.replicas.errors import (
    EngineError,
)
from espalier.replicas.request import FinishReason, SamplingParams
from espalier.replicas.token_hash import token_sha256
from tests.support.fake_engine import load_fake_text
from tests.support.local_link import MODEL, LocalLink, until

PROMPT = (5, 6, 7)


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A gateway with fake replicas. Inside a running event loop."""

    def __init__(self, *, replicas: int = 2, gateway: GatewayConfig | None = None, **options: Any) -> None:
        self.clock = Clock()
        config = ClusterConfig(models=(MODEL,), gateway=gateway or GatewayConfig())
        self.gateway = Gateway(
            config, {MODEL.name: load_fake_text(MODEL)}, ClusterMetrics(version="0"), clock=self.clock, **options
        )
        self.links = [LocalLink(f"replica-{i}") for i in range(replicas)]
        for link in self.links:
            self.gateway.fleet.add(MODEL.name, link)

    async def __aenter__(self) -> "Stage":
        await until(lambda: len(self.gateway.fleet.ready(MODEL.name)) == len(self.links))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.fleet.close()

    def call(self, **changes: Any) -> GenerateCall:
        values: dict[str, Any] = {"call_id": "call", "model": MODEL.name, "prompt_token_ids": PROMPT}
        params = changes.pop("params", SamplingParams(max_tokens=4, seed=9))
        return GenerateCall(**(values | changes), params=params)

    async def started(self, num: int = 1) -> None:
        """Wait until so many requests have reached the engines, all together."""
        await until(lambda: sum(len(link.engine.submitted) for link in self.links) >= num)

    def owner(self) -> LocalLink:
        """The replica that was given the last request."""
        return max(self.links, key=lambda link: link.engine.load().running)

    def round(self, times: int = 1) -> None:
        for _ in range(times):
            for link in self.links:
                link.engine.round()

    async def until_gone(self) -> None:
        """Wait until no engine runs anything and the gateway knows of no call."""
        await until(lambda: all(link.engine.load().running == 0 for link in self.links))
        assert self.gateway._admission.outstanding == 0
        assert not self.gateway._choices
        assert not any(replica.assigned for replica in self.gateway.fleet.all())


async def collect(stream: AsyncGenerator[ChoiceEvent, None]) -> list[ChoiceEvent]:
    async with aclosing(stream):
        return [event async for event in stream]


def begin(stage: Stage, **changes: Any) -> "asyncio.Task[list[ChoiceEvent]]":
    return asyncio.create_task(collect(stage.gateway.generate(stage.call(**changes))))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def ids(events: list[ChoiceEvent], index: int = 0) -> list[int]:
    return [token for event in events if event.index == index for token in event.event.token_ids]


def error_of(events: list[ChoiceEvent]) -> EngineError:
    finish = events[-1].event.finish
    assert finish is not None and finish.reason is FinishReason.ERROR and finish.error is not None
    assert finish.token_sha256 == token_sha256(ids(events))
    assert finish.usage.completion_tokens == len(ids(events))
    return finish.error
