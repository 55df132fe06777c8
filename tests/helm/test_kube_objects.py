"""Built-in kinds against their schemas, the chart's callers of Helm, and how two renderings are compared: each with something to find."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.kube.chart import differences, overlaid
from tests.support.kube.helm import Rendered, RenderRefusedError, lint, package, parse, render
from tests.support.kube.objects import check_object
from tests.support.kube.samples import DEPLOYMENT, RAYSERVICE, SERVICE, changed, sound
from tests.support.tools import require_module

CHART = """apiVersion: v2
name: probe
version: 0.1.0
"""
TEMPLATE = """apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-a, namespace: {{ .Release.Namespace }}}
data:
  kube: {{ .Capabilities.KubeVersion.Version }}
  ray: {{ .Capabilities.APIVersions.Has "ray.io/v1" | quote }}
  text: {{ required "text: say something" .Values.text }}
"""


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    folder = tmp_path / "probe"
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text(CHART)
    (folder / "values.yaml").write_text("text: a\n")
    (folder / "values.schema.json").write_text(
        '{"properties": {"text": {"type": ["string", "null"]}}, "additionalProperties": false}'
    )
    (folder / "templates" / "a.yaml").write_text(TEMPLATE)
    (folder / "templates" / "NOTES.txt").write_text("Hello, {{ .Release.Name }}.")
    return folder


@pytest.mark.deploy
@pytest.mark.parametrize("kube_version", ["1.31", "1.37"])
@pytest.mark.parametrize(
    ("text", "path", "value", "fault"),
    [
        (DEPLOYMENT, "spec/replica", 1, "'replica' was unexpected"),
        (DEPLOYMENT, "spec/template/spec/containers/0/ports/0/containerPort", "80", "is not of type 'integer'"),
        (DEPLOYMENT, "spec/template/spec/containers/0/volumeMounts/0/name", "date", "no volume is named 'date'"),
        (DEPLOYMENT, "kind", "Deploiment", "no schema of apps/v1 Deploiment in Kubernetes 1.3"),
        (SERVICE, "spec/ports/0/prt", 1, "'prt' was unexpected"),
        (RAYSERVICE, "spec/serveConfig", "", "'serveConfig' was unexpected"),
        (RAYSERVICE, "spec/upgradeStrategy/type", "Rolling", "must say one of"),
        (RAYSERVICE, "spec/rayClusterConfig/headGroupSpec/rayStartParams/port", "8265", "port 8265: Ray's port and"),
    ],
)
def test_a_planted_fault_is_found(text: str, path: str, value: Any, fault: str, kube_version: str) -> None:
    for module in ("kubernetes_validate", "celpy"):
        require_module(module)
    assert check_object(sound(text), kube_version) == []
    assert fault in "\n".join(map(str, check_object(changed(sound(text), path, value), kube_version)))


@pytest.mark.deploy
def test_rendering_takes_versions_and_values(chart: Path) -> None:
    found = render(chart, {"text": "b"}, kube_version="1.33", api_versions=["ray.io/v1"], name="n", namespace="s")
    assert found.manifests == [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "n-a", "namespace": "s"},
            "data": {"kube": "v1.33.0", "ray": "true", "text": "b"},
        }
    ]
    assert found.of_kind("ConfigMap") == found.manifests
    assert found.of_kind("Secret") == []
    assert found.notes == "Hello, n."
    assert render(chart).manifests[0]["data"] == {"kube": "v1.31.0", "ray": "false", "text": "a"}


@pytest.mark.deploy
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text": ""}, "text: say something"),
        ({"txt": "b"}, "additional properties 'txt' not allowed"),
        ({"text": 1}, "at '/text'"),
    ],
)
def test_a_refused_rendering_says_why(chart: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RenderRefusedError, match=message):
        render(chart, values)


@pytest.mark.deploy
def test_lint_and_package(chart: Path, tmp_path: Path) -> None:
    assert lint(chart) == []
    assert package(chart, tmp_path).name == "probe-0.1.0.tgz"
    (chart / "Chart.yaml").write_text(CHART.replace("0.1.0", "0.1-devel"))
    assert "version" in "".join(lint(chart))


def of(text: str) -> Rendered:
    return Rendered(parse(text), "", text)


def test_differences_are_named_by_their_paths() -> None:
    one = "{kind: A, metadata: {name: a}, spec: {x: 1, l: [1, {y: 2}], m: [1]}}\n---\n{kind: B, metadata: {name: b}}"
    two = "{kind: A, metadata: {name: a}, spec: {x: 2, l: [1, {y: 3}], m: [1, 2], z: 0}}\n---\n{kind: C, metadata: {name: b}}"
    assert differences(of(one), of(one)) == set()
    assert differences(of(one), of(two)) == {"A/a/spec/x", "A/a/spec/l/1/y", "A/a/spec/m", "A/a/spec/z", "B/b", "C/b"}


def test_overlays_merge_maps_and_replace_lists() -> None:
    assert overlaid({"a": {"b": 1, "c": [1]}, "d": 1}, {"a": {"c": [2]}, "d": {}}) == {"a": {"b": 1, "c": [2]}, "d": {}}
