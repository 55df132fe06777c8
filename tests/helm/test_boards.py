"""The boards in a real Prometheus with the recording rules, over a real cluster under load: every query is accepted and shows something."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import board_load, prometheus, served_process
from tests.support.boards import Window, live_faults, metric_names, parse_faults, queries
from tests.support.tiny import make_tiny_checkpoint
from tests.support.tools import require_module, require_tool
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.cluster]

BOARDS = ("serving", "engine", "cluster")
FILES = Path("helm/espalier/files")
# Panel title -> why it may show nothing.
MAY_BE_EMPTY = dict.fromkeys(
    ("GPU memory in use", "Graph replays", "Captures, growths, resets"), "engines on a CPU have no such figures"
)
LOAD = (board_load.Phase(seconds=12, clients=8),)


def board(root: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((root / FILES / "dashboards" / f"{name}.json").read_text())
    return document


@pytest.fixture(scope="module")
def scraped(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[prometheus.Prometheus, Window]]:
    """A Prometheus that watched a cluster through load and the loss of a replica, and when that was."""
    require_tool("prometheus")
    folder = tmp_path_factory.mktemp("boards")
    options = board_load.served_options(make_tiny_checkpoint(folder / "tiny"), folder / "cache")
    rules = sorted((root / FILES / "rules").glob("*.yaml"))
    with (
        served_process.serving(folder, options) as served,
        prometheus.scraping(folder / "prometheus", served.http_address, rules) as watching,
    ):
        wait_until(lambda: any(target["health"] == "up" for target in watching.targets()), "a target is up")
        start = time.time()
        asyncio.run(board_load.play(served.http_url, served.grpc_address, LOAD))
        os.kill(served.replica_pids()[0], signal.SIGKILL)
        wait_until(
            lambda: total(watching, "model:espalier_gateway_replica_losses:rate5m") > 0, "losses are counted", 60
        )
        wait_until(lambda: total(watching, "espalier_audit_total") > 0, "audits are counted", 60)
        yield watching, Window(start, time.time(), 1.0, "10s")


def total(watching: prometheus.Prometheus, expr: str) -> float:
    return sum(value for series in watching.now(expr) for value in series.finite)


@pytest.mark.parametrize("name", BOARDS)
def test_every_query_parses(root: Path, name: str) -> None:
    require_module("promql_parser")
    assert parse_faults(board(root, name), Window(0, 60, 1.0, "10s")) == []


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_shows_something(root: Path, name: str, scraped: tuple[prometheus.Prometheus, Window]) -> None:
    watching, window = scraped
    document = board(root, name)
    titles = {query.panel for query in queries(document)}
    empty = {title: why for title, why in MAY_BE_EMPTY.items() if title in titles}
    assert live_faults(document, watching, window, empty) == []


@pytest.mark.parametrize("name", BOARDS)
def test_every_metric_is_there(root: Path, name: str, scraped: tuple[prometheus.Prometheus, Window]) -> None:
    there = set(scraped[0].label_values("__name__"))
    asked = [query.expr for query in queries(board(root, name)) if query.panel not in MAY_BE_EMPTY]
    assert {metric for expr in asked for metric in metric_names(expr)} <= there
