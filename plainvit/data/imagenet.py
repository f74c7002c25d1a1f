"""ImageNet-1k's classes in label order: WordNet ids and readable names.

imagenet_classes.txt has one class per line: the ids of ILSVRC-2012, sorted (timm's data/_info/imagenet_synsets.txt),
and torchvision's names (torchvision.models._meta), which are unique: "crane bird" and "crane" are two classes.
"""

import functools
from collections.abc import Iterable
from pathlib import Path


def wordnet_ids() -> tuple[str, ...]:
    """The 1,000 WordNet ids, in label order: n01440764, n01443537, ..."""
    return _read_classes()[0]


def class_names() -> tuple[str, ...]:
    """The 1,000 readable names, in label order: tench, goldfish, ..."""
    return _read_classes()[1]


def readable_names(classes: Iterable[str]) -> tuple[str, ...]:
    """The names of these classes if all are WordNet ids of ImageNet-1k (n01440764 is tench); otherwise unchanged."""
    classes = tuple(classes)
    names = dict(zip(wordnet_ids(), class_names(), strict=True))
    return tuple(names[wnid] for wnid in classes) if classes and all(wnid in names for wnid in classes) else classes


@functools.cache
def _read_classes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    text = Path(__file__).with_name("imagenet_classes.txt").read_text(encoding="utf-8")
    ids, names = zip(*(line.split(" ", 1) for line in text.splitlines()), strict=True)
    return ids, names
