"""The figures of studies: ours beside the paper's, on the same axes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plainvit.analyse.figures import COLOURS, PANEL, new_figure, styled
from plainvit.studies.study import Found

SERIES = [COLOURS[name] for name in ("blue", "orange", "green", "purple", "grey", "ink")]  # one for each curve


@styled()
def draw_arms(found: Found, across: str, paper: Mapping[str, float], words: str) -> Figure:
    """A dot for each seed and a bar for each arm's mean; the paper's numbers in a panel of their own."""
    names = list(found.values)
    figure, axes = new_figure(1, 2 if paper else 1, PANEL)
    ours: Axes = axes[0, 0]
    for at, name in enumerate(names):
        values = 100 * np.array(found.of(name))
        ours.plot([at - 0.25, at + 0.25], [values.mean()] * 2, color=COLOURS["blue"], linewidth=2.4)
        ours.scatter(np.full(len(values), at), values, s=14, color=COLOURS["blue"], alpha=0.5, linewidths=0)
    ours.set(title="here, held-out top-1, %", xlabel=across)
    ours.set_xticks(range(len(names)), names)
    if paper:
        theirs: Axes = axes[0, 1]
        shown = [name for name in names if name in paper]
        for at, name in enumerate(shown):
            theirs.plot([at - 0.25, at + 0.25], [100 * paper[name]] * 2, color=COLOURS["orange"], linewidth=2.4)
        theirs.set(title=f"{words}, %", xlabel=across, xlim=(-0.5, len(shown) - 0.5))
        theirs.set_xticks(range(len(shown)), shown)
    return figure


Curve = Sequence[tuple[float, float]]  # (x, y) points


@styled()
def draw_curves(
    found: Found,
    across: str,
    up: str,
    paper: Mapping[str, Curve],
    words: str,
    *,
    scale: float = 100.0,
    log: bool = True,
) -> Figure:
    """A curve for each group of arms through its means, a dot for each seed; the paper's curves beside them.

    A group has the same colour in both panels where the paper's curve has its name.
    """
    groups = list(dict.fromkeys(arm.group for arm in found.arms.values()))
    colours = dict(zip([*groups, *(name for name in paper if name not in groups)], SERIES, strict=False))
    figure, axes = new_figure(1, 2 if paper else 1, PANEL)
    ours: Axes = axes[0, 0]
    for group in groups:
        arms = found.group(group)
        places = [found.arms[arm].x for arm in arms]
        ours.plot(places, [scale * found.mean(arm) for arm in arms], color=colours[group], label=group or None)
        for place, arm in zip(places, arms, strict=True):
            values = scale * np.array(found.of(arm))
            ours.scatter(np.full(len(values), place), values, s=14, color=colours[group], alpha=0.5, linewidths=0)
    ours.set(title=f"here, {up}", xlabel=across)
    if paper:
        theirs: Axes = axes[0, 1]
        for name, curve in paper.items():
            theirs.plot(*zip(*curve, strict=True), marker="o", markersize=4, color=colours[name], label=name)
        theirs.set(title=words, xlabel=across)
    for panel in axes[0]:
        panel.set_xscale("log" if log else "linear")
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    return figure


def mark_places(figure: Figure, found: Found, form: str = "{:g}") -> Figure:
    """Our panel's axis with a mark at each place that arms have, and nowhere else."""
    places = sorted({arm.x for arm in found.arms.values()})
    figure.axes[0].set_xticks(places, [form.format(place) for place in places])
    figure.axes[0].minorticks_off()
    return figure
