"""Scheduler: who runs and on which blocks. The tokens of every sequence equal those of its solo run, whatever happened to it."""

import pytest

from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.scheduler import accepted
from espalier.replicas.schedule.step import Lane, Step, StepResult
from tests.support.fake_shard import FakeShard, fake_config, fake_info
from tests.support.rounds import Rounds, make_request

LONG = SamplingParams(temperature=0.0, max_tokens=50, presence_penalty=0.5, seed=3)
PENALIZED = SamplingParams(temperature=0.0, max_tokens=40, presence_penalty=0.5, seed=3)


def lane_lengths(step: Step | None) -> list[tuple[int, int]]:
    assert step is not None
    return [(lane.seq_id, len(lane.tokens)) for lane in step.lanes]


def test_a_long_prompt_comes_in_chunks_beside_decoding_lanes() -> None:
    rounds = Rounds(fake_config(max_lanes=4, batch_tokens=8, max_steps_in_flight=1), FakeShard(fake_info(eos=())))
    rounds.submit(make_request("short", [1, 2], max_tokens=9))
    assert lane_lengths(rounds.plan()) == [(0, 2)]
    rounds.commit()
    rounds.submit(make_request("long", range(20)))
    for chunk in (7, 7, 6):
        assert lane_lengths(rounds.plan()) == [(0, 1), (1, chunk)]
        rounds.commit()
    assert lane_lengths(rounds.plan()) == [(0, 1), (1, 1)]
    rounds.finish()
    rounds.assert_exact()


def test_only_the_last_chunk_is_sampled_from() -> None:
    shard = FakeShard(fake_info(eos=()))
    rounds = Rounds(fake_config(max_lanes=4, batch_tokens=8), shard)
    rounds.run(make_request("long", range(20), max_tokens=1))
    assert [(lane.start, lane.num_sampled) for step in shard.steps for lane in step.lanes] == [(0, 0), (8, 0), (16, 1)]


def test_prompts_share_the_rows_in_order_of_rank() -> None:
    rounds = Rounds(fake_config(max_lanes=4, batch_tokens=32), FakeShard(fake_info()))
    rounds.submit(make_request("first", range(10)))
    rounds.submit(make_request("second", range(30)))
    rounds.submit(make_request("urgent", range(5), priority=1))
    assert lane_lengths(rounds.plan()) == [(0, 5), (1, 10), (2, 16)]
    assert rounds.sequences["urgent"].residence.seq_id == 0
    rounds.finish()
    rounds.assert_exact()


def test_lanes_are_bounded_and_the_queue_goes_by_priority_then_arrival() -> None:
    shard = FakeShard(fake_info(eos=()), max_lanes=2)
    rounds = Rounds(fake_config(max_lanes=2), shard)
    for name, priority in (("a", 0), ("b", 0), ("c", 0), ("d", 7)):
        rounds.submit(make_request(name, [1, 2, 3], max_tokens=5, priority=priority))
    assert rounds.plan() and rounds.scheduler.num_running == 2 and rounds.scheduler.num_waiting == 2
    assert [name for name, sequence in rounds.sequences.items() if sequence.cached_tokens is not None] == ["a", "d"]
    rounds.finish()
    rounds.assert_exact()


def test_a_lane_is_free_again_when_the_last_step_of_an_aborted_sequence_is_done() -> None:
    rounds = Rounds(fake_config(max_lanes=1), FakeShard(fake_info(eos=()), max_lanes=1))
    rounds.submit(make_request("a", range(40), max_tokens=40))
    rounds.submit(make_request("b", range(50, 70)))
    assert rounds.plan() and rounds.plan()
    rounds.abort("a")
    rounds.commit()
    assert rounds.plan() is None
    rounds.commit()
    assert rounds.plan() is not None and rounds.scheduler.num_running == 1
    rounds.finish()
    rounds.assert_exact("b")


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_leaves_no_trace_in_the_tokens(depth: int) -> None:
    # Four sequences that begin with a block and come to 4, in a pool of 8.
    info = fake_info(num_blocks=8, eos=())
    rounds = Rounds(fake_config(max_lanes=4, max_steps_in_flight=depth), FakeShard(info, max_lanes=4))
    rounds.run(*(make_request(str(index), range(index, index + 10), params=LONG) for index in range(4)))
    assert rounds.stats.preemptions >= 2
    rounds.assert_exact()


