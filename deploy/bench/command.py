"""`espalier bench`: its arguments, and the call. Light to import; clients and engines come with the run."""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from espalier.deploy.bench import engine_options
from espalier.deploy.bench.plan import SAMPLINGS, BenchPlan
from espalier.deploy.bench.prompts import KINDS, SAFE_VOCAB, BenchPrompt, built_in, random_prompts, read_prompts
from espalier.deploy.bench.soak import SoakPlan
from espalier.deploy.bench.target import Target
from espalier.replicas.errors import InvalidRequestError

DEFAULT_URL = "http://127.0.0.1:5000"
_DISTINCT, _SOAK_DISTINCT = 4, 64


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `espalier bench`."""
    target = parser.add_argument_group("what is measured")
    target.add_argument("--url", help=f"HTTP address of a cluster, or of any server of OpenAI's API [{DEFAULT_URL}]")
    target.add_argument("--engine", metavar="FOLDER", help="load this model here instead, and measure its engine alone")
    target.add_argument("--against", metavar="URL", help="a second server, run in turn with the first: A, B, A, B")
    target.add_argument("--model", metavar="NAME", help="model to measure (default: the only one served)")
    target.add_argument("--api-key", metavar="KEY", help="key to call with")
    cells = parser.add_argument_group("cells")
    cells.add_argument(
        "--levels",
        "--streams",
        metavar="N,N",
        default="1,2,4,8",
        help="concurrent streams, one level after the other [%(default)s]",
    )
    cells.add_argument("--tokens", metavar="N", default="64", help="tokens of each reply [%(default)s]")
    cells.add_argument("--reps", metavar="N", default="1", help="times that each cell runs [%(default)s]")
    cells.add_argument(
        "--prompts",
        metavar="KIND|FILE",
        help=f"built-in prompts of one kind ({', '.join(KINDS)}), or a JSON-lines file (default: all kinds)",
    )
    cells.add_argument(
        "--prompt-tokens", metavar="N,N", help="prompts of exactly N random tokens instead; no tokenizer is needed"
    )
    cells.add_argument(
        "--distinct", metavar="N", help="different prompts of each kind [4; random ones: the most streams]"
    )
    sampling = cells.add_mutually_exclusive_group()
    sampling.add_argument(
        "--greedy", dest="sampling", action="store_const", const="greedy", help="the best token each time"
    )
    sampling.add_argument(
        "--seeded", dest="sampling", action="store_const", const="seeded", help="sample, with fixed seeds"
    )
    cells.add_argument("--seed", metavar="N", help="of random tokens [0 with --engine, else drawn]")
    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--alone",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run every prompt alone first, and compare replies with that [yes]",
    )
    checks.add_argument("--serial", action="store_true", help="run the prompts alone once more, without drafts")
    checks.add_argument("--fresh", action="store_true", help="compare replies that resume kept state with cold ones")
    checks.add_argument("--prefill", metavar="N,N", help="time cold prompts of so many tokens to the first token")
    checks.add_argument(
        "--arrival",
        metavar="N,N",
        help="let a cold prompt of N tokens arrive among the most streams, and see how long they wait",
    )
    checks.add_argument(
        "--same-as",
        metavar="FILE",
        type=Path,
        help="JSON of an earlier run: its solo replies must be those of this one",
    )
    checks.add_argument(
        "--soak", metavar="SECONDS", help="instead of cells: random requests for so long, then look for leaks"
    )
    checks.add_argument("--abort-share", metavar="X", help="of a soak's requests, those whose client leaves [0.2]")
    parser.add_argument(
        "--write-prompts",
        metavar="FILE",
        type=Path,
        help="only write the prompts as token ids of --engine's model: a --prompts file for machines without its tokenizer",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    parser.add_argument("--commit", help="what to record as the commit (default: git's answer)")
    engine_options.declare(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and reports. 0 when nothing is unequal, failed or leaked, else 1."""
    _check(args)
    if args.write_prompts is not None:
        return _write_prompts(args)
    return _soak(args) if args.soak is not None else _bench(args)


