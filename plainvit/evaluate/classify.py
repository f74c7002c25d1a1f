"""How often a classifier is right: every image of a set once, with the model's own preprocessing.

    result = classify(Predictor(model), Prepared(source, model.config.image_size, preprocess))
    result.top1, result.interval, result.calibration_error, result.confusion

    plainvit evaluate runs/photos --data photos/

The last batch is smaller, never dropped or padded; images that cannot be read are counted, not scored.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plainvit.config import Preprocess
from plainvit.data.decode import DataError
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.sources import Source
from plainvit.evaluate.chance import FEW, mean_interval, sureness, wilson
from plainvit.evaluate.labels import Labels, check_labels
from plainvit.evaluate.predictor import Predictor
from plainvit.models.inference import check_finite, eval_mode
from plainvit.runtime.distributed import World

MOST_CONFUSED = 1000  # classes up to which a confusion matrix is kept
CACHE_BYTES = 2 * 10**9  # prepared images of a validation set that are kept between evaluations
BINS = 15  # of the calibration error


@dataclass
class Result:
    """What the model said of each image, in the order of the source."""

    labels: np.ndarray  # [N]
    guesses: np.ndarray  # [N, up to 5], the most probable first
    probabilities: np.ndarray  # [N], of the first guess
    nll: np.ndarray  # [N], negative log of the probability that right answers were given
    index: np.ndarray  # [N], places in the source
    classes: int
    unreadable: int = 0
    hits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))  # [N, up to 5], which guesses are right

    def __post_init__(self) -> None:
        if not self.hits.size:
            self.hits = self.guesses == self.labels[:, None]

    @property
    def right(self) -> np.ndarray:
        """[N], whether the first guess is right."""
        return self.hits[:, 0]

    @property
    def top1(self) -> float:
        return float(self.right.mean())

    @property
    def top5(self) -> float:
        return float(self.hits.any(1).mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of top-1, by Wilson's formula."""
        return wilson(int(self.right.sum()), len(self.labels))

    @property
    def guessing(self) -> float | None:
        """What naming the most frequent class each time would get; None where more than the label counts as right."""
        plain = np.array_equal(self.hits, self.guesses == self.labels[:, None])
        return float(np.bincount(self.labels).max() / len(self.labels)) if plain else None

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % of what has one."""
        top5 = wilson(int(self.hits.any(1).sum()), len(self.labels))
        return {"top1": self.interval, "top5": top5, "nll": mean_interval(self.nll)}

    @property
    def confusion(self) -> np.ndarray:
        """[K, K] counts: rows are the truth, columns the guess."""
        pairs = self.labels.astype(np.int64) * self.classes + self.guesses[:, 0]
        return np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    def bins(self) -> np.ndarray:
        """[BINS, 3]: images, mean probability and share of right guesses, by the probability of the first guess.

        Bins are equally wide and include their upper ends.
        """
        edges = np.linspace(0, 1, BINS + 1)
        place = np.searchsorted(edges[1:-1], self.probabilities)
        images = np.bincount(place, minlength=BINS)
        sums = [np.bincount(place, weights=values, minlength=BINS) for values in (self.probabilities, self.right)]
        means = [np.divide(total, images, out=np.zeros(BINS), where=images > 0) for total in sums]
        return np.stack([images, *means], 1)

    @property
    def sureness(self) -> str:
        """The mean probability of the guesses beside how often they are right, in words."""
        return sureness(float(self.probabilities.mean()), int(self.right.sum()), len(self.labels))

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: by how much probability and accuracy differ, averaged over the images."""
        images, probability, accuracy = self.bins().T
        return float((images * np.abs(accuracy - probability)).sum() / images.sum())

    def by_class(self) -> dict[str, np.ndarray]:
        """[K] each: images, guesses, precision, recall and F1; 0 where there is nothing to divide by."""
        right, labels, guesses = self.right, self.labels, self.guesses[:, 0]
        images, guessed = (np.bincount(values, minlength=self.classes) for values in (labels, guesses))
        hits = np.bincount(labels[right], minlength=self.classes)
        shares = {"precision": (hits, guessed), "recall": (hits, images), "f1": (2 * hits, images + guessed)}
        divided = {
            name: np.divide(a, b, out=np.zeros(self.classes), where=b > 0, dtype=float)
            for name, (a, b) in shares.items()
        }
        return {"images": images, "guessed": guessed, **divided}

    def numbers(self) -> dict[str, float]:
        """What is worth a line while training."""
        top5 = {"top5": self.top5} if self.classes > FEW else {}
        return {"top1": self.top1, **top5, "nll": float(self.nll.mean())}

    def summary(self) -> dict[str, Any]:
        """As JSON for results.json."""
        return {
            "images": len(self.labels),
            **self.numbers(),
            "ece": self.calibration_error,
            "probability": float(self.probabilities.mean()),
            "interval": list(self.interval),
            "guessing": self.guessing,
            "unreadable": self.unreadable,
            **({"confusion": self.confusion.tolist()} if self.classes <= MOST_CONFUSED else {}),
        }


