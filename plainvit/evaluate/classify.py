"""Classification accuracy: every image of a set once, with the model's own preprocessing.

    result = classify(Predictor(model), Prepared(source, model.config.image_size, preprocess))
    result.top1, result.interval, result.calibration_error, result.confusion

    plainvit evaluate runs/photos --data photos/

The last batch is smaller, never dropped or padded. Unreadable images are counted, not scored.
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
from plainvit.evaluate.labels import Labels, check_labels
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import FEW, describe_confidence, mean_interval, wilson
from plainvit.models.inference import check_finite, eval_mode
from plainvit.runtime.distributed import World

MOST_CONFUSED = 1000  # largest number of classes with a stored confusion matrix
CACHE_BYTES = 2 * 10**9  # largest validation set that is kept prepared between evaluations
BINS = 15  # of the calibration error


@dataclass
class Result:
    """Predictions for each image, in the order of the source."""

    labels: np.ndarray  # [N]
    predictions: np.ndarray  # [N, up to 5], the most probable first
    probabilities: np.ndarray  # [N], of the top-1 prediction
    nll: np.ndarray  # [N], negative log-probability of the correct classes
    index: np.ndarray  # [N], positions in the source
    classes: int
    unreadable: int = 0
    hits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))  # [N, up to 5], which are correct

    def __post_init__(self) -> None:
        if not self.hits.size:
            self.hits = self.predictions == self.labels[:, None]

    @property
    def right(self) -> np.ndarray:
        """[N], whether the top-1 prediction is correct."""
        return self.hits[:, 0]

    @property
    def top1(self) -> float:
        return float(self.right.mean())

    @property
    def top5(self) -> float:
        return float(self.hits.any(1).mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of top-1 (Wilson)."""
        return wilson(int(self.right.sum()), len(self.labels))

    @property
    def majority_accuracy(self) -> float | None:
        """Accuracy of always predicting the most frequent class; None if an image has several correct classes."""
        single = np.array_equal(self.hits, self.predictions == self.labels[:, None])
        return float(np.bincount(self.labels).max() / len(self.labels)) if single else None

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of top1, top5 and nll."""
        top5 = wilson(int(self.hits.any(1).sum()), len(self.labels))
        return {"top1": self.interval, "top5": top5, "nll": mean_interval(self.nll)}

    @property
    def confusion(self) -> np.ndarray:
        """[K, K] counts: rows are labels, columns are predictions."""
        pairs = self.labels.astype(np.int64) * self.classes + self.predictions[:, 0]
        return np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    def bins(self) -> np.ndarray:
        """[BINS, 3]: images, mean confidence and accuracy, by the probability of the top-1 prediction.

        Bins are equally wide and include their upper ends.
        """
        edges = np.linspace(0, 1, BINS + 1)
        bin_of = np.searchsorted(edges[1:-1], self.probabilities)
        images = np.bincount(bin_of, minlength=BINS)
        sums = [np.bincount(bin_of, weights=values, minlength=BINS) for values in (self.probabilities, self.right)]
        means = [np.divide(total, images, out=np.zeros(BINS), where=images > 0) for total in sums]
        return np.stack([images, *means], 1)

    @property
    def confidence_sentence(self) -> str:
        """A sentence that compares mean confidence with accuracy."""
        return describe_confidence(float(self.probabilities.mean()), int(self.right.sum()), len(self.labels))

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean distance of confidence and accuracy over the images."""
        images, probability, accuracy = self.bins().T
        return float((images * np.abs(accuracy - probability)).sum() / images.sum())

    def by_class(self) -> dict[str, np.ndarray]:
        """[K] each: images, predictions, precision, recall and F1; 0 where undefined."""
        right, labels, top1 = self.right, self.labels, self.predictions[:, 0]
        images, predicted = (np.bincount(values, minlength=self.classes) for values in (labels, top1))
        hits = np.bincount(labels[right], minlength=self.classes)
        fractions = {"precision": (hits, predicted), "recall": (hits, images), "f1": (2 * hits, images + predicted)}
        divided = {
            name: np.divide(a, b, out=np.zeros(self.classes), where=b > 0, dtype=float)
            for name, (a, b) in fractions.items()
        }
        return {"images": images, "predicted": predicted, **divided}

    def numbers(self) -> dict[str, float]:
        """The metrics of one line while training."""
        top5 = {"top5": self.top5} if self.classes > FEW else {}
        return {"top1": self.top1, **top5, "nll": float(self.nll.mean())}

    def summary(self) -> dict[str, Any]:
        """The entry of results.json."""
        return {
            "images": len(self.labels),
            **self.numbers(),
            "ece": self.calibration_error,
            "probability": float(self.probabilities.mean()),
            "interval": list(self.interval),
            "majority_accuracy": self.majority_accuracy,
            "unreadable": self.unreadable,
            **({"confusion": self.confusion.tolist()} if self.classes <= MOST_CONFUSED else {}),
        }


