"""MixUp and CutMix on a batch, on its device; labels become distributions.

Samples 2k and 2k + 1 of the batch are mixed, with one lambda computed from (seed, step): the result does not depend on
the number of processes, as long as each has an even number of samples.
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
    """Mix images (as floats in [0, 1]) and targets [B, K]. With both methods on, each step picks one at random."""
    if not augment.mixup and not augment.cutmix:
        return images, targets
    if len(images) % 2:
        raise ValueError(f"--augment.mixup and --augment.cutmix need an even batch per process, got {len(images)}")
    random = np.random.Generator(np.random.Philox(key=[seed, 0x6D6978], counter=[0, 0, 0, step]))
    cutting = augment.cutmix > 0 and (not augment.mixup or random.random() < 0.5)
    alpha = augment.cutmix if cutting else augment.mixup
    weight = float(random.beta(alpha, alpha))  # of each image's own pixels and label
    partner = images.view(-1, 2, *images.shape[1:]).flip(1).reshape(images.shape)
    other = targets.view(-1, 2, targets.shape[1]).flip(1).reshape(targets.shape)
    if not cutting:
        weight = max(weight, 1 - weight)  # each image's own label dominates; both images of a pair occur
        return torch.lerp(as_floats(partner), as_floats(images), weight), torch.lerp(other, targets, weight)
    top, left, bottom, right = _draw_box(random, weight, images.shape[2], images.shape[3])
    images = as_floats(images).clone()
    images[:, :, top:bottom, left:right] = as_floats(partner)[:, :, top:bottom, left:right]
    weight = 1 - (bottom - top) * (right - left) / (images.shape[2] * images.shape[3])
    return images, torch.lerp(other, targets, weight)


def _draw_box(random: np.random.Generator, weight: float, height: int, width: int) -> tuple[int, int, int, int]:
    """A rectangle of (1 - weight) of the area around a uniform center, clipped at the border."""
    side = (1 - weight) ** 0.5
    y, x = int(random.integers(height)), int(random.integers(width))
    half_h, half_w = int(height * side / 2), int(width * side / 2)
    return max(y - half_h, 0), max(x - half_w, 0), min(y + half_h, height), min(x + half_w, width)
