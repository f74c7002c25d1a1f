"""What an answer hangs on: heads, layers, patches, their order, their place, and whether a map tells the truth.

    removed(model, images, labels)           accuracy without each head and without each layer
    occluded(model, images, labels, shares)  accuracy with a share of the patches hidden, or shuffled
    shifted(model, images, labels)           accuracy and likeness of features when the image moves by 1..P pixels
    faithfulness(model, images, maps)        how fast the answer falls when a map's best patches go

Images are uint8 [n, 3, H, W] as the model takes them. Everything random follows from a seed.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.analyse.attention import check
from plainvit.models import ResNet, ViT
from plainvit.models.vit import Block

BATCH = 64


@torch.no_grad()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    """[n, K] on the CPU."""
    device = next(model.parameters()).device
    return torch.cat([model(some.to(device)).float().cpu() for some in images.split(BATCH)])


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((logits(model, images).argmax(-1) == labels).double().mean())


# Parts that are taken away --------------------------------------------------------------------------------------------


@dataclass
class Removed:
    """Accuracy of the whole model, without each layer [L], and without each head [L, H]."""

    whole: float
    layers: Tensor
    heads: Tensor


def removed(model: ViT, images: Tensor, labels: Tensor, progress: Callable[[], None] = lambda: None) -> Removed:
    """A layer that is removed passes its tokens on; a head that is removed adds nothing."""
    model = check(model).eval()
    depth, heads = len(model.blocks), model.config.heads
    layers, without = torch.zeros(depth), torch.zeros(depth, heads)
    for layer in range(depth):
        with without_layer(model, layer):
            layers[layer] = accuracy(model, images, labels)
        progress()
        for head in range(heads):
            with without_head(model, layer, head):
                without[layer, head] = accuracy(model, images, labels)
            progress()
    return Removed(accuracy(model, images, labels), layers, without)


@contextlib.contextmanager
def without_layer(model: ViT, layer: int) -> Iterator[None]:
    hook = model.blocks[layer].register_forward_hook(lambda _, inputs, __: inputs[0])
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def without_head(model: ViT, layer: int, head: int) -> Iterator[None]:
    wide = model.config.width // model.config.heads
    kept = torch.ones(model.config.width, device=model.embedding.weight.device)
    kept[head * wide : (head + 1) * wide] = 0
    attention = cast(Block, model.blocks[layer]).attention
    hook = attention.out.register_forward_pre_hook(lambda _, inputs: (inputs[0] * kept.to(inputs[0].dtype),))
    try:
        yield
    finally:
        hook.remove()


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
    model: ViT | ResNet, images: Tensor, labels: Tensor, grid: tuple[int, int], shares: Sequence[float], seed: int = 0
) -> list[float]:
    """Accuracy with each share of the patches hidden, those of a smaller share always among them."""
    order = orders(len(images), grid[0] * grid[1], seed)
    counts = [round(share * order.shape[1]) for share in shares]
    return [accuracy(model.eval(), hide(images, order, count, grid), labels) for count in counts]


def shuffled(
    model: ViT | ResNet, images: Tensor, labels: Tensor, grids: Sequence[tuple[int, int]], seed: int = 0
) -> list[float]:
    """Accuracy with the image cut into each of the grids and its pieces put back in a random order."""
    found = []
    for grid in grids:
        order = orders(len(images), grid[0] * grid[1], seed)
        found.append(accuracy(model.eval(), shuffle(images, order, grid), labels))
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
def shifted(model: ViT | ResNet, images: Tensor, labels: Tensor | None, pixels: Sequence[int]) -> Shifted:
    """A convolution's features move with the image; a ViT's patches cut it anew (paper 3.1, inductive bias)."""
    model = model.eval()
    device = next(model.parameters()).device

    def features(shown: Tensor) -> Tensor:
        return torch.cat([cast(Tensor, model.features(some.to(device))).float().cpu() for some in shown.split(BATCH)])

    still, answers = features(images), logits(model, images).argmax(-1)
    found = Shifted(list(pixels), [], [], [])
    for count in pixels:
        shown = move(images, count)
        moved = logits(model, shown).argmax(-1)
        found.accuracy.append(float("nan") if labels is None else float((moved == labels).double().mean()))
        found.same.append(float((moved == answers).double().mean()))
        found.cosine.append(float(F.cosine_similarity(features(shown), still).double().mean()))
    return found


# Whether a map tells the truth ----------------------------------------------------------------------------------------


@dataclass
class Faithful:
    """The answer's probability as patches go (deletion) or come (insertion) by a map's order, and the areas below."""

    shares: list[float]
    deletion: list[float]
    insertion: list[float]

    @property
    def deletion_area(self) -> float:
        return _area(self.shares, self.deletion)

    @property
    def insertion_area(self) -> float:
        return _area(self.shares, self.insertion)


def _area(x: Sequence[float], y: Sequence[float]) -> float:
    return float(torch.trapezoid(torch.tensor(y, dtype=torch.float64), torch.tensor(x, dtype=torch.float64)))


def faithfulness(model: ViT | ResNet, images: Tensor, maps: Tensor, points: int = 11) -> Faithful:
    """Of the model's own first answer; maps [n, h, w], larger where it is said to rest. A good map falls fast."""
    model, grid = model.eval(), (maps.shape[1], maps.shape[2])
    order = torch.sort(maps.flatten(1), dim=1, descending=True, stable=True).indices
    answers = logits(model, images).argmax(-1, keepdim=True)
    shares = [step / (points - 1) for step in range(points)]
    counts = [round(share * order.shape[1]) for share in shares]

    def probability(shown: Tensor) -> float:
        return float(logits(model, shown).softmax(-1).gather(1, answers).double().mean())

    deletion = [probability(hide(images, order, count, grid)) for count in counts]
    insertion = [probability(hide(images, order.flip(1), order.shape[1] - count, grid)) for count in counts]
    return Faithful(shares, deletion, insertion)
