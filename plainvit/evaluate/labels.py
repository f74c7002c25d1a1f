"""Which of a model's classes count as right for an image: the label itself, or what a set's authors say.

    labels = align(source, predictor.classes, predictor.class_names, data_root=data_root)

ImageNet-ReaL        right if the guess is in the image's list; images with empty lists are left out (arXiv 2006.07159)
ImageNet-V2, Sketch  folders are classes of ImageNet, by number or by WordNet id
ImageNet-A, -R       the guess is the best of the set's 200 classes, as in their authors' evaluation
ObjectNet            the guess is the best of all 1,000; right if it is one of the object's ImageNet classes, as its
                     authors and BiT do; objects that ImageNet lacks are left out

imagenet.json holds the lists and names their sources.
"""

import functools
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.data.decode import DataError
from plainvit.data.known import real_labels
from plainvit.data.sources import Source, Subset

log = logging.getLogger("plainvit")
IMAGENET = 1000


@dataclass(frozen=True)
class Labels:
    """The images that are scored, what is guessed among, and what is right."""

    source: Source  # only images that are scored
    rule: str  # in words; results under different rules are not comparable
    right: np.ndarray  # [N, M] guesses that count as right, -1 where there are fewer than M
    guess_names: tuple[str, ...]  # of what is guessed among
    columns: np.ndarray | None = None  # the model's class for each class that is guessed among; None: all, in order
    single: bool = True  # guesses are classes of the source, and one of them is right
    left_out: int = 0  # images that the rule does not score

    def fingerprint(self) -> str:
        """Of the rule and of every right answer."""
        digest = hashlib.sha256(self.rule.encode())
        digest.update(np.ascontiguousarray(self.right, np.int32).tobytes())
        return digest.hexdigest()[:16]

    def truth(self, place: int) -> str:
        """What is right for an image, in words."""
        if len(self.guess_names) != len(self.source.classes):  # ObjectNet's objects are not ImageNet's classes
            return self.source.classes[self.source.labels[place]]
        return " or ".join(self.guess_names[one] for one in self.right[place] if one >= 0)


@functools.cache
def imagenet() -> dict[str, Any]:
    """WordNet ids and the classes of the sets that are parts of ImageNet."""
    found = json.loads(Path(__file__).with_name("imagenet.json").read_text(encoding="utf-8"))
    return found | {"wnids": found["wnids"].split()}


def align(source: Source, classes: int, names: Sequence[str] = (), *, data_root: str | Path | None = None) -> Labels:
    """What is right for each image of a source, for a model of so many classes with these names, if it has any."""
    check_labels(source)
    spec = source.spec
    special = {"imagenet-real": _real, "objectnet": _objectnet} | dict.fromkeys(SUBSETS, _subset)
    if spec not in special or (classes != IMAGENET and classes == len(source.classes)):
        return _plain(source, classes, tuple(names))
    if classes != IMAGENET:
        raise DataError(f"{spec} is scored by ImageNet's 1,000 classes, but the model has {classes:,}")
    return special[spec](source, tuple(names), spec, Path(data_root or "."))


def check_labels(source: Source) -> None:
    """Every image has a label, and it is one of the source's classes."""
    where = f"{source.spec or 'the data'} ({source.split or 'all'})"
    missing, count = int((source.labels < 0).sum()), len(source)
    if missing:
        raise DataError(f"{missing:,} of {count:,} images of {where} have no label: nothing can be scored by them")
    top = int(source.labels.max(initial=-1))
    if top >= len(source.classes):
        raise DataError(f"{where} has the label {top}, but only {len(source.classes)} classes")


# A label each ---------------------------------------------------------------------------------------------------------


def _plain(source: Source, classes: int, names: tuple[str, ...]) -> Labels:
    if classes != len(source.classes):
        raise DataError(
            f"the model has {classes:,} classes, but {source.spec or 'the data'} has {len(source.classes):,}: "
            "evaluate it on data of its own classes, or fine-tune it"
        )
    columns = _by_name(source, names)
    return _single(source, "the label", columns)


def _single(source: Source, rule: str, columns: np.ndarray | None) -> Labels:
    """Guesses are the source's own classes, each of which is one of the model's."""
    return Labels(source, rule, source.labels[:, None].astype(np.int64), source.classes, columns)


def _by_name(source: Source, names: tuple[str, ...]) -> np.ndarray | None:
    """The model's class for each of the source's; None where they are in the same order, or have no names in common."""
    theirs = source.classes
    wnids = tuple(imagenet()["wnids"])
    if not names and theirs != wnids:
        _tell_order(source)
    if not names or names == theirs or (theirs == wnids and not set(names) <= set(wnids)):  # whose order is everybody's
        return None
    place = {name: at for at, name in enumerate(names)}
    shared = [name for name in theirs if name in place]
    if len(place) == len(set(theirs)) == len(shared) == len(names):
        log.warning("the model's classes are in another order than those of %s: taken by their names", source.spec)
        return np.array([place[name] for name in theirs])
    elsewhere = [name for at, name in enumerate(theirs) if name in place and names[at] != name]
    if elsewhere and len(place) == len(names):
        raise DataError(
            f"the model and {source.spec} share {len(shared)} of {len(names)} class names, but {elsewhere[0]!r} is at "
            "another place: name the classes alike, or give other data"
        )
    differ = next(at for at, name in enumerate(theirs) if name != names[at])
    apart = names[differ], theirs[differ], source.spec
    log.warning("class names differ (%r in the model, %r in %s): taken by their order", *apart)
    return None


