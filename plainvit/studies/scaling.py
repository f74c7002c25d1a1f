"""Claims 13, 14 and 15: scaling depth, width, MLP and patches of a ViT, and what predicts its accuracy (D.2, Figure 8).

    plainvit study depth-and-width --budget cpu          also patch-size, predictor

As in the paper, one dimension of a small model is scaled at a time, and all together. Gains are per doubling of
multiply-adds, so that arms need not cost exactly the same. Claim 15 is about models,
so its interval comes from resampling the models.
"""

import math
from itertools import pairwise
from typing import Any

import numpy as np

from plainvit.config import Config, ViTConfig
from plainvit.planning import cost
from plainvit.studies.base_configs import base, complete_model, vit
from plainvit.studies.study import Arm, Budget, Results, define
from plainvit.studies.verdict import Criterion, bootstrap, correlations, fact

AXES = ("depth", "width", "MLP", "patch")
# Depth, width and MLP width of the small model; heads stay as they are, and a patch becomes half as wide
SMALL: dict[Budget, dict[str, int]] = {
    "cpu": {"depth": 2, "width": 32, "mlp_dim": 64, "heads": 4},
    "gpu": {"depth": 3, "width": 128, "mlp_dim": 256, "heads": 4},
}
PATCHES: dict[Budget, tuple[int, ...]] = {"cpu": (4, 2, 1), "gpu": (8, 4, 2)}


# Arms -----------------------------------------------------------------------------------------------------------------


def start(budget: Budget) -> Config:
    """All arms are as long; on a CPU short, since the smallest patch takes 5 times the base's compute."""
    return base(budget).replace(steps=120) if budget == "cpu" else base(budget)


def scale_axes(model: ViTConfig) -> dict[str, tuple[str, dict[str, Any]]]:
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
    """x is the multiply-adds relative to the small model, which has a linear head and is on every curve."""
    config = start(budget)
    config = config.replace(model=vit(config).replace(**SMALL[budget], representation=0))
    smallest = cost.macs(complete_model(config))
    made = {"small": Arm(config, x=1.0)}
    for name, (axis, changes) in scale_axes(vit(config)).items():
        scaled = config.replace(model=vit(config).replace(**changes))
        made[name] = Arm(scaled, x=cost.macs(complete_model(scaled)) / smallest, group=axis)
    return made


def patch_arms(budget: Budget) -> dict[str, Arm]:
    config = start(budget)
    return {
        f"patch {side}": Arm(config.replace(model=vit(config).replace(patch=(side, side))), x=side, group="base")
        for side in PATCHES[budget]
    }


def all_arms(budget: Budget) -> dict[str, Arm]:
    return arms(budget) | patch_arms(budget)


# Parts ----------------------------------------------------------------------------------------------------------------


def criteria(results: Results) -> list[Criterion]:
    """Gains per doubling of compute from the small model; all together against each axis."""
    deep, wide = (1 / math.log2(results.arms[f"{axis} x4"].x) for axis in ("depth", "width"))
    gain = {"depth x4": deep, "width x4": -wide, "small": wide - deep}
    return [
        results.contrast("gain per doubling of compute, depth - width", gain),
        *(results.not_worse("all x4", f"{axis} x4") for axis in AXES),
    ]


def patch_criteria(results: Results) -> list[Criterion]:
    names = sorted(results.arms, key=lambda arm: -results.arms[arm].x)
    counts = [cost.parameters(complete_model(results.arms[name].config)) for name in names]
    ratio = max(counts) / min(counts)
    return [
        *(results.above(small, large) for large, small in pairwise(names)),
        fact("parameters, most / fewest", ratio, "< 1.03", ratio < 1.03),
    ]


def predictor_criteria(results: Results) -> list[Criterion]:
    models = [complete_model(arm.config) for arm in results.arms.values()]
    macs, counts = (np.log([count(model) for model in models]) for count in (cost.macs, cost.parameters))
    top1 = np.array([results.mean(arm) for arm in results.arms])

    def difference(picks: np.ndarray) -> np.ndarray:
        return correlations(macs[picks], top1[picks]) - correlations(counts[picks], top1[picks])

    runs = sum(map(len, results.values.values()))
    return [bootstrap("correlation with log multiply-adds - with log parameters", difference, len(models), 0.0, runs)]


STUDIES = (
    define("depth-and-width", arms, criteria, xlabel="compute, relative to the small model"),
    define("patch-size", patch_arms, patch_criteria, xlabel="patch side, pixels"),
    define("predictor", all_arms, predictor_criteria, bars=True),
)
