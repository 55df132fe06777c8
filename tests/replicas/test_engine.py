"""Engine: every accepted request ends once, with the tokens of its solo run; whatever else ends it is told by its error."""

import threading
import time

import pytest

from espalier.replicas.engine import Engine
from espalier.replicas.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
)
from espalier.replicas.group import LocalShardGroup
from espalier.replicas.request import FinishReason, Request, SamplingParams
from tests.support.engine_runs import TIMEOUT_S, running
from tests.support.fake_engines import Gate, assert_all_free, assert_exact, make_engine
from tests.support.fake_shard import FakeShard, FakeText, fake_config, fake_info, solo_tokens
from tests.support.rounds import make_request
from tests.support.waiting import wait_until


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
        wait_until(
            lambda: [commit.step_id for commit in shard.commits] == [step.step_id for step in shard.steps],
            "every step is committed",
            poll_s=0.001,
        )
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
