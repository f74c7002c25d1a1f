"""What predictions depend on: heads, layers, patches, their order and position; and whether a map is faithful.

    removed(model, images, labels)                  accuracy without each head and without each layer
    occluded(model, images, labels, grid, shares)   accuracy with a fraction of the patches hidden
    shifted(model, images, labels, pixels)          accuracy and similarity of features for shifted images
    faithfulness(model, images, maps)               how fast the probability falls when a map's highest patches go

Images are uint8 [n, 3, H, W] in the model's size. Random choices have a fixed seed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.analyse.attention import check_layer_and_head, require_vit
from plainvit.evaluate.statistics import mcnemar
from plainvit.models import ResNet, Trace, ViT
from plainvit.models.inference import check_finite, in_eval_mode
from plainvit.models.vit import Block

BATCH = 64
NO_HEAD = "this model has no classification head, so there is no accuracy to measure"


@torch.no_grad()
@in_eval_mode
def logits(model: nn.Module, images: Tensor) -> Tensor:
    """[n, K] on the CPU; raises if they are NaN or Inf."""
    device = next(model.parameters()).device
    found = torch.cat([model(batch.to(device)).float().cpu() for batch in images.split(BATCH)])
    _check_finite(found)
    return found


def _check_finite(found: Tensor) -> None:
    check_finite(found, lambda at: f"image {at}")


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((logits(model, images).argmax(-1) == labels).double().mean())


# Removed heads and layers ---------------------------------------------------------------------------------------------


@dataclass
class Removal:
    """Accuracy of the full model, without each layer [L], and without each head [L, H] if measured.

    `chance` is the p-value of McNemar's exact test on the same images.
    """

    whole: float
    layers: Tensor
    layers_chance: Tensor
    heads: Tensor | None = None
    heads_chance: Tensor | None = None


@torch.no_grad()
@in_eval_mode
def measure_removal(model: ViT, images: Tensor, labels: Tensor, *, heads: bool = True) -> Removal:
    """A removed layer returns its input; a removed head returns zeros. Earlier layers are computed only once."""
    model = require_vit(model)
    if model.head is None:
        raise ValueError(NO_HEAD)
    device = model.embedding.weight.device
    parts = zip(images.split(BATCH), labels.split(BATCH), strict=True)
    rows = [_predict_without(model, batch.to(device), truth.to(device), heads) for batch, truth in parts]
    whole, layers, single = (torch.cat(part, -1).cpu() for part in zip(*rows, strict=True))
    found = Removal(_mean(whole).item(), _mean(layers), _p_values(whole, layers))
    if heads:
        found.heads, found.heads_chance = _mean(single), _p_values(whole, single)
    return found


def _predict_without(model: ViT, images: Tensor, labels: Tensor, heads: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Which predictions are correct: [n] of the full model, [L, n] without each layer, [L, H, n] without each head."""

    def is_correct(x: Tensor, start: int) -> Tensor:
        scores = _finish_forward(model, x, start)
        _check_finite(scores)
        return scores.argmax(-1) == labels

    x, layers, single = model.embed(images), [], []
    for layer in range(len(model.blocks)):
        with skip_layer(model, layer):
            layers.append(is_correct(model.run_block(x, layer), layer + 1))
        for head in range(model.config.heads if heads else 0):
            with zero_head(model, layer, head):
                single.append(is_correct(model.run_block(x, layer), layer + 1))
        x = model.run_block(x, layer)
    shape = len(layers), model.config.heads if heads else 0, len(images)
    gathered = torch.stack(single).view(shape) if single else torch.zeros(shape, dtype=torch.bool, device=x.device)
    return is_correct(x, len(layers)), torch.stack(layers), gathered


def _finish_forward(model: ViT, x: Tensor, start: int) -> Tensor:
    """Logits from the tokens before block `start`."""
    for layer in range(start, len(model.blocks)):
        x = model.run_block(x, layer)
    x = x if model.config.norm_pooled else model.norm(x)
    assert model.head is not None
    if model.head_distillation is not None:
        return (model.head(x[:, 0]) + model.head_distillation(x[:, 1])) / 2
    return model.head(model.represent(x))


