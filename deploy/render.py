"""`espalier render`: from a configuration file of `espalier serve` to the same cluster elsewhere: `serve-config.yaml`, a plain Serve config, and
`values.yaml`, for the chart helm/espalier, which renders that Serve config again into its RayService.

One application per model, and the gateway last. `args` are the file's own keys (see cluster/serve_config.py), so an option means the same in all
forms; what the file does not set is not in them either. Ray places processes by a custom resource with the name of their application, which
the nodes for a model or for the gateway declare. Serve's own proxies are off: the gateway listens for itself.

    proxy_location: Disabled
    applications:
    - name: espalier-engine-<slug of the name>          # names.engine_app_name
      route_prefix: null
      import_path: espalier.cluster.serve_config:engine_from_options
      args: {name, model, <options of the model>, <options of all processes>, resources: {espalier-engine-<slug>: 0.001}}
    - name: espalier-gateway
      route_prefix: null
      import_path: espalier.cluster.serve_config:gateway_from_options
      args: {host: 0.0.0.0, <options of the gateway>, <options of all processes>, api_key_file, models: [{name, model, progress_timeout}],
             resources: {espalier-gateway: 0.001}}

Values of the chart: `models` (name, model, source, options), `options` (of all processes), `gateway.options`, `auth` (a Secret's name and entry).
A path means the same in both forms: the folder of a model is where pods find it, from the same path of their node (hostPath), from a claim, or
from the hub at a fixed revision. Options that only mean something on one machine are refused by name. Knows neither Ray nor Kubernetes, and
reads no key: keys are named by their Secret.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from espalier.cluster.config import ClusterConfig, ServedModel
from espalier.cluster.names import GATEWAY_APP, engine_app_name
from espalier.cluster.options import BY_NAME, OPTIONS, PATH, Scope
from espalier.cluster.settings import Layer, LocatedModel, Settings, compose, refusal
from espalier.deploy.locate import hub_model
from espalier.replicas.errors import InvalidRequestError

BUILDERS = "espalier.cluster.serve_config"
HOST = "0.0.0.0"
# Of the resource with its application's name each process takes a trace: it says where, not how many.
TRACE = 0.001
KEYS_ENTRY = "keys"
KEYS_FOLDER = PurePosixPath("/etc/espalier/api-keys")
HUB_FOLDER = PurePosixPath("/models")
HEADER = "# Written by `espalier render`; change the configuration file instead.\n"
_KUBERNETES_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
# Beside those of scope `cluster`: what engines read as well.
EVERYWHERE = ("drain_timeout",)
# Of a model's own options: what the gateway reads as well.
GATEWAY_READS = ("progress_timeout",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the file cannot say. claims: mount path -> PersistentVolumeClaim with models below it. secret: the Secret that holds the keys."""

    claims: Mapping[PurePosixPath, str] = field(default_factory=dict)
    secret: str = "espalier-api-keys"


@dataclass(frozen=True, slots=True)
class Rendered:
    """values: for the chart. serve_config: for `serve deploy`. notes: what must be there before it starts, one line each."""

    values: dict[str, Any]
    serve_config: dict[str, Any]
    notes: tuple[str, ...]


def target_of(claims: Iterable[str], secret: str | None) -> Target:
    """Flags as typed. Raises InvalidRequestError naming the flag."""
    mounts = {}
    for text in claims:
        claim, _, folder = text.partition("=")
        if not _KUBERNETES_NAME.fullmatch(claim) or not PurePosixPath(folder).is_absolute():
            raise refusal("--claim", f"must be NAME=/FOLDER, not {text!r}", "claim")
        mounts[PurePosixPath(folder)] = claim
    if secret is None:
        return Target(claims=mounts)
    if not _KUBERNETES_NAME.fullmatch(secret):
        raise refusal("--keys-secret", f"must be the name of a Secret, not {secret!r}", "keys_secret")
    return Target(claims=mounts, secret=secret)


def render(settings: Settings, target: Target) -> Rendered:
    """Both forms of one cluster. Raises InvalidRequestError naming the key at fault."""
    for index, layer in enumerate(settings.models):
        _refuse_local(layer)
        if "model" not in layer:
            message = "name one: the default model is made on the machine that serves it"
            raise refusal(f"models[{index}].model", message, "model")
    _refuse_local(settings.common)
    config = compose(settings, _locate)
    values = _values(config, settings, target)
    return Rendered(values, serve_config(values), tuple(_notes(config, values)))


