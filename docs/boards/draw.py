"""Draws each board from what docs/boards/record.py recorded: its panels in their grid, with title, unit, legend and limits. Needs matplotlib.

A likeness for reading and for finding what looks wrong, not Grafana: no tooltips, and only what our boards use of the panels' options.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image

from docs.boards.units import written
from tests.support.boards import GRID_WIDTH, LEGEND_LABEL, Window, all_variables
from tests.support.prometheus import Prometheus, Series, serving

HERE = Path(__file__).resolve().parent
BOARDS = HERE.parents[1] / "helm/espalier/files/dashboards"
Json = dict[str, Any]
Line = tuple[str, Series]
Box = tuple[float, float, float, float]

DPI = 100
COLOURS_KEPT = 256
COLUMN_IN, ROW_IN = 0.68, 0.38
# Above the grid, for the board's own title.
TITLE_ROWS = 1.6
# Inches around a panel's plot: left, right, bottom, top. A line of the legend takes more at the bottom.
MARGINS_IN = (0.72, 0.2, 0.46, 0.4)
LEGEND_LINE_IN, CHARACTER_IN, LEGEND_MARK_IN = 0.15, 0.068, 0.2
INK, FAINT, PAPER, CARD = "#24292e", "#8e939a", "#f4f5f5", "#ffffff"
# Grafana's classic palette.
PALETTE = ("#56a64b", "#f2a900", "#1f78c1", "#ef843c", "#e24d42", "#6d1f62", "#5195ce", "#705da0", "#3f6833", "#967302")
COLOURS = {"green": "#37872d", "orange": "#e0702a", "red": "#c4162a", "blue": "#1f60c4", "transparent": "none"}


def draw(board: Json, prometheus: Prometheus, window: Window) -> Figure:
    """The whole board."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) + TITLE_ROWS
    figure = Figure(figsize=(GRID_WIDTH * COLUMN_IN, rows * ROW_IN), dpi=DPI, facecolor=PAPER)
    figure.text(0.008, 1 - TITLE_ROWS / 2 / rows, board["title"], size=15, weight="bold", color=INK, va="center")
    for panel in board["panels"]:
        at = panel["gridPos"]
        upper = 1 - (at["y"] + TITLE_ROWS) / rows
        place = (at["x"] / GRID_WIDTH, upper - at["h"] / rows, at["w"] / GRID_WIDTH, at["h"] / rows)
        if panel["type"] == "row":
            figure.text(place[0] + 0.008, upper - 0.5 / rows, panel["title"], size=11, color=INK, va="center")
        else:
            lines = [line for target in panel["targets"] for line in _ask(board, target, prometheus, window)]
            _panel(figure, place, panel, lines, window)
    return figure


def _panel(figure: Figure, place: Box, panel: Json, lines: Sequence[Line], window: Window) -> None:
    card = figure.add_axes(_inside(figure, place, (0.05, 0.05, 0.05, 0.05)), facecolor=CARD)
    card.set(xticks=(), yticks=())
    card.spines[:].set_color("#dcdee0")
    title_at = place[0] + 0.01, place[1] + place[3] - 0.24 / figure.get_figheight()
    figure.text(*title_at, panel["title"], size=9.5, weight="bold", color=INK, va="center")
    if panel["type"] == "stat":
        _stat(card, panel, lines)
        return
    left, right, bottom, top = MARGINS_IN
    if panel["type"] == "heatmap":
        axes = figure.add_axes(_inside(figure, place, MARGINS_IN), facecolor=CARD)
        _heatmap(axes, panel, lines)
    else:
        legend = _legend_lines([label for label, _ in lines], place[2] * figure.get_figwidth() - left - right)
        bottom += LEGEND_LINE_IN * len(legend)
        axes = figure.add_axes(_inside(figure, place, (left, right, bottom, top)), facecolor=CARD)
        _timeseries(axes, panel, lines)
        _legend(figure, axes, legend)
    _time_axis(axes, window)


def _ask(board: Json, target: Json, prometheus: Prometheus, window: Window) -> list[Line]:
    answer = prometheus.over(window.fill(target["expr"], all_variables(board)), window.start, window.end, window.step_s)
    return [(_legend_of(target["legendFormat"], series.labels), series) for series in answer]


def _legend_of(template: str, labels: Mapping[str, str]) -> str:
    return LEGEND_LABEL.sub(lambda match: labels.get(match[1], ""), template)


