"""Which of a model's classes are correct for an image: its label, or the rule of the dataset's authors.

    labels = align(source, predictor.classes, predictor.class_names, data_root=data_root)

ImageNet-ReaL        correct if the prediction is in the image's list; without a list an image is not scored
                     (arXiv 2006.07159)
ImageNet-V2, Sketch  folders are classes of ImageNet, by number or WordNet id
ImageNet-A, -R       the prediction is the best of the set's 200 classes, as in the authors' evaluation
"""

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from plainvit.data.decode import DataError
from plainvit.data.imagenet import wordnet_ids
from plainvit.data.known import real_labels
from plainvit.data.sources import Source, Subset
from plainvit.evaluate.class_names import IMAGENET_CLASSES, are_numbers, is_imagenet, match_classes

log = logging.getLogger("plainvit")
SUBSETS = ("imagenet-v2", "imagenet-sketch", "imagenet-a", "imagenet-r")


@dataclass(frozen=True)
class Labels:
    """The scored images, the classes to predict, and which are correct."""

    source: Source  # scored images only
    rule: str  # in words; results under different rules are not comparable
    targets: np.ndarray  # [N, M] correct predictions, padded with -1
    class_names: tuple[str, ...]  # names of the classes to predict
    columns: np.ndarray | None = None  # the model's class of each class to predict; None: all, in order
    single: bool = True  # predictions are classes of the source, exactly one is correct
    left_out: int = 0  # images that are not scored

    def fingerprint(self) -> str:
        """Hash of the rule and of all correct classes."""
        digest = hashlib.sha256(self.rule.encode())
        digest.update(np.ascontiguousarray(self.targets, np.int32).tobytes())
        return digest.hexdigest()[:16]

    def truth(self, position: int) -> str:
        """The names of the correct classes of an image."""
        return " or ".join(self.class_names[label] for label in self.targets[position] if label >= 0)


def align(source: Source, classes: int, names: Sequence[str] = (), *, data_root: str | Path | None = None) -> Labels:
    """The correct classes of each image for a model with `classes` classes and these names, if it has any."""
    check_labels(source)
    spec = source.spec
    if spec not in ("imagenet-real", *SUBSETS) or (classes != IMAGENET_CLASSES and classes == len(source.classes)):
        return _align_labels(source, classes, tuple(names))
    if classes != IMAGENET_CLASSES:
        raise DataError(f"{spec} needs a model of ImageNet's 1,000 classes, but the model has {classes:,}")
    if names and not are_numbers(names) and not is_imagenet(names):
        log.warning(
            "the model's class names are not ImageNet's (0 is %r): %s is scored by class number", names[0], spec
        )
    if spec in SUBSETS:
        return _align_subset(source, tuple(names))
    return _align_real(source, tuple(names), real_labels(Path(data_root or ".")))


def check_labels(source: Source) -> None:
    """Raises DataError unless every image has a label."""
    missing, count = int((source.labels < 0).sum()), len(source)
    if missing:
        where = f"{source.spec or 'the data'} ({source.split or 'all'})"
        raise DataError(f"{missing:,} of {count:,} images of {where} have no label, so they cannot be scored")


# One label per image --------------------------------------------------------------------------------------------------


def _align_labels(source: Source, classes: int, names: tuple[str, ...]) -> Labels:
    columns = match_classes(source, classes, names)
    if len(columns) == classes:
        return _use_labels(source, "the label", None if (columns == np.arange(classes)).all() else columns)
    rule = f"the label, predicted among the model's {classes:,} classes"
    return Labels(source, rule, columns[source.labels][:, None], names, single=False)


def _use_labels(source: Source, rule: str, columns: np.ndarray | None) -> Labels:
    """Predictions are the source's own classes, and its labels are correct."""
    return Labels(source, rule, source.labels[:, None].astype(np.int64), source.classes, columns)


# Subsets of ImageNet --------------------------------------------------------------------------------------------------


def _align_subset(source: Source, names: tuple[str, ...]) -> Labels:
    """Each folder is a class of ImageNet; the prediction is the best of the set's classes."""
    spec = source.spec
    columns = np.array([_parse_class(name, spec) for name in source.classes])
    among = "" if len(columns) == IMAGENET_CLASSES else f", predicted among the {len(columns)} classes of {spec}"
    labels = _use_labels(source, f"the label{among}", columns)
    return replace(labels, class_names=tuple(names[label] for label in columns)) if names else labels


def _parse_class(name: str, spec: str) -> int:
    """The number of an ImageNet class given as a number or WordNet id."""
    if name in wordnet_ids():
        return wordnet_ids().index(name)
    if name.isdecimal() and int(name) < IMAGENET_CLASSES and spec == "imagenet-v2":
        return int(name)
    raise DataError(f"{spec} has the class {name!r}, which is neither a WordNet id of ImageNet nor a number below 1000")


# Several correct classes ----------------------------------------------------------------------------------------------


def _align_real(source: Source, names: tuple[str, ...], lists: list[list[int]]) -> Labels:
    """Lists are found by the number in ILSVRC2012_val_00000001.JPEG, in any order of files."""
    numbers = [_parse_number(source.name(index)) for index in range(len(source))]
    if len(set(numbers)) < len(numbers):
        raise DataError("imagenet-real: two images have the same number in their names")
    correct = [lists[number - 1] for number in numbers]
    keep = np.array([position for position, classes in enumerate(correct) if classes], int)
    targets = np.full((len(keep), max(map(len, lists))), -1, np.int64)
    for row, position in enumerate(keep):
        targets[row, : len(correct[position])] = correct[position]
    rule = "any label of the image's ReaL list"
    left_out = len(source) - len(keep)
    return Labels(Subset(source, keep), rule, targets, names or source.classes, None, single=False, left_out=left_out)


def _parse_number(name: str) -> int:
    match = re.search(r"ILSVRC2012_val_(\d{8})", name)
    if not match or not 1 <= int(match[1]) <= 50_000:
        raise DataError(f"imagenet-real: the file {name!r} is not named like ILSVRC2012_val_00000001.JPEG")
    return int(match[1])
