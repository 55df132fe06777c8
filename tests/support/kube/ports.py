"""Who listens where in a pod of a Ray cluster: Ray's own servers, Serve's proxies, our gateway, and what containers declare; each port once.

Ray's defaults are those of 2.60. Servers that take any free port are not listed, unless a fixed port is in a range that Ray draws from.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from espalier.cluster.config import GatewayConfig
from tests.support.kube.fault import Fault, joined
from tests.support.kube.pods import PodTemplate, pod_templates

HEAD = {"port": 6379, "dashboard-port": 8265, "ray-client-server-port": 10001}
EVERY_NODE = {"dashboard-agent-listen-port": 52365, "metrics-export-port": 8080}
# Any free port, unless set.
IF_SET = ("object-manager-port", "node-manager-port", "dashboard-agent-grpc-port", "runtime-env-agent-port")
SERVE_HTTP, SERVE_GRPC = 8000, 9000
GATEWAY_DEFAULTS = {"http_port": GatewayConfig().http_port, "grpc_port": GatewayConfig().grpc_port}
AUTOSCALER_METRICS, DASHBOARD_METRICS = 44217, 44227


class Listener(NamedTuple):
    """owner: a name for the message; one owner may name its port more than once."""

    owner: str
    port: int


def check_ports(manifest: dict[str, Any]) -> list[Fault]:
    """No two listeners of one pod share a port, and what the Ray container declares is somebody's. For RayCluster and RayService."""
    faults: list[Fault] = []
    config = serve_config(manifest)
    for pod in pod_templates(manifest):
        if pod.role == "pod":
            continue
        listeners = [*_ray(pod), *_serve(config, pod.role), *_gateway(config)]
        faults += _collisions(pod, listeners)
    return faults


def serve_config(manifest: dict[str, Any]) -> dict[str, Any]:
    """serveConfigV2 of a RayService, parsed; empty where there is none."""
    text = (manifest.get("spec") or {}).get("serveConfigV2") if manifest.get("kind") == "RayService" else None
    parsed = yaml.safe_load(text) if isinstance(text, str) else None
    return parsed if isinstance(parsed, dict) else {}


def _ray(pod: PodTemplate) -> Iterator[Listener]:
    defaults = EVERY_NODE | HEAD if pod.role == "head" else EVERY_NODE
    for name, default in defaults.items():
        yield Listener(f"Ray's {name}", int(pod.params.get(name, default)))
    for name in IF_SET:
        if int(pod.params.get(name, 0)):
            yield Listener(f"Ray's {name}", int(pod.params[name]))
    if pod.role == "head":
        yield Listener("the autoscaler's metrics", AUTOSCALER_METRICS)
        yield Listener("the dashboard's metrics", DASHBOARD_METRICS)


def _worker_ports(pod: PodTemplate) -> range:
    """What Ray's workers draw from, if it is fixed."""
    low, high = int(pod.params.get("min-worker-port", 0)), int(pod.params.get("max-worker-port", 0))
    return range(low, high + 1) if low and high else range(0)


def _serve(config: dict[str, Any], role: str) -> Iterator[Listener]:
    location = config.get("proxy_location", "EveryNode")
    if config and (location == "EveryNode" or (location == "HeadOnly" and role == "head")):
        yield Listener("Serve's HTTP proxy", (config.get("http_options") or {}).get("port", SERVE_HTTP))
        grpc = config.get("grpc_options") or {}
        if grpc.get("grpc_servicer_functions"):
            yield Listener("Serve's gRPC proxy", grpc.get("port", SERVE_GRPC))


def _gateway(config: dict[str, Any]) -> Iterator[Listener]:
    """Our gateway's own ports. Which pods it may land in is not read, so they are kept free in all."""
    for application in config.get("applications") or []:
        if "gateway" in application.get("import_path", ""):
            args = application.get("args") or {}
            for field in ("http_port", "grpc_port"):
                yield Listener(f"the gateway's {field}", int(args.get(field, GATEWAY_DEFAULTS[field])))


def _collisions(pod: PodTemplate, listeners: list[Listener]) -> Iterator[Fault]:
    owners: dict[int, str] = {}
    drawn = _worker_ports(pod)
    for owner, port in listeners:
        if port in owners:
            yield Fault(joined(pod.path, "spec"), f"port {port}: {owners[port]} and {owner}")
        if port in drawn:
            yield Fault(
                joined(pod.path, "spec"),
                f"port {port} of {owner} is in the range of Ray's workers, {drawn[0]} to {drawn[-1]}",
            )
        owners[port] = owner
    # A declared port of the Ray container names a listener of it. A side car's is a listener of its own.
    containers = pod.spec.get("containers") or [{}]
    for port in containers[0].get("ports") or []:
        if port.get("containerPort") not in owners:
            yield Fault(
                joined(pod.path, "spec/containers/0/ports"),
                f"nothing listens on {port.get('containerPort')} ({port.get('name')})",
            )
    for container in containers[1:]:
        for port in container.get("ports") or []:
            number, owner = port.get("containerPort"), f"container {container.get('name')!r}"
            if number in owners:
                yield Fault(joined(pod.path, "spec"), f"port {number}: {owners[number]} and {owner}")
