"""Sources of images: every accepted `--data` value, behind one interface.

photos/                       class folders, optionally inside train/ val/ test/
photos/labels.csv             a list: file,label[,split]
shards/, train.parquet        parquet as the Hugging Face hub stores it, a folder or one file; or tar shards
hf:org/dataset                parquet from the hub
cifar10, oxford-pets, ...     known datasets, below the data root
digits, shapes:size=64        built in

source = open_source("photos/", split="train")
source.labels[i], source.classes, source.image(i)
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import stat
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from plainvit import hub
from plainvit.config import nearest
from plainvit.data.decode import DataError, ImageError, decode, get_image_size

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
UNSUPPORTED = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".raf")
SPLITS = {
    "train": ("train", "training", "trainval"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
FILE_LIMIT = 512 * 2**20  # bytes of one encoded image
ENDS = 4096  # bytes at each end of a file that identify it
log = logging.getLogger("plainvit")


class MissingSplitError(DataError):
    """The data has no such split; it may have others."""


class Source(ABC):
    """Images with labels, by index. A label of -1 means no label."""

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
        """The name of an image in messages and tables."""

    def identify(self, index: int) -> bytes:
        """Bytes that are equal for copies of an image, and differ for others."""
        data = self.read(index)
        return data if isinstance(data, bytes) else data.tobytes()

    def files(self) -> Iterable[str]:
        """Every file that holds images; none for generated images."""
        return ()

    def load(self) -> None:
        """Read what all workers need, before they are forked."""
        return

    def is_sequential(self) -> bool:
        """Whether reading out of order is slow, once loaded."""
        return False

    def image(self, index: int) -> np.ndarray:
        return decode(self.read(index))

    def extent(self, index: int) -> tuple[int, int]:
        """(height, width), from the header if encoded."""
        return get_image_size(self.read(index))

    def read_with_extent(self, index: int) -> tuple[bytes | np.ndarray, tuple[int, int]]:
        """What `read` returns, and the image's (height, width)."""
        data = self.read(index)
        return data, get_image_size(data)

    def sample(self, count: int = 64) -> list[int]:
        """Positions of up to `count` evenly spaced images."""
        return np.unique(np.linspace(0, len(self) - 1, min(len(self), count)).astype(int)).tolist()

    def fingerprint(self) -> str:
        """Hash of names, labels and classes; independent of the folder."""
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogatepass"))
        digest.update(np.ascontiguousarray(self.labels, np.int32).tobytes())
        for index in range(len(self)):
            digest.update(self.name(index).encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()[:16]


class Names:
    """File names in one buffer, which forked workers share: a million names without a million objects."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = pa.array(map(os.fsencode, names), pa.large_binary())

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self._names[index].as_py())


class FileSource(Source):
    """Image files below a folder; if the folder is "", names are whole paths."""

    def __init__(
        self, root: Path | str, names: Iterable[str], labels: Sequence[int] | np.ndarray, classes: Sequence[str]
    ) -> None:
        self.prefix, self.names = f"{root}/" if root else "", Names(names)
        self.labels, self.classes = np.asarray(labels, np.int32), tuple(classes)

    def path(self, index: int) -> str:
        return self.prefix + self.names[index]

    def read(self, index: int) -> bytes:
        with _open_image_file(self.path(index)) as file:
            return file.read()

    def name(self, index: int) -> str:
        return self.names[index]

    def identify(self, index: int) -> bytes:
        """The size and both ends of a file: a million files are read in a minute, and no two photos agree in them."""
        with _open_image_file(self.path(index)) as file:
            start = file.read(ENDS)
            count = file.seek(0, os.SEEK_END)
            file.seek(max(count - ENDS, 0))
            return b"%d %s%s" % (count, start, file.read())

    def files(self) -> Iterable[str]:
        return map(self.path, range(len(self)))


class SourceView(Source):
    """Images of other sources: `locate` maps an index to (source, index in it)."""

    sources: Sequence[Source]

    @abstractmethod
    def locate(self, index: int) -> tuple[Source, int]: ...

    def read(self, index: int) -> bytes | np.ndarray:
        source, index = self.locate(index)
        return source.read(index)

    def name(self, index: int) -> str:
        source, index = self.locate(index)
        return source.name(index)

    def extent(self, index: int) -> tuple[int, int]:
        source, index = self.locate(index)
        return source.extent(index)

    def identify(self, index: int) -> bytes:
        source, index = self.locate(index)
        return source.identify(index)

    def load(self) -> None:
        for source in self.sources:
            source.load()

    def is_sequential(self) -> bool:
        return any(source.is_sequential() for source in self.sources)

    def files(self) -> Iterable[str]:
        return chain.from_iterable(source.files() for source in self.sources)


class Subset(SourceView):
    """Some images of another source."""

    def __init__(self, source: Source, indices: np.ndarray, split: str = "") -> None:
        self.source, self.sources, self.indices = source, (source,), np.asarray(indices)
        self.labels, self.classes = source.labels[self.indices], source.classes
        self.spec, self.split = source.spec, split or source.split

    def locate(self, index: int) -> tuple[Source, int]:
        return self.source, int(self.indices[index])


class ConcatSource(SourceView):
    """Several sources concatenated, with the classes of the first."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources, self.classes = list(sources), sources[0].classes
        self.labels = np.concatenate([source.labels for source in sources])
        self.ends = np.cumsum([len(source) for source in sources], dtype=np.int64)

    def locate(self, index: int) -> tuple[Source, int]:
        number, index = find_part(self.ends, index)
        return self.sources[number], index


def find_part(ends: np.ndarray, index: int) -> tuple[int, int]:
    """(number of the part that has this index, index in it), for consecutive parts that end at `ends`."""
    number = int(np.searchsorted(ends, index, "right"))
    return number, index - (int(ends[number - 1]) if number else 0)


# Files ----------------------------------------------------------------------------------------------------------------


def check_length(length: int) -> None:
    if length > FILE_LIMIT:
        raise ImageError(f"{length:,} bytes are over the limit of {FILE_LIMIT:,} for one image")


@contextlib.contextmanager
def _open_image_file(path: str) -> Iterator[io.FileIO]:
    """Open a regular file. Pipes and devices are not opened: reading them could block or never end."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a million times
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("it is a folder, a pipe or a device, not a file")
        check_length(status.st_size)
        with io.FileIO(path) as file:
            yield file
    except ImageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise ImageError(getattr(error, "strerror", None) or str(error)) from error


def find_images(folder: Path, prefix: str = "") -> list[str]:
    """Sorted names of the image files below a folder. Links are followed, but not in circles.

    A broken link, pipe or device with the name of an image counts: it is reported when it is read.
    """
    return select_images(folder, sorted(_walk(folder, prefix, frozenset())))


def _walk(folder: Path, prefix: str, parents: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Names of all files below a folder but hidden ones."""
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if is_folder(entry):
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", parents | {identity})
            else:
                yield f"{prefix}{entry.name}"


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def select_images(where: str | Path, names: Iterable[str]) -> list[str]:
    """The names of images; warns of those that are skipped because of their format."""
    images: list[str] = []
    skipped: Counter[str] = Counter()
    for name in names:
        file = name.rpartition("/")[2]
        suffix = f".{file.rpartition('.')[2].lower()}"
        if suffix in SUFFIXES and not file.startswith("."):
            images.append(name)
        elif suffix in UNSUPPORTED and not file.startswith("."):
            skipped[suffix] += 1
    if skipped:
        problem = "%s: %d files skipped: %s not supported; convert them to JPEG"
        log.warning(problem, where, skipped.total(), ", ".join(sorted(skipped)))
    return images


def is_inside(name: str) -> bool:
    """Whether a file name in a list is a path below the list's folder."""
    return "\0" not in name and not name.startswith("/") and ".." not in name.split("/")


# Opening --------------------------------------------------------------------------------------------------------------


def open_source(
    spec: str, split: str = "train", *, data_root: str | Path | None = None, exclude: str | Path | None = None
) -> Source:
    """Open one split. `exclude` is a file of names to leave out, as `plainvit data check --save` writes it."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; {nearest(split, SPLITS)}")
    source = _open(spec, split, Path(data_root) if data_root else None)
    source.spec, source.split = spec, split
    if not len(source):
        raise DataError(f"{spec} has no images in its {split} split")
    return _exclude(source, Path(exclude)) if exclude else source


def _open(spec: str, split: str, data_root: Path | None) -> Source:
    from plainvit.data import folders, generated, known, lists, tables

    kind, _, rest = spec.partition(":")
    if kind in ("digits", "shapes"):
        return generated.digits(split, rest) if kind == "digits" else generated.shapes(split, rest)
    if kind == "hf" and rest:
        return tables.open_parquet(hub.fetch(rest, ["*.parquet", "**/*.parquet"], kind="dataset"), split)
    path = Path(spec)
    if path.is_dir():
        return folders.open_folder(path, split)
    if path.is_file() and path.suffix == ".csv":
        return lists.open_list(path, split)
    if path.is_file() and path.suffix == ".parquet":
        return tables.open_parquet(path, split)
    if spec in known.SETS:
        return known.open_known(spec, split, data_root)
    if path.is_file():
        raise DataError(f"{spec} is a file: --data takes a folder of images, a .csv list, or a .parquet file")
    if "/" in spec or os.sep in spec or path.suffix:
        raise DataError(f"there is no folder or list of images at {spec}")
    names = (*known.SETS, "digits", "shapes")
    raise ValueError(f"data {spec!r} is neither a folder nor a known dataset; {nearest(spec, names)}")


def _exclude(source: Source, path: Path) -> Source:
    from plainvit.data.known import official_split

    excluded = _read_excluded(path, (source.split, official_split(source.spec, source.split)))
    keep = [index for index in range(len(source)) if source.name(index) not in excluded]
    if not keep:
        raise DataError(f"--exclude {path} removes all images of the {source.split} split of {source.spec}")
    if excluded and len(keep) == len(source) and source.split == "train":
        log.warning("--exclude %s has no training image: names are as in `plainvit data check %s`", path, source.spec)
    return Subset(source, np.array(keep))


def _read_excluded(path: Path, splits: tuple[str, str]) -> set[str]:
    """Read names, one per line, or findings in JSON, which apply only to their own split."""
    names: set[str] = set()
    for line, text in enumerate(path.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n"), 1):
        try:
            finding: dict[str, Any] = json.loads(text) if text.startswith("{") else {"name": text}
            name = str(finding["name"])
        except (ValueError, KeyError, RecursionError) as error:
            raise DataError(f'{path} line {line} must be an image name, or JSON with a "name": {error!r}') from error
        if name.strip() and ("split" not in finding or finding["split"] in splits):
            names.add(name)
    return names