class Prepared:
    """A source as its model evaluates it; prepared once where it is small enough to keep, and worth keeping."""

    def __init__(
        self,
        source: Source,
        size: tuple[int, int],
        preprocess: Preprocess,
        *,
        batch: int = 256,
        workers: int | None = 0,
        world: World | None = None,
        keep: bool = True,
    ) -> None:
        self.source, self.size, self.world, self.batch = source, size, world or World(), batch
        self._how: dict[str, Any] = {"batch": batch, "size": size, "preprocess": preprocess, "workers": workers}
        self._small = keep and len(source) * 3 * size[0] * size[1] <= CACHE_BYTES
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
def classify(
    predictor: Predictor,
    prepared: Prepared,
    labels: Labels | None = None,
    tell: Callable[[Batch], object] | None = None,
) -> Result:
    """Runs the model over every image, shared by all processes; it is put back into the mode it was in.

    Logits that are NaN or Inf, be it of one image, are a NonFiniteError. Right is the image's label, or what `labels`
    say. `tell` hears of each batch of this process when it is done.
    """
    world, model = prepared.world, predictor.model
    check_labels(prepared.source)
    marks = _Marks(labels, prepared.source, predictor.classes)
    rows, unreadable, rounds = [marks.nothing], 0, 0
    with eval_mode(model):
        for batch in prepared.batches():
            rows.append(marks.scored(predictor.logits(batch.images), batch))
            unreadable, rounds = unreadable + len(batch.bad), rounds + 1
            if tell:
                tell(batch)
        for _ in range(prepared.rounds - rounds):
            predictor.logits(torch.zeros(1, 3, *prepared.size))
    found = world.gather_rows(torch.cat(rows).to(world.device)).cpu().numpy()
    unreadable = int(world.sum(torch.tensor([unreadable], device=world.device)))
    if not len(found):
        raise DataError(f"no image of the {prepared.source.split} split can be read")
    found = found[np.argsort(found[:, 0])]
    check_finite(torch.from_numpy(found[:, 4:COLUMNS]), lambda at: prepared.source.name(int(found[at, 0])))
    return _result(found, len(prepared.source.classes), unreadable)


def _result(rows: np.ndarray, classes: int, unreadable: int) -> Result:
    """The rows of all processes, in the order of the source."""
    index, truth, several = (rows[:, at].astype(np.int64) for at in (0, 1, slice(COLUMNS, None)))
    guesses, hits = np.split(several, 2, axis=1)
    return Result(truth, guesses, rows[:, 2], rows[:, 3], index, classes, unreadable, hits.astype(bool))


# Of a row: place in the source, label, probability of the first guess, nll, sum of all logits, which is NaN or Inf
# where one of them is; guesses and hits follow
COLUMNS = 5


class _Marks:
    """Logits -> a row for each image that could be read."""

    def __init__(self, labels: Labels | None, source: Source, classes: int) -> None:
        self.right = torch.from_numpy(source.labels[:, None].astype(np.int64) if labels is None else labels.right)
        self.columns = None if labels is None or labels.columns is None else torch.from_numpy(labels.columns)
        self.classes = classes if self.columns is None else len(self.columns)
        self.nothing = torch.zeros(0, COLUMNS + 2 * min(5, self.classes), dtype=torch.float64)  # rows of no image

    def scored(self, logits: Tensor, batch: Batch) -> Tensor:
        total = logits.double().sum(-1)  # [B]; finite in float64 where all logits are finite in fp32
        if self.columns is not None:
            logits = logits[:, self.columns.to(logits.device)]
        log_probability = logits.double().log_softmax(-1)  # [B, K]
        best = log_probability.topk(min(5, self.classes))
        right = self.right[torch.from_numpy(batch.index)].to(logits.device)  # [B, M]
        given = log_probability.gather(1, right.clamp(min=0)).masked_fill(right < 0, -math.inf)
        hits = (best.indices.unsqueeze(2) == right.unsqueeze(1)).any(2)  # [B, up to 5]
        index = torch.from_numpy(batch.index).to(logits.device)
        columns = (index, batch.labels.to(logits.device), best.values[:, 0].exp(), -given.logsumexp(1), total)
        row = torch.cat((torch.stack([one.double() for one in columns], 1), best.indices.double(), hits.double()), 1)
        good = torch.from_numpy(~np.isin(batch.index, [one for one, _ in batch.bad]))
        return row.cpu()[good]
