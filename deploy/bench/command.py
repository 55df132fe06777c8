"""`espalier bench`: its arguments, and the call. Light to import; the client comes with the run."""

import argparse
import sys
from pathlib import Path

from espalier.replicas.errors import InvalidRequestError

KINDS = ("code", "chat", "long", "shared")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `espalier bench`."""
    parser.add_argument("--url", default="http://127.0.0.1:5000", help="HTTP address of the cluster [%(default)s]")
    parser.add_argument("--model", metavar="NAME", help="model to measure (default: the only one served)")
    parser.add_argument("--api-key", metavar="KEY", help="key to call with")
    parser.add_argument(
        "--levels",
        "--streams",
        metavar="N,N",
        default="1,2,4,8",
        help="concurrent streams, one level after the other [%(default)s]",
    )
    parser.add_argument("--tokens", metavar="N", default="64", help="tokens of each reply [%(default)s]")
    parser.add_argument("--reps", metavar="N", default="1", help="times that each level runs [%(default)s]")
    parser.add_argument(
        "--prompts",
        metavar="KIND|FILE",
        help=f"built-in prompts of one kind ({', '.join(KINDS)}), or a JSON-lines file (default: all kinds)",
    )
    sampling = parser.add_mutually_exclusive_group()
    sampling.add_argument("--greedy", dest="seeded", action="store_false", help="the best token each time [default]")
    sampling.add_argument("--seeded", dest="seeded", action="store_true", help="sample, with a fixed seed")
    parser.set_defaults(seeded=False)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")


def run(args: argparse.Namespace) -> int:
    """Measures and reports. 0 when every reply equals its prompt's solo run, else 1."""
    import asyncio

    from espalier.deploy.bench.load import BenchPlan, run_bench
    from espalier.deploy.bench.prompts import BUILT_IN, read_prompts
    from espalier.deploy.bench.report import as_json, table

    if args.prompts in KINDS:
        prompts = tuple(prompt for prompt in BUILT_IN if prompt.name.startswith(args.prompts))
    else:
        prompts = BUILT_IN if args.prompts is None else read_prompts(Path(args.prompts))
    plan = BenchPlan(
        url=args.url.rstrip("/"),
        model=args.model,
        api_key=args.api_key,
        levels=tuple(_count(level, "--levels") for level in args.levels.split(",")),
        num_tokens=_count(args.tokens, "--tokens"),
        seeded=args.seeded,
        reps=_count(args.reps, "--reps"),
        prompts=prompts,
    )
    if args.json is not None and not args.json.parent.is_dir():
        raise InvalidRequestError(f"--json: there is no folder {args.json.parent}", param="json")
    result = asyncio.run(run_bench(plan, lambda line: print(line, file=sys.stderr)))
    print(table(result))
    for failure in sorted(set(result.failures)):
        print(f"failed: {failure}", file=sys.stderr)
    if args.json is not None:
        args.json.write_text(as_json(plan, result), encoding="utf-8")
    return 1 if any(level.unequal or level.failed for level in result.levels) else 0


def _count(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InvalidRequestError(f"{flag}: {text!r} is not a number from 1", param=flag)
    return int(text)
