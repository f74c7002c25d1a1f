"""Scaling depth, width, MLP and patches of a ViT, and what predicts its accuracy.

    plainvit study depth-and-width --budget cpu
    plainvit study patch-size --budget cpu
    plainvit study predictor --budget cpu

ViT (arXiv 2010.11929), D.2 and Figure 8; claims 13, 14 and 15. As there, one dimension of a
small model is scaled at a time, and all together; the paper has a figure and no numbers. Gains are per doubling of
multiply-adds, so that arms need not cost exactly the same. Claim 14 changes the patch of the base.
"""

import math
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from plainvit.analyse.figures import COLOURS, PANEL, new_figure, styled
from plainvit.config import Config, ViTConfig
from plainvit.evaluate import paper
from plainvit.evaluate.statistics import rank_correlation
from plainvit.planning import cost
from plainvit.studies.bases import base, vit
from plainvit.studies.compute import STEPS, complete_model
from plainvit.studies.drawings import SERIES, draw_line, set_log_ticks
from plainvit.studies.study import (
    Arm,
    Budget,
    Results,
    Study,
    Verdict,
    check_no_worse,
    decide_by_signs,
    paired_difference,
)

AXES = ("depth", "width", "MLP", "patch", "all")
# Depth, width and MLP width of the small model; heads stay as they are, and a patch becomes half as wide
SMALL: dict[Budget, dict[str, int]] = {
    "cpu": {"depth": 2, "width": 32, "mlp_dim": 64, "heads": 4},
    "gpu": {"depth": 4, "width": 128, "mlp_dim": 256, "heads": 4},
}
PATCHES: dict[Budget, tuple[int, ...]] = {"cpu": (4, 2, 1), "gpu": (16, 8, 4)}


# Runs -----------------------------------------------------------------------------------------------------------------


def start(budget: Budget) -> Config:
    """The base; on a CPU in fewer steps, since the smallest patch takes 5 times its compute. All arms are as long."""
    return base(budget).replace(steps=STEPS[budget]) if budget == "cpu" else base(budget)


def small(budget: Budget) -> Config:
    """A small model of the form of Figure 8's, with a linear head."""
    config = start(budget)
    return config.replace(model=vit(config).replace(**SMALL[budget], representation=0))


