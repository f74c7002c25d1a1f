"""VTAB-1k: 19 tasks of 1,000 training images each, their labels and what may be done to their images.

    vtab/NAME        train (800 images), val (200), test          to choose settings by
    vtab1000/NAME    train (those 1,000 images), test             what is reported

Sources: the VTAB paper (arXiv 1910.04867) and its code (google-research/task_adaptation); tasks and order as in Table 9
of the ViT paper. Nothing is downloaded. A task is read from the data root, in the first of these that is there:

1. DATA_ROOT/NAME, or the name that copies of VTAB-1k give it (`Task.folders`), with their lists train800.txt,
   val200.txt and test.txt: lines of "file label". These are the very images of the original code.
2. The same folder with the whole set in it, in any form that plainvit reads (parquet, class folders, tars, labels.csv),
   under the task's own labels. Raw records of CLEVR, dSprites, KITTI and smallNORB are converted to this form first:
   docs/evaluation.md has the rule for the label of each task.

From a whole set the first 800 of train are taken, as in the original code, and 200 of its validation images, or the
next 200 of train where it has none. A set that lies class by class is first put into a fixed random order, or the 800
would be of a few classes. The original code's order is that of TFDS, so only (1) gives the same images.
"""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plainvit.config import Augment
from plainvit.data.decode import DataError
from plainvit.data.sources import AbsentSplit, Files, Joined, Source, Subset, open_folder

TRAIN, VAL = 800, 200
LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}


class AbsentTask(DataError):
    """The data root has no folder of this task."""


# The tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One of the 19. Where a flip or a random crop would change the label, it is left out (BiT, arXiv 1912.11370)."""

    group: Literal["natural", "specialized", "structured"]
    title: str  # as in Table 9
    classes: int
    folders: tuple[str, ...] = ()  # names that copies of VTAB-1k give it
    _: KW_ONLY
    flip: bool = True
    crop: bool = True
    # Where its test images are: in test; in val (CLEVR's own test images have no labels); in the second half of test;
    # or, where there is train alone, from this share of it on
    test: Literal["test", "val", "half"] | float = "test"


TASKS: dict[str, Task] = {
    "caltech101": Task("natural", "Caltech101", 102),
    "cifar100": Task("natural", "CIFAR-100", 100, ("cifar",)),
    "dtd": Task("natural", "DTD", 47),
    "flowers102": Task("natural", "Flowers102", 102, ("oxford_flowers102",)),
    "oxford-pets": Task("natural", "Pets", 37, ("oxford_iiit_pet",)),
    "sun397": Task("natural", "Sun397", 397),
    "svhn": Task("natural", "SVHN", 10),
    "camelyon": Task("specialized", "Camelyon", 2, ("patch_camelyon",)),
    "eurosat": Task("specialized", "EuroSAT", 10, test=0.8),
    "resisc45": Task("specialized", "Resisc45", 45, test=0.8),
    "retinopathy": Task("specialized", "Retinopathy", 5, ("diabetic_retinopathy",)),
    "clevr-count": Task("structured", "Clevr-Count", 8, ("clevr_count",), crop=False, test="val"),
    "clevr-distance": Task("structured", "Clevr-Dist", 6, ("clevr_dist",), crop=False, test="val"),
    "dmlab": Task("structured", "DMLab", 6, crop=False),
    "dsprites-location": Task("structured", "dSpr-Loc", 16, ("dsprites_loc",), flip=False, crop=False, test=0.9),
    "dsprites-orientation": Task("structured", "dSpr-Ori", 16, ("dsprites_ori",), flip=False, test=0.9),
    "kitti-distance": Task("structured", "KITTI-Dist", 4, crop=False),
    "smallnorb-azimuth": Task("structured", "sNORB-Azim", 18, ("smallnorb_azi",), flip=False, test="half"),
    "smallnorb-elevation": Task("structured", "sNORB-Elev", 9, ("smallnorb_ele",), test="half"),
}
GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(name for name, task in TASKS.items() if task.group == group)
    for group in ("natural", "specialized", "structured")
}


def augment_for(name: str, augment: Augment) -> Augment:
    """A recipe's augmentation without what would change the labels of the task."""
    task = TASKS[name]
    changes: dict[str, Any] = {} if task.flip else {"flip": 0.0}
    return augment.replace(**changes if task.crop else changes | {"crop": "none"})


