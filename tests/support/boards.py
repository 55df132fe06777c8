"""Checks of Grafana boards kept as classic JSON: what can be told from the file alone, and what only a live Prometheus can tell.

Each check returns its findings as sentences that name the panel; none means that all is well. Knows none of our boards.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.support.prometheus import QueryError, Series

Json = dict[str, Any]

GRID_WIDTH = 24
PANEL_TYPES = frozenset({"row", "stat", "timeseries", "heatmap"})
DATASOURCE = "${datasource}"
# What Grafana fills in by itself.
BUILT_IN = frozenset({"__rate_interval", "__interval", "__range"})
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+),\s*(?P<label>\w+)\)")
# Names in a query are what neither a function call, a label in braces, a `by (...)` list nor a keyword is.
NOT_NAMES = re.compile(
    r"\{[^}]*\}|\"[^\"]*\"|\[[^\]]*\]|\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)"
)
NAME = re.compile(r"(?<![\w:])[a-zA-Z_][\w:]*(?![\w:]|\s*\()")
KEYWORDS = frozenset({"by", "on", "and", "or", "unless", "offset", "bool", "group_left", "group_right"})
# `sum by (x) (...)`: the operator stands before the list, not before a parenthesis.
AGGREGATES = frozenset({"sum", "avg", "min", "max", "count", "topk", "bottomk"})


class Source(Protocol):
    """What is asked of a Prometheus."""

    def over(self, expr: str, start: float, end: float, step_s: float) -> list[Series]: ...

    def label_values(self, label: str, selector: str | None = None) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, as it stands in the file."""

    panel: str
    ref: str
    expr: str
    legend: str

    def __str__(self) -> str:
        return f"panel {self.panel!r}, query {self.ref}"


@dataclass(frozen=True, slots=True)
class Window:
    """When to ask, and what stands for `$__rate_interval`."""

    start: float
    end: float
    step_s: float
    rate_interval: str

    def fill(self, expr: str, chosen: Mapping[str, str]) -> str:
        """The query as Grafana sends it. chosen: values of the board's own variables."""
        values = {
            "__rate_interval": self.rate_interval,
            "__interval": f"{max(1, round(self.step_s))}s",
            "__range": f"{max(1, round(self.end - self.start))}s",
            **chosen,
        }
        return VARIABLE.sub(lambda match: values[match[1] or match[2]], expr)


def panels(board: Json) -> list[Json]:
    """The panels that show something: all but rows, those in closed rows too."""
    return [panel for panel in _items(board) if panel["type"] != "row"]


def _items(board: Json) -> list[Json]:
    """Rows, panels, and panels of closed rows."""
    return [item for panel in board["panels"] for item in (panel, *panel.get("panels", ()))]


def queries(board: Json) -> list[Query]:
    """Every query of every panel."""
    return [
        Query(panel["title"], target["refId"], target["expr"], target.get("legendFormat", ""))
        for panel in panels(board)
        for target in panel["targets"]
    ]


def metric_names(expr: str) -> set[str]:
    """Names of the metrics that a query reads."""
    return set(NAME.findall(NOT_NAMES.sub(" ", expr))) - KEYWORDS - AGGREGATES


def all_variables(board: Json) -> dict[str, str]:
    """Each query variable with the value that Grafana uses when everything is chosen."""
    return {item["name"]: item["allValue"] for item in board["templating"]["list"] if item["type"] == "query"}


def static_faults(board: Json, known_metrics: Collection[str]) -> list[str]:
    """What is wrong with the file itself."""
    return [
        *_id_faults(board),
        *_grid_faults(_items(board)),
        *(fault for panel in panels(board) for fault in _panel_faults(panel)),
        *_variable_faults(board),
        *_metric_faults(board, known_metrics),
    ]


def parse_faults(board: Json, window: Window) -> list[str]:
    """Queries that are no PromQL. Needs promql-parser."""
    import promql_parser

    found = []
    for query in queries(board):
        try:
            promql_parser.parse(window.fill(query.expr, all_variables(board)))
        except ValueError as error:
            found.append(f"{query}: {error}")
    return found


