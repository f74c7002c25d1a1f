"""Metrics of classification: accuracy with its interval, calibration, confusion matrix, metrics by class.

    result.top1, result.interval, result.calibration_error, result.confusion

`classify` (classify.py) returns a Result.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from plainvit.evaluate.statistics import FEW_CLASSES, describe_confidence, mean_interval, wilson

MAX_CONFUSION_CLASSES = 1000  # largest number of classes with a stored confusion matrix
BINS = 15  # of the calibration error


@dataclass
class Result:
    """Predictions for each image, in the order of the source."""

    labels: np.ndarray  # [N]
    predictions: np.ndarray  # [N, up to 5], the most probable first
    hits: np.ndarray  # [N, up to 5], whether each is correct
    probabilities: np.ndarray  # [N], of the top-1 prediction
    nll: np.ndarray  # [N], negative log-probability of the correct classes
    index: np.ndarray  # [N], positions in the source
    classes: int  # number of classes that are predicted
    unreadable: int = 0

    @property
    def correct(self) -> np.ndarray:
        """[N], whether the top-1 prediction is correct."""
        return self.hits[:, 0]

    @property
    def top1(self) -> float:
        return float(self.correct.mean())

    @property
    def top5(self) -> float:
        return float(self.hits.any(1).mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of top-1 (Wilson)."""
        return wilson(int(self.correct.sum()), len(self.labels))

    @property
    def majority_accuracy(self) -> float | None:
        """Accuracy of always predicting the most frequent class; None if an image has several correct classes."""
        single = np.array_equal(self.hits, self.predictions == self.labels[:, None])
        return float(np.bincount(self.labels).max() / len(self.labels)) if single else None

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of top1, top5 and nll."""
        top5 = wilson(int(self.hits.any(1).sum()), len(self.labels))
        low, high = mean_interval(self.nll)
        return {"top1": self.interval, "top5": top5, "nll": (max(low, 0.0), high)}  # an NLL is never negative

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
        sums = [np.bincount(bin_of, weights=values, minlength=BINS) for values in (self.probabilities, self.correct)]
        means = [np.divide(total, images, out=np.zeros(BINS), where=images > 0) for total in sums]
        return np.stack([images, *means], 1)

    @property
    def confidence_sentence(self) -> str:
        """A sentence that compares mean confidence with accuracy."""
        return describe_confidence(float(self.probabilities.mean()), int(self.correct.sum()), len(self.labels))

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean distance of confidence and accuracy over the images."""
        images, probability, accuracy = self.bins().T
        return float((images * np.abs(accuracy - probability)).sum() / images.sum())

    def by_class(self) -> dict[str, np.ndarray]:
        """[K] each: images, predicted, precision, recall and F1."""
        counts = (self.labels[self.correct], self.labels, self.predictions[:, 0])
        return class_metrics(*(np.bincount(classes, minlength=self.classes) for classes in counts))

    def numbers(self) -> dict[str, float]:
        """The metrics of one line while training."""
        top5 = {"top5": self.top5} if self.classes > FEW_CLASSES else {}
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
            **({"confusion": self.confusion.tolist()} if self.classes <= MAX_CONFUSION_CLASSES else {}),
        }


def class_metrics(correct: np.ndarray, images: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """[K] each, from counts [K]: images, predicted, precision, recall and F1; 0 where undefined."""
    fractions = {
        "precision": (correct, predicted),
        "recall": (correct, images),
        "f1": (2 * correct, images + predicted),
    }
    metrics = {name: np.divide(a, b, out=np.zeros(len(b)), where=b > 0) for name, (a, b) in fractions.items()}
    return {"images": images, "predicted": predicted, **metrics}
