"""DeiT and DeiT III: ViTs trained only on ImageNet with strong augmentation, DeiT III with a binary loss and LAMB.

    plainvit train deit3-b16-i1k --data-root DIR
    plainvit finetune deit3-ft224 --init runs/deit3-b16-i1k --data-root DIR

Sources: DeiT (arXiv 2012.12877), DeiT III (arXiv 2204.07118), and the commands of facebookresearch/deit. Both warm up
from 1e-6, we from 0, and both resize crops by bicubic interpolation, we by bilinear.
"""

from functools import partial
from typing import Any, NamedTuple

from plainvit.config import Augment, Config, Model, Optim, Preprocess
from plainvit.names import configure
from plainvit.recipes import Recipe, describe_recipe

IMAGES = 1_281_167  # of ImageNet, to convert the warm-up of 5 epochs to steps
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# timm's "rand-m9": magnitude 9 out of 10, two operations with probability 0.5 each. Ours is out of 30 and applies
# both; the published number is kept
RANDAUGMENT = (2, 9)


def _model(name: str, image_size: int, **settings: Any) -> Model:
    shape = {"init": "timm", "mean": MEAN, "std": STD}
    return configure(name, classes=0, image_size=image_size, numerics="timm", **shape | settings)


def _warmup(batch: int) -> int:
    return round(5 * IMAGES / batch)


DEIT: dict[str, tuple[str, str, str]] = {  # model, accuracy on ImageNet, exaFLOPs
    "deit-ti16-i1k": ("ViT-Ti/16", "72.2", "2.89"),
    "deit-s16-i1k": ("ViT-S/16", "79.9", "10.6"),
    "deit-b16-i1k": ("ViT-B/16", "81.8", "40.5"),
}


# The augmentation that DeiT and DeiT III's fine-tuning share
STRONG: dict[str, Any] = {"area": (0.08, 1.0), "mixup": 0.8, "cutmix": 1.0}


def deit(name: str) -> Config:
    """DeiT without distillation: one setting for the three sizes."""
    lr = 5e-4 * 1024 / 512
    return Config(
        model=_model(DEIT[name][0], 224, stochastic_depth=0.1),
        data="imagenet",
        epochs=300,
        batch=1024,
        optim=Optim(lr=lr, warmup=_warmup(1024), lr_end=1e-5, weight_decay=0.05, clip=0.0),
        augment=Augment(randaugment=RANDAUGMENT, erase=0.25, repeats=3, smoothing=0.1, **STRONG),
        preprocess=Preprocess(resize="crop", crop=0.875, interpolation="bicubic"),
        ema=0.99996,  # DeiT also keeps this average, but reports the weights without it
    )


def _describe_deit(name: str) -> Recipe:
    model, accuracy, exaflops = DEIT[name]
    return describe_recipe(
        partial(deit, name),
        summary=f"{model} trained on ImageNet as DeiT, 300 epochs.",
        source="DeiT (arXiv 2012.12877), the defaults of its main.py",
        command=f"{name} --data-root DIR",
        expected=f"ImageNet {accuracy} % at 224 px",
        cost=f"{exaflops} exaFLOPs",
    )


class Third(NamedTuple):
    """A model of DeiT III."""

    model: str
    size: int
    lr: float
    stochastic_depth: float
    accuracy: str  # on ImageNet at 224 px, after fine-tuning where it was trained smaller
    exaflops: str


# DeiT III drops every block with this probability; ours grows linearly from 0 at the first block to it at the last, so
# half as much is dropped on the whole. H/14 is stated at 160 px, where a patch of 14 leaves the last 6 rows and columns
# out: 11 x 11 patches. At 154 px they are the whole image.
DEIT3: dict[str, Third] = {
    "deit3-s16-i1k": Third("ViT-S/16", 224, 4e-3, 0.05, "81.4", "28.3"),
    "deit3-b16-i1k": Third("ViT-B/16", 192, 3e-3, 0.2, "83.8", "78.6"),
    "deit3-l16-i1k": Third("ViT-L/16", 192, 3e-3, 0.45, "84.9", "276"),
    "deit3-h14-i1k": Third("ViT-H/14", 154, 3e-3, 0.6, "85.2", "480"),
}
SQUARE = Preprocess(resize="crop", crop=1.0, interpolation="bicubic")  # resize the short side, center crop with ratio 1


def deit3(name: str) -> Config:
    """Pre-training of DeiT III, at a lower resolution for all sizes but S."""
    row = DEIT3[name]
    shape = {"stochastic_depth": row.stochastic_depth, "layer_scale": 1e-4, "posemb_prefix": "none"}
    return Config(
        model=_model(row.model, row.size, **shape),
        data="imagenet",
        epochs=800,
        batch=2048,
        loss="binary",
        # Clipping is part of the LAMB implementation that it used
        optim=Optim(name="lamb", lr=row.lr, warmup=_warmup(2048), lr_end=1e-5, weight_decay=0.05, clip=1.0),
        augment=Augment(three_augment=True, color=0.3, repeats=3, **STRONG),
        preprocess=SQUARE,
    )


def deit3_at_224() -> Config:
    """DeiT III's weights fine-tuned on ImageNet at 224 px, 20 epochs.

    Source: DeiT III (arXiv 2204.07118), the commands of its README
    Command: plainvit finetune deit3-ft224 --init WEIGHTS --data-root DIR
    Expected: 83.8 % from deit3-b16-i1k, 84.9 % from deit3-l16-i1k, 85.2 % from deit3-h14-i1k
    Cost: 2.70 exaFLOPs for ViT-B/16
    """
    # The stochastic depth stays that of the weights: 0.6 for H/14, published as 0.55
    return Config(
        image_size=224,
        head="keep",
        data="imagenet",
        epochs=20,
        batch=512,
        # lr_end equals lr: constant after the warm-up
        optim=Optim(lr=1e-5, lr_end=1e-5, warmup=_warmup(512), weight_decay=0.1, clip=0.0),
        augment=Augment(randaugment=RANDAUGMENT, smoothing=0.1, **STRONG),
        preprocess=SQUARE,
    )


def _describe_deit3(name: str) -> Recipe:
    row = DEIT3[name]
    return describe_recipe(
        partial(deit3, name),
        summary=f"{row.model} trained on ImageNet at {row.size} px as DeiT III, 800 epochs.",
        source="DeiT III (arXiv 2204.07118), the commands of its README",
        command=f"{name} --data-root DIR",
        expected=f"ImageNet {row.accuracy} % at 224 px" + ("" if row.size == 224 else ", after deit3-ft224"),
        cost=f"{row.exaflops} exaFLOPs",
    )


RECIPES: dict[str, Recipe] = {name: _describe_deit(name) for name in DEIT}
RECIPES |= {name: _describe_deit3(name) for name in DEIT3}
RECIPES["deit3-ft224"] = deit3_at_224
