"""What to look at: files, folders, globs, archives, names on standard input -> one source of images, in that order.

source = find(["photos", "more.zip", "scans/**/*.png"])
source.name(0), source.read(0), len(source)

Archives are read in place: nothing is extracted, and a member's name is only ever shown. Sizes are checked before bytes
are read. What cannot be read stays in its place and says why when it is read.
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
    Joined,
    Names,
    Source,
    image_files,
    open_source,
    read_image_file,
    tell_unread,
)
from plainvit.data.tables import has_parquet, has_saved

HEADER_LIMIT = 2**20  # bytes of one header of a tar
UNPACKED_LEAST, UNPACKED_TIMES = 2**28, 1000  # bytes that any tar may unpack to; a large one, so many times its own
_PACKED: dict[tuple[str, ...], Callable[[Path], Any]] = {
    (".tar",): lambda path: path.open("rb"),
    (".tar.gz", ".tgz"): gzip.open,
    (".tar.bz2", ".tbz2", ".tbz"): bz2.open,
    (".tar.xz", ".txz"): lzma.open,
}
ARCHIVES = (".zip", *(suffix for suffixes in _PACKED for suffix in suffixes))
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, ValueError)

Part = tuple[str, Source]  # what comes before the names of its images, and the images


class Inputs(Joined):
    """Several sources one after another, whose labels do not count."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__([source for _, source in parts])
        self.labels, self.classes = np.full(len(self.labels), -1, np.int32), ()
        self.before = [before for before, _ in parts]

    def name(self, index: int) -> str:
        return self.before[self.place(index)[0]] + super().name(index)

    def fingerprint(self) -> str:
        """Changes with names, order, and the sizes and times of files."""
        digest = hashlib.sha256()
        for before, source in zip(self.before, self.sources, strict=True):
            own = isinstance(source, Listed | Archive | Broken)  # a data set's own knows names and labels alone
            seen = f"{len(source)}\0{source.fingerprint()}\0{'' if own else content_stamp(source)}"
            digest.update(f"{before}\0{seen}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]


class Named(Source):
    """Images that have a name each, and no label."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = Names(names)
        self.labels = np.full(len(self.names), -1, np.int32)

    def name(self, index: int) -> str:
        return self.names[index]


class Listed(Named):
    """Files by their paths, as they were given."""

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
    """Images inside one file. Each process and thread opens it for itself: they would move each other's place."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(names)
        self.path = path
        self._files: dict[tuple[int, int], Any] = {}

    def _opened(self) -> Any:
        me = os.getpid(), threading.get_ident()
        if me not in self._files:
            self._files[me] = self._open()
        return self._files[me]

    def __del__(self) -> None:
        for file in self.__dict__.get("_files", {}).values():
            file.close()

    def _open(self) -> Any:
        raise NotImplementedError

    def _member(self, index: int) -> bytes:
        raise NotImplementedError

    def read(self, index: int) -> bytes:
        try:
            return self._member(index)
        except ImageError:
            raise
        except (*_DAMAGE, RuntimeError, NotImplementedError) as error:  # a password; a compression nobody knows
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
            members = [(place, one.filename) for place, one in enumerate(file.infolist()) if _is_image(one.filename)]
            tell_unread(path, (one for one in file.namelist() if _is_image(one, UNREAD)))
        super().__init__(path, [name for _, name in members])
        self._places = np.array([place for place, _ in members], np.int64)

    def _open(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    def _member(self, index: int) -> bytes:
        file: zipfile.ZipFile = self._opened()
        info = file.infolist()[self._places[index]]  # by place: two members may have one name
        _check_length(info.file_size)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile unpacks others without bound
            raise ImageError(
                f"it is packed by method {info.compress_type} of zip, not stored or deflated: pack it anew"
            )
        with file.open(info) as member:
            return member.read(info.file_size + 1)


class Tar(Archive):
    """Members of a tar file by their offsets, in the stream inside where it is compressed."""

    def __init__(self, path: Path, members: Sequence[tuple[str, int, int]]) -> None:
        super().__init__(path, [name for name, _, _ in members])
        self._offsets = np.array([offset for _, offset, _ in members], np.int64)
        self._lengths = np.array([length for _, _, length in members], np.int64)

    def _open(self) -> BinaryIO:
        return _unpacked(self.path)

    def _member(self, index: int) -> bytes:
        file, length = self._opened(), int(self._lengths[index])
        if length in LOST:
            raise ImageError(LOST[length])
        _check_length(length)
        file.seek(int(self._offsets[index]))
        data = file.read(length)
        if len(data) < length:
            raise ImageError(f"the archive ends {length - len(data):,} bytes too early")
        return data


class Broken(Named):
    """Something that holds no image, in the place where one was expected."""

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
    """The images that the words mean. `lines` are the names that the word - stands for: standard input by default."""
    parts: list[Part] = []
    paths: list[str] = []
    for one in (one for word in words for one in _meant(word, split, data_root, lines)):
        if isinstance(one, str):
            paths.append(one)
            continue
        parts += [("", Listed(paths)), one] if paths else [one]
        paths = []
    parts += [("", Listed(paths))] if paths else []
    if not sum(len(source) for _, source in parts):
        raise DataError(f"there are no images in {' '.join(words) or 'nothing'}")
    return Inputs(parts)


def _meant(word: str, split: str, data_root: str | Path | None, lines: Iterable[bytes] | None) -> Iterator[str | Part]:
    if word == "-":
        given = sys.stdin.buffer if lines is None and sys.stdin else lines  # no stdin: closed by whoever started us
        yield from _listed(given or (), split)
    elif os.path.lexists(word):
        yield from _there(word, split)
    elif glob.has_magic(word):
        yield from _matching(word, split)
    elif word in known.SETS or word.partition(":")[0] in ("hf", "digits", "shapes"):
        yield f"{word}/", open_source(word, split, data_root=data_root)
    else:
        raise DataError(f"there is no file, folder or archive {word}")


def _there(path: str, split: str) -> Iterator[str | Part]:
    """A file is what it is whatever its name; of a folder, the files that are named as images are."""
    if Path(path).is_dir():
        yield from _inside(path, split)
    elif path.lower().endswith(ARCHIVES):
        yield from _archived(Path(path))
    elif path.endswith((".parquet", ".arrow")):
        yield f"{path}/", open_source(path, split)
    else:
        yield path


def _inside(folder: str, split: str) -> Iterator[str | Part]:
    unread: list[str] = []
    names = sorted(image_files(Path(folder), folder.rstrip("/"), unread=unread, irregular=[]))  # they are error rows
    tell_unread(folder, unread)
    yield from names
    if not names and (has_parquet(Path(folder)) or has_saved(Path(folder))):
        yield f"{folder.rstrip('/')}/", open_source(folder, split)
    elif not names:
        raise DataError(f"{folder} holds no images: none of its files ends in {', '.join(SUFFIXES[:4])} ...")


def _matching(pattern: str, split: str) -> Iterator[str | Part]:
    """Images and archives; folders only where nothing else matches, as ** matches them beside what they hold."""
    matches = sorted(glob.iglob(pattern, recursive=True))  # noqa: PTH207
    files = [path for path in matches if path.lower().endswith((*SUFFIXES, *ARCHIVES)) and not Path(path).is_dir()]
    tell_unread(pattern, (path for path in matches if _is_image(path, UNREAD)))
    for path in files or [path for path in matches if Path(path).is_dir()]:
        yield from _there(path, split)
    if not matches:
        raise DataError(f"nothing matches {pattern}")


def _listed(lines: Iterable[bytes], split: str) -> Iterator[str | Part]:
    """Names, one a line or, as of find -print0, with zero bytes. A wrong one is a row: nobody has typed them."""
    given = list(lines)
    zeros = any(b"\0" in line for line in given)
    for line in b"".join(given).split(b"\0") if zeros else (line.rstrip(b"\r\n") for line in given):
        name = os.fsdecode(line)
        try:
            yield from _there(name, split) if name else ()
        except (DataError, OSError, ValueError) as error:
            yield "", Broken(name, _reason(error))


# Archives -------------------------------------------------------------------------------------------------------------


def _archived(path: Path) -> Iterator[Part]:
    """The images of an archive; where it is damaged, those that were found and then the archive itself as an error."""
    members: list[tuple[str, int, int]] = []
    reason = ""
    found: Source | None = None
    try:
        if path.name.lower().endswith(".zip"):
            found = Zip(path)
        else:
            _index(path, members)
    except _DAMAGE as error:
        reason = f"the archive cannot be read: {_reason(error)}"
    found = found or Tar(path, members)
    if len(found):
        yield f"{path}/", found
    if reason:
        yield "", Broken(str(path), reason)
    elif not len(found):
        raise DataError(f"{path} holds no images")


def _index(path: Path, found: list[tuple[str, int, int]]) -> None:
    """Adds (name, offset, length) of each image of a tar, as far as it can be read."""
    limit = max(UNPACKED_LEAST, UNPACKED_TIMES * path.stat().st_size)
    places: dict[str, tuple[int, int]] = {}
    unread: list[str] = []
    with _unpacked(path) as file, tarfile.open(fileobj=_Guarded(file, limit), mode="r:") as archive:  # pyright: ignore
        for member in archive:
            archive.members = []  # or each is kept
            if _is_image(member.name) and not member.isdir():
                place = places[posixpath.normpath(member.name)] = find_place(member, places)
                found.append((member.name, *place))
            elif _is_image(member.name, UNREAD):
                unread.append(member.name)
        tell_unread(path, unread)
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # a damaged header looks like the end
            raise tarfile.ReadError(f"its list of members breaks off at byte {archive.offset:,}")


def _unpacked(path: Path) -> Any:
    name = path.name.lower()
    return next(opened(path) for suffixes, opened in _PACKED.items() if name.endswith(suffixes))


class _Guarded:
    """A stream for tarfile, which would otherwise read as many bytes as any header says."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self.file, self.limit = file, limit

    def read(self, size: int) -> bytes:
        if not 0 <= size <= HEADER_LIMIT:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self.file.read(size)

    def seek(self, offset: int) -> int:
        if not 0 <= offset <= self.limit:
            raise tarfile.ReadError(f"it unpacks to more than {self.limit:,} bytes, far more than images would")
        return self.file.seek(offset)

    def tell(self) -> int:
        return self.file.tell()


def _is_image(name: str, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    return name.lower().endswith(suffixes) and not name.rpartition("/")[2].startswith(".")


def _check_length(length: int) -> None:
    if length > FILE_LIMIT:
        raise ImageError(f"{length:,} bytes are over the limit of {FILE_LIMIT:,} for one image")


def _stamp(path: str) -> bytes:
    """A file's name, size and time of change; the name alone where there is no such file."""
    try:
        status = Path(path).stat()
        seen = f"\0{status.st_size} {status.st_mtime_ns}\0"
    except (OSError, ValueError):
        seen = "\0\0"
    return os.fsencode(path) + seen.encode()


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