class Prepared:
    """A source with its model's preprocessing; `keep` stores the prepared batches if they are small enough."""

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
        self._options: dict[str, Any] = {"batch": batch, "size": size, "preprocess": preprocess, "workers": workers}
        self._small = keep and len(source) * 3 * size[0] * size[1] <= CACHE_BYTES
        self._kept: list[Batch] | None = None

    @property
    def rounds(self) -> int:
        """The largest number of batches of any process: sharded models need equally many forwards in all."""
        return math.ceil(math.ceil(len(self.source) / self.world.size) / self.batch)

    def batches(self) -> Iterable[Batch]:
        """The batches of this process."""
        if self._kept is not None:
            return self._kept
        world = self.world
        batches = evaluation_batches(
            self.source, rank=world.rank, world_size=world.size, device=world.device, **self._options
        )
        if self._small:
            self._kept = list(batches)
            return self._kept
        return batches


@torch.no_grad()
def classify(
    predictor: Predictor,
    prepared: Prepared,
    labels: Labels | None = None,
    on_batch: Callable[[Batch], object] | None = None,
) -> Result:
    """Evaluates the model on every image, split over all processes, and restores its train or eval mode.

    Args:
        predictor: The model with its device and precision.
        prepared: The images.
        labels: Which predictions are correct; the labels of the source by default.
        on_batch: Called with each batch of this process when it is done.

    Raises:
        NonFiniteError: Logits of any image are NaN or Inf.
    """
    world, model = prepared.world, predictor.model
    check_labels(prepared.source)
    scorer = _Scorer(labels, prepared.source, predictor.classes)
    rows, unreadable, rounds = [scorer.no_rows], 0, 0
    with eval_mode(model):
        for batch in prepared.batches():
            rows.append(scorer.score(predictor.logits(batch.images), batch))
            unreadable, rounds = unreadable + len(batch.bad), rounds + 1
            if on_batch:
                on_batch(batch)
        for _ in range(prepared.rounds - rounds):
            predictor.logits(torch.zeros(1, 3, *prepared.size))
    table = world.gather_rows(torch.cat(rows).to(world.device)).cpu().numpy()
    unreadable = int(world.sum(torch.tensor([unreadable], device=world.device)))
    if not len(table):
        raise DataError(f"no image of the {prepared.source.split} split can be read")
    table = table[np.argsort(table[:, 0])]
    check_finite(torch.from_numpy(table[:, 4:COLUMNS]), lambda at: prepared.source.name(int(table[at, 0])))
    return _make_result(table, len(prepared.source.classes), unreadable)


def _make_result(rows: np.ndarray, classes: int, unreadable: int) -> Result:
    index, truth, ranked = (rows[:, at].astype(np.int64) for at in (0, 1, slice(COLUMNS, None)))
    predictions, hits = np.split(ranked, 2, axis=1)
    return Result(truth, predictions, rows[:, 2], rows[:, 3], index, classes, unreadable, hits.astype(bool))


# Columns of a row: position in the source, label, top-1 probability, nll, sum of the logits, which is NaN or Inf if any
# of them is; then up to 5 predictions and whether each is correct
COLUMNS = 5


class _Scorer:
    """Logits -> one row per readable image."""

    def __init__(self, labels: Labels | None, source: Source, classes: int) -> None:
        self.right = torch.from_numpy(source.labels[:, None].astype(np.int64) if labels is None else labels.right)
        self.columns = None if labels is None or labels.columns is None else torch.from_numpy(labels.columns)
        self.classes = classes if self.columns is None else len(self.columns)
        self.no_rows = torch.zeros(0, COLUMNS + 2 * min(5, self.classes), dtype=torch.float64)

    def score(self, logits: Tensor, batch: Batch) -> Tensor:
        total = logits.double().sum(-1)  # [B]; cannot overflow: the logits are fp32
        if self.columns is not None:
            logits = logits[:, self.columns.to(logits.device)]
        log_probability = logits.double().log_softmax(-1)  # [B, K]
        best = log_probability.topk(min(5, self.classes))
        right = self.right[torch.from_numpy(batch.index)].to(logits.device)  # [B, M]
        given = log_probability.gather(1, right.clamp(min=0)).masked_fill(right < 0, -math.inf)
        hits = (best.indices.unsqueeze(2) == right.unsqueeze(1)).any(2)  # [B, up to 5]
        index = torch.from_numpy(batch.index).to(logits.device)
        columns = (index, batch.labels.to(logits.device), best.values[:, 0].exp(), -given.logsumexp(1), total)
        row = torch.cat(
            (torch.stack([column.double() for column in columns], 1), best.indices.double(), hits.double()), 1
        )
        readable = torch.from_numpy(~np.isin(batch.index, [index for index, _ in batch.bad]))
        return row.cpu()[readable]