def serve_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The Serve config that the chart makes of these values."""
    common = values.get("options", {})
    engines = [
        _application(engine_app_name(model["name"]), "engine_from_options", _named(model) | model["options"] | common)
        for model in values["models"]
    ]
    gateway = {"host": HOST} | values.get("gateway", {}).get("options", {}) | common
    if "auth" in values:
        gateway["api_key_file"] = str(KEYS_FOLDER / values["auth"]["key"])
    gateway["models"] = [
        _named(model) | {name: model["options"][name] for name in GATEWAY_READS if name in model["options"]}
        for model in values["models"]
    ]
    applications = [*engines, _application(GATEWAY_APP, "gateway_from_options", gateway)]
    return {"proxy_location": "Disabled", "applications": applications}


def write(rendered: Rendered, folder: Path) -> list[Path]:
    """The two files, in a folder that is made if need be. Raises InvalidRequestError when a file of the same name is somebody else's."""
    files = {folder / "values.yaml": rendered.values, folder / "serve-config.yaml": rendered.serve_config}
    for path in files:
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
            raise refusal("--out", f"{path} is there and was not written by `espalier render`", "out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.write_text(HEADER + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise refusal("--out", f"{error.filename}: {error.strerror}", "out") from error
    return list(files)


def _values(config: ClusterConfig, settings: Settings, target: Target) -> dict[str, Any]:
    models = [_model_values(model, layer, target) for model, layer in zip(config.models, settings.models, strict=True)]
    values: dict[str, Any] = {"models": models}
    said = _options(settings.common, "gateway", "router", "cluster")
    everywhere = {*EVERYWHERE, *(option.name for option in OPTIONS if option.scope == "cluster")}
    common = {name: value for name, value in said.items() if name in everywhere}
    gateway = {name: value for name, value in said.items() if name not in everywhere | {"host", "api_key_file"}}
    values |= {"options": common} if common else {}
    values |= {"gateway": {"options": gateway}} if gateway else {}
    values |= {"auth": {"existingSecret": target.secret, "key": KEYS_ENTRY}} if config.gateway.api_key_file else {}
    return values


def _model_values(model: ServedModel, layer: Layer, target: Target) -> dict[str, Any]:
    options = _options(layer, "model", "engine")
    folder = PurePosixPath(model.engine.model_path)
    source: dict[str, Any] = {"hostPath": str(folder)}
    if hub := hub_model(layer["model"].value):
        source = {"hub": {"repo": hub.repo, "revision": hub.revision}}
    elif mounts := [mount for mount in target.claims if folder.is_relative_to(mount)]:
        source = {"pvc": {"claim": target.claims[mounts[0]], "mountPath": str(mounts[0])}}
    return {
        "name": model.name,
        "model": str(folder),
        "source": source,
        "options": {name: value for name, value in options.items() if name not in ("name", "model")},
    }


def _named(model: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": model["name"], "model": model["model"]}


def _application(name: str, builder: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "route_prefix": None,
        "import_path": f"{BUILDERS}:{builder}",
        "args": {**args, "resources": {name: TRACE}},
    }


def _options(layer: Layer, *scopes: Scope) -> dict[str, Any]:
    """What was said of the options of these scopes, as YAML holds it."""
    said = {
        option.name: layer[option.name].value for option in OPTIONS if option.scope in scopes and option.name in layer
    }
    return {name: str(value) if isinstance(value, Path) else value for name, value in said.items()}


def _locate(model: str | None, _cache_dir: Path) -> LocatedModel:
    """Where pods find it; looks at no file."""
    assert model is not None
    path = PurePosixPath(model)
    if path.is_absolute():
        return LocatedModel(Path(path), path.name)
    hub = hub_model(model)
    if hub is None or hub.revision is None:
        message = (
            "must be an absolute folder, as pods see it, or a model of the hub with its revision, org/name@revision"
        )
        raise InvalidRequestError(f"model: {message}, not {model!r}", param="model")
    return LocatedModel(Path(HUB_FOLDER / hub.repo / hub.revision), hub.name)


def _refuse_local(layer: Layer) -> None:
    """Options that only mean something on one machine. The file of keys is read from a Secret instead."""
    for name, setting in layer.items():
        if name != "api_key_file" and BY_NAME[name].kind is PATH:
            raise refusal(
                setting.source, "is a folder of one machine; pods have a volume in its place, leave it out", name
            )
        if name == "host" and setting.value != HOST:
            raise refusal(setting.source, f"is an address of one machine; pods listen on {HOST}, leave it out", name)
        if name in ("http_port", "grpc_port") and setting.value == 0:
            raise refusal(setting.source, "a Service needs a port that is known; give one, or leave it out", name)


def _notes(config: ClusterConfig, values: Mapping[str, Any]) -> Iterator[str]:
    for model in values["models"]:
        match model["source"]:
            case {"hostPath": folder}:
                yield f"{model['name']}: nodes that serve it and the gateway's must have the folder {folder}"
            case {"hub": {"repo": repo, "revision": revision}}:
                command = f"hf download {repo} --revision {revision} --local-dir {model['model']}"
                yield f"{model['name']}: the chart downloads it; nodes of another Ray cluster need: {command}"
            case {"pvc": {"claim": claim}}:
                yield f"{model['name']}: the claim {claim} must hold the folder {model['model']}"
    resources = {engine_app_name(model["name"]): 1 for model in values["models"]} | {GATEWAY_APP: 1}
    yield f"the chart's nodes declare their resources; for another Ray cluster: ray start --resources='{json.dumps(resources)}'"
    if "auth" in values:
        secret, key = values["auth"]["existingSecret"], values["auth"]["key"]
        source = config.gateway.api_key_file
        yield f"keys: kubectl create secret generic {secret} --from-file={key}={source}"
    else:
        yield "no api_key_file: anyone who reaches the gateway can use it"
