"""VTAB-1k: 19 tasks of 1,000 training images each, their labels and what may be done to their images.

    vtab/NAME        train (800 images), val (200), test          to choose settings by
    vtab1000/NAME    train (those 1,000 images), test             what is reported

Sources: the VTAB paper (arXiv 1910.04867) and its code (google-research/task_adaptation); tasks and order as in Table 9
of the ViT paper. Nothing is downloaded. A task is read from the data root, in the first of these that is there:

1. DATA_ROOT/NAME, or the name that copies of VTAB-1k give it (`Task.folders`), with their lists train800.txt,
   val200.txt and test.txt: lines of "file label". These are the very images of the original code.
2. The same folder with the whole set in it, in any form that plainvit reads (parquet, class folders, tars, labels.csv),
   under the task's own labels.
3. For CLEVR, dSprites, KITTI and smallNORB, DATA_ROOT/SET with raw records: parquet with a column `image`, or
   annotations.jsonl with `file` and `split`; and the annotation that `Task.column` names, as TFDS or the set itself has
   it. The task's rule makes the label.

From a whole set the first 800 of train are taken, as in the original code, and 200 of its validation images, or the
next 200 of train where it has none. A set that lies class by class is first put into a fixed random order, or the 800
would be of a few classes. The original code's order is that of TFDS, so only (1) gives the same images.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plainvit.config import Augment
from plainvit.data.decode import DataError
from plainvit.data.sources import SPLITS, AbsentSplit, Files, Joined, Source, Subset, open_folder

TRAIN, VAL = 800, 200
LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}
Record = Mapping[str, Any]


class AbsentTask(DataError):
    """The data root has no folder of this task."""


# Labels from annotations ----------------------------------------------------------------------------------------------


def count_objects(record: Record) -> int:
    """CLEVR: 3 to 10 objects are classes 0 to 7."""
    return len(_of_objects(record, "pixel_coords")) - 3


def closest_object(record: Record) -> int:
    """CLEVR: distance of the object nearest to the camera, the third of its pixel_coords, in six bins."""
    return _bin(min(float(place[2]) for place in _of_objects(record, "pixel_coords")), (0, 8, 8.5, 9, 9.5, 10, 100))


def closest_vehicle(record: Record) -> int:
    """KITTI: metres to the nearest car, van or truck: up to 8, up to 20, further, none."""
    kinds, places = _of_objects(record, "type"), _of_objects(record, "location")
    ahead = [float(place[2]) for kind, place in zip(kinds, places, strict=True) if kind in VEHICLES]
    return _bin(min([*ahead, 1000.0]), (-100, 8, 20, 999))


VEHICLES = (0, 1, 2, "Car", "Van", "Truck")  # TFDS numbers KITTI's types in this order


def sprite_place(record: Record) -> int:
    """dSprites: 32 horizontal places in 16 bins of two."""
    return int(record["label_x_position"]) // 2


def sprite_turn(record: Record) -> int:
    """dSprites: 40 orientations in 16 bins of two and a half."""
    return int(int(record["label_orientation"]) // 2.5)


def toy_azimuth(record: Record) -> int:
    """smallNORB: 18 azimuths, numbered 0 to 17 as in TFDS (the set's own file has 0, 2, ... 34)."""
    return int(record["label_azimuth"])


def toy_elevation(record: Record) -> int:
    """smallNORB: 9 elevations."""
    return int(record["label_elevation"])


def _of_objects(record: Record, field: str) -> list[Any]:
    """One field of all objects, which are a list of records or a record of lists."""
    objects = record["objects"]
    return list(objects[field]) if isinstance(objects, Mapping) else [one[field] for one in objects]


def _bin(value: float, edges: tuple[float, ...]) -> int:
    """The last edge that is below the value; an edge itself belongs to the bin that it closes."""
    return bisect_left(edges, value) - 1


# The tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One of the 19. Where a flip or a random crop would change the label, it is left out (BiT, arXiv 1912.11370)."""

    group: Literal["natural", "specialized", "structured"]
    title: str  # as in Table 9
    classes: int
    folders: tuple[str, ...] = ()  # names that copies of VTAB-1k give it
    raw: str = ""  # folder of its raw records
    column: str = ""  # annotation that the rule reads
    rule: Callable[[Record], int] | None = None
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
    "clevr-count": Task(
        "structured", "Clevr-Count", 8, ("clevr_count",), "clevr", "objects", count_objects, crop=False, test="val"
    ),
    "clevr-distance": Task(
        "structured", "Clevr-Dist", 6, ("clevr_dist",), "clevr", "objects", closest_object, crop=False, test="val"
    ),
    "dmlab": Task("structured", "DMLab", 6, crop=False),
    "dsprites-location": Task(
        "structured", "dSpr-Loc", 16, ("dsprites_loc",), "dsprites", "label_x_position", sprite_place,
        flip=False, crop=False, test=0.9,
    ),
    "dsprites-orientation": Task(
        "structured", "dSpr-Ori", 16, ("dsprites_ori",), "dsprites", "label_orientation", sprite_turn,
        flip=False, test=0.9,
    ),
    "kitti-distance": Task("structured", "KITTI-Dist", 4, (), "kitti", "objects", closest_vehicle, crop=False),
    "smallnorb-azimuth": Task(
        "structured", "sNORB-Azim", 18, ("smallnorb_azi",), "smallnorb", "label_azimuth", toy_azimuth,
        flip=False, test="half",
    ),
    "smallnorb-elevation": Task(
        "structured", "sNORB-Elev", 9, ("smallnorb_ele",), "smallnorb", "label_elevation", toy_elevation, test="half"
    ),
}  # fmt: skip
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
    task = TASKS[name]
    labelled = [data_root / folder for folder in (name, *task.folders)]
    raw = [data_root / task.raw] if task.raw else []
    for folder in (*labelled, *raw):
        if folder.is_dir():
            return folder
    also = f", and none of its raw records {raw[0]}" if raw else ""
    raise AbsentTask(f"{name} is not in the data root: there is no folder {labelled[0]}{also}")


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
        """A split of the whole set, under the task's labels."""
        if self.home.name == self.task.raw:
            source = _open_raw(self.home, split, self.task)
        else:
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
    return Files(path.parent, names, labels, _numbers(task))


