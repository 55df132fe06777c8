"""Linears in a few numbers: means against the peer, what the portable form costs, what a rate costs. Knows no clock and no page."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from espalier.kernels.bench.peer import peer_times
from espalier.kernels.bench.registry import CUBLAS, OURS, Label, written
from espalier.kernels.bench.results import COOL, HOT, STEADY, Timing


@dataclass(frozen=True, slots=True)
class Band:
    """Row counts whose ratios to the peer are averaged, the ratio to reach at least and the one to aim at. lossy: against int8 activations."""

    rows: tuple[int, ...]
    reach: float
    aim: float
    lossy: bool = False

    @property
    def name(self) -> str:
        """'1-2 lossy'"""
        return f"{self.rows[0]}-{self.rows[-1]}" + (
            (" lossy" if self.lossy else " accurate") if self.rows[0] == 1 else ""
        )


BANDS = (
    Band((1, 2), 1.4, 1.9),
    Band((1, 2), 1.0, 1.3, lossy=True),
    Band((4, 8, 16), 1.4, 2.0),
    Band((32, 64, 128), 2.0, 3.0),
    Band((256, 512), 1.4, 2.0),
    Band((2048, 8192), 0.95, 1.15),
)


REFERENCE_RATE = 4.0


def linear_summary(timings: Iterable[Timing]) -> list[str]:
    """Sections for what was run; none without linears."""
    linears = [timing for timing in timings if timing.op == "linear"]
    return [section for section in (_against_peer(linears), _other_forms(linears), _rates(linears)) if section]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines))


def peer_ratio(timing: Timing, *, lossy: bool = False) -> float | None:
    """The peer's time over this one; None where there is none to compare with."""
    times = peer_times(timing.labels) if timing.op == "linear" else None
    if times is None:
        return None
    us = times.lossy if lossy else times.accurate
    return None if us is None else us / timing.us


def _against_peer(linears: Sequence[Timing]) -> str:
    """Geometric means over everything the peer was timed on, band by band."""
    names = list(dict.fromkeys(timing.call for timing in linears if timing.call != CUBLAS))
    lines = []
    for band in BANDS:
        for mode in (STEADY, COOL, HOT):
            found = [timing for timing in linears if timing.labels["rows"] in band.rows and timing.mode == mode]
            ratios = {
                name: [
                    ratio
                    for timing in found
                    if timing.call == name and (ratio := peer_ratio(timing, lossy=band.lossy)) is not None
                ]
                for name in names
            }
            if ratios.get(OURS):
                lines.append([band.name, mode, f"{band.reach:g}", f"{band.aim:g}", *map(_mean, ratios.values())])
    if not lines:
        return ""
    return (
        "## Linears against the peer\n\nexllamav3's time over ours, geometric mean over shapes, rates and codebooks (how many in brackets). "
        "lossy: against its int8 activations, which it has for mul1 at 1 and 2 rows; all else is against fp16 activations.\n\n"
        + table(["rows", "mode", "reach", "aim", *names], lines)
    )


def _mean(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f} ({len(ratios)})" if ratios else ""


def _other_forms(linears: Sequence[Timing]) -> str:
    """Time of each other form of ours over the dispatched one's, for each row count."""
    ours = {_case(timing): timing.us for timing in linears if timing.call == OURS}
    ratios: dict[tuple[str, Label, str], list[float]] = {}
    for timing in linears:
        if timing.call not in (OURS, CUBLAS) and _case(timing) in ours:
            key = (timing.call, timing.labels["rows"], timing.mode)
            ratios.setdefault(key, []).append(timing.us / ours[_case(timing)])
    lines = [
        [form, str(rows), mode, _mean(found), f"{max(found):.2f}"]
        for (form, rows, mode), found in sorted(ratios.items(), key=lambda item: (item[0][0], item[0][1]))
    ]
    if not lines:
        return ""
    return (
        "## Other forms\n\nTheir time over that of the form that dispatch chose, geometric mean and worst case.\n\n"
        + table(["form", "rows", "mode", "mean", "worst"], lines)
    )


def _case(timing: Timing) -> tuple[object, ...]:
    return (*timing.labels.items(), timing.mode)


def _rates(linears: Sequence[Timing]) -> str:
    """Time at each rate over the time at 4 bits, beside the ratio of the bits."""
    ours = [timing for timing in linears if timing.call == OURS]
    at_reference = {_but_rate(timing): timing.us for timing in ours if timing.labels["rate"] == REFERENCE_RATE}
    cells: dict[tuple[float, str], dict[Label, list[float]]] = {}
    for timing in ours:
        rate, codebook = float(timing.labels["rate"]), str(timing.labels["codebook"])
        if rate != REFERENCE_RATE and timing.mode != HOT and _but_rate(timing) in at_reference:
            found = cells.setdefault((rate, codebook), {}).setdefault(timing.labels["rows"], [])
            found.append(timing.us / at_reference[_but_rate(timing)])
    rows = sorted({count for by_rows in cells.values() for count in by_rows}, key=float)
    if not rows:
        return ""
    lines = [
        [written(rate), codebook, f"{rate / REFERENCE_RATE:.2f}", *(_mean(by_rows.get(count, [])) for count in rows)]
        for (rate, codebook), by_rows in sorted(cells.items())
    ]
    return (
        "## Rates\n\nTime over that at 4 bits, same shape and codebook, geometric mean over shapes (how many in brackets); from 256 rows on, "
        "cool. bits: the ratio of the packed bytes.\n\n"
        + table(["rate", "codebook", "bits", *(f"{count} rows" for count in rows)], lines)
    )


def _but_rate(timing: Timing) -> tuple[object, ...]:
    return (*((key, value) for key, value in timing.labels.items() if key != "rate"), timing.mode)
