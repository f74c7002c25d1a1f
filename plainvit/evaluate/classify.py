"""Classification accuracy: every image of a set once, with the model's own preprocessing.

    result = classify(Predictor(model), EvaluationSet(source, model.config.image_size, preprocess))
    result.top1, result.interval, result.calibration_error, result.confusion

    plainvit evaluate runs/photos --data photos/

The last batch is smaller, never dropped or padded. Unreadable images are counted, not scored.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plainvit.config import Preprocess
from plainvit.data.decode import DataError
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.sources import Source
from plainvit.evaluate.labels import Labels, check_labels
from plainvit.evaluate.metrics import Result
from plainvit.evaluate.predictor import Predictor
from plainvit.models.inference import check_finite, eval_mode
from plainvit.runtime.distributed import World

CACHE_BYTES = 2 * 10**9  # largest validation set that is kept preprocessed between evaluations


class EvaluationSet:
    """A source with its model's preprocessing; `keep` stores the preprocessed batches if they are small enough."""

    def __init__(
        self,
        source: Source,
        size: tuple[int, int],
        preprocess: Preprocess,
        *,
        batch: int = 256,
        workers: int | None = 0,
        world: World | None = None,
        keep: bool = False,
    ) -> None:
        self.source, self.size, self.world, self.batch = source, size, world or World(), batch
        self._options: dict[str, Any] = {"batch": batch, "size": size, "preprocess": preprocess, "workers": workers}
        self._keep = keep and len(source) * 3 * size[0] * size[1] <= CACHE_BYTES
        self._kept: list[Batch] | None = None

    @property
    def rounds(self) -> int:
        """The largest number of batches of any process: sharded models need equally many forwards in all."""
        return math.ceil(math.ceil(len(self.source) / self.world.size) / self.batch)

    def batches(self) -> Iterator[Batch]:
        """The batches of this process."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Batch] = []
        parallel = {"rank": self.world.rank, "world_size": self.world.size, "device": self.world.device}
        for batch in evaluation_batches(self.source, **parallel, **self._options):
            if self._keep:
                kept.append(batch)
            yield batch
        if self._keep:
            self._kept = kept


@torch.no_grad()
def classify(
    predictor: Predictor,
    evaluation_set: EvaluationSet,
    labels: Labels | None = None,
    on_batch: Callable[[Batch], object] | None = None,
) -> Result:
    """Evaluates the model on every image, split over all processes, and restores its train or eval mode.

    Args:
        predictor: The model with its device and precision.
        evaluation_set: The images.
        labels: Which predictions are correct; the labels of the source by default.
        on_batch: Called with each batch of this process when it is done.

    Raises:
        NonFiniteError: Logits of any image are NaN or Inf.
    """
    world, source = evaluation_set.world, evaluation_set.source
    check_labels(source)
    scorer = _Scorer(labels, source, predictor.classes)
    rows, unreadable, rounds = [scorer.no_rows], 0, 0
    with eval_mode(predictor.model):
        for batch in evaluation_set.batches():
            rows.append(scorer.score(predictor.logits(batch.images), batch))
            unreadable, rounds = unreadable + len(batch.bad), rounds + 1
            if on_batch:
                on_batch(batch)
        for _ in range(evaluation_set.rounds - rounds):
            predictor.logits(torch.zeros(1, 3, *evaluation_set.size))
    table = world.gather_rows(torch.cat(rows).to(world.device)).cpu().numpy()
    unreadable = int(world.sum(torch.tensor([unreadable], device=world.device)))
    if not len(table):
        raise DataError(f"no image of the {source.split} split can be read")
    table = table[np.argsort(table[:, 0])]
    sums = torch.from_numpy(table[:, COLUMNS - 1 : COLUMNS])
    check_finite(sums, lambda row: source.name(int(table[row, 0])), computed_in=predictor.dtype)
    return _make_result(table, scorer.classes, unreadable)


def _make_result(table: np.ndarray, classes: int, unreadable: int) -> Result:
    """The result of rows as `_Scorer` makes them."""
    index, truth, probabilities, nll, _ = table[:, :COLUMNS].T
    predictions, hits = np.split(table[:, COLUMNS:].astype(np.int64), 2, axis=1)
    return Result(
        labels=truth.astype(np.int64),
        predictions=predictions,
        hits=hits.astype(bool),
        probabilities=probabilities,
        nll=nll,
        index=index.astype(np.int64),
        classes=classes,
        unreadable=unreadable,
    )


# First columns of a row: position in the source, label, top-1 probability, nll, and the sum of the logits, which is NaN
# or Inf if any of them is. Then follow up to 5 predictions, and whether each is correct
COLUMNS = 5


class _Scorer:
    """Logits -> one row per readable image."""

    def __init__(self, labels: Labels | None, source: Source, classes: int) -> None:
        self.targets = torch.from_numpy(source.labels[:, None].astype(np.int64) if labels is None else labels.targets)
        self.columns = None if labels is None or labels.columns is None else torch.from_numpy(labels.columns)
        self.classes = classes if self.columns is None else len(self.columns)
        self.no_rows = torch.zeros(0, COLUMNS + 2 * min(5, self.classes), dtype=torch.float64)

    def score(self, logits: Tensor, batch: Batch) -> Tensor:
        total = logits.double().sum(-1)  # [B]; cannot overflow: the logits are fp32
        if self.columns is not None:
            logits = logits[:, self.columns.to(logits.device)]
        log_probability = logits.double().log_softmax(-1)  # [B, K]
        best = log_probability.topk(min(5, self.classes))
        targets = self.targets[torch.from_numpy(batch.index)].to(logits.device)  # [B, M]
        log_correct = log_probability.gather(1, targets.clamp(min=0)).masked_fill(targets < 0, -math.inf)
        hits = (best.indices.unsqueeze(2) == targets.unsqueeze(1)).any(2)  # [B, up to 5]
        index = torch.from_numpy(batch.index).to(logits.device)
        columns = (index, batch.labels.to(logits.device), best.values[:, 0].exp(), -log_correct.logsumexp(1), total)
        first = torch.stack([column.double() for column in columns], 1)  # [B, COLUMNS]
        rows = torch.cat((first, best.indices.double(), hits.double()), 1)
        return rows.cpu()[batch.readable]
