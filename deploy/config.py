"""Configuration file + environment + flags -> ClusterConfig. Flags win over the environment, it over the file, it over the defaults.

Every complaint names where the value came from: a flag, a variable, or the file and the key in it. Knows neither Ray nor torch; how a
model's name becomes a folder and which device a replica gets are told to it.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from espalier.cluster.config import ClusterConfig, GatewayConfig, RouterConfig, ServedModel
from espalier.deploy.options import BY_NAME, OPTIONS, OWNERS, PER_MODEL, Option, Scope, suggest
from espalier.replicas.config import Device, EngineConfig
from espalier.replicas.errors import InvalidRequestError

CONFIG_VARIABLE = "ESPALIER_CONFIG"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as somebody set it. source: `--max-lanes`, `ESPALIER_MAX_LANES` or `serve.yaml: models[0].max_lanes`."""

    value: Any
    source: str


Layer = dict[str, Setting]


@dataclass(frozen=True, slots=True)
class Settings:
    """All layers merged, by option name: what is said once, and what is said for each model (at least one)."""

    common: Layer
    models: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A checkpoint's folder, and the name to serve it under unless the user gave one."""

    path: Path
    name: str


Locate = Callable[[str | None, Path], LocatedModel]
"""What `--model` says (None: nothing) and the cache folder -> the checkpoint. Raises InvalidRequestError."""


