"""ImageNet-1k's classes in label order: WordNet ids and readable names.

imagenet_classes.txt has one class per line: the ids of ILSVRC-2012, sorted (timm's data/_info/imagenet_synsets.txt),
and torchvision's names (torchvision.models._meta), which are unique: "crane bird" and "crane" are two classes.
"""

import functools
from pathlib import Path


def wordnet_ids() -> tuple[str, ...]:
    """The 1,000 WordNet ids, in label order: n01440764, n01443537, ..."""
    return _read_classes()[0]


def class_names() -> tuple[str, ...]:
    """The 1,000 readable names, in label order: tench, goldfish, ..."""
    return _read_classes()[1]


@functools.cache
def _read_classes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    text = Path(__file__).with_name("imagenet_classes.txt").read_text(encoding="utf-8")
    ids, names = zip(*(line.split(" ", 1) for line in text.splitlines()), strict=True)
    return ids, names
