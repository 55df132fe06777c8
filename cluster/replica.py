"""EngineReplica: the Serve deployment around one engine. Gateways attach to it with one stream each; it knows nothing of wires or routing.

Everything here runs on the replica's event loop; the engine's thread hands over its rounds through `_on_round` alone.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Protocol

from espalier.cluster.config import ServedModel, TraceConfig
from espalier.cluster.logs import LogConfig, configure_logging
from espalier.cluster.messages import ReplicaDescription, ReplicaReport
from espalier.cluster.origin import Origin
from espalier.cluster.outbox import Outboxes
from espalier.cluster.replica_spans import RequestTrail
from espalier.cluster.tracing import start_tracing
from espalier.replicas.errors import DrainingError, EngineError
from espalier.replicas.report import Load, RoundReport
from espalier.replicas.request import Request
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.stats import EngineStats

log = logging.getLogger(__name__)

# Also how old the load on a stream may be while there are no rounds.
HEARTBEAT_S = 1.0
STATS_PERIOD_S = 1.0
# Ray does not end a stream whose reader was killed; the reader has to tell that it lives. fleet.RENEW_PERIOD_S is how often it does.
LEASE_S = 15.0


class ReplicaEngine(Protocol):
    """What this file needs of replicas.engine.Engine. Methods may be called from any thread."""

    def start(self, sink: Callable[[RoundReport], None]) -> None: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def load(self) -> Load: ...

    def stats(self) -> EngineStats: ...

    def healthy(self) -> bool: ...

    def stop(self) -> None: ...


LoadEngine = Callable[[ServedModel], tuple[ReplicaEngine, ShardInfo]]
"""Loads the model. Raises EngineError when it may never serve: a refused checkpoint, weights that do not compute what they did before."""


class EngineReplica:
    """One model on one device. A model that may not serve leaves the replica up, so that it can tell why instead of being started for ever.

    logs: how this process logs; None leaves logging as it is. tracing: where its spans go; None means no spans.
    `replica` in the methods is for the router (request_router.PinnedRouter): it names this replica. Here only spans tell it.
    """

    def __init__(
        self, model: ServedModel, logs: LogConfig | None, load_engine: LoadEngine, tracing: TraceConfig | None = None
    ) -> None:
        if logs is not None:
            configure_logging(logs, f"replica-{os.getpid()}")
        self._loop = asyncio.get_running_loop()
        self._outboxes = Outboxes()
        self._trail = RequestTrail(model.name, start_tracing(tracing, "espalier-replica"))
        self._engine: ReplicaEngine | None = None
        try:
            self._engine, info = load_engine(model)
        except EngineError as error:
            log.error("the model may not serve", extra={"model": model.name, "reason": error.message})
            self._description = ReplicaDescription(info=None, failure=error, num_replicas=model.num_replicas)
        else:
            self._description = ReplicaDescription(info=info, failure=None, num_replicas=model.num_replicas)
            self._engine.start(self._on_round)

    async def describe(self, *, replica: str | None = None) -> ReplicaDescription:
        """What this replica is."""
        return self._description

    async def attach(self, gateway: str, *, replica: str | None = None) -> AsyncGenerator[ReplicaReport, None]:
        """The gateway's stream: a report a round with the events of its requests, and at least one every HEARTBEAT_S seconds.

        It ends when the gateway attaches anew, has not read for too long, or has not called `renew` for LEASE_S seconds.
        When it ends, in whatever way, the gateway's requests are aborted.
        """
        engine = self._require_engine()
        outbox, orphans = self._outboxes.attach(gateway, time.monotonic())
        self._abort_all(orphans)
        stats_due = 0.0
        try:
            while not outbox.broken and (now := time.monotonic()) - outbox.renewed_at < LEASE_S:
                stats = None
                if now >= stats_due:
                    stats, stats_due = engine.stats(), now + STATS_PERIOD_S
                yield ReplicaReport(load=engine.load(), events=outbox.take(), stats=stats)
                await outbox.wait(HEARTBEAT_S)
        finally:
            self._abort_all(self._outboxes.detach(gateway, outbox))

    async def renew(self, gateway: str, *, replica: str | None = None) -> None:
        """The gateway lives and still reads its stream."""
        self._outboxes.renew(gateway, time.monotonic())

    async def submit(
        self, gateway: str, request: Request, origin: Origin | None = None, *, replica: str | None = None
    ) -> None:
        """Take a request of an attached gateway. Raises what Engine.submit raises, and DrainingError when the gateway is not attached.

        origin: what logs and spans of it carry.
        """
        engine = self._require_engine()
        if not self._outboxes.own(request.request_id, gateway):
            raise DrainingError("the gateway is not attached to this replica")
        self._trail.taken(request, origin, replica or "")
        try:
            engine.submit(request)
        except BaseException as error:
            self._outboxes.disown(request.request_id)
            self._trail.refused(request, error)
            raise

    async def abort(self, request_id: str, *, replica: str | None = None) -> None:
        """Stop a request if it still runs; nothing more is reported of it."""
        self._abort_all([request_id])

    async def check_health(self) -> None:
        """Raises when work has stopped moving, so that Serve replaces this replica."""
        if self._engine is not None and not self._engine.healthy():
            raise RuntimeError("the engine has work and finishes no rounds")

    def __del__(self) -> None:
        # Serve calls this once, when no stream is attached any more.
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
        trail = getattr(self, "_trail", None)
        if trail is not None:
            trail.close()

    def _require_engine(self) -> ReplicaEngine:
        if self._engine is None:
            failure = self._description.failure
            raise DrainingError("" if failure is None else failure.message)
        return self._engine

    def _abort_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._outboxes.disown(request_id)
            if self._engine is not None:
                self._engine.abort(request_id)

    def _on_round(self, report: RoundReport) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: RoundReport) -> None:
        self._trail.ended(report.events)
        self._outboxes.deliver(report.events)
        self._outboxes.notify_all()
