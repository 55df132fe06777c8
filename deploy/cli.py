"""The `espalier` command: parse, call, exit code. 0 is success, 1 a failure at run time, 2 something in what was asked for."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier import __version__
from espalier.cluster.options import OPTIONS, SWITCH, Scope, suggest
from espalier.deploy.bench import command as bench
from espalier.deploy.random_model import command as random_model
from espalier.replicas.errors import CheckpointError, EngineError, InvalidRequestError

log = logging.getLogger("espalier.deploy")

GROUPS: tuple[tuple[str, tuple[Scope, ...]], ...] = (
    ("model and its replicas", ("model", "engine")),
    ("where clients call", ("gateway",)),
    ("router", ("router",)),
    ("logs and traces", ("cluster",)),
)
SERVE_EPILOG = (
    "Each option is also an environment variable (--max-lanes: ESPALIER_MAX_LANES) and a key of the file (max_lanes: 16). Flags win over "
    "the environment, the environment over the file. The file may list several `models:`, each with its own keys."
)


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command. run: parsed arguments -> exit code; it imports what it needs, so that `--help` answers at once."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. What users got wrong ends in one line, without a traceback."""
    args, unknown = build_parser().parse_known_args(argv)
    try:
        if unknown:
            flags = ["--" + name.replace("_", "-") for name in vars(args) if name != "command"]
            hint = suggest(unknown[0].partition("=")[0], flags)
            raise InvalidRequestError(f"{args.command}: unknown argument {unknown[0]}{hint}")
        return COMMANDS[args.command].run(args)
    except (InvalidRequestError, CheckpointError) as error:
        return _failed(error, 2)
    except EngineError as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _failed(error: EngineError, code: int) -> int:
    print(f"espalier: {error.message}", file=sys.stderr)
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Values stay text: config.py reads them as it reads variables, with the same messages."""
    parser = argparse.ArgumentParser("espalier", description="Serves EXL3-quantized language models on a Ray cluster.")
    parser.add_argument("--version", action="version", version=f"espalier {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.help, description=command.help, epilog=command.epilog, allow_abbrev=False
        )
        command.arguments(sub)
    return parser


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML of the same options (ESPALIER_CONFIG)")
    for title, scopes in GROUPS:
        group = parser.add_argument_group(title)
        for option in OPTIONS:
            if option.scope not in scopes:
                continue
            text = option.help if option.default is None else f"{option.help} [{str(option.default).lower()}]"
            text = text.replace("%", "%%")
            if option.kind is SWITCH:
                group.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=text)
            else:
                group.add_argument(option.flag, metavar=option.kind.metavar, help=text)


def _serve_flags(args: argparse.Namespace) -> dict[str, str]:
    given = {option.name: getattr(args, option.name) for option in OPTIONS}
    return {name: str(value) for name, value in given.items() if value is not None}


def _serve(args: argparse.Namespace) -> int:
    from espalier.cluster.logs import LogConfig, configure_logging
    from espalier.deploy.check import checked_config, count_gpus
    from espalier.deploy.local import serve

    config, advice = checked_config(_serve_flags(args), args.config)
    configure_logging(LogConfig(level=config.log_level, as_json=config.log_json), "serve")
    for sentence in advice:
        log.warning(sentence)
    try:
        return serve(config, count_gpus())
    except EngineError as error:
        # Whatever its kind: options and headers were fine, so it is this start that failed.
        return _failed(error, 1)


def _check(args: argparse.Namespace) -> int:
    from espalier.deploy.check import checked_config
    from espalier.deploy.config import dump

    config, advice = checked_config(_serve_flags(args), args.config)
    for sentence in advice:
        print(f"warning: {sentence}", file=sys.stderr)
    print(dump(config), end="")
    return 0


def _render_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of `espalier serve --config`")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path(), help="where the files go [.]")
    parser.add_argument(
        "--claim",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        help="models below FOLDER are on the PersistentVolumeClaim NAME, mounted there; may be given again",
    )
    parser.add_argument("--keys-secret", metavar="NAME", help="Secret that holds the API keys [espalier-api-keys]")


def _render(args: argparse.Namespace) -> int:
    from espalier.deploy.config import resolve
    from espalier.deploy.render import render, target_of, write

    # From the file alone: what it says is the same tomorrow, in another shell.
    rendered = render(resolve({}, {}, config_file=str(args.config)), target_of(args.claim, args.keys_secret))
    for path in write(rendered, args.out):
        print(path)
    for note in rendered.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _encode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="Hugging Face folder or GGUF file")
    parser.add_argument(
        "output", metavar="OUTPUT", type=Path, help="folder of the new checkpoint; a run cut short goes on there"
    )
    parser.add_argument(
        "--bits", metavar="K", type=float, default=4.0, help="bits a weight of the layers, 1 to 8 or a half rate [4]"
    )
    parser.add_argument(
        "--head-bits",
        metavar="K",
        type=float,
        default=6.0,
        help="bits a weight of the output head, 1 to 8, or 16: plain [6]",
    )
    parser.add_argument(
        "--codebook", choices=("3inst", "mcg", "mul1"), default="mul1", help="how codes become weights [mul1]"
    )
    parser.add_argument("--threads", metavar="N", type=int, help="threads [all cores]")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the sign flips [0]")


def _encode(args: argparse.Namespace) -> int:
    from espalier.deploy.encode.job import encode_checkpoint

    encode_checkpoint(
        args.source,
        args.output,
        bits=args.bits,
        head_bits=args.head_bits,
        codebook=args.codebook,
        threads=args.threads,
        seed=args.seed,
        progress=True,
    )
    return 0


COMMANDS = {
    "serve": Command("serve models until told to stop", _serve_arguments, _serve, SERVE_EPILOG),
    "check": Command(
        "look at options and checkpoints (a model is fetched first), and print the whole configuration",
        _serve_arguments,
        _check,
        SERVE_EPILOG,
    ),
    "render": Command(
        "write chart values and a Serve config that start the same cluster as a configuration file",
        _render_arguments,
        _render,
    ),
    "encode": Command("make a small EXL3 checkpoint without a GPU", _encode_arguments, _encode),
    "random-model": Command(
        "write a checkpoint of random weights in the shape of a model, to measure speed with",
        random_model.arguments,
        random_model.run,
    ),
    "bench": Command("measure a server, or an engine alone: speed, latency, equal tokens", bench.arguments, bench.run),
}
