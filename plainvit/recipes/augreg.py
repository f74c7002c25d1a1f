"""AugReg: augmentation and regularization for each model size on ImageNet and ImageNet-21k.

    plainvit train augreg-s16-i1k --data-root DIR
    plainvit finetune augreg-ft-imagenet --init runs/augreg-s16-i21k --data-root DIR

Source: "How to train your ViT?" (arXiv 2106.10270); the choices for ImageNet are those of big_vision's vit_i1k.py,
those for ImageNet-21k are read off the names of the released weights that have the expected accuracy.
"""

from functools import partial
from typing import Literal, NamedTuple

from plainvit.config import Augment, Config, Optim, Preprocess
from plainvit.names import configure
from plainvit.recipes import Recipe, describe_recipe

# RandAugment's (operations, magnitude) and mixup's alpha. The source's magnitudes are out of 10, torchvision's out of
# 30: the same number rotates and shifts a third as far. The number is kept, because a replication of big_vision's
# S/16 with torchvision's (2, 10) matched the original.
LEVELS: dict[str, tuple[tuple[int, int], float]] = {
    "light1": ((2, 0), 0.0),
    "medium1": ((2, 15), 0.2),
    "medium2": ((2, 15), 0.5),
    "strong1": ((2, 20), 0.5),
}


class Row(NamedTuple):
    model: str
    data: Literal["imagenet", "imagenet21k"]
    level: str
    weight_decay: float
    regularization: float  # rate of dropout and of stochastic depth in the last block: 0.1 or 0
    accuracy: str  # on ImageNet
    exaflops: str  # as `plainvit.planning.cost` counts them


# All rows: Adam, batches of 4,096, 300 epochs, lr 0.001, cosine, 10,000 steps of warm-up, clipped at 1, 224 pixels.
# vit_i1k.py uses neither dropout nor stochastic depth; it notes that the paper found them to help B and L on ImageNet.
ROWS: dict[str, Row] = {
    "augreg-ti16-i1k": Row("ViT-Ti/16", "imagenet", "light1", 0.1, 0.0, "72.59", "2.86"),
    "augreg-s32-i1k": Row("ViT-S/32", "imagenet", "medium1", 0.1, 0.0, "72.07", "2.61"),
    "augreg-s16-i1k": Row("ViT-S/16", "imagenet", "medium2", 0.1, 0.0, "79.00", "10.5"),
    "augreg-b32-i1k": Row("ViT-B/32", "imagenet", "medium2", 0.1, 0.0, "74.42", "10.1"),
    "augreg-b16-i1k": Row("ViT-B/16", "imagenet", "medium2", 0.1, 0.0, "79.84", "40.1"),
    "augreg-l16-i1k": Row("ViT-L/16", "imagenet", "medium2", 0.1, 0.0, "75.72", "141"),
    "augreg-s16-i21k": Row("ViT-S/16", "imagenet21k", "light1", 0.03, 0.0, "83.73", "117"),
    "augreg-b32-i21k": Row("ViT-B/32", "imagenet21k", "light1", 0.1, 0.0, "83.59", "113"),
    "augreg-b16-i21k": Row("ViT-B/16", "imagenet21k", "medium1", 0.1, 0.0, "85.49", "447"),
    "augreg-l16-i21k": Row("ViT-L/16", "imagenet21k", "strong1", 0.1, 0.0, "85.59", "1,567"),
    "augreg-r50+l32-i21k": Row("R50x1+ViT-L/32", "imagenet21k", "medium1", 0.1, 0.1, "85.99", "495"),
}


def pretraining(name: str) -> Config:
    """A row of the table as a config."""
    row = ROWS[name]
    (operations, magnitude), mixup = LEVELS[row.level]
    model = configure(row.model, classes=0, dropout=row.regularization, stochastic_depth=row.regularization)
    if row.data == "imagenet":  # on ImageNet-21k the hidden layer of the head gained nothing and was unstable (3.2)
        model = model.replace(representation=model.width)
    return Config(
        model=model,
        data=row.data,
        holdout=0.01 if row.data == "imagenet" else 0.004,  # big_vision: 1 %, and 51,200 of 14 million images
        epochs=300,
        batch=4096,
        loss="sigmoid",
        head_bias=-6.9 if row.data == "imagenet" else -10.0,
        optim=Optim(lr=1e-3, warmup=10_000, weight_decay=row.weight_decay),
        augment=Augment(crop="inception-tf", randaugment=(operations, magnitude), mixup=mixup),
        preprocess=Preprocess(resize="crop", crop=0.875),
    )


def _describe_pretraining(name: str) -> Recipe:
    row = ROWS[name]
    title, source, protocol = "ImageNet", "big_vision's vit_i1k.py", "at 224 px"
    if row.data == "imagenet21k":
        title, source, protocol = "ImageNet-21k", "released weights", "after augreg-ft-imagenet, 384 px"
    return describe_recipe(
        partial(pretraining, name),
        summary=f"{row.model} trained on {title} with AugReg's {row.level}, 300 epochs.",
        source=f"AugReg (arXiv 2106.10270), {source}",
        command=f"{name} --data-root DIR",
        expected=f"ImageNet {row.accuracy} % {protocol}",
        cost=f"{row.exaflops} exaFLOPs",
    )


def _finetuning(steps: int, warmup: int, grid: tuple[float, ...], **settings: str | float) -> Config:
    """As in the ViT paper, with a shorter grid; crop and test-time resize follow the released code."""
    optim = Optim(name="sgd", lr=0.01, warmup=warmup, grid=grid)
    return Config(
        image_size=384,
        steps=steps,
        batch=512,
        optim=optim,
        augment=Augment(crop="inception-tf"),
        preprocess=Preprocess(resize="squash"),
    ).replace(**settings)


def finetune_imagenet() -> Config:
    """AugReg's weights fine-tuned on ImageNet at 384 px, 20,000 steps.

    Source: AugReg (arXiv 2106.10270); of its two rates, 0.01 is that of most released weights
    Command: plainvit finetune augreg-ft-imagenet --init WEIGHTS --data-root DIR
    Expected: 85.49 % from augreg-b16-i21k, 85.59 % from augreg-l16-i21k
    Cost: 3.41 exaFLOPs for ViT-B/16
    """
    return _finetuning(20_000, 500, (0.01, 0.03), data="imagenet", search_holdout=0.01)


def finetune_other() -> Config:
    """AugReg's weights fine-tuned on a smaller data set at 384 px, 2,500 steps.

    Source: AugReg (arXiv 2106.10270); the length is that of VTAB-1k
    Command: plainvit finetune augreg-ft-other --init WEIGHTS --data DATA --data-root DIR
    Expected: not reported
    Cost: 0.426 exaFLOPs for ViT-B/16
    """
    return _finetuning(2_500, 200, (1e-3, 3e-3, 0.01), search_holdout=0.1)


RECIPES: dict[str, Recipe] = {name: _describe_pretraining(name) for name in ROWS}
RECIPES |= {"augreg-ft-imagenet": finetune_imagenet, "augreg-ft-other": finetune_other}
