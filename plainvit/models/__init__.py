"""Images -> logits: the models, and `create`, which makes one by its name.

create("ViT-B/16")  create("R50x1+ViT-B/16")  create("BiT-R152x4")  create("Axial-ViT-B/32", classes=10)
"""

import importlib.util
from typing import Any

import torch

from plainvit.config import Model, ResNetConfig, ViTConfig
from plainvit.models.resnet import ResNet
from plainvit.models.trace import Trace
from plainvit.models.vit import ViT
from plainvit.names import configure

__all__ = ["ResNet", "Trace", "ViT", "build", "create"]


def build(config: Model) -> ViT | ResNet:
    """The model of a config, with PyTorch's default generator drawing its weights."""
    match config:
        case ViTConfig():
            return ViT(config)
        case ResNetConfig():
            return ResNet(config)


def create(
    name: str,
    classes: int = 1000,
    image_size: int | tuple[int, int] = 224,
    *,
    numerics: str = "google",
    seed: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> ViT | ResNet:
    """A new model by its name, with fresh weights.

    classes=0 leaves the head off. image_size is one number or (height, width). numerics is whose arithmetic to follow
    with the same weights: google, timm, transformers or torchvision. seed makes the weights repeatable. Any field of
    the config is a setting: create("ViT-S/16", pool="average", class_token=False, posemb="sincos2d").
    """
    config = configure(name, classes, image_size, numerics, **settings)
    with torch.device("meta"):  # shapes only: weights are drawn once, and on the device where they will live
        model = build(config)
    model = model.to(dtype).to_empty(device=device)
    chosen = None if seed is None or torch.device(device).type == "meta" else torch.Generator(device).manual_seed(seed)
    return model.initialise(chosen)


def has_fast_path() -> bool:
    """Whether `models/fast` is installed; without it every model runs as plain PyTorch."""
    return importlib.util.find_spec("plainvit.models.fast") is not None
