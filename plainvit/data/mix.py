"""MixUp and CutMix on a batch, on its device; labels become distributions.

Neighbours 2k and 2k + 1 of the batch are mixed with each other, by one lambda that follows from (seed, step): the
result does not depend on how many processes share the batch, as long as each holds an even number of it.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.config import Augment
from plainvit.data.transforms import as_floats


def soft_labels(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """[B, K] distributions: 1 - smoothing on the label, the rest spread over all classes."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes


def mix(images: Tensor, targets: Tensor, augment: Augment, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Images as floats in [0, 1], and the targets [B, K] mixed alike. With both on, each step takes one at random."""
    if not augment.mixup and not augment.cutmix:
        return images, targets
    if len(images) % 2:
        raise ValueError(f"mixing pairs neighbours: the batch of each process must be even, got {len(images)}")
    random = np.random.Generator(np.random.Philox(key=[seed, 0x6D6978], counter=[0, 0, 0, step]))
    cutting = augment.cutmix > 0 and (not augment.mixup or random.random() < 0.5)
    alpha = augment.cutmix if cutting else augment.mixup
    share = float(random.beta(alpha, alpha))
    partner = images.view(-1, 2, *images.shape[1:]).flip(1).reshape(images.shape)
    other = targets.view(-1, 2, targets.shape[1]).flip(1).reshape(targets.shape)
    if not cutting:
        share = max(share, 1 - share)  # both orders occur, so this loses nothing and keeps each image's own label first
        return torch.lerp(as_floats(partner), as_floats(images), share), torch.lerp(other, targets, share)
    top, left, bottom, right = _hole(random, share, images.shape[2], images.shape[3])
    images = as_floats(images).clone()
    images[:, :, top:bottom, left:right] = as_floats(partner)[:, :, top:bottom, left:right]
    share = 1 - (bottom - top) * (right - left) / (images.shape[2] * images.shape[3])
    return images, torch.lerp(other, targets, share)


def _hole(random: np.random.Generator, share: float, height: int, width: int) -> tuple[int, int, int, int]:
    """A rectangle of (1 - share) of the area around a uniform centre, cut off at the border."""
    side = (1 - share) ** 0.5
    y, x = int(random.integers(height)), int(random.integers(width))
    half_h, half_w = int(height * side / 2), int(width * side / 2)
    return max(y - half_h, 0), max(x - half_w, 0), min(y + half_h, height), min(x + half_w, width)
