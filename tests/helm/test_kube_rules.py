"""The rules that no schema has, each with a fault planted in a sound object."""

from typing import Any

import pytest

from tests.support.kube.rules import check_rules, is_quantity
from tests.support.kube.samples import DEPLOYMENT, REMOVED, SERVICE, changed, sound

POD = "spec/template/spec"
WEB = f"{POD}/containers/0"


@pytest.mark.parametrize("text", [DEPLOYMENT, SERVICE])
def test_sound_objects_pass(text: str) -> None:
    assert check_rules(sound(text)) == []


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (f"{WEB}/resources/limits/memory", "2Gib", f"{WEB}/resources/limits/memory: not a quantity: '2Gib'"),
        (f"{WEB}/resources/requests/cpu", True, f"{WEB}/resources/requests/cpu: not a quantity: True"),
        (f"{POD}/volumes/0/emptyDir/sizeLimit", "1 Gi", f"{POD}/volumes/0/emptyDir/sizeLimit: not a quantity: '1 Gi'"),
        ("metadata/labels/app", "a/b", "metadata/labels/app: not a label's value: 'a/b'"),
        ("metadata/labels/app", "a" * 64, f"metadata/labels/app: not a label's value: '{'a' * 64}'"),
        ("metadata/labels/app", 1, "metadata/labels/app: must be a string, not 1"),
        ("metadata/labels/-x", "1", "metadata/labels/-x: not a qualified name"),
        ("metadata/labels/UP~1x", "1", "metadata/labels/UP/x: not a qualified name"),
        ("metadata/annotations/a", True, "metadata/annotations/a: must be a string, not True"),
        ("spec/template/metadata/labels/tier", "x y", "spec/template/metadata/labels/tier: not a label's value: 'x y'"),
        (f"{WEB}/volumeMounts/0/name", "date", f"{WEB}/volumeMounts/0: no volume is named 'date'"),
        (f"{WEB}/volumeMounts/1", {"name": "data", "mountPath": "/data"}, "mountPath '/data' is there twice"),
        (f"{WEB}/volumeMounts", REMOVED, f"{POD}/volumes: no container mounts volume 'data'"),
        (f"{POD}/volumes/1", {"name": "data", "emptyDir": {}}, "volume 'data' is there twice"),
        (f"{WEB}/env/1", {"name": "A", "value": "2"}, "variable 'A' is there twice"),
        (f"{WEB}/ports/0/name", "grpc", "port name 'grpc' is there twice"),
        (f"{WEB}/ports/0/name", "metrics-of-the-web", "not a port's name (at most 15"),
        (f"{WEB}/ports/0/name", "80", "not a port's name"),
        (f"{WEB}/ports/0/containerPort", 81, "container port (81, 'TCP') is there twice"),
        (f"{WEB}/readinessProbe/httpGet/port", "htpt", f"{WEB}/readinessProbe/httpGet/port: no port is named 'htpt'"),
        (
            f"{WEB}/resources/requests/nvidia.com~1gpu",
            2,
            f"{WEB}/resources/requests/nvidia.com/gpu: must be the limit, 1",
        ),
        (f"{WEB}/resources/limits/nvidia.com~1gpu", REMOVED, "nvidia.com/gpu: required, as it is requested"),
        (f"{WEB}/resources/limits/nvidia.com~1gpu", "1500m", "nvidia.com/gpu: must be a whole number"),
        (f"{WEB}/image", "", f"{WEB}/image: required"),
        (f"{WEB}/name", "Web", f"{WEB}/name: not a DNS label: 'Web'"),
        (f"{POD}/initContainers", [{"name": "web", "image": "i"}], "container 'web' is there twice"),
        ("spec/selector/matchLabels/app", "other", "spec/selector: app=other is not on the template"),
        ("spec/selector/matchLabels", {}, "spec/selector: selects nothing"),
    ],
)
def test_a_planted_fault_is_found(path: str, value: Any, fault: str) -> None:
    assert fault in "\n".join(map(str, check_rules(changed(sound(DEPLOYMENT), path, value))))


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("spec/ports/0/name", REMOVED, "spec/ports: several ports, so each needs a name"),
        ("spec/ports/0/name", "grpc", "spec/ports: port name 'grpc' is there twice"),
        ("spec/ports/0/port", 81, "spec/ports: port (81, 'TCP') is there twice"),
        ("metadata/name", "1web", "metadata/name: not a service's name (DNS-1035): '1web'"),
    ],
)
def test_a_planted_fault_of_a_service_is_found(path: str, value: Any, fault: str) -> None:
    assert [str(found) for found in check_rules(changed(sound(SERVICE), path, value))] == [fault]


@pytest.mark.parametrize("value", ["1", 2, 0.5, "500m", "1.5Gi", "1e3", "100k", ".5"])
def test_quantities(value: object) -> None:
    assert is_quantity(value)


@pytest.mark.parametrize("value", ["", "Gi", "1GB", "1gi", "1Gib", "1 Gi", True, None, [], "1K"])
def test_not_quantities(value: object) -> None:
    assert not is_quantity(value)
