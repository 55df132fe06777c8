"""From options, wherever they were said, to a ClusterConfig: what one mapping of keys says, and what all values together make.

Every complaint names where the value came from: a flag, a variable, or a file and the key in it. Knows neither Ray nor torch; how a model's
name becomes a folder, and how many GPUs there are, is told to it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.cluster.config import ClusterConfig, GatewayConfig, RouterConfig, ServedModel
from espalier.cluster.options import BY_NAME, OPTIONS, PER_MODEL, Option, Scope, suggest
from espalier.replicas.config import Device, EngineConfig
from espalier.replicas.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as somebody set it. source: `--max-lanes`, `ESPALIER_MAX_LANES` or `serve.yaml: models[0].max_lanes`."""

    value: Any
    source: str


Layer = dict[str, Setting]


@dataclass(frozen=True, slots=True)
class Settings:
    """All that was said, by option name: what is said once, and what is said for each model (at least one)."""

    common: Layer
    models: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A checkpoint's folder, and the name to serve it under unless the user gave one."""

    path: Path
    name: str


Locate = Callable[[str | None, Path], LocatedModel]
"""What `model` says (None: nothing) and the cache folder -> the checkpoint. Raises InvalidRequestError."""


def refusal(source: str, message: str, param: str | None = None) -> InvalidRequestError:
    """The error that blames a flag, a variable, or a file and the key in it."""
    return InvalidRequestError(f"{source}: {message}", param=param)


def read_mapping(content: Mapping[Any, Any], where: str) -> tuple[Layer, tuple[Layer, ...]]:
    """The keys at the top, and those of each entry of `models`. where: what stands before each key in a complaint."""
    common = _read_keys(content, where, BY_NAME, extra=("models",))
    if "models" not in content:
        return common, ()
    entries = content["models"]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise refusal(f"{where}models", "must be a list of models, each with its keys", "models")
    for key in ("model", "name"):
        if key in common:
            raise refusal(common[key].source, "give it in each entry of `models`, not beside the list", key)
    per_model = {option.name: option for option in OPTIONS if option.scope in PER_MODEL}
    return common, tuple(_read_keys(entry, f"{where}models[{i}].", per_model) for i, entry in enumerate(entries))


def _read_keys(
    mapping: Mapping[Any, Any], where: str, options: Mapping[str, Option], extra: tuple[str, ...] = ()
) -> Layer:
    """Keys of one mapping; `extra` are read elsewhere. A null value is as good as no key."""
    layer: Layer = {}
    for key, value in mapping.items():
        source = f"{where}{key}"
        if key in extra:
            continue
        if key not in options:
            raise refusal(source, f"unknown key{suggest(str(key), [*options, *extra])}", str(key))
        if value is None:
            continue
        try:
            layer[key] = Setting(options[key].from_yaml(value), source)
        except ValueError as error:
            raise refusal(source, str(error), key) from None
    return layer


def merge(file: tuple[Layer, tuple[Layer, ...]], above: Layer) -> Settings:
    """One over the other. What `above` says about models holds for every model of the file."""
    common, entries = file
    for name in ("model", "name"):
        if name in above and len(entries) > 1:
            raise refusal(above[name].source, f"the file lists {len(entries)} models; say it there", name)
    merged = common | above
    return Settings(common=merged, models=tuple(common | entry | above for entry in entries or ({},)))


def compose(settings: Settings, locate: Locate, *, num_gpus: int | None = None) -> ClusterConfig:
    """Settings -> ClusterConfig, each class checking its own fields. Raises InvalidRequestError naming the source of the value at fault.

    num_gpus: of this machine, for a cluster that runs on it; None for one that runs elsewhere, on nodes that Ray picks by what replicas ask for.
    """
    share = None if num_gpus is None else num_gpus / len(settings.models)
    with blamed_on(settings.common):
        return ClusterConfig(
            models=tuple(_compose_model(layer, locate, share) for layer in settings.models),
            gateway=GatewayConfig(**_fields(settings.common, "gateway")),
            router=RouterConfig(**_fields(settings.common, "router")),
            **_fields(settings.common, "cluster"),
        )


def _compose_model(layer: Layer, locate: Locate, gpu_share: float | None) -> ServedModel:
    with blamed_on(layer):
        engine = _fields(layer, "engine")
        device = resolve_device(value_of(layer, "device"), layer["gpus"].value if "gpus" in layer else None, gpu_share)
        engine["device"] = device
        engine["cache_dir"] = Path(value_of(layer, "cache_dir")).expanduser()
        located = locate(engine.get("model_path"), engine["cache_dir"])
        engine["model_path"] = located.path
        served = {"name": located.name} | _fields(layer, "model")
        if device == "cuda":
            served = _on_gpus(served, gpu_share)
            if 0 < served["num_gpus"] < 1:  # replicas that share a GPU share its memory
                engine.setdefault("memory_share", value_of({}, "memory_share") * served["num_gpus"])
        return ServedModel(engine=EngineConfig(**engine), **served)


def resolve_device(device: str, gpus: float | None, gpu_share: float | None) -> Device:
    """auto, cpu or cuda -> where replicas run.

    gpus: what each replica is said to ask for, None where nothing is said. gpu_share: GPUs of this machine a model; None for other machines.
    """
    if device == "cuda" and gpu_share == 0:
        raise InvalidRequestError("device: this machine has no GPU; say cpu or auto", param="device")
    if device != "auto":
        return "cuda" if device == "cuda" else "cpu"
    wants_gpu = gpus is not None and gpus > 0
    has_gpu = wants_gpu if gpu_share is None else gpu_share > 0 and gpus != 0
    return "cuda" if has_gpu else "cpu"


def _on_gpus(served: dict[str, Any], gpu_share: float | None) -> dict[str, Any]:
    """With defaults of a model on GPUs: one for each replica and, where the GPUs are this machine's, as many replicas as its share allows."""
    served = {"num_gpus": 1.0} | served
    if gpu_share is not None and served["num_gpus"] > 0:
        served = {"num_replicas": max(1, int(gpu_share / served["num_gpus"]))} | served
    return served


def value_of(layer: Layer, name: str) -> Any:
    """The value of an option, or its default."""
    return layer[name].value if name in layer else BY_NAME[name].default


def _fields(layer: Layer, scope: Scope) -> dict[str, Any]:
    values = {
        option.field: layer[option.name].value for option in OPTIONS if option.scope == scope and option.name in layer
    }
    return {name: value.expanduser() if isinstance(value, Path) else value for name, value in values.items()}


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
        raise refusal(source, error.message.removeprefix(f"{error.param}: "), option.name) from None
