"""Steps: differences only, bounded in size, and read before anything they read is freed."""

import pickle

import pytest

from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.builder import BLOCKS_PER_STEP, OBSERVED_PER_STEP
from espalier.replicas.schedule.step import Lane, Step, StepResult, TokenRef
from tests.support.fake_shard import FakeShard, fake_config, fake_info
from tests.support.rounds import Rounds, make_request

LONG = 100_000
# 256 rows, 1,024 block ids and 4,096 observed tokens of at most 5 bytes each, with room for the frames around them.
MAX_STEP_BYTES = 40_000


def test_rows_are_counted_over_all_lanes() -> None:
    step = Step(0, "main", lanes=(Lane(1, 0, (5, 6, 7), 1), Lane(2, 9, (TokenRef(0, 2),), 1)))
    assert step.num_rows == 4


@pytest.mark.parametrize("needs_history", [False, True])
def test_a_steps_bytes_are_bounded_at_any_context_length(needs_history: bool) -> None:
    info = fake_info(num_blocks=3 * LONG // 16, max_context=2 * LONG, eos=())
    shard = FakeShard(info)
    rounds = Rounds(fake_config(batch_tokens=256), shard)
    penalty = 1.1 if needs_history else 1.0
    params = SamplingParams(temperature=0.0, max_tokens=3, repetition_penalty=penalty)
    prompt = [token % 997 for token in range(LONG)]
    rounds.run(make_request("cold", prompt, params=params))
    num_cold = len(shard.steps)
    # Restored whole: the table and, if sampling needs it, the history go to the shards piece by piece, beside another lane's decoding.
    rounds.submit(make_request("other", range(500, 540), max_tokens=60))
    rounds.plan()
    other = rounds.sequences["other"].residence.seq_id
    rounds.run(make_request("warm", [*prompt, 1], params=params, priority=1))
    assert rounds.sequences["warm"].cached_tokens == LONG
    rounds.assert_exact()
    sizes = [len(pickle.dumps(step)) for step in shard.steps]
    assert max(sizes) < MAX_STEP_BYTES
    # Nothing is said twice.
    warm_steps = shard.steps[num_cold:]
    appended = [block_id for step in warm_steps for append in step.appends for block_id in append.block_ids]
    observed = [token for step in warm_steps for part in step.observed for token in part.token_ids]
    assert len(appended) == LONG // 16 + 1 + (40 + 60 + 14) // 16
    assert observed == (prompt if needs_history else [])
    assert all(sum(len(append.block_ids) for append in step.appends) <= BLOCKS_PER_STEP for step in warm_steps)
    assert all(sum(len(part.token_ids) for part in step.observed) <= OBSERVED_PER_STEP for step in warm_steps)
    beside = [other in [lane.seq_id for lane in step.lanes] for step in warm_steps]
    assert beside[:60] == [True] * 60, "the other lane decodes in every round while the long one is told"


def test_decode_of_a_long_context_costs_a_few_bytes() -> None:
    shard = FakeShard(fake_info(num_blocks=2000, max_context=30_000, eos=()))
    rounds = Rounds(fake_config(batch_tokens=1024), shard)
    rounds.run(make_request("long", [7] * 20_000, max_tokens=40))
    rounds.assert_exact()
    assert all(len(pickle.dumps(step)) < 700 for step in shard.steps[-35:])


def test_the_second_step_refers_to_the_token_of_the_first() -> None:
    rounds = Rounds(fake_config(), FakeShard(fake_info(eos=())))
    rounds.submit(make_request("a", [1, 2, 3], max_tokens=4))
    rounds.submit(make_request("b", [4, 5], max_tokens=4))
    first, second = rounds.plan(), rounds.plan()
    assert first is not None and second is not None
    assert [(lane.tokens, lane.num_sampled) for lane in first.lanes] == [((1, 2, 3), 1), ((4, 5), 1)]
    assert [lane.tokens for lane in second.lanes] == [(TokenRef(first.step_id, 2),), (TokenRef(first.step_id, 4),)]
    assert [lane.start for lane in second.lanes] == [3, 2]
    assert rounds.plan() is None, "two steps are in flight"
    rounds.finish()
    rounds.assert_exact()


def test_nothing_is_planned_beyond_max_tokens() -> None:
    shard = FakeShard(fake_info(eos=()))
    rounds = Rounds(fake_config(), shard)
    rounds.run(make_request("a", [1, 2, 3], max_tokens=4))
    assert sum(step.num_rows for step in shard.steps) == 3 + 3


def test_blocks_are_not_freed_before_the_last_step_that_reads_them() -> None:
    rounds = Rounds(fake_config(), FakeShard(fake_info(num_blocks=4, eos=())))
    pool = rounds.scheduler.pool
    rounds.submit(make_request("a", range(20), max_tokens=20))
    assert rounds.plan() and rounds.plan()
    rounds.abort("a")
    assert pool.num_free == 2, "two steps still read them"
    rounds.commit()
    assert pool.num_free == 2, "one step still reads them"
    rounds.commit()
    assert pool.num_free == 4


def test_ends_are_told_once_and_after_the_last_step() -> None:
    shard = FakeShard(fake_info(eos=()))
    rounds = Rounds(fake_config(), shard)
    rounds.run(make_request("a", [1, 2], max_tokens=2), make_request("b", [3, 4], max_tokens=6))
    rounds.run(make_request("c", [5], max_tokens=2))
    told = [(step.step_id, seq_id) for step in shard.steps for seq_id in step.ends]
    assert [seq_id for _, seq_id in told] == [0, 1]
    for step_id, seq_id in told:
        assert all(lane.seq_id != seq_id for step in shard.steps if step.step_id >= step_id for lane in step.lanes)


def test_ends_are_told_again_when_the_step_that_told_them_failed() -> None:
    def breaks(step: Step) -> None:
        if step.ends and not told:
            told.append(step.step_id)
            raise RuntimeError("lost")

    told: list[int] = []
    shard = FakeShard(fake_info(eos=()), max_lanes=2, on_step=breaks)
    rounds = Rounds(fake_config(max_lanes=2), shard)
    rounds.run(make_request("a", [1, 2], max_tokens=2), make_request("b", [3, 4], max_tokens=9))
    assert told and list(rounds.failures) == ["b"]
    rounds.run(make_request("c", [5], max_tokens=2), make_request("d", [6], max_tokens=2))
    rounds.assert_exact("a", "c", "d")


def test_results_and_steps_pickle() -> None:
    result = StepResult(3, {1: ()}, {2: "failed"})
    assert pickle.loads(pickle.dumps(result)) == result
