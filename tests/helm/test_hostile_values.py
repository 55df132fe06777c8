"""Values that nobody should give: nulls, strings that YAML would read as something else, names that collide, and combinations that no cluster takes.

Each is refused when it is rendered, with the value's path, or does what it says.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.kube.chart import CHART, Values, overlaid, ray_service, rendered, values_of
from tests.support.kube.helm import Rendered, RenderRefusedError
from tests.support.kube.objects import check_object
from tests.support.kube.release import check_release, label
from tests.support.tools import require_module

pytestmark = pytest.mark.deploy
DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SMALL = values_of("minimal")["models"][0]
HUB = {"hub": {"repo": "org/name", "revision": "main"}}
# What may be nulled: a default that is null, and maps that are Kubernetes' own inside.
MAY_BE_NULL = ("terminationGracePeriodSeconds",)
KUBERNETES = ("resources", "podSecurityContext", "containerSecurityContext", "podSelector", "labels", "annotations")
# As YAML they are a boolean, numbers, a map, a comment, a map again, a template, two lines.
TEXTS = ("true", "123", "1e3", "a: b", "x #y", "{a", "{{ .Release.Name }}", "a\nb: c", "null")


@pytest.fixture(autouse=True)
def tools() -> None:
    for module in ("helm_python", "kubernetes_validate", "celpy"):
        require_module(module)


def named(name: str, **source: Any) -> Values:
    return {"name": name, "source": source}


def on_claim(name: str, claim: str, folder: str, **more: Any) -> Values:
    return named(name, pvc={"claim": claim, "mountPath": folder}, **more)


def changed(**keys: Any) -> Values:
    """The small model with some keys changed."""
    return {"models": [SMALL | keys]}


def leaves(values: Values, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every path of the values, maps included, down to where they are Kubernetes' own."""
    for key, value in values.items():
        yield (*path, key), value
        if isinstance(value, dict) and key not in KUBERNETES:
            yield from leaves(value, (*path, key))


def at(path: tuple[str, ...], value: Any) -> Values:
    for key in reversed(path):
        value = {key: value}
    found: Values = value
    return found


def faults(found: Rendered) -> list[str]:
    invalid = [f"{label(each)}: {fault}" for each in found.manifests for fault in check_object(each, "1.31")]
    return invalid + [str(fault) for fault in check_release(found.manifests)]


def refusal(values: Values, **options: Any) -> str:
    with pytest.raises(RenderRefusedError) as refused:
        rendered("minimal", values, **options)
    return str(refused.value)


def test_a_null_is_refused_with_its_path() -> None:
    """Helm takes a null for `no default`, and templates would find a hole."""
    nulled = [path for path, _ in leaves(DEFAULTS) if path[-1] not in MAY_BE_NULL]
    assert len(nulled) > 150
    wrong = {}
    for path in nulled:
        message = refusal(at(path, None))
        if f"at '{''.join(f'/{key}' for key in path[:-1])}': missing property '{path[-1]}'" not in message:
            wrong[path] = message
    assert wrong == {}


STRINGS = [path for path, value in leaves(DEFAULTS) if isinstance(value, str)]
# Values under which every string is rendered.
ALL_ON = {
    "models": [named("hub", **HUB), on_claim("claim", "models", "/claims")],
    "autoscaling": {"enabled": True},
    "gateway": {"options": {"metrics_open": True}},
    "auth": {"existingSecret": "clients"},
    "hub": {"token": {"existingSecret": "hub"}, "storage": {"create": True}},
    "gcsFaultTolerance": {
        "enabled": True,
        "redisAddress": "redis:6379",
        "existingSecret": "redis",
        "usernameKey": "user",
    },
    "ingress": {"enabled": True},
    "grpcIngress": {"enabled": True},
    "monitoring": {name: {"enabled": True} for name in DEFAULTS["monitoring"]},
}


