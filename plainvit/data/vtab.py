"""VTAB-1k: 19 tasks of 1,000 training images each, with their splits and allowed augmentations.

    vtab/NAME        train (800 images), val (200), test          for hyperparameter search
    vtab1000/NAME    train (those 1,000 images), test             for reported results

Sources: the VTAB paper (arXiv 1910.04867) and its code (google-research/task_adaptation); tasks and order as in Table 9
of the ViT paper. Nothing is downloaded. A task is read from DATA_ROOT/NAME, or the name that the published copies of
VTAB-1k give it (`Task.folders`), by their lists train800.txt, val200.txt and test.txt: lines of "file label". These are
exactly the images of the original code.
"""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from plainvit.config import Augment
from plainvit.data.decode import DataError
from plainvit.data.sources import ConcatSource, FileSource, MissingSplitError, Source, is_inside

LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}


class MissingTaskError(DataError):
    """The data root has no folder of this task."""


# The tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One task. Flips and random crops that would change the label are disabled (BiT, arXiv 1912.11370)."""

    group: Literal["natural", "specialized", "structured"]
    classes: int
    folders: tuple[str, ...] = ()  # names that copies of VTAB-1k give it
    _: KW_ONLY
    flip: bool = True
    crop: bool = True


TASKS: dict[str, Task] = {
    "caltech101": Task("natural", 102),
    "cifar100": Task("natural", 100, ("cifar",)),
    "dtd": Task("natural", 47),
    "flowers102": Task("natural", 102, ("oxford_flowers102",)),
    "oxford-pets": Task("natural", 37, ("oxford_iiit_pet",)),
    "sun397": Task("natural", 397),
    "svhn": Task("natural", 10),
    "camelyon": Task("specialized", 2, ("patch_camelyon",)),
    "eurosat": Task("specialized", 10),
    "resisc45": Task("specialized", 45),
    "retinopathy": Task("specialized", 5, ("diabetic_retinopathy",)),
    "clevr-count": Task("structured", 8, ("clevr_count",), crop=False),
    "clevr-distance": Task("structured", 6, ("clevr_dist",), crop=False),
    "dmlab": Task("structured", 6, crop=False),
    "dsprites-location": Task("structured", 16, ("dsprites_loc",), flip=False, crop=False),
    "dsprites-orientation": Task("structured", 16, ("dsprites_ori",), flip=False),
    "kitti-distance": Task("structured", 4, crop=False),
    "smallnorb-azimuth": Task("structured", 18, ("smallnorb_azi",), flip=False),
    "smallnorb-elevation": Task("structured", 9, ("smallnorb_ele",)),
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
        return ConcatSource([open_task(name, part, data_root) for part in ("train", "val")])
    folders = [data_root / folder for folder in (name, *TASKS[name].folders)]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise MissingTaskError(f"{name} is not in the data root: there is no folder {folders[0]}")
    return _open_list(folder / LISTS[split], TASKS[name])


def _open_list(path: Path, task: Task) -> Source:
    """Open a list of "file label" lines, as in the published copies of VTAB-1k."""
    if not path.is_file():
        raise MissingSplitError(f"{path.parent} has no list {path.name}: give a copy of VTAB-1k")
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
        if not is_inside(file):
            raise DataError(f"{path} line {number}: {file!r} is outside the list's folder")
        names.append(file)
        labels.append(int(label))
    return FileSource(path.parent, names, labels, tuple(map(str, range(task.classes))))
