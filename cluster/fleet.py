"""Fleet: the replicas attached to one gateway, what each last reported, and which of them may be given requests. Knows no Ray and no calls."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from espalier.cluster.link import ReplicaLink
from espalier.cluster.messages import ReplicaDescription, ReplicaReport
from espalier.replicas.errors import EngineError, ReplicaLostError
from espalier.replicas.report import Load
from espalier.replicas.request import Request, TokenEvent
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.stats import EngineStats

log = logging.getLogger(__name__)

# A reply is taken to be no longer than this when what a replica still has to do is guessed; most end well before max_tokens.
EXPECTED_REPLY_TOKENS = 256
# Several of these fit into replica.LEASE_S.
RENEW_PERIOD_S = 3.0


@dataclass(slots=True, eq=False)
class AttachedReplica:
    """One replica. lost: done when its stream has broken. leaving: Serve is stopping it; what it runs it still finishes.

    progress_at: when it last reported that it is idle or that a round had finished since the report before.
    assigned: ids of this gateway's live requests on it. unreported: tokens of those sent after its last report.
    """

    model: str
    link: ReplicaLink
    lost: asyncio.Future[None]
    description: ReplicaDescription | None = None
    load: Load | None = None
    stats: EngineStats | None = None
    progress_at: float = 0.0
    leaving: bool = False
    assigned: set[str] = field(default_factory=set)
    unreported: dict[str, int] = field(default_factory=dict)

    @property
    def replica_id(self) -> str:
        """Unique among all replicas that ever were."""
        return self.link.replica_id

    @property
    def facts(self) -> ShardInfo:
        """Facts of the model it has loaded; only of a replica without a problem."""
        assert self.description is not None and self.description.info is not None
        return self.description.info

    @property
    def failure(self) -> EngineError | None:
        """Why it may never serve, as it told itself; None when it may, or has not told yet."""
        return self.description.failure if self.description is not None else None

    @property
    def outstanding_tokens(self) -> int:
        """Tokens it still has to compute, as far as this gateway knows."""
        return (self.load.outstanding_tokens if self.load else 0) + sum(self.unreported.values())

    def problem(self, now: float, progress_timeout_s: float) -> str | None:
        """Why it may not be given requests now, or None."""
        if self.load is None:
            return "it has not reported yet" if self.failure is None else self.failure.message
        if self.leaving or self.load.draining:
            return "it is being stopped"
        if now - self.progress_at > progress_timeout_s:
            return f"it has finished no round for {now - self.progress_at:.0f} s"
        return None

    def assign(self, request: Request) -> None:
        """This gateway sends it a request."""
        self.assigned.add(request.request_id)
        to_generate = min(request.params.max_tokens, EXPECTED_REPLY_TOKENS)
        self.unreported[request.request_id] = len(request.prompt_token_ids) + to_generate

    def release(self, request_id: str) -> None:
        """The request is not on it any more."""
        self.assigned.discard(request_id)
        self.unreported.pop(request_id, None)

    def take(self, report: ReplicaReport, now: float) -> None:
        """Note what it reports."""
        load = report.load
        idle = load.running == 0 and load.waiting == 0
        if idle or self.load is None or load.round_id != self.load.round_id:
            self.progress_at = now
        self.load = load
        self.unreported.clear()
        if report.stats is not None:
            self.stats = report.stats


class Fleet:
    """Keeps one stream open to each replica.

    progress_timeouts_s: per model, how long a replica with work may take to finish a round before it gets nothing more.
    on_event: called for each token event. on_lost: called once when a replica's stream has broken and the replica is no longer in the fleet.
    Both run on the event loop and must not block.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        progress_timeouts_s: Mapping[str, float],
        on_event: Callable[[TokenEvent], None],
        on_lost: Callable[[AttachedReplica], None],
    ) -> None:
        self._clock = clock
        self._progress_timeouts_s = progress_timeouts_s
        self._on_event = on_event
        self._on_lost = on_lost
        self._replicas: dict[str, AttachedReplica] = {}
        self._pumps: dict[str, asyncio.Task[None]] = {}

    def add(self, model: str, link: ReplicaLink) -> None:
        """Attach a replica that is not in the fleet yet. Call on the event loop."""
        assert link.replica_id not in self._replicas
        replica = AttachedReplica(model, link, asyncio.get_running_loop().create_future())
        self._replicas[link.replica_id] = replica
        pump = asyncio.create_task(self._pump(replica), name=f"pump {link.replica_id}")
        self._pumps[link.replica_id] = pump
        pump.add_done_callback(functools.partial(self._ended, replica))

    def remove(self, replica_id: str) -> None:
        """Serve stops this replica: give it nothing new, and let go of it when it runs nothing of ours."""
        self._replicas[replica_id].leaving = True
        self._detach_if_done(self._replicas[replica_id])

    def release(self, replica: AttachedReplica, request_id: str) -> None:
        """The request is not on the replica any more."""
        replica.release(request_id)
        self._detach_if_done(replica)

    async def close(self) -> None:
        """Detach from all replicas."""
        pumps = list(self._pumps.values())
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    def ids(self, model: str) -> set[str]:
        """Replicas of the model that are in the fleet, ready or not."""
        return {replica.replica_id for replica in self._replicas.values() if replica.model == model}

    def of(self, model: str) -> list[AttachedReplica]:
        """The same, in order of their ids."""
        return [self._replicas[replica_id] for replica_id in sorted(self.ids(model))]

    def all(self) -> list[AttachedReplica]:
        """All replicas, by model and id."""
        return sorted(self._replicas.values(), key=lambda replica: (replica.model, replica.replica_id))

    def problem(self, replica: AttachedReplica) -> str | None:
        """Why the replica may not be given requests now, or None."""
        return replica.problem(self._clock(), self._progress_timeouts_s[replica.model])

    def ready(self, model: str) -> list[AttachedReplica]:
        """Replicas of the model that may be given requests now."""
        return [replica for replica in self.of(model) if self.problem(replica) is None]

    def _detach_if_done(self, replica: AttachedReplica) -> None:
        if replica.leaving and not replica.assigned and (pump := self._pumps.get(replica.replica_id)) is not None:
            pump.cancel()

    async def _pump(self, replica: AttachedReplica) -> None:
        """Read the replica's stream until it breaks, or until this task is cancelled because we are done with the replica."""
        replica.description = await replica.link.describe()
        if replica.failure is not None:
            # It stays as it is until Serve replaces it, and readiness tells why.
            await asyncio.Event().wait()
        renewal = asyncio.create_task(_renew(replica.link))
        try:
            async with contextlib.aclosing(replica.link.reports()) as reports:
                async for report in reports:
                    replica.take(report, self._clock())
                    for event in report.events:
                        self._on_event(event)
        finally:
            renewal.cancel()

    def _ended(self, replica: AttachedReplica, pump: asyncio.Task[None]) -> None:
        del self._replicas[replica.replica_id]
        del self._pumps[replica.replica_id]
        if not pump.cancelled() and (error := pump.exception()) is not None:
            log.warning(
                "replica lost", extra={"model": replica.model, "replica": replica.replica_id, "error": str(error)}
            )
        replica.lost.set_result(None)
        self._on_lost(replica)


async def _renew(link: ReplicaLink) -> None:
    while True:
        await asyncio.sleep(RENEW_PERIOD_S)
        # If the replica is gone its stream tells.
        with contextlib.suppress(ReplicaLostError):
            await link.renew()
