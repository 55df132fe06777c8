"""A bench's result as tables for people and as JSON for machines. Measures nothing."""

import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from espalier import __version__
from espalier.deploy.bench.plan import BenchPlan
from espalier.deploy.bench.results import BenchResult, Row, Solo
from espalier.deploy.bench.soak import SoakPlan, SoakResult
from espalier.deploy.bench.stats import Comparison

_MS = 1e3
_US = 1e6
MAX_NOTES = 20


def _scaled(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _equal(row: Row) -> str:
    """Nothing to compare is not equal: the target tells no hash, or there is no solo run."""
    found = row.comparison
    if found.uncompared and not found.equal:
        return "-" if row.is_exact else "no hash"
    return str(found.equal)


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("prompts", lambda row: row.kind),
    ("sampling", lambda row: row.sampling),
    ("streams", lambda row: row.streams),
    ("TTFT p50 ms", lambda row: _scaled(row.speed.ttft_p50_s, _MS, 0)),
    ("p99", lambda row: _scaled(row.speed.ttft_p99_s, _MS, 0)),
    ("token p50 ms", lambda row: _scaled(row.speed.inter_token_p50_s, _MS, 2)),
    ("p99", lambda row: _scaled(row.speed.inter_token_p99_s, _MS, 2)),
    ("tok/s a stream", lambda row: _scaled(row.speed.stream_tokens_per_s, 1, 1)),
    ("decoding", lambda row: _scaled(row.speed.decode_tokens_per_s, 1, 1)),
    ("in all", lambda row: _scaled(row.speed.tokens_per_s, 1, 1)),
    ("prefill", lambda row: _scaled(row.speed.prefill_tokens_per_s, 1, 0)),
    ("cached %", lambda row: _scaled(row.speed.cached_share, 100, 0)),
    ("equal", _equal),
    ("unequal", lambda row: str(row.comparison.unequal)),
    ("failed", lambda row: str(row.comparison.failed)),
    ("CPU us/token", lambda row: _scaled(row.speed.cpu_s_per_token, _US, 0)),
)


def tables(result: BenchResult) -> str:
    """Markdown: the cells of each target, and what else was run."""
    parts = [_cells(result, index) for index in range(len(result.targets))]
    parts += [part(result) for part in (_pairs, _fresh, _prefill, _arrivals, _earlier)]
    return "\n\n".join(part for part in parts if part)


def _cells(result: BenchResult, index: int) -> str:
    target, side = result.targets[index], "AB"[index]
    title = ", ".join(filter(None, (f"{side}: {target.model}", target.where, target.device)))
    if index < len(result.ends) and (counts := result.ends[index].counts):
        title += "; " + ", ".join(f"{name} {value}" for name, value in counts.items())
    cells = [[show(row) for _, show in COLUMNS] for row in result.rows if row.side == side]
    return f"{title}\n\n{_table([name for name, _ in COLUMNS], cells)}"


def _pairs(result: BenchResult) -> str:
    cells = [
        [
            *(pair.kind, pair.sampling, pair.streams),
            *(_scaled(value, 1, 3) for value in (pair.decode_tokens_per_s, pair.tokens_per_s, pair.ttft)),
            *(str(pair.same), str(pair.different)),
        ]
        for pair in result.pairs
    ]
    names = ["prompts", "sampling", "streams", "decoding B/A", "in all B/A", "TTFT B/A", "same", "different"]
    return _table(names, cells) if cells else ""


def _fresh(result: BenchResult) -> str:
    cells = [
        [
            *(fresh.side, fresh.name, fresh.sampling),
            *(str(fresh.prompt_tokens), str(fresh.kept_tokens), _verdict(fresh.comparison)),
        ]
        for fresh in result.fresh
    ]
    return _table(["", "resumed with cold", "sampling", "prompt tokens", "restored", "reply"], cells) if cells else ""


def _prefill(result: BenchResult) -> str:
    cells = [
        [
            *(prefill.side, str(prefill.prompt_tokens), str(prefill.runs)),
            _scaled(prefill.tokens_per_s, 1, 0),
            "-" if prefill.spread is None else f"{prefill.spread[0]:.0f} - {prefill.spread[1]:.0f}",
        ]
        for prefill in result.prefill
    ]
    return _table(["", "cold prompt", "runs", "prefill tok/s", "least - most"], cells) if cells else ""


