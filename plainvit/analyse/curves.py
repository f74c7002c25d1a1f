"""Learning curves of a run: metrics.jsonl as columns, a figure, a CSV file and a report section.

table = thin_table(read_metrics(Path("runs/digits/metrics.jsonl")))
save(draw_curves(table), Path("curves.png"))
"""

import contextlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from plainvit.analyse.figures import COLOURS, PANEL, WRONG, cell, new_figure, number, save, styled, write_csv
from plainvit.analyse.page import Section, element, figure_links, inline_svg, join

TRAINING = ("epoch", "loss", "accuracy", "lr", "norm", "waiting", "skipped")
METRICS = ("top1", "top5", "nll", "loss")  # loss: of runs without labels
VALIDATION = tuple(f"{kind}_{name}" for kind in ("val", "val_ema") for name in METRICS)
BUCKETS = 250

Table = dict[str, np.ndarray]  # column -> values, NaN where missing; one row for each step, in order


def read_metrics(path: Path) -> Table:
    """The columns of metrics.jsonl; empty if the file does not exist."""
    if not path.is_file():
        return tabulate([])
    with path.open(encoding="utf-8", errors="replace") as file:
        return tabulate(_parse_lines(file))


def _parse_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One object for each line; a line truncated by a crash is skipped."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(line), dict):
                yield value


def tabulate(metrics: Iterable[Mapping[str, Any]]) -> Table:
    """The lines of metrics.jsonl as columns. Where a resumed run repeated a step, the later line counts."""
    rows: dict[float, int] = {}
    columns = {name: array("d") for name in ("step", *TRAINING, *VALIDATION)}
    for line in metrics:
        step = number(line.get("step"))
        if math.isnan(step) or "event" in line:
            continue
        row = rows.setdefault(step, len(rows))
        if row == len(columns["step"]):
            for column in columns.values():
                column.append(math.nan)
        for name, value in _read_values(line).items():
            columns[name][row] = value
    table = {name: np.array(column) for name, column in columns.items()}
    order = np.argsort(table["step"])
    return {name: values[order] for name, values in table.items()}


def _read_values(line: Mapping[str, Any]) -> dict[str, float]:
    values = {"step": number(line["step"])}
    if "loss" in line:  # a training step; it replaces all columns of an earlier line
        values |= {name: number(line.get(name)) for name in TRAINING}
    for kind in ("val", "val_ema"):
        if isinstance(metrics := line.get(kind), Mapping):
            values |= {f"{kind}_{name}": number(metrics.get(name)) for name in METRICS}
    return values


