"""Find images: files, folders, globs, archives, names on standard input -> one source, in the given order.

source = find(["photos", "more.zip", "scans/**/*.png"])
source.name(0), source.read(0), len(source)

Archives are read in place: nothing is extracted, and names of members are only displayed. Sizes are checked before
bytes are read. An unreadable input keeps its position and raises ImageError when it is read.
"""

import bz2
import glob
import gzip
import hashlib
import lzma
import os
import posixpath
import sys
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

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
UNPACKED_LEAST, UNPACKED_TIMES = 2**28, 1000  # limit of a tar: so many bytes, or so many times its own size
_TAR_OPENERS: dict[tuple[str, ...], Callable[[Path], Any]] = {
    (".tar",): lambda path: path.open("rb"),
    (".tar.gz", ".tgz"): gzip.open,
    (".tar.bz2", ".tbz2", ".tbz"): bz2.open,
    (".tar.xz", ".txz"): lzma.open,
}
ARCHIVES = (".zip", *(suffix for suffixes in _TAR_OPENERS for suffix in suffixes))
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, ValueError)

Part = tuple[str, Source]  # prefix of the names, images


class Inputs(ConcatSource):
    """Several sources in sequence, without labels."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__([source for _, source in parts])
        self.labels, self.classes = np.full(len(self.labels), -1, np.int32), ()
        self.prefixes = [prefix for prefix, _ in parts]

    def name(self, index: int) -> str:
        return self.prefixes[self.place(index)[0]] + super().name(index)

    def fingerprint(self) -> str:
        """Hash of names, order, and sizes and modification times of files."""
        digest = hashlib.sha256()
        for prefix, source in zip(self.prefixes, self.sources, strict=True):
            has_times = isinstance(source, Listed | Archive | Broken)  # that of a dataset has only names and labels
            content = "" if has_times else content_stamp(source)
            digest.update(
                f"{prefix}\0{len(source)}\0{source.fingerprint()}\0{content}\0".encode("utf-8", "surrogatepass")
            )
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

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(_stamp(self.names[index]))
        return digest.hexdigest()[:16]


class Archive(Named):
    """Images in one archive. Each process and thread opens it itself, as they would share the file position."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(names)
        self.path = path
        self._files: dict[tuple[int, int], Any] = {}

    def _get_file(self) -> Any:
        caller = os.getpid(), threading.get_ident()
        if caller not in self._files:
            self._files[caller] = self._open()
        return self._files[caller]

    def __del__(self) -> None:
        for file in self.__dict__.get("_files", {}).values():
            file.close()

    def _open(self) -> Any:
        raise NotImplementedError

    def _read_member(self, index: int) -> bytes:
        raise NotImplementedError

    def read(self, index: int) -> bytes:
        try:
            return self._read_member(index)
        except ImageError:
            raise
        except (*_DAMAGE, RuntimeError, NotImplementedError) as error:  # encrypted, or an unknown compression
            raise ImageError(_reason(error)) from error

    def files(self) -> Iterable[str]:
        return (str(self.path),)

    def fingerprint(self) -> str:
        return hashlib.sha256(_stamp(str(self.path)) + super().fingerprint().encode()).hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


class Zip(Archive):
    """Members of a zip file."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as file:
            members = [(at, one.filename) for at, one in enumerate(file.infolist()) if _is_image(one.filename)]
            warn_unread(path, (one for one in file.namelist() if _is_image(one, UNREAD)))
        super().__init__(path, [name for _, name in members])
        self._positions = np.array([position for position, _ in members], np.int64)

    def _open(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    def _read_member(self, index: int) -> bytes:
        file: zipfile.ZipFile = self._get_file()
        info = file.infolist()[self._positions[index]]  # not by name: two members may have the same
        _check_length(info.file_size)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile has no size limit for others
            raise ImageError(f"zip compression method {info.compress_type} is not supported: use stored or deflated")
        with file.open(info) as member:
            return member.read(info.file_size + 1)


class Tar(Archive):
    """Members of a tar file by their offsets in the uncompressed stream."""

    def __init__(self, path: Path, members: Sequence[tuple[str, int, int]]) -> None:
        super().__init__(path, [name for name, _, _ in members])
        self._offsets = np.array([offset for _, offset, _ in members], np.int64)
        self._lengths = np.array([length for _, _, length in members], np.int64)

    def _open(self) -> BinaryIO:
        return _open_tar(self.path)

    def _read_member(self, index: int) -> bytes:
        file, length = self._get_file(), int(self._lengths[index])
        if length in LOST:
            raise ImageError(LOST[length])
        _check_length(length)
        file.seek(int(self._offsets[index]))
        data = file.read(length)
        if len(data) < length:
            raise ImageError(f"the archive is truncated: {length - len(data):,} bytes are missing")
        return data


class Broken(Named):
    """An input that cannot be read, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__([name])
        self._reason = reason

    def read(self, index: int) -> bytes:  # noqa: ARG002
        raise ImageError(self._reason)

    def fingerprint(self) -> str:
        return hashlib.sha256(os.fsencode(f"{self.names[0]}\0{self._reason}")).hexdigest()[:16]


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
    parts: list[Part] = []
    paths: list[str] = []
    for one in (one for word in words for one in _resolve(word, split, data_root, lines)):
        if isinstance(one, str):
            paths.append(one)
            continue
        parts += [("", Listed(paths)), one] if paths else [one]
        paths = []
    parts += [("", Listed(paths))] if paths else []
    if not sum(len(source) for _, source in parts):
        raise DataError(f"no images found in {' '.join(words) or 'an empty list of inputs'}")
    return Inputs(parts)


