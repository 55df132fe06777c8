"""What the KubeRay operator v1.7.0 refuses or gets wrong although the CRD allows it, for one RayService.

Its facts are of the operator's source and documents, not of a cluster: whether an accepted object then runs is not known here. Ports are ports.py's.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.support.kube.fault import Fault, joined
from tests.support.kube.pods import PodTemplate, pod_templates
from tests.support.kube.ports import serve_config

MAX_NAME = 47
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
INCREMENTAL = "NewClusterWithIncrementalUpgrade"
STRATEGIES = ("NewCluster", "None", INCREMENTAL)
H2C = "kubernetes.io/h2c"
RESOURCE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
CLUSTER = "spec/rayClusterConfig"


def check_rayservice(manifest: dict[str, Any]) -> list[Fault]:
    """Everything that is wrong with it; nothing for other kinds."""
    if manifest.get("kind") != "RayService":
        return []
    cluster = manifest["spec"].get("rayClusterConfig") or {}
    return [
        *_name(manifest),
        *_upgrade(manifest),
        *_serve_services(manifest),
        *_applications(manifest),
        *_refused_in_cluster(cluster),
        *_worker_groups(cluster),
        *_autoscaler(cluster),
        *_redis(manifest, cluster),
        *[fault for pod in pod_templates(manifest) for fault in _ray_pod(pod)],
    ]


def _name(manifest: dict[str, Any]) -> Iterator[Fault]:
    name = manifest["metadata"].get("name") or ""
    if len(name) > MAX_NAME or not DNS_1035.fullmatch(name):
        yield Fault("metadata/name", f"must be DNS-1035 of at most {MAX_NAME} characters: {name!r}")


def _upgrade(manifest: dict[str, Any]) -> Iterator[Fault]:
    spec = manifest["spec"]
    strategy = spec.get("upgradeStrategy") or {}
    path = "spec/upgradeStrategy"
    if strategy.get("type") not in STRATEGIES:
        yield Fault(joined(path, "type"), f"must say one of {', '.join(STRATEGIES)}, not {strategy.get('type')!r}")
    if strategy.get("type") != INCREMENTAL:
        return
    options = strategy.get("clusterUpgradeOptions") or {}
    where = joined(path, "clusterUpgradeOptions")
    if not (spec.get("rayClusterConfig") or {}).get("enableInTreeAutoscaling"):
        yield Fault(joined(CLUSTER, "enableInTreeAutoscaling"), "an incremental upgrade needs it")
    if not options.get("gatewayClassName"):
        yield Fault(joined(where, "gatewayClassName"), "an incremental upgrade needs it")
    if not (options.get("intervalSeconds") or 0) > 0:
        yield Fault(joined(where, "intervalSeconds"), "must be positive")
    step, surge = options.get("stepSizePercent", 0), options.get("maxSurgePercent", 100)
    if not 0 <= step <= surge <= 100:
        yield Fault(where, f"needs 0 <= stepSizePercent ({step}) <= maxSurgePercent ({surge}) <= 100")
    if any(name.startswith("serve-") for name in published_ports(manifest)):
        yield Fault(
            joined(path, "type"), "an incremental upgrade shifts only the HTTP port; refuse it while gRPC is published"
        )


def published_ports(manifest: dict[str, Any]) -> dict[str, int]:
    """Head ports that the serve Service gets by itself."""
    head = (manifest["spec"].get("rayClusterConfig") or {}).get("headGroupSpec") or {}
    containers = ((head.get("template") or {}).get("spec") or {}).get("containers") or [{}]
    ports = containers[0].get("ports") or []
    named = {port.get("name", ""): port["containerPort"] for port in ports}
    return {name: port for name, port in named.items() if name == "serve" or name.startswith("serve-")}


def _serve_services(manifest: dict[str, Any]) -> Iterator[Fault]:
    spec = manifest["spec"]
    published = published_ports(manifest)
    head_ports = f"{CLUSTER}/headGroupSpec/template/spec/containers/0/ports"
    if "serve" not in published:
        yield Fault(head_ports, "no port is named serve, so there would be no Service")
    service = spec.get("serveService") or {}
    if published and (service.get("metadata") or {}).get("labels", {}).get("ray.io/serve"):
        yield Fault("spec/serveService/metadata/labels", "ray.io/serve is the operator's")
    own = {port.get("name"): port for port in (service.get("spec") or {}).get("ports") or []}
    for name in published:
        if "grpc" in name and own.get(name, {}).get("appProtocol") != H2C:
            yield Fault("spec/serveService/spec/ports", f"port {name} needs appProtocol {H2C}")
    for name in own.keys() - published.keys():
        yield Fault("spec/serveService/spec/ports", f"port {name} is none of the head's, so it is not published")
    head_service = ((spec.get("rayClusterConfig") or {}).get("headGroupSpec") or {}).get("headService") or {}
    if (head_service.get("metadata") or {}).get("name"):
        yield Fault(f"{CLUSTER}/headGroupSpec/headService/metadata/name", "must be empty")


def _applications(manifest: dict[str, Any]) -> Iterator[Fault]:
    path = "spec/serveConfigV2"
    try:
        applications = serve_config(manifest).get("applications") or []
    except yaml.YAMLError as error:
        yield Fault(path, f"is not YAML: {error}")
        return
    if not applications:
        yield Fault(path, "lists no applications")
    names = [application.get("name") for application in applications]
    routes = [application["route_prefix"] for application in applications if application.get("route_prefix")]
    if len(set(names)) < len(names) or not all(names):
        yield Fault(path, f"applications need names of their own: {names}")
    if len(set(routes)) < len(routes):
        yield Fault(path, f"applications share a route_prefix: {routes}")
    for application in applications:
        if ":" not in (application.get("import_path") or ""):
            yield Fault(path, f"import_path must be module:attribute, not {application.get('import_path')!r}")


def _refused_in_cluster(cluster: dict[str, Any]) -> Iterator[Fault]:
    for field, reason in (
        ("upgradeStrategy", "is a RayCluster's own; refused in a RayService"),
        ("networkPolicy", "needs a feature gate that is off by default"),
        ("tlsOptions", "needs a feature gate that is off by default"),
    ):
        if cluster.get(field):
            yield Fault(joined(CLUSTER, field), reason)
    auth = cluster.get("authOptions") or {}
    version = tuple(int(part) for part in re.findall(r"\d+", cluster.get("rayVersion") or "0")[:2])
    if auth.get("mode") == "token" and version < (2, 52):
        yield Fault(joined(CLUSTER, "rayVersion"), "token auth needs 2.52.0 or later")
    if auth.get("enableK8sTokenAuth"):
        yield Fault(joined(CLUSTER, "authOptions/enableK8sTokenAuth"), "refused in a RayService")


def _worker_groups(cluster: dict[str, Any]) -> Iterator[Fault]:
    groups = cluster.get("workerGroupSpecs") or []
    names = [group.get("groupName") for group in groups]
    if len(set(names)) < len(names):
        yield Fault(joined(CLUSTER, "workerGroupSpecs"), f"groups need names of their own: {names}")
    for index, group in enumerate(groups):
        path = joined(CLUSTER, "workerGroupSpecs", index)
        low, high = group.get("minReplicas"), group.get("maxReplicas")
        if low is None or high is None:
            yield Fault(path, "needs minReplicas and maxReplicas")
        elif not 0 <= low <= group.get("replicas", low) <= high:
            yield Fault(
                path, f"needs minReplicas ({low}) <= replicas ({group.get('replicas')}) <= maxReplicas ({high})"
            )
        if cluster.get("enableInTreeAutoscaling") and "replicas" in group:
            yield Fault(joined(path, "replicas"), "leave it out: the autoscaler writes it")
        if not cluster.get("enableInTreeAutoscaling") and "replicas" not in group:
            yield Fault(joined(path, "replicas"), "needed without the autoscaler")
    for path, group in _groups(cluster):
        params = group.get("rayStartParams") or {}
        if "labels" in params:
            yield Fault(joined(path, "rayStartParams/labels"), "refused")
        if group.get("resources") and set(params) & set(RESOURCE_PARAMS):
            yield Fault(joined(path, "resources"), "resources are in rayStartParams or here, not both")


def _groups(cluster: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield joined(CLUSTER, "headGroupSpec"), cluster.get("headGroupSpec") or {}
    for index, group in enumerate(cluster.get("workerGroupSpecs") or []):
        yield joined(CLUSTER, "workerGroupSpecs", index), group


def _environment(group: dict[str, Any]) -> set[str]:
    containers = ((group.get("template") or {}).get("spec") or {}).get("containers") or []
    return {variable["name"] for container in containers for variable in container.get("env") or []}


def _autoscaler(cluster: dict[str, Any]) -> Iterator[Fault]:
    version = (cluster.get("autoscalerOptions") or {}).get("version")
    if cluster.get("autoscalerOptions") and not cluster.get("enableInTreeAutoscaling"):
        yield Fault(joined(CLUSTER, "autoscalerOptions"), "has no effect without enableInTreeAutoscaling")
    if version != "v2":
        return
    for path, group in _groups(cluster):
        policy = ((group.get("template") or {}).get("spec") or {}).get("restartPolicy")
        if policy not in (None, "Never"):
            yield Fault(joined(path, "template/spec/restartPolicy"), f"autoscaler v2 needs Never, not {policy}")
        if "RAY_enable_autoscaler_v2" in _environment(group):
            yield Fault(joined(path, "template/spec"), "RAY_enable_autoscaler_v2 beside autoscalerOptions.version")


def _redis(manifest: dict[str, Any], cluster: dict[str, Any]) -> Iterator[Fault]:
    options = cluster.get("gcsFaultToleranceOptions")
    annotations = manifest["metadata"].get("annotations") or {}
    if not options:
        return
    path = joined(CLUSTER, "gcsFaultToleranceOptions")
    if not options.get("redisAddress"):
        yield Fault(joined(path, "redisAddress"), "needed")
    if options.get("externalStorageNamespace"):
        yield Fault(
            joined(path, "externalStorageNamespace"), "leave it empty: a fixed one brings an old cluster's state back"
        )
    for field in ("redisUsername", "redisPassword"):
        if (options.get(field) or {}).get("value"):
            yield Fault(joined(path, field), "by valueFrom.secretKeyRef, never in the object")
    if "ray.io/ft-enabled" in annotations:
        yield Fault("metadata/annotations", "ray.io/ft-enabled is refused beside gcsFaultToleranceOptions")
    for where, group in _groups(cluster):
        for name in sorted(_environment(group) & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"}):
            yield Fault(joined(where, "template/spec"), f"{name} is refused beside gcsFaultToleranceOptions")
        if "redis-password" in (group.get("rayStartParams") or {}):
            yield Fault(joined(where, "rayStartParams"), "redis-password is refused beside gcsFaultToleranceOptions")


def _ray_pod(pod: PodTemplate) -> Iterator[Fault]:
    """The Ray container is the first one; the operator gives probes, a readiness that follows Serve, and /dev/shm unless we do."""
    where = joined(pod.path, "spec")
    ray = (pod.spec.get("containers") or [{}])[0]
    if pod.role == "head" and pod.params.get("num-cpus") != "0":
        yield Fault(
            joined(pod.path.removesuffix("/template"), "rayStartParams/num-cpus"), 'must be "0": the head takes no load'
        )
    if "startupProbe" in ray:
        yield Fault(joined(where, "containers/0/startupProbe"), "models load in Serve replicas, after the pod is ready")
    if pod.spec.get("enableServiceLinks") is not False:
        yield Fault(joined(where, "enableServiceLinks"), "must be false: ESPALIER_* variables are the server's options")
    for field in ("hostIPC", "hostPID", "hostNetwork"):
        if pod.spec.get(field):
            yield Fault(joined(where, field), "no host namespaces")
    yield from _shared_memory(pod, ray)


def _shared_memory(pod: PodTemplate, ray: dict[str, Any]) -> Iterator[Fault]:
    where = joined(pod.path, "spec")
    mounted = [mount["name"] for mount in ray.get("volumeMounts") or [] if mount.get("mountPath") == "/dev/shm"]
    if not mounted:
        yield Fault(joined(where, "containers/0/volumeMounts"), "nothing is mounted at /dev/shm")
        return
    volume = next((volume for volume in pod.spec.get("volumes") or [] if volume.get("name") == mounted[0]), {})
    memory = volume.get("emptyDir") or {}
    if memory.get("medium") != "Memory" or not memory.get("sizeLimit"):
        yield Fault(joined(where, "volumes"), f"volume {mounted[0]} must be in memory, with a sizeLimit")
        return
    limit = ((ray.get("resources") or {}).get("limits") or {}).get("memory")
    if limit and amount(memory["sizeLimit"]) >= amount(limit):
        yield Fault(
            joined(where, "volumes"), f"/dev/shm of {memory['sizeLimit']} counts against the memory limit of {limit}"
        )


SUFFIXES = {suffix: 1000**power for power, suffix in enumerate(("", "k", "M", "G", "T", "P", "E"))} | {
    f"{suffix}i": 1024 ** (power + 1) for power, suffix in enumerate("KMGTPE")
}


def amount(quantity: object) -> float:
    """Bytes of a quantity such as 8Gi."""
    match = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(quantity))
    assert match is not None and match[2] in SUFFIXES, quantity
    return float(match[1]) * SUFFIXES[match[2]]
