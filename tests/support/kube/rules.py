"""What an API server checks in code of its own and no schema says: quantities, labels, names that refer to names, ports, selectors.

For one object of any kind. Not what several objects say of each other (release.py).
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tests.support.kube.fault import Fault, joined
from tests.support.kube.pods import PodTemplate, pod_templates

QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?")
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# Keys under which maps of quantities lie, wherever they are.
QUANTITY_MAPS = ("limits", "requests")
QUANTITY_FIELDS = ("sizeLimit", "storage")


def check_rules(manifest: dict[str, Any]) -> list[Fault]:
    """All rules over one object."""
    faults = [*_labels(manifest.get("metadata") or {}, "metadata"), *_quantities(manifest.get("spec"), "spec")]
    for pod in pod_templates(manifest):
        faults += [*_labels(pod.template.get("metadata") or {}, joined(pod.path, "metadata")), *_pod(pod)]
    if manifest.get("kind") in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"):
        faults += _own_selector(manifest)
    if manifest.get("kind") == "Service":
        faults += _service(manifest)
    return faults


def is_quantity(value: object) -> bool:
    """As in `memory: 1Gi`; numbers count, true and false do not."""
    return not isinstance(value, bool) and isinstance(value, (int, float, str)) and bool(QUANTITY.fullmatch(str(value)))


def _labels(metadata: dict[str, Any], path: str) -> Iterator[Fault]:
    for field in ("labels", "annotations"):
        for key, value in (metadata.get(field) or {}).items():
            where = joined(path, field, key)
            prefix, slash, name = key.rpartition("/")
            if len(name) > 63 or not LABEL_NAME.fullmatch(name) or (slash and not LABEL_PREFIX.fullmatch(prefix)):
                yield Fault(where, "not a qualified name")
            if not isinstance(value, str):
                yield Fault(where, f"must be a string, not {value!r}")
            elif field == "labels" and (len(value) > 63 or not LABEL_VALUE.fullmatch(value)):
                yield Fault(where, f"not a label's value: {value!r}")


def _quantities(value: object, path: str) -> Iterator[Fault]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _quantities(item, joined(path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            where = joined(path, key)
            if key in QUANTITY_MAPS and isinstance(item, dict):
                for resource, amount in item.items():
                    if not is_quantity(amount):
                        yield Fault(joined(where, resource), f"not a quantity: {amount!r}")
            elif key in QUANTITY_FIELDS and not isinstance(item, (dict, list)) and not is_quantity(item):
                yield Fault(where, f"not a quantity: {item!r}")
            else:
                yield from _quantities(item, where)


def _twice(values: Iterable[object], path: str, what: str) -> Iterator[Fault]:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            yield Fault(path, f"{what} {value!r} is there twice")
        seen.add(value)


def _pod(pod: PodTemplate) -> Iterator[Fault]:
    spec, where = pod.spec, joined(pod.path, "spec")
    volumes = [volume.get("name") for volume in spec.get("volumes") or []]
    yield from _twice(volumes, joined(where, "volumes"), "volume")
    yield from _twice([container.get("name") for _, container in pod.containers], where, "container")
    ports = [
        (port.get("containerPort"), port.get("protocol", "TCP"))
        for container in spec.get("containers") or []
        for port in container.get("ports") or []
    ]
    yield from _twice(ports, where, "container port")
    mounted = set()
    for path, container in pod.containers:
        mounts = container.get("volumeMounts") or []
        mounted |= {mount.get("name") for mount in mounts}
        yield from _container(container, path, volumes)
    for name in sorted({name for name in volumes if name} - mounted):
        yield Fault(joined(where, "volumes"), f"no container mounts volume {name!r}")


def _container(container: dict[str, Any], path: str, volumes: list[Any]) -> Iterator[Fault]:
    if not container.get("image"):
        yield Fault(joined(path, "image"), "required")
    if not DNS_LABEL.fullmatch(container.get("name") or "") or len(container["name"]) > 63:
        yield Fault(joined(path, "name"), f"not a DNS label: {container.get('name')!r}")
    mounts = container.get("volumeMounts") or []
    for index, mount in enumerate(mounts):
        if mount.get("name") not in volumes:
            yield Fault(joined(path, "volumeMounts", index), f"no volume is named {mount.get('name')!r}")
    yield from _twice([mount.get("mountPath") for mount in mounts], joined(path, "volumeMounts"), "mountPath")
    variables = [variable.get("name") for variable in container.get("env") or []]
    yield from _twice(variables, joined(path, "env"), "variable")
    yield from _extended_resources(container.get("resources") or {}, joined(path, "resources"))
    names = [port["name"] for port in container.get("ports") or [] if port.get("name")]
    yield from _twice(names, joined(path, "ports"), "port name")
    for name in names:
        if len(name) > 15 or not PORT_NAME.fullmatch(name):
            yield Fault(joined(path, "ports"), f"not a port's name (at most 15 of a-z, 0-9 and inner -): {name!r}")
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        yield from _probe(container.get(probe) or {}, joined(path, probe), names)


def _extended_resources(resources: dict[str, Any], path: str) -> Iterator[Fault]:
    """nvidia.com/gpu and the like cannot be overcommitted; what is requested must be the limit, and whole."""
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name in sorted({*limits, *requests}):
        if "/" not in name:
            continue
        if name not in limits:
            yield Fault(joined(path, "limits", name), "required, as it is requested")
        elif str(requests.get(name, limits[name])) != str(limits[name]):
            yield Fault(joined(path, "requests", name), f"must be the limit, {limits[name]}")
        if not str(limits.get(name, 0)).isdigit():
            yield Fault(joined(path, "limits", name), "must be a whole number")


def _probe(probe: dict[str, Any], path: str, port_names: list[str]) -> Iterator[Fault]:
    for action in ("httpGet", "tcpSocket", "grpc"):
        port = (probe.get(action) or {}).get("port")
        if isinstance(port, str) and port not in port_names:
            yield Fault(joined(path, action, "port"), f"no port is named {port!r}")


def _own_selector(manifest: dict[str, Any]) -> Iterator[Fault]:
    spec = manifest.get("spec") or {}
    wanted = (spec.get("selector") or {}).get("matchLabels") or {}
    labels = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    if not wanted:
        yield Fault("spec/selector", "selects nothing")
    for key, value in wanted.items():
        if labels.get(key) != value:
            yield Fault("spec/selector", f"{key}={value} is not on the template")


def _service(manifest: dict[str, Any]) -> Iterator[Fault]:
    name = (manifest.get("metadata") or {}).get("name") or ""
    if len(name) > 63 or not SERVICE_NAME.fullmatch(name):
        yield Fault("metadata/name", f"not a service's name (DNS-1035): {name!r}")
    ports = (manifest.get("spec") or {}).get("ports") or []
    names = [port.get("name") for port in ports]
    if len(ports) > 1 and not all(names):
        yield Fault("spec/ports", "several ports, so each needs a name")
    yield from _twice([name for name in names if name], "spec/ports", "port name")
    yield from _twice([(port.get("port"), port.get("protocol", "TCP")) for port in ports], "spec/ports", "port")
