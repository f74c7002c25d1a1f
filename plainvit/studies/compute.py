"""Claims 10, 11 and 12: accuracy by the compute of training, for ViTs, ResNets and hybrids (Figure 5, Table 6).

    plainvit study compute --budget cpu          also hybrids, saturation

Three models of each kind, each of about twice the multiply-adds of the one before, are trained alike for as many steps,
by AdamW: Muon is for a Transformer's matrices alone. They are compared on held-out images of the set itself, where the
paper averages over sets that it transfers to. ResNets keep BiT's root, which divides a side by 4. On a GPU the images
are those of CIFAR-10, ten epochs with mixing, so that data suffice for the steps.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from plainvit.config import STEM_NUMERICS, Model, ResNetConfig
from plainvit.planning import cost
from plainvit.studies.base_configs import base, by_adamw, complete_model, vit
from plainvit.studies.study import Arm, Budget, Results, define
from plainvit.studies.verdict import Criterion, slope_weights

KINDS = ("ViT", "ResNet", "hybrid")
SIZES = ("small", "medium", "large")
STEPS: dict[Budget, int] = {"cpu": 120, "gpu": 1500}
COMPUTE = "training compute, petaFLOPs"


# Arms -----------------------------------------------------------------------------------------------------------------


def models(budget: Budget) -> dict[str, tuple[Model, ...]]:
    """By kind, from the smallest: about the same multiply-adds for each size. A hybrid's stem is the same in all."""
    if budget == "cpu":  # larger copies of the digits leave a ResNet 3 x 3 cells after its root, a hybrid 4 x 4
        plain = vit(base(budget))
        stem = plain.replace(image_size=(16, 16), patch=(1, 1), stem=make_stem(()))
        return {
            "ViT": (plain.replace(width=48, mlp_dim=96), plain, plain.replace(depth=6)),
            "ResNet": tuple(resnet(blocks, 12) for blocks in ((1,), (2,), (2, 1))),
            "hybrid": tuple(stem.replace(width=w, depth=d, mlp_dim=2 * w) for w, d in ((32, 2), (64, 2), (64, 5))),
        }
    plain = vit(base(budget))
    stem = plain.replace(patch=(1, 1), stem=make_stem(()))
    sizes = {width: {"width": width, "heads": width // 32, "mlp_dim": 4 * width} for width in (64, 96, 128)}
    return {
        "ViT": tuple(plain.replace(depth=depth, **sizes[width]) for width, depth in ((64, 6), (96, 6), (128, 7))),
        "ResNet": tuple(resnet(blocks, 32) for blocks in ((1, 1, 1), (2, 2, 2, 2), (3, 6, 9))),
        "hybrid": tuple(stem.replace(depth=depth, **sizes[width]) for width, depth in ((64, 6), (96, 6), (128, 7))),
    }


def resnet(blocks: tuple[int, ...], side: int) -> ResNetConfig:
    return ResNetConfig(blocks=blocks, image_size=(side, side), classes=0)


def make_stem(blocks: tuple[int, ...]) -> ResNetConfig:
    shape = ResNetConfig(blocks=blocks, classes=0, preactivation=False, padding="same")
    return shape.replace(**STEM_NUMERICS["google"])


def arms(budget: Budget, kinds: tuple[str, ...] = KINDS) -> dict[str, Arm]:
    """x is the training compute in petaFLOPs."""
    config = by_adamw(budget).replace(steps=STEPS[budget])
    arms: dict[str, Arm] = {}
    for kind in kinds:
        for size, model in zip(SIZES, models(budget)[kind], strict=True):
            sized = config.replace(model=model)
            exaflops = cost.training_exaflops(complete_model(sized), sized.steps * sized.batch)
            arms[f"{kind} {size}"] = Arm(sized, x=1000 * exaflops, group=kind)
    return arms


# Parts ----------------------------------------------------------------------------------------------------------------


def slopes(results: Results, signs: Mapping[str, float]) -> dict[str, float]:
    """Weights of sign * (gain per doubling of x) of each group."""
    weights: dict[str, float] = {}
    for group, sign in signs.items():
        names = results.group(group)
        slope = slope_weights(np.log2([results.arms[name].x for name in names]).tolist())
        weights |= {name: sign * weight for name, weight in zip(names, slope, strict=True)}
    return weights


def lead_over_vit(results: Results, arm: str) -> dict[str, float]:
    """Weights of the arm less a ViT of the same compute, between two of the ViTs where need be."""
    vits = results.group("ViT")
    known = np.log2([results.arms[name].x for name in vits])
    compute = np.log2(results.arms[arm].x)
    weights = [float(np.interp(compute, known, row)) for row in np.eye(len(vits))]
    return {arm: 1.0} | {name: -weight for name, weight in zip(vits, weights, strict=True) if weight}


def compute_criteria(results: Results) -> list[Criterion]:
    weights = slopes(results, {"ViT": 1, "ResNet": -1})
    return [results.contrast("gain per doubling of compute, ViT - ResNet", weights)]


def hybrid_criteria(results: Results) -> list[Criterion]:
    first, *_, last = results.group("hybrid")
    small, large = lead_over_vit(results, first), lead_over_vit(results, last)
    names = {*small, *large}
    fall = {name: small.get(name, 0.0) - large.get(name, 0.0) for name in sorted(names)}
    return [
        results.contrast("smallest hybrid - ViT at equal compute", small),
        results.contrast("lead of the smallest - lead of the largest", fall),
    ]


def saturation_criteria(results: Results) -> list[Criterion]:
    *_, before, last = results.group("ViT")
    return [results.above(last, before)]


STUDIES = (
    define("compute", arms, compute_criteria, xlabel=COMPUTE),
    define("hybrids", partial(arms, kinds=("ViT", "hybrid")), hybrid_criteria, xlabel=COMPUTE),
    define("saturation", partial(arms, kinds=("ViT",)), saturation_criteria, xlabel=COMPUTE),
)
