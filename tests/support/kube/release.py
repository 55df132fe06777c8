"""What the objects of one release say of each other: selectors find pods, routes find Services, names are unique.

A Service that KubeRay makes for a RayService counts as there. Objects that the user brings (Secrets, claims) are not known here.
"""

from collections.abc import Iterator
from typing import Any

from tests.support.kube.fault import Fault, joined
from tests.support.kube.pods import pod_templates
from tests.support.kube.rayservice import published_ports

Manifest = dict[str, Any]


def check_release(manifests: list[Manifest]) -> list[Fault]:
    """Faults between objects; paths begin with Kind/name."""
    return [*_unique(manifests), *_selectors(manifests), *_routes(manifests)]


def label(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def _unique(manifests: list[Manifest]) -> Iterator[Fault]:
    seen: set[tuple[str, str]] = set()
    for manifest in manifests:
        identity = label(manifest), manifest["metadata"].get("namespace", "")
        if identity in seen:
            yield Fault(label(manifest), "is there twice")
        seen.add(identity)


def _selected(manifest: Manifest) -> dict[str, str] | None:
    """Labels that a Service, budget, policy or monitor wants of pods; None where it selects none, or by expressions."""
    spec = manifest.get("spec") or {}
    match manifest["kind"]:
        case "Service":
            return spec.get("selector")
        case "PodDisruptionBudget" | "PodMonitor":
            return (spec.get("selector") or {}).get("matchLabels")
        case "NetworkPolicy":
            return (spec.get("podSelector") or {}).get("matchLabels")
    return None


def _selectors(manifests: list[Manifest]) -> Iterator[Fault]:
    pods = [pod for manifest in manifests for pod in pod_templates(manifest)]
    for manifest in manifests:
        wanted = dict(_selected(manifest) or {})
        # Its value has a generated part (RayService name and a suffix), so only its presence is ours to check.
        wanted.pop("ray.io/cluster", None)
        found = [pod for pod in pods if wanted.items() <= pod.labels.items()]
        if wanted and not found:
            yield Fault(label(manifest), f"selects {wanted}, and no pod of the release has these labels")
        if manifest["kind"] in ("Service", "PodMonitor") and found:
            names = {port.get("name") for pod in found for _, c in pod.containers for port in c.get("ports") or []}
            yield from _named_ports(manifest, names)
    services = [manifest for manifest in manifests if manifest["kind"] == "Service"]
    for manifest in manifests:
        if manifest["kind"] == "ServiceMonitor":
            wanted = (manifest["spec"].get("selector") or {}).get("matchLabels") or {}
            if not any(wanted.items() <= (service["metadata"].get("labels") or {}).items() for service in services):
                yield Fault(label(manifest), f"selects {wanted}, and no Service of the release has these labels")


def _named_ports(manifest: Manifest, names: set[str | None]) -> Iterator[Fault]:
    fields = {"Service": ("ports", "targetPort"), "PodMonitor": ("podMetricsEndpoints", "port")}
    listed, field = fields[manifest["kind"]]
    # The operator adds `metrics` to the Ray container.
    for entry in manifest["spec"].get(listed) or []:
        target = entry.get(field)
        if isinstance(target, str) and target not in names | {"metrics"}:
            yield Fault(label(manifest), f"no selected pod has a port named {target!r}")


def _service_ports(manifests: list[Manifest]) -> dict[str, dict[Any, int]]:
    """Service -> its ports by name and by number, those that KubeRay makes included."""
    ports: dict[str, dict[Any, int]] = {}
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "Service":
            listed = manifest["spec"].get("ports") or []
            ports[name] = {key: port["port"] for port in listed for key in (port.get("name"), port["port"])}
        elif manifest["kind"] == "RayService":
            published = published_ports(manifest)
            ports[f"{name}-serve-svc"] = {key: port for item, port in published.items() for key in (item, port)}
            ports[f"{name}-head-svc"] = {}
    return ports


def _routes(manifests: list[Manifest]) -> Iterator[Fault]:
    ports = _service_ports(manifests)
    for manifest in manifests:
        for path, name, port in _backends(manifest):
            if name not in ports:
                yield Fault(joined(label(manifest), path), f"no Service is named {name!r}")
            elif port not in ports[name]:
                yield Fault(joined(label(manifest), path), f"Service {name} has no port {port!r}")


def _backends(manifest: Manifest) -> Iterator[tuple[str, str, Any]]:
    rules = (manifest.get("spec") or {}).get("rules") or []
    for index, rule in enumerate(rules):
        if manifest["kind"] == "Ingress":
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                yield f"spec/rules/{index}", service["name"], service["port"].get("name", service["port"].get("number"))
        elif manifest["kind"] in ("HTTPRoute", "GRPCRoute"):
            for backend in rule.get("backendRefs") or []:
                yield f"spec/rules/{index}", backend["name"], backend.get("port")
