"""What the chart refuses: values that it does not know, with their path, and combinations that would not work, with the values to change."""

import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import espalier
from espalier.cluster.options import OPTIONS
from tests.support.kube.chart import CHART, overlaid, rendered, values_of
from tests.support.kube.helm import RenderRefusedError

SMALL = values_of("minimal")["models"][0]
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
# Options that the chart sets itself, from the values beside them.
SET_BY_CHART = {"name", "model", "cache_dir", "host", "api_key_file"}
COMMON = {"drain_timeout"}
JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def model(**keys: Any) -> dict[str, Any]:
    """Values with one model, some of its keys changed."""
    return {"models": [SMALL | keys]}


def refusal(values: dict[str, Any], name: str = "rel") -> str:
    with pytest.raises(RenderRefusedError) as refused:
        rendered("minimal", values, name=name)
    return str(refused.value)


@pytest.mark.deploy
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"imag": {}}, "at '': additional properties 'imag' not allowed"),
        ({"image": {"tagg": "1"}}, "at '/image': additional properties 'tagg' not allowed"),
        ({"image": {"pullPolicy": "Sometimes"}}, "at '/image/pullPolicy': value must be one of"),
        ({"image": {"digest": "latest"}}, "at '/image/digest': 'latest' does not match pattern"),
        ({"image": {"tag": 1.0}}, "at '/image/tag': got number, want string"),
        ({"models": {"name": "a"}}, "at '/models': got object, want array"),
        (model(sorce={}), "at '/models/0': additional properties 'sorce' not allowed"),
        ({"models": [{"name": "a"}]}, "at '/models/0': missing property 'source'"),
        (model(options={"max_lane": 1}), "at '/models/0/options': additional properties 'max_lane' not allowed"),
        (model(options={"replicas": "2"}), "at '/models/0/options/replicas': got string, want integer"),
        (model(options={"device": "tpu"}), "at '/models/0/options/device': value must be one of"),
        (model(source={"hub": {"repo": "a/b"}}), "at '/models/0/source/hub': missing property 'revision'"),
        (model(source={"hub": {"repo": "b", "revision": "c"}}), "at '/models/0/source/hub/repo': 'b' does not match"),
        (model(source={"hostPath": "models"}), "at '/models/0/source/hostPath': 'models' does not match"),
        (model(source={}), "at '/models/0/source'"),
        (model(source={"hostPath": "/a", "pvc": {"claim": "a", "mountPath": "/b"}}), "at '/models/0/source'"),
        (model(shm={"size": "1Gib"}), "at '/models/0/shm/size': '1Gib' does not match pattern"),
        (model(gpu={"count": 1}), "at '/models/0/gpu': additional properties 'count' not allowed"),
        ({"options": {"log_jsn": True}}, "at '/options': additional properties 'log_jsn' not allowed"),
        ({"options": {"log_level": "loud"}}, "at '/options/log_level': value must be one of"),
        ({"gateway": {"options": {"deadlines": 1}}}, "at '/gateway/options': additional properties 'deadlines'"),
        ({"gateway": {"replicas": 0}}, "at '/gateway/replicas': minimum: got 0, want 1"),
        ({"workers": {"shm": {"sizes": "1Gi"}}}, "at '/workers/shm': additional properties 'sizes' not allowed"),
        ({"workers": {"nodeSelector": {"a": 1}}}, "at '/workers/nodeSelector/a': got number, want string"),
        ({"head": {"toleration": []}}, "at '/head': additional properties 'toleration' not allowed"),
        ({"fullnameOverride": "7b-model"}, "at '/fullnameOverride': '7b-model' does not match pattern"),
        ({"auth": {"keys": "secret"}}, "at '/auth': additional properties 'keys' not allowed"),
        ({"hub": {"token": {"value": "secret"}}}, "at '/hub/token': additional properties 'value' not allowed"),
        (
            {"gcsFaultTolerance": {"redisPassword": "x"}},
            "at '/gcsFaultTolerance': additional properties 'redisPassword'",
        ),
        ({"service": {"type": "Cluster"}}, "at '/service/type': value must be one of"),
        ({"service": {"http": {"port": 70000}}}, "at '/service/http/port': maximum: got 70,000, want 65,535"),
        ({"ingress": {"hosts": [1]}}, "at '/ingress/hosts/0': got number, want string"),
        ({"upgradeStrategy": {"type": "Rolling"}}, "at '/upgradeStrategy/type': value must be one of"),
        ({"autoscaling": {"enable": True}}, "at '/autoscaling': additional properties 'enable' not allowed"),
        (
            {"monitoring": {"podMonitor": {"enable": True}}},
            "at '/monitoring/podMonitor': additional properties 'enable'",
        ),
        (
            {"monitoring": {"podMonitor": {"interval": "15"}}},
            "at '/monitoring/podMonitor/interval': '15' does not match",
        ),
        ({"extraEnv": {"A": "b"}}, "at '/extraEnv': got object, want array"),
    ],
)
def test_a_typo_is_refused_with_its_path(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


@pytest.mark.deploy
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": []}, "models: name at least one model"),
        (
            {"models": [SMALL, {"name": "SMALL", "source": {"hostPath": "/b"}}]},
            'models[1].name: "small" and "SMALL" differ',
        ),
        (model(name="..."), 'models[0].name: "..." makes the Kubernetes name ""'),
        (model(name="m" * 41), "models[0].name: "),
        (model(options={"replicas": 33}), "models[0].options.replicas: is more than maxReplicas"),
        (model(model="/srv/models/other"), "models[0].model: /srv/models/other does not lie in /srv/models/small"),
        (
            {"models": [SMALL, {"name": "b", "source": {"pvc": {"claim": "c", "mountPath": "/srv/models/small"}}}]},
            "models[1].source: another model has its files at /srv/models/small, so that /srv/models/small cannot be",
        ),
        (
            {"upgradeStrategy": {"type": "NewClusterWithIncrementalUpgrade"}},
            "upgradeStrategy.type: NewClusterWithIncrementalUpgrade shifts only HTTP traffic",
        ),
        ({"gateway": {"options": {"http_port": 8265}}}, "gateway.options: port 8265 is Ray's or used twice"),
        ({"gateway": {"options": {"http_port": 50051}}}, "gateway.options: port 50051 is Ray's or used twice"),
        ({"gateway": {"options": {"grpc_port": 12000}}}, "gateway.options: port 12000 is Ray's or used twice"),
        (
            {"terminationGracePeriodSeconds": 10},
            "terminationGracePeriodSeconds: must not be shorter than options.drain_timeout",
        ),
        ({"gcsFaultTolerance": {"enabled": True}}, "gcsFaultTolerance.redisAddress: name your Redis"),
        (
            {
                "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"},
                "extraEnv": [{"name": "REDIS_PASSWORD", "value": "x"}],
            },
            "extraEnv: REDIS_PASSWORD is set by gcsFaultTolerance",
        ),
        (
            {"extraEnv": [{"name": "RAY_enable_autoscaler_v2", "value": "1"}]},
            "extraEnv: RAY_enable_autoscaler_v2 is set by",
        ),
        (
            {"auth": {"existingSecret": "keys"}, "monitoring": {"serviceMonitor": {"enabled": True}}},
            "monitoring.serviceMonitor.authorization.existingSecret: /metrics asks for a key",
        ),
        (
            {"hub": {"storage": {"create": True, "existingClaim": "a"}}},
            "hub.storage: create and existingClaim are both set",
        ),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs: name the Gateway"),
        ({"grpcRoute": {"enabled": True}}, "grpcRoute.parentRefs: name the Gateway"),
    ],
)
def test_a_combination_that_would_not_work_is_refused(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


@pytest.mark.deploy
def test_a_release_name_that_starts_with_a_digit_needs_another_full_name() -> None:
    assert 'the name "7b-espalier" of the RayService' in refusal({}, name="7b")
    assert rendered("minimal", {"fullnameOverride": "seven"}, name="7b").of_kind("RayService")


@pytest.mark.deploy
@pytest.mark.parametrize(
    "values",
    [
        {"global": {"storageClass": "of another chart"}},
        {
            "auth": {"existingSecret": "keys"},
            "gateway": {"options": {"metrics_open": True}},
            "monitoring": {"serviceMonitor": {"enabled": True}},
        },
        {"workers": {"affinity": {"nodeAffinity": {}}, "tolerations": [{"operator": "Exists"}]}},
        {"terminationGracePeriodSeconds": 30},
    ],
    ids=[
        "globals of a parent chart",
        "open metrics",
        "pasted Kubernetes",
        "grace equal to the drain",
    ],
)
def test_what_looks_like_it_and_is_fine(values: dict[str, Any]) -> None:
    assert rendered("minimal", values).of_kind("RayService")


def closed_maps(schema: dict[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, set[str], set[str]]]:
    """(path, keys of the schema, keys of values.yaml) wherever the schema refuses what it does not know."""
    if schema.get("additionalProperties") is False and isinstance(values, dict):
        yield path, set(schema["properties"]), set(values)
        for key, inner in schema["properties"].items():
            yield from closed_maps(inner, values.get(key), f"{path}/{key}")


def test_the_schema_knows_the_values_and_no_others() -> None:
    different = {
        path: known ^ written
        for path, known, written in closed_maps(SCHEMA, VALUES)
        if known != written and not path.endswith("/options")
    }
    assert different == {}
    assert len(list(closed_maps(SCHEMA, VALUES))) > 20


def test_only_globals_and_pasted_kubernetes_are_open() -> None:
    properties = SCHEMA["properties"]
    assert [
        name
        for name, inner in properties.items()
        if inner.get("type") == "object" and "additionalProperties" not in inner
    ] == [*("global", "podSecurityContext", "containerSecurityContext")]


def options_of(schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schema["properties"]
    return found


def test_the_options_are_those_of_the_server() -> None:
    entry = SCHEMA["properties"]["models"]["items"]["properties"]
    written = {
        "model": options_of(entry["options"]),
        "gateway": options_of(SCHEMA["properties"]["gateway"]["properties"]["options"]),
        "all": options_of(SCHEMA["properties"]["options"]),
    }
    places = {"model": "model", "engine": "model", "gateway": "gateway", "router": "gateway", "cluster": "all"}
    expected: dict[str, set[str]] = {"model": set(), "gateway": set(), "all": set()}
    for option in OPTIONS:
        if option.name not in SET_BY_CHART:
            expected["all" if option.name in COMMON else places[option.scope]].add(option.name)
    assert {place: set(options) for place, options in written.items()} == expected


def test_the_options_have_the_types_of_the_server() -> None:
    entry = SCHEMA["properties"]["models"]["items"]["properties"]
    written = {
        **options_of(entry["options"]),
        **options_of(SCHEMA["properties"]["gateway"]["properties"]["options"]),
        **options_of(SCHEMA["properties"]["options"]),
    }
    wrong = {}
    for option in OPTIONS:
        found = written.get(option.name)
        if found is not None and "enum" not in found:
            wanted = {JSON_TYPES[kind] for kind in option.kind.types}
            # `number` takes whole numbers too; GPUs of a pod are whole ones.
            if found["type"] not in wanted:
                wrong[option.name] = (found["type"], wanted)
    assert wrong == {}


def test_versions_are_those_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == espalier.__version__
    assert VALUES["rayVersion"] == importlib.metadata.version("ray")


def test_a_model_may_repeat_every_key_of_workers() -> None:
    entry = SCHEMA["properties"]["models"]["items"]["properties"]
    assert SCHEMA["properties"]["workers"]["properties"].keys() <= entry.keys()


@pytest.mark.deploy
def test_a_models_own_settings_go_over_those_of_workers() -> None:
    base = {"workers": {"nodeSelector": {"a": "1", "b": "1"}, "tolerations": [{"key": "x"}], "shm": {"size": "2Gi"}}}
    over = {"nodeSelector": {"b": "2"}, "tolerations": [{"key": "y"}], "resources": {"limits": {"memory": "9Gi"}}}
    (service,) = rendered("minimal", overlaid(base, model(**over))).of_kind("RayService")
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]["template"]["spec"]
    assert group["nodeSelector"] == {"a": "1", "b": "2"}
    assert group["tolerations"] == [{"key": "y"}]
    assert group["containers"][0]["resources"] == {
        "limits": {"memory": "9Gi"},
        "requests": {"cpu": "1", "memory": "4Gi"},
    }
