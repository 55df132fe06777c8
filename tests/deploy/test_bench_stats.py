"""The bench's figures, from hand-made arrival times."""

import pytest

from espalier.deploy.bench.stats import StreamRecord, decode_speed, inter_token_gaps, percentile, summarise


def record(
    prompt: str = "p", sent: float = 0.0, arrivals=((1.0, 1), (1.5, 1), (2.5, 1)), sha: str | None = "a", **more
):
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


def test_a_level_sums_its_repetitions() -> None:
    first = [record(sent=0.0), record(sent=0.5, sha="b")]
    second = [record(sent=10.0, arrivals=[(10.25, 1), (12.0, 1)])]
    level = summarise(2, [first, second], {"p": "a"}, gateway_cpu_s=0.8)
    assert (level.streams, level.tokens, level.equal, level.unequal, level.failed) == (3, 8, 2, 1, 0)
    assert level.wall_s == 2.5 + 2.0
    assert level.tokens_per_s == 8 / 4.5
    assert (level.ttft_p50_s, level.ttft_p99_s) == (0.5, 1.0)
    assert level.inter_token_p99_s == 1.75
    assert level.gateway_cpu_s_per_token == pytest.approx(0.1)


def test_a_failed_stream_counts_as_failed_and_nowhere_else() -> None:
    broken = record(sent=0.0, arrivals=[(0.1, 50)], sha=None, error="gone", ended=4.0)
    level = summarise(2, [[record(), broken]], {"p": "a"}, None)
    assert (level.equal, level.unequal, level.failed, level.tokens) == (1, 0, 1, 3)
    assert level.ttft_p50_s == 1.0
    assert level.wall_s == 4.0
    assert level.gateway_cpu_s_per_token is None


def test_a_level_in_which_all_fail_has_no_latencies() -> None:
    level = summarise(1, [[record(arrivals=[], sha=None, error="refused", ended=0.0)]], {"p": "a"}, 0.5)
    assert (level.ttft_p50_s, level.inter_token_p50_s, level.stream_tokens_per_s) == (None, None, None)
    assert (level.tokens_per_s, level.gateway_cpu_s_per_token) == (0.0, None)
