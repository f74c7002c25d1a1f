"""How often a classifier is right: every image of a set once, with the model's own preprocessing.

    result = classify(model, source)
    result.top1, result.interval, result.confusion

The last batch is smaller, never dropped or padded; images that cannot be read are counted, not scored.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from plainvit.config import Preprocess
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.sources import Source

MOST_CONFUSED = 1000  # classes up to which a confusion matrix is kept
CACHE_BYTES = 2 * 10**9  # prepared images of a validation set that are kept between evaluations


@dataclass
class Result:
    """What the model said of each image, in the order of the source."""

    labels: np.ndarray  # [N]
    guesses: np.ndarray  # [N, up to 5], the most probable first
    probabilities: np.ndarray  # [N], of the first guess
    nll: np.ndarray  # [N], negative log-probability of the label
    index: np.ndarray  # [N], places in the source
    classes: int
    unreadable: int = 0

    @property
    def top1(self) -> float:
        return float((self.guesses[:, 0] == self.labels).mean())

    @property
    def top5(self) -> float:
        return float((self.guesses == self.labels[:, None]).any(1).mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of top-1, by Wilson's formula."""
        n, p, z = len(self.labels), self.top1, 1.959963984540054
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)

    @property
    def confusion(self) -> np.ndarray:
        """[K, K] counts: rows are the truth, columns the guess."""
        pairs = self.labels.astype(np.int64) * self.classes + self.guesses[:, 0]
        return np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    def numbers(self) -> dict[str, float]:
        """What is worth a line while training."""
        return {"top1": self.top1, "top5": self.top5, "nll": float(self.nll.mean())}

    def summary(self) -> dict[str, Any]:
        """As JSON for results.json."""
        return {
            "images": len(self.labels),
            **self.numbers(),
            "interval": list(self.interval),
            "unreadable": self.unreadable,
            **({"confusion": self.confusion.tolist()} if self.classes <= MOST_CONFUSED else {}),
        }


class Prepared:
    """A source as its model evaluates it; prepared once where it is small enough to keep."""

    def __init__(
        self, source: Source, size: tuple[int, int], preprocess: Preprocess, *, batch: int, workers: int, device: str
    ) -> None:
        self.source, self.classes = source, len(source.classes)
        self._how: dict[str, Any] = {"batch": batch, "size": size, "preprocess": preprocess, "workers": workers}
        self._device, self._small = device, len(source) * 3 * size[0] * size[1] <= CACHE_BYTES
        self._kept: list[Batch] | None = None

    def batches(self) -> Iterable[Batch]:
        if self._kept is not None:
            return self._kept
        made = evaluation_batches(self.source, device=self._device, **self._how)
        if self._small:
            self._kept = list(made)
            return self._kept
        return made


@torch.inference_mode()
def classify(model: nn.Module, prepared: Prepared, precision: torch.dtype = torch.float32) -> Result:
    """Runs the model over every image; it is put back into the mode it was in."""
    training = model.training
    model.eval()
    columns: list[tuple[np.ndarray, ...]] = []
    unreadable = 0
    for batch in prepared.batches():
        device = batch.images.device.type
        with torch.autocast(device, precision, enabled=precision is not torch.float32):
            logits = model(batch.images)
        log_probability = F.log_softmax(logits.float(), -1)
        best = log_probability.topk(min(5, log_probability.shape[1]))
        nll = F.nll_loss(log_probability, batch.labels, reduction="none")
        good = ~np.isin(batch.index, [index for index, _ in batch.bad])
        unreadable += len(batch.bad)
        found = batch.labels, best.indices, best.values[:, 0].exp(), nll
        columns.append((*(x.cpu().numpy()[good] for x in found), batch.index[good]))
    model.train(training)
    labels, guesses, probabilities, nll, index = (np.concatenate(column) for column in zip(*columns, strict=True))
    if not len(labels):
        raise ValueError(f"no image of the {prepared.source.split} split can be read")
    return Result(labels, guesses, probabilities, nll, index, prepared.classes, unreadable)
