"""Learning curves of a run: metrics.jsonl as columns, a figure and a report section.

table = tabulate(read_metrics(Path("runs/digits")))
save(draw_curves(table), Path("curves.png"))
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from plainvit.analyse.figures import COLORS, PANEL, new_figure, number, styled
from plainvit.analyse.gallery import choose_evenly
from plainvit.analyse.html import Section, element, inline_figure, make_section, publish_figure

TRAINING = ("epoch", "loss", "accuracy", "lr", "norm", "waiting", "skipped")
METRICS = ("top1", "top5", "nll", "loss")  # loss: of runs without labels
VALIDATION = tuple(f"val_{name}" for name in METRICS)
BUCKETS = 120  # points of a curve of training steps

Table = dict[str, np.ndarray]  # column -> values, NaN where missing; one row for each step, in order


def tabulate(lines: Iterable[Mapping[str, Any]]) -> Table:
    """The lines of metrics.jsonl as columns. Where a resumed run repeated a step, the later line counts."""
    rows: dict[float, dict[str, float]] = {}
    for line in lines:
        step = number(line["step"])
        if not math.isnan(step):
            rows.setdefault(step, {"step": step}).update(_read_values(line))
    ordered = [rows[step] for step in sorted(rows)]
    return {
        name: np.array([row.get(name, math.nan) for row in ordered], float) for name in ("step", *TRAINING, *VALIDATION)
    }


def _read_values(line: Mapping[str, Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    if "loss" in line:  # a training step; it replaces all columns of an earlier line
        values |= {name: number(line.get(name)) for name in TRAINING}
    val = line.get("val")
    if isinstance(val, Mapping):
        values |= {f"val_{name}": number(val.get(name)) for name in METRICS}
    return values


def summarize(steps: np.ndarray, values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """[4, n]: last step, mean, minimum and maximum of each bucket of consecutive finite values."""
    finite = np.flatnonzero(np.isfinite(values))
    parts = np.array_split(finite, min(len(finite), buckets)) if len(finite) else []
    rows = [(steps[part[-1]], values[part].mean(), values[part].min(), values[part].max()) for part in parts]
    return np.array(rows).reshape(-1, 4).T


# Drawing --------------------------------------------------------------------------------------------------------------

# panel -> its title and its lines: (column, label, color)
_PANELS: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "loss": ("Training loss", [("loss", "mean", "blue")]),
    "top1": ("Top-1 accuracy, %", [("accuracy", "training", "gray"), ("val_top1", "validation", "blue")]),
    "nll": ("Validation negative log-likelihood", [("val_nll", "", "blue")]),
    "val_loss": ("Validation loss", [("val_loss", "", "blue")]),
    "lr": ("Learning rate", [("lr", "", "blue")]),
    "norm": ("Gradient norm", [("norm", "mean", "blue")]),
    "waiting": ("Time spent waiting for data, %", [("waiting", "", "blue")]),
}
_WITH_RANGE = ("loss", "norm")  # columns whose smallest and largest values are drawn as a band


def list_panels(table: Table) -> list[str]:
    """The panels that have data."""
    recorded = {column for column, values in table.items() if np.isfinite(values).any()}
    return [name for name, (_, lines) in _PANELS.items() if any(column in recorded for column, _, _ in lines)]


@styled()
def draw_curves(table: Table) -> Figure:
    """All panels that have data, two in a row."""
    names = list_panels(table)
    columns = min(2, max(len(names), 1))
    figure, grid = new_figure(max(math.ceil(len(names) / columns), 1), columns)
    for axes, name in zip(grid.flat, names, strict=False):
        _plot_columns(axes, table, name)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    return figure


@styled()
def draw_panel(table: Table, name: str) -> Figure:
    """One panel ("loss", "top1" ...) for an HTML page, with fixed margins so that panels align."""
    figure = Figure(PANEL)
    left, bottom, width, height = 0.115, 0.17, 0.88, 0.71  # of the axes, as fractions of the figure
    axes = figure.add_axes((left, bottom, width, height))
    _plot_columns(axes, table, name)
    axes.set_title(_PANELS[name][0], x=-left / width)  # at the left edge of the figure
    return figure


def _plot_columns(axes: Axes, table: Table, name: str) -> None:
    """The columns of a panel, with its title, scale and legend."""
    title, lines = _PANELS[name]
    for column, label, color in lines:
        _draw_line(axes, table, column, label=label, color=color, scale=100 if title.endswith("%") else 1)
    axes.set(title=title, xlabel="step")
    first, last = table["step"][[0, -1]]
    margin = 0.02 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)  # the same for all panels: validations begin later
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if name in ("loss", "nll", "norm"):
        _use_log_scale_for_decades(axes)
    elif name in ("lr", "waiting"):  # start at zero, and show at least 10 %
        axes.set_ylim(0, max(axes.get_ylim()[1], 10 if name == "waiting" else 1e-12))
    elif name in ("top1", "top5"):
        axes.set_ylim(top=min(axes.get_ylim()[1], 101))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    if name == "loss":
        _mark_skipped(axes, table)
    if name == "top1" or len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(loc="lower right" if name == "top1" else "upper right")  # corners that are usually empty


def _draw_line(axes: Axes, table: Table, column: str, *, label: str, color: str, scale: float) -> None:
    is_validation = column.startswith("val_")
    steps, *values = summarize(table["step"], table[column], len(table["step"]) + 1 if is_validation else BUCKETS)
    if not len(steps):
        return
    mean, low, high = np.clip(np.array(values) * scale, -1e99, 1e99)  # matplotlib's limit
    if column in _WITH_RANGE and (low < high).any():
        axes.fill_between(steps, low, high, color=COLORS["gray"], alpha=0.4, linewidth=0, label="range")
    axes.plot(steps, mean, color=COLORS[color], label=label, marker="o" if is_validation or len(steps) == 1 else "")


def _use_log_scale_for_decades(axes: Axes) -> None:
    """A logarithmic axis if the values are positive and span more than a decade."""
    low, high = axes.dataLim.intervaly
    if low > 0 and high / low > 12:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())


def _mark_skipped(axes: Axes, table: Table) -> None:
    steps = table["step"][table["skipped"] > 0]
    if len(steps):
        chosen = steps[choose_evenly(len(steps), BUCKETS)]
        bottom = axes.get_xaxis_transform()  # x in steps, y as a fraction of the panel
        style = {"color": COLORS["orange"], "markersize": 7, "label": "skipped (NaN or Inf)"}
        axes.plot(chosen, np.full(len(chosen), 0.03), "|", transform=bottom, **style)


def curves_section(table: Table, folder: Path) -> Section | None:
    """Also writes figures/curves.png; None if no step was recorded."""
    names = list_panels(table)
    if not names:
        return None
    links = publish_figure(folder, "curves", draw_curves(table), data="metrics.jsonl")
    panels = [inline_figure(draw_panel(table, name), f"{_PANELS[name][0]} by step") for name in names]
    return make_section("Learning curves", element("div", *panels, class_="figures"), links)
