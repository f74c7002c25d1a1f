"""Self-supervised recipes: the paper's masked patch prediction and MAE, as published and small.

    plainvit train mae-cifar10 --data-root DIR --out runs/mae
    plainvit train cifar10 --init runs/mae --data-root DIR           or: plainvit finetune --init runs/mae ...

Sources: ViT (arXiv 2010.11929, 4.6 and B.1.2) and MAE (arXiv 2111.06377) with the code released with them. The run
folder holds a plain ViT without a head, which every command that loads weights reads.
"""

from functools import partial
from typing import Any

from plainvit.config import Augment, Config, Masked, Optim, Preprocess, ViTConfig
from plainvit.names import configure
from plainvit.recipes import Recipe, describe_recipe
from plainvit.recipes.starters import RECIPES as SUPERVISED

IMAGENET_PIXELS: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def masked_b16_jft() -> Config:
    """ViT-B/16 predicts the mean colors of half of the patches, a million steps of JFT-300M.

    Source: ViT (arXiv 2010.11929), B.1.2; JFT is not public: give images of your own
    Command: plainvit train masked-b16-jft --data DATA
    Expected: ImageNet 79.9 % after ft-imagenet (4.6); 2 points above training from scratch
    Cost: 432 exaFLOPs
    """
    # Settings not in the paper follow Table 3 on JFT: betas, crops, weight decay 0.1, no dropout, no clipping
    return Config(
        model=configure("ViT-B/16", classes=0),
        steps=1_000_000,
        batch=4096,
        objective="masked",
        masked=Masked(ratio=0.5, target="color"),
        optim=Optim(lr=2e-4, warmup=10_000, weight_decay=0.1, clip=0.0),
        augment=Augment(crop="inception-tf"),
        preprocess=Preprocess(resize="crop", crop=0.875),
    )


def masked_b16_i1k() -> Config:
    """ViT-B/16 predicts the mean colors of half of the patches, 100,000 steps of ImageNet.

    Source: ViT (arXiv 2010.11929), 4.6 and B.1.2, with the steps after which it found little more to gain
    Command: plainvit train masked-b16-i1k --data-root DIR
    Expected: not reported; not measured
    Cost: 43.2 exaFLOPs
    """
    return masked_b16_jft().replace(data="imagenet", holdout=0.01, steps=100_000)


def mae_b16_i1k() -> Config:
    """ViT-B/16 sees a quarter of the patches and predicts the pixels of the others, 800 epochs of ImageNet.

    Source: MAE (arXiv 2111.06377), its code's defaults; sin-cos positions are spaced as in big_vision
    Command: plainvit train mae-b16-i1k --data-root DIR
    Expected: ImageNet 83.6 % after MAE's fine-tuning of 1,600 epochs' weights (published)
    Cost: about half of the same epochs with labels
    """
    return Config(
        model=configure("ViT-B/16", classes=0, numerics="timm", posemb="sincos2d", **IMAGENET_PIXELS),
        data="imagenet",
        holdout=0.01,
        epochs=800,
        batch=4096,
        objective="mae",
        masked=Masked(ratio=0.75, target="pixels", normalize=True, depth=8, width=512, heads=16),
        optim=Optim(lr=1.5e-4 * 4096 / 256, betas=(0.9, 0.95), warmup=40 / 800, weight_decay=0.05, clip=0.0),
        augment=Augment(area=(0.2, 1.0)),
        preprocess=Preprocess(resize="crop", crop=0.875, interpolation="bicubic"),
    )


# Small: the models of recipes cifar10 and tiny-imagenet, which can start from the weights -----------------------------

SMALL_MASKS: dict[str, dict[str, Any]] = {
    "masked": {"ratio": 0.5, "target": "color"},
    "mae": {"ratio": 0.75, "target": "pixels", "normalize": True, "depth": 2, "width": 128, "heads": 4},
}
SMALL_COSTS = {
    "masked-cifar10": "not measured",
    "mae-cifar10": "1 min 20 s of training on one H200, 2 min 30 s in all",
    "masked-tiny-imagenet": "not measured",
    "mae-tiny-imagenet": "3 min 11 s on one H200, 3 min 45 s in all",
}


def _small(name: str) -> Config:
    """The optimizer of supervised training, with weaker crops: there is little risk of overfitting.

    MAE's encoder sees a quarter of the tokens: steps of four times as many images cost about as much.
    """
    objective, _, data = name.partition("-")
    labeled = SUPERVISED[data]()
    assert isinstance(labeled.model, ViTConfig)
    return labeled.replace(
        model=labeled.model.replace(stochastic_depth=0.0),
        epochs=250 if objective == "mae" else 200,
        batch=labeled.batch * (4 if objective == "mae" else 1),
        objective=objective,
        masked=Masked(**SMALL_MASKS[objective]),
        augment=labeled.augment.replace(randaugment=(0, 0), mixup=0.0, cutmix=0.0),
        ema_window=0.0,
    )


def _describe_small(name: str) -> Recipe:
    objective, _, data = name.partition("-")
    task = "predicts mean colors of half of the patches"
    source = "masks and target of ViT (arXiv 2010.11929), B.1.2"
    if objective == "mae":
        task = "sees a quarter of the patches and predicts the pixels of the others"
        source = "MAE (arXiv 2111.06377) with a decoder of 2 blocks of 128"
    return describe_recipe(
        partial(_small, name),
        summary=f"The ViT of the recipe {data} {task}.",
        source=f"plainvit; {source}",
        command=f"{name} --data-root DIR",
        expected="not measured",
        cost=SMALL_COSTS[name],
    )


def mae_photos() -> Config:
    """Pre-train a ViT-S/16 with MAE on your own photos, before fine-tuning it on their classes.

    Source: plainvit; MAE (arXiv 2111.06377) with a decoder of 4 blocks of 256
    Command: plainvit train mae-photos --data photos/
    Expected: not measured; with few photos, begin from published weights: --init WEIGHTS
    Cost: depends on the photos; --hours 1 fits it into an hour anywhere
    """
    return Config(
        model=configure("ViT-S/16", classes=0),
        holdout=0.05,
        epochs=400,
        batch=256,
        objective="mae",
        masked=Masked(ratio=0.75, target="pixels", normalize=True, depth=4, width=256, heads=8),
        optim=Optim(lr=6e-4, betas=(0.9, 0.95), warmup=0.05, weight_decay=0.05),
        augment=Augment(area=(0.2, 1.0)),
        evaluations=10,
    )


RECIPES: dict[str, Recipe] = {
    "masked-b16-jft": masked_b16_jft,
    "masked-b16-i1k": masked_b16_i1k,
    "mae-b16-i1k": mae_b16_i1k,
    **{name: _describe_small(name) for name in SMALL_COSTS},
    "mae-photos": mae_photos,
}