def _bench(args: argparse.Namespace) -> int:
    from espalier.deploy.bench.earlier import hold_against, read_earlier
    from espalier.deploy.bench.load import run_bench
    from espalier.deploy.bench.report import MAX_NOTES, bench_json, tables

    levels, seed = _counts(args.levels, "--levels"), _seed(args)
    options: dict[str, Any] = {
        "samplings": SAMPLINGS if args.sampling is None else (args.sampling,),
        "levels": levels,
        "num_tokens": _count(args.tokens, "--tokens"),
        "reps": _count(args.reps, "--reps"),
        "alone": args.alone,
        "serial": args.serial,
        "fresh": args.fresh,
        "prefill": () if args.prefill is None else _counts(args.prefill, "--prefill"),
        "arrivals": () if args.arrival is None else _counts(args.arrival, "--arrival"),
        "seed": seed,
    }
    distinct = None if args.distinct is None else _count(args.distinct, "--distinct")
    lengths = None if args.prompt_tokens is None else _counts(args.prompt_tokens, "--prompt-tokens")
    prompts = () if lengths is not None else _prompts(args.prompts, distinct or _DISTINCT)
    with _targets(args, reads_text=any(prompt.messages for prompt in prompts)) as targets:
        if lengths is not None:
            vocab_size = min(target.info.vocab_size or SAFE_VOCAB for target in targets)
            prompts = random_prompts(distinct or max(levels), lengths, vocab_size, random.Random(f"prompts {seed}"))
        plan = BenchPlan(prompts=prompts, **options)
        earlier = None if args.same_as is None else read_earlier(args.same_as, plan)
        result = run_bench(plan, targets, _progress)
    if earlier is not None:
        result = replace(result, earlier=hold_against(result.solo, earlier, args.same_as))
    print(tables(result))
    _tell(result.notes, MAX_NOTES)
    if args.json is not None:
        args.json.write_text(bench_json(plan, result, _recorded(args)), encoding="utf-8")
    return 0 if result.is_clean else 1


def _write_prompts(args: argparse.Namespace) -> int:
    from espalier.deploy.bench.engine_target import chat_token_ids, open_tokenizer
    from espalier.deploy.bench.prompts import prompt_line

    distinct = _DISTINCT if args.distinct is None else _count(args.distinct, "--distinct")
    tokenizer = open_tokenizer(Path(args.engine).expanduser())
    prompts = _prompts(args.prompts, distinct)
    lines = [prompt_line(prompt, prompt.token_ids or chat_token_ids(tokenizer, prompt)) for prompt in prompts]
    args.write_prompts.write_text("".join(lines), encoding="utf-8")
    return 0


def _soak(args: argparse.Namespace) -> int:
    from espalier.deploy.bench.report import MAX_NOTES, soak_json, soak_table
    from espalier.deploy.bench.soak import run_soak

    plan = SoakPlan(
        seconds=_number(args.soak, "--soak", most=None),
        abort_share=_number(args.abort_share or "0.2", "--abort-share", most=1.0),
        streams=max(_counts(args.levels, "--levels")),
        distinct=_SOAK_DISTINCT if args.distinct is None else _count(args.distinct, "--distinct"),
        seed=_seed(args),
    )
    with _targets(args, reads_text=False) as targets:
        info = targets[0].info
        result = run_soak(plan, targets[0], _progress)
    print(soak_table(result))
    _tell((*result.comparison.notes, *result.leaks), MAX_NOTES)
    if args.json is not None:
        args.json.write_text(soak_json(plan, result, asdict(info), _recorded(args)), encoding="utf-8")
    return 0 if result.is_clean else 1


