"""VTAB-1k: 19 tasks of 1,000 training images each, with their splits and allowed augmentations.

    vtab/NAME        train (800 images), val (200), test          for hyperparameter search
    vtab1000/NAME    train (those 1,000 images), test             for reported results

Sources: the VTAB paper (arXiv 1910.04867) and its code (google-research/task_adaptation); tasks and order as in Table 9
of the ViT paper. Nothing is downloaded. A task is read from the data root, in the first of these forms:

1. DATA_ROOT/NAME, or the name that copies of VTAB-1k give it (`Task.folders`), with their lists train800.txt,
   val200.txt and test.txt: lines of "file label". These are exactly the images of the original code.
2. The same folder with the full data set, in any form that plainvit reads (parquet, class folders, tars, labels.csv),
   under the task's own labels. Raw records of CLEVR, dSprites, KITTI and smallNORB are converted to this form first:
   docs/evaluation.md has the rule for the label of each task.

Of a full data set the first 800 training images are used, as in the original code, and 200 validation images, or the
next 200 training images. A set sorted by class is shuffled first, with a fixed seed. The original order is that of
TFDS, so only (1) gives the same images.
"""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plainvit.config import Augment
from plainvit.data.decode import DataError
from plainvit.data.folders import open_folder
from plainvit.data.sources import ConcatSource, Files, MissingSplitError, Source, Subset

TRAIN, VAL = 800, 200
LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}


class MissingTaskError(DataError):
    """The data root has no folder of this task."""


# The tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One task. Flips and random crops that would change the label are disabled (BiT, arXiv 1912.11370)."""

    group: Literal["natural", "specialized", "structured"]
    title: str  # as in Table 9
    classes: int
    folders: tuple[str, ...] = ()  # names that copies of VTAB-1k give it
    _: KW_ONLY
    flip: bool = True
    crop: bool = True
    # Its test images: the test split, the val split (CLEVR's test images have no labels), the second half of the test
    # split, or, if there is only train, the images after this fraction of it
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
    """A recipe's augmentation without operations that would change the task's labels."""
    task = TASKS[name]
    changes: dict[str, Any] = {} if task.flip else {"flip": 0.0}
    return augment.replace(**changes if task.crop else changes | {"crop": "none"})


# Their images ---------------------------------------------------------------------------------------------------------


def open_task(name: str, split: str, data_root: Path, *, whole: bool = False) -> Source:
    """Open one split of a task; with `whole`, train has all 1,000 images and there is no val."""
    if whole and split == "val":
        raise MissingSplitError(f"vtab1000/{name} has no val split: use vtab/{name}")
    if whole and split == "train":
        return ConcatSource([open_task(name, one, data_root) for one in ("train", "val")])
    task, folder = TASKS[name], _find_folder(name, data_root)
    if any((folder / file).is_file() for file in LISTS.values()):
        return _open_list(folder / LISTS[split], task)
    source = _open_full_set(name, folder, split)
    source.split = split
    return source


def _find_folder(name: str, data_root: Path) -> Path:
    folders = [data_root / folder for folder in (name, *TASKS[name].folders)]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise MissingTaskError(f"{name} is not in the data root: there is no folder {folders[0]}")


def _open_full_set(name: str, folder: Path, split: str) -> Source:
    """A split of a task, taken from a full data set as the original code does."""
    rule = TASKS[name].test

    def take(source: Source, start: int, stop: int) -> Source:
        if len(source) < stop or start >= stop:
            need = f"{TRAIN + VAL:,} training images and more for testing"
            raise DataError(f"{name} needs {need}, but {folder} has {len(source):,} in {source.split}")
        return Subset(source, _choose_order(source)[start:stop], split)

    if split == "train":
        return take(_open_split(folder, "train"), 0, TRAIN)
    if split == "val":
        own = None if rule == "val" else _find_split(folder, "test" if rule == "half" else "val")
        return take(_open_split(folder, "train"), TRAIN, TRAIN + VAL) if own is None else take(own, 0, VAL)
    found = _find_split(folder, "test")
    if rule == "val":
        has_labels = found is not None and found.labels.min(initial=0) >= 0
        return found if found is not None and has_labels else _open_split(folder, "val")
    if rule == "half" and found is not None:
        return take(found, len(found) // 2, len(found))
    if isinstance(rule, float) and found is None:
        train = _open_split(folder, "train")
        return take(train, max(round(rule * len(train)), TRAIN + VAL), len(train))
    return found if found is not None else _open_split(folder, "test")


def _find_split(folder: Path, split: str) -> Source | None:
    try:
        return _open_split(folder, split)
    except MissingSplitError:
        return None


def _open_split(folder: Path, split: str) -> Source:
    source = open_folder(folder, split)
    source.split = split
    return source


def _choose_order(source: Source) -> np.ndarray:
    """The stored order, or a fixed random one if the stored order is not mixed (few classes among the first images)."""
    from plainvit.data.order import permutation  # imports torch, which planning does not need

    stored, random = np.arange(len(source)), permutation(0, 0, len(source))
    counts = [len(np.unique(source.labels[order[:TRAIN]])) for order in (stored, random)]
    is_sorted = len(source) > 1 and bool((np.diff(source.labels) >= 0).all())
    return random if is_sorted or counts[0] < 0.9 * counts[1] else stored


def _open_list(path: Path, task: Task) -> Source:
    """Open a list of "file label" lines, as in the published copies of VTAB-1k."""
    if not path.is_file():
        raise MissingSplitError(f"{path.parent} has no list {path.name}")
    names: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        file, _, label = line.rstrip().rpartition(" ")
        if not line.strip():
            continue
        if not file or not label.isdecimal() or int(label) >= task.classes:
            raise DataError(
                f"{path} line {number} must be FILE LABEL with a label below {task.classes}, got {line[:80]!r}"
            )
        if "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise DataError(f"{path} line {number}: {file!r} is outside the list's folder")
        names.append(file)
        labels.append(int(label))
    return Files(path.parent, names, labels, tuple(map(str, range(task.classes))))
