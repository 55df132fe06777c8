"""Engine: one model on this replica. A loop on its own thread plans, runs and commits rounds; every token of every request goes through it.

The engine alone owns sequences. It gives their tokens to their replies, which say where they end, and ends them for all other reasons: abort,
deadline, failure, stop. Each accepted request ends in exactly one event with `finish`. Knows no wire, no Ray and no torch.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple, Protocol

from espalier.replicas.config import EngineConfig, resolved
from espalier.replicas.detokenizer import TextDecoder
from espalier.replicas.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from espalier.replicas.group import ShardGroup
from espalier.replicas.reply import Reply
from espalier.replicas.report import Load, RoundReport
from espalier.replicas.request import FinishReason, Request, TokenEvent
from espalier.replicas.schedule.limits import check_servable
from espalier.replicas.schedule.queue import expired, next_deadline, retry_after_s
from espalier.replicas.schedule.scheduler import Outcome, Scheduler, accepted
from espalier.replicas.schedule.step import Step, StepResult
from espalier.replicas.schedule.tracks import Flight, first_landed, make_tracks
from espalier.replicas.sequence import Sequence
from espalier.replicas.stats import EngineStats

logger = logging.getLogger(__name__)

# A reply counts with no more than this towards outstanding_tokens: most end long before max_tokens.
REPLY_ESTIMATE = 256
# So many rounds that fail as a whole, one after the other, are the shard's fault and not a request's.
MAX_FAILED_ROUNDS = 3


class Clock(Protocol):
    """Two readings in seconds, as the module `time` has them."""

    def time(self) -> float:
        """Since the epoch: what deadlines are given in."""
        ...

    def monotonic(self) -> float:
        """What everything is measured with."""
        ...


class _Live(NamedTuple):
    """A request that was accepted and has not ended."""

    sequence: Sequence
    reply: Reply


class Engine:
    """Serves requests until stopped. Every method may be called from any thread.

    text: the model's tokenizer, as far as detokenization needs it. The sink is called on the engine's thread, once a round; it must be quick
    and must not raise.
    """

    def __init__(self, config: EngineConfig, group: ShardGroup, text: TextDecoder, *, clock: Clock = time) -> None:
        self._config = resolved(config)
        self._group = group
        self._text = text
        self._clock = clock
        self._stats = EngineStats()
        self._spare_stats = EngineStats()  # of requests that run in spare time; shown nowhere
        self._scheduler = Scheduler(config, group.info, self._stats)
        self._tracks = make_tracks(self._config)
        self._live: dict[str, _Live] = {}
        self._events: list[TokenEvent] = []  # not reported yet
        self._finished_at: deque[float] = deque(maxlen=64)
        self._round_id = 0
        self._progress_at = clock.monotonic()
        self._num_failed_rounds = 0
        self._has_arrivals = False
        self._is_reporting = False
        self._is_draining = False
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        # Guards all of the above; notified of whatever the loop or a drain may wait for.
        self._changed = threading.Condition()

    def start(self, sink: Callable[[RoundReport], None]) -> None:
        """Starts the loop."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._serve, args=(sink,), name="engine", daemon=True)
        self._thread.start()

    def _serve(self, sink: Callable[[RoundReport], None]) -> None:
        error: EngineError = DrainingError("the replica is stopping")
        try:
            self._loop(sink)
        except Exception:
            logger.exception("the engine's loop failed")
            error = RequestFailedError("the engine failed")
        with self._changed:
            self._is_stopping = True
            for live in list(self._live.values()):
                self._finish(live, FinishReason.ERROR, error=error)
            report = self._report()
        sink(report)

    def _loop(self, sink: Callable[[RoundReport], None]) -> None:
        while True:
            with self._changed:
                self._expire()
                self._plan()
                self._run()
                if self._is_stopping:
                    return
                if not (self._commit() or self._events):
                    continue
                report = self._report()
                self._is_reporting = True
            sink(report)
            with self._changed:
                self._is_reporting = False
                self._changed.notify_all()

    def _plan(self) -> None:
        """Sends steps to the shards until every track is full or nothing is left to plan."""
        self._has_arrivals = False
        for track in self._tracks:
            while track.has_room and (step := self._scheduler.plan(track)) is not None:
                now = self._clock.monotonic()
                if not track.flights:
                    track.progress_at = now
                for begin in step.begins:
                    self._live[self._scheduler.resident(begin.seq_id).request.request_id].reply.start(now)
                flight = Flight(step, self._group.submit(step))
                track.flights.append(flight)
                flight.result.add_done_callback(self._wake)
        assert not self._live or self._is_flying(), "requests are live, but none can run"

    def _run(self) -> None:
        """Waits, without the lock, until there is something to do: a step has come back, or work, an abort, a deadline, a stop."""
        deadline = next_deadline(live.sequence for live in self._live.values())
        timeout_s = (
            None if deadline is None else min(max(deadline - self._clock.monotonic(), 0.0), threading.TIMEOUT_MAX)
        )
        self._changed.wait_for(self._has_news, timeout_s)

    def _commit(self) -> bool:
        """Takes in one step that has come back, if any has."""
        track = first_landed(self._tracks)
        if track is None:
            return False
        step, future = track.flights.popleft()
        track.progress_at = self._clock.monotonic()
        error = future.exception()
        if error is None:
            result = future.result()
            self._group.commit(accepted(step, result))
            outcomes = self._scheduler.commit(step, result)
            self._num_failed_rounds = 0
        else:
            logger.error("step %d failed", step.step_id, exc_info=error)
            outcomes = self._scheduler.commit_failed(step, f"{type(error).__name__}: {error}")
            self._num_failed_rounds += 1
        self._count(step)
        for outcome in outcomes:
            self._deliver(outcome)
        return True

    def _is_flying(self) -> bool:
        return any(track.flights for track in self._tracks)

    def _has_work(self) -> bool:
        return bool(self._live) or self._is_flying()

    def _has_news(self) -> bool:
        can_plan = self._has_arrivals and any(track.takes_prompts and track.has_room for track in self._tracks)
        came_back = first_landed(self._tracks) is not None
        return came_back or can_plan or bool(self._events) or self._is_stopping

    def _wake(self, _: Future[StepResult]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _count(self, step: Step) -> None:
        self._round_id += 1
        self._progress_at = self._clock.monotonic()
        self._stats.steps += 1
        self._stats.rows_per_step.observe(step.num_rows)
        num_decode = sum(len(lane.tokens) == 1 for lane in step.lanes)
        self._stats.decode_rows += num_decode
        self._stats.prefill_rows += step.num_rows - num_decode

    def _deliver(self, outcome: Outcome) -> None:
        """Gives a round's tokens to their reply; ends the request where the reply ends, or where the tokens or their text failed."""
        live = self._live[outcome.sequence.request.request_id]
        if outcome.failure is not None:
            self._finish(live, FinishReason.ERROR, error=RequestFailedError(f"computing failed: {outcome.failure}"))
            return
        try:
            event, stop = live.reply.push(outcome.sampled, self._clock.monotonic(), self._stats_of(live))
        except Exception as error:
            logger.exception("making text of request %s failed", live.sequence.request.request_id)
            self._scheduler.end(live.sequence)
            self._finish(live, FinishReason.ERROR, error=RequestFailedError(f"making text failed: {error}"))
            return
        if stop is None:
            self._events.append(event)
        else:
            self._scheduler.end(live.sequence)
            self._finish(live, stop.reason, event=event, matched=stop.matched)

    def _finish(
        self,
        live: _Live,
        reason: FinishReason,
        *,
        event: TokenEvent | None = None,
        matched: str | int | None = None,
        error: EngineError | None = None,
    ) -> None:
        """Makes the one event with `finish` of a request that the scheduler has ended."""
        now = self._clock.monotonic()
        del self._live[live.sequence.request.request_id]
        self._finished_at.append(now)
        cached_tokens = live.sequence.cached_tokens or 0
        stats = self._stats_of(live)
        finish = live.reply.finish(reason, now, stats, cached_tokens=cached_tokens, matched=matched, error=error)
        self._events.append(replace(event or live.reply.last_event(), finish=finish))

    def _stats_of(self, live: _Live) -> EngineStats:
        """What its latencies and tokens are counted in."""
        return self._spare_stats if live.sequence.request.alone else self._stats

    def _expire(self) -> None:
        for sequence in expired((live.sequence for live in self._live.values()), self._clock.monotonic()):
            error = DeadlineExceededError("the deadline passed before the reply was complete")
            self._scheduler.end(sequence)
            self._finish(self._live[sequence.request.request_id], FinishReason.ERROR, error=error)

    def _report(self) -> RoundReport:
        report = RoundReport(tuple(self._events), self.load())
        self._events.clear()
        return report

    def submit(self, request: Request) -> None:
        """Accepts a request; what becomes of it comes in the reports. Raises InvalidRequestError, QueueFullError, DrainingError, or
        RequestFailedError when the text of emitted_token_ids cannot be made."""
        check_servable(request, self._group.info)
        now = self._clock.monotonic()
        try:
            reply = Reply(request, self._text, self._group.info.eos_token_ids, submitted_at=now)
        except Exception as error:
            raise RequestFailedError(f"making text of emitted_token_ids failed: {error}") from error
        deadline = None if request.deadline is None else now + (request.deadline - self._clock.time())
        with self._changed:
            if self._is_draining or self._is_stopping:
                raise DrainingError("this replica is stopping and takes no new requests")
            if request.request_id in self._live:
                raise InvalidRequestError(f"request_id: {request.request_id} is live already", param="request_id")
            if self._scheduler.is_full_for(request):
                num_waiting = self._scheduler.num_waiting
                raise QueueFullError(
                    f"{num_waiting} requests are waiting already",
                    retry_after_s=retry_after_s(num_waiting, self._finished_at, now),
                )
            if not self._has_work():
                self._progress_at = now
            self._live[request.request_id] = _Live(self._scheduler.submit(request, deadline), reply)
            self._has_arrivals = True
            self._changed.notify_all()

    def abort(self, request_id: str) -> bool:
        """Ends a request now; its lane and blocks are free within a round. False when it is not live."""
        with self._changed:
            live = self._live.get(request_id)
            if live is None:
                return False
            self._scheduler.end(live.sequence)
            self._finish(live, FinishReason.CANCELLED)
            self._changed.notify_all()
            return True

    def load(self) -> Load:
        """How loaded the engine is now."""
        with self._changed:
            return Load(
                running=self._scheduler.num_running,
                waiting=self._scheduler.num_waiting,
                outstanding_tokens=sum(
                    _num_outstanding(live.sequence) for live in self._live.values() if not live.sequence.request.alone
                ),
                free_blocks=self._scheduler.pool.num_free,
                total_blocks=self._scheduler.pool.num_blocks,
                round_id=self._round_id,
                draining=self._is_draining or self._is_stopping,
            )

    def stats(self) -> EngineStats:
        """Everything counted so far; a copy."""
        figures = self._group.figures()
        with self._changed:
            pool = self._scheduler.pool
            self._stats.running = self._scheduler.num_running
            self._stats.waiting = self._scheduler.num_waiting
            self._stats.kv_usage = 1.0 - pool.num_free / pool.num_blocks
            host = pool.host
            self._stats.host_blocks, self._stats.host_blocks_used = host.num_slots, host.num_used
            self._stats.host_saves, self._stats.host_restores = host.num_saves, host.num_restores
            self._stats.host_evictions = host.num_evictions
            self._stats.device = figures
            return self._stats.snapshot()

    def healthy(self) -> bool:
        """Whether the loop runs, rounds succeed and, with work to do, one has finished lately on each track that has any. An idle engine is
        healthy."""
        with self._changed:
            runs = self._thread is not None and self._thread.is_alive() and not self._is_stopping
            since = [track.progress_at for track in self._tracks if track.flights]
            if self._has_work():
                since.append(self._progress_at)
            waited_s = self._clock.monotonic() - min(since) if since else 0.0
            return runs and self._num_failed_rounds < MAX_FAILED_ROUNDS and waited_s <= self._config.progress_timeout_s

    def drain(self, timeout_s: float) -> bool:
        """Takes no new requests from now on, and waits until those that are live have ended. False when some have not within the time."""
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(lambda: not (self._live or self._events or self._is_reporting), timeout_s)

    def stop(self) -> None:
        """Ends what is live with DrainingError, then the loop and the group."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._group.close()


def _num_outstanding(sequence: Sequence) -> int:
    """Tokens still to compute and, up to REPLY_ESTIMATE, to generate."""
    to_compute = sequence.num_tokens - sequence.num_computed
    return to_compute + min(sequence.max_len - sequence.num_tokens, REPLY_ESTIMATE)