def live_faults(board: Json, prometheus: Source, window: Window, may_be_empty: Mapping[str, str]) -> list[str]:
    """What a Prometheus that scrapes a server at work has against it. may_be_empty: panel title -> why it may show nothing."""
    chosen = all_variables(board)
    found = [
        f"panel {title!r}: may be empty, but there is none"
        for title in may_be_empty
        if title not in {panel["title"] for panel in panels(board)}
    ]
    for variable in _query_variables(board):
        selector, label = _label_values(variable)
        if not prometheus.label_values(label, window.fill(selector, chosen)):
            found.append(f"variable {variable['name']}: no values")
    for query in queries(board):
        try:
            series = prometheus.over(window.fill(query.expr, chosen), window.start, window.end, window.step_s)
        except QueryError as error:
            found.append(f"{query}: {error}")
            continue
        if query.panel not in may_be_empty:
            found += _answer_faults(query, series)
    return found


def _answer_faults(query: Query, series: Sequence[Series]) -> Iterator[str]:
    if not series:
        yield f"{query}: no series"
    elif not any(line.finite for line in series):
        yield f"{query}: only NaN"
    for label in LEGEND_LABEL.findall(query.legend):
        if any(label not in line.labels for line in series):
            yield f"{query}: the legend's label {label!r} is not in the answer"


def _id_faults(board: Json) -> Iterator[str]:
    for what, values in (
        ("id", [item.get("id") for item in _items(board)]),
        ("title", [item.get("title") for item in _items(board)]),
    ):
        for value in values:
            if value is None or value == "":
                yield f"a panel without {what}"
            elif values.count(value) > 1:
                yield f"panel {what} {value!r} is there {values.count(value)} times"


def _grid_faults(items: Sequence[Json]) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in items:
        at, title = panel["gridPos"], panel["title"]
        if at["w"] < 1 or at["h"] < 1 or at["x"] < 0 or at["y"] < 0 or at["x"] + at["w"] > GRID_WIDTH:
            yield f"panel {title!r}: outside of the grid"
        cells = [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
        for other in sorted({taken[cell] for cell in cells if cell in taken}):
            yield f"panel {title!r}: overlaps {other!r}"
        taken |= dict.fromkeys(cells, title)


def _panel_faults(panel: Json) -> Iterator[str]:
    where = f"panel {panel.get('title')!r}"
    if panel["type"] not in PANEL_TYPES:
        yield f"{where}: type {panel['type']!r}"
    if not panel.get("description"):
        yield f"{where}: no description"
    if not panel.get("fieldConfig", {}).get("defaults", {}).get("unit"):
        yield f"{where}: no unit"
    if not panel.get("targets"):
        yield f"{where}: no query"
    refs = [target.get("refId") for target in panel.get("targets", ())]
    if len(set(refs)) < len(refs) or not all(refs):
        yield f"{where}: refIds {refs}"
    if any(item.get("datasource", {}).get("uid") != DATASOURCE for item in (panel, *panel.get("targets", ()))):
        yield f"{where}: the data source is not {DATASOURCE}"
    if any(target.get("legendFormat") is None for target in panel.get("targets", ())):
        yield f"{where}: a query without legend"


def _variable_faults(board: Json) -> Iterator[str]:
    variables = board["templating"]["list"]
    defined = [variable["name"] for variable in variables]
    used: set[str] = {"datasource"}
    for variable in _query_variables(board):
        if variable["datasource"].get("uid") != DATASOURCE:
            yield f"variable {variable['name']}: the data source is not {DATASOURCE}"
    places = [(str(query), query.expr) for query in queries(board)]
    places += [(f"variable {variable['name']}", _label_values(variable)[0]) for variable in _query_variables(board)]
    places += [(f"panel {panel['title']!r}", panel["title"]) for panel in panels(board)]
    for where, text in places:
        names = {match[1] or match[2] for match in VARIABLE.finditer(text)}
        for name in sorted(names - BUILT_IN - set(defined)):
            yield f"{where}: ${name} is not defined"
        used |= names
    for name in defined:
        if defined.count(name) > 1:
            yield f"variable {name}: defined {defined.count(name)} times"
        if name not in used:
            yield f"variable {name}: not used"
    if "datasource" not in defined:
        yield "variable datasource: not defined"


def _metric_faults(board: Json, known: Collection[str]) -> Iterator[str]:
    for query in queries(board):
        for name in sorted(metric_names(query.expr) - set(known)):
            yield f"{query}: nobody exports or records {name}"


def _query_variables(board: Json) -> list[Json]:
    return [variable for variable in board["templating"]["list"] if variable["type"] == "query"]


def _label_values(variable: Json) -> tuple[str, str]:
    match = LABEL_VALUES.fullmatch(variable["query"]["query"])
    assert match is not None, f"variable {variable['name']}: not label_values(selector, label)"
    return match["selector"], match["label"]