def test_the_last_in_rank_is_preempted_and_the_first_never() -> None:
    info = fake_info(num_blocks=6, eos=())
    shard = FakeShard(info)
    rounds = Rounds(fake_config(max_lanes=3), shard)
    rounds.submit(make_request("old", range(20), max_tokens=60))
    rounds.submit(make_request("urgent", range(30, 50), max_tokens=60, priority=1))
    rounds.finish()
    begun = [begin.prompt_len for step in shard.steps for begin in step.begins]
    assert rounds.stats.preemptions >= 1 and len(begun) == 2 + rounds.stats.preemptions
    first_life = rounds.shard.steps[0].begins[0].seq_id
    lives = {lane.seq_id for step in shard.steps for lane in step.lanes}
    urgent_rows = sum(len(lane.tokens) for step in shard.steps for lane in step.lanes if lane.seq_id == first_life)
    assert first_life in lives and urgent_rows == 20 + 59, "the urgent one ran through in one life"
    rounds.assert_exact()


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    info = fake_info(num_blocks=7, eos=())
    rounds = Rounds(fake_config(max_lanes=2), FakeShard(info))
    rounds.run(make_request("old", range(20), max_tokens=60), make_request("new", range(30, 50), max_tokens=60))
    assert rounds.stats.preemptions >= 1
    assert rounds.sequences["new"].cached_tokens == 0
    assert rounds.stats.prompt_tokens == rounds.stats.prefix_queries == 40


def test_a_newcomer_waits_until_all_its_tokens_find_blocks() -> None:
    rounds = Rounds(fake_config(max_lanes=4), FakeShard(fake_info(num_blocks=8, eos=())))
    rounds.submit(make_request("a", range(60), max_tokens=40))
    rounds.plan()
    rounds.submit(make_request("big", range(100, 164), max_tokens=10))
    rounds.submit(make_request("small", [1, 2], max_tokens=2))
    rounds.plan()
    assert rounds.scheduler.num_waiting == 2, "the small one does not overtake"
    rounds.finish()
    rounds.assert_exact()


def test_emitted_tokens_are_gone_on_from() -> None:
    info = fake_info(eos=())
    rounds = Rounds(fake_config(), FakeShard(info))
    whole = make_request("whole", range(20), params=PENALIZED)
    rounds.run(whole)
    tokens = rounds.tokens["whole"]
    for kept in (1, 12, 13, 39):
        rounds.run(make_request(f"from {kept}", range(20), params=PENALIZED, emitted=tokens[:kept]))
    rounds.assert_exact()


def test_a_failed_lane_ends_its_sequence_alone() -> None:
    def fault(step: Step, lane: Lane) -> str | None:
        return "broken" if lane.seq_id == 1 and lane.start >= 22 else None

    rounds = Rounds(fake_config(), FakeShard(fake_info(eos=()), fault=fault))
    rounds.run(*(make_request(str(index), range(index, index + 20)) for index in range(3)))
    assert rounds.failures == {"1": "broken"}
    rounds.assert_exact("0", "2")
    # What the failed one computed before may be found, what came after may not.
    again = make_request("again", [*range(1, 21), *rounds.tokens["1"], 5, 6, 7])
    rounds.run(again)
    assert rounds.sequences["again"].cached_tokens == 16
    rounds.assert_exact("again")


def test_a_failed_preempted_sequence_does_not_come_back() -> None:
    failing: set[int] = set()
    rounds = Rounds(
        fake_config(),
        FakeShard(fake_info(num_blocks=5, eos=()), fault=lambda _, lane: "broken" if lane.seq_id in failing else None),
    )
    rounds.submit(make_request("old", range(16), max_tokens=50))
    rounds.submit(make_request("new", range(30, 46), max_tokens=50))
    while not rounds.stats.preemptions:
        while rounds.plan():
            pass
        if not rounds.stats.preemptions:
            rounds.commit()
    failing.add(1)
    rounds.finish()
    assert rounds.failures == {"new": "broken"}
    rounds.assert_exact("old")


def test_a_step_that_fails_as_a_whole_ends_its_sequences_and_no_others() -> None:
    def breaks(step: Step) -> None:
        if step.step_id == 3:
            raise RuntimeError("lost")

    rounds = Rounds(fake_config(batch_tokens=16), FakeShard(fake_info(eos=()), on_step=breaks))
    rounds.submit(make_request("a", [1, 2, 3], max_tokens=20))
    rounds.submit(make_request("b", range(9), max_tokens=2))
    for _ in range(5):
        while rounds.plan():
            pass
        rounds.commit()
    rounds.submit(make_request("c", [4, 5]))
    rounds.finish()
    assert rounds.failures == {"a": "lost"}
    rounds.assert_exact("b", "c")


def test_all_rows_of_a_lane_that_did_not_fail_are_accepted() -> None:
    step = Step(4, "main", lanes=(Lane(1, 0, (5, 6), 1), Lane(2, 9, (7,), 1)))
    commit = accepted(step, StepResult(4, sampled={1: ()}, failed={2: "broken"}))
    assert (commit.step_id, commit.accepted) == (4, ((1, 2),))
