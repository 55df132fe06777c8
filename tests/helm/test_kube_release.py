"""What objects of one release say of each other, with one of them at fault."""

from typing import Any

import pytest
import yaml

from tests.support.kube.release import check_release
from tests.support.kube.samples import DEPLOYMENT, RAYSERVICE, SERVICE, changed, sound

OTHERS = """
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: web}
spec: {rules: [{http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: web, port: {name: http}}}}]}}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: llm}
spec: {rules: [{backendRefs: [{name: llm-serve-svc, port: 50051}]}]}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: llm}
spec: {selector: {matchLabels: {ray.io/node-type: worker, ray.io/group: gpu}}}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: all}
spec: {podSelector: {matchLabels: {ray.io/is-ray-node: "yes"}}}
---
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata: {name: llm}
spec: {selector: {matchLabels: {ray.io/node-type: head}}, podMetricsEndpoints: [{port: serve}, {port: metrics}]}
---
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata: {name: web}
spec: {selector: {matchLabels: {app: web}}, endpoints: [{port: http}]}
"""


def sound_release() -> list[dict[str, Any]]:
    return [sound(DEPLOYMENT), sound(SERVICE), sound(RAYSERVICE), *yaml.safe_load_all(OTHERS)]


def test_a_sound_release_passes() -> None:
    assert check_release(sound_release()) == []


@pytest.mark.parametrize(
    ("kind", "path", "value", "fault"),
    [
        ("Service", "spec/selector/app", "wbe", "Service/web: selects {'app': 'wbe'}, and no pod of the release has"),
        ("Service", "spec/ports/0/targetPort", "htpt", "Service/web: no selected pod has a port named 'htpt'"),
        ("PodDisruptionBudget", "spec/selector/matchLabels/ray.io~1group", "cpu", "PodDisruptionBudget/llm: selects"),
        ("NetworkPolicy", "spec/podSelector/matchLabels/a", "b", "NetworkPolicy/all: selects"),
        (
            "PodMonitor",
            "spec/podMetricsEndpoints/0/port",
            "http",
            "PodMonitor/llm: no selected pod has a port named 'http'",
        ),
        (
            "ServiceMonitor",
            "spec/selector/matchLabels/app",
            "x",
            "ServiceMonitor/web: selects {'app': 'x'}, and no Service",
        ),
        (
            "Ingress",
            "spec/rules/0/http/paths/0/backend/service/name",
            "wbe",
            "Ingress/web/spec/rules/0: no Service is named 'wbe'",
        ),
        (
            "Ingress",
            "spec/rules/0/http/paths/0/backend/service/port/name",
            "web",
            "Ingress/web/spec/rules/0: Service web has no port 'web'",
        ),
        ("GRPCRoute", "spec/rules/0/backendRefs/0/port", 9000, "Service llm-serve-svc has no port 9000"),
        ("GRPCRoute", "spec/rules/0/backendRefs/0/name", "llm-svc", "no Service is named 'llm-svc'"),
    ],
)
def test_a_planted_fault_is_found(kind: str, path: str, value: Any, fault: str) -> None:
    manifests = [changed(each, path, value) if each["kind"] == kind else each for each in sound_release()]
    (found,) = check_release(manifests)
    assert fault in str(found)


def test_the_same_object_twice() -> None:
    assert [str(fault) for fault in check_release([*sound_release(), sound(DEPLOYMENT)])] == [
        "Deployment/web: is there twice"
    ]
