"""Figures of studies: our results next to the paper's.

By default a study shows its arms one after the other, or a curve for each group of arms.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from plainvit.analyse.figures import COLOURS, PANEL, new_figure, styled
from plainvit.studies.study import PERCENT, Results

SERIES = [COLOURS[name] for name in ("blue", "orange", "green", "purple", "grey", "ink")]  # one for each curve
Curve = Sequence[tuple[float, float]]  # (x, y) points


def draw_study(xlabel: str) -> Callable[[Results], Figure]:
    """The default figure."""

    def draw(found: Results) -> Figure:
        return (draw_curves if any(found.groups()) else draw_arms)(found, xlabel)

    return draw


def draw_dots(axes: Axes, x: float, values: Sequence[float] | np.ndarray, colour: str) -> None:
    """A dot for each run."""
    axes.scatter(np.full(len(values), x), values, s=14, color=colour, alpha=0.5, linewidths=0)


def draw_mean(axes: Axes, x: float, values: Sequence[float] | np.ndarray, colour: str) -> None:
    """A horizontal line at the mean and a dot for each run."""
    axes.plot([x - 0.25, x + 0.25], [np.mean(values)] * 2, color=colour, linewidth=2.4)
    if len(values) > 1:
        draw_dots(axes, x, values, colour)


def draw_line(axes: Axes, found: Results, arms: Sequence[str], colour: str, label: str) -> None:
    """A line through the means of the arms, and a dot for each run."""
    scale, xs = 100 if found.metric in PERCENT else 1, [found.arms[arm].x for arm in arms]
    axes.plot(xs, [scale * found.mean(arm) for arm in arms], color=colour, label=label or None)
    for x, arm in zip(xs, arms, strict=True):
        draw_dots(axes, x, scale * np.array(found.of(arm)), colour)


def set_log_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic x axis with labels at these values only."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))


def _format_tick(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


@styled()
def draw_arms(found: Results, xlabel: str = "", paper: Mapping[str, float] | None = None, title: str = "") -> Figure:
    """The mean of each arm and a dot for each run; the paper's values, in percent, in a second panel."""
    figure, axes = new_figure(1, 2 if paper else 1, PANEL)
    scale = 100 if found.metric in PERCENT else 1
    ours = {name: scale * np.array(found.of(name)) for name in found.values}
    _draw_means(axes[0, 0], ours, COLOURS["blue"])
    axes[0, 0].set(title=f"plainvit, {PERCENT.get(found.metric, found.metric)}", xlabel=xlabel)
    if paper:
        _draw_means(axes[0, 1], {name: np.array([value]) for name, value in paper.items()}, COLOURS["orange"])
        axes[0, 1].set(title=title, xlabel=xlabel)
    return figure


def _draw_means(axes: Axes, values: Mapping[str, np.ndarray], colour: str) -> None:
    for at, row in enumerate(values.values()):
        draw_mean(axes, at, row, colour)
    axes.set_xticks(range(len(values)), [name.replace(", ", "\n") for name in values], fontsize=7.5)
    axes.set_xlim(-0.6, len(values) - 0.4)


def draw_best(found: Results, xlabel: str = "", paper: Mapping[str, float] | None = None, title: str = "") -> Figure:
    """As `draw_arms`; of arms that differ in learning rate, the best."""
    shown = {found.best(arm.family) if arm.family else name: arm.family or name for name, arm in found.arms.items()}
    arms = {label: found.arms[name] for name, label in shown.items()}
    return draw_arms(Results(arms, {label: found.values[name] for name, label in shown.items()}), xlabel, paper, title)


@styled()
def draw_curves(
    found: Results, xlabel: str = "", paper: Mapping[str, Curve] | None = None, title: str = "", *, log: bool = True
) -> Figure:
    """A curve for each group of arms, a dot for each run; the paper's curves in a second panel."""
    groups = found.groups()
    colours = dict(zip([*groups, *(name for name in paper or () if name not in groups)], SERIES * 2, strict=False))
    figure, axes = new_figure(1, 2 if paper else 1, PANEL)
    for group in groups:
        draw_line(axes[0, 0], found, found.group(group), colours[group], group)
    axes[0, 0].set(title=f"plainvit, {PERCENT.get(found.metric, found.metric)}", xlabel=xlabel)
    if paper:
        for name, curve in paper.items():
            axes[0, 1].plot(*zip(*curve, strict=True), marker="o", markersize=4, color=colours[name], label=name)
        axes[0, 1].set(title=title, xscale="log" if log else "linear")
    ticks = sorted({arm.x for arm in found.arms.values()})
    if log:
        set_log_ticks(axes[0, 0], ticks)
    else:
        axes[0, 0].set_xticks(ticks)
    for panel in axes[0]:
        panel.legend()
    return figure


def with_paper(
    draw: Callable[..., Figure], xlabel: str, paper: Callable[[], Mapping], title: str
) -> Callable[[Results], Figure]:
    """A figure with the paper's values in a second panel; they are read when it is drawn."""
    return lambda found: partial(draw, xlabel=xlabel, title=title)(found, paper=paper())
