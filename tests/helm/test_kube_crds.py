"""CRD schemas as validators, against sound objects and planted faults. Rules in CEL need cel-python, so those tests are marked `deploy`."""

from typing import Any

import pytest
import yaml

from tests.support.kube.crds import FOLDER, CustomKind, load_custom_kinds
from tests.support.kube.samples import RAYSERVICE, REMOVED, changed, sound
from tests.support.kube.trim_crds import trim
from tests.support.tools import require_module

ROUTE = """
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: web}
spec:
  parentRefs: [{name: gate}]
  rules: [{matches: [{path: {type: PathPrefix, value: /v1}}], backendRefs: [{name: web, port: 80}]}]
"""
GATEWAY = """
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: gate}
spec:
  gatewayClassName: some
  listeners: [{name: http, port: 80, protocol: HTTP}, {name: other, port: 81, protocol: HTTP}]
"""
HEAD = "spec/rayClusterConfig/headGroupSpec"


def kind_of(manifest: dict[str, Any]) -> CustomKind:
    return load_custom_kinds()[manifest["apiVersion"], manifest["kind"]]


def test_the_kinds_that_the_chart_may_render_are_there() -> None:
    kinds = {kind for _, kind in load_custom_kinds()}
    assert kinds == {
        *("RayCluster", "RayService", "Gateway", "HTTPRoute", "GRPCRoute"),
        *("PodMonitor", "ServiceMonitor", "PrometheusRule"),
    }


def test_where_each_file_comes_from_is_written() -> None:
    table = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("*.json.gz"):
        assert f"`{path.name.split('_')[0]}_*`" in table
    assert len(list(FOLDER.glob("LICENSE.*"))) == 3


@pytest.mark.parametrize("text", [RAYSERVICE, ROUTE, GATEWAY])
def test_sound_objects_pass(text: str) -> None:
    assert kind_of(sound(text)).check(sound(text)) == []


@pytest.mark.parametrize(
    ("text", "path", "value", "fault"),
    [
        (
            RAYSERVICE,
            f"{HEAD}/rayStartParam",
            {},
            f"{HEAD}: Additional properties are not allowed ('rayStartParam' was",
        ),
        (
            RAYSERVICE,
            f"{HEAD}/rayStartParams/num-cpus",
            0,
            f"{HEAD}/rayStartParams/num-cpus: 0 is not of type 'string'",
        ),
        (RAYSERVICE, "spec/rayClusterConfig/workerGroupSpecs/0/replicas", "1", "'1' is not of type 'integer'"),
        (RAYSERVICE, f"{HEAD}/template", REMOVED, f"{HEAD}: 'template' is a required property"),
        (RAYSERVICE, f"{HEAD}/template/spec/containers/0/resources/limits/memory", "2Gib", "'2Gib' does not match"),
        (RAYSERVICE, "spec/rayClusterConfig/autoscalerOptions", {"version": "v3"}, "'v3' is not one of"),
        (RAYSERVICE, "metadata/name", "Upper", "metadata/name: 'Upper' does not match"),
        (RAYSERVICE, "metadata/labels", {"a": "b c"}, "metadata/labels/a: 'b c' does not match"),
        (RAYSERVICE, "metadata", REMOVED, "'metadata' is a required property"),
        (RAYSERVICE, "spce", {}, "'spce' was unexpected"),
        (ROUTE, "spec/rules/0/backendRefs/0/port", 0, "spec/rules/0/backendRefs/0/port: 0 is less than the minimum"),
        (ROUTE, "spec/rules/0/backendRefs/0/prot", 80, "'prot' was unexpected"),
        (GATEWAY, "spec/listeners/1/name", "http", "spec/listeners/1: the list has"),
    ],
)
def test_a_planted_fault_is_found(text: str, path: str, value: Any, fault: str) -> None:
    manifest = changed(sound(text), path, value)
    assert fault in "\n".join(map(str, kind_of(manifest).check(manifest)))


def test_defaults_are_filled_in_and_nulls_dropped() -> None:
    manifest = changed(sound(ROUTE), "spec/hostnames", None)
    kept = kind_of(manifest).with_defaults(manifest)
    assert "hostnames" not in kept["spec"]
    assert kept["spec"]["parentRefs"] == [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "gate"}]
    assert manifest["spec"]["hostnames"] is None
    assert kind_of(manifest).check(manifest) == []


@pytest.mark.deploy
@pytest.mark.parametrize(
    ("text", "path", "value", "fault"),
    [
        (RAYSERVICE, "spec/managedBy", "somebody", "spec/managedBy: the managedBy field value must be either"),
        (ROUTE, "spec/rules/0/matches/0/path/value", "v1", "must be an absolute path and start with '/'"),
        (
            ROUTE,
            "spec/rules/0/timeouts",
            {"request": "1s", "backendRequest": "2s"},
            "backendRequest timeout cannot be longer",
        ),
        (GATEWAY, "spec/listeners/1/port", 80, "Combination of port, protocol and hostname must be unique"),
    ],
)
def test_rules_in_cel(text: str, path: str, value: Any, fault: str) -> None:
    require_module("celpy")
    assert kind_of(sound(text)).check_rules(sound(text)) == []
    manifest = changed(sound(text), path, value)
    assert kind_of(manifest).check(manifest) == []
    assert fault in "\n".join(map(str, kind_of(manifest).check_rules(manifest)))


CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
spec:
  group: a.example
  scope: Namespaced
  names: {kind: Thing, plural: things}
  versions:
  - {name: v1alpha1, served: true, storage: false, schema: {openAPIV3Schema: {type: object}}}
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        description: prose
        properties: {description: {type: string, description: prose}, port: {x-kubernetes-int-or-string: true}}
"""


def test_trimming_keeps_properties_named_description_and_drops_prose() -> None:
    trimmed = trim(yaml.safe_load(CRD))
    assert trimmed["schema"]["properties"]["description"] == {"type": "string"}
    assert "description" not in trimmed["schema"]
    kind = CustomKind(**trimmed)
    assert (kind.api_version, kind.namespaced) == ("a.example/v1", True)
    manifest = {"apiVersion": "a.example/v1", "kind": "Thing", "metadata": {"name": "a"}, "port": "http"}
    assert kind.check(manifest) == []
    assert [str(fault) for fault in kind.check(manifest | {"port": []})] == [
        "port: [] is not of type 'integer', 'string'"
    ]
