"""What only KubeRay's operator would refuse, and who listens where: each rule with a fault planted in a sound RayService."""

from typing import Any

import pytest

from tests.support.kube.ports import check_ports
from tests.support.kube.rayservice import amount, check_rayservice
from tests.support.kube.samples import DEPLOYMENT, RAYSERVICE, REMOVED, changed, sound

CLUSTER = "spec/rayClusterConfig"
HEAD, WORKER = f"{CLUSTER}/headGroupSpec", f"{CLUSTER}/workerGroupSpecs/0"
RAY = "template/spec/containers/0"
INCREMENTAL = {
    "type": "NewClusterWithIncrementalUpgrade",
    "clusterUpgradeOptions": {"gatewayClassName": "istio", "intervalSeconds": 10, "stepSizePercent": 10},
}
REDIS = {"redisAddress": "redis:6379"}


def test_a_sound_one_passes() -> None:
    assert check_rayservice(sound(RAYSERVICE)) == []
    assert check_ports(sound(RAYSERVICE)) == []


def test_other_kinds_are_not_its_business() -> None:
    assert check_rayservice(sound(DEPLOYMENT)) == []
    assert check_ports(sound(DEPLOYMENT)) == []


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("metadata/name", "a" * 48, "metadata/name: must be DNS-1035 of at most 47"),
        ("metadata/name", "7b-model", "metadata/name: must be DNS-1035"),
        ("spec/upgradeStrategy/type", "Rolling", "spec/upgradeStrategy/type: must say one of NewCluster, None"),
        ("spec/upgradeStrategy", REMOVED, "spec/upgradeStrategy/type: must say one of"),
        ("spec/upgradeStrategy", INCREMENTAL, "enableInTreeAutoscaling: an incremental upgrade needs it"),
        ("spec/upgradeStrategy", INCREMENTAL, "refuse it while gRPC is published"),
        ("spec/upgradeStrategy", {"type": INCREMENTAL["type"]}, "gatewayClassName: an incremental upgrade needs it"),
        ("spec/upgradeStrategy", {"type": INCREMENTAL["type"]}, "intervalSeconds: must be positive"),
        (
            "spec/upgradeStrategy",
            INCREMENTAL | {"clusterUpgradeOptions": {"stepSizePercent": 60, "maxSurgePercent": 50}},
            "needs 0 <= stepSizePercent (60) <= maxSurgePercent (50) <= 100",
        ),
        (f"{HEAD}/{RAY}/ports/0/name", "http", "no port is named serve, so there would be no Service"),
        (f"{HEAD}/{RAY}/ports", REMOVED, "no port is named serve"),
        ("spec/serveService", REMOVED, "port serve-grpc needs appProtocol kubernetes.io/h2c"),
        ("spec/serveService/spec/ports/0/appProtocol", "grpc", "port serve-grpc needs appProtocol kubernetes.io/h2c"),
        ("spec/serveService/spec/ports/0/name", "grpc", "port grpc is none of the head's, so it is not published"),
        (f"{HEAD}/headService", {"metadata": {"name": "x"}}, f"{HEAD}/headService/metadata/name: must be empty"),
        ("spec/serveConfigV2", "", "spec/serveConfigV2: lists no applications"),
        ("spec/serveConfigV2", "a: [", "spec/serveConfigV2: is not YAML"),
        ("spec/serveConfigV2", "applications: [{name: a, import_path: b}]", "import_path must be module:attribute"),
        (
            "spec/serveConfigV2",
            "applications: [{name: a, import_path: 'b:c'}, {name: a, import_path: 'b:c'}]",
            "applications need names of their own",
        ),
        (
            "spec/serveConfigV2",
            "applications: [{name: a, import_path: 'b:c', route_prefix: /}, {name: d, import_path: 'b:c', route_prefix: /}]",
            "applications share a route_prefix",
        ),
        (f"{CLUSTER}/upgradeStrategy", {"type": "Recreate"}, "is a RayCluster's own; refused in a RayService"),
        (f"{CLUSTER}/networkPolicy", {"mode": "x"}, "networkPolicy: needs a feature gate"),
        (f"{CLUSTER}/tlsOptions", {"enabled": True}, "tlsOptions: needs a feature gate"),
        (f"{CLUSTER}/authOptions", {"enableK8sTokenAuth": True}, "enableK8sTokenAuth: refused in a RayService"),
        (f"{WORKER}/maxReplicas", REMOVED, "needs minReplicas and maxReplicas"),
        (f"{WORKER}/replicas", 3, "needs minReplicas (1) <= replicas (3) <= maxReplicas (2)"),
        (f"{WORKER}/replicas", REMOVED, "replicas: needed without the autoscaler"),
        (f"{CLUSTER}/enableInTreeAutoscaling", True, "replicas: leave it out: the autoscaler writes it"),
        (f"{CLUSTER}/autoscalerOptions", {"version": "v1"}, "no effect without enableInTreeAutoscaling"),
        (f"{CLUSTER}/workerGroupSpecs/1", {"groupName": "gpu"}, "groups need names of their own"),
        (f"{WORKER}/rayStartParams/labels", "a=b", "rayStartParams/labels: refused"),
        (f"{HEAD}/resources", {"CPU": "1"}, "resources are in rayStartParams or here, not both"),
        (f"{HEAD}/rayStartParams/num-cpus", REMOVED, f'{HEAD}/rayStartParams/num-cpus: must be "0"'),
        (f"{WORKER}/{RAY}/startupProbe", {"exec": {"command": ["a"]}}, "models load in Serve replicas"),
        (f"{WORKER}/template/spec/enableServiceLinks", REMOVED, "enableServiceLinks: must be false"),
        (f"{HEAD}/template/spec/hostIPC", True, "hostIPC: no host namespaces"),
        (f"{WORKER}/{RAY}/volumeMounts", REMOVED, "nothing is mounted at /dev/shm"),
        (f"{WORKER}/template/spec/volumes/0/emptyDir/medium", REMOVED, "shm must be in memory, with a sizeLimit"),
        (f"{WORKER}/template/spec/volumes/0/emptyDir/sizeLimit", "4Gi", "counts against the memory limit of 4Gi"),
    ],
)
def test_a_planted_fault_is_found(path: str, value: Any, fault: str) -> None:
    assert fault in "\n".join(map(str, check_rayservice(changed(sound(RAYSERVICE), path, value))))


