"""The bench's figures, from hand-made arrival times, and what counts as equal."""

from typing import Any

import pytest

from espalier.deploy.bench.stats import (
    Comparison,
    StreamRecord,
    batch_decode_speed,
    batch_prefill_speed,
    compare,
    decode_speed,
    gaps_between,
    inter_token_gaps,
    percentile,
    spread_tokens,
    summarise,
    together,
)


def record(
    prompt: str = "p",
    sent: float = 0.0,
    arrivals: Any = ((1.0, 1), (1.5, 1), (2.5, 1)),
    sha: str | None = "a",
    **more: Any,
) -> StreamRecord:
    ended = more.pop("ended", arrivals[-1][0] if arrivals else sent)
    return StreamRecord(prompt=prompt, sent=sent, arrivals=tuple(arrivals), ended=ended, token_sha256=sha, **more)


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([float(i) for i in range(1, 101)], 0.99, 99.0),
        ([float(i) for i in range(1, 101)], 1.0, 100.0),
        ([5.0, 7.0], 0.0, 5.0),
    ],
)
def test_percentile_is_a_value_that_occurred(values: list[float], fraction: float, expected: float | None) -> None:
    assert percentile(values, fraction) == expected


def test_gaps_are_one_fewer_than_tokens_and_a_message_shares_its_own() -> None:
    assert inter_token_gaps([]) == []
    assert inter_token_gaps([(5.0, 1)]) == []
    assert inter_token_gaps([(1.0, 1), (1.5, 1), (2.5, 4)]) == [0.5, 0.25, 0.25, 0.25, 0.25]
    assert inter_token_gaps([(1.0, 2), (3.0, 2)]) == [0.0, 1.0, 1.0]


def test_decode_speed_leaves_the_first_token_out() -> None:
    assert decode_speed(record(arrivals=[(9.0, 1), (10.0, 1), (11.0, 2)])) == 1.5
    assert decode_speed(record(arrivals=[(9.0, 8)])) is None
    assert decode_speed(record(arrivals=[(9.0, 1), (9.0, 1)])) is None


def test_messages_that_do_not_tell_their_tokens_share_the_usage() -> None:
    assert spread_tokens([1.0, 2.0, 3.0], 7) == ((1.0, 2), (2.0, 2), (3.0, 3))
    assert spread_tokens([1.0, 2.0], 0) == ((1.0, 1), (2.0, 1))
    assert spread_tokens([], 5) == ()


def test_gaps_of_a_stretch_are_those_that_touch_it() -> None:
    arrivals = [(1.0, 1), (2.0, 1), (4.0, 2), (7.0, 1)]
    assert gaps_between(arrivals, 2.5, 3.0) == [2.0]
    assert gaps_between(arrivals, 1.0, 4.5) == [1.0, 2.0, 3.0]
    assert gaps_between(arrivals, 7.0, 9.0) == []


def test_streams_decode_together_from_the_last_first_token_to_the_first_end() -> None:
    early = record(arrivals=[(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)])
    late = record(arrivals=[(2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1), (6.0, 1)])
    assert batch_decode_speed([early, late]) == 4 / 2.0
    assert batch_decode_speed([early, record(arrivals=[(9.0, 1), (10.0, 1)])]) is None
    assert batch_decode_speed([early, record(arrivals=[])]) is None


def test_prefill_counts_what_was_computed_until_the_last_first_token() -> None:
    first = record(sent=1.0, arrivals=[(3.0, 1)], prompt_tokens=100, cached_tokens=40)
    second = record(sent=1.5, arrivals=[(5.0, 1)], prompt_tokens=20)
    assert batch_prefill_speed([first, second]) == 80 / 4.0
    assert batch_prefill_speed([record(prompt_tokens=64, cached_tokens=64)]) is None


def test_a_cell_takes_medians_over_its_repetitions() -> None:
    first = [record(sent=0.0), record(sent=0.5)]
    second = [record(sent=10.0, arrivals=[(10.25, 1), (12.0, 1)], prompt_tokens=8, cached_tokens=2)]
    third = [record(sent=20.0, arrivals=[(20.5, 1), (21.0, 3)])]
    speed = summarise([first, second, third], cpu_s=1.2)
    assert (speed.streams, speed.tokens) == (4, 12)
    assert speed.tokens_per_s == 6 / 2.5
    assert speed.spread == (1.0, 4.0)
    assert (speed.ttft_p50_s, speed.ttft_p99_s) == (0.5, 1.0)
    assert speed.inter_token_p99_s == 1.75
    assert speed.cached_share == 0.25
    assert speed.cpu_s_per_token == pytest.approx(0.1)


def test_streams_that_failed_are_in_no_figure() -> None:
    broken = record(sent=0.0, arrivals=[(0.1, 50)], sha=None, error="gone", ended=40.0)
    speed = summarise([[record(), broken]])
    assert (speed.streams, speed.tokens, speed.ttft_p50_s) == (2, 3, 1.0)
    assert speed.tokens_per_s == 3 / 2.5
    none = summarise([[broken]], 0.5)
    assert (none.ttft_p50_s, none.tokens_per_s, none.spread, none.cpu_s_per_token) == (None, None, None, None)


SOLO = {"p": record(token_ids=(7, 8, 9), sha="a")}


@pytest.mark.parametrize(
    ("reply", "counted", "note"),
    [
        (record(sha="a"), "equal", None),
        (record(sha="b", token_ids=(7, 5, 9)), "unequal", "cell, p: token 1 is 5, and 8 in 3 tokens alone"),
        (record(sha="b", token_ids=(7, 8)), "unequal", "cell, p: 2 tokens, and 3 alone"),
        (record(sha=None), "uncompared", None),
        (record(prompt="q"), "uncompared", None),
        (record(sha="a", error="gone"), "failed", "cell, p: gone"),
        (record(sha=None, left=True, token_ids=(7, 8)), "equal", None),
        (record(sha=None, left=True, token_ids=()), "equal", None),
        (record(sha=None, left=True, token_ids=(7, 9)), "unequal", "cell, p: token 1 is 9, and 8 in 3 tokens alone"),
    ],
)
def test_a_reply_counts_once_and_says_what_is_wrong(reply: StreamRecord, counted: str, note: str | None) -> None:
    found = compare([reply], SOLO, "cell")
    counts = {name: getattr(found, name) for name in ("equal", "unequal", "failed", "uncompared")}
    assert counts == {name: int(name == counted) for name in counts}
    assert found.notes == (() if note is None else (note,))
    assert found.is_clean is (note is None)


def test_comparisons_add_up() -> None:
    first, second = (
        Comparison(equal=2, notes=("x",)),
        Comparison(equal=1, unequal=3, failed=4, uncompared=5, notes=("y",)),
    )
    assert together([first, second]) == Comparison(equal=3, unequal=3, failed=4, uncompared=5, notes=("x", "y"))
