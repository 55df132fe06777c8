"""A bench's result as a table for people and as JSON for machines. Measures nothing."""

import json
import platform
from collections.abc import Callable
from dataclasses import asdict

from espalier import __version__
from espalier.deploy.bench.load import BenchPlan, BenchResult
from espalier.deploy.bench.stats import LevelSummary

_MS = 1e3
_US = 1e6


def _scaled(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


COLUMNS: tuple[tuple[str, Callable[[LevelSummary], str]], ...] = (
    ("streams", lambda level: str(level.level)),
    ("TTFT p50 ms", lambda level: _scaled(level.ttft_p50_s, _MS, 0)),
    ("TTFT p99 ms", lambda level: _scaled(level.ttft_p99_s, _MS, 0)),
    ("token p50 ms", lambda level: _scaled(level.inter_token_p50_s, _MS, 1)),
    ("token p99 ms", lambda level: _scaled(level.inter_token_p99_s, _MS, 1)),
    ("tokens/s a stream", lambda level: _scaled(level.stream_tokens_per_s, 1, 1)),
    ("tokens/s in all", lambda level: _scaled(level.tokens_per_s, 1, 1)),
    ("equal", lambda level: str(level.equal)),
    ("unequal", lambda level: str(level.unequal)),
    ("failed", lambda level: str(level.failed)),
    ("gateway CPU us/token", lambda level: _scaled(level.gateway_cpu_s_per_token, _US, 0)),
)


def table(result: BenchResult) -> str:
    """A Markdown table, one row a level, columns aligned."""
    rows = [[name for name, _ in COLUMNS]] + [[show(level) for _, show in COLUMNS] for level in result.levels]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]])


def as_json(plan: BenchPlan, result: BenchResult) -> str:
    """Everything measured, and what it was measured with; the API key and the prompts' text are left out."""
    setup = {
        "espalier": __version__,
        "client": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "url": plan.url,
        "model": result.model,
        "tokens": plan.num_tokens,
        "sampling": "seeded" if plan.seeded else "greedy",
        "reps": plan.reps,
        "prompts": [prompt.name for prompt in plan.prompts],
    }
    solo = [
        {
            "prompt": record.prompt,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "ttft_s": record.arrivals[0][0] - record.sent if record.arrivals else None,
            "token_sha256": record.token_sha256,
        }
        for record in result.solo
    ]
    content = {
        "setup": setup,
        "solo": solo,
        "levels": [asdict(level) for level in result.levels],
        "failures": result.failures,
    }
    return json.dumps(content, indent=2) + "\n"
