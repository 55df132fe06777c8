"""The checker of boards: it finds each fault that is planted, and our boards have none that can be told without a live Prometheus."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from espalier.cluster.metrics import ClusterMetrics, EngineSnapshot
from espalier.replicas.stats import DeviceFigures, EngineStats
from tests.support.boards import (
    Json,
    Window,
    live_faults,
    metric_names,
    parse_faults,
    static_faults,
)
from tests.support.fakes import fake_model
from tests.support.prometheus import QueryError, Series
from tests.support.tools import require_module

FILES = Path("helm/espalier/files")
MAX_CONFIGMAP_BYTES = 1 << 20
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = Window(1000, 1060, 15, "1m")
KNOWN = {"up", "hits_total"}


def panel(ident: int, title: str, x: int, expr: str, legend: str) -> Json:
    return {
        "id": ident,
        "type": "timeseries",
        "title": title,
        "description": f"What {title} shows.",
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": "short"}, "overrides": []},
        "gridPos": {"x": x, "y": 0, "w": 12, "h": 8},
        "targets": [{"refId": "A", "datasource": SOURCE, "expr": expr, "legendFormat": legend}],
    }


def good() -> Json:
    variable = {
        "type": "query",
        "name": "model",
        "datasource": SOURCE,
        "allValue": ".*",
        "query": {"query": "label_values(up, model)", "refId": "Q"},
    }
    return {
        "templating": {"list": [{"type": "datasource", "name": "datasource"}, variable]},
        "panels": [
            panel(1, "Up", 0, 'sum by (model) (up{model=~"$model"})', "{{model}}"),
            panel(2, "Hits", 12, "sum(rate(hits_total[$__rate_interval])) by (model)", "all of {{model}}"),
        ],
    }


UP = Series({"model": "a"}, ((1000, 1.0),))
HITS = Series({"model": "a"}, ((1000, float("nan")), (1015, 0.5)))


@dataclass
class StandIn:
    """Answers every query about `up` and `hits_total` with the same series, and refuses those that say so."""

    up: list[Series] = field(default_factory=lambda: [UP])
    hits: list[Series] = field(default_factory=lambda: [HITS])
    models: list[str] = field(default_factory=lambda: ["a"])

    def over(self, expr: str, start: float, end: float, step_s: float) -> list[Series]:
        if "refuse" in expr:
            raise QueryError("parse error: refused")
        return self.hits if "hits_total" in expr else self.up

    def label_values(self, label: str, selector: str | None = None) -> list[str]:
        assert label == "model" and selector == "up"
        return self.models


def put(value: object, *path: str | int) -> Callable[[Json], None]:
    """Sets what is at the end of the path; `None` removes it."""

    def plant(board: Json) -> None:
        place = board
        for step in path[:-1]:
            place = place[step]  # type: ignore[index]
        if value is None:
            del place[path[-1]]  # type: ignore[arg-type]
        else:
            place[path[-1]] = value  # type: ignore[index]

    return plant


UNKNOWN_SOURCE = {"type": "prometheus", "uid": "my-prometheus"}
FIRST = ("panels", 0)
PLANTED = [
    (put(2, *FIRST, "id"), "panel id 2 is there 2 times"),
    (put(None, *FIRST, "id"), "a panel without id"),
    (put("Hits", *FIRST, "title"), "panel title 'Hits' is there 2 times"),
    (put(13, *FIRST, "gridPos", "w"), "panel 'Hits': overlaps 'Up'"),
    (put(13, "panels", 1, "gridPos", "w"), "panel 'Hits': outside of the grid"),
    (put("graph", *FIRST, "type"), "panel 'Up': type 'graph'"),
    (put("", *FIRST, "description"), "panel 'Up': no description"),
    (put(None, *FIRST, "fieldConfig", "defaults", "unit"), "panel 'Up': no unit"),
    (put([], *FIRST, "targets"), "panel 'Up': no query"),
    (put("", *FIRST, "targets", 0, "refId"), "panel 'Up': refIds ['']"),
    (put(UNKNOWN_SOURCE, *FIRST, "datasource"), "panel 'Up': the data source is not ${datasource}"),
    (put(UNKNOWN_SOURCE, *FIRST, "targets", 0, "datasource"), "panel 'Up': the data source is not ${datasource}"),
    (put(None, *FIRST, "targets", 0, "legendFormat"), "panel 'Up': a query without legend"),
    (put('up{model=~"$modle"}', *FIRST, "targets", 0, "expr"), "panel 'Up', query A: $modle is not defined"),
    (put("sum(up)", *FIRST, "targets", 0, "expr"), "variable model: not used"),
    (
        put("espalier_ups", "panels", 1, "targets", 0, "expr"),
        "panel 'Hits', query A: nobody exports or records espalier_ups",
    ),
    (
        put(UNKNOWN_SOURCE, "templating", "list", 1, "datasource"),
        "variable model: the data source is not ${datasource}",
    ),
    (put("model", "templating", "list", 0, "name"), "variable datasource: not defined"),
    (
        put('label_values(up{job="$job"}, model)', "templating", "list", 1, "query", "query"),
        "variable model: $job is not defined",
    ),
]


def test_a_good_board_has_no_faults() -> None:
    assert static_faults(good(), KNOWN) == []
    assert live_faults(good(), StandIn(), WINDOW, {}) == []


@pytest.mark.parametrize(("plant", "fault"), PLANTED, ids=[fault for _, fault in PLANTED])
def test_a_planted_fault_is_found(plant: Callable[[Json], None], fault: str) -> None:
    board = good()
    plant(board)
    assert fault in static_faults(board, KNOWN)


def test_two_queries_of_one_name_are_found() -> None:
    board = good()
    board["panels"][0]["targets"] *= 2
    assert static_faults(board, KNOWN) == ["panel 'Up': refIds ['A', 'A']"]


@pytest.mark.parametrize(
    ("prometheus", "fault"),
    [
        (StandIn(up=[]), "panel 'Up', query A: no series"),
        (StandIn(up=[Series({"model": "a"}, ((1000, float("nan")),))]), "panel 'Up', query A: only NaN"),
        (StandIn(up=[Series({}, UP.points)]), "panel 'Up', query A: the legend's label 'model' is not in the answer"),
        (StandIn(models=[]), "variable model: no values"),
    ],
)
def test_what_only_prometheus_can_tell_is_found(prometheus: StandIn, fault: str) -> None:
    assert live_faults(good(), prometheus, WINDOW, {}) == [fault]


def test_a_refused_query_is_found_even_where_nothing_need_be_shown() -> None:
    board = good()
    board["panels"][1]["targets"][0]["expr"] = "refuse(hits_total)"
    why = {"Hits": "a reason"}
    assert live_faults(board, StandIn(), WINDOW, why) == ["panel 'Hits', query A: parse error: refused"]


def test_a_panel_may_be_empty_by_its_title_only() -> None:
    assert live_faults(good(), StandIn(hits=[]), WINDOW, {"Hits": "a reason"}) == []
    assert live_faults(good(), StandIn(), WINDOW, {"Hist": "a reason"}) == [
        "panel 'Hist': may be empty, but there is none"
    ]


@pytest.mark.deploy
@pytest.mark.parametrize("expr", ["sum(up", "rate(up)", "histogram_quantile(0.5)"])
def test_what_is_no_promql_is_found(expr: str) -> None:
    require_module("promql_parser")
    board = good()
    assert parse_faults(board, WINDOW) == []
    board["panels"][0]["targets"][0]["expr"] = expr
    [fault] = parse_faults(board, WINDOW)
    assert fault.startswith("panel 'Up', query A: ")


def test_names_of_metrics_in_a_query() -> None:
    expr = (
        'max by (le, model) (model:x_seconds:p95_5m{job=~"$job"}) / on (model) group_left () '
        '(avg_over_time(b_total[5m] offset 1m) > 0) or 0 * sum(c{d="e"}) by (f) or vector(1)'
    )
    assert metric_names(expr) == {"model:x_seconds:p95_5m", "b_total", "c"}


def known_metrics(root: Path) -> set[str]:
    """What the exporter exports and the recording rules record."""
    metrics = ClusterMetrics(version="1")
    on_gpu = EngineStats(device=DeviceFigures(**dict.fromkeys(DeviceFigures.__slots__, 0)))
    text = metrics.render([fake_model()], [EngineSnapshot(model="m", replica="r", stats=on_gpu)]).decode()
    known = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            known |= {f"{name}{end}" for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    for file in (root / FILES / "rules").glob("*.yaml"):
        for group in yaml.safe_load(file.read_text())["groups"]:
            known |= {rule["record"] for rule in group["rules"] if "record" in rule}
    return known


@pytest.mark.parametrize("name", ["serving", "engine", "cluster"])
def test_our_boards_have_no_faults(root: Path, name: str) -> None:
    text = (root / FILES / "dashboards" / f"{name}.json").read_text()
    board = json.loads(text)
    assert static_faults(board, known_metrics(root)) == []
    assert board["uid"] == f"espalier-{name}"
    assert len(text) < MAX_CONFIGMAP_BYTES / 4


def test_no_board_is_left_out(root: Path) -> None:
    names = {path.stem for path in (root / FILES / "dashboards").iterdir()}
    assert names == {"serving", "engine", "cluster"}
    assert {path.stem for path in (root / "docs/boards").glob("*.png")} == names
