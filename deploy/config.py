"""Configuration file + environment + flags -> Settings. Flags win over the environment, it over the file, it over the defaults.

Every complaint names where the value came from: a flag, a variable, or the file and the key in it. What the settings make is the business of
cluster/settings.py.
"""

import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from espalier.cluster.config import ClusterConfig
from espalier.cluster.options import BY_NAME, OPTIONS, OWNERS, Option, Scope, suggest
from espalier.cluster.settings import Layer, Setting, Settings, merge, read_mapping, refusal

CONFIG_VARIABLE = "ESPALIER_CONFIG"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice; YAML would keep the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            # The loader itself refuses keys that cannot be hashed.
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> tuple[Layer, tuple[Layer, ...]]:
    """The file's keys at its top, and those of each entry of `models`. Raises InvalidRequestError naming file and key."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise refusal(str(path), f"cannot be read: {error.strerror}", "config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise refusal(str(path), f"is not valid YAML: {error}", "config") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise refusal(str(path), "must hold keys and values", "config")
    return read_mapping(content, f"{path}: ")


def read_environment(environ: Mapping[str, str]) -> Layer:
    """The ESPALIER_* variables; an unknown one is refused, an empty one is not set."""
    by_variable = {option.variable: option for option in OPTIONS}
    layer: Layer = {}
    for variable, text in environ.items():
        if not variable.startswith("ESPALIER_") or variable == CONFIG_VARIABLE or not text:
            continue
        if variable not in by_variable:
            raise refusal(variable, f"unknown variable{suggest(variable, by_variable)}", variable)
        layer[by_variable[variable].name] = _read_text(by_variable[variable], text, variable)
    return layer


def read_flags(flags: Mapping[str, str]) -> Layer:
    """Flags by option name, as typed."""
    return {name: _read_text(BY_NAME[name], text, BY_NAME[name].flag) for name, text in flags.items()}


def _read_text(option: Option, text: str, source: str) -> Setting:
    try:
        return Setting(option.from_text(text), source)
    except ValueError as error:
        raise refusal(source, str(error), option.name) from None


def resolve(flags: Mapping[str, str], environ: Mapping[str, str], *, config_file: str | None = None) -> Settings:
    """All three sources, merged. config_file: what `--config` says; ESPALIER_CONFIG stands in for it."""
    path = config_file or environ.get(CONFIG_VARIABLE)
    file: tuple[Layer, tuple[Layer, ...]] = read_file(Path(path).expanduser()) if path else ({}, ())
    return merge(file, read_environment(environ) | read_flags(flags))


def advice(config: ClusterConfig) -> list[str]:
    """What the user should know before it starts, one sentence each."""
    sentences = []
    gateway = config.gateway
    if gateway.host not in LOOPBACK and gateway.api_key_file is None:
        sentences.append(
            f"listening on {gateway.host} without API keys: anyone who reaches it can use it; see --api-key-file"
        )
    return sentences


def dump(config: ClusterConfig) -> str:
    """The configuration as a file that `--config` reads back to the same. Keys of clients are not in it, only their file's path."""

    def keys(holder: object, scope: Scope) -> dict[str, Any]:
        assert isinstance(holder, OWNERS[scope])
        return {option.name: _plain(getattr(holder, option.field)) for option in OPTIONS if option.scope == scope}

    models = [keys(model, "model") | keys(model.engine, "engine") for model in config.models]
    common = keys(config.gateway, "gateway") | keys(config.router, "router") | keys(config, "cluster")
    return yaml.safe_dump({"models": models} | common, sort_keys=False, allow_unicode=True)


def _plain(value: object) -> object:
    return os.fspath(value) if isinstance(value, Path) else value
