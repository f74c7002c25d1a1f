"""The models, and `create`, which makes one by its name.

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
    """Builds the model of a config; PyTorch's default generator draws its weights."""
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
    """Creates a model by its name, with new weights.

    Args:
        name: A name of `plainvit models`.
        classes: The number of classes; 0 leaves the head off.
        image_size: One number, or (height, width).
        numerics: Whose arithmetic to follow: google, timm, transformers, torchvision or open_clip.
        seed: Makes the weights repeatable.
        device: Where the weights are drawn.
        dtype: The dtype of the weights.
        settings: Any field of the config.

    Returns:
        The model in training mode.

    Example:
        model = plainvit.create("ViT-S/16", classes=10, pool="average", class_token=False)
    """
    config = configure(name, classes, image_size, numerics, **settings)
    with torch.device("meta"):  # shapes only: weights are drawn once, on their device
        model = build(config)
    model = model.to(dtype).to_empty(device=device)
    if seed is None or torch.device(device).type == "meta":
        return model.initialize()
    return model.initialize(torch.Generator(device).manual_seed(seed))


def has_fast_path() -> bool:
    """Whether `models/fast` is installed; without it every model runs as plain PyTorch."""
    return importlib.util.find_spec("plainvit.models.fast") is not None
