"""Find images: files, folders, globs, archives, names on standard input -> one source, in the given order.

source = find(["photos", "more.zip", "scans/**/*.png"])
source.name(0), source.read(0), len(source)

Archives (.zip, .tar) are read in place: nothing is extracted, and names of members are only displayed. Sizes are
checked before bytes are read. An unreadable input keeps its position and raises ImageError when it is read.
"""

import glob
import hashlib
import os
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.data import known
from plainvit.data.content import content_stamp
from plainvit.data.decode import DataError, ImageError
from plainvit.data.shards import open_tar
from plainvit.data.sources import (
    SUFFIXES,
    ConcatSource,
    Files,
    Names,
    Source,
    check_length,
    find_images,
    open_source,
    select_images,
)
from plainvit.data.tables import has_parquet

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".7z", ".rar")
ARCHIVES = (".zip", ".tar", *COMPRESSED)
_DAMAGE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, ValueError)

Input = tuple[str, Source]  # prefix of the names, images


class Inputs(ConcatSource):
    """Several sources in sequence, without labels."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        super().__init__([source for _, source in inputs])
        self.labels, self.classes = np.full(len(self.labels), -1, np.int32), ()
        self.prefixes = [prefix for prefix, _ in inputs]

    def name(self, index: int) -> str:
        return self.prefixes[self.place(index)[0]] + super().name(index)

    def fingerprint(self) -> str:
        """Hash of names, order, and sizes and modification times of files."""
        digest = hashlib.sha256()
        for prefix, source in zip(self.prefixes, self.sources, strict=True):
            stamp = f"{prefix}\0{len(source)}\0{source.fingerprint()}\0{content_stamp(source)}\0"
            digest.update(stamp.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]


class Zip(Source):
    """Members of a zip file. Each process and thread opens it itself, as they would share the file position."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
        self.path = path
        self._positions = np.array(select_images(path, names), np.int64)
        self._names = Names(names[position] for position in self._positions)
        self.labels = np.full(len(self._names), -1, np.int32)
        self._files: dict[tuple[int, int], zipfile.ZipFile] = {}

    def name(self, index: int) -> str:
        return self._names[index]

    def read(self, index: int) -> bytes:
        caller = os.getpid(), threading.get_ident()
        try:
            if caller not in self._files:
                self._files[caller] = zipfile.ZipFile(self.path)
            return self._read_member(self._files[caller], index)
        except (*_DAMAGE, RuntimeError) as error:  # RuntimeError: encrypted
            raise error if isinstance(error, ImageError) else ImageError(_first_line(error)) from error

    def _read_member(self, file: zipfile.ZipFile, index: int) -> bytes:
        info = file.infolist()[self._positions[index]]  # not by name: two members may have the same
        check_length(info.file_size)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile has no size limit for others
            raise ImageError(f"zip compression method {info.compress_type} is not supported: use stored or deflated")
        with file.open(info) as member:
            return member.read(info.file_size + 1)

    def files(self) -> Iterable[str]:
        return (str(self.path),)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


class Unreadable(Source):
    """An input that cannot be read, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason, self.labels = name, reason, np.array([-1], np.int32)

    def name(self, index: int) -> str:  # noqa: ARG002
        return self._name

    def read(self, index: int) -> bytes:  # noqa: ARG002
        raise ImageError(self._reason)


# Finding --------------------------------------------------------------------------------------------------------------


def find(
    words: Sequence[str],
    *,
    split: str = "test",
    data_root: str | Path | None = None,
    lines: Iterable[bytes] | None = None,
) -> Inputs:
    """All images of the given files, folders, globs, archives and datasets.

    `lines` replaces standard input, whose lines are the names that "-" stands for.
    """
    inputs: list[Input] = []
    paths: list[str] = []
    for entry in (entry for word in words for entry in _resolve(word, split, data_root, lines)):
        if isinstance(entry, str):
            paths.append(entry)
            continue
        inputs += [("", _open_files(paths)), entry] if paths else [entry]
        paths = []
    inputs += [("", _open_files(paths))] if paths else []
    if not sum(len(source) for _, source in inputs):
        raise DataError(f"no images found in {' '.join(words) or 'an empty list of inputs'}")
    return Inputs(inputs)


def _open_files(paths: Sequence[str]) -> Files:
    return Files("", paths, np.full(len(paths), -1), ())


def _resolve(
    word: str, split: str, data_root: str | Path | None, lines: Iterable[bytes] | None
) -> Iterator[str | Input]:
    """Paths of images, and sources of what holds several."""
    if word == "-":
        given = sys.stdin.buffer if lines is None and sys.stdin else lines  # sys.stdin is None if it is closed
        yield from _read_names(given or (), split)
    elif os.path.lexists(word):
        yield from _open_path(word, split)
    elif glob.has_magic(word):
        yield from _match(word, split)
    elif word in known.SETS or word.partition(":")[0] in ("hf", "digits", "shapes"):
        yield f"{word}/", open_source(word, split, data_root=data_root)
    else:
        raise DataError(f"there is no file, folder, archive or dataset {word}")


def _open_path(path: str, split: str) -> Iterator[str | Input]:
    """A single file is an image whatever its name; in a folder only files with an image suffix are."""
    if Path(path).is_dir():
        yield from _open_folder(path, split)
    elif path.lower().endswith(ARCHIVES):
        yield f"{path}/", _open_archive(Path(path))
    elif path.endswith(".parquet"):
        yield f"{path}/", open_source(path, split)
    else:
        yield path


def _open_folder(folder: str, split: str) -> Iterator[str | Input]:
    prefix = f"{folder.rstrip('/')}/"
    names = find_images(Path(folder), prefix)
    yield from names
    if not names and has_parquet(Path(folder)):
        yield prefix, open_source(folder, split)
    elif not names:
        raise DataError(f"{folder} contains no images: no file ends in {', '.join(SUFFIXES[:4])} ...")


def _open_archive(path: Path) -> Source:
    if path.name.lower().endswith(COMPRESSED):
        raise DataError(f"{path} is compressed and cannot be read in place: unpack it, or use .tar or .zip")
    try:
        source = open_tar(path) if path.name.lower().endswith(".tar") else Zip(path)
    except DataError:
        raise
    except _DAMAGE as error:
        raise DataError(f"the archive {path} cannot be read: {_first_line(error)}") from error
    if not len(source):
        raise DataError(f"{path} contains no images")
    return source


def _match(pattern: str, split: str) -> Iterator[str | Input]:
    """Matching images and archives; folders only if nothing else matches, as ** matches folders and their files."""
    matches = sorted(glob.iglob(pattern, recursive=True))  # noqa: PTH207
    folders = [path for path in matches if Path(path).is_dir()]
    files = sorted(set(matches).difference(folders))
    images = [files[position] for position in select_images(pattern, files)]
    archives = [path for path in files if path.lower().endswith(ARCHIVES)]
    for path in sorted(images + archives) or folders:
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
            yield "", Unreadable(name, _first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
