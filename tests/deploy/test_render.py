"""`espalier render`: what a configuration file becomes, that both forms start the cluster that the file starts, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from espalier.cluster.config import ClusterConfig
from espalier.cluster.options import BY_NAME, OPTIONS, PATH
from espalier.cluster.serve_config import read_args
from espalier.cluster.settings import LocatedModel, compose
from espalier.deploy.cli import main
from espalier.deploy.config import resolve
from espalier.deploy.render import KEYS_FOLDER, Rendered, Target, render, serve_config, target_of, write
from espalier.replicas.errors import InvalidRequestError

TWO_MODELS = """
kv_dtype: fp16
http_port: 8100
max_outstanding: 64
session_ttl: 60
drain_timeout: 5
log_json: true
api_key_file: /etc/espalier/keys
models:
- {model: /models/first, name: First Model, replicas: 1, cpus: 4, gpus: 1, prefix_cache: false}
- {model: org/second@v1.2, context: 4096, kv_dtype: bf16, kv_tokens: 1048576, progress_timeout: 20}
"""


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str, **target: Any) -> Rendered:
        (tmp_path / "serve.yaml").write_text(text)
        return render(resolve({}, {}, config_file=str(tmp_path / "serve.yaml")), Target(**target))

    return read


def config_of(file: Path) -> ClusterConfig:
    """What `espalier serve --config` would start, with folders and address as pods have them."""

    def locate(model: str | None, _cache_dir: Path) -> LocatedModel:
        assert model is not None
        if model.startswith("org/"):
            return LocatedModel(Path("/models/org/second/v1.2"), "second")
        return LocatedModel(Path(model), Path(model).name)

    config = compose(resolve({}, {}, config_file=str(file)), locate)
    keys = KEYS_FOLDER / "keys" if config.gateway.api_key_file else None
    gateway = replace(config.gateway, host="0.0.0.0", api_key_file=keys and Path(keys))
    return replace(config, gateway=gateway)


def args_of(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {application["name"]: application["args"] for application in content["applications"]}


def test_the_two_forms(read) -> None:
    rendered = read(TWO_MODELS)
    second = {"name": "second", "model": "/models/org/second/v1.2"}
    assert rendered.values == {
        "models": [
            {
                "name": "First Model",
                "model": "/models/first",
                "source": {"hostPath": "/models/first"},
                "options": {"replicas": 1, "cpus": 4, "gpus": 1, "kv_dtype": "fp16", "prefix_cache": False},
            },
            second
            | {
                "source": {"hub": {"repo": "org/second", "revision": "v1.2"}},
                "options": {"context": 4096, "kv_dtype": "bf16", "kv_tokens": 1048576, "progress_timeout": 20},
            },
        ],
        "options": {"drain_timeout": 5, "log_json": True},
        "gateway": {"options": {"http_port": 8100, "max_outstanding": 64, "session_ttl": 60}},
        "auth": {"existingSecret": "espalier-api-keys", "key": "keys"},
    }
    applications = rendered.serve_config["applications"]
    assert [application["name"] for application in applications] == [
        "espalier-engine-first-model",
        "espalier-engine-second",
        "espalier-gateway",
    ]
    assert all(application["route_prefix"] is None for application in applications)
    assert applications[1] == {
        "name": "espalier-engine-second",
        "route_prefix": None,
        "import_path": "espalier.cluster.serve_config:engine_from_options",
        "args": second
        | rendered.values["models"][1]["options"]
        | {"drain_timeout": 5, "log_json": True, "resources": {"espalier-engine-second": 0.001}},
    }
    assert applications[2]["args"] == {
        "host": "0.0.0.0",
        "http_port": 8100,
        "max_outstanding": 64,
        "session_ttl": 60,
        "drain_timeout": 5,
        "log_json": True,
        "api_key_file": "/etc/espalier/api-keys/keys",
        "models": [{"name": "First Model", "model": "/models/first"}, second | {"progress_timeout": 20}],
        "resources": {"espalier-gateway": 0.001},
    }


def test_what_is_rendered_starts_the_cluster_of_the_file(read, tmp_path: Path) -> None:
    args = args_of(read(TWO_MODELS).serve_config)
    whole = config_of(tmp_path / "serve.yaml")
    gateway, _ = read_args(args.pop("espalier-gateway"))
    assert (gateway.gateway, gateway.router) == (whole.gateway, whole.router)
    assert (gateway.log_level, gateway.log_json) == (whole.log_level, whole.log_json)
    for (name, engine_args), model, seen in zip(args.items(), whole.models, gateway.models, strict=True):
        engine, resources = read_args(engine_args)
        assert engine.models == (model,)
        assert (engine.log_level, engine.log_json) == (whole.log_level, whole.log_json)
        assert engine.gateway.drain_timeout_s == whole.gateway.drain_timeout_s
        assert resources == {name: 0.001}
        assert (seen.name, seen.engine.model_path) == (model.name, model.engine.model_path)
        assert seen.engine.progress_timeout_s == model.engine.progress_timeout_s


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.kind is not PATH], ids=lambda o: o.name)
def test_every_option_arrives_where_it_is_read(option, read, tmp_path: Path) -> None:
    """An option that a later version adds is rendered too, or this test tells."""
    values = {
        "model": "/models/m",
        "host": "0.0.0.0",
        "device": "cpu",
        "kv_dtype": "bf16",
        "log_level": "debug",
        "audit_share": 0.5,
        "tracks": 2,
        "memory_share": 0.5,
        "gpus": 2,
    }
    values |= {"trace_endpoint": "http://collector:4317", "trace_ratio": 0.5}
    samples: dict[type, Any] = {bool: not option.default, int: 64, float: 2.5, str: "word"}
    value = values.get(option.name, samples[option.kind.types[-1]])
    content = {"model": "/models/m"} | {option.name: value}
    if option.name == "batch_tokens":
        content["max_lanes"] = 1
    if option.name in ("nvtx", "memory_share", "cuda_graphs"):
        content["device"] = "cuda"
    args = args_of(read(yaml.safe_dump(content)).serve_config)
    whole = config_of(tmp_path / "serve.yaml")
    gateway, _ = read_args(args.pop("espalier-gateway"))
    [engine_args] = args.values()
    engine, _ = read_args(engine_args)
    owner = {"model": engine.models[0], "engine": engine.models[0].engine, "gateway": gateway.gateway}
    owner |= {"router": gateway.router, "cluster": gateway}
    expected = {"model": whole.models[0], "engine": whole.models[0].engine, "gateway": whole.gateway}
    expected |= {"router": whole.router, "cluster": whole}
    assert owner[option.scope] == expected[option.scope] or option.scope == "cluster"
    assert getattr(owner[option.scope], option.field) == getattr(expected[option.scope], option.field)
    if option.scope == "cluster":
        assert getattr(engine, option.field) == getattr(whole, option.field)


def test_nothing_is_said_of_what_the_file_leaves_open(read) -> None:
    rendered = read("model: /models/m")
    assert rendered.values == {
        "models": [{"name": "m", "model": "/models/m", "source": {"hostPath": "/models/m"}, "options": {}}]
    }
    assert rendered.serve_config["proxy_location"] == "Disabled"
    assert args_of(rendered.serve_config)["espalier-gateway"]["host"] == "0.0.0.0"
    assert rendered.serve_config == serve_config(rendered.values)


def test_models_below_a_mounted_claim_come_from_it(read) -> None:
    target = target_of(["models-a=/models", "models-b=/data/b"], "our-keys")
    text = (
        "api_key_file: /k\nmodels: [{model: /models/x/y}, {model: /data/b/z}, {model: /modelsx/w}, {model: /models/x}]"
    )
    values = read(text, claims=target.claims, secret=target.secret).values
    assert [model["source"] for model in values["models"]] == [
        {"pvc": {"claim": "models-a", "mountPath": "/models"}},
        {"pvc": {"claim": "models-b", "mountPath": "/data/b"}},
        {"hostPath": "/modelsx/w"},
        {"pvc": {"claim": "models-a", "mountPath": "/models"}},
    ]
    assert values["auth"]["existingSecret"] == "our-keys"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "models[0].model: name one: the default model is made on the machine"),
        ("models: [{model: /m}, {name: x}]", "models[1].model: name one"),
        ("model: models/m", "serve.yaml: model: must be an absolute folder"),
        ("model: ~/m", "serve.yaml: model: must be an absolute folder"),
        ("models: [{model: ./m}]", "serve.yaml: models[0].model: must be an absolute folder"),
        (
            "model: org/name",
            "serve.yaml: model: must be an absolute folder, as pods see it, or a model of the hub with",
        ),
        ("model: /m\ncache_dir: /var/cache", "serve.yaml: cache_dir: is a folder of one machine"),
        ("models: [{model: /m, cache_dir: ~/c}]", "serve.yaml: models[0].cache_dir: is a folder of one machine"),
        ("model: /m\nhost: 127.0.0.1", "serve.yaml: host: is an address of one machine"),
        ("model: /m\nhttp_port: 0", "serve.yaml: http_port: a Service needs a port"),
        ("model: /m\ngrpc_port: 0", "serve.yaml: grpc_port: a Service needs a port"),
        ("model: /m\nmax_lanes: 0", "serve.yaml: max_lanes: must be at least 1"),
        ("model: /m\ndevice: cuda\ngpus: 0", "serve.yaml: gpus: must be more than 0 where replicas run on GPUs"),
        ("models: [{model: /a/m}, {model: /b/m}]", "models: each model needs a name of its own"),
        ("models: [{model: /m, name: a.b}, {model: /m, name: a b}]", "models: names must differ in more than"),
        ("model: /m\napi_key: sk-1", "serve.yaml: api_key: unknown key (did you mean api_key_file?)"),
    ],
)
def test_what_means_something_on_one_machine_only_is_refused_by_key(read, text: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(text)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("claims", "secret", "message"),
    [
        (["models"], None, "--claim: must be NAME=/FOLDER, not 'models'"),
        (["models=here"], None, "--claim: must be NAME=/FOLDER"),
        (["Models=/m"], None, "--claim: must be NAME=/FOLDER"),
        ([], "key: sk-1", "--keys-secret: must be the name of a Secret"),
    ],
)
def test_flags_are_refused_by_name(claims: list[str], secret: str | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message.replace("[", r"\[")):
        target_of(claims, secret)


def test_the_command_writes_the_same_files_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a variable of the shell nor the keys get into a file, and a file of somebody else is not replaced."""
    keys = tmp_path / "keys"
    keys.write_text("ann: sk-secret-1\n")
    config = tmp_path / "serve.yaml"
    config.write_text(TWO_MODELS.replace("/etc/espalier/keys", str(keys)))
    out = tmp_path / "out" / "deep"
    argv = ["render", str(config), "--out", str(out), "--keys-secret", "our-keys"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [str(out / "values.yaml"), str(out / "serve-config.yaml")]
    assert f"kubectl create secret generic our-keys --from-file=keys={keys}" in printed.err
    first = [(out / name).read_bytes() for name in ("values.yaml", "serve-config.yaml")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPALIER_MAX_LANES", "3")
        assert main(argv) == 0
    assert [(out / name).read_bytes() for name in ("values.yaml", "serve-config.yaml")] == first
    assert b"sk-secret" not in b"".join(first)
    assert str(keys).encode() not in b"".join(first)

    (out / "values.yaml").write_text("mine: true\n")
    capsys.readouterr()
    assert main(argv) == 2
    assert f"--out: {out / 'values.yaml'} is there" in capsys.readouterr().err
    assert (out / "values.yaml").read_text() == "mine: true\n"


def test_files_are_yaml_that_reads_back(read, tmp_path: Path) -> None:
    rendered = read(TWO_MODELS)
    values, serve = write(rendered, tmp_path / "out")
    assert yaml.safe_load(values.read_text()) == rendered.values
    assert yaml.safe_load(serve.read_text()) == rendered.serve_config


def test_a_folder_that_cannot_be_written_is_named(read, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match=r"--out: .*file"):
        write(read("model: /m"), tmp_path / "file")


def test_without_keys_and_from_the_hub_there_is_something_to_know(read) -> None:
    notes = "\n".join(read("model: org/name@main").notes)
    assert "no api_key_file: anyone who reaches the gateway can use it" in notes
    assert "/models/org/name/main" in notes
    assert BY_NAME["api_key_file"].kind is PATH
