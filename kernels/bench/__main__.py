"""`python -m espalier.kernels.bench`: list, run, compile or report the benchmarks of the kernels. Parses, calls, prints, returns a code."""

import argparse
import datetime
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from espalier.kernels.bench import results
from espalier.kernels.bench.registry import OURS, BenchCase, Inputs, all_cases, case_name, select
from espalier.kernels.bench.report import markdown
from espalier.kernels.bench.results import Run, Timing
from espalier.kernels.bench.runner import measure, measure_limits
from espalier.kernels.bench.warm import warm
from espalier.kernels.device import device_class, numerics_id

OK, FAILED, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 when a case failed, 2 when the command cannot be carried out."""
    args = _parser().parse_args(arguments)
    if args.command == "report":
        try:
            print(markdown(results.merge([results.load(file) for file in args.file])), end="")
        except (ValueError, OSError) as error:
            return _refuse(str(error))
        return OK
    cases, broken = all_cases()
    for op, why in broken.items():
        print(f"not available: {op}: {why}", file=sys.stderr)
    chosen = select(cases, args.pattern, _labels(args))
    if not chosen:
        return _refuse("no case matches; `list` shows them all")
    if args.command == "list":
        print("\n".join(case.name for case in chosen))
        return OK
    if not torch.cuda.is_available():
        return _refuse(f"`{args.command}` needs an NVIDIA GPU, and torch sees none; `list` and `report` need none")
    return _compile(chosen, args.processes) if args.command == "compile" else _run(chosen, args)


def _run(cases: Sequence[BenchCase], args: argparse.Namespace) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    limits = measure_limits(device)
    timings: list[Timing] = []
    failures: dict[str, str] = {}

    def failed(case: BenchCase, error: Exception) -> None:
        failures[case.name] = f"{type(error).__name__}: {error}"
        print(f"{case.name}: {failures[case.name]}", file=sys.stderr, flush=True)

    for found in measure(cases, Inputs(device), failed):
        timings += found
        print(_line(found), flush=True)
    run = Run(
        device=torch.cuda.get_device_name(device),
        numerics_id=numerics_id(device_class(device)),
        torch=torch.__version__,
        triton=_version("triton"),
        commit=args.commit or _commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        limits=limits,
        timings=tuple(timings),
        failures=failures,
    )
    if args.json:
        results.save(run, args.json)
    print(markdown(run), end="")
    return FAILED if failures else OK


def _line(timings: Sequence[Timing]) -> str:
    ours = next(timing for timing in timings if timing.call == OURS)
    return case_name(ours.op, ours.labels) + "".join(
        f"  {timing.call} {timing.mode} {timing.us:.1f}" for timing in timings
    )


def _compile(cases: Sequence[BenchCase], num_processes: int) -> int:
    code = OK
    for name, why in warm(cases, num_processes):
        print(f"{name}: {why or 'compiled'}", flush=True)
        code = FAILED if why else code
    return code


def _labels(args: argparse.Namespace) -> dict[str, list[str]]:
    only = dict(pair.split("=", 1) for pair in args.only)
    only |= {key: value for key, value in (("rows", args.rows), ("rate", args.rates)) if value}
    return {key: values.split(",") for key, values in only.items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    """Of the checkout, '+' when something in it differs; 'unknown' outside one."""
    try:
        git = ["git", "-C", str(Path(__file__).resolve().parent)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changed.stdout else "")


def _refuse(why: str) -> int:
    print(f"espalier.kernels.bench: {why}", file=sys.stderr)
    return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m espalier.kernels.bench", description="Benchmarks of the kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    choice = argparse.ArgumentParser(add_help=False)
    choice.add_argument("pattern", nargs="*", help="beginning of a case's name, or with * and ?; none: all")
    choice.add_argument("--rows", help="only these row counts, such as 1,8")
    choice.add_argument("--rates", help="only these bits a weight, such as 3,3.5")
    choice.add_argument(
        "--only", action="append", default=[], metavar="LABEL=VALUE,...", help="only these values of a label"
    )
    commands.add_parser("list", parents=[choice], help="names of cases")
    run = commands.add_parser("run", parents=[choice], help="time cases")
    run.add_argument("--json", type=Path, metavar="FILE", help="write results there")
    run.add_argument("--commit", help="what to record as the commit (default: git's answer)")
    compiling = commands.add_parser(
        "compile", parents=[choice], help="fill Triton's cache, so that `run` compiles nothing"
    )
    compiling.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    report = commands.add_parser("report", help="results as Markdown; those of several runs as one")
    report.add_argument("file", type=Path, nargs="+")
    return parser


if __name__ == "__main__":
    sys.exit(main())
