"""What predictions depend on: layers, patches and their order; and whether a map is faithful.

    measure_removal(model, images, labels)                    accuracy without each layer
    measure_occlusion(model, images, labels, grid, shares)    accuracy with a fraction of the patches hidden
    measure_shuffling(model, images, labels, grids)           accuracy with the patches in random order
    faithfulness(model, images, maps)                         how fast hiding a map's patches lowers the probability

Images are uint8 [n, 3, H, W] in the model's size. Random choices have a fixed seed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plainvit.analyse.attention import check_layer, require_vit
from plainvit.evaluate.statistics import mcnemar
from plainvit.models import ResNet, ViT
from plainvit.models.inference import check_finite, in_eval_mode

BATCH = 64
NO_HEAD = "this model has no classification head, so there is no accuracy to measure"


@torch.no_grad()
@in_eval_mode
def logits(model: nn.Module, images: Tensor) -> Tensor:
    """[n, K] on the CPU; raises if they are NaN or Inf."""
    device = next(model.parameters()).device
    found = torch.cat([model(batch.to(device)).float().cpu() for batch in images.split(BATCH)])
    check_finite(found, lambda at: f"image {at}")
    return found


def is_correct(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """[n] bool"""
    return logits(model, images).argmax(-1) == labels


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float(is_correct(model, images, labels).double().mean())


# Removed layers -------------------------------------------------------------------------------------------------------


@dataclass
class Removal:
    """Accuracy of the full model and without each layer [L], with p-values of McNemar's exact test [L]."""

    full: float
    layers: list[float]
    p_values: list[float]


def measure_removal(model: ViT, images: Tensor, labels: Tensor) -> Removal:
    """A removed layer returns its input."""
    model = require_vit(model)
    if model.head is None:
        raise ValueError(NO_HEAD)
    full = is_correct(model, images, labels)
    found = Removal(float(full.double().mean()), [], [])
    for layer in range(len(model.blocks)):
        with skip_layer(model, layer):
            without = is_correct(model, images, labels)
        found.layers.append(float(without.double().mean()))
        found.p_values.append(mcnemar(int((full & ~without).sum()), int((~full & without).sum())))
    return found


@contextlib.contextmanager
def skip_layer(model: ViT, layer: int) -> Iterator[None]:
    check_layer(model, layer)
    with model.blocks[layer].register_forward_hook(lambda _, inputs, __: inputs[0]):
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


def random_orders(n: int, patches: int, seed: int = 0) -> Tensor:
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
    order = random_orders(len(images), grid[0] * grid[1])
    counts = [round(share * order.shape[1]) for share in shares]
    return [accuracy(model, hide_patches(images, order, count, grid), labels) for count in counts]


def measure_shuffling(
    model: ViT | ResNet, images: Tensor, labels: Tensor, grids: Sequence[tuple[int, int]]
) -> list[float]:
    """Accuracy with images split by each of the grids and reassembled in random order."""
    orders = [random_orders(len(images), h * w) for h, w in grids]
    pairs = zip(orders, grids, strict=True)
    return [accuracy(model, shuffle_patches(images, order, grid), labels) for order, grid in pairs]


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


def faithfulness(model: ViT | ResNet, images: Tensor, maps: Tensor, shares: Sequence[float] = SHARES) -> Faithfulness:
    """Deletion and insertion curves of the predicted class for maps [n, h, w]."""
    if not (len(shares) > 1 and shares[0] == 0 and shares[-1] == 1):
        raise ValueError(f"shares must start at 0 and end at 1, got {list(shares)}")
    grid = maps.shape[1], maps.shape[2]
    order = torch.sort(maps.flatten(1), dim=1, descending=True, stable=True).indices
    counts = [round(share * order.shape[1]) for share in shares]
    predicted = logits(model, images).argmax(-1, keepdim=True)

    def probability(order: Tensor, count: int) -> Tensor:
        hidden = logits(model, hide_patches(images, order, count, grid))
        return hidden.double().softmax(-1).gather(1, predicted)[:, 0]  # [n]

    deletion = torch.stack([probability(order, count) for count in counts], 1)  # [n, points]
    middle = [probability(order.flip(1), order.shape[1] - count) for count in counts[1:-1]]
    insertion = torch.stack([deletion[:, -1], *middle, deletion[:, 0]], 1)  # the ends are those of the deletion
    x = torch.tensor(list(shares), dtype=torch.float64)
    areas = (torch.trapezoid(curve, x).tolist() for curve in (deletion, insertion))
    return Faithfulness(list(shares), deletion.mean(0).tolist(), insertion.mean(0).tolist(), *areas)
