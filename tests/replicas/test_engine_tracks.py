"""Engine with two tracks: each goes on at its own pace, and what comes of every request is what came of it alone."""

import random

import pytest

from espalier.replicas.engine import Engine
from espalier.replicas.request import FinishReason, SamplingParams
from espalier.replicas.schedule.step import Step
from espalier.replicas.schedule.tracks import DECODE, PROMPT
from espalier.replicas.stats import DeviceFigures
from tests.support.engine_runs import TIMEOUT_S, running
from tests.support.fake_engines import assert_all_free, assert_exact
from tests.support.fake_shard import FakeShard, FakeText, fake_config, fake_info, solo_tokens
from tests.support.rounds import make_request
from tests.support.tracked_group import Hold, TrackedGroup


def make_engine(
    shard: FakeShard,
    *,
    hold: Hold | None = None,
    depth: int = 2,
    max_lanes: int = 16,
    figures: DeviceFigures | None = None,
) -> Engine:
    config = fake_config(tracks=2, max_steps_in_flight=depth, max_lanes=max_lanes)
    return Engine(config, TrackedGroup(shard, hold=hold, figures=figures), FakeText())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("level", [1, 2, 3, 5, 8, 16])
def test_concurrent_is_alone(level: int, depth: int) -> None:
    shard = FakeShard(fake_info(num_blocks=256))
    with running(make_engine(shard, depth=depth)) as run:
        run.run(*(make_request(str(i), range(i, i + 7 * i + 1), max_tokens=20 + i) for i in range(level)))
        assert_exact(run, shard)
        assert_all_free(run.engine)
    assert {step.track for step in shard.steps} == {PROMPT, DECODE}


@pytest.mark.parametrize("slow", [PROMPT, DECODE])
def test_a_track_goes_on_while_the_other_waits(slow: str) -> None:
    hold = Hold(slow)
    shard = FakeShard(fake_info(num_blocks=256, eos=()))
    with running(make_engine(shard, hold=hold)) as run:
        run.submit(make_request("talks", range(20), max_tokens=2000))
        run.wait_tokens("talks", 2)
        hold.close()
        run.submit(make_request("comes", range(50, 150), max_tokens=5))
        assert hold.holds.wait(TIMEOUT_S)
        if slow == PROMPT:
            run.wait_tokens("talks", len(run.answers["talks"].token_ids) + 50)
            assert run.answers["comes"].token_ids == []
        else:
            # Its first token comes of its prompt's last row, and needs no decoding.
            run.wait_tokens("comes", 1)
        assert run.engine.healthy()
        hold.open()
        run.wait()
        assert_exact(run, shard)
        assert_all_free(run.engine)


def test_an_abort_of_a_prompt_in_flight_leaves_the_others_exact() -> None:
    hold = Hold(PROMPT)
    shard = FakeShard(fake_info(num_blocks=256, eos=()))
    with running(make_engine(shard, hold=hold)) as run:
        run.submit(make_request("talks", range(20), max_tokens=400))
        run.wait_tokens("talks", 2)
        hold.close()
        run.submit(make_request("leaves", range(50, 250), max_tokens=5))
        assert hold.holds.wait(TIMEOUT_S)
        held = run.engine.load().free_blocks
        assert run.engine.abort("leaves")
        run.wait_tokens("talks", len(run.answers["talks"].token_ids) + 40)
        assert run.engine.load().free_blocks <= held, "a step in flight reads its blocks"
        run.submit(make_request("comes", range(300, 500), max_tokens=9))
        hold.open()
        run.wait()
        assert_exact(run, shard, "talks", "comes")
        assert_all_free(run.engine)


def test_a_round_that_fails_as_a_whole_ends_its_requests_and_both_tracks_go_on() -> None:
    lost: list[int] = []

    def breaks(step: Step) -> None:
        if step.track == DECODE and len(shard.steps) > 12 and not lost:
            lost.extend(lane.seq_id for lane in step.lanes)
            raise RuntimeError("lost")

    shard = FakeShard(fake_info(num_blocks=256, eos=()), on_step=breaks)
    with running(make_engine(shard, depth=1)) as run:
        run.run(*(make_request(str(i), range(i, i + 20), max_tokens=40) for i in range(4)))
        failed = {name for name, answer in run.answers.items() if answer.finish and answer.finish.error}
        assert len(failed) == len(lost) > 0
        run.run(make_request("next", range(20)))
        assert_exact(run, shard, "next", *(run.answers.keys() - failed))
        assert run.engine.healthy()
        assert_all_free(run.engine)


@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_that_comes_and_goes_leaks_nothing(seed: int) -> None:
    draw = random.Random(seed)
    shard = FakeShard(fake_info(num_blocks=24, vocab_size=211), max_lanes=6)
    with running(make_engine(shard, max_lanes=6, depth=1 + seed % 2)) as run:
        aborted = set()
        for number in range(80):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=draw.randint(1, 90),
                ignore_eos=draw.random() < 0.5,
                presence_penalty=draw.choice([0.0, 0.5]),
            )
            prompt = [number % 4, *range(draw.randint(1, 120))]
            run.submit(make_request(str(number), prompt, params=params, priority=draw.randint(0, 2)))
            if draw.random() < 0.3:
                victim = str(draw.randint(0, number))
                if run.engine.abort(victim):
                    aborted.add(victim)
        run.wait()
        assert_exact(run, shard, *(run.answers.keys() - aborted))
        for name in aborted:
            answer = run.answers[name]
            assert answer.finish is not None and answer.finish.reason is FinishReason.CANCELLED
            assert tuple(answer.token_ids) == solo_tokens(answer.request, shard.info)[: len(answer.token_ids)]
        assert_all_free(run.engine)
        assert run.engine.stats().preemptions > 0


def test_figures_of_the_device_are_the_groups() -> None:
    figures = DeviceFigures(**dict.fromkeys(DeviceFigures.__slots__, 7))
    with running(make_engine(FakeShard(fake_info()), figures=figures)) as run:
        assert run.engine.stats().device == figures
    with running(make_engine(FakeShard(fake_info()))) as run:
        assert run.engine.stats().device is None


def test_a_track_that_hangs_makes_the_engine_unhealthy_though_the_other_goes_on() -> None:
    class FakeClock:
        now = 1000.0

        def time(self) -> float:
            return self.now

        def monotonic(self) -> float:
            return self.now

    hold, clock = Hold(PROMPT), FakeClock()
    shard = FakeShard(fake_info(num_blocks=256, eos=()))
    config = fake_config(tracks=2, progress_timeout_s=10.0)
    with running(Engine(config, TrackedGroup(shard, hold=hold), FakeText(), clock=clock)) as run:
        run.submit(make_request("talks", range(20), max_tokens=3000))
        run.wait_tokens("talks", 2)
        clock.now += 1000.0
        # The rounds that were in flight end, and the next begin at the new time.
        run.wait_tokens("talks", len(run.answers["talks"].token_ids) + 10)
        assert run.engine.healthy(), "a track without work is no matter"
        hold.close()
        run.submit(make_request("comes", range(50, 150), max_tokens=5))
        assert hold.holds.wait(TIMEOUT_S)
        clock.now += 11.0
        run.wait_tokens("talks", len(run.answers["talks"].token_ids) + 10)
        assert not run.engine.healthy()
        hold.open()
        run.wait("comes")
        run.wait_tokens("talks", len(run.answers["talks"].token_ids) + 10)
        assert run.engine.healthy()
        assert run.engine.abort("talks")
