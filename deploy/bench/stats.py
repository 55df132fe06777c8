"""Figures of a bench from the times at which tokens arrived: pure functions. Knows neither targets nor clocks; times are seconds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """One stream as its client saw it. prompt: the prompt's name. sent: when the request went out.

    arrivals: (time, number of tokens) of each message that brought tokens. ended: when the stream closed. token_ids: of the reply, empty where
    the target tells none. token_sha256: hash of the whole reply, None when there is none. left: the client went away before the end.
    error: why the stream failed, None when it did not.
    """

    prompt: str
    sent: float
    arrivals: tuple[tuple[float, int], ...]
    ended: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    token_sha256: str | None = None
    left: bool = False
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.sent if self.arrivals else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How replies compare with what they should be. uncompared: good replies without a hash, or without one to hold it against.

    notes: one sentence for each unequal or failed reply.
    """

    equal: int = 0
    unequal: int = 0
    failed: int = 0
    uncompared: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Nothing unequal, nothing failed."""
        return not (self.unequal or self.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """All streams of one cell. Seconds, or tokens a second; None where no stream has such a figure.

    tokens_per_s: all tokens over the time from the first request to the last end. decode_tokens_per_s: while all streams decode, from the last
    first token to the first end. prefill_tokens_per_s: prompt tokens computed over the time to the last first token. All three are medians over
    repetitions; spread is the least and the most tokens_per_s. stream_tokens_per_s: median of the streams' own decode speeds.
    cached_share: of prompt tokens, those restored. cpu_s_per_token: of the target's process.
    """

    streams: int
    tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    stream_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    tokens_per_s: float | None
    spread: tuple[float, float] | None
    cached_share: float | None
    cpu_s_per_token: float | None


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


def gaps_between(arrivals: Sequence[tuple[float, int]], start: float, end: float) -> list[float]:
    """Seconds between messages of a stream, for each message that came after `start` and waited for what was under way before `end`."""
    return [time - before for (before, _), (time, _) in pairwise(arrivals) if time > start and before < end]


def spread_tokens(times: Sequence[float], num_tokens: int) -> tuple[tuple[float, int], ...]:
    """Arrivals of messages that do not tell their tokens: at least one each, and together as many as the usage said in the end."""
    total = max(len(times), num_tokens)
    borders = [total * index // len(times) for index in range(len(times) + 1)] if times else [0]
    return tuple((time, borders[index + 1] - borders[index]) for index, time in enumerate(times))


def decode_speed(record: StreamRecord) -> float | None:
    """Tokens a second after the first; None for a stream of fewer than two messages."""
    if len(record.arrivals) < 2:
        return None
    (first, count), (last, _) = record.arrivals[0], record.arrivals[-1]
    return (record.num_tokens - count) / (last - first) if last > first else None


def batch_speed(records: Sequence[StreamRecord]) -> float | None:
    """Tokens a second of streams that ran together, prompts included."""
    wall_s = max(record.ended for record in records) - min(record.sent for record in records)
    return sum(record.num_tokens for record in records) / wall_s if wall_s > 0 else None


def batch_decode_speed(records: Sequence[StreamRecord]) -> float | None:
    """Tokens a second while all of these streams decode; None when they never all do."""
    if not all(record.arrivals for record in records):
        return None
    start = max(record.arrivals[0][0] for record in records)
    end = min(record.arrivals[-1][0] for record in records)
    tokens = sum(count for record in records for time, count in record.arrivals if start < time <= end)
    return tokens / (end - start) if end > start else None


def batch_prefill_speed(records: Sequence[StreamRecord]) -> float | None:
    """Prompt tokens computed a second, until the last stream has its first token. Streams that decode already slow it down."""
    if not all(record.arrivals for record in records):
        return None
    computed = sum(record.prompt_tokens - record.cached_tokens for record in records)
    wall_s = max(record.arrivals[0][0] for record in records) - min(record.sent for record in records)
    return computed / wall_s if wall_s > 0 and computed > 0 else None


def summarise(batches: Sequence[Sequence[StreamRecord]], cpu_s: float | None = None) -> Speed:
    """Figures of one cell. batches: the streams of each repetition. cpu_s: what the target's process used. Streams that failed are left out."""
    good = [[record for record in batch if record.error is None] for batch in batches]
    good = [batch for batch in good if batch]
    records = [record for batch in good for record in batch]
    tokens = sum(record.num_tokens for record in records)
    prompt_tokens = sum(record.prompt_tokens for record in records)
    gaps = [gap for record in records for gap in inter_token_gaps(record.arrivals)]
    first = _known(record.ttft_s for record in records)
    totals = _known(map(batch_speed, good))
    return Speed(
        streams=sum(map(len, batches)),
        tokens=tokens,
        ttft_p50_s=percentile(first, 0.5),
        ttft_p99_s=percentile(first, 0.99),
        inter_token_p50_s=percentile(gaps, 0.5),
        inter_token_p99_s=percentile(gaps, 0.99),
        stream_tokens_per_s=percentile(_known(map(decode_speed, records)), 0.5),
        decode_tokens_per_s=percentile(_known(map(batch_decode_speed, good)), 0.5),
        prefill_tokens_per_s=percentile(_known(map(batch_prefill_speed, good)), 0.5),
        tokens_per_s=percentile(totals, 0.5),
        spread=(min(totals), max(totals)) if totals else None,
        cached_share=sum(record.cached_tokens for record in records) / prompt_tokens if prompt_tokens else None,
        cpu_s_per_token=cpu_s / tokens if cpu_s is not None and tokens else None,
    )


def compare(records: Sequence[StreamRecord], expected: Mapping[str, StreamRecord], where: str) -> Comparison:
    """Each reply against the expected one of its prompt. A reply that its client left must begin as that one does.

    where: the cell, for the notes. Failed streams count as failed and nowhere else.
    """
    counts = {"equal": 0, "unequal": 0, "failed": 0, "uncompared": 0}
    notes: list[str] = []
    for record in records:
        other = expected.get(record.prompt)
        if record.error is not None:
            counts["failed"] += 1
            notes.append(f"{where}, {record.prompt}: {record.error}")
        elif other is None or other.token_sha256 is None or (record.token_sha256 is None and not record.left):
            counts["uncompared"] += 1
        elif is_equal(record, other):
            counts["equal"] += 1
        else:
            counts["unequal"] += 1
            notes.append(f"{where}, {record.prompt}: {difference(record, other)}")
    return Comparison(**counts, notes=tuple(notes))


def is_equal(record: StreamRecord, other: StreamRecord) -> bool:
    """Whether the reply is the other, or begins it when its client left. The other is whole."""
    if record.left:
        return record.token_ids == other.token_ids[: len(record.token_ids)]
    return record.token_sha256 == other.token_sha256


def difference(record: StreamRecord, other: StreamRecord) -> str:
    """Where two replies part, for a note."""
    ours, theirs = record.token_ids, other.token_ids
    for index, (one, two) in enumerate(zip(ours, theirs, strict=False)):
        if one != two:
            return f"token {index} is {one}, and {two} in {len(theirs)} tokens alone"
    return f"{len(ours)} tokens, and {len(theirs)} alone"


def together(comparisons: Sequence[Comparison]) -> Comparison:
    """All of them as one."""
    return Comparison(
        equal=sum(found.equal for found in comparisons),
        unequal=sum(found.unequal for found in comparisons),
        failed=sum(found.failed for found in comparisons),
        uncompared=sum(found.uncompared for found in comparisons),
        notes=tuple(note for found in comparisons for note in found.notes),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
