"""Engine: every accepted request ends once, with the tokens of its solo run; whatever else ends it is told by its error."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from espalier.replicas.engine import Engine
from espalier.replicas.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from espalier.replicas.group import LocalShardGroup
from espalier.replicas.request import FinishReason, Request, SamplingParams
from espalier.replicas.schedule.step import Lane, Step, StepCommit
from tests.support.engine_runs import TIMEOUT_S, EngineRun, running
from tests.support.fake_shard import FakeShard, FakeText, fake_config, fake_info, solo_tokens
from tests.support.rounds import make_request


class Gate:
    """Holds the shard before each step while closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = threading.Event()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self, step: Step) -> None:
        if not self._open.is_set():
            self.waiting.set()
            assert self._open.wait(TIMEOUT_S)


def make_engine(
    shard: FakeShard,
    *,
    text: FakeText | None = None,
    max_lanes: int = 16,
    max_waiting: int = 256,
    depth: int = 2,
    progress_timeout_s: float = 10.0,
) -> Engine:
    config = fake_config(
        max_lanes=max_lanes,
        max_waiting=max_waiting,
        max_steps_in_flight=depth,
        progress_timeout_s=progress_timeout_s,
    )
    return Engine(config, LocalShardGroup(shard), text or FakeText())


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < limit, "the condition never came"
        time.sleep(0.001)


def assert_exact(run: EngineRun, shard: FakeShard, *request_ids: str) -> None:
    for request_id in request_ids or run.answers:
        answer = run.answers[request_id]
        solo = solo_tokens(answer.request, shard.info)
        assert (*answer.request.emitted_token_ids, *answer.token_ids) == solo, request_id
        assert answer.finish is not None and answer.finish.error is None
    assert shard.violations == []


