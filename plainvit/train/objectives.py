"""What is minimised. An objective holds the model, makes its targets from a batch, and gives a loss.

The loop knows only this: `prepare(batch, step)` outside of compiled code, then `objective(*tensors)`, compiled, which
returns the mean loss over the images and the number of images whose label is the model's first choice, NaN where there
is no such thing. Here are labels; hidden patches are in masked.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.config import Config
from plainvit.data.loader import Batch
from plainvit.data.mix import mix, soft_labels
from plainvit.data.transforms import as_floats
from plainvit.device import choose_precision
from plainvit.models import ResNet, ViT


def softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with distributions [B, K], of each image."""
    return -(targets * F.log_softmax(logits.float(), -1)).sum(-1)  # [B]


def sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """A yes-or-no question for each class, summed over the classes as big_vision does."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(-1)  # [B]


def binary_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """DeiT III's: whatever share of a class is in a mixed image counts as the class; mean over the classes."""
    return F.binary_cross_entropy_with_logits(logits.float(), (targets > 0).float(), reduction="none").mean(-1)  # [B]


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss, "binary": binary_loss}


def _balanced(counts: Tensor | None) -> Tensor:
    """[K] inverse to the number of images of each class, with a mean of 1 over the images."""
    assert counts is not None
    return counts.sum() / (counts.clamp(min=1) * (counts > 0).sum()).float()


class Classify(nn.Module):
    """Labels from images, perhaps mixed, weighted by class, or distilled from a teacher."""

    weights: Tensor | None

    def __init__(
        self, model: ViT | ResNet, config: Config, counts: Tensor | None = None, teacher: ViT | ResNet | None = None
    ) -> None:
        super().__init__()
        self.model, self.config, self.classes = model, config, model.config.classes
        self.loss = LOSSES[config.loss]
        self.register_buffer("weights", _balanced(counts) if config.class_weights else None, persistent=False)
        self.teacher = [teacher] if teacher else []  # in a list: its weights are not the objective's

    def prepare(self, batch: Batch, step: int) -> tuple[Tensor, ...]:
        """(images, targets [B, K], labels), and with a teacher what it says of the same images."""
        augment = self.config.augment
        targets = soft_labels(batch.labels, self.classes, augment.smoothing)
        images, targets = mix(batch.images, targets, augment, self.config.seed, step)
        if not self.teacher:
            return images, targets, batch.labels
        return images, targets, batch.labels, self._taught(images)

    @torch.no_grad()
    def _taught(self, images: Tensor) -> Tensor:
        """The teacher's distribution, or its choice as one: on images of its own size."""
        teacher = self.teacher[0]
        size = teacher.config.image_size
        if tuple(images.shape[2:]) != size:
            images = F.interpolate(as_floats(images), size, mode="bilinear", antialias=True)
        device = images.device.type
        dtype = choose_precision(self.config.precision, device)  # as the student
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            logits = teacher(images).float()
        if self.config.distil == "hard":
            return F.one_hot(logits.argmax(-1), self.classes).float()
        return F.softmax(logits / self.config.temperature, -1)

    def forward(
        self, images: Tensor, targets: Tensor, labels: Tensor, taught: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        both = logits if isinstance(logits, tuple) else (logits, logits)  # DeiT's second head learns from the teacher
        if taught is None and isinstance(logits, tuple):  # the mean of both heads learns, as inference uses it (timm)
            both = ((logits[0] + logits[1]) / 2,) * 2
        loss = self.loss(both[0], targets)
        if self.weights is not None:
            loss = loss * (targets @ self.weights)
        if taught is not None:
            temperature = self.config.temperature if self.config.distil == "soft" else 1.0
            loss = (loss + softmax_loss(both[1] / temperature, taught) * temperature**2) / 2
        return loss.mean(), (both[0].argmax(-1) == labels).sum()
