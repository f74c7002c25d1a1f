"""Where images come from: one spelling each, one interface behind them.

photos/                       class folders, perhaps inside train/ val/ test/
photos/labels.csv             a list: file,label[,split]; or .jsonl with those keys
shards/                       parquet as the Hugging Face hub stores it, or tar shards with an index
train.parquet, saved/         one such file; a folder of Hugging Face's save_to_disk
hf:org/dataset                parquet from the hub
cifar10, oxford-pets, ...     known sets, under the data root
digits, shapes:size=64        need nothing

source = open_source("photos/", split="train")
source.labels[i], source.classes, source.image(i)
"""

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
from typing import Any

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
FILE_LIMIT = 512 * 2**20  # bytes of one encoded image
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
        return read_image_file(f"{self.root}/{self.name(index)}")

    def name(self, index: int) -> str:
        return self.names[index]

    def files(self) -> Iterable[str]:
        return (f"{self.root}/{self.names[index]}" for index in range(len(self)))


def read_image_file(path: str) -> bytes:
    """The bytes of a regular file. A pipe or a device is never opened: it could block, or never end."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a million times
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("it is no file, but a folder, a pipe or a device")
        if status.st_size > FILE_LIMIT:
            raise ImageError(f"{status.st_size:,} bytes are over the limit of {FILE_LIMIT:,} for one image")
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()
    except ImageError:
        raise
    except (OSError, ValueError) as error:  # a name with a zero byte in it is a ValueError
        raise ImageError(getattr(error, "strerror", None) or str(error)) from error


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
    from plainvit.data import generated, known, lists, tables

    word, _, rest = spec.partition(":")
    if word == "digits":
        return generated.digits(split, rest)
    if word == "shapes":
        return generated.shapes(split, rest)
    if word == "hf" and rest:
        return tables.open_parquet(tables.fetch(rest), split)
    path = Path(spec)
    if path.is_dir():
        return open_folder(path, split)
    if path.is_file() and path.suffix in (".csv", ".jsonl"):
        return lists.open_list(path, split)
    if path.is_file() and path.suffix in (".parquet", ".arrow"):
        return tables.open_table(path, split)
    if spec in known.SETS:
        return known.open_known(spec, split, data_root)
    if "/" in spec or os.sep in spec or path.suffix:
        raise DataError(f"there is no folder or list of images at {spec}")
    raise ValueError(
        f"data {spec!r} is neither a folder nor a known set; {nearest(spec, (*known.SETS, 'digits', 'shapes'))}"
    )


def open_folder(folder: Path, split: str) -> Source:
    """Tables, shards, a list of labels, split folders or class folders: told apart by what is there."""
    from plainvit.data import lists, shards, tables

    if tables.has_saved(folder):
        return tables.open_saved(folder, split)
    if tables.has_parquet(folder):
        return tables.open_parquet(folder, split)
    if shards.has_tars(folder):
        return shards.open_tars(folder, split)
    listed = lists.find_list(folder)
    if listed:
        return lists.open_list(listed, split)
    found = _split_folders(folder)
    if not found and split == "train":
        return _open_classes(folder, None)
    if split not in found:
        raise AbsentSplit(f"{folder} has no {split} split: no folder {' or '.join(SPLITS[split])}")
    if "train" in found:
        classes = _part_classes(found["train"])
    else:
        classes = order_classes({name for part in found.values() for name in _part_classes(part)})
    listed = lists.find_list(found[split])
    if listed:
        return lists.open_list(listed, split, folder_of=split, classes=classes)
    return _open_classes(found[split], classes)


def _split_folders(folder: Path) -> dict[str, Path]:
    """The folders of each split; without train/, only those with classes inside, as a class may be named dev."""
    found = {name: next((folder / a for a in names if (folder / a).is_dir()), None) for name, names in SPLITS.items()}
    return {name: path for name, path in found.items() if path and (found["train"] or _part_classes(path))}


def _part_classes(folder: Path) -> list[str]:
    """The classes of a folder of one split, by its list or its class folders."""
    from plainvit.data import lists

    listed = lists.find_list(folder)
    return lists.list_classes(listed) if listed else class_names(folder)


def class_names(folder: Path) -> list[str]:
    """Sub-folders in the order of their labels."""
    with os.scandir(folder) as entries:
        return order_classes(entry.name for entry in entries if not entry.name.startswith(".") and _holds(entry.is_dir))


def order_classes(names: Iterable[str]) -> list[str]:
    """The order of the labels everywhere: by name; whole numbers by size, or 10 would come before 2."""
    found = list(names)
    if all(len(name) < 19 and name.removeprefix("-").isdecimal() for name in found):
        return sorted(found, key=lambda name: (int(name), name))
    return sorted(found)


def _holds(test: Callable[[], bool]) -> bool:
    """entry.is_dir() or entry.is_file(); False where a link cannot be followed."""
    try:
        return test()
    except OSError:
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
    irregular = _broken_links(folder)
    for label, name in enumerate(classes):
        inside = (folder / name).is_dir()
        here = sorted(image_files(folder / name, name, unread=unread, irregular=irregular)) if inside else []
        names += here
        labels.append(np.full(len(here), label, np.int32))
    tell_unread(folder, unread)
    tell_irregular(folder, irregular)
    return Files(folder, names, np.concatenate(labels), classes)


def _broken_links(folder: Path) -> list[str]:
    """Links where class folders are expected that lead nowhere."""
    with os.scandir(folder) as entries:
        return [
            entry.name
            for entry in entries
            if entry.is_symlink() and not entry.name.startswith(".") and not Path(entry.path).exists()
        ]


def image_files(
    folder: Path,
    prefix: str,
    seen: frozenset[tuple[int, int]] = frozenset(),
    *,
    unread: list[str],
    irregular: list[str],
) -> list[str]:
    """Names below a folder, links followed but never in a circle.

    What is named as an image is one, whatever it is: a broken link, a pipe or a device is an image that cannot be read.
    These and links to folders that are gone are added to `irregular`, for `tell_irregular`; photos of formats that are
    not read to `unread`, for `tell_unread`.
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
            if _holds(entry.is_dir):
                deeper = seen | {here}
                path = Path(entry.path)
                found += image_files(path, f"{prefix}/{name}", deeper, unread=unread, irregular=irregular)
            elif name.lower().endswith(SUFFIXES):
                found.append(f"{prefix}/{name}")
                irregular += [] if _holds(entry.is_file) else [found[-1]]
            elif name.lower().endswith(UNREAD):
                unread.append(name)
            elif entry.is_symlink() and not _holds(entry.is_file):
                irregular.append(f"{prefix}/{name}")
    return found


def tell_irregular(where: str | Path, names: Sequence[str]) -> None:
    """That some entries cannot be read, before they are met one by one."""
    if names:
        count = f"{len(names):,} entr{'ies are' if len(names) > 1 else 'y is'} no readable file"
        log.warning("%s: %s (broken links, pipes, devices): %s", where, count, ", ".join(names[:3]))


def tell_unread(where: str | Path, names: Iterable[str]) -> None:
    """That photos of formats which are not read were passed over: they would be missed otherwise."""
    kinds = Counter(Path(name).suffix.lower() for name in names)
    if kinds:
        count, verb = kinds.total(), "is" if len(kinds) == 1 else "are"
        files = f"{count:,} file{'s' * (count > 1)} passed over"
        log.warning("%s: %s: %s %s not read; convert to JPEG", where, files, ", ".join(sorted(kinds)), verb)


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
