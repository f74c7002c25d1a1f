"""Attention distance of every head, and attention maps.

    attention_distance(model, images)    [layers, heads] in pixels (Figures 7 and 11)
    rollout(model, images)               [B, h, w], attention multiplied through the layers (Figures 6 and 14)
    relevance(model, images, classes)    [B, h, w], the same weighted by gradients of the class

The model runs with its fused kernel. The attention weights of each layer are recomputed next to it, reduced and freed,
so that memory holds one layer of one batch.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from plainvit.models import Trace, ViT
from plainvit.models.inference import in_eval_mode

MAX_WEIGHTS = 60_000_000  # attention weights in memory at the same time: 240 MB


class AttentionReducer(Trace):
    """A trace that stores `reduce(layer, attention)` of each layer in place of its attention [B, H, N, N]."""

    def __init__(self, reduce: Callable[[int, Tensor], Any]) -> None:
        super().__init__("block*/attention")
        self.reduce = reduce
        self.results: list[Any] = []

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.results.append(self.reduce(len(self.results), value))


def reduce_attention(model: ViT, images: Tensor, reduce: Callable[[int, Tensor], Any]) -> list[Any]:
    """`reduce(layer, attention [B, H, N, N])` of each layer, from one forward pass."""
    reducer = AttentionReducer(reduce)
    model(images, reducer)
    return reducer.results


class NotApplicableError(ValueError):
    """An analysis that the model's architecture does not support."""


def require_vit(model: object) -> ViT:
    if not isinstance(model, ViT):
        raise NotApplicableError("this model has no attention: it is a ResNet")
    return model


def require_global_attention(model: object) -> ViT:
    model = require_vit(model)
    if model.config.axial:
        raise NotApplicableError(
            "attention maps are not supported for axial models: "
            "axial attention covers only one row or column of patches"
        )
    return model


