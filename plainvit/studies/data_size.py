"""Claims 3, 4 and 5: on little data a ResNet leads, a ViT overfits more, and a larger ViT is no better (Figures 3, 4).

    plainvit study data-size --budget cpu
    plainvit study overfitting --budget cpu
    plainvit study model-size --budget cpu

As in Figure 4, models learn from nested subsets with the same settings, no more regularisation on the smaller ones and
early stopping. The ResNet is a BiT one of about the ViT's multiply-adds; its root divides the image by 4, where small
images are often given a stem that does not, so if anything it is held back. On a GPU 1,000 to 2 million images are
drawn. The crossover itself lies at some 30 to 90 million images in the paper, so what is tested is that the gap
shrinks: the slope over the number of images.
"""

from plainvit.config import Config, Model, ResNetConfig, ViTConfig
from plainvit.planning.datasets import IMAGES
from plainvit.studies.bases import plain, pretrain_config, vit
from plainvit.studies.compute import ENDLESS, drawn_images, models, slopes
from plainvit.studies.evidence import Part
from plainvit.studies.measures import overfitting
from plainvit.studies.study import MARGIN, Arm, Budget, Results, define

VIT, RESNET = "ViT", "ResNet"
FRACTIONS = (0.05, 0.1, 0.25, 1.0)  # of the digits
COUNTS = (1_000, 10_000, 100_000, ENDLESS)  # of drawn images; each set holds those before it


def subsets(budget: Budget) -> dict[int, Config]:
    """By the number of training images; the same settings for all."""
    if budget == "gpu":
        return {count: drawn_images(count) for count in COUNTS}
    config = plain(budget).replace(data=pretrain_config(budget).data, steps=200, evaluations=10, patience=3)
    whole = round(IMAGES["digits"] / 2 * (1 - config.holdout))  # half of the classes
    return {round(share * whole): config.replace(train_fraction=share) for share in FRACTIONS}


def resnet(budget: Budget) -> Model:
    """About as many multiply-adds as the ViT."""
    if budget == "cpu":
        return ResNetConfig(blocks=(1,), image_size=(16, 16), classes=0)
    return models(budget)["ResNet"][1]


def widen(model: ViTConfig) -> ViTConfig:
    """Twice as wide; heads keep their width."""
    return model.replace(width=2 * model.width, mlp_dim=2 * model.mlp_dim, heads=2 * model.heads)


def make_arms(budget: Budget, kinds: dict[str, Model], most: float = float("inf")) -> dict[str, Arm]:
    """x is the number of training images."""
    return {
        f"{kind}, {count:,} images": Arm(config.replace(model=model), x=count, group=kind)
        for kind, model in kinds.items()
        for count, config in subsets(budget).items()
        if count <= most
    }


def plain_vit(budget: Budget) -> ViTConfig:
    return vit(next(iter(subsets(budget).values())))


def arms(budget: Budget) -> dict[str, Arm]:
    return make_arms(budget, {VIT: plain_vit(budget), RESNET: resnet(budget)})


def small_arms(budget: Budget) -> dict[str, Arm]:
    """All but the largest subset."""
    return make_arms(budget, {VIT: plain_vit(budget), RESNET: resnet(budget)}, sorted(subsets(budget))[-2])


def size_arms(budget: Budget) -> dict[str, Arm]:
    return make_arms(budget, {VIT: plain_vit(budget), "large ViT": widen(plain_vit(budget))})


def parts(found: Results) -> list[Part]:
    return [
        found.above(found.group(RESNET)[0], found.group(VIT)[0]),
        found.contrast("gain per doubling of the images, ViT - ResNet", slopes(found, {VIT: 1, RESNET: -1})),
    ]


def overfitting_parts(found: Results) -> list[Part]:
    return [found.above(a, b) for a, b in zip(found.group(VIT), found.group(RESNET), strict=True)]


def size_parts(found: Results) -> list[Part]:
    small, large = found.group(VIT)[0], found.group("large ViT")[0]
    return [
        found.not_worse(small, large, MARGIN),
        found.contrast("gain per doubling of the images, large - small", slopes(found, {"large ViT": 1, VIT: -1})),
    ]


STUDIES = (
    define("data-size", arms, parts, xlabel="training images"),
    define(
        "overfitting",
        small_arms,
        overfitting_parts,
        measure=overfitting,
        metric="overfitting",
        xlabel="training images",
    ),
    define("model-size", size_arms, size_parts, xlabel="training images"),
)
