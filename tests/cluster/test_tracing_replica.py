"""The replica's spans of a request, from what the engine's last event says."""

from dataclasses import replace

from espalier.cluster.origin import Origin
from espalier.cluster.replica_spans import RequestTrail
from espalier.cluster.trace_context import TraceContext
from espalier.replicas.errors import EngineError, RequestFailedError
from espalier.replicas.request import Finish, FinishReason, Request, SamplingParams, Timings, TokenEvent, Usage
from espalier.replicas.token_hash import token_sha256
from tests.support.spans import (
    CALLER,
    KeptSpans,
    attributes,
    parent_id,
    span_id,
    status,
)

ENGINE_REQUEST = Request(request_id="r-0", prompt_token_ids=(1, 2, 3), params=SamplingParams(seed=7))
ORIGIN = Origin("r", TraceContext(CALLER["traceparent"]))


def last_event(reason: FinishReason, timings: Timings, error: EngineError | None = None) -> TokenEvent:
    finish = Finish(reason, Usage(3, 2, 1), token_sha256([4, 5]), timings, error=error)
    return TokenEvent(ENGINE_REQUEST.request_id, ENGINE_REQUEST.attempt, 2, (), "", finish=finish)


def trail_of(*events: TokenEvent, request: Request = ENGINE_REQUEST, origin: Origin | None = ORIGIN) -> KeptSpans:
    """The spans of a request that came at second 1000 and of these events at second 1010; then the replica stops."""
    spans, times = KeptSpans(), iter((1000.0, 1010.0))
    trail = RequestTrail("tiny", spans.tracer, clock=lambda: next(times))
    trail.taken(request, origin, "replica-0")
    trail.ended(events)
    trail.close()
    return spans


def test_queue_prefill_and_decode_follow_each_other_in_the_replicas_span() -> None:
    spans = trail_of(last_event(FinishReason.STOP, Timings(0.25, 0.5, 1.5)))
    whole = spans.one("replica tiny")
    phases = [spans.one(name) for name in ("queue", "prefill", "decode")]
    assert {parent_id(span) for span in phases} == {span_id(whole)}
    times = [(span.start_time, span.end_time) for span in (whole, *phases)]
    second = 10**9
    assert times == [
        (1000 * second, 1010 * second),
        (1000 * second, 1000 * second + second // 4),
        (1000 * second + second // 4, 1000 * second + 3 * second // 4),
        (1000 * second + 3 * second // 4, 1002 * second + second // 4),
    ]
    assert attributes(phases[1]) == {"espalier.prompt_tokens": 3, "espalier.cached_tokens": 1}
    assert attributes(phases[2]) == {"espalier.completion_tokens": 2}
    assert attributes(whole) == {
        "gen_ai.request.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "espalier.replica.id": "replica-0",
        "espalier.request.id": "r-0",
        "espalier.attempt": 0,
        "espalier.seed": "7",
        "espalier.prompt_tokens": 3,
        "espalier.cached_tokens": 1,
        "espalier.completion_tokens": 2,
        "espalier.token_sha256": token_sha256([4, 5]),
    }


def test_a_request_that_never_ran_has_only_waited() -> None:
    spans = trail_of(last_event(FinishReason.CANCELLED, Timings(2.0, 0.0, 0.0)))
    assert {span.name for span in spans.all()} == {"queue", "replica tiny"}
    assert attributes(spans.one("replica tiny"))["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert status(spans.one("replica tiny")) == ("UNSET", None)


def test_a_request_that_fails_in_the_engine_fails_its_span() -> None:
    failed = last_event(FinishReason.ERROR, Timings(0.0, 1.0, 0.0), RequestFailedError("broken"))
    assert status(trail_of(failed).one("replica tiny")) == ("ERROR", "request_failed")


def test_what_still_runs_when_the_replica_stops_ends_with_it() -> None:
    assert status(trail_of().one("replica tiny")) == ("ERROR", "unavailable")


def test_an_event_of_another_attempt_ends_nothing() -> None:
    again = replace(ENGINE_REQUEST, attempt=1)
    spans = trail_of(last_event(FinishReason.STOP, Timings(0, 0, 0)), request=again)
    assert status(spans.one("replica tiny")) == ("ERROR", "unavailable")


def test_requests_that_no_client_waits_for_leave_no_spans() -> None:
    assert trail_of(last_event(FinishReason.STOP, Timings(1, 1, 1)), origin=None).all() == ()