def _stat(card: Axes, panel: Json, lines: Sequence[Line]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    finite = [series.finite for _, series in lines if series.finite]
    if not finite:
        card.text(0.5, 0.42, defaults["noValue"], size=22, color=FAINT, ha="center", va="center")
        return
    [values] = finite
    colour = COLOURS[_step(defaults["thresholds"]["steps"], values[-1])]
    text = written(values[-1], defaults["unit"], defaults.get("decimals"))
    card.text(0.5, 0.5, text, size=21, color=colour, ha="center", va="center")
    low, high = min(values), max(values)
    heights = [0.02 + 0.22 * (value - low) / (high - low or 1) for value in values]
    across = [index / max(1, len(values) - 1) for index in range(len(values))]
    card.fill_between(across, heights, color=colour, alpha=0.15, linewidth=0)
    card.plot(across, heights, color=colour, linewidth=0.8)
    card.set(xlim=(0, 1), ylim=(0, 1))


def _step(steps: Sequence[Mapping[str, Any]], value: float) -> str:
    colour: str = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    return colour


def _timeseries(axes: Axes, panel: Json, lines: Sequence[Line]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    if not lines:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, color=FAINT, ha="center", va="center")
    style = "steps-post" if custom["lineInterpolation"] == "stepAfter" else "default"
    stacked: dict[float, float] = {}
    for index, (_, series) in enumerate(lines):
        colour = PALETTE[index % len(PALETTE)]
        times = [_when(when) for when, _ in series.points]
        values = [value for _, value in series.points]
        if custom["stacking"]["mode"] == "normal":
            below = [stacked.get(when, 0.0) for when, _ in series.points]
            values = [value + base for value, base in zip(values, below, strict=True)]
            axes.fill_between(times, below, values, color=colour, alpha=custom["fillOpacity"] / 100, linewidth=0)
            stacked |= {when: value for (when, _), value in zip(series.points, values, strict=True)}
        axes.plot(times, values, color=colour, linewidth=custom["lineWidth"], drawstyle=style)
    _limit(axes, defaults)
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    if defaults.get("min") == 0 and not any(value for _, series in lines for value in series.finite):
        axes.set_ylim(0, 1)
    whole = defaults.get("decimals") == 0
    axes.yaxis.set_major_locator(
        MultipleLocator(2 ** round(math.log2(axes.get_ylim()[1] / 4)))
        if defaults["unit"] == "bytes"
        else MaxNLocator(5, integer=whole)
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, defaults["unit"])))
    axes.grid(color="#e8e9ea", linewidth=0.6)


def _limit(axes: Axes, defaults: Json) -> None:
    if "thresholdsStyle" in defaults["custom"]:
        step = defaults["thresholds"]["steps"][-1]
        low, high = axes.get_ylim()
        # As in Grafana, the limit does not stretch the axis.
        if low <= step["value"] <= high:
            axes.axhline(step["value"], color=COLOURS[step["color"]], linewidth=0.9, linestyle="--")


def _heatmap(axes: Axes, panel: Json, lines: Sequence[Line]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    exponent = panel["options"]["color"]["exponent"]
    by_edge = sorted((float(series.labels["le"]), dict(series.points)) for _, series in lines)
    times = sorted({when for _, points in by_edge for when in points})
    cells = []
    below = dict.fromkeys(times, 0.0)
    for _, points in by_edge:
        cells.append([max(0.0, points.get(when, 0.0) - below[when]) or float("nan") for when in times])
        below |= points
    edges = [edge for edge, _ in by_edge]
    used = [index for index, cell in enumerate(cells) if any(value == value for value in cell)]
    first, last = min(used), max(used) + 1
    axes.pcolormesh(
        [_when(when) for when in times],
        range(first, last),
        cells[first:last],
        cmap="Blues",
        norm=PowerNorm(exponent),
        shading="nearest",
    )
    axes.set_yticks(range(first, last), [written(edge, unit) if edge < 1e9 else "more" for edge in edges[first:last]])


def _time_axis(axes: Axes, window: Window) -> None:
    axes.set_xlim(_when(window.start), _when(window.end))
    axes.xaxis.set_major_locator(dates.MinuteLocator(interval=2))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M"))
    axes.tick_params(labelsize=7.5, colors=INK, length=0)
    axes.spines[:].set_visible(False)


def _legend_lines(labels: Sequence[str], width_in: float) -> list[list[tuple[float, str]]]:
    """The names in as many lines as they need, each with its distance from the left."""
    lines: list[list[tuple[float, str]]] = []
    x = width_in
    for label in labels:
        needs = LEGEND_MARK_IN + CHARACTER_IN * len(label)
        if not lines or x + needs > width_in:
            lines.append([])
            x = 0.0
        lines[-1].append((x, label))
        x += needs
    return lines


def _legend(figure: Figure, axes: Axes, lines: Sequence[Sequence[tuple[float, str]]]) -> None:
    """Names below the plot."""
    place = axes.get_position()
    width, height = place.width * figure.get_figwidth(), place.height * figure.get_figheight()
    entries = [(x, -0.38 - LEGEND_LINE_IN * number, label) for number, line in enumerate(lines) for x, label in line]
    for index, (x, y, label) in enumerate(entries):
        for left, text, ink in ((0.0, "▬", PALETTE[index % len(PALETTE)]), (0.14, label, INK)):
            axes.text((x + left) / width, y / height, text, color=ink, size=7.5, va="center", transform=axes.transAxes)


def _inside(figure: Figure, place: Box, margins_in: Box) -> Box:
    left, right, bottom, top = margins_in
    width, height = figure.get_figwidth(), figure.get_figheight()
    x, y, w, h = place
    return (x + left / width, y + bottom / height, w - (left + right) / width, h - (bottom + top) / height)


def _when(seconds: float) -> Any:
    return dates.date2num(datetime.fromtimestamp(seconds, UTC))


def main(folder: Path, output: Path) -> None:
    """One picture a board."""
    recorded = json.loads((folder / "window.json").read_text())
    interval = 4 * recorded["scrape_s"]
    window = Window(recorded["start"], recorded["end"], recorded["scrape_s"], f"{interval}s")
    with serving(folder / "prometheus") as prometheus:
        for path in sorted(BOARDS.glob("*.json")):
            figure = draw(json.loads(path.read_text()), prometheus, window)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(COLOURS_KEPT)
            picture.save(output / f"{path.stem}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), HERE if len(sys.argv) < 3 else Path(sys.argv[2]))