def assert_all_free(engine: Engine) -> None:
    wait_until(lambda: engine.load().free_blocks == engine.load().total_blocks)
    load = engine.load()
    assert (load.running, load.waiting, load.outstanding_tokens) == (0, 0, 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("level", [1, 2, 3, 5, 8, 16])
def test_concurrent_is_alone(level: int, depth: int) -> None:
    shard = FakeShard(fake_info(num_blocks=256))
    with running(make_engine(shard, depth=depth)) as run:
        run.run(*(make_request(str(i), range(i, i + 7 * i + 1), max_tokens=20 + i) for i in range(level)))
        assert_exact(run, shard)
        assert_all_free(run.engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tail", [0, 1, 15, 16, 17, 127, 128, 129])
def test_cold_is_warm_is_after_eviction(tail: int, depth: int) -> None:
    shard = FakeShard(fake_info(num_blocks=20, eos=()))
    prompt = range(100, 100 + 128 + tail)
    with running(make_engine(shard, depth=depth)) as run:
        (cold,) = run.run(make_request("cold", prompt))
        (warm,) = run.run(make_request("warm", prompt))
        run.run(make_request("other", range(500, 800), max_tokens=20))
        (evicted,) = run.run(make_request("evicted", prompt))
        assert_exact(run, shard)
        finishes = [answer.finish for answer in (cold, warm, evicted)]
        cached = [finish.usage.cached_tokens for finish in finishes if finish is not None]
        assert cached == [0, (len(prompt) - 1) // 16 * 16, 0]
        stats = run.engine.stats()
        assert stats.prefix_hits == sum(cached) and stats.prefix_queries == 3 * len(prompt) + 300


def test_preempted_is_not_preempted() -> None:
    shard = FakeShard(fake_info(num_blocks=9, eos=()))
    with running(make_engine(shard)) as run:
        run.run(*(make_request(str(i), range(i, i + 10), max_tokens=60) for i in range(5)))
        assert run.engine.stats().preemptions > 0
        assert_exact(run, shard)
        assert_all_free(run.engine)


def test_events_carry_text_hash_usage_and_reason() -> None:
    shard = FakeShard(fake_info(eos=()))
    with running(make_engine(shard)) as run:
        params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)
        (answer,) = run.run(make_request("a", range(20), params=params))
        assert_exact(run, shard)
    finish = answer.finish
    assert finish is not None
    assert answer.text == "".join(f"<{token}>" for token in answer.token_ids)
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    assert (finish.reason, finish.matched_stop) == (FinishReason.LENGTH, None)
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (20, 5)
    assert min(finish.timings.queue_s, finish.timings.prefill_s, finish.timings.decode_s) >= 0.0


def test_ends_by_token_and_by_string() -> None:
    shard = FakeShard(fake_info(eos=()))
    solo = solo_tokens(make_request("a", range(20), max_tokens=9), shard.info)
    with running(make_engine(shard)) as run:
        by_token = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(solo[4],))
        by_string = SamplingParams(temperature=0.0, max_tokens=9, stop=(f"{solo[2]}><{solo[3]}",))
        token, string = run.run(
            make_request("token", range(20), params=by_token), make_request("string", range(20), params=by_string)
        )
        assert_all_free(run.engine)
    assert tuple(token.token_ids) == solo[:5] and token.finish is not None
    assert (token.finish.reason, token.finish.matched_stop) == (FinishReason.STOP, solo[4])
    assert tuple(string.token_ids) == solo[:4] and string.finish is not None
    assert (string.finish.reason, string.finish.matched_stop) == (FinishReason.STOP, by_string.stop[0])
    assert string.text == "".join(f"<{t}>" for t in solo[:2]) + "<"


@pytest.mark.parametrize("kept", [1, 12, 29])
def test_a_resumed_reply_goes_on_exactly(kept: int) -> None:
    shard = FakeShard(fake_info(eos=()))
    whole = make_request("whole", range(20), max_tokens=30)
    solo = solo_tokens(whole, shard.info)
    with running(make_engine(shard)) as run:
        (answer,) = run.run(make_request("resumed", range(20), max_tokens=30, emitted=solo[:kept]))
        assert_exact(run, shard)
    assert answer.finish is not None and answer.finish.usage.completion_tokens == 30
    assert answer.text == "".join(f"<{token}>" for token in solo[kept:])


def test_an_abort_frees_lane_and_blocks_and_leaves_the_next_reply_exact() -> None:
    shard = FakeShard(fake_info(eos=()), max_lanes=2)
    with running(make_engine(shard, max_lanes=2)) as run:
        run.submit(*(make_request(str(i), range(i, i + 40), max_tokens=900) for i in range(4)))
        run.wait_tokens("0", 3)
        for i in range(4):
            assert run.engine.abort(str(i))
            assert not run.engine.abort(str(i))
        answers = run.wait()
        assert all(answer.finish and answer.finish.reason is FinishReason.CANCELLED for answer in answers)
        assert_all_free(run.engine)
        run.run(make_request("next", range(40)))
        assert_exact(run, shard, "next")
        assert not run.engine.abort("unknown")


def test_queued_and_running_requests_end_at_their_deadlines() -> None:
    gate = Gate()
    shard = FakeShard(fake_info(eos=()), on_step=gate)
    with running(make_engine(shard, max_lanes=1)) as run:
        gate.close()
        run.submit(make_request("running", range(20), max_tokens=900, deadline=time.time() + 0.05))
        run.submit(make_request("queued", range(20), deadline=time.time() + 0.05))
        run.submit(make_request("patient", range(30), deadline=time.time() + 300.0))
        # Both end although the round that runs does not.
        for answer in run.wait("running", "queued"):
            assert answer.finish is not None and answer.finish.reason is FinishReason.ERROR
            assert isinstance(answer.finish.error, DeadlineExceededError)
        gate.open()
        run.wait()
        assert_exact(run, shard, "patient")
        assert_all_free(run.engine)


def test_a_deadline_may_be_further_away_than_a_lock_can_wait() -> None:
    shard = FakeShard(fake_info())
    with running(make_engine(shard)) as run:
        run.run(make_request("patient", range(30), deadline=1e300))
        assert_exact(run, shard, "patient")


def test_a_full_queue_turns_away_and_says_when_to_come_back() -> None:
    gate = Gate()
    shard = FakeShard(fake_info(eos=()), on_step=gate)
    with running(make_engine(shard, max_lanes=1, max_waiting=2)) as run:
        gate.close()
        run.submit(make_request("runs", range(20)))
        assert gate.waiting.wait(TIMEOUT_S)
        run.submit(make_request("waits", range(20)), make_request("waits too", range(20)))
        with pytest.raises(QueueFullError) as caught:
            run.engine.submit(make_request("turned away", range(20)))
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1.0
        assert run.engine.load().waiting == run.engine.stats().waiting == 2
        gate.open()
        run.wait()
        assert_exact(run, shard)


def test_a_request_that_cannot_be_served_or_is_live_is_refused() -> None:
    gate = Gate()
    shard = FakeShard(fake_info(), on_step=gate)
    with running(make_engine(shard)) as run:
        with pytest.raises(InvalidRequestError) as caught:
            run.engine.submit(make_request("long", range(20), max_tokens=10**6))
        assert caught.value.param == "max_tokens"
        gate.close()
        run.submit(make_request("a", range(20)))
        with pytest.raises(InvalidRequestError) as caught:
            run.engine.submit(make_request("a", range(20)))
        assert caught.value.param == "request_id"
        gate.open()
        run.wait()
        assert_exact(run, shard)


@pytest.mark.parametrize("place", ["prefill", "sample"])
def test_a_fault_in_one_lane_leaves_its_neighbours_exact(place: str) -> None:
    def fault(step: Step, lane: Lane) -> str | None:
        in_place = lane.start == 0 if place == "prefill" else lane.start > 30
        return "injected" if lane.tokens and in_place and lane.seq_id == 2 else None

    shard = FakeShard(fake_info(eos=()), fault=fault)
    with running(make_engine(shard)) as run:
        run.run(*(make_request(str(i), range(i, i + 20), max_tokens=30) for i in range(5)))
        failed = run.answers["2"].finish
        assert failed is not None and isinstance(failed.error, RequestFailedError) and "injected" in str(failed.error)
        assert_exact(run, shard, "0", "1", "3", "4")
        assert_all_free(run.engine)
        assert run.engine.healthy()


def test_a_fault_in_the_text_leaves_the_neighbours_exact() -> None:
    shard = FakeShard(fake_info(eos=()))
    requests = [make_request(str(i), range(i, i + 20), max_tokens=30) for i in range(4)]
    solo = [solo_tokens(request, shard.info) for request in requests]
    broken = next(token for token in solo[1][5:] if all(token not in other for other in (solo[0], solo[2], solo[3])))
    with running(make_engine(shard, text=FakeText(frozenset([broken])))) as run:
        run.run(*requests)
        failed = run.answers["1"]
        assert failed.finish is not None and isinstance(failed.finish.error, RequestFailedError)
        assert tuple(failed.token_ids) == solo[1][: solo[1].index(broken)]
        assert_exact(run, shard, "0", "2", "3")
        assert_all_free(run.engine)
        with pytest.raises(RequestFailedError):
            run.engine.submit(make_request("resumed", range(20), emitted=[broken]))


def test_a_round_that_fails_as_a_whole_ends_its_requests_and_the_engine_goes_on() -> None:
    def breaks(step: Step) -> None:
        if step.step_id == 2:
            raise RuntimeError("lost")

    shard = FakeShard(fake_info(eos=()), on_step=breaks)
    with running(make_engine(shard)) as run:
        run.run(*(make_request(str(i), range(i, i + 20)) for i in range(3)))
        run.run(make_request("next", range(20)))
        assert_exact(run, shard, "next")
        assert run.engine.healthy()
        assert_all_free(run.engine)
        # Arrival times decide who was in that round; whoever was has been told.
        errors = [answer.finish.error for answer in run.answers.values() if answer.finish and answer.finish.error]
        assert errors and all(isinstance(error, RequestFailedError) for error in errors)


def test_rounds_that_keep_failing_make_the_engine_unhealthy() -> None:
    def breaks(step: Step) -> None:
        raise RuntimeError("lost")

    with running(make_engine(FakeShard(fake_info(), on_step=breaks))) as run:
        for i in range(3):
            (answer,) = run.run(make_request(str(i), range(20)))
            assert answer.finish is not None and isinstance(answer.finish.error, RequestFailedError)
        assert not run.engine.healthy()


def test_a_commit_that_fails_fails_the_rounds_after_it() -> None:
    class Forgetful(FakeShard):
        def commit(self, commit: StepCommit) -> None:
            raise RuntimeError("forgotten")

    with running(make_engine(Forgetful(fake_info()))) as run:
        (answer,) = run.run(make_request("a", range(20), max_tokens=20))
        assert answer.finish is not None and "forgotten" in str(answer.finish.error)


def test_health_is_progress() -> None:
    @dataclass
    class FakeClock:
        now: float = 1000.0

        def time(self) -> float:
            return self.now

        def monotonic(self) -> float:
            return self.now

    gate, clock = Gate(), FakeClock()
    shard = FakeShard(fake_info(eos=()), on_step=gate)
    engine = Engine(fake_config(progress_timeout_s=10.0), LocalShardGroup(shard), FakeText(), clock=clock)
    assert not engine.healthy(), "not started"
    with running(engine) as run:
        clock.now += 1000.0
        assert engine.healthy(), "idle"
        gate.close()
        run.submit(make_request("a", range(20)))
        assert gate.waiting.wait(TIMEOUT_S)
        clock.now += 9.0
        assert engine.healthy()
        clock.now += 2.0
        assert not engine.healthy()
        assert engine.abort("a")
        run.wait("a")
        assert not engine.healthy(), "the round still hangs, though nobody waits for it"
        gate.open()
        wait_until(engine.healthy)
    assert not engine.healthy(), "stopped"


def test_times_are_those_of_the_clock() -> None:
    class SteppingClock:
        """A second passes between any two readings."""

        now = 0.0

        def time(self) -> float:
            return 5_000_000.0 + self.now

        def monotonic(self) -> float:
            self.now += 1.0
            return self.now

    shard = FakeShard(fake_info(eos=()))
    engine = Engine(fake_config(), LocalShardGroup(shard), FakeText(), clock=SteppingClock())
    with running(engine) as run:
        (answer,) = run.run(make_request("a", range(20), max_tokens=4))
        stats = engine.stats()
    assert answer.finish is not None
    timings = answer.finish.timings
    assert min(timings.queue_s, timings.prefill_s) >= 1.0 and timings.decode_s >= 3.0
    assert (stats.ttft_s.count, stats.inter_token_s.count, stats.e2e_s.count) == (1, 3, 1)
    assert stats.ttft_s.total == timings.queue_s + timings.prefill_s
    assert stats.inter_token_s.total == timings.decode_s
    assert stats.e2e_s.total > stats.ttft_s.total + timings.decode_s


def test_counts() -> None:
    shard = FakeShard(fake_info(eos=()))
    with running(make_engine(shard)) as run:
        run.run(make_request("a", range(20), max_tokens=4))
        run.run(make_request("b", range(20), max_tokens=4))
        stats = run.engine.stats()
        wait_until(lambda: [commit.step_id for commit in shard.commits] == [step.step_id for step in shard.steps])
    assert (stats.prompt_tokens, stats.generation_tokens) == (40, 8)
    assert (stats.prefix_queries, stats.prefix_hits) == (40, 16)
    assert (stats.prefill_rows, stats.decode_rows) == (20 + 4, 6)
    assert stats.finished == {reason: 2 * (reason is FinishReason.LENGTH) for reason in FinishReason}
    assert stats.steps == stats.rows_per_step.count == len(shard.steps)
    assert (stats.running, stats.waiting, stats.kv_usage, stats.preemptions) == (0, 0, 0.0, 0)


def test_load_counts_what_is_still_to_do() -> None:
    gate = Gate()
    shard = FakeShard(fake_info(eos=()), on_step=gate)
    with running(make_engine(shard, max_lanes=1)) as run:
        gate.close()
        run.submit(make_request("a", range(20), max_tokens=10), make_request("b", range(30), max_tokens=600))
        assert gate.waiting.wait(TIMEOUT_S)
        load = run.engine.load()
        assert load.outstanding_tokens == 20 + 10 + 30 + 256
        assert (load.running, load.waiting, load.draining) == (1, 1, False)
        assert load.total_blocks - load.free_blocks >= 2
        assert run.engine.abort("b")
        gate.open()
        run.wait()
        rounds = [load.round_id for load in run.loads]
        assert rounds == sorted(rounds) and rounds[-1] >= 10


def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    gate = Gate()
    shard = FakeShard(fake_info(eos=()), on_step=gate)
    with running(make_engine(shard)) as run:
        gate.close()
        run.submit(make_request("a", range(20)))
        assert not run.engine.drain(0.01)
        assert run.engine.load().draining
        with pytest.raises(DrainingError):
            run.engine.submit(make_request("b", range(20)))
        gate.open()
        assert run.engine.drain(TIMEOUT_S)
        assert run.answers["a"].finish is not None, "reported before drain returns"
        assert_exact(run, shard)


def test_stop_ends_what_is_live_with_an_error_even_when_the_shard_hangs() -> None:
    gate = Gate()
    shard = FakeShard(fake_info(eos=()), on_step=gate)
    with running(make_engine(shard, max_lanes=1)) as run:
        gate.close()
        run.submit(make_request("running", range(20)), make_request("queued", range(20)))
        assert gate.waiting.wait(TIMEOUT_S)
        run.engine.stop()
        for answer in run.wait():
            assert answer.finish is not None and isinstance(answer.finish.error, DrainingError)
        with pytest.raises(DrainingError):
            run.engine.submit(make_request("late", range(20)))
        gate.open()


def test_a_broken_loop_ends_what_is_live_and_is_unhealthy() -> None:
    class Lying(FakeShard):
        """Returns tokens for rows that were not sampled."""

        def execute(self, step: Step):  # type: ignore[no-untyped-def]
            result = super().execute(step)
            return type(result)(step.step_id, {seq_id: tokens * 2 for seq_id, tokens in result.sampled.items()}, {})

    with running(make_engine(Lying(fake_info()))) as run:
        (answer,) = run.run(make_request("a", range(20)))
        assert answer.finish is not None and isinstance(answer.finish.error, RequestFailedError)
        assert not run.engine.healthy()
        with pytest.raises(DrainingError):
            run.engine.submit(make_request("b", range(20)))


def test_a_storm_of_requests_and_aborts_from_many_threads() -> None:
    shard = FakeShard(fake_info(num_blocks=24, vocab_size=97), max_lanes=6)
    with running(make_engine(shard, max_lanes=6)) as run:

        def storm(worker: int) -> None:
            for i in range(12):
                request = storm_request(worker, i)
                run.submit(request)
                if i % 3 == 0:
                    run.wait_tokens(request.request_id, i)
                    run.engine.abort(request.request_id)

        workers = [threading.Thread(target=storm, args=(worker,)) for worker in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(TIMEOUT_S)
        answers = run.wait()
        assert len(answers) == 48 and shard.violations == []
        for answer in answers:
            solo = solo_tokens(answer.request, shard.info)
            assert answer.finish is not None and answer.finish.error is None
            ended = answer.finish.reason is not FinishReason.CANCELLED
            assert tuple(answer.token_ids) == (solo if ended else solo[: len(answer.token_ids)])
        assert sum(run.engine.stats().finished.values()) == 48
        assert_all_free(run.engine)


def storm_request(worker: int, index: int) -> Request:
    prompt = [(worker + position) % 97 for position in range(3 + 7 * index)]
    params = SamplingParams(temperature=0.0, max_tokens=5 + 4 * index, presence_penalty=float(index % 2))
    return make_request(f"{worker}-{index}", prompt, params=params, priority=index % 3 - 1)