def _mean(right: Tensor) -> Tensor:
    return right.double().mean(-1)


def _p_values(whole: Tensor, without: Tensor) -> Tensor:
    lost, gained = (whole & ~without).sum(-1), (~whole & without).sum(-1)
    pairs = zip(lost.flatten().tolist(), gained.flatten().tolist(), strict=True)
    return torch.tensor([mcnemar(a, b) for a, b in pairs], dtype=torch.float64).view(lost.shape)


@contextlib.contextmanager
def skip_layer(model: ViT, layer: int) -> Iterator[None]:
    check_layer_and_head(model, layer)
    with model.blocks[layer].register_forward_hook(lambda _, inputs, __: inputs[0]):
        yield


@contextlib.contextmanager
def zero_head(model: ViT, layer: int, head: int) -> Iterator[None]:
    check_layer_and_head(model, layer, head)
    wide = model.config.width // model.config.heads
    kept = torch.ones(model.config.width, device=model.embedding.weight.device)
    kept[head * wide : (head + 1) * wide] = 0
    attention = cast(Block, model.blocks[layer]).attention
    with attention.out.register_forward_pre_hook(lambda _, inputs: (inputs[0] * kept.to(inputs[0].dtype),)):
        yield


# Hidden and shuffled patches ------------------------------------------------------------------------------------------