def _numbers(task: Task) -> tuple[str, ...]:
    return tuple(map(str, range(task.classes)))


class Relabelled(Subset):
    """All images of another source, under labels of a task."""

    def __init__(self, source: Source, labels: np.ndarray, classes: tuple[str, ...]) -> None:
        super().__init__(source, np.arange(len(source)))
        self.labels, self.classes = labels.astype(np.int32), classes


# Raw records ----------------------------------------------------------------------------------------------------------


def _open_raw(folder: Path, split: str, task: Task) -> Source:
    from plainvit.data import tables

    if (folder / "annotations.jsonl").is_file():
        return _open_annotations(folder / "annotations.jsonl", split, task)
    if not tables.has_parquet(folder):
        raise DataError(f"{folder} has neither annotations.jsonl nor parquet: see the top of plainvit/data/vtab.py")
    source = tables.open_parquet(folder, split)
    records = chain.from_iterable(_rows(path, task.column) for path in source.paths)
    return Relabelled(source, _labels(records, task, folder), _numbers(task))


def _rows(path: Path, column: str) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from plainvit.data.tables import map_file

    try:
        file = pq.ParquetFile(map_file(path))
        if column not in file.schema_arrow.names:
            raise DataError(f"{path} lacks the column {column} that the task's labels are made of")
        for batch in file.iter_batches(columns=[column]):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {(str(error).splitlines() or [''])[0]}") from error


def _open_annotations(path: Path, split: str, task: Task) -> Source:
    names: list[str] = []
    records: list[Record] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            record = _parsed(line, f"{path} line {number}")
            if record and record.get("split", "train") in SPLITS[split]:
                names.append(str(record["file"]))
                records.append(record)
    if not records:
        raise AbsentSplit(f"{path} has no images of the {split} split")
    return Files(path.parent, names, _labels(iter(records), task, path), _numbers(task))


def _parsed(line: str, where: str) -> Record | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}") from error
    file = record.get("file") if isinstance(record, dict) else None
    if not isinstance(file, str) or "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
        raise DataError(f"{where} names no file inside the folder")
    return record


def _labels(records: Iterator[Record], task: Task, where: Path) -> np.ndarray:
    assert task.rule
    found: list[int] = []
    for number, record in enumerate(records, 1):
        try:
            found.append(task.rule(record))
        except (LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__} {error}"
            raise DataError(f"record {number} of {where} has no annotation for {task.title}: {reason}") from error
        if not 0 <= found[-1] < task.classes:
            raise DataError(f"record {number} of {where} gives {task.title} the label {found[-1]} of {task.classes}")
    return np.array(found, np.int32)
