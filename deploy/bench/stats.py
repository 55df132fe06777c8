"""Figures of a bench from the times at which tokens arrived: pure functions. Knows neither HTTP nor clocks; times are seconds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """One stream as its client saw it. prompt: the prompt's name. sent: when the request went out.

    arrivals: (time, number of tokens) of each message that brought tokens. ended: when the stream closed.
    token_sha256: hash of the reply, None when there is none. error: why the stream failed, None when it did not.
    """

    prompt: str
    sent: float
    arrivals: tuple[tuple[float, int], ...]
    ended: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_sha256: str | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSummary:
    """All streams of one level. Seconds, or tokens a second; None where no stream has such a figure.

    wall_s: from the first request to the last end, summed over the repetitions. tokens_per_s: all tokens over wall_s.
    stream_tokens_per_s: median over streams of their own decode speed, the first token excluded.
    equal, unequal: replies whose hash is, or is not, that of the prompt's solo run; failed: streams with an error.
    gateway_cpu_s_per_token: CPU of the gateway's process over the level; None where it does not tell.
    """

    level: int
    streams: int
    tokens: int
    wall_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    stream_tokens_per_s: float | None
    tokens_per_s: float
    equal: int
    unequal: int
    failed: int
    gateway_cpu_s_per_token: float | None


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """The smallest value that at least `fraction` of all do not exceed (nearest rank), so it is one that occurred; None of no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def inter_token_gaps(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds between successive tokens of a stream: one less than it has tokens.

    Tokens that came in one message share the time since the message before; those that came along with the first token have no gap but 0.
    """
    gaps: list[float] = []
    for index, (time, count) in enumerate(arrivals):
        if index == 0:
            gaps += [0.0] * (count - 1)
        else:
            gaps += [(time - arrivals[index - 1][0]) / count] * count
    return gaps


def decode_speed(record: StreamRecord) -> float | None:
    """Tokens a second after the first; None for a stream of fewer than two messages."""
    if len(record.arrivals) < 2:
        return None
    (first, count), (last, _) = record.arrivals[0], record.arrivals[-1]
    return (record.num_tokens - count) / (last - first) if last > first else None


def summarise(
    level: int, batches: Sequence[Sequence[StreamRecord]], solo: Mapping[str, str], gateway_cpu_s: float | None
) -> LevelSummary:
    """Figures of one level. batches: the streams of each repetition, none empty. solo: hash of each prompt's reply when it ran alone.

    Streams that failed count as failed and nowhere else.
    """
    records = [record for batch in batches for record in batch]
    good = [record for record in records if record.error is None]
    equal = sum(record.token_sha256 == solo[record.prompt] for record in good)
    tokens = sum(record.num_tokens for record in good)
    wall_s = sum(max(record.ended for record in batch) - min(record.sent for record in batch) for batch in batches)
    first = [record.arrivals[0][0] - record.sent for record in good if record.arrivals]
    gaps = [gap for record in good for gap in inter_token_gaps(record.arrivals)]
    speeds = [speed for record in good if (speed := decode_speed(record)) is not None]
    return LevelSummary(
        level=level,
        streams=len(records),
        tokens=tokens,
        wall_s=wall_s,
        ttft_p50_s=percentile(first, 0.5),
        ttft_p99_s=percentile(first, 0.99),
        inter_token_p50_s=percentile(gaps, 0.5),
        inter_token_p99_s=percentile(gaps, 0.99),
        stream_tokens_per_s=percentile(speeds, 0.5),
        tokens_per_s=tokens / wall_s if wall_s > 0 else 0.0,
        equal=equal,
        unequal=len(good) - equal,
        failed=len(records) - len(good),
        gateway_cpu_s_per_token=gateway_cpu_s / tokens if gateway_cpu_s is not None and tokens else None,
    )
