"""`python -m espalier.replicas.gpu.profile MODEL`: where the microseconds of a round go, on this machine's GPU. Parses, calls, prints."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import EngineError
from espalier.replicas.gpu.profile.capture import profile_decode, profile_prompt, trace_of
from espalier.replicas.gpu.profile.loop import TOKENS, LoopBench
from espalier.replicas.gpu.profile.results import report, report_json
from espalier.replicas.gpu.shard import GpuShard
from espalier.replicas.request import SamplingParams

OK, USAGE = 0, 2
_BATCH_TOKENS = 512  # rows of a round of prompts: enough where prompts are not measured, and fewer shapes to capture


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 when the command cannot be carried out."""
    args = _parser().parse_args(arguments)
    if min(args.rows) < 1 or args.context <= TOKENS or min(args.repeats, args.prompt_repeats) < 2:
        return _refuse(f"--rows must be positive, --context over {TOKENS}, --repeats and --prompt-repeats at least 2")
    if min(args.prompts, default=2) < 2 or args.batch_tokens < max(2, *args.rows):
        return _refuse("--prompts must be at least 2, --batch-tokens at least 2 and the most of --rows")
    if args.loop and max(args.rows) * args.context > args.batch_tokens * TOKENS // 2:
        return _refuse("so many streams of that context never decode together; fewer of them, or --no-loop")
    if not torch.cuda.is_available():
        return _refuse("needs an NVIDIA GPU, and torch sees none")
    try:
        return _run(args)
    except EngineError as error:
        return _refuse(str(error))


def _run(args: argparse.Namespace) -> int:
    most = max(args.rows)
    max_context = max(1024, args.context + TOKENS, *args.prompts)
    config = EngineConfig(
        model_path=args.model,
        device="cuda",
        max_context=max_context,
        max_lanes=most,
        batch_tokens=args.batch_tokens,
        kv_tokens=most * max(1024, args.context + TOKENS) + max(args.prompts, default=0),
        cache_dir=args.cache_dir,
    )
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    if args.seeded:
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)
    trace_of(lambda: torch.zeros(1, device="cuda").add_(1))  # graphs are captured with the profiler's library loaded
    shard = GpuShard(config)
    rounds = []
    for count in args.rows:
        print(f"rounds of {count} rows", file=sys.stderr, flush=True)
        rounds.append(profile_decode(shard, count, args.context, params, repeats=args.repeats, eager=args.eager))
    for tokens in args.prompts:
        print(f"a prompt of {tokens} tokens", file=sys.stderr, flush=True)
        last = min(tokens, args.batch_tokens)
        rounds.append(profile_prompt(shard, last, tokens, params, repeats=args.prompt_repeats, eager=args.eager))
    loops = []
    if args.loop:
        bench = LoopBench(config, shard)
        try:
            for count in args.rows:
                print(f"the engine's loop with {count} streams", file=sys.stderr, flush=True)
                loops.append(bench.measure(count, args.context, params))
        finally:
            bench.close()
    setup = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": args.model.name,
        "quantization": shard.info.quantization,
        "numerics_id": shard.info.numerics_id,
        "sampling": "seeded" if args.seeded else "greedy",
        "context": args.context,
        "batch_tokens": args.batch_tokens,
        "commit": args.commit,
    }
    head = f"{args.model.name} ({shard.info.quantization}) on {setup['device']}, context {args.context}, {setup['sampling']}, commit {args.commit}"
    print(report(head, rounds, loops), end="")
    if args.json is not None:
        args.json.write_text(report_json(setup, rounds, loops), encoding="utf-8")
    return OK


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from e


def _refuse(why: str) -> int:
    print(f"espalier.replicas.gpu.profile: {why}", file=sys.stderr)
    return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m espalier.replicas.gpu.profile", description="Where the time of rounds goes on a GPU."
    )
    parser.add_argument("model", type=Path, metavar="FOLDER", help="the checkpoint")
    parser.add_argument(
        "--rows", type=_numbers, default=(1, 8, 64), metavar="N,N", help="rows of a round, or streams [1,8,64]"
    )
    parser.add_argument(
        "--prompts", type=_numbers, default=(), metavar="N,N", help="also the last round of prompts of N tokens [none]"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=_BATCH_TOKENS, metavar="N", help="rows of a prompt's round [%(default)s]"
    )
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of each sequence [%(default)s]")
    parser.add_argument("--repeats", type=int, default=100, metavar="N", help="rounds that are timed [%(default)s]")
    parser.add_argument("--prompt-repeats", type=int, default=10, metavar="N", help="the same of prompts [%(default)s]")
    parser.add_argument("--seeded", action="store_true", help="temperature 0.8, top-p 0.95 instead of greedy")
    parser.add_argument("--eager", action="store_true", help="show the profiler rounds launched kernel by kernel")
    parser.add_argument(
        "--loop", action=argparse.BooleanOptionalAction, default=True, help="also measure the engine's loop [yes]"
    )
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/espalier"), help="as of `espalier serve`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--commit", default="unknown", help="what to record as the commit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
