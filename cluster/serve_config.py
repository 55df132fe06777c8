"""Builders for a Serve config file, where an application is an import path and a mapping of `args`.

`args` are what a configuration file of `espalier serve` holds, the same keys read by the same table: of one model for engine_from_options, of the
gateway and of all models for gateway_from_options. One more key, `resources`, names Ray resources of which each process takes the given amount:
it runs where a node declares them.

Builders run in a Ray task that may lie on another node than what they build, so they look at no file.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.serve import Application

from espalier.cluster.config import ClusterConfig
from espalier.cluster.serve_apps import build_engine_app, build_gateway_app
from espalier.cluster.settings import LocatedModel, compose, merge, read_mapping, refusal
from espalier.replicas.errors import InvalidRequestError

RESOURCES = "resources"


# Serve reads the signature: a builder takes one parameter, and this annotation leaves the mapping as it is.
def engine_from_options(args: dict[str, Any]) -> Application:
    """The application that serves one model. Deploy it under names.engine_app_name of its name, without a route."""
    config, resources = read_args(args)
    if len(config.models) > 1:
        raise refusal("args.models", "an engine application serves one model", "models")
    [model] = config.models
    # Replicas of one machine share its cores among them; a pod's are those that its replica asked for.
    threads = model.engine.cpu_threads or max(1, math.floor(model.num_cpus))
    model = replace(model, engine=replace(model.engine, cpu_threads=threads))
    return build_engine_app(model, config, resources=resources)


def gateway_from_options(args: dict[str, Any]) -> Application:
    """The application of the gateway, in front of all models of `args`. Deploy it under names.GATEWAY_APP, without a route."""
    config, resources = read_args(args)
    return build_gateway_app(config, resources=resources)


def read_args(args: Mapping[str, Any]) -> tuple[ClusterConfig, dict[str, float]]:
    """Options and resources. Raises InvalidRequestError naming the key at fault."""
    options = {key: value for key, value in args.items() if key != RESOURCES}
    settings = merge(read_mapping(options, "args."), {})
    for index, layer in enumerate(settings.models):
        if "model" not in layer:
            source = f"args.models[{index}].model" if "models" in args else "args.model"
            raise refusal(source, "say which: the folder of a checkpoint on every node that serves it", "model")
    return compose(settings, _folder), _read_resources(args.get(RESOURCES))


def _folder(model: str | None, _cache_dir: Path) -> LocatedModel:
    assert model is not None
    path = Path(model)
    if not path.is_absolute():
        message = f"must be an absolute path, the folder of a checkpoint on every node that serves it, not {model!r}"
        raise InvalidRequestError(f"model: {message}", param="model")
    return LocatedModel(path, path.name)


def _read_resources(value: object) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refusal(f"args.{RESOURCES}", f"must map names of Ray resources to amounts, not {value!r}", RESOURCES)
    for name, amount in value.items():
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not isinstance(name, str) or not number or not 0 < amount < math.inf:
            raise refusal(f"args.{RESOURCES}.{name}", f"must be a positive amount, not {amount!r}", RESOURCES)
    return {name: float(amount) for name, amount in value.items()}
