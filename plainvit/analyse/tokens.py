"""Similarity of layers (CKA) and norms of tokens.

layers = pooled(model, images)          one matrix [n, D] for each layer
cka(layers[2], layers[7])               1 if equal up to rotation and scale, near 0 if unrelated
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plainvit.analyse.attention import require_vit, split_batches
from plainvit.models import ResNet, Trace, ViT
from plainvit.models.inference import in_eval_mode

OUTLYING = 3.0  # times the median norm; the artefacts of "Vision Transformers Need Registers" are far above


@torch.no_grad()
@in_eval_mode
def pool_tokens(model: ViT | ResNet, images: Tensor) -> list[Tensor]:
    """Mean over the patches after each block, or over the pixels after each stage of a ResNet: [n, D] in float64."""
    if isinstance(model, ViT):
        names, prefix = [f"block{layer}/tokens" for layer in range(len(model.blocks))], model.config.prefix
        pool = lambda x: x[:, prefix:].mean(1)  # noqa: E731
    else:
        names, pool = [name for name in model.trace_names() if name.startswith("stage")], lambda x: x.mean((2, 3))
    found: list[list[Tensor]] = [[] for _ in names]
    for batch in images.split(32):
        trace = Trace(*names)
        model(batch.to(next(model.parameters()).device), trace)
        for kept, name in zip(found, names, strict=True):
            kept.append(pool(trace[name].double()).cpu())
    return [torch.cat(parts) for parts in found]


def cka(x: Tensor, y: Tensor) -> float:
    """Linear centred kernel alignment of [n, D] and [n, E], the same n images (Kornblith et al. 2019)."""
    x, y = x - x.mean(0), y - y.mean(0)
    x, y = x @ x.mT, y @ y.mT  # n x n, however wide the layers are
    scale = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def cka_matrix(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """[layers of first, layers of second]"""
    return torch.tensor([[cka(x, y) for y in second] for x in first])


@dataclass
class Outliers:
    """Patches whose last token has a norm far above the median."""

    norms: Tensor  # [n, h, w]
    share: float  # fraction of patches above OUTLYING times the median
    images: float  # fraction of images with at least one
    largest: float  # the largest norm, in medians


@torch.no_grad()
@in_eval_mode
def outliers(model: ViT, images: Tensor) -> Outliers:
    """Norms of the tokens after the last block, before the final norm."""
    model = require_vit(model)
    last = f"block{len(model.blocks) - 1}/tokens"
    found: list[Tensor] = []
    for batch in split_batches(model, images):
        trace = Trace(last)
        model(batch, trace)
        lengths = trace[last][:, model.config.prefix :].float().norm(dim=-1)
        found.append(lengths.unflatten(1, model.config.grid).cpu())
    norms = torch.cat(found)
    median = norms.median().clamp(min=torch.finfo(norms.dtype).tiny)
    far = norms > OUTLYING * median
    return Outliers(
        norms, float(far.float().mean()), float(far.flatten(1).any(1).float().mean()), float(norms.max() / median)
    )
