"""The chart rendered by Helm 4: every example, two Kubernetes versions, with and without operators' APIs; every object is valid and does its part."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.support.kube.chart import (
    API_VERSIONS,
    CHART,
    EXAMPLES,
    KUBE_VERSIONS,
    differences,
    overlaid,
    ray_service,
    rendered,
    values_of,
)
from tests.support.kube.helm import Rendered, RenderRefusedError, lint, package, render
from tests.support.kube.objects import check_object
from tests.support.kube.pods import PodTemplate, pod_templates
from tests.support.kube.ports import serve_config
from tests.support.kube.release import check_release, label
from tests.support.tools import require_module

pytestmark = pytest.mark.deploy
NAMES = [*EXAMPLES, "minimal", "everything"]


@pytest.fixture(autouse=True)
def tools() -> None:
    for module in ("helm_python", "kubernetes_validate", "celpy"):
        require_module(module)


def pods(found: Rendered) -> list[tuple[str, PodTemplate]]:
    return [(label(manifest), pod) for manifest in found.manifests for pod in pod_templates(manifest)]


def test_the_examples_are_those_that_the_readme_promises() -> None:
    assert len(EXAMPLES) >= 4
    readme = (CHART / "README.md").read_text()
    assert [name for name in EXAMPLES if name not in readme] == []


@pytest.mark.parametrize("api", API_VERSIONS)
@pytest.mark.parametrize("kube_version", KUBE_VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_valid(name: str, kube_version: str, api: str) -> None:
    found = rendered(name, kube_version=kube_version, api_versions=API_VERSIONS[api])
    faults = [f"{label(each)}: {fault}" for each in found.manifests for fault in check_object(each, kube_version)]
    assert faults + [str(fault) for fault in check_release(found.manifests)] == []
    assert len(found.of_kind("RayService")) == 1


@pytest.mark.parametrize("name", NAMES)
def test_lint_finds_nothing(name: str) -> None:
    assert lint(CHART, values_of(name)) == []


def test_everything_renders_every_kind() -> None:
    kinds = {manifest["kind"] for manifest in rendered("everything").manifests}
    assert kinds >= {
        *(
            "ConfigMap",
            "GRPCRoute",
            "HTTPRoute",
            "Ingress",
            "NetworkPolicy",
            "PersistentVolumeClaim",
            "PodDisruptionBudget",
        ),
        *("PodMonitor", "PrometheusRule", "RayService", "Service", "ServiceAccount", "ServiceMonitor"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_rendering_and_packaging_give_the_same_bytes_twice(name: str, tmp_path: Any) -> None:
    assert rendered(name).text == rendered(name).text
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, second = (package(CHART, folder).read_bytes() for folder in folders)
    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_every_pod_is_locked_down(name: str) -> None:
    for where, pod in pods(rendered(name)):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True, where
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert pod.spec["enableServiceLinks"] is False, where
        token = pod.spec["automountServiceAccountToken"]
        # The autoscaler in the head asks the API server for pods.
        assert token is (pod.role == "head" and name == "everything"), where
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec), where
        for path, container in pod.containers:
            locked = container["securityContext"]
            assert locked["allowPrivilegeEscalation"] is False, (where, path)
            assert locked["readOnlyRootFilesystem"] is True, (where, path)
            assert locked["capabilities"] == {"drop": ["ALL"]}, (where, path)
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), (where, path)
            assert "memory" in container["resources"]["limits"], (where, path)


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_is_in_what_is_rendered(name: str) -> None:
    found = rendered(name)
    assert found.of_kind("Secret") == []
    for where, pod in pods(found):
        for _, container in pod.containers:
            for variable in container.get("env") or []:
                if re.search(r"TOKEN|KEY|PASSWORD|SECRET", variable["name"]):
                    assert "value" not in variable, (where, variable["name"])
                    assert "secretKeyRef" in variable["valueFrom"], (where, variable["name"])


def test_caches_are_written_to_volumes() -> None:
    for where, pod in pods(rendered("everything")):
        if pod.role == "pod":
            continue
        ray = pod.spec["containers"][0]
        writable = [mount["mountPath"] for mount in ray["volumeMounts"] if not mount.get("readOnly")]
        folders = {entry["name"]: entry["value"] for entry in ray["env"] if str(entry.get("value", "")).startswith("/")}
        assert {"HOME", "HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"} <= folders.keys(), where
        for variable, folder in folders.items():
            assert any(folder == path or folder.startswith(f"{path}/") for path in writable), (where, variable)
        assert "/tmp" in writable, where


@pytest.mark.parametrize("name", NAMES)
def test_a_new_image_tag_changes_the_image_and_nothing_else(name: str) -> None:
    before, after = (rendered(name, {"image": {"tag": tag, "digest": ""}}) for tag in ("1.0.0", "1.0.1"))
    changes = differences(before, after)
    assert {path.rpartition("/")[2] for path in changes} == {"image"}
    assert any(path.startswith("RayService/") for path in changes)


SMALL = values_of("minimal")["models"][0]


@pytest.mark.parametrize(
    "over",
    [
        {"gateway": {"options": {"max_outstanding": 77}}},
        {"models": [SMALL | {"options": {"batch_tokens": 777}}]},
        {"options": {"log_level": "debug"}},
    ],
    ids=["gateway", "model", "all"],
)
def test_options_change_in_place(over: dict[str, Any]) -> None:
    """Only serveConfigV2 moves, which KubeRay applies to the running cluster; anything else would want a second set of GPUs."""
    changes = differences(rendered("minimal"), rendered("minimal", over))
    assert changes == {"RayService/rel-espalier/spec/serveConfigV2"}


def test_more_replicas_change_in_place() -> None:
    """Replicas of a group are the one thing of rayClusterConfig whose change makes no second cluster."""
    changes = differences(rendered("minimal"), rendered("minimal", {"models": [SMALL | {"options": {"replicas": 5}}]}))
    spec = "RayService/rel-espalier/spec"
    assert changes == {f"{spec}/serveConfigV2", f"{spec}/rayClusterConfig/workerGroupSpecs/1/replicas"}


def test_gateways_change_in_place() -> None:
    changes = differences(rendered("minimal"), rendered("minimal", {"gateway": {"replicas": 3}}))
    assert "RayService/rel-espalier/spec/rayClusterConfig/workerGroupSpecs/0/replicas" in changes
    assert not {path for path in changes if "rayClusterConfig" in path and not path.endswith("/replicas")}


@pytest.mark.parametrize("name", NAMES)
def test_the_serve_config_is_one_that_ray_accepts(name: str) -> None:
    # Ray takes seconds to import, and `make test` collects this file.
    from ray.serve.schema import ServeDeploySchema

    values = values_of(name)
    config = serve_config(ray_service(rendered(name)))
    parsed = ServeDeploySchema.model_validate(config)
    assert len(parsed.applications) == len(values["models"]) + 1
    paths = {application.import_path.partition(":")[0] for application in parsed.applications}
    assert paths == {"espalier.cluster.serve_config"}


def holders(application: dict[str, Any], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of pods that have the Ray resource which the application's processes ask for."""
    asked = application["args"]["resources"].keys()
    return [group for group in groups if asked <= (group.get("resources") or {}).keys()]


