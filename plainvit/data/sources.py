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
import errno
import hashlib
import json
import logging
import os
import stat
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from plainvit.config import nearest
from plainvit.data.decode import DataError, ImageError, decode, size

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
UNREAD = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".raf", ".rw2")
SPLITS = {
    "train": ("train", "training", "trainval"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
log = logging.getLogger("plainvit")


class AbsentSplit(DataError):
    """The data is sound as far as it was read, but has no such split: the only fault that a survey may pass over."""


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

    def files(self) -> Iterable[str]:
        """Every file that its images lie in; none where they are made on the spot."""
        return ()

    def image(self, index: int) -> np.ndarray:
        return decode(self.read(index))

    def extent(self, index: int) -> tuple[int, int]:
        """(height, width), by the header alone where it is encoded."""
        return size(self.read(index))

    def fingerprint(self) -> str:
        """Changes with the images' names, labels or classes; not with where they lie."""
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogatepass"))
        digest.update(np.ascontiguousarray(self.labels, np.int32).tobytes())
        for index in range(len(self)):
            digest.update(self.name(index).encode("utf-8", "surrogatepass") + b"\0")
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
        path = f"{self.root}/{self.name(index)}"
        with open(path, "rb", buffering=0, opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ImageError("it is a pipe or a device, not a file")
            return file.read()

    def name(self, index: int) -> str:
        return self.names[index]

    def files(self) -> Iterable[str]:
        return (f"{self.root}/{self.names[index]}" for index in range(len(self)))


def _without_waiting(path: str, flags: int) -> int:
    """A pipe opened the plain way waits for a writer for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


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

    def extent(self, index: int) -> tuple[int, int]:
        return self.source.extent(int(self.indices[index]))

    def files(self) -> Iterable[str]:
        if isinstance(self.source, Files):
            return (f"{self.source.root}/{self.name(index)}" for index in range(len(self)))
        return self.source.files()


class Joined(Source):
    """Several sources one after the other, under the classes of the first."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources, self.classes = list(sources), sources[0].classes
        self.labels = np.concatenate([source.labels for source in sources])
        self._ends = np.cumsum([len(source) for source in sources], dtype=np.int64)

    def place(self, index: int) -> tuple[int, int]:
        """(number of the source, index in it)."""
        part = int(np.searchsorted(self._ends, index, "right"))
        return part, index - (int(self._ends[part - 1]) if part else 0)

    def read(self, index: int) -> bytes | np.ndarray:
        part, inside = self.place(index)
        return self.sources[part].read(inside)

    def name(self, index: int) -> str:
        part, inside = self.place(index)
        return self.sources[part].name(inside)

    def extent(self, index: int) -> tuple[int, int]:
        part, inside = self.place(index)
        return self.sources[part].extent(inside)

    def files(self) -> Iterator[str]:
        return chain.from_iterable(source.files() for source in self.sources)


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
    if word == "digits":
        return generated.digits(split, rest)
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
    found = _split_folders(folder)
    if not found and split == "train":
        return _open_classes(folder, None)
    if split not in found:
        raise AbsentSplit(f"{folder} has no {split} split: no folder {' or '.join(SPLITS[split])}")
    named = [found["train"]] if "train" in found else list(found.values())
    return _open_classes(found[split], sorted({name for part in named for name in class_names(part)}))


def _split_folders(folder: Path) -> dict[str, Path]:
    """The folders of each split; without train/, only those with class folders inside, as a class may be named dev."""
    found = {name: next((folder / a for a in names if (folder / a).is_dir()), None) for name, names in SPLITS.items()}
    return {name: path for name, path in found.items() if path and (found["train"] or class_names(path))}


def class_names(folder: Path) -> list[str]:
    """Sub-folders in the order of their names, which is the order of the labels everywhere."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and _holds(entry.is_dir))


def _holds(test: Callable[[], bool]) -> bool:
    """entry.is_dir() or entry.is_file(): neither, where a link leads to itself."""
    try:
        return test()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _open_classes(folder: Path, classes: Sequence[str] | None) -> Source:
    own = class_names(folder)
    classes = own if classes is None else classes
    strangers = sorted(set(own).difference(classes))
    if strangers:
        raise DataError(f"{folder} has the class {strangers[0]!r}, which the training images do not have")
    if not classes:
        raise DataError(f"{folder} has no class folders in it, and no labels.csv or labels.jsonl")
    names: list[str] = []
    labels: list[np.ndarray] = []
    unread: list[str] = []
    for label, name in enumerate(classes):
        here = sorted(image_files(folder / name, name, unread=unread)) if (folder / name).is_dir() else []
        names += here
        labels.append(np.full(len(here), label, np.int32))
    tell_unread(folder, unread)
    return Files(folder, names, np.concatenate(labels), classes)


def image_files(
    folder: Path,
    prefix: str,
    seen: frozenset[tuple[int, int]] = frozenset(),
    *,
    unread: list[str],
    dangling: bool = False,
) -> list[str]:
    """Names below a folder, links followed but never in a circle; what is no regular file is passed over.

    A link that leads to no file is one of them where `dangling` ones are wanted. Photos that are not read are added to
    `unread`, for `tell_unread`.
    """
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
                if _holds(entry.is_file) or (dangling and entry.is_symlink() and not _holds(entry.is_dir)):
                    found.append(f"{prefix}/{name}")
            elif _holds(entry.is_dir):
                deeper = seen | {here}
                found += image_files(Path(entry.path), f"{prefix}/{name}", deeper, unread=unread, dangling=dangling)
            elif name.lower().endswith(UNREAD):
                unread.append(name)
    return found


def tell_unread(where: str | Path, names: Iterable[str]) -> None:
    """That photos of formats which are not read were passed over: they would be missed otherwise."""
    kinds = Counter(Path(name).suffix.lower() for name in names)
    if kinds:
        count, verb = kinds.total(), "is" if len(kinds) == 1 else "are"
        files = f"{count:,} file{'s' * (count > 1)} passed over"
        log.warning("%s: %s: %s %s not read; convert to JPEG", where, files, ", ".join(sorted(kinds)), verb)


COLUMNS = {"file": ("file", "path", "filename", "image"), "label": ("label", "class"), "split": ("split",)}


class _Row(NamedTuple):
    line: int
    file: str
    label: str
    split: str


def _open_list(path: Path, split: str) -> Source:
    """A CSV with a header, or JSON lines: file, label and perhaps split; classes.txt beside it fixes their order.

    A row without a split is for training: given to every split, it would be trained on and tested on.
    """
    rows = _rows(path)
    classes = _listed_classes(path.with_name("classes.txt")) or _in_order({row.label for row in rows})
    number = {name: label for label, name in enumerate(classes)}
    for row in rows:
        fault = _fault(row, number)
        if fault:
            raise DataError(f"{path} line {row.line}: {fault}")
    chosen = [row for row in rows if (row.split or "train") in SPLITS[split]]
    if not chosen:
        raise AbsentSplit(f"{path} lists no images for the {split} split")
    return Files(path.parent, [row.file for row in chosen], [number[row.label] for row in chosen], classes)


def _listed_classes(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        names = [name for name in path.read_text(encoding="utf-8-sig").split("\n") if name]
    except ValueError as error:
        raise DataError(f"{path} is not in UTF-8: {error}") from error
    if len(set(names)) < len(names):
        raise DataError(f"{path} names a class twice")
    return names


def _in_order(labels: set[str]) -> list[str]:
    """By name; whole numbers by size, or 10 would come before 2."""
    if all(len(label) < 19 and label.removeprefix("-").isdecimal() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _fault(row: _Row, classes: dict[str, int]) -> str:
    """What is wrong with a row, or nothing."""
    words = [word for names in SPLITS.values() for word in names]
    name = Path(row.file)
    if row.split not in ("", *words):
        return f"the split {row.split!r} is unknown; {nearest(row.split, words)}"
    if row.label not in classes:
        return f"the label {row.label!r} is not in classes.txt"
    if "\0" in row.file or not _encodable(row.file):
        return f"{row.file!r} cannot be the name of a file"
    if name.is_absolute() or ".." in name.parts:
        return f"{row.file!r} is outside the list's folder"
    return ""


def _encodable(name: str) -> bool:
    try:
        return bool(os.fsencode(name))
    except UnicodeEncodeError:
        return False


def _rows(path: Path) -> list[_Row]:
    rows: list[_Row] = []
    line = 0
    with path.open(encoding="utf-8-sig", newline="") as file:  # a spreadsheet puts a byte order mark first
        try:
            for line, cells in _csv_cells(file) if path.suffix == ".csv" else _json_cells(file):
                row = _picked(line, cells)
                if row is None:
                    raise DataError(f"{path} line {line} lacks a file or a label; the columns are file,label[,split]")
                rows.append(row)
        except DataError:
            raise
        except (ValueError, csv.Error, RecursionError) as error:
            reason = getattr(error, "msg", error)  # json's own line number is always 1 here
            raise DataError(f"{path} is not a well-formed list after line {line}: {reason}") from error
    return rows


def _csv_cells(file: TextIO) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(file)
    for cells in reader:
        yield reader.line_num, cells


def _json_cells(file: TextIO) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(file, 1):
        if text.strip():
            yield line, json.loads(text)


def _picked(line: int, cells: Any) -> _Row | None:
    """The cells under any of their columns' names; None where a file or a label is missing."""
    if not isinstance(cells, dict):
        return None
    found = {
        key: next((cells[name] for name in names if cells.get(name) is not None), "") for key, names in COLUMNS.items()
    }
    if not all(isinstance(value, str | int) for value in found.values()):
        return None
    row = _Row(line, **{key: str(value) for key, value in found.items()})
    return row if row.file and row.label else None


def _excluding(source: Source, path: Path) -> Source:
    from plainvit.data.known import official_split

    bad = _excluded(path, {source.split, official_split(source.spec, source.split)})
    keep = [index for index in range(len(source)) if source.name(index) not in bad]
    if not keep:
        raise DataError(f"{path} leaves no images in the {source.split} split of {source.spec}")
    return Subset(source, np.array(keep))


def _excluded(path: Path, splits: set[str]) -> set[str]:
    """Names, one a line; or findings in JSON, which count for their own split: train and val may share names.

    The test images of ImageNet are its validation images: findings are of `val` there, and count for both.
    """
    names: set[str] = set()
    for line, text in enumerate(path.read_text(encoding="utf-8", errors="surrogateescape").split("\n"), 1):
        finding: Any = {"name": text} if text.strip() else None
        if text.startswith("{"):
            try:
                finding = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} line {line} is not valid JSON: {error}") from error
            if not isinstance(finding.get("name"), str):
                raise DataError(f"{path} line {line} lacks the name of an image")
        if finding and ("split" not in finding or finding["split"] in splits):
            names.add(finding["name"])
    return names
