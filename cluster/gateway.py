"""Gateway: implements call.GenerateGateway over the fleet: admission, fan-out, demultiplexing, deadlines, loss, drain. Knows no Ray and no wire.

An event reaches a client when it belongs to the choice's current attempt and continues the tokens received so far. A choice whose replica is
lost before its first event is sent elsewhere, once; one that had events ends in an explicit error.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from espalier.cluster.admission import Admission
from espalier.cluster.audit import Auditor
from espalier.cluster.call import ChoiceEvent, GenerateCall, ModelInfo, ModelText
from espalier.cluster.call_spans import begin_call_span, end_call_span
from espalier.cluster.catalog import Catalog, ServedText
from espalier.cluster.choice import Choice, Verdict
from espalier.cluster.config import ClusterConfig
from espalier.cluster.dispatcher import Dispatcher
from espalier.cluster.fleet import AttachedReplica, Fleet
from espalier.cluster.live_call import LiveCall
from espalier.cluster.logs import log_request
from espalier.cluster.metrics import ClusterMetrics, EngineSnapshot
from espalier.cluster.tracing import Span, Tracer
from espalier.replicas.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineError,
    RequestFailedError,
)
from espalier.replicas.request import Request, TokenEvent
from espalier.replicas.sampling.seeds import choice_seed

MAX_PENDING_EVENTS = 1024
# The engine keeps deadlines; the gateway only steps in when it has not heard of the end by then.
DEADLINE_GRACE_S = 2.0
# After a drain's bound the last errors still have to reach the clients.
FAREWELL_S = 1.0


class Gateway:
    """Owns every live call. All methods run on one event loop.

    models: what the gateway has of each served model, by name. clock: seconds since the epoch.
    """

    def __init__(
        self,
        config: ClusterConfig,
        models: dict[str, ServedText],
        metrics: ClusterMetrics,
        *,
        clock: Callable[[], float] = time.time,
        max_pending_events: int = MAX_PENDING_EVENTS,
        deadline_grace_s: float = DEADLINE_GRACE_S,
        tracer: Tracer | None = None,
    ) -> None:
        self.metrics = metrics
        self._config = config
        self._clock = clock
        self._max_pending_events = max_pending_events
        self._deadline_grace_s = deadline_grace_s
        self._tracer = tracer
        self._admission = Admission(config.gateway.max_outstanding)
        self._calls: set[LiveCall] = set()
        self._choices: dict[str, tuple[LiveCall, Choice]] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.fleet = Fleet(
            clock=clock,
            progress_timeouts_s={model.name: model.engine.progress_timeout_s for model in config.models},
            on_event=self._on_event,
            on_lost=self._on_lost,
        )
        for model in config.models:
            metrics.model_served(model.name)
        self._catalog = Catalog(models, self.fleet)
        self._dispatcher = Dispatcher(config.router, self.fleet, self._catalog, metrics, clock)
        self._auditor = Auditor(config.gateway.audit_share, list(models), self.fleet, metrics, clock)

    # What the wire fronts call.

    @property
    def draining(self) -> bool:
        """Whether the gateway is stopping."""
        return self._draining

    def models(self) -> list[ModelInfo]:
        """All served models, ready or not."""
        return self._catalog.all()

    def resolve(self, model: str) -> ModelInfo:
        """The model of that name; raises ModelNotFoundError."""
        return self._catalog.resolve(model)

    def text(self, model: str) -> ModelText:
        """Its tokenizer and chat template; raises ModelNotFoundError, or DrainingError while no replica of it was ever ready."""
        return self._catalog.text(model)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[ChoiceEvent, None]:
        """Events of all choices; see GenerateGateway.generate."""
        self._catalog.resolve(call.model)
        span = None if self._tracer is None else begin_call_span(self._tracer, call)
        try:
            if self._draining:
                raise DrainingError("the gateway is stopping")
            self._admission.admit(call.n, self._clock())
        except EngineError as error:
            self.metrics.refused(call.model, error.code)
            if span is not None:
                span.end({}, error=error.code)
            raise
        live = self._begin(call, span)
        try:
            await self._place_all(live)
            yield _told_or_raised(await live.next())
            while not live.over:
                yield await live.next()
        except EngineError as error:
            live.refusal = error
            raise
        finally:
            self._end(live)

    async def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether every model has a ready replica, and what is the matter with those that are not."""
        ready, models = self._catalog.readiness()
        return ready and not self._draining, {"draining": self._draining, "models": models}

    def metrics_text(self) -> bytes:
        """The Prometheus exposition of this gateway and of all engines that it is attached to."""
        for replica in self.fleet.all():
            if replica.description is not None:
                self.metrics.replicas_configured(replica.model, replica.description.num_replicas)
        engines = [
            EngineSnapshot(
                model=replica.model,
                replica=replica.replica_id,
                stats=replica.stats,
                outstanding_tokens=None if replica.load is None else replica.outstanding_tokens,
                progress_at=None if replica.load is None else replica.progress_at,
            )
            for replica in self.fleet.all()
        ]
        return self.metrics.render(self.models(), engines)

    async def drain(self, timeout_s: float) -> None:
        """Take no new calls; let the running ones finish; after `timeout_s` seconds end them with DrainingError."""
        self._draining = True
        self._auditor.close()
        if not await self._all_ended(timeout_s):
            for live in list(self._calls):
                for choice in live.choices:
                    self._fail(live, choice, DrainingError("the gateway is stopping"))
            await self._all_ended(FAREWELL_S)

    # A call's beginning and end.

    def _begin(self, call: GenerateCall, span: Span | None) -> LiveCall:
        now = self._clock()
        default_deadline_s = self._config.gateway.default_deadline_s
        deadline = call.deadline
        if deadline is None and default_deadline_s is not None:
            deadline = now + default_deadline_s
        origin = call.origin
        if span is not None and origin is not None:
            origin = replace(origin, trace=span.context)
        choices = [
            Choice(
                index,
                Request(
                    request_id=f"{call.call_id}-{index}",
                    prompt_token_ids=call.prompt_token_ids,
                    params=replace(call.params, seed=choice_seed(call.params.seed, index)) if index else call.params,
                    priority=call.priority,
                    arrival_time=now,
                    deadline=deadline,
                ),
                started_at=now,
                origin=origin,
            )
            for index in range(call.n)
        ]
        live = LiveCall(call, choices, max_pending=self._max_pending_events)
        live.span = span
        self._calls.add(live)
        self._idle.clear()
        for choice in choices:
            assert choice.request.request_id not in self._choices
            self._choices[choice.request.request_id] = (live, choice)
        if deadline is not None:
            delay = max(0.0, deadline - now) + self._deadline_grace_s
            live.deadline_timer = asyncio.get_running_loop().call_later(delay, self._expire, live)
        self.metrics.request_started(call.model)
        return live

    def _end(self, live: LiveCall) -> None:
        """The client has everything, or has left, or was refused: stop what still runs and forget the call."""
        now = self._clock()
        if live.deadline_timer is not None:
            live.deadline_timer.cancel()
        log_request(live, now)
        if live.span is not None:
            end_call_span(live.span, live)
        for choice in live.choices:
            del self._choices[choice.request.request_id]
            if not choice.finished:
                choice.finished = True
                self._dispatcher.stop(choice)
        self._calls.discard(live)
        if not self._calls:
            self._idle.set()
        self._admission.release(live.call.n, now)
        self.metrics.request_ended(live.call.model)

    def _expire(self, live: LiveCall) -> None:
        for choice in live.choices:
            self._fail(live, choice, DeadlineExceededError("the request's deadline has passed"))

    async def _place_all(self, live: LiveCall) -> None:
        try:
            for choice in live.choices:
                await self._dispatcher.place(live, choice)
        except EngineError as error:
            self.metrics.refused(live.call.model, error.code)
            raise

    async def _replay(self, live: LiveCall, choice: Choice) -> None:
        try:
            await self._dispatcher.place_again(live, choice)
        except EngineError as error:
            self._fail(live, choice, error)

    def _fail(self, live: LiveCall, choice: Choice, error: EngineError) -> None:
        """End the choice with an error that its client is told."""
        if choice.finished:
            return
        replica_id = choice.replica.replica_id if choice.replica is not None else ""
        live.put(choice, choice.end_with(error, self._clock()), replica_id)
        self._dispatcher.stop(choice)

    # What the fleet tells.

    def _on_event(self, event: TokenEvent) -> None:
        live, choice = self._choices.get(event.request_id, (None, None))
        if live is None or choice is None or choice.replica is None:
            self._auditor.take(event)
            return
        verdict = choice.judge(event)
        if verdict is Verdict.DROP:
            return
        if verdict is Verdict.BROKEN:
            self._fail(live, choice, RequestFailedError("tokens of this reply were lost between replica and gateway"))
            return
        if live.full:
            self._fail(live, choice, RequestFailedError("the client reads more slowly than the reply is generated"))
            return
        choice.receive(event, self._clock())
        live.put(choice, event, choice.replica.replica_id)
        if choice.finished:
            self._dispatcher.complete(live, choice)
            self._auditor.offer(live.call.model, choice)

    def _on_lost(self, replica: AttachedReplica) -> None:
        self._dispatcher.forget(replica)
        if not replica.leaving:
            self.metrics.replica_lost(replica.model)
        for request_id in list(replica.assigned):
            live, choice = self._choices.get(request_id, (None, None))
            # A choice that is being handed over right now finds out by itself.
            if live is not None and choice is not None and choice.placed and not choice.finished:
                self._dispatcher.spawn(self._replay(live, choice))

    async def _all_ended(self, timeout_s: float) -> bool:
        """Whether all calls have ended within so many seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def _told_or_raised(first: ChoiceEvent) -> ChoiceEvent:
    """The first event of a call. A choice that ended in an error at once has told its client nothing: the whole call is refused with it."""
    finish = first.event.finish
    if finish is not None and finish.error is not None and not first.event.token_ids:
        raise finish.error
    return first