def _check(args: argparse.Namespace) -> None:
    """Raises InvalidRequestError for arguments that do not go together."""

    def refuse(flag: str, message: str) -> InvalidRequestError:
        return InvalidRequestError(f"{flag}: {message}", param=flag)

    if args.engine is not None and args.url is not None:
        raise refuse("--url", "give it or --engine; a second target is --against")
    if args.engine is None and (options := engine_options.given(args)):
        raise refuse("--" + next(iter(options)).replace("_", "-"), "only with --engine: a server has its own options")
    if args.engine is not None and args.against is None:
        for flag, value in (("--model", args.model), ("--api-key", args.api_key)):
            if value is not None:
                raise refuse(flag, "of a server, and --engine is none")
    if args.prompts is not None and args.prompt_tokens is not None:
        raise refuse("--prompts", "give it or --prompt-tokens")
    for flag, value in (("--serial", args.serial), ("--same-as", args.same_as)):
        if value and not args.alone:
            raise refuse(flag, "compares prompts that run alone, which --no-alone leaves out")
    if args.soak is not None:
        for flag, value in (
            ("--against", args.against),
            ("--serial", args.serial),
            ("--fresh", args.fresh),
            ("--prefill", args.prefill),
            ("--arrival", args.arrival),
            ("--same-as", args.same_as),
            ("--prompts", args.prompts),
            ("--prompt-tokens", args.prompt_tokens),
            ("--greedy or --seeded", args.sampling),
        ):
            if value:
                raise refuse(flag, "not with --soak, which makes its own requests")
    elif args.abort_share is not None:
        raise refuse("--abort-share", "only with --soak")
    if args.write_prompts is not None and (args.engine is None or args.prompt_tokens is not None):
        raise refuse("--write-prompts", "needs --engine, for its tokenizer, and prompts of text")
    for flag, path in (("--json", args.json), ("--write-prompts", args.write_prompts)):
        if path is not None and not path.parent.is_dir():
            raise refuse(flag, f"there is no folder {path.parent}")


@contextmanager
def _targets(args: argparse.Namespace, *, reads_text: bool) -> Iterator[list[Target]]:
    """The target, and the second one where there is one; closed at the end."""
    targets: list[Target] = []
    try:
        if args.engine is None:
            targets.append(_server(args.url or DEFAULT_URL, args))
        else:
            from espalier.deploy.bench.engine_target import open_engine_target

            targets.append(open_engine_target(engine_options.read(args.engine, args), reads_text=reads_text))
        if args.against is not None:
            targets.append(_server(args.against, args))
        yield targets
    finally:
        for target in targets:
            target.close()


def _server(url: str, args: argparse.Namespace) -> Target:
    from espalier.deploy.bench.http_target import HttpTarget

    return HttpTarget(url, args.model, args.api_key)


def _prompts(choice: str | None, distinct: int) -> tuple[BenchPrompt, ...]:
    if choice is not None and choice not in KINDS:
        return read_prompts(Path(choice))
    return tuple(prompt for kind in KINDS if choice in (None, kind) for prompt in built_in(kind, distinct))


def _seed(args: argparse.Namespace) -> int:
    """A server may have seen the tokens of an earlier bench; a new engine has seen none."""
    if args.seed is not None:
        return _count(args.seed, "--seed", least=0)
    return 0 if args.engine is not None else random.SystemRandom().getrandbits(32)


def _recorded(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without the key."""
    return {name: value for name, value in vars(args).items() if name not in ("api_key", "command", "json")}


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(notes: Sequence[str], most: int) -> None:
    for note in notes[:most]:
        print(f"wrong: {note}", file=sys.stderr)
    if len(notes) > most:
        print(f"wrong: and {len(notes) - most} more", file=sys.stderr)


def _counts(text: str, flag: str) -> tuple[int, ...]:
    return tuple(_count(part, flag) for part in text.split(","))


def _count(text: str, flag: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise InvalidRequestError(f"{flag}: {text!r} is not a number from {least}", param=flag)
    return int(text)


def _number(text: str, flag: str, most: float | None) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= (sys.float_info.max if most is None else most):
        limits = "from 0" if most is None else f"from 0 to {most:g}"
        raise InvalidRequestError(f"{flag}: {text!r} is not a number {limits}", param=flag)
    return value
