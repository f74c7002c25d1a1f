"""Claims 3, 4 and 5: on little data a ResNet leads, a ViT overfits more, and a larger ViT is no better (Figures 3, 4).

    plainvit study data-size --budget cpu          also overfitting, model-size

As in Figure 4, models learn from nested subsets with the same settings, no more regularization on the smaller ones and
early stopping. The ResNet is a BiT one of about the ViT's multiply-adds; its root divides the image by 4, where small
images are often given a stem that does not, so if anything it is held back. On a GPU the subsets are of 1,000 to 40,000
images of CIFAR-10. The crossover itself lies at 30 to 90 million images in the paper, so what is tested is that the
gap shrinks: the slope over the number of images.
"""

from functools import partial

from plainvit.config import Config, Model, ResNetConfig
from plainvit.planning.datasets import IMAGES
from plainvit.studies.base_configs import by_adamw, plain, pretrain_config, vit
from plainvit.studies.compute import models, slopes
from plainvit.studies.measures import overfitting
from plainvit.studies.study import MARGIN, Arm, Budget, Results, define
from plainvit.studies.verdict import Criterion

VIT, RESNET, LARGE = "ViT", "ResNet", "large ViT"
FRACTIONS: dict[Budget, tuple[float, ...]] = {"cpu": (0.05, 0.1, 0.25, 1.0), "gpu": (0.025, 0.1, 0.3, 1.0)}


def subsets(budget: Budget) -> dict[int, Config]:
    """By the number of training images; the same settings for all."""
    if budget == "gpu":
        config = by_adamw(budget).replace(augment=plain(budget).augment, evaluations=10, patience=3)
        whole = IMAGES["cifar10"] * (1 - config.holdout)
    else:
        config = plain(budget).replace(data=pretrain_config(budget).data, steps=200, evaluations=10, patience=3)
        whole = IMAGES["digits"] / 2 * (1 - config.holdout)  # half of the classes
    return {round(part * whole): config.replace(train_fraction=part) for part in FRACTIONS[budget]}


def models_by_kind(budget: Budget) -> dict[str, Model]:
    """The ResNet has about as many multiply-adds as the ViT; the heads of the large ViT keep their width."""
    small = vit(next(iter(subsets(budget).values())))
    cells = ResNetConfig(blocks=(1,), image_size=(16, 16), classes=0)
    large = small.replace(width=2 * small.width, mlp_dim=2 * small.mlp_dim, heads=2 * small.heads)
    return {VIT: small, RESNET: cells if budget == "cpu" else models(budget)["ResNet"][2], LARGE: large}


def arms(budget: Budget, kinds: tuple[str, ...] = (VIT, RESNET), count: int = 4) -> dict[str, Arm]:
    """On the smallest `count` subsets; x is the number of training images."""
    return {
        f"{kind}, {images:,} images": Arm(config.replace(model=models_by_kind(budget)[kind]), x=images, group=kind)
        for kind in kinds
        for images, config in list(subsets(budget).items())[:count]
    }


def criteria(results: Results) -> list[Criterion]:
    return [
        results.above(results.group(RESNET)[0], results.group(VIT)[0]),
        results.contrast("gain per doubling of the images, ViT - ResNet", slopes(results, {VIT: 1, RESNET: -1})),
    ]


def overfitting_criteria(results: Results) -> list[Criterion]:
    return [results.above(a, b) for a, b in zip(results.group(VIT), results.group(RESNET), strict=True)]


def size_criteria(results: Results) -> list[Criterion]:
    small, large = results.group(VIT)[0], results.group(LARGE)[0]
    return [
        results.not_worse(small, large, MARGIN),
        results.contrast("gain per doubling of the images, large - small", slopes(results, {LARGE: 1, VIT: -1})),
    ]


STUDIES = (
    define("data-size", arms, criteria, xlabel="training images"),
    define(
        "overfitting",
        partial(arms, count=3),
        overfitting_criteria,
        measure=overfitting,
        metric="overfitting",
        xlabel="training images",
    ),
    define("model-size", partial(arms, kinds=(VIT, LARGE)), size_criteria, xlabel="training images"),
)
