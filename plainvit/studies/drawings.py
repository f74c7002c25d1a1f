"""Figures of studies: the arms one after the other, or a curve for each group of arms, with a dot for each run."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from plainvit.analyse.figures import COLOURS, PANEL, new_axes, styled
from plainvit.studies.claims import PERCENT
from plainvit.studies.study import Results, Study

SERIES = [COLOURS[name] for name in ("blue", "orange", "green", "purple", "grey", "ink")]  # one for each curve


def draw_study(study: Study, found: Results) -> Figure:
    """The study's own figure, or curves where its arms have groups, or its arms."""
    draw = study.draw or (draw_curves if any(found.groups()) else draw_best)
    figure = draw(found)
    if study.xlabel:
        figure.axes[0].set_xlabel(study.xlabel)
    return figure


def _scale(found: Results) -> float:
    return 100.0 if found.metric in PERCENT else 1.0


def draw_dots(axes: Axes, x: float, values: Sequence[float] | np.ndarray, colour: str) -> None:
    """A dot for each run."""
    axes.scatter(np.full(len(values), x), values, s=14, color=colour, alpha=0.5, linewidths=0)


@styled()
def draw_best(found: Results) -> Figure:
    """The mean of each arm; of arms that differ in learning rate only the best."""
    shown = {found.best(arm.family) if arm.family else name: arm.family or name for name, arm in found.arms.items()}
    figure, axes = new_axes((max(PANEL[0], 0.75 * len(shown)), PANEL[1]))
    for x, arm in enumerate(shown):
        values = _scale(found) * np.array(found.samples(arm))
        axes.plot([x - 0.25, x + 0.25], [values.mean()] * 2, color=COLOURS["blue"], linewidth=2.4)
        draw_dots(axes, x, values, COLOURS["blue"])
    axes.set_xticks(range(len(shown)), [label.replace(", ", "\n") for label in shown.values()], fontsize=7.5)
    axes.set(title=PERCENT.get(found.metric, found.metric), xlim=(-0.6, len(shown) - 0.4))
    return figure


@styled()
def draw_curves(found: Results) -> Figure:
    """A line through the means of each group of arms; x is logarithmic where it covers a wide range."""
    figure, axes = new_axes()
    for group, colour in zip(found.groups(), SERIES * 3, strict=False):
        arms, scale = found.group(group), _scale(found)
        axes.plot(
            [found.arms[arm].x for arm in arms], [scale * found.mean(arm) for arm in arms], color=colour, label=group
        )
        for arm in arms:
            draw_dots(axes, found.arms[arm].x, scale * np.array(found.samples(arm)), colour)
    ticks = sorted({arm.x for arm in found.arms.values()})
    if 0 < 4 * ticks[0] <= ticks[-1]:
        set_log_ticks(axes, ticks)
    else:
        axes.set_xticks(ticks)
    axes.set_title(PERCENT.get(found.metric, found.metric))
    axes.legend()
    return figure


def set_log_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic x axis with labels at these values only."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 10 else f"{x:.2g}"))
