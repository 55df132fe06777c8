"""Dispatcher: hands choices to replicas: ranks them, tries the next when one refuses, again elsewhere when one is lost, and stops choices.

Knows no Ray, and nothing of clients, events or deadlines.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from espalier.cluster.catalog import Catalog
from espalier.cluster.choice import Choice
from espalier.cluster.config import RouterConfig
from espalier.cluster.fleet import AttachedReplica, Fleet
from espalier.cluster.live_call import LiveCall
from espalier.cluster.metrics import ClusterMetrics
from espalier.cluster.router import Candidate, Router
from espalier.replicas.errors import (
    DrainingError,
    EngineError,
    QueueFullError,
    ReplicaLostError,
    RequestFailedError,
)

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 2


class Dispatcher:
    """One router per model. Work that must outlast whoever asked for it runs in tasks of its own."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, catalog: Catalog, metrics: ClusterMetrics, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._catalog = catalog
        self._metrics = metrics
        self._clock = clock
        self._routers: dict[str, Router] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def place(self, live: LiveCall, choice: Choice) -> None:
        """Hand the choice to the best replica that takes it, even if the caller is cancelled meanwhile.

        Raises what the engine or the state of the fleet refuses it with.
        """
        await asyncio.shield(self.spawn(self._place(live, choice)))

    async def place_again(self, live: LiveCall, choice: Choice) -> None:
        """The replica of a choice without tokens was lost: hand it to another one. Raises as `place`, ReplicaLostError the second time."""
        if choice.emitted or choice.request.attempt + 1 >= MAX_ATTEMPTS:
            raise ReplicaLostError("the replica was lost while it generated this reply")
        self._next_attempt(live, choice)
        await self._place(live, choice)

    def stop(self, choice: Choice) -> None:
        """Make the replica forget a choice that is over for us. One still being handed over is stopped when that is done."""
        if choice.replica is None or not choice.placed:
            return
        self._fleet.release(choice.replica, choice.request.request_id)
        self.spawn(_abort(choice.replica, choice.request.request_id))

    def complete(self, live: LiveCall, choice: Choice) -> None:
        """The choice has ended by itself: its replica is free of it, and holds prompt and reply for the next turn."""
        replica = choice.replica
        assert replica is not None
        self._fleet.release(replica, choice.request.request_id)
        token_ids = (*choice.request.prompt_token_ids, *choice.emitted)
        self._router(replica).record(replica.replica_id, token_ids, live.call.session, self._clock())

    def forget(self, replica: AttachedReplica) -> None:
        """The replica is gone."""
        if replica.model in self._routers:
            self._routers[replica.model].forget(replica.replica_id)

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run it as a task that nobody needs to hold on to."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _place(self, live: LiveCall, choice: Choice) -> None:
        model, prompt, session = live.call.model, choice.request.prompt_token_ids, live.call.session
        refusal: EngineError | None = None
        tried: set[str] = set()
        while not choice.finished:
            replicas = {r.replica_id: r for r in self._fleet.ready(model) if r.replica_id not in tried}
            if not replicas:
                raise refusal or self._catalog.no_replica(model)
            candidates = [Candidate(r.replica_id, r.outstanding_tokens) for r in replicas.values()]
            router = self._router(next(iter(replicas.values())))
            ranking = router.rank(prompt, session, candidates, self._clock())
            replica = replicas[ranking.replicas[0]]
            tried.add(replica.replica_id)
            try:
                await self._hand_over(choice, replica)
            except (QueueFullError, DrainingError) as error:
                refusal = error
            except ReplicaLostError as error:
                refusal = error
                # It may have taken the request all the same: stop it there, and let another attempt tell its events apart.
                self.spawn(_abort(replica, choice.request.request_id))
                if choice.emitted or choice.request.attempt + 1 >= MAX_ATTEMPTS:
                    raise
                self._next_attempt(live, choice)
            else:
                router.record(replica.replica_id, prompt, session, self._clock())
                self._metrics.routed(model, ranking.kind)
                return

    async def _hand_over(self, choice: Choice, replica: AttachedReplica) -> None:
        """Submit to this replica; when this returns the choice runs there, or has been stopped there because it had ended meanwhile."""
        request = choice.request
        choice.replica = replica
        replica.assign(request)
        submit = asyncio.ensure_future(replica.link.submit(request, choice.origin))
        replica.lost.add_done_callback(lambda _: submit.cancel())
        [outcome] = await asyncio.gather(submit, return_exceptions=True)
        if replica.lost.done():
            outcome = ReplicaLostError(f"replica {replica.replica_id} was lost")
        if isinstance(outcome, BaseException):
            choice.replica = None
            self._fleet.release(replica, request.request_id)
            if not isinstance(outcome, EngineError):
                log.error("submit failed", exc_info=outcome, extra={"replica": replica.replica_id})
                outcome = RequestFailedError("the request could not be handed to a replica")
            raise outcome
        choice.placed = True
        if choice.finished:
            self.stop(choice)

    def _next_attempt(self, live: LiveCall, choice: Choice) -> None:
        choice.request = replace(choice.request, attempt=choice.request.attempt + 1)
        choice.replica, choice.placed = None, False
        live.replays += 1
        self._metrics.replay(live.call.model)

    def _router(self, replica: AttachedReplica) -> Router:
        if replica.model not in self._routers:
            self._routers[replica.model] = Router(self._config, replica.facts.block_size)
        return self._routers[replica.model]


async def _abort(replica: AttachedReplica, request_id: str) -> None:
    if replica.lost.done():
        return
    try:
        await replica.link.abort(request_id)
    except EngineError as error:
        log.debug("abort failed", extra={"replica": replica.replica_id, "error": str(error)})
