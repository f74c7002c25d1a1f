"""What an answer hangs on: heads, layers, patches, their order, their place, and whether a map tells the truth.

    removed(model, images, labels)           accuracy without each head and without each layer
    occluded(model, images, labels, shares)  accuracy with a share of the patches hidden, or shuffled
    shifted(model, images, labels)           accuracy and likeness of features when the image moves by 1..P pixels
    faithfulness(model, images, maps)        how fast the answer falls when a map's best patches go

Images are uint8 [n, 3, H, W] as the model takes them. Everything random follows from a seed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.analyse.attention import check, check_place
from plainvit.evaluate.chance import mcnemar
from plainvit.models import ResNet, Trace, ViT
from plainvit.models.inference import check_finite, in_eval_mode
from plainvit.models.vit import Block

BATCH = 64


@torch.no_grad()
@in_eval_mode
def logits(model: nn.Module, images: Tensor) -> Tensor:
    """[n, K] on the CPU; an error where they are NaN or Inf."""
    device = next(model.parameters()).device
    found = torch.cat([model(some.to(device)).float().cpu() for some in images.split(BATCH)])
    _check_finite(found)
    return found


def _check_finite(found: Tensor) -> None:
    check_finite(found, lambda at: f"image {at}")


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((logits(model, images).argmax(-1) == labels).double().mean())


# Parts that are taken away --------------------------------------------------------------------------------------------


@dataclass
class Removed:
    """Accuracy of the whole model, without each layer [L], and without each head [L, H] where heads were removed.

    Beside each, how often chance alone would change as many answers (McNemar's exact test on the same images).
    """

    whole: float
    layers: Tensor
    layers_chance: Tensor
    heads: Tensor | None = None
    heads_chance: Tensor | None = None


@torch.no_grad()
@in_eval_mode
def removed(model: ViT, images: Tensor, labels: Tensor, *, heads: bool = True) -> Removed:
    """A layer that is removed passes its tokens on; a head that is removed adds nothing.

    What comes before the removed part is computed once for all.
    """
    model = check(model)
    if model.head is None:
        raise ValueError("the model has no head, so there is no answer to lose")
    device = model.embedding.weight.device
    parts = zip(images.split(BATCH), labels.split(BATCH), strict=True)
    rows = [_right_without(model, some.to(device), truth.to(device), heads) for some, truth in parts]
    whole, layers, single = (torch.cat(part, -1).cpu() for part in zip(*rows, strict=True))
    found = Removed(_mean(whole).item(), _mean(layers), _chance(whole, layers))
    if heads:
        found.heads, found.heads_chance = _mean(single), _chance(whole, single)
    return found


def _right_without(model: ViT, images: Tensor, labels: Tensor, heads: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Which images are answered rightly: [n] by the whole model, [L, n] without each layer, [L, H, n] each head."""

    def right(x: Tensor, start: int) -> Tensor:
        answer = _answer(model, x, start)
        _check_finite(answer)
        return answer.argmax(-1) == labels

    x, layers, single = model.embed(images), [], []
    for layer in range(len(model.blocks)):
        with without_layer(model, layer):
            layers.append(right(model.run_block(x, layer), layer + 1))
        for head in range(model.config.heads if heads else 0):
            with without_head(model, layer, head):
                single.append(right(model.run_block(x, layer), layer + 1))
        x = model.run_block(x, layer)
    shape = len(layers), model.config.heads if heads else 0, len(images)
    gathered = torch.stack(single).view(shape) if single else torch.zeros(shape, dtype=torch.bool, device=x.device)
    return right(x, len(layers)), torch.stack(layers), gathered


def _answer(model: ViT, x: Tensor, start: int) -> Tensor:
    """Logits from the tokens before block `start`: the rest of the model's own forward pass."""
    for layer in range(start, len(model.blocks)):
        x = model.run_block(x, layer)
    x = x if model.config.norm_pooled else model.norm(x)
    assert model.head is not None
    if model.head_distillation is not None:
        return (model.head(x[:, 0]) + model.head_distillation(x[:, 1])) / 2
    return model.head(model.represent(x))


def _mean(right: Tensor) -> Tensor:
    return right.double().mean(-1)


def _chance(whole: Tensor, without: Tensor) -> Tensor:
    lost, gained = (whole & ~without).sum(-1), (~whole & without).sum(-1)
    pairs = zip(lost.flatten().tolist(), gained.flatten().tolist(), strict=True)
    return torch.tensor([mcnemar(a, b) for a, b in pairs], dtype=torch.float64).view(lost.shape)


@contextlib.contextmanager
def without_layer(model: ViT, layer: int) -> Iterator[None]:
    check_place(model, layer)
    with model.blocks[layer].register_forward_hook(lambda _, inputs, __: inputs[0]):
        yield


@contextlib.contextmanager
def without_head(model: ViT, layer: int, head: int) -> Iterator[None]:
    check_place(model, layer, head)
    wide = model.config.width // model.config.heads
    kept = torch.ones(model.config.width, device=model.embedding.weight.device)
    kept[head * wide : (head + 1) * wide] = 0
    attention = cast(Block, model.blocks[layer]).attention
    with attention.out.register_forward_pre_hook(lambda _, inputs: (inputs[0] * kept.to(inputs[0].dtype),)):
        yield


# Patches that are hidden or out of order ------------------------------------------------------------------------------


def cut(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """[n, C, H, W] -> [n, patches, C, P, Q]."""
    n, c, height, width = images.shape
    h, w = grid
    return images.view(n, c, h, height // h, w, width // w).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def joined(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of `cut`."""
    n, _, c, p, q = patches.shape
    h, w = grid
    return patches.view(n, h, w, c, p, q).permute(0, 3, 1, 4, 2, 5).reshape(n, c, h * p, w * q)


def orders(n: int, patches: int, seed: int) -> Tensor:
    """[n, patches]: an order of the patches for each image."""
    return torch.rand(n, patches, generator=torch.Generator().manual_seed(seed)).argsort(1)


def hide(images: Tensor, order: Tensor, count: int, grid: tuple[int, int]) -> Tensor:
    """The first `count` patches of each image's order become the image's mean colour."""
    patches = cut(images, grid)
    first = torch.zeros(order.shape, dtype=torch.bool).scatter_(1, order[:, :count], True)
    mean = images.float().mean((2, 3)).round().to(images.dtype)[:, None, :, None, None]
    return joined(torch.where(first[:, :, None, None, None], mean, patches), grid)


def shuffle(images: Tensor, order: Tensor, grid: tuple[int, int]) -> Tensor:
    patches = cut(images, grid)
    return joined(patches.gather(1, order[:, :, None, None, None].expand_as(patches)), grid)


def occluded(
    model: ViT | ResNet, images: Tensor, labels: Tensor, grid: tuple[int, int], shares: Sequence[float]
) -> list[float]:
    """Accuracy with each share of the patches hidden, those of a smaller share always among them."""
    order = orders(len(images), grid[0] * grid[1], 0)
    counts = [round(share * order.shape[1]) for share in shares]
    return [accuracy(model, hide(images, order, count, grid), labels) for count in counts]


def shuffled(model: ViT | ResNet, images: Tensor, labels: Tensor, grids: Sequence[tuple[int, int]]) -> list[float]:
    """Accuracy with the image cut into each of the grids and its pieces put back in a random order."""
    found = []
    for grid in grids:
        order = orders(len(images), grid[0] * grid[1], 0)
        found.append(accuracy(model, shuffle(images, order, grid), labels))
    return found


# Images that move -----------------------------------------------------------------------------------------------------


@dataclass
class Shifted:
    """For each number of pixels: accuracy, the share of answers that stay, and the cosine of features with unmoved."""

    pixels: list[int]
    accuracy: list[float]
    same: list[float]
    cosine: list[float]


def move(images: Tensor, pixels: int) -> Tensor:
    """Down and to the right; what comes into view is the image mirrored at its border."""
    if not pixels:
        return images
    padded = F.pad(images.float(), (pixels, 0, pixels, 0), mode="reflect").to(images.dtype)
    return padded[:, :, : images.shape[2], : images.shape[3]]


@torch.no_grad()
@in_eval_mode
def shifted(model: ViT | ResNet, images: Tensor, labels: Tensor | None, pixels: Sequence[int]) -> Shifted:
    """A convolution's features move with the image; a ViT's patches cut it anew (paper 3.1, inductive bias)."""
    still, answers = _seen(model, images)
    found = Shifted(list(pixels), [], [], [])
    for count in pixels:
        features, moved = _seen(model, move(images, count)) if count else (still, answers)
        found.accuracy.append(float("nan") if labels is None else float((moved == labels).double().mean()))
        found.same.append(float((moved == answers).double().mean()))
        found.cosine.append(float(F.cosine_similarity(features, still).double().mean()))
    return found


def _seen(model: ViT | ResNet, images: Tensor) -> tuple[Tensor, Tensor]:
    """(features [n, D], answers [n]) by one pass."""
    name = "representation" if isinstance(model, ViT) else "pooled"
    device, features, answers = next(model.parameters()).device, [], []
    for some in images.split(BATCH):
        trace = Trace(name)
        answers.append(cast(Tensor, model(some.to(device), trace)).float().cpu())
        features.append(trace[name].float().cpu())
    _check_finite(torch.cat(answers))
    return torch.cat(features), torch.cat(answers).argmax(-1)


# Whether a map tells the truth ----------------------------------------------------------------------------------------


SHARES = (0.0, 0.1, 0.3, 0.6, 1.0)


@dataclass
class Faithful:
    """The answer's probability as patches go (deletion) or come (insertion) by a map's order, and the areas below."""

    shares: list[float]
    deletion: list[float]  # mean over the images at each share
    insertion: list[float]
    deletion_areas: list[float]  # of each image
    insertion_areas: list[float]


def ends(model: ViT | ResNet, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the images, and of their mean colours: where the curves of every map begin and end."""
    everything = orders(len(images), 1, 0)
    return logits(model, images), logits(model, hide(images, everything, 1, (1, 1)))


def faithfulness(
    model: ViT | ResNet,
    images: Tensor,
    maps: Tensor,
    shares: Sequence[float] = SHARES,
    known: tuple[Tensor, Tensor] | None = None,
) -> Faithful:
    """Of the model's own first answer; maps [n, h, w], larger where it is said to rest. A good map falls fast.

    `known` are the `ends`, which several maps of the same images share.
    """
    if not (len(shares) > 1 and shares[0] == 0 and shares[-1] == 1):
        raise ValueError(f"shares go from 0 to 1, got {list(shares)}")
    grid = maps.shape[1], maps.shape[2]
    order = torch.sort(maps.flatten(1), dim=1, descending=True, stable=True).indices
    whole, nothing = known or ends(model, images)
    answers = whole.argmax(-1, keepdim=True)

    def probability(scores: Tensor) -> Tensor:
        return scores.double().softmax(-1).gather(1, answers)[:, 0]  # [n]

    def without(order: Tensor, count: int) -> Tensor:
        return probability(logits(model, hide(images, order, count, grid)))

    full, empty, n = probability(whole), probability(nothing), order.shape[1]
    counts = [round(share * n) for share in shares[1:-1]]
    deletion = torch.stack([full, *(without(order, count) for count in counts), empty], 1)  # [n, points]
    insertion = torch.stack([empty, *(without(order.flip(1), n - count) for count in counts), full], 1)
    x = torch.tensor(list(shares), dtype=torch.float64)
    areas = (torch.trapezoid(curve, x).tolist() for curve in (deletion, insertion))
    return Faithful(list(shares), deletion.mean(0).tolist(), insertion.mean(0).tolist(), *areas)
