"""Exactness audit: runs a sampled share of finished replies again, in spare time, and compares the hashes of their token ids.

The re-run goes to another replica of the model whose weights and numerics ids are equal to the first one's; to the same replica when there is no
other. What the engine guarantees it (request.alone, request.use_prefix_cache):
- No state of any earlier request: every token of prompt and reply is computed for it, and nothing of it stays in the prefix cache. No drafts.
- No batch neighbours: no round has rows of it and of another request. It begins when the replica holds nothing else.
- Users first: a request that comes in between takes the lane at the next round that is planned; at most the rounds in flight (two) are done
  before. The re-run waits again, keeps its tokens, and recomputes their state later. It counts neither as load for the router, nor as
  running or waiting, nor in the engine's latencies and tokens.
Not guaranteed: its KV blocks come from the free ones, so blocks kept for later prompts may be evicted, the least recently used first, where
there are not enough empty ones; and replicas of one machine share its cores or its GPU's clock.

One re-run at a time, at most MAX_PENDING replies kept, each for MAX_AGE_S at most. Knows no Ray and no wire.
"""

import asyncio
import contextlib
import logging
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from espalier.cluster.audit_decisions import AuditResult, choose_replica, first_difference, is_sampled, is_whole
from espalier.cluster.choice import Choice
from espalier.cluster.fleet import AttachedReplica, Fleet
from espalier.cluster.metrics import ClusterMetrics
from espalier.cluster.router import Candidate
from espalier.replicas.errors import DeadlineExceededError, EngineError, QueueFullError
from espalier.replicas.request import Finish, Request, SamplingParams, TokenEvent
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.token_hash import token_sha256

log = logging.getLogger(__name__)

MAX_PENDING = 16
MAX_AGE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedReply:
    """A whole reply that waits for its audit. replica_id, facts: who gave it. prompt, tokens: ids in four bytes each, for long ones wait too.

    expires_at: seconds since the epoch.
    """

    model: str
    request_id: str
    replica_id: str
    facts: ShardInfo
    prompt: "array[int]"
    params: SamplingParams
    tokens: "array[int]"
    expires_at: float


@dataclass(slots=True, eq=False)
class Rerun:
    """The request that is run again now, the ids that have come of it, and how it ended."""

    request: Request
    ended: asyncio.Future[Finish]
    tokens: list[int] = field(default_factory=list)