def _resolve(
    word: str, split: str, data_root: str | Path | None, lines: Iterable[bytes] | None
) -> Iterator[str | Part]:
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


def _open_path(path: str, split: str) -> Iterator[str | Part]:
    """A single file is an image whatever its name; in a folder only files with an image suffix are."""
    if Path(path).is_dir():
        yield from _open_folder(path, split)
    elif path.lower().endswith(ARCHIVES):
        yield from _open_archive(Path(path))
    elif path.endswith((".parquet", ".arrow")):
        yield f"{path}/", open_source(path, split)
    else:
        yield path


def _open_folder(folder: str, split: str) -> Iterator[str | Part]:
    unread: list[str] = []
    names = sorted(image_files(Path(folder), folder.rstrip("/"), unread=unread, irregular=[]))  # rows with errors
    warn_unread(folder, unread)
    yield from names
    if not names and (has_parquet(Path(folder)) or has_saved(Path(folder))):
        yield f"{folder.rstrip('/')}/", open_source(folder, split)
    elif not names:
        raise DataError(f"{folder} contains no images: no file ends in {', '.join(SUFFIXES[:4])} ...")


def _match(pattern: str, split: str) -> Iterator[str | Part]:
    """Matching images and archives; folders only if nothing else matches, as ** matches folders and their files."""
    matches = sorted(glob.iglob(pattern, recursive=True))  # noqa: PTH207
    files = [path for path in matches if path.lower().endswith((*SUFFIXES, *ARCHIVES)) and not Path(path).is_dir()]
    warn_unread(pattern, (path for path in matches if _is_image(path, UNREAD)))
    for path in files or [path for path in matches if Path(path).is_dir()]:
        yield from _open_path(path, split)
    if not matches:
        raise DataError(f"no file matches {pattern}")


def _read_names(lines: Iterable[bytes], split: str) -> Iterator[str | Part]:
    """Names, one per line or separated by zero bytes (find -print0). An invalid name becomes a row with an error."""
    given = list(lines)
    zeros = any(b"\0" in line for line in given)
    for line in b"".join(given).split(b"\0") if zeros else (line.rstrip(b"\r\n") for line in given):
        name = os.fsdecode(line)
        try:
            yield from _open_path(name, split) if name else ()
        except (DataError, OSError, ValueError) as error:
            yield "", Broken(name, _reason(error))


# Archives -------------------------------------------------------------------------------------------------------------


def _open_archive(path: Path) -> Iterator[Part]:
    """The images of an archive; of a damaged one those before the damage, then the archive as an error."""
    members: list[tuple[str, int, int]] = []
    reason = ""
    found: Source | None = None
    try:
        if path.name.lower().endswith(".zip"):
            found = Zip(path)
        else:
            _index_tar(path, members)
    except _DAMAGE as error:
        reason = f"the archive cannot be read: {_reason(error)}"
    found = found or Tar(path, members)
    if len(found):
        yield f"{path}/", found
    if reason:
        yield "", Broken(str(path), reason)
    elif not len(found):
        raise DataError(f"{path} contains no images")


def _index_tar(path: Path, found: list[tuple[str, int, int]]) -> None:
    """Adds (name, offset, length) of each image of a tar to `found`, up to the first damage."""
    limit = max(UNPACKED_LEAST, UNPACKED_TIMES * path.stat().st_size)
    places: dict[str, tuple[int, int]] = {}
    unread: list[str] = []
    with _open_tar(path) as file, tarfile.open(fileobj=_LimitedStream(file, limit), mode="r:") as archive:  # pyright: ignore
        for member in archive:
            archive.members = []  # tarfile would keep all in memory
            if _is_image(member.name) and not member.isdir():
                place = places[posixpath.normpath(member.name)] = find_place(member, places)
                found.append((member.name, *place))
            elif _is_image(member.name, UNREAD):
                unread.append(member.name)
        warn_unread(path, unread)
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # a damaged header looks like the end
            raise tarfile.ReadError(f"its list of members ends at byte {archive.offset:,} without an end mark")


def _open_tar(path: Path) -> Any:
    name = path.name.lower()
    return next(opener(path) for suffixes, opener in _TAR_OPENERS.items() if name.endswith(suffixes))


class _LimitedStream:
    """A stream with size limits: tarfile alone reads as many bytes as a header says."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self.file, self.limit = file, limit

    def read(self, size: int) -> bytes:
        if not 0 <= size <= HEADER_LIMIT:
            raise tarfile.ReadError(f"a header has {size:,} bytes, above the limit of {HEADER_LIMIT:,}")
        return self.file.read(size)

    def seek(self, offset: int) -> int:
        if not 0 <= offset <= self.limit:
            raise tarfile.ReadError(f"it unpacks to more than {self.limit:,} bytes, the limit for its size")
        return self.file.seek(offset)

    def tell(self) -> int:
        return self.file.tell()


def _is_image(name: str, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    return name.lower().endswith(suffixes) and not name.rpartition("/")[2].startswith(".")


def _check_length(length: int) -> None:
    if length > FILE_LIMIT:
        raise ImageError(f"the image has {length:,} bytes, above the limit of {FILE_LIMIT:,}")


def _stamp(path: str) -> bytes:
    """Name, size and modification time of a file; only the name if it does not exist."""
    try:
        status = Path(path).stat()
        details = f"\0{status.st_size} {status.st_mtime_ns}\0"
    except (OSError, ValueError):
        details = "\0\0"
    return os.fsencode(path) + details.encode()


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
