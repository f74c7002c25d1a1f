"""Small models for the tests, with random weights in every part."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from peers import scramble
from torch import Tensor

import plainvit
from plainvit.config import Model, ResNetConfig
from plainvit.models import ResNet, ViT, build
from plainvit.names import configure

SHAPE: dict[str, Any] = {"width": 48, "depth": 3, "heads": 4, "mlp_dim": 96}


def vit(dtype: torch.dtype = torch.float64, **settings: Any) -> ViT:
    """A ViT of 8 x 8 patches on 24 x 40 images: a grid of 3 rows and 5 columns."""
    settings = {"classes": 7, "image_size": (24, 40)} | SHAPE | settings
    model = plainvit.create("ViT-Ti/8", dtype=dtype, **settings)
    scramble(model)
    return model.eval()


def hybrid(
    dtype: torch.dtype = torch.float64,
    blocks: tuple[int, ...] = (1, 2),
    patch: int = 1,
    image_size: tuple[int, int] = (48, 80),
    numerics: str = "google",
    depth: int = 2,
) -> ViT:
    """A hybrid as R50x1+ViT-B/16 is built, with fewer units; each stage after the first halves the map."""
    base = configure("R50x1+ViT-B/16", classes=7, numerics=numerics)
    stem = base.stem.replace(blocks=blocks)
    return filled(base.replace(stem=stem, patch=patch, image_size=image_size, **SHAPE | {"depth": depth}), dtype)


def bit(dtype: torch.dtype = torch.float64, blocks: tuple[int, ...] = (2, 1, 1), numerics: str = "google") -> ResNet:
    config = configure("BiT-R50x1", classes=7, numerics=numerics)
    assert isinstance(config, ResNetConfig)
    return filled(config.replace(blocks=blocks), dtype)


def filled(config: Model, dtype: torch.dtype) -> Any:
    """The model of a config; its own initial weights, slow to draw for a ResNet, are skipped."""
    with torch.device("meta"):
        model = build(config).to(dtype)
    model.to_empty(device="cpu")
    scramble(model)
    return model.eval()


def images(
    batch: int = 2,
    size: tuple[int, int] = (24, 40),
    channels: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Tensor:
    """Noise in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, channels, *size, generator=generator, dtype=torch.float64).to(dtype)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; shapes must agree, and the values must not be constant."""
    assert a.shape == b.shape
    assert b.numel() == 1 or b.std() > 1e-3
    return (a - b).abs().max().item()


def mostly_slow(values: Iterable[Any], every: int) -> list[Any]:
    """Cases for parametrize: every `every`-th is in the fast set, the others are marked slow."""
    cases = [one if isinstance(one, tuple) else (one,) for one in values]
    return [pytest.param(*one, marks=[pytest.mark.slow] * (at % every > 0)) for at, one in enumerate(cases)]


def on_gpu(least: tuple[int, int] = (0, 0)) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test that needs a CUDA GPU of at least this compute capability."""
    lacks = not torch.cuda.is_available() or torch.cuda.get_device_capability() < least

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test = pytest.mark.filterwarnings("ignore::UserWarning")(test)  # the compiler advises TF32
        return pytest.mark.gpu(pytest.mark.skipif(lacks, reason=f"needs a CUDA GPU, {least} or newer")(test))

    return mark
