"""Find images: files, folders, globs, archives, names on standard input -> one source, in the given order.

source = find(["photos", "more.zip", "scans/**/*.png"])
source.name(0), source.read(0), len(source)

Archives (.zip, .tar) are read in place: nothing is extracted, and names of members are only displayed. Sizes are
checked before bytes are read. An unreadable input keeps its position and raises ImageError when it is read.
"""

import glob
import hashlib
import io
import os
import posixpath
import sys
import tarfile
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
from plainvit.data.shards import LOST, find_place
from plainvit.data.sources import (
    FILE_LIMIT,
    SUFFIXES,
    UNREAD,
    ConcatSource,
    Names,
    Source,
    image_files,
    open_source,
    read_image_file,
    warn_unread,
)
from plainvit.data.tables import has_parquet, has_saved

HEADER_LIMIT = 2**20  # bytes of one header of a tar
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".7z", ".rar")
ARCHIVES = (".zip", ".tar", *COMPRESSED)
_DAMAGE = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, ValueError)

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


class Named(Source):
    """Images with names and without labels."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = Names(names)
        self.labels = np.full(len(self.names), -1, np.int32)

    def name(self, index: int) -> str:
        return self.names[index]


class Listed(Named):
    """Image files, by the given paths."""

    def read(self, index: int) -> bytes:
        return read_image_file(self.names[index])

    def files(self) -> Iterable[str]:
        return (self.names[index] for index in range(len(self)))


class Zip(Named):
    """Members of a zip file. Each process and thread opens it itself, as they would share the file position."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as file:
            members = [(at, one.filename) for at, one in enumerate(file.infolist()) if _is_image(one.filename)]
            warn_unread(path, (one for one in file.namelist() if _is_image(one, UNREAD)))
        super().__init__(name for _, name in members)
        self.path = path
        self._positions = np.array([position for position, _ in members], np.int64)
        self._files: dict[tuple[int, int], zipfile.ZipFile] = {}

    def read(self, index: int) -> bytes:
        caller = os.getpid(), threading.get_ident()
        try:
            if caller not in self._files:
                self._files[caller] = zipfile.ZipFile(self.path)
            return self._read_member(self._files[caller], index)
        except (*_DAMAGE, RuntimeError) as error:  # RuntimeError: encrypted
            raise error if isinstance(error, ImageError) else ImageError(_reason(error)) from error

    def _read_member(self, file: zipfile.ZipFile, index: int) -> bytes:
        info = file.infolist()[self._positions[index]]  # not by name: two members may have the same
        _check_length(info.file_size)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile has no size limit for others
            raise ImageError(f"zip compression method {info.compress_type} is not supported: use stored or deflated")
        with file.open(info) as member:
            return member.read(info.file_size + 1)

    def files(self) -> Iterable[str]:
        return (str(self.path),)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


class _LimitedFile(io.FileIO):
    """A file with a size limit per read: tarfile alone reads as many bytes as a header says."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= HEADER_LIMIT:
            raise tarfile.ReadError(f"a header has {size:,} bytes, above the limit of {HEADER_LIMIT:,}")
        return super().read(size)


class Tar(Named):
    """Members of an uncompressed tar file, read at their offsets."""

    def __init__(self, path: Path) -> None:
        members: list[tuple[str, int, int]] = []
        unread: list[str] = []
        places: dict[str, tuple[int, int]] = {}  # targets of links
        with _LimitedFile(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                archive.members = []  # pyright: ignore - tarfile would keep all in memory
                if _is_image(member.name) and not member.isdir():
                    place = places[posixpath.normpath(member.name)] = find_place(member, places)
                    members.append((member.name, *place))
                elif _is_image(member.name, UNREAD):
                    unread.append(member.name)
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # a damaged header looks like the end
                raise tarfile.ReadError(f"its list of members ends at byte {archive.offset:,} without an end mark")
        warn_unread(path, unread)
        super().__init__(name for name, _, _ in members)
        self.path = path
        self._places = np.array([place for _, *place in members], np.int64).reshape(-1, 2)

    def read(self, index: int) -> bytes:
        offset, length = map(int, self._places[index])
        if length in LOST:
            raise ImageError(LOST[length])
        _check_length(length)
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def files(self) -> Iterable[str]:
        return (str(self.path),)


class Broken(Named):
    """An input that cannot be read, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__([name])
        self._reason = reason

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
    for one in (one for word in words for one in _resolve(word, split, data_root, lines)):
        if isinstance(one, str):
            paths.append(one)
            continue
        inputs += [("", Listed(paths)), one] if paths else [one]
        paths = []
    inputs += [("", Listed(paths))] if paths else []
    if not sum(len(source) for _, source in inputs):
        raise DataError(f"no images found in {' '.join(words) or 'an empty list of inputs'}")
    return Inputs(inputs)


def _resolve(
    word: str, split: str, data_root: str | Path | None, lines: Iterable[bytes] | None
) -> Iterator[str | Input]:
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
    elif path.endswith((".parquet", ".arrow")):
        yield f"{path}/", open_source(path, split)
    else:
        yield path


def _open_folder(folder: str, split: str) -> Iterator[str | Input]:
    unread: list[str] = []
    names = sorted(image_files(Path(folder), folder.rstrip("/"), unread=unread, irregular=[]))  # rows with errors
    warn_unread(folder, unread)
    yield from names
    if not names and (has_parquet(Path(folder)) or has_saved(Path(folder))):
        yield f"{folder.rstrip('/')}/", open_source(folder, split)
    elif not names:
        raise DataError(f"{folder} contains no images: no file ends in {', '.join(SUFFIXES[:4])} ...")


def _open_archive(path: Path) -> Source:
    if path.name.lower().endswith(COMPRESSED):
        raise DataError(f"{path} is compressed and cannot be read in place: unpack it, or use .tar or .zip")
    try:
        found = Zip(path) if path.name.lower().endswith(".zip") else Tar(path)
    except _DAMAGE as error:
        raise DataError(f"the archive {path} cannot be read: {_reason(error)}") from error
    if not len(found):
        raise DataError(f"{path} contains no images")
    return found


def _match(pattern: str, split: str) -> Iterator[str | Input]:
    """Matching images and archives; folders only if nothing else matches, as ** matches folders and their files."""
    matches = sorted(glob.iglob(pattern, recursive=True))  # noqa: PTH207
    files = [path for path in matches if path.lower().endswith((*SUFFIXES, *ARCHIVES)) and not Path(path).is_dir()]
    warn_unread(pattern, (path for path in matches if _is_image(path, UNREAD)))
    for path in files or [path for path in matches if Path(path).is_dir()]:
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
            yield "", Broken(name, _reason(error))


def _is_image(name: str, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    return name.lower().endswith(suffixes) and not name.rpartition("/")[2].startswith(".")


def _check_length(length: int) -> None:
    if length > FILE_LIMIT:
        raise ImageError(f"the image has {length:,} bytes, above the limit of {FILE_LIMIT:,}")


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