def thin(values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Indices to draw: the first, the last, and the minimum and maximum of each bucket."""
    where = np.flatnonzero(np.isfinite(values))
    if len(where) <= 2 * buckets:
        return where
    kept = {where[0], where[-1]}
    for part in np.array_split(where, buckets):
        kept |= {part[np.argmin(values[part])], part[np.argmax(values[part])]}
    return np.array(sorted(kept))


def thin_table(table: Table) -> Table:
    """The rows that the training curves need, all validations, some skipped steps; with smoothed columns."""
    keep = [thin(table[name]) for name in TRAINING if name != "skipped"]
    keep += [np.flatnonzero(np.isfinite(table[name])) for name in VALIDATION]
    skipped = np.flatnonzero(table["skipped"] > 0)
    keep.append(skipped[np.linspace(0, len(skipped) - 1, min(len(skipped), BUCKETS)).astype(int)])
    rows = np.unique(np.concatenate(keep)).astype(int)
    smoothed = {f"{name}_smoothed": smooth(table[name], rows) for name in ("loss", "accuracy", "norm", "waiting")}
    return {name: values[rows] for name, values in table.items()} | smoothed


def smooth(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Centred means over 4 % of the run. Each window is summed separately: a spike would corrupt a running sum."""
    where = np.flatnonzero(np.isfinite(values))
    half = max(len(where) // 25 // 2, 1)
    smoothed = np.full(len(at), math.nan)
    for index, row in enumerate(at):
        if np.isfinite(values[row]):
            centre = int(np.searchsorted(where, row))
            smoothed[index] = values[where[max(centre - half, 0) : centre + half + 1]].mean()
    return smoothed


# Drawing --------------------------------------------------------------------------------------------------------------

# panel -> its title and its lines: (column, label, colour)
_PANELS: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "loss": ("Training loss", [("loss", "each step", "grey"), ("loss_smoothed", "smoothed", "blue")]),
    "top1": (
        "Top-1 accuracy, %",
        [
            ("accuracy_smoothed", "training batches", "grey"),
            ("val_top1", "validation", "blue"),
            ("val_ema_top1", "validation, averaged weights", "orange"),
        ],
    ),
    "nll": (
        "Validation negative log-likelihood",
        [("val_nll", "validation", "blue"), ("val_ema_nll", "validation, averaged weights", "orange")],
    ),
    "val_loss": ("Validation loss", [("val_loss", "validation", "blue")]),
    "lr": ("Learning rate", [("lr", "", "blue")]),
    "norm": ("Gradient norm", [("norm", "each step", "grey"), ("norm_smoothed", "smoothed", "blue")]),
    "waiting": ("Time spent waiting for data, %", [("waiting_smoothed", "", "blue")]),
}


def panels(table: Table) -> list[str]:
    """The panels that have data."""
    recorded = {column for column, values in table.items() if np.isfinite(values).any()}
    return [name for name, (_, lines) in _PANELS.items() if any(column in recorded for column, _, _ in lines)]


@styled()
def draw_curves(table: Table) -> Figure:
    names = panels(table)
    columns = min(2, max(len(names), 1))
    figure, axes = new_figure(max(math.ceil(len(names) / columns), 1), columns)
    for panel, name in zip(axes.flat, names, strict=False):
        _draw_panel(panel, table, name)
    for panel in axes.flat[len(names) :]:
        panel.set_axis_off()
    if not names:
        axes[0, 0].text(0.5, 0.5, "no steps recorded", ha="center", color=COLOURS["muted"])
    return figure


@styled()
def draw_curve(table: Table, name: str) -> Figure:
    """One panel for an HTML page, with fixed margins so that panels align."""
    figure = Figure(PANEL)
    left, width = 0.115, 0.88
    axes = figure.add_axes((left, 0.17, width, 0.71))
    _draw_panel(axes, table, name)
    axes.set_title(_PANELS[name][0], x=-left / width)
    return figure


def _draw_panel(axes: Axes, table: Table, name: str) -> None:
    title, lines = _PANELS[name]
    scale = 100 if title.endswith("%") else 1
    drawn = [_draw_line(axes, table, line, scale) for line in lines]
    axes.set_title(title)
    axes.set_xlabel("step")
    first, last = table["step"][[0, -1]]
    margin = 0.02 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)  # the same for all panels: validations begin later
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    if name in ("loss", "nll", "norm") and _spans_decades([values for values in drawn if len(values)]):
        _make_logarithmic(axes)
    elif name in ("lr", "waiting"):  # start at zero, and show at least 10 %
        axes.set_ylim(0, max(axes.get_ylim()[1], 10 if name == "waiting" else 1e-12))
    if name == "loss":
        _mark_skipped(axes, table)
    if len(axes.get_legend_handles_labels()[0]) > 1 and name != "norm":  # same lines as the loss
        # Corners that are usually empty
        axes.legend(loc="lower left" if name == "loss" else "lower right" if name == "top1" else "upper right")


def _draw_line(axes: Axes, table: Table, line: tuple[str, str, str], scale: float) -> np.ndarray:
    column, label, colour = line
    finite = np.isfinite(table[column])
    steps, values = table["step"][finite], np.clip(table[column][finite] * scale, -1e99, 1e99)  # matplotlib's limit
    if len(values):
        marker = "o" if column.startswith("val_") or len(values) == 1 else ""
        width = 0.7 if column in ("loss", "norm") else 1.7
        axes.plot(steps, values, color=COLOURS[colour], label=label, linewidth=width, marker=marker)
    return values


def _spans_decades(lines: Sequence[np.ndarray]) -> bool:
    low, high = min(map(np.min, lines)), max(map(np.max, lines))
    return low > 0 and high / low > 12


def _make_logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0, 3.0) if decades < 3.5 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))


def _mark_skipped(axes: Axes, table: Table) -> None:
    steps = table["step"][table["skipped"] > 0]
    if len(steps):
        bottom = axes.get_xaxis_transform()  # x in steps, y as a fraction of the panel
        height = np.full(len(steps), 0.03)
        axes.plot(steps, height, "|", color=WRONG, markersize=7, transform=bottom, label="skipped (NaN or Inf)")


def write_curves(table: Table, path: Path) -> None:
    """The rows that were drawn, in full precision."""
    columns = [name for name in table if name == "step" or np.isfinite(table[name]).any()]
    rows = zip(*(table[name].tolist() for name in columns), strict=True)
    write_csv(path, [columns, *(list(map(cell, row)) for row in rows)])


def curves_section(table: Table, folder: Path) -> Section | None:
    """Also writes figures/curves.png and .csv; None if no step was recorded."""
    names = panels(table)
    if not names:
        return None
    save(draw_curves(table), folder / "figures" / "curves.png")
    write_curves(table, folder / "figures" / "curves.csv")
    drawn = [inline_svg(draw_curve(table, name), f"Curve of {name} by step") for name in names]
    shown = element("div", *(element("div", svg) for svg in drawn), class_="panels")
    return Section("Learning curves", join([shown, figure_links("curves")]))