def scaled(model: ViTConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """By arm: the axis and what changes. About 2 or 4 times the multiply-adds; of `all`, the patch stays."""
    depth, width, mlp, patch = model.depth, model.width, model.mlp_dim, model.patch[0] // 2
    return {
        "depth x2": ("depth", {"depth": 2 * depth}),
        "depth x4": ("depth", {"depth": 4 * depth}),
        "width x2": ("width", {"width": 3 * width // 2, "mlp_dim": 3 * mlp // 2}),
        "width x4": ("width", {"width": 2 * width, "mlp_dim": 2 * mlp}),
        "MLP x4": ("MLP", {"mlp_dim": 7 * mlp}),
        "patch x4": ("patch", {"patch": (patch, patch)}),
        "all x4": ("all", {"depth": 3 * depth // 2, "width": 3 * width // 2, "mlp_dim": 2 * mlp}),
    }


def arms(budget: Budget) -> dict[str, Arm]:
    """x is the multiply-adds relative to the small model."""
    config = small(budget)
    of_one = cost.macs(complete_model(config))
    found = {"small": Arm(config, x=1.0, group="small")}
    for name, (axis, changes) in scaled(vit(config)).items():
        made = config.replace(model=vit(config).replace(**changes))
        found[name] = Arm(made, x=cost.macs(complete_model(made)) / of_one, group=axis)
    return found


def patch_arms(budget: Budget) -> dict[str, Arm]:
    config = start(budget)
    return {
        f"patch {side}": Arm(config.replace(model=vit(config).replace(patch=(side, side))), x=side, group="patch")
        for side in PATCHES[budget]
    }


def all_arms(budget: Budget) -> dict[str, Arm]:
    return arms(budget) | patch_arms(budget)


# Rules ----------------------------------------------------------------------------------------------------------------


def gains(found: Results, arm: str) -> list[float]:
    """Gain per doubling of compute from the small model to the arm, for each seed."""
    doublings = math.log2(found.arms[arm].x)
    return [difference / doublings for difference in found.differences("small", arm)]


def decide_axes(found: Results) -> Verdict:
    """Depth brings more than width, its second doubling less than its first, and all together no less than any."""
    ahead = paired_difference(gains(found, "width x4"), gains(found, "depth x4"))
    first, second = (found.differences(*pair) for pair in (("small", "depth x2"), ("depth x2", "depth x4")))
    fall = paired_difference(second, first)
    best = max((arm for arm in found.arms if arm.endswith("x4") and not arm.startswith("all")), key=found.mean)
    whole_way = paired_difference(found.of(best), found.of("all x4"))
    rates = ", ".join(f"{arm[:-3]} {100 * np.mean(gains(found, arm)):+.2f}" for arm in found.arms if arm.endswith("x4"))
    why = f"points for a doubling of compute: {rates}; depth - width {ahead}; first doubling of depth - second {fall}; "
    return decide_by_signs(
        [ahead.sign, fall.sign, check_no_worse(whole_way)], f"{why}all - best axis ({best[:-3]}) {whole_way}"
    )


def decide_patches(found: Results) -> Verdict:
    """Each smaller patch is better, and the number of parameters hardly changes."""
    names = sorted(found.arms, key=lambda arm: -found.arms[arm].x)
    steps = {f"{b[6:]} - {a[6:]} px": paired_difference(found.of(a), found.of(b)) for a, b in pairwise(names)}
    counts = [cost.parameters(complete_model(found.arms[name].config)) for name in names]
    change = max(counts) / min(counts) - 1
    why = "; ".join(f"{name} {one}" for name, one in steps.items()) + f"; parameters differ by {100 * change:.1f} %"
    return decide_by_signs([*(one.sign for one in steps.values()), 1 if change < 0.03 else -1], why)


def correlations(found: Results) -> dict[str, list[float]]:
    """Rank correlation of accuracy over all arms, for each seed: with multiply-adds, with parameters."""
    models = [complete_model(found.arms[arm].config) for arm in found.arms]
    rows = np.array([found.of(arm) for arm in found.arms]).T  # [seeds, arms]
    kinds = {"multiply-adds": cost.macs, "parameters": cost.parameters}
    return {kind: [rank_correlation([count(m) for m in models], row) for row in rows] for kind, count in kinds.items()}


def decide_predictor(found: Results) -> Verdict:
    """Accuracy follows multiply-adds more closely than parameters."""
    both = correlations(found)
    difference = paired_difference(both["parameters"], both["multiply-adds"])
    words = ", ".join(f"{kind} {np.mean(values):.3f}" for kind, values in both.items())
    why = f"rank correlation with accuracy: {words}; difference {difference.describe(digits=3)}"
    return decide_by_signs([difference.sign], why)


# Figures --------------------------------------------------------------------------------------------------------------


@styled()
def draw_axes(found: Results) -> Figure:
    """Figure 8's form: from one model, a curve for each axis."""
    figure, [[axes]] = new_figure(1, 1, (6.4, 3.4))
    for axis, colour in zip(AXES, (*SERIES[:4], COLOURS["ink"]), strict=True):
        draw_line(axes, found, ["small", *found.group(axis)], colour, axis)
    axes.set(title="held-out top-1, %, by scaled dimension", xlabel="compute relative to the small model")
    set_log_ticks(axes, [1, 2, 4])
    axes.legend()
    return figure


@styled()
def draw_patches(found: Results) -> Figure:
    figure, axes = new_figure(1, 2, PANEL)
    draw_line(axes[0, 0], found, found.group("patch"), SERIES[0], "")
    axes[0, 0].set(title="plainvit, held-out top-1, %")
    set_log_ticks(axes[0, 0], [found.arms[arm].x for arm in found.arms])
    for colour, (size, values) in zip(SERIES[1:], table6().items(), strict=False):
        axes[0, 1].plot([32, 16], values, marker="o", markersize=4, color=colour, label=size)
    axes[0, 1].set(title="paper, ImageNet top-1, %, after JFT-300M")
    axes[0, 1].legend()
    set_log_ticks(axes[0, 1], [16, 32])
    for panel in axes[0]:
        panel.set_xlabel("patch side, pixels")
        panel.invert_xaxis()
    return figure


def table6() -> dict[str, list[float | None]]:
    """Patches of 32 and 16 pixels, all else alike."""
    rows = {f"ViT-{size}": [f"ViT-{size}/{side}" for side in (32, 16)] for size in "BL"}  # of L/16, that of 7 epochs
    return {size: [paper.table(6).value(row, "ImageNet") for row in both] for size, both in rows.items()}


@styled()
def draw_predictor(found: Results) -> Figure:
    """Every arm against its multiply-adds, and against its parameters."""
    figure, axes = new_figure(1, 2, PANEL)
    counts = {"multiply-adds": cost.macs, "parameters": cost.parameters}
    for panel, (kind, values) in zip(axes[0], correlations(found).items(), strict=True):
        places = [counts[kind](complete_model(found.arms[arm].config)) / 1e6 for arm in found.arms]
        panel.scatter(places, [100 * found.mean(arm) for arm in found.arms], s=26, color=COLOURS["blue"], linewidths=0)
        panel.set(title=f"rank correlation {np.mean(values):.2f}", xlabel=f"{kind}, millions")
        low, high = min(places), max(places)
        set_log_ticks(panel, [low, math.sqrt(low * high), high])
    axes[0, 0].set_ylabel("held-out top-1, %")
    return figure


DEPTH_AND_WIDTH = Study(
    number=13,
    name="depth-and-width",
    claim="Depth brings most and width least, depth less and less; scaling all together is as good as any.",
    source="ViT, D.2 and Figure 8",
    paper="There, of 8 layers of width 1,024 with patches of 32, depth helps most, up to 64 layers but less after 16; "
    "width helps least. The figure has no table.",
    rule="for each doubling of compute, 4 times the depth brings more than the wider model by more than two standard "
    "errors; the second doubling of depth brings less than the first by more than two; and scaling all together is not "
    "worse than the best single axis by more than two, nor is a loss above a point left open",
    arms=arms,
    decide=decide_axes,
    draw=draw_axes,
)

PATCH_SIZE = Study(
    number=14,
    name="patch-size",
    claim="Smaller patches help, at no cost in parameters.",
    source="ViT, D.2 and Figure 8; Table 6",
    paper="There, patches of 16 in place of 32 pixels take ImageNet from 80.7 to 84.2 % (B), from 84.4 to 86.3 % (L).",
    rule="each halving of the patch's side raises accuracy by more than two standard errors, and the numbers of "
    "parameters lie within 3 %",
    arms=patch_arms,
    decide=decide_patches,
    draw=draw_patches,
)

PREDICTOR = Study(
    number=15,
    name="predictor",
    claim="Compute predicts accuracy better than the number of parameters does.",
    source="ViT, D.2 and Figure 8",
    paper="There, without numbers: the compute of a model might be a better predictor than its parameters.",
    rule="over all models of depth-and-width and patch-size, the rank correlation of accuracy with multiply-adds is "
    "above that with parameters by more than two standard errors over the seeds",
    arms=all_arms,
    decide=decide_predictor,
    draw=draw_predictor,
)

STUDIES = (DEPTH_AND_WIDTH, PATCH_SIZE, PREDICTOR)