@pytest.mark.parametrize("path", STRINGS, ids=".".join)
def test_a_string_stays_a_string_or_is_refused_with_its_path(path: tuple[str, ...]) -> None:
    base = overlaid(ALL_ON, {"hub": {"storage": {"create": path != ("hub", "storage", "existingClaim")}}})
    for text in TEXTS:
        try:
            found = rendered("minimal", overlaid(base, at(path, text)))
        except RenderRefusedError as refused:
            # The schema says the whole path, a template that of the model's group.
            assert f"at '/{'/'.join(path)}'" in str(refused) or ".".join(path[-2:]) in str(refused), text
        else:
            assert faults(found) == [], text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": [SMALL, SMALL]}, 'models[1].name: "small" is the name of another model too'),
        (changed(name="x" * 64), "models[0].name: "),
        (changed(name="two\nlines"), "at '/models/0/name': "),
        (changed(name=" padded"), "at '/models/0/name': "),
        (changed(options={"replicas": 0}), "at '/models/0/options/replicas': minimum: got 0, want 1"),
        (changed(options={"gpus": 0.5}), "at '/models/0/options/gpus': got number, want integer"),
        (changed(options={"max_lanes": 0}), "at '/models/0/options/max_lanes': minimum: got 0, want 1"),
        (changed(options={"block_size": 24}), "at '/models/0/options/block_size': value must be one of 16, 32"),
        ({"gateway": {"options": {"audit_share": 2}}}, "at '/gateway/options/audit_share': maximum: got 2, want 1"),
        ({"options": {"trace_endpoint": "collector:4317"}}, "at '/options/trace_endpoint': "),
        (
            changed(resources={"limits": {"nvidia.com/gpu": "1"}}),
            "models[0]: resources.limits says nvidia.com/gpu itself; set options.gpus",
        ),
        (changed(resources={"limit": {}}), "at '/models/0/resources': additional properties 'limit' not allowed"),
        (changed(resources={"limits": {"memory": "1Gib"}}), "at '/models/0/resources/limits/memory': "),
        (changed(shm={"size": "8Gi"}), "models[0].shm.size: 8Gi is more than resources.limits.memory, 4Gi"),
        (
            changed(options={"host_kv_gb": 4.5}),
            "models[0].options.host_kv_gb: 4.5 GiB are more than resources.limits.memory, 4Gi",
        ),
        ({"head": {"shm": {"size": "5G"}}}, "head.shm.size: 5G is more than resources.limits.memory, 4Gi"),
        ({"gateway": {"shm": {"size": "64Mi"}}}, "gateway.shm.size: 64Mi is less than the 80Mi of Ray's object store"),
        (changed(source={"hostPath": "/"}), "at '/models/0/source/hostPath': "),
        (changed(source={"hostPath": "/a/../b"}), "models[0]: a folder must be named without . and .."),
        (changed(source=HUB | {"readOnly": False}), "models[0].source.readOnly: folders of hub models are always"),
        ({"models": [on_claim("a", "c", "/tmp")]}, "models[0].source: /tmp would hide /tmp of the pods"),
        ({"models": [on_claim("a", "c", "/home")]}, "models[0].source: /home would hide /home/espalier"),
        (
            {"models": [on_claim("a", "c", "/models"), named("b", **HUB)]},
            "models[1].source: another model has its files at /models, so that /models/b cannot be mounted",
        ),
        (
            {"models": [on_claim("a", "c", "/m"), on_claim("b", "c", "/m", readOnly=False)]},
            "models[1].source: another model has its files at /m",
        ),
        ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "commonLabels: the label app.kubernetes.io/name is"),
        ({"commonLabels": {"two words": "x"}}, 'commonLabels: "two words" is no name of a label'),
        ({"commonLabels": {"a": "two words"}}, "at '/commonLabels/a': "),
        ({"head": {"podLabels": {"ray.io/cluster": "x"}}}, "head.podLabels: the label ray.io/cluster is"),
        (changed(podLabels={"espalier.io/model": "x"}), "models[0].podLabels: the label espalier.io/model is"),
        ({"extraEnv": [{"value": "x"}]}, "at '/extraEnv/0': missing property 'name'"),
        ({"extraEnv": [{"name": "HOME", "value": "/x"}]}, "extraEnv[0].name: HOME is there already"),
        ({"extraEnv": [{"name": "A"}, {"name": "A"}]}, "extraEnv[1].name: A is there already"),
        ({"extraVolumes": [{"name": "model-small"}]}, "extraVolumes[0].name: model-small is there already"),
        ({"extraContainers": [{"name": "ray", "image": "a"}]}, "extraContainers[0].name: ray is there already"),
        ({"extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]}, "extraVolumeMounts[0].name: no volume is named x"),
        (
            {"extraVolumeMounts": [{"name": "tmp", "mountPath": "/dev/shm"}]},
            "extraVolumeMounts[0].mountPath: something is mounted at /dev/shm already",
        ),
        ({"extraObjects": ["text"]}, "at '/extraObjects/0': got string, want object"),
        ({"extraObjects": [{"kind": "X"}]}, "at '/extraObjects/0': missing property 'apiVersion'"),
        (
            {"extraObjects": [{"apiVersion": "v1", "kind": "{{ .Values.no.thing }}"}]},
            "templates/extra-objects.yaml",
        ),
        ({"ingress": {"hosts": ["https://llm.example.org"]}}, "at '/ingress/hosts/0': "),
        ({"service": {"loadBalancerSourceRanges": ["10.0.0.0"]}}, "at '/service/loadBalancerSourceRanges/0': "),
        ({"auth": {"existingSecret": "Keys"}}, "at '/auth/existingSecret': "),
        ({"auth": {"key": ".."}}, "at '/auth/key': "),
        ({"rayVersion": "2.40.0"}, "rayVersion: rayAuth needs Ray 2.52.0 or newer"),
        ({"gcsFaultTolerance": {"usernameKey": "user"}}, "gcsFaultTolerance.existingSecret: name the Secret"),
        ({"terminationGracePeriodSeconds": 0}, "terminationGracePeriodSeconds: must not be shorter than"),
    ],
)
def test_what_no_cluster_would_take_is_refused_with_its_path(values: Values, message: str) -> None:
    assert message in refusal(values)


