"""Recipes to start with: digits on a CPU, CIFAR-10 and Tiny-ImageNet from scratch on a GPU, your own photos."""

from typing import Any

from plainvit.config import Augment, Config, DataSummary, Optim, ViTConfig
from plainvit.names import configure
from plainvit.recipes import Recipe


def digits() -> Config:
    """Train a ViT of 0.1 million parameters on handwritten digits on two CPU cores.

    Source: plainvit; 1,437 training and 360 test images of 8 x 8 pixels
    Command: plainvit train digits
    Expected: 98.9 % test top-1, mean of 5 seeds (98.6 to 99.2)
    Cost: a minute on two cores
    """
    shape: dict[str, Any] = {"width": 64, "depth": 3, "heads": 4, "mlp_dim": 128, "patch": (2, 2), "image_size": (8, 8)}
    return Config(
        model=ViTConfig(classes=0, pool="average", class_token=False, **shape),
        data="digits",
        holdout=0.05,
        epochs=120,
        batch=64,
        optim=Optim(lr=2e-3, warmup=0.1, weight_decay=0.1),
        augment=Augment(crop="none", flip=0.0, mixup=1.0, cutmix=1.0),
        ema_window=0.1,
        evaluations=10,
    )


def pixels() -> Config:
    """Train on digits with one token per pixel and a class token, for 8 x 8 attention maps.

    Source: plainvit
    Command: plainvit train pixels
    Expected: 95.9 % test top-1, mean of 3 seeds (95.3 to 96.7)
    Cost: a minute on one core
    """
    base = digits()
    assert isinstance(base.model, ViTConfig)
    return base.replace(
        model=base.model.replace(patch=(1, 1), pool="token", class_token=True, init="timm"),
        epochs=40,
        optim=Optim(name="muon", lr=3e-3, momentum=0.95, warmup=0.1, weight_decay=0.1),
        augment=base.augment.replace(mixup=0.0),
    )


def small(data: DataSummary = DataSummary(images=5_000, classes=10, side=28, is_gray=True)) -> Config:  # noqa: B008
    """Train a small ViT on small images (28 to 64 px) from scratch, sized by the data.

    Source: plainvit; image size, patch, width and length follow the training images
    Command: plainvit train small --data FOLDER
    Expected: 98.7 % on 1,000 test images, trained on 5,000 (digits enlarged to 28 px, shifted and rotated; one seed)
    Cost: 3 minutes on one core for 5,000 images
    """
    patch = max(round(data.side / 8), 1)  # about 8 x 8 tokens
    side = max(round(data.side / patch), 1) * patch
    shape: dict[str, Any] = {"width": 64, "depth": 4, "heads": 4, "mlp_dim": 128}
    if data.images >= 20_000:
        shape = {"width": 128, "depth": 6, "heads": 4, "mlp_dim": 256}
    shape |= {"patch": (patch, patch), "image_size": (side, side)}
    return Config(
        model=ViTConfig(classes=0, pool="average", class_token=False, init="timm", **shape),
        holdout=0.05 if data.images >= 2_000 else 0.15,
        epochs=float(min(max(100_000 // data.images, 5), 100)),
        batch=64,
        optim=Optim(name="muon", lr=3e-3, momentum=0.95, warmup=0.05, weight_decay=0.1),
        # Gray images are mostly characters, which a flip would change. Mixing would need a longer run
        augment=Augment(crop="pad", pad=max(side // 10, 1), flip=0.0 if data.is_gray else 0.5),
        ema_window=0.1,
        evaluations=10,
    )


def cifar10() -> Config:
    """Train a ViT of 8 million parameters with 4-pixel patches on CIFAR-10 from scratch.

    Source: plainvit
    Command: plainvit train cifar10 --data-root DIR
    Expected: 93.8 % test top-1 (one seed, on JPEG copies of the images); 93.0 % with --epochs 165
    Cost: 7.3 minutes on an H200; 4.1 with --epochs 165
    """
    return _scratch("cifar10", side=32, patch=4, epochs=300, augment=Augment(crop="pad", pad=4, **STRONG))


def tiny_imagenet() -> Config:
    """Train a ViT of 8 million parameters with 8-pixel patches on Tiny-ImageNet from scratch.

    Source: plainvit
    Command: plainvit train tiny-imagenet --data-root DIR
    Expected: 60.0 % test top-1 (one seed, on 78,677 training images)
    Cost: 7.0 minutes on an H200
    """
    return _scratch("tiny-imagenet", side=64, patch=8, epochs=220, augment=Augment(area=(0.25, 1.0), **STRONG))


# On small datasets a ViT needs strong augmentation (AugReg); of the two mixing methods CutMix matters most here
STRONG: dict[str, Any] = {"randaugment": (2, 10), "mixup": 0.2, "cutmix": 1.0}


def _scratch(data: str, side: int, patch: int, epochs: int, augment: Augment) -> Config:
    """Muon, because AdamW is slow here: 58 % after 45 epochs of CIFAR-10 at lr 1e-3 and batch 1024.

    Small batches give more steps: 28 epochs of CIFAR-10 reach 83.7 % (held out, one seed) with batch 256 at lr 2e-3;
    with batch 512 81.1 % at 3e-3 and 80.5 % at 1.5e-3.
    """
    shape: dict[str, Any] = {"width": 256, "depth": 10, "heads": 4, "mlp_dim": 1024, "stochastic_depth": 0.1}
    shape |= {"patch": (patch, patch), "image_size": (side, side)}
    return Config(
        model=ViTConfig(classes=0, pool="average", class_token=False, **shape),
        data=data,
        holdout=0.02,
        epochs=epochs,
        batch=256,
        optim=Optim(name="muon", lr=2e-3, momentum=0.95, warmup=0.05, weight_decay=0.1),
        augment=augment,
        ema_window=0.05,
        evaluations=10,
    )


def finetune() -> Config:
    """Fine-tune pretrained weights on a folder of photos.

    Source: plainvit; AdamW with layer-wise decay as in MAE's fine-tuning, with learning rates for small datasets
    Command: plainvit finetune --init WEIGHTS --data photos/
    Expected: depends on the photos
    Cost: 20 epochs, at least 200 steps: minutes on a GPU; --hours 1 limits it to an hour on any machine
    """
    return Config(
        head="linear",
        holdout=0.15,
        batch=64,
        optim=Optim(lr=3e-4, warmup=0.1, weight_decay=0.05, layer_decay=0.75, grid=(1e-4, 3e-4, 1e-3)),
        augment=Augment(area=(0.3, 1.0), color=0.2),
        evaluations=10,
    )


def photos() -> Config:
    """Train a small BiT ResNet on a folder of photos without pretrained weights.

    Source: plainvit; a ResNet, since it learns more from few images than a ViT (ViT, 4.3)
    Command: plainvit train photos --data photos/
    Expected: 43.6 % on 987 photos after training on 204 (6 breeds of oxford-pets, one seed); majority class 20.3 %
    Cost: 318 steps of 0.5 s on two cores for 204 photos
    """
    return Config(
        model=configure("BiT-R26x1", classes=0, image_size=64),
        holdout=0.15,
        epochs=50,
        batch=32,
        optim=Optim(lr=1e-3, warmup=0.05, weight_decay=0.1),
        augment=Augment(area=(0.25, 1.0), color=0.2, mixup=0.2),
        ema_window=0.05,
        evaluations=10,
    )


RECIPES: dict[str, Recipe] = {
    "digits": digits,
    "pixels": pixels,
    "small": small,
    "cifar10": cifar10,
    "tiny-imagenet": tiny_imagenet,
    "finetune": finetune,
    "photos": photos,
}
