"""Where attention looks: distance and entropy of every head, and maps of what an answer rests on.

    found = heads(model, images)                 found.distance [layers, heads] in pixels (Figures 7 and 11)
    rollout(model, images)                       [B, h, w], attention multiplied through the layers (Figures 6 and 14)

The model runs as it is, with its fused kernel; the attention of a layer is computed beside it, reduced at once and let
go, so that one layer of one batch is all that memory holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plainvit.models import Trace, ViT
from plainvit.models.inference import in_eval_mode

CELLS = 60_000_000  # attention weights that are held at once: 240 MB


class Reduced(Trace):
    """A trace that hands each layer's attention [B, H, N, N] on as soon as it is there, and keeps none of it."""

    def __init__(self, use: Callable[[int, Tensor], None], *others: str) -> None:
        super().__init__("block*/attention", *others)
        self.use, self.layer = use, 0

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name.endswith("/attention"):
            self.use(self.layer, value)
            self.layer += 1
        else:
            super().__setitem__(name, value)


def check(model: object) -> ViT:
    """Attention needs a model that attends."""
    if not isinstance(model, ViT):
        raise ValueError("this model has no attention: it is a ResNet")
    return model


def check_place(model: ViT, layer: int, head: int = 0) -> None:
    """That the model has such a layer and head; both count from 0."""
    for what, number, count in (("layer", layer, len(model.blocks)), ("head", head, model.config.heads)):
        if not 0 <= number < count:
            raise ValueError(f"there is no {what} {number}: this model has 0 to {count - 1}")


