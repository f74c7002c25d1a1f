"""Find images: files, folders, globs, datasets, names on standard input -> one source, in the given order.

source = find(["photos", "cifar10", "scans/**/*.png"])
source.name(0), source.read(0), len(source)

An unreadable input keeps its position and raises ImageError when it is read.
"""

import glob
import hashlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.data import known
from plainvit.data.content_hash import content_stamp
from plainvit.data.decode import DataError, ImageError
from plainvit.data.shards import has_tars
from plainvit.data.sources import (
    SUFFIXES,
    ConcatSource,
    FileSource,
    Source,
    find_images,
    find_part,
    open_source,
    select_images,
)
from plainvit.data.tables import ParquetSource, has_parquet
from plainvit.errors import first_line

ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")

Input = tuple[str, Source]  # prefix of the names, images


class Inputs(ConcatSource):
    """Several sources in sequence, without labels."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        super().__init__([source for _, source in inputs])
        self.labels, self.classes = np.full(len(self.labels), -1, np.int32), ()
        self.prefixes = [prefix for prefix, _ in inputs]

    def name(self, index: int) -> str:
        return self.prefixes[find_part(self.ends, index)[0]] + super().name(index)

    def fingerprint(self) -> str:
        """Hash of names, order, and sizes and modification times of files."""
        digest = hashlib.sha256()
        for prefix, source in zip(self.prefixes, self.sources, strict=True):
            stamp = f"{prefix}\0{len(source)}\0{source.fingerprint()}\0{content_stamp(source)}\0"
            digest.update(stamp.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]


class Unreadable(Source):
    """An input that cannot be read, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason, self.labels = name, reason, np.array([-1], np.int32)

    def name(self, index: int) -> str:  # noqa: ARG002
        return self._name

    def read(self, index: int) -> bytes:  # noqa: ARG002
        raise ImageError(self._reason)


# Finding --------------------------------------------------------------------------------------------------------------


def find(names: Sequence[str], *, split: str = "test", data_root: str | Path | None = None) -> Inputs:
    """All images of the given files, folders, globs and datasets; "-" stands for the names on standard input."""
    entries = (entry for name in names for entry in _resolve(name, split, data_root))
    inputs: list[Input] = []
    for are_paths, group in itertools.groupby(entries, lambda entry: isinstance(entry, str)):
        members: list[Any] = list(group)
        inputs += [("", FileSource("", members, np.full(len(members), -1), ()))] if are_paths else members
    if not sum(len(source) for _, source in inputs):
        raise DataError(f"no images found in {' '.join(names) or 'an empty list of inputs'}")
    return Inputs(inputs)


def _resolve(name: str, split: str, data_root: str | Path | None) -> Iterator[str | Input]:
    """Paths of images, and sources of what holds several."""
    if name == "-":
        yield from _read_names(sys.stdin.buffer if sys.stdin else (), split)  # sys.stdin is None if it is closed
    elif os.path.lexists(name):
        yield from _open_path(name, split)
    elif glob.has_magic(name):
        yield from _match(name, split)
    elif name in known.SETS or name.partition(":")[0] in ("hf", "digits", "shapes"):
        yield f"{name}/", open_source(name, split, data_root=data_root)
    else:
        raise DataError(f"there is no file, folder or dataset {name}")


def _open_path(path: str, split: str) -> Iterator[str | Input]:
    """A single file is an image whatever its name; in a folder only files with an image suffix are."""
    if Path(path).is_dir():
        yield from _open_folder(path, split)
    elif path.lower().endswith(ARCHIVES):
        raise DataError(f"{path} is an archive: unpack it, and give the folder")
    elif path.endswith(".parquet"):
        yield f"{path}/", ParquetSource([Path(path)])  # whatever split its name says
    else:
        yield path


def _open_folder(folder: str, split: str) -> Iterator[str | Input]:
    prefix = f"{folder.rstrip('/')}/"
    names = find_images(Path(folder), prefix)
    yield from names
    if not names and (has_parquet(Path(folder)) or has_tars(Path(folder))):
        yield prefix, open_source(folder, split)
    elif not names:
        raise DataError(f"{folder} contains no images: no file ends in {', '.join(SUFFIXES[:4])} ...")


def _match(pattern: str, split: str) -> Iterator[str | Input]:
    """Matching images; folders only if nothing else matches, as ** matches folders and their files."""
    matches = sorted(glob.iglob(pattern, recursive=True))  # noqa: PTH207
    files = [path for path in matches if not Path(path).is_dir()]
    for path in select_images(pattern, files) or sorted(set(matches).difference(files)):
        yield from _open_path(path, split)
    if not matches:
        raise DataError(f"no file matches {pattern}")


def _read_names(lines: Iterable[bytes], split: str) -> Iterator[str | Input]:
    """Names, one per line or separated by zero bytes (find -print0). An invalid name becomes a row with an error."""
    given = list(lines)
    zeros = any(b"\0" in line for line in given)
    for line in b"".join(given).split(b"\0") if zeros else (line.rstrip(b"\r\n") for line in given):
        name = os.fsdecode(line)
        try:
            yield from _open_path(name, split) if name else ()
        except (DataError, OSError, ValueError) as error:
            yield "", Unreadable(name, first_line(error))
