"""Objectives: a model with its loss. This one classifies labels; train/masked_objective.py predicts masked patches.

The loop calls `make_inputs(batch, step)` outside of compiled code, then `objective(*tensors)`, compiled, which returns
the mean loss over the images and the number of correct predictions (NaN if there is no such number). A loss of your own
is `--loss FILE.py:FUNCTION`, one for everybody an entry of LOSSES and its name in config.py. A new objective is a
class, a name in `Config.objective`, and a line in setup.py.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.config import LOSSES as NAMES
from plainvit.config import Config
from plainvit.data.loader import Batch
from plainvit.data.mix import mix, soft_labels
from plainvit.data.transforms import as_floats
from plainvit.models import ResNet, ViT
from plainvit.recipes import import_file
from plainvit.train.state import autocast


def softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each image with a target distribution [B, K]."""
    return -(targets * F.log_softmax(logits.float(), -1)).sum(-1)  # [B]


def sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy, summed over the classes as in big_vision."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(-1)  # [B]


def binary_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """DeiT III's: every class of a mixed image has target 1; mean over the classes."""
    return F.binary_cross_entropy_with_logits(logits.float(), (targets > 0).float(), reduction="none").mean(-1)  # [B]


LOSSES = dict(zip(NAMES, (softmax_loss, sigmoid_loss, binary_loss), strict=True))


def find_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss by its name, or the function of FILE.py:FUNCTION, whose file is executed."""
    if name in LOSSES:
        return LOSSES[name]
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"file {file} of --loss {name} does not exist")
    loss = getattr(import_file(Path(file)), function, None)
    if loss is None:
        raise ValueError(f"{file} has no function {function!r}, which --loss {name} names")
    return loss


def balance_classes(counts: Tensor) -> Tensor:
    """Weights [K] inverse to the number of images of each class, with a mean of 1 over the images."""
    return counts.sum() / (counts.clamp(min=1) * (counts > 0).sum()).float()


class Classify(nn.Module):
    """Classification; with mixed labels, class weights or a teacher as configured."""

    weights: Tensor | None

    def __init__(
        self, model: ViT | ResNet, config: Config, counts: Tensor | None = None, teacher: ViT | ResNet | None = None
    ) -> None:
        super().__init__()
        self.model, self.config, self.classes = model, config, model.config.classes
        self.loss = find_loss(config.loss)
        weights = balance_classes(counts) if config.class_weights and counts is not None else None
        self.register_buffer("weights", weights, persistent=False)
        self.teacher = [teacher] if teacher else []  # in a list, so that its weights are not the objective's

    def make_inputs(self, batch: Batch, step: int) -> tuple[Tensor, ...]:
        """(images, targets [B, K], labels), and with a teacher its predictions for the same images [B, K]."""
        augment = self.config.augment
        targets = soft_labels(batch.labels, self.classes, augment.smoothing)
        images, targets = mix(batch.images, targets, augment, self.config.seed, step)
        if not self.teacher:
            return images, targets, batch.labels
        return images, targets, batch.labels, self.predict_by_teacher(images)

    @torch.no_grad()
    def predict_by_teacher(self, images: Tensor) -> Tensor:
        """The teacher's top classes as one-hot [B, K], for images resized to its own size."""
        teacher = self.teacher[0]
        size = teacher.config.image_size
        if tuple(images.shape[2:]) != size:
            images = F.interpolate(as_floats(images), size, mode="bilinear", antialias=True)
        with autocast(self.config, images.device):  # as the student
            logits = teacher(images).float()
        return F.one_hot(logits.argmax(-1), self.classes).float()

    def forward(
        self, images: Tensor, targets: Tensor, labels: Tensor, predicted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = from_teacher = self.model(images)
        if isinstance(logits, tuple):
            logits, from_teacher = logits  # DeiT's second head learns from the teacher
            if predicted is None:  # train the mean of both heads, which inference uses (timm)
                logits = (logits + from_teacher) / 2
        loss = self.loss(logits, targets)
        if self.weights is not None:
            loss = loss * (targets @ self.weights)
        if predicted is not None:
            loss = (loss + softmax_loss(from_teacher, predicted)) / 2
        return loss.mean(), (logits.argmax(-1) == labels).sum()