def _tell_order(source: Source) -> None:
    """A model without class names goes by the order of the data's classes: it may have learned them in another."""
    names, last = source.classes, len(source.classes) - 1
    numbered = names == tuple(map(str, range(len(names))))
    if numbered and list(names) == sorted(names):  # 0 to 9 are in one order as numbers and as text
        return
    order = "by their numbers" if numbered else f"in their order, from 0 = {names[0]!r} to {last} = {names[-1]!r}"
    log.warning("the model has no class names: the classes of %s are taken %s", source.spec or "the data", order)


# Parts of ImageNet ----------------------------------------------------------------------------------------------------

SUBSETS = ("imagenet-v2", "imagenet-sketch", "imagenet-a", "imagenet-r")


def _subset(source: Source, names: tuple[str, ...], spec: str, _: Path) -> Labels:
    """Each folder is a class of ImageNet; the guess is the best of those that the set has."""
    columns = np.array([_number(name, spec) for name in source.classes])
    meant = imagenet().get(spec, range(IMAGENET))
    strangers = sorted(set(columns.tolist()).symmetric_difference(meant))
    if strangers:
        raise DataError(f"the folders of {spec} are not its {len(meant)} classes: {imagenet()['wnids'][strangers[0]]}")
    rule = "the label" if len(meant) == IMAGENET else f"the label, guessed among the {len(meant)} classes of {spec}"
    labels = _single(source, rule, columns)
    return replace(labels, guess_names=tuple(names[at] for at in columns)) if names else labels


def _number(name: str, spec: str) -> int:
    """A class of ImageNet by its number or its WordNet id."""
    wnids = imagenet()["wnids"]
    if name in wnids:
        return wnids.index(name)
    if name.isdecimal() and int(name) < IMAGENET and spec == "imagenet-v2":
        return int(name)
    raise DataError(f"{spec} has the class {name!r}, which is neither a WordNet id of ImageNet nor a number below 1000")


# Several right answers ------------------------------------------------------------------------------------------------


def _real(source: Source, names: tuple[str, ...], spec: str, data_root: Path) -> Labels:
    """By the number in ILSVRC2012_val_00000001.JPEG, whatever the order of the files."""
    lists = real_labels(data_root)
    numbers = [_validation_number(source.name(index), source.spec) for index in range(len(source))]
    if len(set(numbers)) < len(numbers):
        raise DataError(f"{spec}: two images have the same number in their names")
    answers = [lists[number - 1] for number in numbers]
    keep = np.array([at for at, answer in enumerate(answers) if answer], int)
    if not len(keep):
        raise DataError(f"{spec}: no image has a label in ReaL's lists")
    scored = Subset(source, keep)
    right = padded([answers[at] for at in keep])
    rule = "any label of the image's ReaL list"
    return Labels(scored, rule, right, names or source.classes, None, single=False, left_out=len(source) - len(keep))


def _validation_number(name: str, spec: str) -> int:
    found = re.search(r"ILSVRC2012_val_(\d{8})", name)
    if not found or not 1 <= int(found[1]) <= 50_000:
        raise DataError(
            f"ReaL's lists go by the number in ILSVRC2012_val_00000001.JPEG, which {name!r} of {spec} lacks"
        )
    return int(found[1])


def _objectnet(source: Source, names: tuple[str, ...], spec: str, _: Path) -> Labels:
    objects: dict[str, list[int]] = imagenet()["objectnet"]
    spelt = {name: _folder_name(name) for name in source.classes}
    absent = sorted(set(objects).difference(spelt.values()))
    if absent:
        raise DataError(f"{spec} lacks the folder {absent[0]!r}, one of the 113 objects that are classes of ImageNet")
    wanted = np.array([spelt[name] in objects for name in source.classes])
    keep = np.flatnonzero(wanted[source.labels])
    if not len(keep):
        raise DataError(f"{spec} has no image of the 113 objects that are classes of ImageNet")
    right = padded([objects[spelt[source.classes[label]]] for label in source.labels[keep]])
    rule = "any of the object's ImageNet classes, guessed among all 1,000"
    wnids = tuple(imagenet()["wnids"])
    left_out = len(source) - len(keep)
    return Labels(Subset(source, keep), rule, right, names or wnids, None, single=False, left_out=left_out)


def _folder_name(name: str) -> str:
    """ObjectNet's folders are words in lower case joined by underscores."""
    return name.strip().lower().replace(" ", "_")


def padded(lists: Sequence[Sequence[int]]) -> np.ndarray:
    """[N, M] of lists of up to M numbers, filled up with -1."""
    table = np.full((len(lists), max(map(len, lists))), -1, np.int64)
    for row, numbers in enumerate(lists):
        table[row, : len(numbers)] = numbers
    return table
