"""Big Transfer: BiT-HyperRule for fine-tuning, and the paper's ResNets pre-trained with SGD.

    plainvit finetune bit-small --init runs/r50x1-jft --data DIR

Source: BiT (arXiv 1912.11370), section 3.3; ViT (arXiv 2010.11929), Table 7. The ViT paper ran its ResNets with this
rule and with its own Table 4, and kept the better.
"""

from functools import partial
from typing import NamedTuple

from plainvit.config import Augment, Config, Optim, Preprocess
from plainvit.recipes import Recipe, describe_recipe
from plainvit.recipes.paper import pretraining


class Rule(NamedTuple):
    """Settings that BiT-HyperRule determines."""

    steps: int
    resize: int  # side of the square before the crop
    crop: int  # side of the training images
    mixup: float


def hyperrule(images: int, area: int) -> Rule:
    """BiT-HyperRule for a number of training images and the pixels of an image (height times width).

    The published rule has no warm-up; the released code uses 100 steps on small datasets and 500 on others.
    """
    steps = 500 if images < 20_000 else 10_000 if images < 500_000 else 20_000
    # R152x4, and the released code for all models, resize to 512 and crop 480 instead of 448 and 384
    resize, crop = (160, 128) if area < 96 * 96 else (448, 384)
    return Rule(steps, resize, crop, mixup=0.1 if images >= 20_000 else 0.0)


class Transfer(NamedTuple):
    """One recipe for each size class, for images above and below 96 x 96 pixels."""

    images: int
    area: int
    title: str
    exaflops: str  # for BiT-R50x1
    expected: str = "not reported"


# Expected: ViT's Table 2. R152x4 is trained at 480 px where others are at 384
LARGE, SMALL = 224 * 224, 64 * 64
PETS = "96.62 ± 0.23 % on Pets for BiT-L R152x4 at its 480 px; others not reported"
IMAGENET = "87.54 ± 0.02 % on ImageNet for BiT-L R152x4 at its 480 px; others not reported"
CIFAR = "99.37 ± 0.06 % on CIFAR-10 for BiT-L R152x4; others not reported"
TRANSFERS: dict[str, Transfer] = {
    "bit-small": Transfer(10_000, LARGE, "under 20,000 images", "0.0184", PETS),
    "bit-medium": Transfer(100_000, LARGE, "20,000 to 500,000 images", "0.369"),
    "bit-large": Transfer(1_000_000, LARGE, "500,000 or more images", "0.738", IMAGENET),
    "bit-small-128": Transfer(10_000, SMALL, "under 20,000 images below 96 x 96 pixels", "0.00205"),
    "bit-medium-128": Transfer(100_000, SMALL, "20,000 to 500,000 images below 96 x 96 pixels", "0.0410", CIFAR),
    "bit-large-128": Transfer(1_000_000, SMALL, "500,000 or more images below 96 x 96 pixels", "0.0820"),
}


def transfer(name: str) -> Config:
    """The rule's settings as a config; the model is that of --init, with a head of zeros."""
    rule = hyperrule(TRANSFERS[name].images, TRANSFERS[name].area)
    return Config(
        image_size=rule.crop,
        steps=rule.steps,
        batch=512,
        optim=Optim(name="sgd", lr=0.003, schedule="steps", milestones=(0.3, 0.6, 0.9), clip=0.0),
        augment=Augment(crop="random", resize=rule.resize / rule.crop, mixup=rule.mixup),
        preprocess=Preprocess(resize="squash"),
    )


def _describe_transfer(name: str) -> Recipe:
    row, config = TRANSFERS[name], transfer(name)
    return describe_recipe(
        partial(transfer, name),
        summary=f"Fine-tuning by BiT-HyperRule on {row.title}: {config.steps:,} steps at {config.image_size} px.",
        source="BiT (arXiv 1912.11370), section 3.3",
        command=f"{name} --init WEIGHTS --data DATA",
        expected=row.expected,
        cost=f"{row.exaflops} exaFLOPs for BiT-R50x1",
    )


# Table 7 compares the two optimizers on ResNets: the rows of Table 3, except for these settings
SGD = Optim(
    name="sgd",
    lr=0.03 * 4096 / 256,
    weight_decay=1e-4,
    warmup=5_000,
    schedule="linear",  # not stated; the schedule of all rows on JFT
    lr_end=1e-5,
    clip=0.0,
)


def _describe_pretraining(name: str, model: str, expected: str, exaflops: str) -> Recipe:
    return describe_recipe(
        lambda: pretraining(name).replace(optim=SGD),
        summary=f"{model} pre-trained on JFT-300M with SGD, 7 epochs.",
        source="ViT (arXiv 2010.11929), Table 7; JFT is not public: give images of your own",
        command=f"{name}-sgd --data DATA",
        expected=f"ImageNet {expected} % after fine-tuning (Table 7)",
        cost=f"{exaflops} exaFLOPs",
    )


RECIPES: dict[str, Recipe] = {name: _describe_transfer(name) for name in TRANSFERS}
RECIPES["r50x1-jft-sgd"] = _describe_pretraining("r50x1-jft", "BiT-R50x1", "78.24", "52.5")
RECIPES["r152x2-jft-sgd"] = _describe_pretraining("r152x2-jft", "BiT-R152x2", "84.37", "584")
