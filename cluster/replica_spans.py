"""RequestTrail: what a replica tells of each request once it has ended: a span with its queue, prefill and decode inside, and a log line.

The spans are made from the times that a request's last event carries: the engine knows nothing of tracing.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from espalier.cluster.origin import Origin, at_work_for
from espalier.cluster.trace_context import TraceContext
from espalier.cluster.tracing import Span, Tracer, Value
from espalier.replicas.errors import DrainingError, EngineError
from espalier.replicas.request import Finish, FinishReason, Request, TokenEvent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A request on its way. at: when it came, in seconds since the epoch."""

    request: Request
    origin: Origin
    replica_id: str
    at: float


class RequestTrail:
    """The requests of one replica. Those without an origin, which no client waits for, leave no trail.

    tracer: None leaves the log lines alone. clock: seconds since the epoch.
    """

    def __init__(self, model: str, tracer: Tracer | None, clock: Callable[[], float] = time.time) -> None:
        self._model = model
        self._tracer = tracer
        self._clock = clock
        # A replayed request keeps its id.
        self._taken: dict[tuple[str, int], _Taken] = {}

    def taken(self, request: Request, origin: Origin | None, replica_id: str) -> None:
        """The request is about to be given to the engine."""
        if origin is not None:
            key = request.request_id, request.attempt
            self._taken[key] = _Taken(request, origin, replica_id, self._clock())

    def refused(self, request: Request, error: BaseException) -> None:
        """The engine did not take it; nothing more is heard of it."""
        if (taken := self._taken.pop((request.request_id, request.attempt), None)) is not None:
            code = error.code if isinstance(error, EngineError) else EngineError.code
            self._tell(taken, None, code)

    def ended(self, events: Iterable[TokenEvent]) -> None:
        """Tells of the requests that end with one of these events."""
        for event in events:
            finish = event.finish
            if finish is None or (taken := self._taken.pop((event.request_id, event.attempt), None)) is None:
                continue
            self._tell(taken, finish, None if finish.error is None else finish.error.code)

    def close(self) -> None:
        """The replica stops: what is still on its way ends here."""
        for taken in self._taken.values():
            self._tell(taken, None, DrainingError.code)
        self._taken.clear()
        if self._tracer is not None:
            self._tracer.close()

    def _tell(self, taken: _Taken, finish: Finish | None, error: str | None) -> None:
        reason = FinishReason.ERROR if finish is None else finish.reason
        with at_work_for(taken.origin):
            fields = {"engine_request": taken.request.request_id, "reason": reason.value, "error": error}
            log.debug("request ended", extra=fields)
        if self._tracer is not None and taken.origin.trace is not None:
            self._trace(self._tracer, taken.origin.trace, taken, finish, error)

    def _trace(
        self, tracer: Tracer, parent: TraceContext, taken: _Taken, finish: Finish | None, error: str | None
    ) -> None:
        attributes: dict[str, Value] = {
            "gen_ai.request.model": self._model,
            "espalier.replica.id": taken.replica_id,
            "espalier.request.id": taken.request.request_id,
            "espalier.attempt": taken.request.attempt,
            "espalier.seed": str(taken.request.params.seed),
        }
        span = tracer.start(f"replica {self._model}", parent, attributes, kind="server", at=taken.at)
        if finish is None:
            span.end({}, error=error, at=self._clock())
            return
        last_at = _trace_phases(tracer, span, finish, taken.at)
        # Token counts are not under their gen_ai names here: what sums those up would count each token twice.
        ends: dict[str, Value] = {
            "gen_ai.response.finish_reasons": (finish.reason.value,),
            "espalier.prompt_tokens": finish.usage.prompt_tokens,
            "espalier.cached_tokens": finish.usage.cached_tokens,
            "espalier.completion_tokens": finish.usage.completion_tokens,
            "espalier.token_sha256": finish.token_sha256,
        }
        span.end(ends, error=error, at=max(last_at, self._clock()))


def _trace_phases(tracer: Tracer, span: Span, finish: Finish, at: float) -> float:
    """A child for each phase that took any time, one after the other from `at` on; when the last one ended."""
    timings, usage = finish.timings, finish.usage
    phases: tuple[tuple[str, float, dict[str, Value]], ...] = (
        ("queue", timings.queue_s, {}),
        (
            "prefill",
            timings.prefill_s,
            {"espalier.prompt_tokens": usage.prompt_tokens, "espalier.cached_tokens": usage.cached_tokens},
        ),
        ("decode", timings.decode_s, {"espalier.completion_tokens": usage.completion_tokens}),
    )
    for name, seconds, attributes in phases:
        if seconds > 0:
            tracer.start(name, span.context, attributes, at=at).end({}, at=at + seconds)
            at += seconds
    return at
