"""Figures of studies: the arms one after the other, or a curve for each group of arms, with a dot for each run.

Where the paper prints its numbers, they are shown in a second panel.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from plainvit.analyse.figures import COLORS, PANEL, new_figure, styled
from plainvit.studies.claims import METRIC_TITLES, PERCENT
from plainvit.studies.study import Results, Study

SERIES = [COLORS[name] for name in ("blue", "orange", "green", "purple", "gray", "ink")]  # one for each curve


@styled()
def draw_study(study: Study, results: Results) -> Figure:
    """The study's own figure; otherwise its arms, next to the paper's numbers."""
    if study.draw:
        return study.draw(results)
    have_places = not any(math.isnan(arm.x) for arm in results.arms.values())
    has_curves = any(results.groups()) and have_places and not study.bars
    width = PANEL[0] if has_curves else max(PANEL[0], 0.75 * len(choose_shown(results)))
    figure, axes = new_figure(1, 2 if study.paper_figure else 1, (width, PANEL[1]))
    draw = draw_curves if has_curves else draw_arms
    draw(axes[0, 0], results)
    axes[0, 0].set_xlabel(study.xlabel)
    if study.paper_figure:
        draw_paper(axes[0, 1], study.paper_figure)
    return figure


def _scale(results: Results) -> float:
    return 100.0 if results.metric in PERCENT else 1.0


def draw_dots(axes: Axes, x: float, values: Sequence[float] | np.ndarray, color: str) -> None:
    """A dot for each run."""
    axes.scatter(np.full(len(values), x), values, s=14, color=color, alpha=0.5, linewidths=0)


def choose_shown(results: Results) -> dict[str, str]:
    """Labels of the arms that are shown: of those that differ in learning rate only the best."""
    return {results.best(arm.family) if arm.family else name: arm.family or name for name, arm in results.arms.items()}


def draw_arms(axes: Axes, results: Results) -> None:
    """The mean and the runs of each arm."""
    shown = choose_shown(results)
    for x, arm in enumerate(shown):
        values = _scale(results) * np.array(results.samples(arm))
        axes.plot([x - 0.25, x + 0.25], [values.mean()] * 2, color=COLORS["blue"], linewidth=2.4)
        draw_dots(axes, x, values, COLORS["blue"])
    _label_arms(axes, list(shown.values()))
    axes.set_title(METRIC_TITLES.get(results.metric, results.metric))


def _label_arms(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_xticks(range(len(labels)), [label.replace(", ", "\n") for label in labels], fontsize=7.5)
    axes.set_xlim(-0.6, len(labels) - 0.4)


def draw_curves(axes: Axes, results: Results) -> None:
    """A line through the means of each group of arms; arms without a group are on every line."""
    scale, common = _scale(results), results.group("")
    for group, color in zip(filter(None, results.groups()), SERIES * 3, strict=False):
        arms = sorted(common + results.group(group), key=lambda arm: results.arms[arm].x)
        means = [scale * results.mean(arm) for arm in arms]
        axes.plot([results.arms[arm].x for arm in arms], means, color=color, label=group)
        for arm in arms:
            draw_dots(axes, results.arms[arm].x, scale * np.array(results.samples(arm)), color)
    _set_ticks(axes, sorted({arm.x for arm in results.arms.values()}))
    axes.set_title(METRIC_TITLES.get(results.metric, results.metric))
    axes.legend()


def draw_paper(axes: Axes, shown: Mapping[str, Any]) -> None:
    """The paper's printed numbers: bars by name, or points [x, y] by curve."""
    axes.set_title(shown["title"])
    for x, value in enumerate(shown.get("bars", {}).values()):
        axes.plot([x - 0.25, x + 0.25], [value] * 2, color=COLORS["ink"], linewidth=2.4)
    if "bars" in shown:
        _label_arms(axes, list(shown["bars"]))
        return
    for (name, points), color in zip(shown["curves"].items(), SERIES, strict=False):
        axes.plot(*zip(*points, strict=True), "o-", color=color, label=name, markersize=4)
    _set_ticks(axes, sorted({x for points in shown["curves"].values() for x, _ in points}))
    axes.set_xlabel(shown["xlabel"])
    axes.legend()


def _set_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Logarithmic where the values cover a wide range."""
    if not 0 < 4 * ticks[0] <= ticks[-1]:
        axes.set_xticks(ticks)
        return
    kept = [ticks[0]]
    for tick in ticks[1:]:
        kept += [tick] if tick > 1.4 * kept[-1] else []
    set_log_ticks(axes, kept)


def set_log_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic x axis with labels at these values only."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 10 else f"{x:.2g}"))
