"""Filters of the first layer and similarity of position embeddings (Figure 7, left and center; Figure 10).

filters(model).tiles                     principal components of the patch projection
similarity(model)                        cosine similarity of every two position embeddings
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from plainvit.analyse.attention import NotApplicableError
from plainvit.evaluate.statistics import rank_correlation
from plainvit.models import ResNet, ViT
from plainvit.models.positions import Positions

TILES = 28  # as in the paper


@dataclass
class Filters:
    """Principal components of a first layer's kernels, the strongest first."""

    tiles: np.ndarray  # [n, height, width, channels], unit length, the largest value positive
    variance: np.ndarray  # [n], fraction of the variance that each explains


@torch.no_grad()
def filters(model: ViT | ResNet, count: int = TILES) -> Filters:
    """PCA of the kernels of the patch projection; of a hybrid or a ResNet, of its first convolution."""
    if isinstance(model, ViT) and model.stem is None:
        kernels = model.embedding.weight.view(-1, model.config.channels, *model.config.patch)  # [D, C, P, Q]
    else:
        body = model.stem if isinstance(model, ViT) else model.body
        assert body is not None
        kernels = body.root.standardized()
    points = kernels.flatten(1).double().cpu().numpy()
    _, singular, components = np.linalg.svd(points - points.mean(0), full_matrices=False)
    components = components[:count]
    largest = np.take_along_axis(components, abs(components).argmax(1)[:, None], 1)
    tiles = (components * np.sign(largest)).reshape(-1, *kernels.shape[1:]).transpose(0, 2, 3, 1)
    variance = singular**2
    return Filters(tiles, variance[:count] / max(variance.sum(), np.finfo(float).tiny))


def filters_to_rgb(tiles: np.ndarray) -> np.ndarray:
    """uint8 RGB: gray is 0; each tile is scaled by its largest absolute value."""
    scale = abs(tiles).max((1, 2, 3), keepdims=True)
    levels = 127.5 + 127.5 * tiles / np.where(scale > 0, scale, 1)
    return levels.round().astype(np.uint8)


@torch.no_grad()
def position_vectors(model: ViT) -> Tensor:
    """[h, w, D]: position embeddings of the patches, those of the first layer if each has its own."""
    if not model.positions:
        kind = model.config.posemb
        raise NotApplicableError(f"this model has posemb {kind!r}: it adds no position embeddings to the patches")
    return cast(Positions, model.positions[0]).grid_table().view(*model.config.grid, -1)


@torch.no_grad()
def similarity(model: ViT) -> np.ndarray:
    """[h, w, h, w] cosine similarity of each position with all others; 0 for a zero vector."""
    units = torch.nn.functional.normalize(position_vectors(model).flatten(0, 1).double(), dim=-1)
    return (units @ units.mT).cpu().numpy().reshape(*model.config.grid, *model.config.grid)


@dataclass
class Structure:
    """Mean similarity of a position with others, by where they are in the grid."""

    row: float  # in the same row
    column: float  # in the same column
    elsewhere: float  # in neither
    nearness: float  # rank correlation of similarity and nearness

    @property
    def contrast(self) -> float:
        """Mean of row and column minus elsewhere: the structure that the paper describes; 0 if there is none."""
        return (self.row + self.column) / 2 - self.elsewhere


def structure(similar: np.ndarray) -> Structure:
    h, w = similar.shape[:2]
    y, x = np.divmod(np.arange(h * w), w)
    flat = similar.reshape(h * w, h * w)
    same_row, same_column = y[:, None] == y, x[:, None] == x
    itself = np.eye(h * w, dtype=bool)
    distance = np.hypot(y[:, None] - y, x[:, None] - x)
    return Structure(
        row=_mean(flat[same_row & ~itself]),
        column=_mean(flat[same_column & ~itself]),
        elsewhere=_mean(flat[~same_row & ~same_column]),
        nearness=rank_correlation(-distance[~itself], flat[~itself]),
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
