"""Engine: what fails ends what it touches with an explicit error, its neighbours stay exact; drain, stop and a broken loop lose nothing."""

from dataclasses import dataclass

import pytest

from espalier.replicas.engine import Engine
from espalier.replicas.errors import (
    DrainingError,
    RequestFailedError,
)
from espalier.replicas.group import LocalShardGroup
from espalier.replicas.schedule.step import Lane, Step, StepCommit
from tests.support.engine_runs import TIMEOUT_S, running
from tests.support.fake_engines import Gate, assert_all_free, assert_exact, make_engine
from tests.support.fake_shard import FakeShard, FakeText, fake_config, fake_info, solo_tokens
from tests.support.rounds import make_request
from tests.support.waiting import wait_until


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
        wait_until(engine.healthy, "the engine is healthy", poll_s=0.001)
    assert not engine.healthy(), "stopped"


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
