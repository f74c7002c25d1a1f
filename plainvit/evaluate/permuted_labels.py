"""Detect labels whose classes are in another order than the model's.

    find_permutation(labels, predictions)          a mapping of the classes and its accuracy, or None

A model that takes each class for one other class is rarely wrong: its class names or the class folders are. The mapping
is found on one half of the images and tested on the other half, so that chance does not find one.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plainvit.evaluate.statistics import wilson

log = logging.getLogger("plainvit")
MAX_PRINTED = 5  # pairs of a mapping in the warning


class Permutation(NamedTuple):
    mapping: dict[int, int]  # label -> prediction, one to one
    accuracy: float  # of the mapping, on the tested half


def find_permutation(labels: np.ndarray, predictions: np.ndarray) -> Permutation | None:
    """A one-to-one mapping of the classes that fits the predictions far better than the labels do, if there is one.

    It must be right for most of the tested images (the lower end of the 95 % interval), and for at least twice as many
    as the labels.
    """
    tested = _choose_half(labels)
    if not tested.any():
        return None
    mapping = assign_classes(labels[~tested], predictions[~tested])
    mapped = np.array([mapping.get(label, -1) for label in labels[tested].tolist()])
    correct = mapped == predictions[tested]
    lower_end, _ = wilson(int(correct.sum()), len(correct))
    accuracy_of_labels = float((labels[tested] == predictions[tested]).mean())
    if lower_end < 0.5 or lower_end < 2 * accuracy_of_labels:
        return None
    return Permutation(mapping, float(correct.mean()))


def _choose_half(labels: np.ndarray) -> np.ndarray:
    """[N], True for every second image of each class."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    starts = np.searchsorted(ordered, ordered)  # where the class of each image begins
    chosen = np.empty(len(labels), bool)
    chosen[order] = (np.arange(len(labels)) - starts) % 2 == 1
    return chosen


def assign_classes(labels: np.ndarray, predictions: np.ndarray) -> dict[int, int]:
    """{label: prediction}, one to one; the most frequent pairs are assigned first."""
    pairs, counts = np.unique(np.stack((labels, predictions), 1), axis=0, return_counts=True)
    mapping: dict[int, int] = {}
    assigned: set[int] = set()
    for label, prediction in pairs[np.argsort(-counts, kind="stable")].tolist():
        if label not in mapping and prediction not in assigned:
            mapping[label] = prediction
            assigned.add(prediction)
    return mapping


def warn_of_permuted_labels(labels: np.ndarray, predictions: np.ndarray, names: Sequence[str]) -> None:
    """Logs a warning with the first pairs of the mapping, if the labels seem permuted."""
    permutation = find_permutation(labels, predictions)
    if permutation is None:
        return
    mapping, accuracy = permutation
    moved = [(label, prediction) for label, prediction in sorted(mapping.items()) if label != prediction]
    pairs = [f"{names[label]!r} -> {names[prediction]!r}" for label, prediction in moved[:MAX_PRINTED]]
    log.warning(
        "the labels seem permuted: top-1 is %.2f %%, but %.2f %% under another one-to-one mapping of the classes "
        "(label -> prediction: %s): check the order of the classes, or give the model's names with --class-names FILE",
        100 * float((labels == predictions).mean()),
        100 * accuracy,
        ", ".join(pairs),
    )
