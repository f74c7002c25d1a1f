"""Where images come from: one spelling each, one interface behind them.

photos/                       class folders, perhaps inside train/ val/ test/
photos/labels.csv             a list: file,label[,split]; or .jsonl with those keys
shards/                       parquet as the Hugging Face hub stores it, or tar shards with an index
hf:org/dataset                parquet from the hub
cifar10, oxford-pets, ...     known sets, under the data root
digits, shapes:size=64        need nothing

source = open_source("photos/", split="train")
source.labels[i], source.classes, source.image(i)
"""

import csv
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from plainvit.config import nearest
from plainvit.data.decode import DataError, decode

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
SPLITS = {
    "train": ("train", "training", "trainval"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


class Source(ABC):
    """Images with labels, by index. A label of -1 means that there is none."""

    spec: str = ""
    split: str = ""
    classes: tuple[str, ...] = ()
    labels: np.ndarray  # [N] int32

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> bytes | np.ndarray:
        """An encoded file, or pixels [height, width, 3]."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call an image when speaking of it."""

    def image(self, index: int) -> np.ndarray:
        data = self.read(index)
        return data if isinstance(data, np.ndarray) else decode(data)

    def fingerprint(self) -> str:
        """Changes with the images' names, labels or classes; not with where they lie."""
        digest = hashlib.sha256("\0".join(self.classes).encode())
        digest.update(np.ascontiguousarray(self.labels, np.int32).tobytes())
        for index in range(len(self)):
            digest.update(self.name(index).encode("utf-8", "surrogateescape") + b"\0")
        return digest.hexdigest()[:16]


class Names:
    """A million file names in one array of bytes: shared by forked workers, and no Python object per name."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._bytes[start : self._ends[index]].tobytes())


class Files(Source):
    """Image files below a folder."""

    def __init__(
        self, root: Path, names: Iterable[str], labels: Sequence[int] | np.ndarray, classes: Sequence[str]
    ) -> None:
        self.root, self.names = root, Names(names)
        self.labels, self.classes = np.asarray(labels, np.int32), tuple(classes)

    def read(self, index: int) -> bytes:
        with open(f"{self.root}/{self.name(index)}", "rb", buffering=0) as file:  # noqa: PTH123  (hot path)
            return file.read()

    def name(self, index: int) -> str:
        return self.names[index]


class Subset(Source):
    """Some images of another source."""

    def __init__(self, source: Source, indices: np.ndarray, split: str = "") -> None:
        self.source, self.indices = source, np.asarray(indices)
        self.labels, self.classes = source.labels[self.indices], source.classes
        self.spec, self.split = source.spec, split or source.split

    def read(self, index: int) -> bytes | np.ndarray:
        return self.source.read(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))


def open_source(
    spec: str, split: str = "train", *, data_root: str | Path | None = None, exclude: str | Path | None = None
) -> Source:
    """The images of one split. `exclude` is a list of names to leave out, as `plainvit data check` writes it."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; {nearest(split, SPLITS)}")
    source = _open(spec, split, Path(data_root) if data_root else None)
    source.spec, source.split = spec, split
    if not len(source):
        raise DataError(f"{spec} has no images in its {split} split")
    return _excluding(source, Path(exclude)) if exclude else source


def _open(spec: str, split: str, data_root: Path | None) -> Source:
    from plainvit.data import generated, known, shards

    word, _, rest = spec.partition(":")
    if word == "digits" and not rest:
        return generated.digits(split)
    if word == "shapes":
        return generated.shapes(split, rest)
    if word == "hf":
        return shards.open_parquet(shards.fetch(rest), split)
    path = Path(spec)
    if path.is_dir():
        return open_folder(path, split)
    if path.is_file() and path.suffix in (".csv", ".jsonl"):
        return _open_list(path, split)
    if spec in known.SETS:
        return known.open_known(spec, split, data_root)
    if "/" in spec or os.sep in spec or path.suffix:
        raise DataError(f"there is no folder or list of images at {spec}")
    raise ValueError(
        f"data {spec!r} is neither a folder nor a known set; {nearest(spec, (*known.SETS, 'digits', 'shapes'))}"
    )


def open_folder(folder: Path, split: str) -> Source:
    """Shards, split folders, class folders or a list of labels: told apart by what is there."""
    from plainvit.data import shards

    if shards.has_parquet(folder):
        return shards.open_parquet(folder, split)
    if shards.has_tars(folder):
        return shards.open_tars(folder, split)
    for name in ("labels.csv", "labels.jsonl"):
        if (folder / name).is_file():
            return _open_list(folder / name, split)
    found = {name: next((folder / a for a in names if (folder / a).is_dir()), None) for name, names in SPLITS.items()}
    if found["train"] is None:
        if split != "train":
            raise DataError(f"{folder} has no {split} split: it has no train/, {split}/ folders inside")
        return _open_classes(folder, None)
    if found[split] is None:
        raise DataError(f"{folder} has no {split} split: no folder {' or '.join(SPLITS[split])}")
    classes = class_names(found["train"])
    return _open_classes(found[split] or folder, classes)


def class_names(folder: Path) -> list[str]:
    """Sub-folders in the order of their names, which is the order of the labels everywhere."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _open_classes(folder: Path, classes: Sequence[str] | None) -> Source:
    own = class_names(folder)
    classes = own if classes is None else classes
    strangers = [name for name in own if name not in set(classes)]
    if strangers:
        raise DataError(f"{folder} has the class {strangers[0]!r}, which the training images do not have")
    if not classes:
        raise DataError(f"{folder} has no class folders in it, and no labels.csv or labels.jsonl")
    names: list[str] = []
    labels: list[np.ndarray] = []
    for label, name in enumerate(classes):
        here = sorted(_image_files(folder / name, name)) if (folder / name).is_dir() else []
        names += here
        labels.append(np.full(len(here), label, np.int32))
    return Files(folder, names, np.concatenate(labels), classes)


def _image_files(folder: Path, prefix: str, seen: frozenset[tuple[int, int]] = frozenset()) -> list[str]:
    """Names below a folder, links followed but never in a circle; what is no regular file is passed over."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in seen:
        return []
    found: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if name.lower().endswith(SUFFIXES):
                if entry.is_file():
                    found.append(f"{prefix}/{name}")
            elif entry.is_dir():
                found += _image_files(Path(entry.path), f"{prefix}/{name}", seen | {here})
    return found


def _open_list(path: Path, split: str) -> Source:
    """A CSV with a header, or JSON lines: file, label and perhaps split; classes.txt beside it fixes their order."""
    rows = [row for row in _rows(path) if row["split"] in ("", *SPLITS[split])]
    fixed = path.with_name("classes.txt")
    every = {row["label"] for row in _rows(path)}
    classes = fixed.read_text(encoding="utf-8").split("\n") if fixed.is_file() else sorted(every)
    classes = [name for name in classes if name]
    number = {name: label for label, name in enumerate(classes)}
    for line, row in enumerate(rows, 2):
        if row["label"] not in number:
            raise DataError(f"{path} line {line}: the label {row['label']!r} is not in {fixed.name}")
        name = Path(row["file"])
        if name.is_absolute() or ".." in name.parts:
            raise DataError(f"{path} line {line}: {row['file']!r} is outside the list's folder")
    labels = [number[row["label"]] for row in rows]
    return Files(path.parent, [row["file"] for row in rows], labels, classes)


def _rows(path: Path) -> list[dict[str, str]]:
    keys = {"file": ("file", "path", "filename", "image"), "label": ("label", "class"), "split": ("split",)}
    with path.open(encoding="utf-8", newline="") as file:
        try:
            found = (
                list(csv.DictReader(file))
                if path.suffix == ".csv"
                else [json.loads(line) for line in file if line.strip()]
            )
        except (ValueError, csv.Error) as error:
            raise DataError(f"{path} is not a well-formed list: {error}") from error
    rows: list[dict[str, str]] = []
    for line, row in enumerate(found, 2 if path.suffix == ".csv" else 1):
        if not isinstance(row, dict):
            raise DataError(f"{path} line {line} is not an object with file and label")
        picked = {
            key: next((row[name] for name in names if row.get(name) is not None), "") for key, names in keys.items()
        }
        if picked["file"] == "" or picked["label"] == "":
            raise DataError(f"{path} line {line} lacks a file or a label; the columns are file,label[,split]")
        rows.append({key: str(value) for key, value in picked.items()})
    return rows


def _excluding(source: Source, path: Path) -> Source:
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    bad = {json.loads(line)["name"] if line.startswith("{") else line for line in lines if line.strip()}
    keep = np.array([index for index in range(len(source)) if source.name(index) not in bad])
    return Subset(source, keep)
