"""What tokens carry through the layers: likeness of representations (CKA), and tokens that stick out.

layers = pooled(model, images)          one matrix [n, D] per layer
cka(layers[2], layers[7])               1 for the same up to rotation and scale, near 0 for unrelated ones
norms(model, images)                    [n, h, w], the length of each patch's last token
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plainvit.analyse.attention import batches, check
from plainvit.models import ResNet, Trace, ViT
from plainvit.models.inference import in_eval_mode

OUTLYING = 3.0  # times the median length: the artefacts of "Vision Transformers Need Registers" are far above it


@torch.no_grad()
@in_eval_mode
def pooled(model: ViT | ResNet, images: Tensor) -> list[Tensor]:
    """After each block, or each stage of a ResNet, the mean over the places of an image: [n, D] in float64."""
    if isinstance(model, ViT):
        names, prefix = [f"block{layer}/tokens" for layer in range(len(model.blocks))], model.config.prefix
        pool = lambda x: x[:, prefix:].mean(1)  # noqa: E731
    else:
        names, pool = [name for name in model.trace_names() if name.startswith("stage")], lambda x: x.mean((2, 3))
    found: list[list[Tensor]] = [[] for _ in names]
    for some in images.split(32):
        trace = Trace(*names)
        model(some.to(next(model.parameters()).device), trace)
        for kept, name in zip(found, names, strict=True):
            kept.append(pool(trace[name].double()).cpu())
    return [torch.cat(parts) for parts in found]


def cka(x: Tensor, y: Tensor) -> float:
    """Linear centred kernel alignment of [n, D] and [n, E], the same n images (Kornblith et al. 2019)."""
    x, y = x - x.mean(0), y - y.mean(0)
    x, y = x @ x.mT, y @ y.mT  # n x n, however wide the layers are
    scale = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def likeness(one: list[Tensor], other: list[Tensor]) -> Tensor:
    """[layers of one, layers of the other] CKA."""
    return torch.tensor([[cka(x, y) for y in other] for x in one])


@dataclass
class Outliers:
    """Patches whose last token is far longer than the others'."""

    norms: Tensor  # [n, h, w]
    share: float  # of all patches, beyond OUTLYING times the median
    images: float  # share of images with at least one
    largest: float  # the longest, in medians


@torch.no_grad()
@in_eval_mode
def outliers(model: ViT, images: Tensor) -> Outliers:
    """Of the tokens after the last block, before the final norm."""
    model = check(model)
    last = f"block{len(model.blocks) - 1}/tokens"
    found: list[Tensor] = []
    for some in batches(model, images):
        trace = Trace(last)
        model(some, trace)
        lengths = trace[last][:, model.config.prefix :].float().norm(dim=-1)
        found.append(lengths.unflatten(1, model.config.grid).cpu())
    norms = torch.cat(found)
    median = norms.median().clamp(min=torch.finfo(norms.dtype).tiny)
    far = norms > OUTLYING * median
    return Outliers(
        norms, float(far.float().mean()), float(far.flatten(1).any(1).float().mean()), float(norms.max() / median)
    )