class Auditor:
    """share: of all finished replies, 0..1; 0 does nothing and keeps nothing. All methods run on the gateway's event loop."""

    def __init__(
        self,
        share: float,
        models: list[str],
        fleet: Fleet,
        metrics: ClusterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._share = share
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._pending: deque[FinishedReply] = deque()  # the first one is being audited
        self._rerun: Rerun | None = None
        self._worker: asyncio.Task[None] | None = None
        if share > 0:
            for model in models:
                metrics.model_audited(model, AuditResult)

    def offer(self, model: str, choice: Choice) -> None:
        """A choice has ended by itself: audit it if it is sampled."""
        request, replica = choice.request, choice.replica
        if self._share == 0 or not is_whole(choice.finish) or not is_sampled(request.request_id, self._share):
            return
        assert replica is not None
        if len(self._pending) >= MAX_PENDING:
            self._metrics.audited(model, AuditResult.DROPPED)
            return
        self._pending.append(
            FinishedReply(
                model=model,
                request_id=request.request_id,
                replica_id=replica.replica_id,
                facts=replica.facts,
                prompt=array("I", request.prompt_token_ids),
                params=request.params,
                tokens=array("I", choice.emitted),
                expires_at=self._clock() + MAX_AGE_S,
            )
        )
        self._metrics.audits_pending(model, 1)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="exactness audit")

    def take(self, event: TokenEvent) -> None:
        """An event of a request that is none of a client's."""
        rerun = self._rerun
        if rerun is None or event.request_id != rerun.request.request_id or rerun.ended.done():
            return
        rerun.tokens += event.token_ids
        if event.finish is not None:
            rerun.ended.set_result(event.finish)

    def close(self) -> None:
        """No audits from now on; does not wait. What was pending is forgotten and not counted."""
        self._share = 0.0
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        while self._pending:
            reply = self._pending[0]
            try:
                result = await self._audit(reply)
            except Exception:
                log.exception("audit failed", extra={"model": reply.model, "request_id": reply.request_id})
                result = AuditResult.FAILED
            self._pending.popleft()
            self._metrics.audits_pending(reply.model, -1)
            self._metrics.audited(reply.model, result)

    async def _audit(self, reply: FinishedReply) -> AuditResult:
        if self._clock() >= reply.expires_at:
            return AuditResult.DROPPED
        replica = self._replica_for(reply)
        if replica is None:
            return _failed(reply, "no replica of equal weights and numerics is ready")
        rerun = Rerun(_again(reply), asyncio.get_running_loop().create_future())
        self._rerun = rerun
        try:
            await replica.link.submit(rerun.request)
            await asyncio.wait((rerun.ended, replica.lost), return_when=asyncio.FIRST_COMPLETED)
        except QueueFullError:
            return AuditResult.DROPPED
        except EngineError as error:
            return _failed(reply, error.message)
        finally:
            self._rerun = None
            if not rerun.ended.done() and not replica.lost.done():
                with contextlib.suppress(EngineError):
                    await replica.link.abort(rerun.request.request_id)
        if not rerun.ended.done():
            return AuditResult.DROPPED if replica.leaving else _failed(reply, "the replica was lost")
        return _compare(reply, replica, rerun.tokens, rerun.ended.result())

    def _replica_for(self, reply: FinishedReply) -> AttachedReplica | None:
        """Where to run it again. Between unequal ids equal tokens are not promised."""
        ids = (reply.facts.weights_id, reply.facts.numerics_id)
        equal = {
            replica.replica_id: replica
            for replica in self._fleet.ready(reply.model)
            if (replica.facts.weights_id, replica.facts.numerics_id) == ids
        }
        candidates = [Candidate(replica_id, replica.outstanding_tokens) for replica_id, replica in equal.items()]
        chosen = choose_replica(reply.replica_id, candidates)
        return None if chosen is None else equal[chosen]


def _again(reply: FinishedReply) -> Request:
    """The same choice as a request that runs alone. Its own deadline: after it nobody wants to know any more."""
    return Request(
        request_id=f"audit-{reply.request_id}",
        prompt_token_ids=tuple(reply.prompt),
        params=replace(reply.params, draft=False),
        deadline=reply.expires_at,
        use_prefix_cache=False,
        alone=True,
    )


def _compare(reply: FinishedReply, replica: AttachedReplica, tokens: list[int], finish: Finish) -> AuditResult:
    if isinstance(finish.error, DeadlineExceededError):
        return AuditResult.DROPPED
    if not is_whole(finish):
        return _failed(reply, finish.reason if finish.error is None else finish.error.message)
    expected, found = token_sha256(reply.tokens), token_sha256(tokens)
    if found != finish.token_sha256:
        return _failed(reply, "tokens of the re-run were lost between replica and gateway")
    if found == expected:
        return AuditResult.EQUAL
    log.error(
        "audit: unequal replies",
        extra={
            "model": reply.model,
            "request_id": reply.request_id,
            "replica": reply.replica_id,
            "audit_replica": replica.replica_id,
            "token_sha256": expected,
            "audit_token_sha256": found,
            "first_difference": first_difference(reply.tokens, tokens),
            "tokens": len(reply.tokens),
            "audit_tokens": len(tokens),
            "prompt_tokens": len(reply.prompt),
            "temperature": reply.params.temperature,
            "seed": reply.params.seed,
            "weights_id": reply.facts.weights_id,
            "numerics_id": reply.facts.numerics_id,
            "audit_numerics_id": replica.facts.numerics_id,
        },
    )
    return AuditResult.UNEQUAL


def _failed(reply: FinishedReply, reason: str) -> AuditResult:
    log.warning("audit failed", extra={"model": reply.model, "request_id": reply.request_id, "reason": reason})
    return AuditResult.FAILED
