"""The rule files: promtool takes and tests them, every alert is tested both ways and has its texts, and they read only what is exported."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from espalier.cluster.audit_decisions import AuditResult
from espalier.cluster.metrics import ClusterMetrics, EngineSnapshot
from espalier.replicas.stats import EngineStats
from tests.support.tools import require_tool

pytestmark = pytest.mark.deploy

RULES = Path("helm/espalier/files/rules")
UNIT_TESTS = Path("tests/helm/rules")
NAME = re.compile(r"\b(?:(?:replica|model|gateway):)?espalier_\w+(?::\w+)?")
ANNOTATIONS = {"summary", "description", "runbook"}


def document(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rules(root: Path, file: str) -> list[dict[str, Any]]:
    return [rule for group in document(root / RULES / file)["groups"] for rule in group["rules"]]


def alerts(root: Path) -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules(root, "alerts.yaml")}


def recorded(root: Path) -> list[str]:
    return [rule["record"] for rule in rules(root, "recording.yaml")]


def promtool(root: Path, *arguments: str | Path) -> None:
    require_tool("promtool")
    done = subprocess.run(["promtool", *arguments], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def exported() -> set[str]:
    """Names of all samples that a gateway with keys and audits exports."""
    metrics = ClusterMetrics(version="1")
    metrics.count_api_keys(lambda: 1)
    metrics.model_served("m")
    metrics.model_audited("m", AuditResult)
    metrics.replicas_configured("m", 1)
    metrics.http_request("/health", 200)
    metrics.client_disconnect("http")
    engine = EngineSnapshot(model="m", replica="r", stats=EngineStats(), outstanding_tokens=0, progress_at=0.0)
    text = metrics.render([], [engine]).decode()
    samples = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    # Needs a served model's ModelInfo, which says nothing here.
    return samples | {"espalier_model_ready_replicas"}


def unit_tests(root: Path) -> Iterator[dict[str, Any]]:
    """Every single check of an alert."""
    for path in sorted((root / UNIT_TESTS).glob("*.test.yaml")):
        for test in document(path)["tests"]:
            yield from test.get("alert_rule_test", [])


@pytest.mark.parametrize("file", ["recording.yaml", "alerts.yaml"])
def test_promtool_finds_nothing(root: Path, file: str) -> None:
    promtool(root, "check", "rules", "--lint=all", "--lint-fatal", RULES / file)


def test_there_is_no_other_file(root: Path) -> None:
    """The chart and compose take all of the folder."""
    assert {path.name for path in (root / RULES).iterdir()} == {"recording.yaml", "alerts.yaml"}


def test_unit_tests_pass(root: Path) -> None:
    files = sorted((root / UNIT_TESTS).glob("*.test.yaml"))
    assert files
    promtool(root, "test", "rules", *(path.relative_to(root) for path in files))


def test_every_alert_is_seen_to_fire_and_not_to(root: Path) -> None:
    fires = {check["alertname"] for check in unit_tests(root) if check["exp_alerts"]}
    rests = {check["alertname"] for check in unit_tests(root) if not check["exp_alerts"]}
    assert fires == rests == set(alerts(root))


def test_every_for_is_tested(root: Path, tmp_path: Path) -> None:
    """Without its `for` every alert fires too early for its unit test."""
    require_tool("promtool")
    for folder in (RULES, UNIT_TESTS):
        shutil.copytree(root / folder, tmp_path / folder)
    hasty = document(root / RULES / "alerts.yaml")
    waiting = {rule["alert"] for group in hasty["groups"] for rule in group["rules"] if rule.pop("for", None)}
    (tmp_path / RULES / "alerts.yaml").write_text(yaml.safe_dump(hasty))
    command = ["promtool", "test", "rules", *(str(path) for path in (tmp_path / UNIT_TESTS).iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr)) == waiting


def test_every_alert_says_what_to_do(root: Path) -> None:
    guide = (root / "docs" / "alerts.md").read_text()
    anchors = {line.removeprefix("## ").lower().replace(" ", "-") for line in guide.splitlines() if line[:3] == "## "}
    for name, rule in alerts(root).items():
        assert rule["labels"].keys() == {"severity"}, name
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert rule["annotations"].keys() == ANNOTATIONS, name
        assert "$value" in rule["annotations"]["description"] or name == "EspalierGatewayDown", name
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/alerts.md" and anchor in anchors, name
        assert f"`{name}`" in guide, name


def test_names_say_their_level(root: Path) -> None:
    names = recorded(root)
    assert len(set(names)) == len(names)
    for rule in rules(root, "recording.yaml"):
        level, metric, operation = rule["record"].split(":")
        assert level in ("replica", "model", "gateway") and metric.startswith("espalier_") and operation, rule["record"]


@pytest.mark.parametrize("file", ["recording.yaml", "alerts.yaml"])
def test_rules_read_what_is_exported_or_recorded(root: Path, file: str) -> None:
    known = exported() | set(recorded(root))
    used = {name for rule in rules(root, file) for name in NAME.findall(rule["expr"])}
    assert used
    assert used - known == set()
