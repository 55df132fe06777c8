"""Rows of prompts in a round: within the bound beside decoding lanes, whole sizes where a larger one would be mostly padding, tiles whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.replicas.schedule.pacing import MIN_PROMPT_ROWS, chunk_rows, fitted_rows, prompt_limit
from espalier.replicas.schedule.step import Step
from tests.support.fake_shard import FakeShard, fake_config, fake_info
from tests.support.rounds import Rounds, make_request

ROUND_MS = ((16, 3.0), (128, 6.0), (256, 10.0), (512, 19.0), (1024, 37.0), (2048, 73.0))


@pytest.mark.parametrize(
    ("gap_ms", "num_decoding_rows", "expected"),
    [
        (50.0, 0, 1024),
        (50.0, 64, 960),
        (37.0, 1, 1023),
        (36.9, 1, 511),
        (73.0, 8, 2040),
        (1e9, 8, 2040),
        (1.0, 8, MIN_PROMPT_ROWS),
        (6.0, 120, MIN_PROMPT_ROWS),
        (6.0, 64, 64),
    ],
)
def test_beside_decoding_lanes_a_round_keeps_within_the_gap(
    gap_ms: float, num_decoding_rows: int, expected: int
) -> None:
    limit = prompt_limit(2048, num_decoding_rows, decode_waits=True, round_ms=ROUND_MS, decode_gap_ms=gap_ms)
    assert limit == expected


def test_where_nobody_waits_or_nothing_was_measured_only_the_round_is_a_bound() -> None:
    assert prompt_limit(2048, 0, decode_waits=False, round_ms=ROUND_MS, decode_gap_ms=1.0) == 2048
    assert prompt_limit(2048, 64, decode_waits=True, round_ms=(), decode_gap_ms=1.0) == 1984
    assert prompt_limit(64, 60, decode_waits=True, round_ms=ROUND_MS, decode_gap_ms=1.0) == 4


@pytest.mark.parametrize(
    ("num_prompt_rows", "num_decoding_rows", "expected"),
    [
        (2048, 0, 2048),
        (1024, 0, 1024),
        (1025, 0, 1024),  # 37 + 3 ms against 73
        (1300, 0, 1024),  # 37 + 19
        (1537, 0, 1537),  # 37 + 37
        (1019, 6, 1018),
        (129, 0, 128),  # 6 + 3 against 10
        (150, 0, 150),  # 6 + 6
        (17, 0, 17),  # 3 + 3 against 6
        (9, 8, 9),
        (20, 120, 20),  # cut at 128, it would get 8 rows
        (5, 0, 5),
        (0, 64, 0),
    ],
)
def test_a_few_rows_too_many_are_left_to_the_next_round(
    num_prompt_rows: int, num_decoding_rows: int, expected: int
) -> None:
    assert fitted_rows(num_prompt_rows, num_decoding_rows, ROUND_MS) == expected


@given(st.integers(1, 3000), st.integers(0, 64), st.sampled_from([ROUND_MS, ROUND_MS[1:], ROUND_MS[:2], ()]))
def test_some_row_of_a_prompt_always_runs(
    num_prompt_rows: int, num_decoding_rows: int, round_ms: tuple[tuple[int, float], ...]
) -> None:
    rows = fitted_rows(num_prompt_rows, num_decoding_rows, round_ms)
    assert min(MIN_PROMPT_ROWS, num_prompt_rows) <= rows <= num_prompt_rows
    assert rows == num_prompt_rows or rows + num_decoding_rows in dict(round_ms)


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 2048), st.booleans())
def test_chunks_end_on_whole_tiles_and_the_first_gets_on(start: int, wanted: int, left: int, is_first: bool) -> None:
    rows = chunk_rows(start, wanted, left, is_first=is_first)
    assert 0 <= rows <= min(wanted, left)
    if rows < wanted:
        assert (start + rows) % 16 == 0 or (is_first and rows == left < 16) or rows == 0
        assert rows > 0 or not is_first
        assert left - rows < 16 or rows == 0
        assert rows > 0 or left < 16


def widths(step: Step) -> tuple[int, int]:
    """Decoding rows, and rows of prompts."""
    decoding = sum(len(lane.tokens) == 1 for lane in step.lanes)
    return decoding, step.num_rows - decoding


@pytest.mark.parametrize(("gap_ms", "most"), [(50.0, 1024), (10.0, 256), (0.5, 18)])
def test_a_long_prompt_arriving_among_decoding_lanes_is_paced_and_alone_is_not(gap_ms: float, most: int) -> None:
    info = fake_info(num_blocks=1024, eos=(), max_context=16384, vocab_size=10_007, round_ms=ROUND_MS)
    config = fake_config(max_lanes=8, batch_tokens=2048, decode_gap_ms=gap_ms)
    rounds = Rounds(config, FakeShard(info, max_lanes=8))
    rounds.submit(make_request("alone", range(8000), max_tokens=2))
    assert rounds.plan() and rounds.shard.steps == [] and rounds.flying[0][1].num_rows == 2048
    rounds.finish()
    for index in range(2):
        rounds.submit(make_request(str(index), [index, 5, 6], max_tokens=600))
    while not all(rounds.tokens[str(index)] for index in range(2)):
        rounds.plan()
        rounds.commit()
    before = len(rounds.shard.steps)
    rounds.submit(make_request("long", range(7, 8007), max_tokens=4))
    rounds.finish()
    rounds.assert_exact()
    steps = rounds.shard.steps[before:]
    mixed = [step for step in steps if widths(step)[0] and widths(step)[1]]
    assert len(mixed) >= 8000 // most and max(step.num_rows for step in mixed) <= most
    assert all(lane.start % 16 == 0 for step in mixed for lane in step.lanes if len(lane.tokens) > 1)


def test_the_prompt_track_is_paced_while_the_other_decodes() -> None:
    info = fake_info(num_blocks=1024, eos=(), max_context=16384, vocab_size=10_007, round_ms=ROUND_MS)
    config = fake_config(max_lanes=8, batch_tokens=2048, decode_gap_ms=10.0, tracks=2)
    rounds = Rounds(config, FakeShard(info, max_lanes=8))
    rounds.submit(make_request("long first", range(4096), max_tokens=2))
    rounds.finish()
    assert [step.num_rows for step in rounds.shard.steps] == [2048, 2048, 1]
    rounds.submit(make_request("short", [1, 2, 3], max_tokens=400))
    while not rounds.tokens["short"]:
        rounds.plan()
        rounds.commit()
    rounds.submit(make_request("long", range(5, 4101), max_tokens=2))
    before = len(rounds.shard.steps)
    rounds.finish(overtaking=True)
    rounds.assert_exact()
    prompts = [step.num_rows for step in rounds.shard.steps[before:] if step.track == "prompt"]
    assert len(prompts) == 16 and set(prompts) == {256}


def test_prompts_behind_the_first_take_whole_tiles_or_wait() -> None:
    rounds = Rounds(fake_config(max_lanes=4, batch_tokens=70), FakeShard(fake_info(eos=())))
    for index in range(3):
        rounds.submit(make_request(str(index), range(index, index + 60), max_tokens=2))
    first = rounds.plan()
    assert first is not None and [len(lane.tokens) for lane in first.lanes] == [60]
    rounds.finish()
    rounds.assert_exact()