def _arrivals(result: BenchResult) -> str:
    cells = []
    for found in result.arrivals:
        times = (found.ttft_s, found.quiet_p50_s, found.quiet_p99_s, found.busy_p99_s, found.busy_most_s)
        who = [found.side, str(found.prompt_tokens), found.sampling, str(found.streams)]
        cells.append([*who, *(_scaled(value, _MS, 1) for value in times), _verdict(found.comparison)])
    names = [
        "",
        "arriving prompt",
        "sampling",
        "streams",
        "its TTFT ms",
        "token p50 ms",
        "p99",
        "p99 beside it",
        "most",
    ]
    return _table([*names, "replies"], cells) if cells else ""


def _earlier(result: BenchResult) -> str:
    found = result.earlier
    if found is None:
        return ""
    return f"Against the earlier run: {found.equal} equal, {found.unequal} unequal, {found.uncompared} not compared"


def soak_table(result: SoakResult) -> str:
    """Markdown, one line a figure."""
    found = result.comparison
    cells = [
        ["requests", str(result.requests)],
        ["aborted", str(result.aborted)],
        ["equal", str(found.equal)],
        ["unequal", str(found.unequal)],
        ["failed", str(found.failed)],
        ["device bytes at the start", _known(result.start.device_bytes)],
        ["device bytes at the end", _known(result.end.device_bytes)],
        ["resident bytes at the start, at most", _known(result.start.host_bytes)],
        ["resident bytes at the end, at most", _known(result.end.host_bytes)],
        ["requests live at the end", _known(result.end.num_live)],
        ["KV blocks held at the end", "-" if result.end.held_share is None else f"{result.end.held_share:.2%}"],
        ["leaked", "; ".join(result.leaks) or "nothing"],
    ]
    return _table(["soak", ""], cells)


def _known(value: int | None) -> str:
    return "-" if value is None else str(value)


def _verdict(found: Comparison) -> str:
    return next(name for name in ("failed", "unequal", "uncompared", "equal") if getattr(found, name))


def _table(names: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    rows = [list(names), *cells]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]])


def bench_json(plan: BenchPlan, result: BenchResult, options: Mapping[str, Any]) -> str:
    """Everything measured, and what it was measured with. Keys and the prompts' text are left out."""
    content = {
        "setup": _setup(options)
        | {
            "prompts": [prompt.name for prompt in plan.prompts],
            "prompts_id": plan.prompts_id,
            "seed": plan.seed,
        },
        "targets": [asdict(target) for target in result.targets],
        "rows": [asdict(row) for row in result.rows],
        "solo": [_solo(solo) for solo in result.solo],
        "pairs": [asdict(pair) for pair in result.pairs],
        "fresh": [asdict(fresh) for fresh in result.fresh],
        "prefill": [asdict(prefill) for prefill in result.prefill],
        "arrivals": [asdict(arrival) for arrival in result.arrivals],
        "earlier": None if result.earlier is None else asdict(result.earlier),
        "ends": [asdict(end) for end in result.ends],
        "notes": result.notes,
    }
    return json.dumps(content, indent=1, default=str) + "\n"


def soak_json(plan: SoakPlan, result: SoakResult, target: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The soak, likewise."""
    content = {
        "setup": _setup(options) | {"seed": plan.seed},
        "targets": [target],
        "soak": asdict(result) | {"leaks": result.leaks},
    }
    return json.dumps(content, indent=1, default=str) + "\n"


def _solo(solo: Solo) -> dict[str, Any]:
    record = solo.record
    return {
        "side": solo.side,
        "sampling": solo.sampling,
        "prompt": record.prompt,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "ttft_s": record.ttft_s,
        "token_sha256": record.token_sha256,
    }


def _setup(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "espalier": __version__,
        "commit": options.get("commit") or commit(),
        "client": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "options": {name: value for name, value in options.items() if value is not None and name != "commit"},
    }


def commit() -> str:
    """Of the checkout, '+' when something in it differs; 'unknown' outside one."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout else "")