@pytest.mark.parametrize("name", ["123", "1e3", "true", "my.release", "r" * 53])
def test_any_release_name_of_helm_will_do_with_another_full_name(name: str) -> None:
    found = rendered("everything", {"fullnameOverride": "mine"}, name=name)
    assert faults(found) == []
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in found.of_kind("Service")} == {name}


def test_a_release_name_with_dots_is_refused_by_what_to_change() -> None:
    assert 'the name "my.release-espalier" of the RayService' in refusal({}, name="my.release")


def test_names_that_are_cut_stay_different() -> None:
    alike = [named(f"llama-3.3-70b-instruct-{end}", hostPath=f"/srv/{end}") for end in "ab"]
    found = rendered("minimal", {"models": alike, "podDisruptionBudget": {"enabled": True}}, name="r" * 50)
    assert faults(found) == []
    assert len({each["metadata"]["name"] for each in found.of_kind("PodDisruptionBudget")}) == 2


def test_claims_that_are_alike_have_volumes_of_their_own() -> None:
    claims = ("a.b", "a-b", "c" * 100, "c" * 101)
    found = rendered("minimal", {"models": [on_claim(f"m{i}", name, f"/m/{i}") for i, name in enumerate(claims)]})
    assert faults(found) == []
    gateway = ray_service(found)["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    volumes = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in gateway["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert volumes == list(claims)


@pytest.mark.parametrize(
    "values",
    [
        changed(options={"gpus": 0}),
        changed(name='{{ .x }} "quoted" #1'),
        changed(source={"hostPath": "/tmp/models/small"}),
        {"podSecurityContext": {"runAsUser": None, "fsGroup": None}},
        {"head": {"resources": {"limits": None}}},
        {"commonLabels": {"release": "a"}, "monitoring": {"podMonitor": {"enabled": True, "labels": {"release": "b"}}}},
        {"options": {"drain_timeout": 0}, "terminationGracePeriodSeconds": 0},
    ],
    ids=["no GPU", "any name", "below /tmp", "a platform's own user", "no limits", "two labels", "no drain"],
)
def test_what_looks_odd_and_is_fine(values: Values) -> None:
    assert faults(rendered("minimal", values)) == []
