"""Figures of studies: our results next to the paper's."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from plainvit.analyse.figures import COLOURS, PANEL, new_figure, styled
from plainvit.studies.study import Results

SERIES = [COLOURS[name] for name in ("blue", "orange", "green", "purple", "grey", "ink")]  # one for each curve


def draw_dots(axes: Axes, x: float, values: Sequence[float] | np.ndarray, colour: str) -> None:
    """A dot for each seed."""
    axes.scatter(np.full(len(values), x), values, s=14, color=colour, alpha=0.5, linewidths=0)


def draw_mean(
    axes: Axes,
    x: float,
    values: Sequence[float] | np.ndarray,
    colour: str,
    label: str | None = None,
    half: float = 0.25,
) -> None:
    """A horizontal line at the mean and a dot for each seed."""
    axes.plot([x - half, x + half], [np.mean(values)] * 2, color=colour, linewidth=2.4, label=label)
    if len(values) > 1:
        draw_dots(axes, x, values, colour)


def draw_line(axes: Axes, found: Results, arms: Sequence[str], colour: str, label: str, xscale: float = 1.0) -> None:
    """A line through the means of the arms in percent, and a dot for each seed."""
    xs = [xscale * found.arms[arm].x for arm in arms]
    axes.plot(xs, [100 * found.mean(arm) for arm in arms], color=colour, label=label or None)
    for x, arm in zip(xs, arms, strict=True):
        draw_dots(axes, x, 100 * np.array(found.of(arm)), colour)


def set_log_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic x axis with labels at these values only."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}" if value < 10 else f"{value:,.0f}"))


@styled()
def draw_arms(found: Results, xlabel: str, paper: Mapping[str, float], paper_title: str) -> Figure:
    """The mean of each arm and a dot for each seed; the paper's values in a second panel."""
    names = list(found.values)
    figure, axes = new_figure(1, 2 if paper else 1, PANEL)
    ours: Axes = axes[0, 0]
    for at, name in enumerate(names):
        draw_mean(ours, at, 100 * np.array(found.of(name)), COLOURS["blue"])
    ours.set(title="plainvit, held-out top-1, %", xlabel=xlabel)
    ours.set_xticks(range(len(names)), names)
    if paper:
        theirs: Axes = axes[0, 1]
        shown = [name for name in names if name in paper]
        for at, name in enumerate(shown):
            draw_mean(theirs, at, [100 * paper[name]], COLOURS["orange"])
        theirs.set(title=f"{paper_title}, %", xlabel=xlabel, xlim=(-0.5, len(shown) - 0.5))
        theirs.set_xticks(range(len(shown)), shown)
    return figure


Curve = Sequence[tuple[float, float]]  # (x, y) points


@styled()
def draw_curves(
    found: Results, xlabel: str, ylabel: str, paper: Mapping[str, Curve], paper_title: str, *, log: bool = True
) -> Figure:
    """A curve for each group of arms, a dot for each seed; the paper's curves in a second panel."""
    groups = list(dict.fromkeys(arm.group for arm in found.arms.values()))
    colours = dict(zip([*groups, *(name for name in paper if name not in groups)], SERIES, strict=False))
    figure, axes = new_figure(1, 2 if paper else 1, PANEL)
    ours: Axes = axes[0, 0]
    for group in groups:
        draw_line(ours, found, found.group(group), colours[group], group)
    ours.set(title=f"plainvit, {ylabel}", xlabel=xlabel)
    if paper:
        theirs: Axes = axes[0, 1]
        for name, curve in paper.items():
            theirs.plot(*zip(*curve, strict=True), marker="o", markersize=4, color=colours[name], label=name)
        theirs.set(title=paper_title, xlabel=xlabel)
    for panel in axes[0]:
        panel.set_xscale("log" if log else "linear")
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    return figure


def set_arm_ticks(figure: Figure, found: Results, template: str = "{:g}") -> Figure:
    """Ticks of the first panel at the x values of the arms only."""
    ticks = sorted({arm.x for arm in found.arms.values()})
    figure.axes[0].set_xticks(ticks, [template.format(tick) for tick in ticks])
    figure.axes[0].minorticks_off()
    return figure
