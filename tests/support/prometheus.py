"""A real Prometheus on a free loopback port, scraping one server with given rule files, and the few questions that tests ask it."""

import json
import math
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

START_TIMEOUT_S = 30.0
JOB = "espalier"


class QueryError(Exception):
    """Prometheus refused a query; the message is its own."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of an answer: its labels, and (unix time, value) points."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def finite(self) -> list[float]:
        """Values that can be drawn."""
        return [value for _, value in self.points if math.isfinite(value)]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A server to ask."""

    url: str

    def over(self, expr: str, start: float, end: float, step_s: float) -> list[Series]:
        """The series of a range query."""
        data = self._get("query_range", {"query": expr, "start": f"{start}", "end": f"{end}", "step": f"{step_s}"})
        return [_series(item["metric"], item["values"]) for item in data["result"]]

    def now(self, expr: str) -> list[Series]:
        """The series of an instant query for a vector."""
        return [_series(item["metric"], [item["value"]]) for item in self._get("query", {"query": expr})["result"]]

    def label_values(self, label: str, selector: str | None = None) -> list[str]:
        """Values of a label, of the selected series or of all; `__name__` gives the names of metrics."""
        values: list[str] = self._get(f"label/{label}/values", {"match[]": selector} if selector else {})
        return values

    def targets(self) -> list[dict[str, Any]]:
        """Active targets, each with `health` and `lastError`."""
        targets: list[dict[str, Any]] = self._get("targets", {"state": "active"})["activeTargets"]
        return targets

    def _get(self, path: str, params: Mapping[str, str]) -> Any:
        body = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=30).json()
        if body["status"] != "success":
            raise QueryError(body["error"])
        return body["data"]


def _series(labels: Mapping[str, str], points: Sequence[tuple[float, str]]) -> Series:
    return Series(labels, tuple((float(when), float(value)) for when, value in points))


@contextmanager
def scraping(folder: Path, address: str, rules: Sequence[Path] = (), interval_s: int = 1) -> Iterator[Prometheus]:
    """Scrape `address` (host:port) and evaluate `rules` every interval_s, until the block ends. Everything is kept in `folder`.

    The rules run at that interval whatever theirs is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copies = [_hurried(rule, folder) for rule in rules]
    config = {
        "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
        "rule_files": [str(copy) for copy in copies],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [address]}]}],
    }
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    with serving(folder) as prometheus:
        yield prometheus


@contextmanager
def serving(folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus on the configuration and the data that are in `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    log = folder / "prometheus.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    try:
        _wait_until_ready(server, prometheus, log)
        yield prometheus
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _hurried(rules: Path, folder: Path) -> Path:
    document = yaml.safe_load(rules.read_text())
    for group in document["groups"]:
        group.pop("interval", None)
    copy = folder / rules.name
    copy.write_text(yaml.safe_dump(document))
    return copy


def _wait_until_ready(server: "subprocess.Popen[bytes]", prometheus: Prometheus, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"prometheus ended: {log.read_text()}"
        try:
            if httpx.get(f"{prometheus.url}/-/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"prometheus is not ready after {START_TIMEOUT_S} s: {log.read_text()}")