def split_patches(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """[n, C, H, W] -> [n, patches, C, P, Q]."""
    n, c, height, width = images.shape
    h, w = grid
    return images.view(n, c, h, height // h, w, width // w).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def join_patches(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of `split_patches`."""
    n, _, c, p, q = patches.shape
    h, w = grid
    return patches.view(n, h, w, c, p, q).permute(0, 3, 1, 4, 2, 5).reshape(n, c, h * p, w * q)


def random_orders(n: int, patches: int, seed: int) -> Tensor:
    """[n, patches]: a random order of the patches for each image."""
    return torch.rand(n, patches, generator=torch.Generator().manual_seed(seed)).argsort(1)


def hide_patches(images: Tensor, order: Tensor, count: int, grid: tuple[int, int]) -> Tensor:
    """Replaces the first `count` patches of each image's order by the image's mean colour."""
    patches = split_patches(images, grid)
    first = torch.zeros(order.shape, dtype=torch.bool).scatter_(1, order[:, :count], True)
    mean = images.float().mean((2, 3)).round().to(images.dtype)[:, None, :, None, None]
    return join_patches(torch.where(first[:, :, None, None, None], mean, patches), grid)


def shuffle_patches(images: Tensor, order: Tensor, grid: tuple[int, int]) -> Tensor:
    patches = split_patches(images, grid)
    return join_patches(patches.gather(1, order[:, :, None, None, None].expand_as(patches)), grid)


def measure_occlusion(
    model: ViT | ResNet, images: Tensor, labels: Tensor, grid: tuple[int, int], shares: Sequence[float]
) -> list[float]:
    """Accuracy with each fraction of the patches hidden; smaller sets are subsets of larger ones."""
    order = random_orders(len(images), grid[0] * grid[1], 0)
    counts = [round(share * order.shape[1]) for share in shares]
    return [accuracy(model, hide_patches(images, order, count, grid), labels) for count in counts]


def measure_shuffling(
    model: ViT | ResNet, images: Tensor, labels: Tensor, grids: Sequence[tuple[int, int]]
) -> list[float]:
    """Accuracy with images split by each of the grids and reassembled in random order."""
    found = []
    for grid in grids:
        order = random_orders(len(images), grid[0] * grid[1], 0)
        found.append(accuracy(model, shuffle_patches(images, order, grid), labels))
    return found


# Shifted images -------------------------------------------------------------------------------------------------------


@dataclass
class Shifts:
    """For each shift: accuracy, fraction of unchanged predictions, and cosine similarity of the features."""

    pixels: list[int]
    accuracy: list[float]
    same: list[float]
    cosine: list[float]


def shift_images(images: Tensor, pixels: int) -> Tensor:
    """Down and to the right, with reflection padding."""
    if not pixels:
        return images
    padded = F.pad(images.float(), (pixels, 0, pixels, 0), mode="reflect").to(images.dtype)
    return padded[:, :, : images.shape[2], : images.shape[3]]


@torch.no_grad()
@in_eval_mode
def measure_shifts(model: ViT | ResNet, images: Tensor, labels: Tensor | None, pixels: Sequence[int]) -> Shifts:
    """Features of a convolution shift with the image; a ViT splits it into other patches (paper 3.1)."""
    reference, predictions = _features_and_predictions(model, images)
    found = Shifts(list(pixels), [], [], [])
    for count in pixels:
        features, new = _features_and_predictions(model, shift_images(images, count))
        found.accuracy.append(float("nan") if labels is None else float((new == labels).double().mean()))
        found.same.append(float((new == predictions).double().mean()))
        found.cosine.append(float(F.cosine_similarity(features, reference).double().mean()))
    return found


def _features_and_predictions(model: ViT | ResNet, images: Tensor) -> tuple[Tensor, Tensor]:
    """(features [n, D], predictions [n]) from one pass."""
    name = "representation" if isinstance(model, ViT) else "pooled"
    device, features, outputs = next(model.parameters()).device, [], []
    for batch in images.split(BATCH):
        trace = Trace(name)
        outputs.append(cast(Tensor, model(batch.to(device), trace)).float().cpu())
        features.append(trace[name].float().cpu())
    _check_finite(torch.cat(outputs))
    return torch.cat(features), torch.cat(outputs).argmax(-1)


# Faithfulness of maps -------------------------------------------------------------------------------------------------


SHARES = (0.0, 0.1, 0.3, 0.6, 1.0)


@dataclass
class Faithfulness:
    """Probability of the predicted class as patches are hidden or restored in a map's order; areas under the curves."""

    shares: list[float]
    deletion: list[float]  # mean over the images at each fraction
    insertion: list[float]
    deletion_areas: list[float]  # of each image
    insertion_areas: list[float]


def score_ends(model: ViT | ResNet, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the images, and of their mean colours: the ends of the curves of every map."""
    one_patch = random_orders(len(images), 1, 0)
    return logits(model, images), logits(model, hide_patches(images, one_patch, 1, (1, 1)))


def faithfulness(
    model: ViT | ResNet,
    images: Tensor,
    maps: Tensor,
    shares: Sequence[float] = SHARES,
    known: tuple[Tensor, Tensor] | None = None,
) -> Faithfulness:
    """Deletion and insertion curves of the predicted class for maps [n, h, w].

    known: the result of `ends`, to share it between several maps of the same images.
    """
    if not (len(shares) > 1 and shares[0] == 0 and shares[-1] == 1):
        raise ValueError(f"shares must start at 0 and end at 1, got {list(shares)}")
    grid = maps.shape[1], maps.shape[2]
    order = torch.sort(maps.flatten(1), dim=1, descending=True, stable=True).indices
    whole, nothing = known or score_ends(model, images)
    predicted = whole.argmax(-1, keepdim=True)

    def probability(scores: Tensor) -> Tensor:
        return scores.double().softmax(-1).gather(1, predicted)[:, 0]  # [n]

    def probability_without(order: Tensor, count: int) -> Tensor:
        return probability(logits(model, hide_patches(images, order, count, grid)))

    full, empty, n = probability(whole), probability(nothing), order.shape[1]
    counts = [round(share * n) for share in shares[1:-1]]
    deletion = torch.stack([full, *(probability_without(order, count) for count in counts), empty], 1)  # [n, points]
    insertion = torch.stack([empty, *(probability_without(order.flip(1), n - count) for count in counts), full], 1)
    x = torch.tensor(list(shares), dtype=torch.float64)
    areas = (torch.trapezoid(curve, x).tolist() for curve in (deletion, insertion))
    return Faithfulness(list(shares), deletion.mean(0).tolist(), insertion.mean(0).tolist(), *areas)
