"""Who may reach which port of a pod, by the NetworkPolicies of a release: Kubernetes' own rules for ingress, for peers given by labels.

Address blocks and named ports are refused, since nothing here could judge them. Whether a cluster enforces policies is not known here.
"""

from dataclasses import dataclass, field
from typing import Any

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod that calls. namespace: labels of its namespace, whose name is in kubernetes.io/metadata.name."""

    labels: Labels = field(default_factory=dict)
    namespace: Labels = field(default_factory=lambda: {"kubernetes.io/metadata.name": "elsewhere"})


def admits(policies: list[dict[str, Any]], pod: Labels, own_namespace: str, peer: Peer, port: int) -> bool:
    """Whether the peer reaches the TCP port of the pod. A pod that no policy selects is open."""
    selecting = [policy["spec"] for policy in policies if matches(policy["spec"]["podSelector"], pod)]
    if not selecting:
        return True
    return any(
        _from(rule.get("from"), peer, own_namespace) and _to(rule.get("ports"), port)
        for spec in selecting
        for rule in spec.get("ingress") or []
    )


def matches(selector: dict[str, Any], labels: Labels) -> bool:
    """A selector by labels; an empty one matches all."""
    assert selector.keys() <= {"matchLabels"}, selector
    return (selector.get("matchLabels") or {}).items() <= labels.items()


def _from(peers: list[dict[str, Any]] | None, peer: Peer, own_namespace: str) -> bool:
    if not peers:
        return True
    return any(_is(entry, peer, own_namespace) for entry in peers)


def _is(entry: dict[str, Any], peer: Peer, own_namespace: str) -> bool:
    assert entry.keys() <= {"podSelector", "namespaceSelector"}, entry
    if "namespaceSelector" in entry:
        near = matches(entry["namespaceSelector"], peer.namespace)
    else:
        near = peer.namespace["kubernetes.io/metadata.name"] == own_namespace
    return near and matches(entry.get("podSelector") or {}, peer.labels)


def _to(ports: list[dict[str, Any]] | None, port: int) -> bool:
    if not ports:
        return True
    return any(entry["port"] <= port <= entry.get("endPort", entry["port"]) for entry in ports)
