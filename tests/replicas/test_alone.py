"""Requests that run alone, in spare time, or without the prefix cache: they share no round, give way to every other, and have the same tokens."""

import random
from dataclasses import replace

import pytest

from espalier.replicas.errors import DeadlineExceededError
from espalier.replicas.request import FinishReason, Request
from espalier.replicas.schedule.step import Step
from tests.support.engine_runs import running
from tests.support.fake_engines import Gate, assert_exact, make_engine
from tests.support.fake_shard import FakeShard, fake_config, fake_info
from tests.support.rounds import Rounds, make_request
from tests.support.waiting import wait_until


def alone(request_id: str, prompt: range, *, max_tokens: int = 8) -> Request:
    return replace(make_request(request_id, prompt, max_tokens=max_tokens), alone=True, use_prefix_cache=False)


def uncached(request_id: str, prompt: range, *, max_tokens: int = 8) -> Request:
    return replace(make_request(request_id, prompt, max_tokens=max_tokens), use_prefix_cache=False)


class Rows:
    """Whose rows each step has. Sequence ids change with every admission, so it keeps those that an alone request ever had."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.alone_ids: set[int] = set()
        self.steps: list[Step] = []

    def plan(self) -> Step | None:
        step = self._rounds.plan()
        if step is not None:
            self.steps.append(step)
            for sequence in self._rounds.sequences.values():
                if sequence.request.alone and sequence._residence is not None:
                    self.alone_ids.add(sequence.residence.seq_id)
        return step

    def run_all(self) -> None:
        while True:
            while self.plan():
                pass
            if self._rounds.commit() is None:
                break
        self._rounds.finish()

    @property
    def mixed(self) -> list[Step]:
        return [
            step
            for step in self.steps
            if len(step.lanes) > 1 and any(lane.seq_id in self.alone_ids for lane in step.lanes)
        ]


@pytest.mark.parametrize("depth", [1, 2])
def test_it_waits_until_nobody_else_is_there(depth: int) -> None:
    shard = FakeShard(fake_info(eos=()))
    rounds = Rounds(fake_config(max_steps_in_flight=depth), shard)
    rows = Rows(rounds)
    rounds.submit(alone("audit", range(20)))
    rounds.submit(make_request("user", range(30, 45), max_tokens=9))
    rows.run_all()
    begun = [begin.prompt_len for step in rows.steps for begin in step.begins]
    assert begun == [15, 20], "the user's request first, though it came later"
    assert rows.mixed == [] and rows.alone_ids == {1}
    rounds.assert_exact()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_lanes", [1, 4])
def test_it_gives_way_at_the_next_round_and_goes_on_later(depth: int, max_lanes: int) -> None:
    shard = FakeShard(fake_info(eos=()), max_lanes=max_lanes)
    rounds = Rounds(fake_config(max_lanes=max_lanes, max_steps_in_flight=depth), shard)
    rows = Rows(rounds)
    rounds.submit(alone("audit", range(40), max_tokens=30))
    for _ in range(12):
        while rows.plan():
            pass
        rounds.commit()
    assert 0 < len(rounds.tokens["audit"]) < 30
    rounds.submit(make_request("user", range(50, 70)))
    in_flight = len(rounds.flying)
    waited = 0
    while not any(begin.prompt_len == 20 for step in rows.steps for begin in step.begins):
        while rows.plan():
            pass
        rounds.commit()
        waited += 1
    assert waited <= in_flight + 1 <= depth + 1
    rows.run_all()
    assert rows.mixed == [] and len(rows.alone_ids) == 2
    assert rounds.stats.preemptions == 0, "giving way is no sign of too few blocks"
    rounds.assert_exact()


def test_a_bound_on_waiting_requests_does_not_count_it() -> None:
    rounds = Rounds(fake_config(max_lanes=1, max_waiting=0), FakeShard(fake_info(eos=()), max_lanes=1))
    user = make_request("user", range(9))
    rounds.submit(alone("audit", range(20)))
    assert rounds.scheduler.is_full_for(alone("second", range(20))), "one at a time"
    assert not rounds.scheduler.is_full_for(user)
    assert rounds.plan() and rounds.scheduler.num_running == rounds.scheduler.num_waiting == 0
    assert not rounds.scheduler.is_full_for(user), "the lane is the user's"
    rounds.submit(user)
    assert rounds.scheduler.is_full_for(make_request("late", range(9)))
    rounds.finish()
    rounds.assert_exact()


def test_one_that_waits_can_be_ended() -> None:
    rounds = Rounds(fake_config(), FakeShard(fake_info(eos=())))
    rounds.submit(make_request("user", range(9)))
    rounds.submit(alone("audit", range(20)))
    assert rounds.plan()
    rounds.abort("audit")
    rounds.finish()
    assert rounds.tokens["audit"] == []
    rounds.assert_exact("user")


@pytest.mark.parametrize("seed", range(16))
def test_a_crowd_never_shares_a_round_with_it(seed: int) -> None:
    draw = random.Random(seed)
    shard = FakeShard(fake_info(num_blocks=8, vocab_size=211), max_lanes=4)
    config = fake_config(max_lanes=4, batch_tokens=24, max_steps_in_flight=1 + seed // 2 % 2, tracks=1 + seed % 2)
    rounds = Rounds(config, shard)
    rows = Rows(rounds)
    for number in range(20):
        request = make_request(str(number), [number % 3, *range(draw.randint(1, 30))], max_tokens=draw.randint(1, 60))
        if draw.random() < 0.5:
            request = replace(request, alone=True, use_prefix_cache=draw.random() < 0.5)
        rounds.submit(request)
        for _ in range(draw.randint(0, 40)):
            draw.choice([rows.plan, rows.plan, rounds.commit])()
    rows.run_all()
    assert rows.mixed == [] and len(rows.alone_ids) > 3
    rounds.assert_exact()


def test_without_the_prefix_cache_nothing_is_taken_and_nothing_is_left() -> None:
    prompt = range(100, 180)
    rounds = Rounds(fake_config(), FakeShard(fake_info(eos=())))
    rounds.run(uncached("first", prompt))
    rounds.run(make_request("cold", prompt))
    rounds.run(make_request("warm", prompt))
    rounds.run(uncached("again", prompt))
    cached = {name: sequence.cached_tokens for name, sequence in rounds.sequences.items()}
    assert cached == {"first": 0, "cold": 0, "warm": 64, "again": 0}
    assert (rounds.stats.prefix_queries, rounds.stats.prefix_hits) == (160, 64)
    assert rounds.tokens["first"] == rounds.tokens["cold"] == rounds.tokens["warm"] == rounds.tokens["again"]
    rounds.assert_exact()


def test_the_engines_figures_of_requests_leave_it_out() -> None:
    gate = Gate()
    shard = FakeShard(fake_info(eos=()), on_step=gate)
    with running(make_engine(shard)) as run:
        gate.close()
        run.submit(alone("audit", range(20)))
        wait_until(gate.waiting.is_set, "a step is held", poll_s=0.001)
        load = run.engine.load()
        assert (load.running, load.waiting, load.outstanding_tokens) == (0, 0, 0)
        assert load.free_blocks < load.total_blocks
        gate.open()
        (answer,) = run.wait("audit")
        assert_exact(run, shard)
        assert answer.finish is not None and answer.finish.usage.cached_tokens == 0
        stats = run.engine.stats()
        assert (stats.prompt_tokens, stats.generation_tokens, stats.prefix_queries) == (0, 0, 0)
        assert stats.finished == dict.fromkeys(FinishReason, 0)
        assert stats.ttft_s.count == stats.inter_token_s.count == stats.e2e_s.count == 0
        assert stats.prefill_rows == 20 and stats.decode_rows == 7, "its rows are work all the same"


def test_its_deadline_holds_while_it_waits_for_others() -> None:
    shard = FakeShard(fake_info(num_blocks=128, eos=()))
    with running(make_engine(shard)) as run:
        run.submit(make_request("user", range(20), max_tokens=2000))
        run.wait_tokens("user", 1)
        run.submit(replace(alone("audit", range(20)), deadline=1.0))
        (answer,) = run.wait("audit")
        assert answer.finish is not None and isinstance(answer.finish.error, DeadlineExceededError)
        assert answer.token_ids == []
        assert run.engine.abort("user"), "it runs all the while"
