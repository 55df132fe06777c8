"""What a profile found, and how it reads. Pure: figures from timelines, text and JSON from figures. Times are microseconds, medians of rounds."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from espalier.replicas.gpu.profile.kinds import LAYS_OUT, LINEARS, ROUND_BEGINS, Kind, kinds_of
from espalier.replicas.gpu.profile.timeline import Work, gaps, own_times, span, split_at, union

_SKIPPED_ROUNDS = 2  # at each end of a window: the profiler's start and stop disturb them


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One round as the profiler saw it. own: by kind, time after everything before had ended; they add up to `busy_us`. full: by kind, sums of
    durations, in which dependent launches count while they wait. gaps_us: inside the round, with nothing running. span_us: busy and gaps.
    """

    own: Mapping[str, float]
    full: Mapping[str, float]
    num_kernels: int
    busy_us: float
    gaps_us: float
    span_us: float
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProfile:
    """Decode rounds of so many rows at a context, or rounds of so many rows of one prompt that then has `context` tokens. source: `graph` or
    `eager`, what the profiler was shown.

    wall_us, wall_quartiles: of a round by CUDA events, without the profiler. host_us: planning, packing and launching, on the host.
    chained_us: of a round with its copies, two in flight, each launched when the one before the last has come back. parts: None where the
    profiler saw no kernels.
    """

    rows: int
    context: int
    is_prompt: bool
    source: str
    wall_us: float
    wall_quartiles: tuple[float, float]
    host_us: float
    chained_us: float
    parts: Parts | None

    @property
    def name(self) -> str:
        """At the head of its column."""
        return f"{self.rows} rows" if not self.is_prompt else f"{self.rows} of a prompt, to {self.context}"

    @property
    def idle_share(self) -> float | None:
        """Of the wall, what is no kernel."""
        return None if self.parts is None else 1.0 - self.parts.busy_us / self.wall_us


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopProfile:
    """The engine's loop with so many streams decoding. round_us: from report to report, without the profiler.

    window_s, window_rounds: what the profiler saw. idle_share: of the window, what is neither kernel nor copy; None where it saw too little.
    """

    rows: int
    round_us: float
    window_s: float
    window_rounds: int
    idle_share: float | None


def parts_of(work: Sequence[Work]) -> Parts | None:
    """Of a trace of rounds one after the other. None where there is no whole round in it."""
    rounds = split_at(work, ROUND_BEGINS)
    if not rounds:
        return None
    split = [(kinds_of([item.name for item in one]), one) for one in rounds]

    def by_kind(time: str) -> dict[str, float]:
        totals: list[dict[Kind, float]] = []
        for kinds, one in split:
            times = own_times(one) if time == "own" else [item.end - item.start for item in one]
            total = dict.fromkeys(Kind, 0.0)
            for kind, us in zip(kinds, times, strict=True):
                total[kind] += us
            totals.append(total)
        return {kind.value: median(total[kind] for total in totals) for kind in Kind}

    unknown = {item.name for kinds, one in split for kind, item in zip(kinds, one, strict=True) if kind is Kind.OTHER}
    return Parts(
        own=by_kind("own"),
        full=by_kind("full"),
        num_kernels=round(median(len(one) for one in rounds)),
        busy_us=median(union(one) for one in rounds),
        gaps_us=median(sum(gaps(one)) for one in rounds),
        span_us=median(span(one) for one in rounds),
        unknown=tuple(sorted(unknown)),
    )


def idle_share(work: Sequence[Work]) -> tuple[float, int, float | None]:
    """(seconds, rounds, share with nothing running) of the middle of a window; the share is None of fewer than five whole rounds."""
    rounds = split_at(work, LAYS_OUT)[_SKIPPED_ROUNDS : -_SKIPPED_ROUNDS or None]
    middle = [item for one in rounds for item in one]
    window = span(middle)
    return window / 1e6, len(rounds), None if len(rounds) < 5 else 1.0 - union(middle) / window


def report(head: str, rounds: Sequence[RoundProfile], loops: Sequence[LoopProfile]) -> str:
    """Tables of Markdown: one column for each of the rounds."""
    lines = [head, "", _line("us", [one.name for one in rounds]), _line("---", ["---:"] * len(rounds))]

    def add(name: str, figure: Callable[[Parts], float]) -> None:
        lines.append(_line(name, ["" if one.parts is None else f"{figure(one.parts):.0f}" for one in rounds]))

    used = [kind for kind in Kind if any(one.parts is not None and one.parts.own[kind] > 0 for one in rounds)]
    for kind in used:
        add(kind, _own(kind))
    add("linears together", lambda parts: sum(parts.own[kind] for kind in LINEARS))
    add("**kernels, union**", lambda parts: parts.busy_us)
    add("gaps between kernels", lambda parts: parts.gaps_us)
    add("round under the profiler", lambda parts: parts.span_us)
    add("sum of durations", lambda parts: sum(parts.full.values()))
    add("kernels of a round", lambda parts: parts.num_kernels)
    lines += [
        _line("**wall of a round**", [f"{one.wall_us:.0f}" for one in rounds]),
        _line("its quartiles", ["{:.0f} - {:.0f}".format(*one.wall_quartiles) for one in rounds]),
        _line("share that is no kernel", [_percent(one.idle_share) for one in rounds]),
        _line("host: plan, pack, launch", [f"{one.host_us:.0f}" for one in rounds]),
        _line("with copies, two in flight", [f"{one.chained_us:.0f}" for one in rounds]),
        _line("so in tokens a second", [f"{one.rows / one.chained_us * 1e6:,.0f}" for one in rounds]),
    ]
    by_rows = {one.rows: one for one in loops}
    if by_rows:
        found = [None if one.is_prompt else by_rows[one.rows] for one in rounds]

        def add_loop(name: str, figure: Callable[[RoundProfile, LoopProfile], str]) -> None:
            cells = ["" if loop is None else figure(one, loop) for one, loop in zip(rounds, found, strict=True)]
            lines.append(_line(name, cells))

        add_loop("**engine loop, a round**", lambda one, loop: f"{loop.round_us:.0f}")
        add_loop("its tokens a second", lambda one, loop: f"{one.rows / loop.round_us * 1e6:,.0f}")
        add_loop("of it beyond the wall", lambda one, loop: _percent(1.0 - one.wall_us / loop.round_us))
        add_loop("idle, by the profiler", lambda one, loop: _percent(loop.idle_share))
        add_loop("rounds it saw", lambda one, loop: f"{loop.window_rounds} in {loop.window_s:.2f} s")
    unknown = sorted({name for one in rounds if one.parts is not None for name in one.parts.unknown})
    notes = [f"Counted as other: {', '.join(unknown)}."] if unknown else []
    notes += [f"{one.name}: the profiler saw no kernels ({one.source})." for one in rounds if one.parts is None]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def report_json(setup: Mapping[str, Any], rounds: Sequence[RoundProfile], loops: Sequence[LoopProfile]) -> str:
    """Everything, with what it was measured on."""
    content = {"setup": dict(setup), "rounds": [asdict(one) for one in rounds], "loops": [asdict(one) for one in loops]}
    return json.dumps(content, indent=1) + "\n"


def _line(name: str, cells: Sequence[str]) -> str:
    return "| " + " | ".join([name, *cells]) + " |"


def _own(kind: Kind) -> Callable[[Parts], float]:
    return lambda parts: parts.own[kind]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"
