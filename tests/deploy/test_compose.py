"""The local stack of deploy/compose.yaml: what its files say fits together. Nothing is started: that takes a container engine."""

import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

import espalier
from espalier.cluster.options import BY_NAME
from espalier.deploy.config import resolve
from tests.support.tools import require_tool

SERVICE_KEYS = {
    "build", "cap_drop", "command", "depends_on", "environment", "healthcheck", "image", "ports", "read_only", "restart", "security_opt",
    "shm_size", "stop_grace_period", "tmpfs", "volumes",
}  # fmt: skip
HEALTH_KEYS = {"test", "interval", "timeout", "retries", "start_period"}


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return root / "deploy"


@pytest.fixture(scope="module")
def stack(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())
    return content


def mounts(service: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """(source, target, read only) of each volume of a service; variables stand for their defaults."""
    found = []
    for text in service["volumes"]:
        source, target, *mode = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).split(":")
        assert mode in ([], ["ro"]), text
        found.append((source, target, bool(mode)))
    return found


def test_only_known_keys(stack: dict[str, Any], folder: Path) -> None:
    assert set(stack) == {"name", "services", "volumes"}
    for name, service in stack["services"].items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service["healthcheck"]) == HEALTH_KEYS, name
        assert service["healthcheck"]["test"][0] == "CMD"
        for other, how in service.get("depends_on", {}).items():
            assert other in stack["services"]
            assert how == {"condition": "service_healthy"}
    gpu = yaml.safe_load((folder / "compose" / "gpu.yaml").read_text())
    assert set(gpu) == {"services"}
    assert set(gpu["services"]) == {"server"}
    assert set(gpu["services"]["server"]) == {"image", "build", "deploy"}


def test_images_are_pinned_and_the_server_is_built_from_the_one_file(stack: dict[str, Any], folder: Path) -> None:
    for service in stack["services"].values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-cpu)?", service["image"])
    gpu = yaml.safe_load((folder / "compose" / "gpu.yaml").read_text())["services"]["server"]
    server = stack["services"]["server"]
    assert server["image"] == f"espalier:{espalier.__version__}-cpu"
    assert gpu["image"] == f"espalier:{espalier.__version__}"
    dockerfile = folder / server["build"]["context"] / server["build"]["dockerfile"]
    declared = set(re.findall(r"^ARG (\w+)", dockerfile.read_text(), re.MULTILINE))
    assert {*server["build"]["args"], *gpu["build"]["args"]} <= declared
    assert (folder / server["build"]["context"] / server["build"]["args"]["CONSTRAINT"]).is_file()


def test_mounts_exist_and_files_are_read_only(stack: dict[str, Any], folder: Path) -> None:
    named = set()
    for service in stack["services"].values():
        targets = [target for _, target, _ in mounts(service)]
        assert len(set(targets)) == len(targets)
        for source, _, read_only in mounts(service):
            if source.startswith("."):
                assert (folder / source).exists(), source
                assert read_only, source
            else:
                named.add(source)
    assert named == set(stack["volumes"])


def test_ports_are_published_on_loopback_only(stack: dict[str, Any]) -> None:
    published = [text.split(":") for service in stack["services"].values() for text in service["ports"]]
    assert {address for address, _, _ in published} == {"127.0.0.1"}
    host_ports = [port for _, port, _ in published]
    assert len(set(host_ports)) == len(host_ports)


def test_health_checks_ask_a_port_that_the_container_listens_on(stack: dict[str, Any]) -> None:
    for service in stack["services"].values():
        url = service["healthcheck"]["test"][-1]
        inside = {text.split(":")[2] for text in service["ports"]}
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/[\w/-]+", url)
        assert found is not None
        assert found[1] in inside


def test_the_server_reads_its_file_and_listens_where_ports_lead(stack: dict[str, Any], folder: Path) -> None:
    server = stack["services"]["server"]
    config = server["command"][server["command"].index("--config") + 1]
    (source,) = [source for source, target, _ in mounts(server) if target == config]
    settings = resolve({}, {}, config_file=str(folder / source))
    common = {name: setting.value for name, setting in settings.common.items()}
    assert common["host"] == "0.0.0.0"
    inside = {int(text.split(":")[2]) for text in server["ports"]}
    assert inside == {common.get(name, BY_NAME[name].default) for name in ("http_port", "grpc_port")}


def test_prometheus_scrapes_the_server_and_reads_the_charts_rules(stack: dict[str, Any], folder: Path) -> None:
    config = yaml.safe_load((folder / "compose" / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    (static,) = job["static_configs"]
    (target,) = static["targets"]
    service, port = target.split(":")
    assert port in {text.split(":")[2] for text in stack["services"][service]["ports"]}
    by_target = {target: folder / source for source, target, _ in mounts(stack["services"]["prometheus"])}
    (pattern,) = config["rule_files"]
    where = PurePosixPath("/etc/prometheus") / pattern
    assert [path.name for path in sorted(by_target[str(where.parent)].glob(where.name))] == [
        "alerts.yaml",
        "recording.yaml",
    ]


@pytest.mark.deploy
def test_promtool_accepts_the_configuration(folder: Path, tmp_path: Path) -> None:
    require_tool("promtool")
    # Laid out as in the container, so that the rules are found and checked too.
    (tmp_path / "prometheus.yml").write_text((folder / "compose" / "prometheus.yaml").read_text())
    (tmp_path / "rules").symlink_to(folder.parent / "helm" / "espalier" / "files" / "rules")
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rule files found" in done.stdout


def test_grafana_finds_prometheus_and_the_charts_boards(stack: dict[str, Any], folder: Path) -> None:
    by_target = {target: folder / source for source, target, _ in mounts(stack["services"]["grafana"])}
    provisioning = by_target["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    # The boards' variable takes the default source of its type.
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    service, port = source["url"].removeprefix("http://").split(":")
    assert port in {text.split(":")[2] for text in stack["services"][service]["ports"]}
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "espalier.yaml").read_text())["providers"]
    boards = by_target[provider["options"]["path"]]
    assert {path.stem for path in boards.glob("*.json")} == {"serving", "engine", "cluster"}
    home = PurePosixPath(stack["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (by_target[str(home.parent)] / home.name).is_file()
