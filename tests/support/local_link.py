"""A ReplicaLink in this process: an EngineReplica, by default around a FakeEngine, and the things that can go wrong between it and a gateway."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

from espalier.cluster.config import ServedModel
from espalier.cluster.messages import ReplicaDescription, ReplicaReport
from espalier.cluster.origin import Origin
from espalier.cluster.replica import EngineReplica
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import ReplicaLostError
from espalier.replicas.request import Request, TokenEvent
from tests.support.fake_engine import INFO, FakeEngine

MODEL = ServedModel(name="fake-model", engine=EngineConfig(model_path=Path("nowhere")))


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; raises TimeoutError after 10 s."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - conditions on many objects, which have no event in common
            await asyncio.sleep(0.001)


class LocalLink:
    """alter: changes the events of each report on their way. hold_submit: submits wait until it is set.

    Make it inside a running event loop. kill() breaks everything at once, as kill -9 would.
    """

    def __init__(self, replica_id: str, replica: EngineReplica | None = None) -> None:
        self.replica_id = replica_id
        self.engine = FakeEngine()
        self.replica = replica or EngineReplica(MODEL, None, lambda _: (self.engine, INFO))
        self.alter: Callable[[tuple[TokenEvent, ...]], tuple[TokenEvent, ...]] = lambda events: events
        self.hold_submit = asyncio.Event()
        self.hold_submit.set()
        self._killed = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        self._killed.set_result(None)

    async def describe(self) -> ReplicaDescription:
        self._check()
        return await self.replica.describe()

    async def reports(self) -> AsyncGenerator[ReplicaReport, None]:
        stream = self.replica.attach("gateway")
        try:
            while True:
                report = asyncio.ensure_future(anext(stream))
                try:
                    await asyncio.wait((report, self._killed), return_when=asyncio.FIRST_COMPLETED)
                    self._check()
                except BaseException:
                    report.cancel()
                    raise
                yield replace(report.result(), events=self.alter(report.result().events))
        finally:
            await asyncio.sleep(0)
            await stream.aclose()

    async def renew(self) -> None:
        self._check()
        await self.replica.renew("gateway")

    async def submit(self, request: Request, origin: Origin | None = None) -> None:
        self._check()
        await self.hold_submit.wait()
        await self.replica.submit("gateway", request, origin, replica=self.replica_id)

    async def abort(self, request_id: str) -> None:
        self._check()
        await self.replica.abort(request_id)

    def _check(self) -> None:
        if self._killed.done():
            raise ReplicaLostError(f"replica {self.replica_id} is dead")
