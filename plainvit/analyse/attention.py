"""Attention statistics of every head, and attention maps.

    measure_heads(model, images).distance    [layers, heads] in pixels (Figures 7 and 11)
    rollout(model, images)                   [B, h, w], attention multiplied through the layers (Figures 6 and 14)

The model runs with its fused kernel. The attention weights of each layer are recomputed next to it, reduced and freed,
so that memory holds one layer of one batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plainvit.models import Trace, ViT
from plainvit.models.inference import in_eval_mode

MAX_WEIGHTS = 60_000_000  # attention weights in memory at the same time: 240 MB


class AttentionReducer(Trace):
    """A trace that passes each layer's attention [B, H, N, N] to `reduce` and stores nothing."""

    def __init__(self, reduce: Callable[[int, Tensor], None]) -> None:
        super().__init__("block*/attention")
        self.reduce, self.layer = reduce, 0

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.reduce(self.layer, value)
        self.layer += 1


def require_vit(model: object) -> ViT:
    if not isinstance(model, ViT):
        raise ValueError("this model has no attention: it is a ResNet")
    return model


def require_global_attention(model: object) -> ViT:
    model = require_vit(model)
    if model.config.axial:
        raise ValueError("axial attention covers one row or column, so there is no attention map of the whole image")
    return model


def check_layer(model: ViT, layer: int) -> None:
    if not 0 <= layer < len(model.blocks):
        raise ValueError(f"layer {layer} is out of range: this model has layers 0 to {len(model.blocks) - 1}")


def split_batches(model: ViT, images: Tensor, layers: int = 1) -> Iterator[Tensor]:
    """Batches whose attention weights, in this many layers, fit into MAX_WEIGHTS; on the model's device."""
    size = max(MAX_WEIGHTS // (layers * model.config.heads * model.config.tokens**2), 1)
    for batch in images.split(size):
        yield batch.to(model.embedding.weight.device)


# Statistics of every head ---------------------------------------------------------------------------------------------


@dataclass
class Heads:
    """Means over images and query patches, [layers, heads]."""

    distance: Tensor  # pixels between a patch and the patches it attends to
    entropy: Tensor  # nats of a patch's attention over all tokens
    outside: Tensor  # fraction of a patch's attention that goes to the class token and registers


@torch.no_grad()
@in_eval_mode
def measure_heads(model: ViT, images: Tensor) -> Heads:
    """Statistics of the attention between patches, renormalised to sum to 1 without the class token.

    The paper does not say how it treats that token. Axial layers attend along one axis only.
    """
    model = require_vit(model)
    layers, count = len(model.blocks), len(images)
    sums = torch.zeros(3, layers, model.config.heads, dtype=torch.float64)
    for batch in split_batches(model, images):

        def add(layer: int, attention: Tensor, weight: float = len(batch) / count) -> None:
            sums[:, layer] += weight * torch.stack(head_statistics(model, layer, attention)).double().cpu()

        model(batch, AttentionReducer(add))
    return Heads(*sums)


def head_statistics(model: ViT, layer: int, attention: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(distance, entropy, outside) [H] of one layer's attention [B, H, N, N]."""
    prefix = model.config.prefix
    rows = attention[:, :, prefix:]  # [B, H, n, N]
    patches = rows[..., prefix:]  # [B, H, n, n]
    inside = patches.sum(-1)  # [B, H, n]
    pixels = patch_distances(model, layer).to(attention)
    distance = (patches * pixels).sum(-1) / inside.clamp(min=torch.finfo(inside.dtype).tiny)
    entropy = -torch.special.xlogy(rows, rows).sum(-1)
    return distance.mean((0, 2)), entropy.mean((0, 2)), 1 - inside.mean((0, 2))


def patch_distances(model: ViT, layer: int) -> Tensor:
    """[n, n] pixels between the centres of the patches that a layer attends over."""
    check_layer(model, layer)
    (h, w), (height, width) = model.config.grid, model.config.image_size
    y, x = torch.arange(h) * (height / h), torch.arange(w) * (width / w)
    axis = model.blocks[layer].axis
    if axis is not None:
        line = x if axis == "row" else y
        return (line[:, None] - line).abs()
    centres = torch.cartesian_prod(y, x)  # [n, 2]
    return torch.cdist(centres, centres)


# Maps -----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@in_eval_mode
def rollout(model: ViT, images: Tensor, *, residual: bool = True) -> Tensor:
    """[B, h, w]: the attention of each layer, mean over heads, multiplied through the layers (Abnar and Zuidema 2020).

    residual: average each layer's matrix with the identity, as in that paper; the ViT paper's text does not.
    """
    model = require_global_attention(model)
    maps = []
    for batch in split_batches(model, images):
        product: list[Tensor] = []

        def multiply(_: int, attention: Tensor, product: list[Tensor] = product) -> None:
            mean = attention.mean(1)  # [B, N, N]
            mean = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2 if residual else mean
            product[:] = [mean @ product[0] if product else mean]

        model(batch, AttentionReducer(multiply))
        maps.append(read_attention_map(model, product[0]).cpu())
    return torch.cat(maps)


@torch.no_grad()
@in_eval_mode
def attention_maps(model: ViT, images: Tensor) -> Tensor:
    """[B, layers, heads, h, w]: attention of the class token; without one, the mean over all patches."""
    model = require_global_attention(model)
    maps = []
    for batch in split_batches(model, images):
        layers: list[Tensor] = []

        def keep(_: int, attention: Tensor, layers: list[Tensor] = layers) -> None:
            layers.append(read_attention_map(model, attention).cpu())

        model(batch, AttentionReducer(keep))
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
    tokens = slice(1 + model.config.distillation) if model.config.pool == "token" else slice(prefix, None)
    row = attention[..., tokens, :].mean(-2)
    return row[..., prefix:].unflatten(-1, model.config.grid)