@pytest.mark.parametrize("name", NAMES)
def test_every_process_has_one_group_of_pods_with_its_files(name: str) -> None:
    spec = ray_service(rendered(name))["spec"]
    groups = spec["rayClusterConfig"]["workerGroupSpecs"]
    for application in yaml.safe_load(spec["serveConfigV2"])["applications"]:
        (group,) = holders(application, groups)
        mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
        args = application["args"]
        files = [model["model"] for model in args.get("models", [args])] + [
            args[key] for key in args if key == "api_key_file"
        ]
        for file in files:
            assert any(file == mount["mountPath"] or file.startswith(f"{mount['mountPath']}/") for mount in mounts), (
                file
            )
    assert sorted(group["groupName"] for group in groups) == sorted(
        group["groupName"]
        for application in yaml.safe_load(spec["serveConfigV2"])["applications"]
        for group in holders(application, groups)
    )


@pytest.mark.parametrize("name", NAMES)
def test_gpus_and_shared_memory_are_what_the_values_say(name: str) -> None:
    values = values_of(name)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["workers"]
    workers = overlaid(defaults, values.get("workers") or {})
    groups = ray_service(rendered(name))["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    by_model = [group for group in groups if "gateway" not in group["groupName"]]
    for model, group in zip(values["models"], by_model, strict=True):
        settings = overlaid(workers, model)
        ray = group["template"]["spec"]["containers"][0]
        limits = ray["resources"]["limits"]
        count = int(limits.get(settings["gpu"]["resourceName"], 0))
        assert count == model.get("options", {}).get("gpus", 0), group["groupName"]
        (shm,) = [volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": settings["shm"]["size"]}


def test_grpc_is_h2c_behind_its_service() -> None:
    ports = {
        port["name"]: port
        for service in rendered("minimal").of_kind("Service")
        for port in service["spec"]["ports"]
        if "grpc" in port["name"]
    }
    assert ports
    assert {port["appProtocol"] for port in ports.values()} == {"kubernetes.io/h2c"}


def test_labels_and_annotations_reach_every_object_and_no_selector() -> None:
    found = rendered("everything")
    ours = [manifest for manifest in found.manifests if not manifest["metadata"]["name"].endswith("-extra")]
    assert {label(m): m["metadata"]["labels"].get("team") for m in ours} == {label(m): "inference" for m in ours}
    assert all(m["metadata"]["annotations"]["example.org/contact"] == "inference" for m in ours)
    assert not [m for m in ours if "team" in json.dumps((m.get("spec") or {}).get("selector") or {})]
    assert not [m for m in ours if "team" in json.dumps((m.get("spec") or {}).get("podSelector") or {})]


def test_the_namespace_and_release_are_in_templates_of_extra_objects() -> None:
    (extra,) = [m for m in rendered("everything").manifests if m["metadata"]["name"] == "rel-extra"]
    assert extra["data"] == {"namespace": "llm"}


def test_boards_and_rules_are_those_of_the_files() -> None:
    found = rendered("everything")
    boards = {
        name: text for m in found.of_kind("ConfigMap") for name, text in m["data"].items() if name.endswith(".json")
    }
    files = sorted((CHART / "files" / "dashboards").glob("*.json"))
    assert files
    assert {path.name: json.loads(path.read_text()) for path in files} == {k: json.loads(v) for k, v in boards.items()}
    groups = [group for rule in found.of_kind("PrometheusRule") for group in rule["spec"]["groups"]]
    written = [
        group
        for path in sorted((CHART / "files" / "rules").glob("*.yaml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    assert written
    assert sorted(groups, key=lambda group: group["name"]) == sorted(written, key=lambda group: group["name"])


def test_a_long_release_name_is_shortened() -> None:
    found = rendered("minimal", name="a-release-whose-name-is-as-long-as-helm-lets-it-be-xx")
    assert len(ray_service(found)["metadata"]["name"]) <= 47
    faults = [f"{label(m)}: {fault}" for m in found.manifests for fault in check_object(m, "1.31")]
    assert faults + [str(fault) for fault in check_release(found.manifests)] == []


def test_notes_say_what_an_operator_must_know() -> None:
    notes = rendered("minimal").notes
    assert "second cluster" in notes
    assert "without API keys" in notes
    assert "twice the GPUs" not in notes
    assert (
        "twice the GPUs: 1 more"
        in rendered("values-single-gpu.yaml", {"upgradeStrategy": {"type": "NewCluster"}}).notes
    )
    quiet = rendered("everything", {"upgradeStrategy": {"type": "None"}}).notes
    assert "second cluster" not in quiet
    assert "without API keys" not in quiet
    assert "llm.example.org" in quiet


def test_fault_tolerance_bounds_its_clean_up() -> None:
    service = ray_service(rendered("everything"))
    assert service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"] == "redis:6379"
    assert "ray.io/gcs-ft-deletion-timeout" in json.dumps(service)


def test_without_models_nothing_is_rendered() -> None:
    with pytest.raises(RenderRefusedError, match="models"):
        render(CHART, {})
