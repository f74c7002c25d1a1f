"""How often a classifier is right: every image of a set once, with the model's own preprocessing.

    result = classify(Predictor(model), Prepared(source, model.config.image_size, preprocess))
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
from torch import Tensor

from plainvit.config import Preprocess
from plainvit.data.decode import DataError
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.sources import Source
from plainvit.evaluate.predictor import Predictor
from plainvit.runtime.distributed import World

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
        self,
        source: Source,
        size: tuple[int, int],
        preprocess: Preprocess,
        *,
        batch: int = 256,
        workers: int = 0,
        world: World | None = None,
    ) -> None:
        self.source, self.size, self.world, self.batch = source, size, world or World(), batch
        self._how: dict[str, Any] = {"batch": batch, "size": size, "preprocess": preprocess, "workers": workers}
        self._small = len(source) * 3 * size[0] * size[1] <= CACHE_BYTES
        self._kept: list[Batch] | None = None

    @property
    def rounds(self) -> int:
        """Batches of the process that has the most: the others join in with empty ones, as sharded models need."""
        return math.ceil(math.ceil(len(self.source) / self.world.size) / self.batch)

    def batches(self) -> Iterable[Batch]:
        """This process's part of the images."""
        if self._kept is not None:
            return self._kept
        world = self.world
        made = evaluation_batches(self.source, rank=world.rank, world=world.size, device=world.device, **self._how)
        if self._small:
            self._kept = list(made)
            return self._kept
        return made


@torch.no_grad()
def classify(predictor: Predictor, prepared: Prepared) -> Result:
    """Runs the model over every image, shared by all processes; it is put back into the mode it was in."""
    world, classes, model = prepared.world, len(prepared.source.classes), predictor.model
    training = model.training
    model.eval()
    rows = [torch.zeros(0, COLUMNS + min(5, classes), dtype=torch.float64)]
    unreadable, rounds = 0, 0
    for batch in prepared.batches():
        rows.append(_scored(predictor.logits(batch.images), batch))
        unreadable += len(batch.bad)
        rounds += 1
    for _ in range(prepared.rounds - rounds):
        predictor.logits(torch.zeros(1, 3, *prepared.size))
    model.train(training)
    found = world.gather_rows(torch.cat(rows).to(world.device)).cpu().numpy()
    unreadable = int(world.sum(torch.tensor([unreadable], device=world.device)))
    if not len(found):
        raise DataError(f"no image of the {prepared.source.split} split can be read")
    found = found[np.argsort(found[:, 0])]
    index, labels, guesses = (found[:, at].astype(np.int64) for at in (0, 1, slice(COLUMNS, None)))
    return Result(labels, guesses, found[:, 2], found[:, 3], index, classes, unreadable)


COLUMNS = 4  # of a row: place in the source, label, probability of the first guess, nll; the guesses follow


def _scored(logits: Tensor, batch: Batch) -> Tensor:
    """A row for each image that could be read."""
    log_probability = F.log_softmax(logits.double(), -1)
    best = log_probability.topk(min(5, logits.shape[1]))
    nll = F.nll_loss(log_probability, batch.labels, reduction="none")
    index = torch.from_numpy(batch.index).to(logits.device)
    columns = torch.stack((index.double(), batch.labels.double(), best.values[:, 0].exp(), nll), 1)
    good = torch.from_numpy(~np.isin(batch.index, [one for one, _ in batch.bad]))
    return torch.cat((columns, best.indices.double()), 1).cpu()[good]
