"""The engine's options on the bench's command line: the rows of the cluster's table that an EngineConfig takes, under the same flags."""

import argparse
from pathlib import Path
from typing import Any

from espalier.cluster.options import OPTIONS, SWITCH
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import InvalidRequestError

# The model's folder is --engine's own value.
ENGINE_OPTIONS = tuple(option for option in OPTIONS if option.scope == "engine" and option.field != "model_path")


def declare(parser: argparse.ArgumentParser) -> None:
    """One argument an option; values stay text until they are read."""
    group = parser.add_argument_group("the engine of --engine")
    for option in ENGINE_OPTIONS:
        text = option.help.replace("%", "%%")
        if option.kind is SWITCH:
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(option.flag, metavar=option.kind.metavar, help=text)


def given(args: argparse.Namespace) -> dict[str, str]:
    """Those that were set, as typed."""
    values = {option.name: getattr(args, option.name) for option in ENGINE_OPTIONS}
    return {name: str(value) for name, value in values.items() if value is not None}


def read(folder: str, args: argparse.Namespace) -> EngineConfig:
    """The config. Without --device, or with `auto`, it runs on a GPU where there is one. Raises InvalidRequestError naming the flag."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise InvalidRequestError(f"--engine: there is no folder {path}", param="engine")
    texts = given(args)
    if texts.get("device", "auto") == "auto":
        texts["device"] = _present()
    values: dict[str, Any] = {}
    for option in ENGINE_OPTIONS:
        if option.name in texts:
            try:
                values[option.field] = option.from_text(texts[option.name])
            except ValueError as error:
                raise InvalidRequestError(f"{option.flag}: {error}", param=option.name) from None
    return EngineConfig(model_path=path, **values)


def _present() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