def split_batches(model: ViT, images: Tensor, layers: int = 1) -> Iterator[Tensor]:
    """Batches whose attention weights, in this many layers, fit into MAX_WEIGHTS; on the model's device."""
    size = max(MAX_WEIGHTS // (layers * model.config.heads * model.config.tokens**2), 1)
    for batch in images.split(size):
        yield batch.to(model.embedding.weight.device)


# Distance -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@in_eval_mode
def attention_distance(model: ViT, images: Tensor) -> Tensor:
    """[layers, heads]: mean distance in pixels between a patch and the patches it attends to.

    Attention to other tokens, such as the class token, is excluded and the rest renormalized; the paper does not
    say how it treats them. Axial layers attend along one axis only.
    """
    model = require_vit(model)
    total = torch.zeros(len(model.blocks), model.config.heads, dtype=torch.float64)
    for batch in split_batches(model, images):
        distances = reduce_attention(model, batch, lambda layer, attention: layer_distance(model, layer, attention))
        total += len(batch) * torch.stack(distances).double().cpu()
    return total / len(images)


def layer_distance(model: ViT, layer: int, attention: Tensor) -> Tensor:
    """[H]: mean distance of one layer's attention [B, H, N, N]."""
    prefix = model.config.prefix
    patches = attention[:, :, prefix:, prefix:]  # [B, H, n, n]
    pixels = patch_distances(model, layer).to(attention)
    distance = (patches * pixels).sum(-1) / patches.sum(-1).clamp(min=torch.finfo(patches.dtype).tiny)
    return distance.mean((0, 2))


def patch_distances(model: ViT, layer: int) -> Tensor:
    """[n, n] pixels between the centers of the patches that a layer attends over."""
    (h, w), (height, width) = model.config.grid, model.config.image_size
    y, x = torch.arange(h) * (height / h), torch.arange(w) * (width / w)
    axis = model.blocks[layer].axis
    if axis is not None:
        line = x if axis == "row" else y
        return (line[:, None] - line).abs()
    centers = torch.cartesian_prod(y, x)  # [n, 2]
    return torch.cdist(centers, centers)


# Maps -----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@in_eval_mode
def rollout(model: ViT, images: Tensor, *, residual: bool = True) -> Tensor:
    """[B, h, w]: the attention of each layer, mean over heads, multiplied through the layers (Abnar and Zuidema 2020).

    residual: average each layer's matrix with the identity, as in that paper; the ViT paper's text does not.
    """
    model = require_global_attention(model)
    maps: list[Tensor] = []
    for batch in split_batches(model, images, 1 + len(model.blocks) // model.config.heads):  # it keeps a mean per layer
        means = reduce_attention(model, batch, lambda _, attention: attention.mean(1))  # each [B, N, N]
        if residual:
            means = [(mean + torch.eye(mean.shape[-1], device=mean.device)) / 2 for mean in means]
        product = functools.reduce(lambda product, mean: mean @ product, means)
        maps.append(read_attention_map(model, product).cpu())
    return torch.cat(maps)


@torch.no_grad()
@in_eval_mode
def attention_maps(model: ViT, images: Tensor) -> Tensor:
    """[B, layers, heads, h, w]: attention of the class token; without one, the mean over all patches."""
    maps: list[Tensor] = []
    for batch in split_batches(require_global_attention(model), images):
        layers = reduce_attention(model, batch, lambda _, attention: read_attention_map(model, attention).cpu())
        maps.append(torch.stack(layers, 1))
    return torch.cat(maps)


@in_eval_mode
def relevance(model: ViT, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """[B, h, w] for the given or else the predicted classes (Chefer, Gur and Wolf 2021).

    Attention counts where more of it would raise the logit of the class: R + mean_h((grad * A)+) R, layer by layer. The
    gradient of the weights follows from the gradient of the head's output, which the fused kernel computes.
    """
    model = require_global_attention(model)
    if model.head is None:
        raise ValueError("this model has no classification head, so there is no prediction to explain")
    maps, start = [], 0
    for batch in split_batches(model, images, len(model.blocks)):  # the backward pass needs all layers
        chosen = None if classes is None else classes[start : start + len(batch)].to(batch.device)
        maps.append(_batch_relevance(model, batch, chosen))
        start += len(batch)
    return torch.cat(maps)


def _batch_relevance(model: ViT, images: Tensor, classes: Tensor | None) -> Tensor:
    trace = Trace("block*/heads", "block*/values", "block*/attention")
    blocks = [f"block{layer}" for layer in range(len(model.blocks))]
    with torch.enable_grad():
        logits = model(images, trace)  # [B, K]
        score = logits.amax(-1) if classes is None else logits.gather(1, classes[:, None])
        gradients = torch.autograd.grad(score.sum(), [trace[f"{name}/heads"] for name in blocks])  # each [B, H, N, d]
    identity = torch.eye(model.config.tokens, device=images.device, dtype=trace["block0/attention"].dtype)
    product = identity.expand(len(images), -1, -1)
    for name, gradient in zip(blocks, gradients, strict=True):
        attention, values = trace[f"{name}/attention"].detach(), trace[f"{name}/values"].detach()
        gradient = gradient.to(attention) @ values.to(attention).mT  # of the weights, [B, H, N, N]
        product = product + (gradient * attention).clamp(min=0).mean(1) @ product
    return read_attention_map(model, product - identity).cpu()


def read_attention_map(model: ViT, attention: Tensor) -> Tensor:
    """[..., N, N] -> [..., h, w]: attention over the patches of the token that the head reads.

    That is the class token, the mean of DeiT's two tokens, or the mean of the patches (also with attention pooling,
    whose own weights are not included).
    """
    prefix = model.config.prefix
    if model.config.pool == "token":
        read = attention[..., : 2 if model.config.distillation else 1, :]
    else:
        read = attention[..., prefix:, :]
    row = read.mean(-2)  # [..., N]
    return row[..., prefix:].unflatten(-1, model.config.grid)