# Their images ---------------------------------------------------------------------------------------------------------


def open_task(name: str, split: str, data_root: Path, *, whole: bool = False) -> Source:
    """One split of a task; with `whole` the 1,000 training images in one, and no validation."""
    if whole and split == "val":
        raise AbsentSplit(f"{name} trains on all of its 1,000 images: it has no val split")
    if whole and split == "train":
        parts = [open_task(name, part, data_root) for part in ("train", "val")]
        assert parts[0].classes == parts[1].classes
        return Joined(parts)
    task, home = TASKS[name], _home(name, data_root)
    if any((home / file).is_file() for file in LISTS.values()):
        return _open_list(home / LISTS[split], task)
    return _Cut(name, home).open(split)


def _home(name: str, data_root: Path) -> Path:
    folders = [data_root / folder for folder in (name, *TASKS[name].folders)]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise AbsentTask(f"{name} is not in the data root: there is no folder {folders[0]}")


class _Cut:
    """The three splits of a task, cut from a whole set as the original code does."""

    def __init__(self, name: str, home: Path) -> None:
        self.name, self.task, self.home = name, TASKS[name], home

    def open(self, split: str) -> Source:
        source = {"train": self._train, "val": self._val, "test": self._test}[split]()
        source.split = split
        return source

    def _train(self) -> Source:
        return self._first(self._stored("train"), 0, TRAIN)

    def _val(self) -> Source:
        home = {"half": "test", "val": ""}.get(str(self.task.test), "val")
        own = self._perhaps(home) if home else None
        return self._first(self._stored("train"), TRAIN, TRAIN + VAL) if own is None else self._first(own, 0, VAL)

    def _test(self) -> Source:
        if self.task.test == "val":
            return self._perhaps("test", labelled=True) or self._stored("val")
        found = self._perhaps("test")
        if self.task.test == "half" and found is not None:
            return self._first(found, len(found) // 2, len(found))
        if isinstance(self.task.test, float) and found is None:
            train = self._stored("train")
            return self._first(train, max(round(self.task.test * len(train)), TRAIN + VAL), len(train))
        return found if found is not None else self._stored("test")

    def _first(self, source: Source, start: int, stop: int) -> Source:
        if len(source) < stop or start >= stop:
            need = f"{TRAIN + VAL:,} training images and some to test on"
            raise DataError(f"{self.name} takes {need}, but {self.home} has {len(source):,} in {source.split}")
        return Subset(source, _order(source)[start:stop])

    def _perhaps(self, split: str, *, labelled: bool = False) -> Source | None:
        try:
            found = self._stored(split)
        except AbsentSplit:
            return None
        return None if labelled and found.labels.min(initial=0) < 0 else found

    def _stored(self, split: str) -> Source:
        source = open_folder(self.home, split)
        source.split = split
        return source


def _order(source: Source) -> np.ndarray:
    """As stored, which may be the order that the original code cuts; a fixed random one where that is no mixture.

    A set that lies class by class, or in cycles of its factors, begins with fewer classes than a random order does.
    """
    from plainvit.data.order import permutation  # loads torch, which a plan does without

    stored, random = np.arange(len(source)), permutation(0, 0, len(source))
    seen = [len(np.unique(source.labels[order[:TRAIN]])) for order in (stored, random)]
    sorted_ = len(source) > 1 and bool((np.diff(source.labels) >= 0).all())
    return random if sorted_ or seen[0] < 0.9 * seen[1] else stored


def _open_list(path: Path, task: Task) -> Source:
    """Lines of "file label", as the copies of VTAB-1k have them."""
    if not path.is_file():
        raise AbsentSplit(f"{path.parent} has no list {path.name}")
    names: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        file, _, label = line.rstrip().rpartition(" ")
        if not line.strip():
            continue
        if not file or not label.isdecimal() or int(label) >= task.classes:
            raise DataError(f"{path} line {number} is not a file and a label below {task.classes}: {line[:80]!r}")
        if "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise DataError(f"{path} line {number}: {file!r} is outside the list's folder")
        names.append(file)
        labels.append(int(label))
    return Files(path.parent, names, labels, tuple(map(str, range(task.classes))))
