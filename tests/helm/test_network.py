"""Ray's ports are closed to everything outside the release, the gateway's are open to clients: by the policies that the chart renders."""

from typing import Any

import pytest

from tests.support.kube.chart import EXAMPLES, overlaid, rendered, values_of
from tests.support.kube.network import Peer, admits
from tests.support.kube.pods import pod_templates

NAMESPACE = "llm"
RAY = (6379, 6380, 8080, 8265, 10001, 10002, 19999, 44217, 52365)
GATEWAY = (5000, 50051)
HERE = {"kubernetes.io/metadata.name": NAMESPACE}
STRANGER = Peer()
NEIGHBOUR = Peer({"app.kubernetes.io/name": "another"}, HERE)
OPERATOR = Peer({"app.kubernetes.io/name": "kuberay-operator"})
POLICY = {
    "spec": {
        "podSelector": {"matchLabels": {"app": "a"}},
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": {"app": "b"}}}],
                "ports": [{"port": 1}, {"port": 5, "endPort": 7}],
            },
            {
                "from": [
                    {"namespaceSelector": {"matchLabels": {"team": "x"}}, "podSelector": {"matchLabels": {"app": "c"}}}
                ]
            },
            {"ports": [{"port": 9}]},
        ],
    }
}


@pytest.mark.parametrize(
    ("peer", "port", "reached"),
    [
        (Peer({"app": "b"}, HERE), 1, True),
        (Peer({"app": "b"}, HERE), 2, False),
        (Peer({"app": "b"}, HERE), 6, True),
        (Peer({"app": "b"}), 1, False),
        (Peer({"app": "c"}, {"team": "x", "kubernetes.io/metadata.name": "x"}), 77, True),
        (Peer({"app": "d"}, {"team": "x", "kubernetes.io/metadata.name": "x"}), 77, False),
        (STRANGER, 9, True),
        (STRANGER, 1, False),
    ],
)
def test_the_rules_of_policies(peer: Peer, port: int, reached: bool) -> None:
    assert admits([POLICY], {"app": "a", "more": "x"}, NAMESPACE, peer, port) is reached
    assert admits([POLICY], {"app": "other"}, NAMESPACE, peer, port) is True


def release(name: str, over: dict[str, Any] | None = None) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
    """(policies, labels of one pod of each group)."""
    found = rendered(name, over)
    (service,) = found.of_kind("RayService")
    return found.of_kind("NetworkPolicy"), {
        pod.added_labels["ray.io/group"]: pod.labels for pod in pod_templates(service)
    }


@pytest.mark.deploy
@pytest.mark.parametrize("name", ["minimal", *EXAMPLES])
def test_strangers_reach_the_gateway_and_nothing_of_ray(name: str) -> None:
    policies, pods = release(name)
    open_metrics = rendered(name).of_kind("PodMonitor")
    for group, labels in pods.items():
        strangers = (STRANGER, NEIGHBOUR)
        reached = {
            port for port in (*RAY, *GATEWAY) for peer in strangers if admits(policies, labels, NAMESPACE, peer, port)
        }
        # Scrapers that are not named are everybody; the metrics of Ray hold no secret and take no command.
        allowed = {8080, 44217} if open_metrics else set()
        assert reached - allowed == (set(GATEWAY) if group == "gateway" else set()), group


@pytest.mark.deploy
def test_pods_of_the_release_reach_each_other_and_the_operator_the_dashboard() -> None:
    policies, pods = release("minimal")
    for labels in pods.values():
        assert all(
            admits(policies, labels, NAMESPACE, Peer(other, HERE), port) for other in pods.values() for port in RAY
        )
        assert [port for port in RAY if admits(policies, labels, NAMESPACE, OPERATOR, port)] == [8265]
    # Labels alone do not make a pod of another namespace one of ours.
    assert not admits(policies, pods["headgroup"], NAMESPACE, Peer(pods["gateway"]), 6379)


@pytest.mark.deploy
def test_named_clients_and_scrapers_are_the_only_ones() -> None:
    policies, pods = release("everything")
    client = Peer({"role": "client"}, HERE)
    scraper = Peer({}, {"kubernetes.io/metadata.name": "monitoring"})
    gateway = pods["gateway"]
    http = values_of("everything")["gateway"]["options"]["http_port"]
    assert {port for port in (http, 50051) if admits(policies, gateway, NAMESPACE, client, port)} == {http, 50051}
    assert {port for port in (*RAY, http, 50051) if admits(policies, gateway, NAMESPACE, scraper, port)} == {
        8080,
        44217,
        http,
    }
    assert not any(admits(policies, gateway, NAMESPACE, STRANGER, port) for port in (*RAY, http, 50051))


@pytest.mark.deploy
def test_policies_are_off_only_when_asked() -> None:
    assert release("minimal")[0]
    assert release("minimal", overlaid(values_of("minimal"), {"networkPolicy": {"enabled": False}}))[0] == []