def _refuse(source: str, message: str, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{source}: {message}", param=param)


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


def _read_keys(
    mapping: Mapping[Any, Any], where: str, options: Mapping[str, Option], extra: tuple[str, ...] = ()
) -> Layer:
    """Keys of one mapping of the file; `extra` are read elsewhere. A null value is as good as no key."""
    layer: Layer = {}
    for key, value in mapping.items():
        source = f"{where}{key}"
        if key in extra:
            continue
        if key not in options:
            raise _refuse(source, f"unknown key{suggest(str(key), [*options, *extra])}", str(key))
        if value is None:
            continue
        try:
            layer[key] = Setting(options[key].from_yaml(value), source)
        except ValueError as error:
            raise _refuse(source, str(error), key) from None
    return layer


def read_file(path: Path) -> tuple[Layer, tuple[Layer, ...]]:
    """The file's keys at its top, and those of each entry of `models`. Raises InvalidRequestError naming file and key."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise _refuse(str(path), f"cannot be read: {error.strerror}", "config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _refuse(str(path), f"is not valid YAML: {error}", "config") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise _refuse(str(path), "must hold keys and values", "config")
    common = _read_keys(content, f"{path}: ", BY_NAME, extra=("models",))
    if "models" not in content:
        return common, ()
    entries = content["models"]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise _refuse(f"{path}: models", "must be a list of models, each with its keys", "models")
    for key in ("model", "name"):
        if key in common:
            raise _refuse(common[key].source, "give it in each entry of `models`, not beside the list", key)
    per_model = {option.name: option for option in OPTIONS if option.scope in PER_MODEL}
    return common, tuple(_read_keys(entry, f"{path}: models[{i}].", per_model) for i, entry in enumerate(entries))


def read_environment(environ: Mapping[str, str]) -> Layer:
    """The ESPALIER_* variables; an unknown one is refused, an empty one is not set."""
    by_variable = {option.variable: option for option in OPTIONS}
    layer: Layer = {}
    for variable, text in environ.items():
        if not variable.startswith("ESPALIER_") or variable == CONFIG_VARIABLE or not text:
            continue
        if variable not in by_variable:
            raise _refuse(variable, f"unknown variable{suggest(variable, by_variable)}", variable)
        layer[by_variable[variable].name] = _read_text(by_variable[variable], text, variable)
    return layer


def read_flags(flags: Mapping[str, str]) -> Layer:
    """Flags by option name, as typed."""
    return {name: _read_text(BY_NAME[name], text, BY_NAME[name].flag) for name, text in flags.items()}


def _read_text(option: Option, text: str, source: str) -> Setting:
    try:
        return Setting(option.from_text(text), source)
    except ValueError as error:
        raise _refuse(source, str(error), option.name) from None


def merge(file: tuple[Layer, tuple[Layer, ...]], environment: Layer, flags: Layer) -> Settings:
    """One layer over the other. A flag or variable about models holds for every model of the file."""
    common, entries = file
    above = environment | flags
    for name in ("model", "name"):
        if name in above and len(entries) > 1:
            raise _refuse(above[name].source, f"the file lists {len(entries)} models; say it there", name)
    merged = common | above
    return Settings(common=merged, models=tuple(common | entry | above for entry in entries or ({},)))


def resolve(flags: Mapping[str, str], environ: Mapping[str, str], *, config_file: str | None = None) -> Settings:
    """All three sources, merged. config_file: what `--config` says; ESPALIER_CONFIG stands in for it."""
    path = config_file or environ.get(CONFIG_VARIABLE)
    file: tuple[Layer, tuple[Layer, ...]] = read_file(Path(path).expanduser()) if path else ({}, ())
    return merge(file, read_environment(environ), read_flags(flags))


def compose(settings: Settings, locate: Locate) -> ClusterConfig:
    """Settings -> ClusterConfig, each class checking its own fields. Raises InvalidRequestError naming the source of the value at fault."""
    with blamed_on(settings.common):
        return ClusterConfig(
            models=tuple(_compose_model(layer, locate) for layer in settings.models),
            gateway=GatewayConfig(**_fields(settings.common, "gateway")),
            router=RouterConfig(**_fields(settings.common, "router")),
            **_fields(settings.common, "cluster"),
        )


def _compose_model(layer: Layer, locate: Locate) -> ServedModel:
    with blamed_on(layer):
        engine = _fields(layer, "engine")
        engine["device"] = resolve_device(_value(layer, "device"))
        engine["cache_dir"] = Path(_value(layer, "cache_dir")).expanduser()
        located = locate(engine.get("model_path"), engine["cache_dir"])
        engine["model_path"] = located.path
        served = {"name": located.name} | _fields(layer, "model")
        return ServedModel(engine=EngineConfig(**engine), **served)


def resolve_device(device: str) -> Device:
    """auto, cpu or cuda -> where replicas run. Engines of this version compute on the CPU, so cuda is refused."""
    if device == "cuda":
        raise InvalidRequestError(
            "device: engines of this version run on the CPU only; say cpu or auto", param="device"
        )
    return "cpu"


def _value(layer: Layer, name: str) -> Any:
    return layer[name].value if name in layer else BY_NAME[name].default


def _fields(layer: Layer, scope: Scope) -> dict[str, Any]:
    return {
        option.field: layer[option.name].value for option in OPTIONS if option.scope == scope and option.name in layer
    }


@contextmanager
def blamed_on(layer: Layer) -> Iterator[None]:
    """Config classes complain of a field; say which flag, variable or key it came from instead."""
    try:
        yield
    except InvalidRequestError as error:
        option = next((option for option in OPTIONS if error.param in (option.field, option.name)), None)
        if option is None or not error.message.startswith(f"{error.param}: "):
            raise
        source = layer[option.name].source if option.name in layer else f"{option.flag} (by default {option.default})"
        raise _refuse(source, error.message.removeprefix(f"{error.param}: "), option.name) from None


def advice(config: ClusterConfig, settings: Settings, *, gpu_present: bool) -> list[str]:
    """What the user should know before it starts, one sentence each."""
    sentences = []
    gateway = config.gateway
    if gateway.host not in LOOPBACK and gateway.api_key_file is None:
        sentences.append(
            f"listening on {gateway.host} without API keys: anyone who reaches it can use it; see --api-key-file"
        )
    if gpu_present and any(_value(layer, "device") == "auto" for layer in settings.models):
        sentences.append("this machine's GPU stays idle: engines of this version run on the CPU")
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