def test_an_incremental_upgrade_of_an_http_install_passes() -> None:
    manifest = changed(sound(RAYSERVICE), "spec/upgradeStrategy", INCREMENTAL)
    manifest = changed(manifest, f"{CLUSTER}/enableInTreeAutoscaling", True)
    for path in (f"{WORKER}/replicas", f"{HEAD}/{RAY}/ports/1", "spec/serveService"):
        manifest = changed(manifest, path, REMOVED)
    assert check_rayservice(manifest) == []


def test_token_auth_needs_a_ray_that_has_it() -> None:
    manifest = changed(sound(RAYSERVICE), f"{CLUSTER}/authOptions", {"mode": "token"})
    assert check_rayservice(manifest) == []
    assert "2.52" in str(check_rayservice(changed(manifest, f"{CLUSTER}/rayVersion", "2.9.3"))[0])


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (f"{HEAD}/template/spec/restartPolicy", "Always", "autoscaler v2 needs Never, not Always"),
        (f"{HEAD}/{RAY}/env", [{"name": "RAY_enable_autoscaler_v2"}], "beside autoscalerOptions.version"),
    ],
)
def test_autoscaler_v2(path: str, value: Any, fault: str) -> None:
    manifest = changed(sound(RAYSERVICE), f"{CLUSTER}/enableInTreeAutoscaling", True)
    manifest = changed(
        changed(manifest, f"{CLUSTER}/autoscalerOptions", {"version": "v2"}), f"{WORKER}/replicas", REMOVED
    )
    assert check_rayservice(manifest) == []
    (found,) = check_rayservice(changed(manifest, path, value))
    assert fault in found.message


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (f"{CLUSTER}/gcsFaultToleranceOptions/redisAddress", REMOVED, "redisAddress: needed"),
        (f"{CLUSTER}/gcsFaultToleranceOptions/externalStorageNamespace", "x", "leave it empty"),
        (f"{CLUSTER}/gcsFaultToleranceOptions/redisPassword", {"value": "x"}, "by valueFrom.secretKeyRef"),
        ("metadata/annotations", {"ray.io/ft-enabled": "true"}, "ray.io/ft-enabled is refused"),
        (f"{HEAD}/{RAY}/env", [{"name": "RAY_REDIS_ADDRESS", "value": "x"}], "RAY_REDIS_ADDRESS is refused"),
        (f"{HEAD}/rayStartParams/redis-password", "x", "redis-password is refused"),
    ],
)
def test_fault_tolerance(path: str, value: Any, fault: str) -> None:
    manifest = changed(sound(RAYSERVICE), f"{CLUSTER}/gcsFaultToleranceOptions", {**REDIS, "backend": "redis"})
    assert check_rayservice(manifest) == []
    (found,) = check_rayservice(changed(manifest, path, value))
    assert fault in str(found)


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (
            f"{WORKER}/rayStartParams/metrics-export-port",
            "8000",
            "port 8000: Ray's metrics-export-port and the gateway's",
        ),
        (f"{HEAD}/rayStartParams/port", "8265", "port 8265: Ray's port and Ray's dashboard-port"),
        (f"{HEAD}/rayStartParams/node-manager-port", "50051", "port 50051: Ray's node-manager-port and the gateway's"),
        (
            f"{WORKER}/rayStartParams",
            {"min-worker-port": "8000", "max-worker-port": "8100"},
            "port 8080 of Ray's metrics-export-port is in the range of Ray's workers, 8000 to 8100",
        ),
        (f"{HEAD}/{RAY}/ports/0/containerPort", 8001, "ports: nothing listens on 8001 (serve)"),
        (
            f"{HEAD}/template/spec/containers/1",
            {"name": "side", "image": "a", "ports": [{"containerPort": 6379}]},
            "port 6379: Ray's port and container 'side'",
        ),
        (
            "spec/serveConfigV2",
            "applications: [{name: a, import_path: 'b:gateway', args: {http_port: 8000}}]",
            "port 8000: Serve's HTTP proxy and the gateway's http_port",
        ),
        (
            "spec/serveConfigV2",
            "{http_options: {port: 8001}, grpc_options: {port: 50051, grpc_servicer_functions: [a]}, applications: "
            "[{name: a, import_path: 'b:gateway', args: {http_port: 8000}}]}",
            "port 50051: Serve's gRPC proxy and the gateway's grpc_port",
        ),
    ],
)
def test_two_listeners_of_a_pod_on_one_port(path: str, value: Any, fault: str) -> None:
    assert fault in "\n".join(map(str, check_ports(changed(sound(RAYSERVICE), path, value))))


def test_the_dashboard_and_the_head_only_proxy_are_not_on_workers() -> None:
    manifest = changed(sound(RAYSERVICE), f"{WORKER}/rayStartParams/metrics-export-port", "8265")
    assert check_ports(manifest) == []
    config = "{proxy_location: HeadOnly, http_options: {port: 8265}, applications: [{name: a, import_path: 'b:gateway', args: {http_port: 8000}}]}"
    faults = check_ports(changed(manifest, "spec/serveConfigV2", config))
    assert {fault.path.split("/")[2] for fault in faults if "8265" in fault.message} == {"headGroupSpec"}


@pytest.mark.parametrize(("text", "number"), [("8Gi", 8 * 2**30), ("1.5G", 1.5e9), ("7", 7), (7, 7)])
def test_amounts(text: object, number: float) -> None:
    assert amount(text) == number