def batches(model: ViT, images: Tensor, layers: int = 1) -> Iterator[Tensor]:
    """As many images at once as memory is meant to hold the attention of, in so many layers."""
    size = max(CELLS // (layers * model.config.heads * model.config.tokens**2), 1)
    device = model.embedding.weight.device
    for some in images.split(size):
        yield some.to(device)


# Numbers of every head ------------------------------------------------------------------------------------------------


@dataclass
class Heads:
    """Means over images and query patches, [layers, heads]."""

    distance: Tensor  # pixels between a patch and where it looks
    entropy: Tensor  # nats of a patch's attention over all tokens
    outside: Tensor  # share of a patch's attention that goes to tokens which are no patches


@torch.no_grad()
@in_eval_mode
def heads(model: ViT, images: Tensor) -> Heads:
    """The attention of patches over patches, whose rows are made to sum to 1 again without the class token.

    The paper does not say what it does with that token. Axial layers look along one axis only.
    """
    model = check(model)
    layers, count = len(model.blocks), len(images)
    sums = torch.zeros(3, layers, model.config.heads, dtype=torch.float64)
    for some in batches(model, images):

        def use(layer: int, attention: Tensor, share: float = len(some) / count) -> None:
            sums[:, layer] += share * torch.stack(head_numbers(model, layer, attention)).double().cpu()

        model(some, Reduced(use))
    return Heads(*sums)


def head_numbers(model: ViT, layer: int, attention: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(distance, entropy, outside) [H] of one layer's attention [B, H, N, N]."""
    prefix = model.config.prefix
    rows = attention[:, :, prefix:]  # [B, H, n, N]
    patches = rows[..., prefix:]  # [B, H, n, n]
    inside = patches.sum(-1)  # [B, H, n]
    apart = distances(model, layer).to(attention)
    distance = (patches * apart).sum(-1) / inside.clamp(min=torch.finfo(inside.dtype).tiny)
    entropy = -torch.special.xlogy(rows, rows).sum(-1)
    return distance.mean((0, 2)), entropy.mean((0, 2)), 1 - inside.mean((0, 2))


def distances(model: ViT, layer: int) -> Tensor:
    """[n, n] pixels between the centres of the patches that a layer attends over."""
    check_place(model, layer)
    (h, w), (height, width) = model.config.grid, model.config.image_size
    y, x = torch.arange(h) * (height / h), torch.arange(w) * (width / w)
    axis = model.blocks[layer].axis
    if axis is not None:
        along = x if axis == "row" else y
        return (along[:, None] - along).abs()
    places = torch.cartesian_prod(y, x)  # [n, 2]
    return torch.cdist(places, places)


# Maps -----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@in_eval_mode
def rollout(model: ViT, images: Tensor, *, residual: bool = True) -> Tensor:
    """[B, h, w]: each layer's attention, mean over heads, multiplied through the layers (Abnar and Zuidema 2020).

    With the residual a layer's matrix is half identity, as in that paper; without, as the ViT paper's text has it.
    """
    model = whole(model)
    found = []
    for some in batches(model, images):
        product: list[Tensor] = []

        def use(_: int, attention: Tensor, product: list[Tensor] = product) -> None:
            mean = attention.mean(1)  # [B, N, N]
            mean = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2 if residual else mean
            product[:] = [mean @ product[0] if product else mean]

        model(some, Reduced(use))
        found.append(read_out(model, product[0]).cpu())
    return torch.cat(found)


@torch.no_grad()
@in_eval_mode
def looks(model: ViT, images: Tensor) -> Tensor:
    """[B, layers, heads, h, w]: where the class token looks; without one, the mean over all patches' looks."""
    model = whole(model)
    found = []
    for some in batches(model, images):
        layers: list[Tensor] = []
        model(some, Reduced(lambda _, attention, kept=layers: kept.append(read_out(model, attention).cpu())))
        found.append(torch.stack(layers, 1))
    return torch.cat(found)


@in_eval_mode
def relevance(model: ViT, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """[B, h, w] for the given classes, or the ones that the model chooses (Chefer, Gur and Wolf 2021).

    A layer's attention counts where more of it would raise the class's logit: R + mean_h((grad * A)+) R, layer by
    layer. The gradient of a weight follows from that of the head's output, which the fused kernel does compute.
    """
    model = whole(model)
    if model.head is None:
        raise ValueError("the model has no head, so there is no answer to explain")
    found, start = [], 0
    for some in batches(model, images, len(model.blocks)):  # all layers are needed at once
        chosen = None if classes is None else classes[start : start + len(some)].to(some.device)
        found.append(_relevance(model, some, chosen))
        start += len(some)
    return torch.cat(found)


def _relevance(model: ViT, images: Tensor, chosen: Tensor | None) -> Tensor:
    trace = Trace("block*/heads", "block*/values", "block*/attention")
    blocks = [f"block{layer}" for layer in range(len(model.blocks))]
    with torch.enable_grad():
        logits = model(images, trace)  # [B, K]
        own = logits.amax(-1) if chosen is None else logits.gather(1, chosen[:, None])
        slopes = torch.autograd.grad(own.sum(), [trace[f"{name}/heads"] for name in blocks])  # each [B, H, N, d]
    start = torch.eye(model.config.tokens, device=images.device, dtype=trace["block0/attention"].dtype)
    product = start.expand(len(images), -1, -1)
    for name, slope in zip(blocks, slopes, strict=True):
        attention, values = trace[f"{name}/attention"].detach(), trace[f"{name}/values"].detach()
        slope = slope.to(attention) @ values.to(attention).mT  # of the weights, [B, H, N, N]
        product = product + (slope * attention).clamp(min=0).mean(1) @ product
    return read_out(model, product - start).cpu()  # a patch does not explain by being itself


def read_out(model: ViT, attention: Tensor) -> Tensor:
    """[..., N, N] -> [..., h, w]: over the patches, the row of what the head reads.

    That is the class token's, the mean of DeiT's two tokens', or the mean of the patches'; a pooling by attention
    weighs the patches itself, which is left out here.
    """
    prefix = model.config.prefix
    tokens = slice(1 + model.config.distillation) if model.config.pool == "token" else slice(prefix, None)
    row = attention[..., tokens, :].mean(-2)
    return row[..., prefix:].unflatten(-1, model.config.grid)


def whole(model: object) -> ViT:
    """Maps over the whole grid need layers that attend over the whole grid."""
    model = check(model)
    if model.config.axial:
        raise ValueError("axial layers attend along one axis: there is no map of the whole image to read off")
    return model
