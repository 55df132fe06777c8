"""What a bench found: plain data, for reports and exit codes."""

from dataclasses import dataclass

from espalier.deploy.bench.plan import Sampling
from espalier.deploy.bench.stats import Comparison, Speed, StreamRecord
from espalier.deploy.bench.target import TargetInfo, TargetState


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. side: A, or B for the second target. streams: their number, or `alone`, `serial`: one after the other.

    is_exact: the target tells hashes.
    """

    side: str
    kind: str
    sampling: Sampling
    streams: str
    speed: Speed
    comparison: Comparison
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo:
    """A prompt's reply when it ran alone."""

    side: str
    sampling: Sampling
    record: StreamRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One cell of two targets that ran it in turn. Ratios are B's figure over A's, medians of repetitions; None where one has none.

    same, different: replies of equal calls with equal, or unequal, hashes.
    """

    kind: str
    sampling: Sampling
    streams: str
    tokens_per_s: float | None
    decode_tokens_per_s: float | None
    ttft: float | None
    same: int
    different: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """A reply that resumed from kept state against the same computed cold. kept_tokens: of the prompt, those restored."""

    side: str
    sampling: Sampling
    name: str
    prompt_tokens: int
    kept_tokens: int
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A cold prompt of one stream. Prompt tokens a second until the first token: the median of `runs`, the least and the most."""

    side: str
    prompt_tokens: int
    runs: int
    tokens_per_s: float | None
    spread: tuple[float, float] | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A cold prompt that came among decoding streams. Seconds between messages of a stream: without it, and while it was computed.

    ttft_s: of the prompt. comparison: the streams' replies with and without it.
    """

    side: str
    sampling: Sampling
    streams: int
    prompt_tokens: int
    ttft_s: float | None
    quiet_p50_s: float | None
    quiet_p99_s: float | None
    busy_p99_s: float | None
    busy_most_s: float | None
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """targets: A, and B where there are two; ends: what they last told. earlier: solo replies against those of another run."""

    targets: tuple[TargetInfo, ...]
    ends: tuple[TargetState, ...] = ()
    rows: tuple[Row, ...] = ()
    solo: tuple[Solo, ...] = ()
    pairs: tuple[Pair, ...] = ()
    fresh: tuple[Fresh, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    earlier: Comparison | None = None

    @property
    def promises_equal_pairs(self) -> bool:
        """Both targets name the same arithmetic. Weights are not told apart by it."""
        ids = {target.numerics_id for target in self.targets}
        return len(ids) == 1 and None not in ids

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each thing that went wrong."""
        found = [note for row in self.rows for note in row.comparison.notes]
        found += [note for fresh in self.fresh for note in fresh.comparison.notes]
        found += [note for prefill in self.prefill for note in prefill.notes]
        found += [note for arrival in self.arrivals for note in arrival.comparison.notes]
        found += [] if self.earlier is None else self.earlier.notes
        if self.promises_equal_pairs:
            found += [
                f"{pair.kind}, {pair.sampling}, {pair.streams} streams: {pair.different} replies differ between A and B, "
                "which name the same arithmetic"
                for pair in self.pairs
                if pair.different
            ]
        return tuple(found)

    @property
    def is_clean(self) -> bool:
        """Nothing unequal and nothing failed."""
        return not self.notes
