"""What exactness costs: the engine's loop with row-invariant choices replaced by ones that may follow the shape of a call, beside the product's.

Every variant is the product with some constant or function replaced in a process of its own, never in the product: other numbers of splits of the
EXL3 linears, plain linears by cuBLAS instead of the row-invariant kernel, decode attention without the merge of its splits (a bound: its output is
wrong). Processes load side by side, since each compiles its kernels on one core; then they are measured one at a time, in turn. Needs one NVIDIA
GPU, torch, Triton and NumPy, and espalier on the path. `--device cpu` rehearses the protocol on the CPU's engine, where replacements change nothing.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from price_variants import BASE_OF, CONTEXT, PRODUCT, VARIANTS, serve


class Process:
    """A variant in a process of its own. Its standard error is ours."""

    def __init__(self, variant: str, arguments: Sequence[str]) -> None:
        self.variant = variant
        self.is_alive = True
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--variant", variant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any] | None:
        """The next line that it says; None when it has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.is_alive = False
            say(f"{self.variant}: ended with exit code {self._process.wait()}, is left out from now on")
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, cell: str, number: int, rep: int) -> float | None:
        """Measures a cell. None when it could not."""
        if not self.is_alive:
            return None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{cell} {number} {rep}\n")
            self._process.stdin.flush()
        found = self.answer()
        return None if found is None else float(found["tokens_per_s"])

    def close(self) -> None:
        """Lets it end; a process that is still loading is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


Speeds = dict[str, dict[str, list[float]]]  # variant -> cell -> tokens a second of each repetition


def measure_all(processes: Sequence[Process], cells: Sequence[tuple[str, int]], reps: int, deadline: float) -> Speeds:
    """Variants take turns at each cell, so that a warm card is as warm for all. Ends early, between repetitions, at the deadline."""
    speeds: Speeds = {process.variant: {} for process in processes}
    for rep in range(-1, reps):  # the first time of each is not counted
        if rep > 0 and time.monotonic() > deadline:
            say(f"the budget is spent: {rep} of {reps} repetitions")
            break
        for cell, number in cells:
            for process in processes:
                speed = process.ask(cell, number, rep)
                if speed is not None and rep >= 0:
                    speeds[process.variant].setdefault(f"{cell} {number}", []).append(speed)
                    say(f"{process.variant}, {cell} {number}: {speed:,.0f} tok/s")
    return speeds


def table(speeds: Speeds, cells: Sequence[tuple[str, int]]) -> str:
    """Speeds as medians, half the distance of least and most beside them; under them what a variant gains over its base."""
    shown = [variant for variant in VARIANTS if speeds.get(variant)]
    names = [f"{cell} {number}" for cell, number in cells]

    def lines(head: str, rows: Sequence[tuple[str, list[str]]]) -> list[str]:
        return [
            f"| {head} | " + " | ".join(names) + " |",
            "| --- |" + " ---: |" * len(names),
            *(f"| {name} | " + " | ".join(found) + " |" for name, found in rows),
        ]

    gains = [
        (f"{variant} over {base}", [_gain(speeds[variant].get(name), speeds[base].get(name)) for name in names])
        for variant, base in BASE_OF.items()
        if variant in shown and base in shown
    ]
    if any(variant.startswith("splits-") for variant in shown) and PRODUCT in shown:
        gains.append(("**price of one split rule** (best)", [_price(speeds, name) for name in names]))
    return "\n".join(
        [
            *lines("tok/s", [(variant, [_cell(speeds[variant].get(name)) for name in names]) for variant in shown]),
            "",
            *lines("gain over the base", gains),
            "",
        ]
    )


def _price(speeds: Speeds, cell: str) -> str:
    """What choosing the number of splits for this cell alone would gain; none where the product's is the best."""
    rule = [
        variant
        for variant, found in speeds.items()
        if found.get(cell) and (variant == PRODUCT or variant.startswith("splits-"))
    ]
    best = max(rule, key=lambda variant: median(speeds[variant][cell]), default=PRODUCT)
    return "none" if best == PRODUCT else f"{_gain(speeds[best][cell], speeds[PRODUCT].get(cell))} ({best})"


def _cell(runs: Sequence[float] | None) -> str:
    if not runs:
        return ""
    return f"{median(runs):,.0f} ±{50 * (max(runs) - min(runs)) / median(runs):.1f}%"


def _gain(runs: Sequence[float] | None, base: Sequence[float] | None) -> str:
    return f"{100 * (median(runs) / median(base) - 1):+.1f}%" if runs and base else ""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def started(variants: Sequence[str], arguments: Sequence[str], setup: dict[str, Any]) -> Iterator[list[Process]]:
    """Processes of all variants, loaded; ended with the block. What they say of their device goes to `setup`.

    The first one loads alone: what it has compiled, the others find in Triton's cache.
    """
    processes: list[Process] = []
    try:
        for together in (variants[:1], variants[1:]):
            loading = [Process(variant, arguments) for variant in together]
            processes += loading
            for process in loading:
                if (found := process.answer()) is not None:
                    say(f"{process.variant}: ready after {found.pop('ready_s'):.0f} s")
                    setup |= found
        yield processes
    finally:
        for process in processes:
            process.close()


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """0 when every variant was measured, else 1."""
    began = time.monotonic()
    cells = [*(("decode", level) for level in args.levels), *(("prefill", tokens) for tokens in args.prefill)]
    setup: dict[str, Any] = {}
    with started(args.variants, arguments, setup) as processes:
        speeds = measure_all(processes, cells, args.reps, began + args.budget)
        is_whole = all(process.is_alive for process in processes)
    print(
        f"{args.model.name}, {setup.get('device')}, {setup.get('setup')}, commit {args.commit}, context {CONTEXT}, greedy\n"
    )
    print(table(speeds, cells), end="")
    say(f"{time.monotonic() - began:.0f} s in all")
    if args.json is not None:
        content = {"setup": setup, "model": args.model.name, "commit": args.commit, "tokens_per_s": speeds}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if is_whole else 1


def _list_of(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [convert(part) for part in text.split(",")]


def _variant(name: str) -> str:
    if name not in VARIANTS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(VARIANTS)}")
    return name


def main(arguments: Sequence[str]) -> int:
    """The parent, or with --variant one of its processes."""
    parser = argparse.ArgumentParser(description="Speed of the engine's loop without its row-invariant choices.")
    parser.add_argument("model", type=Path, metavar="FOLDER", help="the checkpoint, such as of `espalier random-model`")
    parser.add_argument("--variants", type=_list_of(_variant), default=list(VARIANTS), metavar="NAME,...")
    parser.add_argument("--levels", type=_list_of(int), default=[1, 8, 64], metavar="N,N", help="streams")
    parser.add_argument("--prefill", type=_list_of(int), default=[2048, 8192], metavar="N,N", help="cold prompts")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of each reply [%(default)s]")
    parser.add_argument("--reps", type=int, default=3, metavar="N", help="times that each cell counts [%(default)s]")
    parser.add_argument(
        "--budget", type=float, default=200.0, metavar="S", help="begin no repetition later [%(default)s]"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", default="unknown", help="what to record as the commit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--variant", type=_variant, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.variant is None:
        return run(args, arguments)
    # What libraries print goes to standard error: the parent reads our answers alone.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(args, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
