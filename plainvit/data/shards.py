"""Tar shards in WebDataset's format, with an index for random access.

    plainvit data pack photos/ shards/ --side 320

A packed folder holds SPLIT-00000.tar ... (plain tars: KEY.jpg, KEY.cls) and index.parquet with each image's shard,
offset, length, label, size and checksum. A folder of tars without an index is scanned once.
"""

import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from plainvit.data.columns import MOST_CLASSES, check_range, map_file, report_damage
from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import SUFFIXES, MissingSplitError, Names, Source, check_length
from plainvit.data.tables import INDEX, find_split

HEADER_LIMIT = 2**20  # bytes of one header of a tar
UNFINISHED = "UNFINISHED"  # marks a folder whose packing has not finished
NOT_A_FILE = -1  # length of a member that is no regular file
INDEXED = {"shard": pa.string(), "name": pa.string(), "offset": pa.int64(), "length": pa.int64(), "label": pa.int64()}


def has_tars(folder: Path) -> bool:
    is_packed = any((folder / name).is_file() for name in (INDEX, UNFINISHED))
    return is_packed or next(folder.glob("*.tar"), None) is not None


def open_tars(folder: Path, split: str) -> Source:
    if (folder / UNFINISHED).is_file():
        raise DataError(f"{folder} is incomplete: delete it and run `plainvit data pack` again")
    table = _read_index(folder / INDEX) if (folder / INDEX).is_file() else _scan(folder)
    shards: list[str] = table.column("shard").unique().to_pylist()
    chosen = [name for name in shards if find_split(folder / name, folder) == split]
    if not chosen and split == "train" and not any(find_split(folder / name, folder) for name in shards):
        chosen = shards
    if not chosen:
        raise MissingSplitError(f"{folder} has no {split} split among its shards ({', '.join(shards[:4])})")
    return Tars(folder, table.filter(pa.array(np.isin(table.column("shard").to_pylist(), chosen))))


def _read_index(path: Path) -> pa.Table:
    with report_damage(path):
        table = pq.ParquetFile(map_file(path)).read()
        columns = {name: table.column(name).cast(kind) for name, kind in INDEXED.items()}
        if any(column.null_count for column in columns.values()):
            raise ValueError("it has empty cells")
        shards = columns["shard"].unique().to_pylist()
        if min(columns[name].to_numpy().min(initial=0) for name in ("offset", "length")) < 0:
            raise ValueError("it has negative values")
    outside = [name for name in shards if Path(name).name != name]
    if outside:
        raise DataError(f"{path} names the shard {outside[0]!r}, which is outside its folder")
    return table


def _read_index_classes(table: pa.Table, folder: Path) -> tuple[str, ...]:
    """Class names as `plainvit data pack` writes them into the index."""
    try:
        return tuple(map(str, json.loads((table.schema.metadata or {}).get(b"plainvit", b"{}")).get("classes", ())))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{folder / INDEX} has no readable list of classes: {error}") from error


class Tars(Source):
    """Members of tar files, read at their offsets; checksums are verified if the index has them."""

    def __init__(self, folder: Path, table: pa.Table) -> None:
        self.folder = folder
        self.shards: list[str] = table.column("shard").unique().to_pylist()
        number = {name: index for index, name in enumerate(self.shards)}
        self._shard = np.array([number[name] for name in table.column("shard").to_pylist()], np.int32)
        self._offset, self._length = (table.column(name).to_numpy() for name in ("offset", "length"))
        self._crc = table.column("crc32").to_numpy() if "crc32" in table.column_names else None
        self._names = Names(table.column("name").to_pylist())
        self.labels, self.classes = check_range(
            table.column("label").to_numpy(), _read_index_classes(table, folder), folder
        )
        self._check_shards()
        self._files: dict[int, int] = {}

    def files(self) -> Iterator[str]:
        return (str(self.folder / name) for name in self.shards)

    def _check_shards(self) -> None:
        """Find missing and truncated shards before training starts."""
        ends = np.zeros(len(self.shards), np.int64)
        np.maximum.at(ends, self._shard, self._offset + self._length)
        for name, end in zip(self.shards, ends, strict=True):
            path = self.folder / name
            if not path.is_file():
                raise DataError(f"{self.folder} lacks the shard {name}, which its index names")
            if path.stat().st_size < end:
                raise DataError(f"{path} is cut short: its index names images beyond its end")

    def read(self, index: int) -> bytes:
        shard, length = int(self._shard[index]), int(self._length[index])
        if length == NOT_A_FILE:
            raise ImageError("it is a link, a pipe, a device or a sparse file in the tar: store the image itself")
        check_length(length)
        if shard not in self._files:
            self._files[shard] = os.open(self.folder / self.shards[shard], os.O_RDONLY)
        data = os.pread(self._files[shard], length, int(self._offset[index]))
        if self._crc is not None and zlib.crc32(data) != self._crc[index]:
            raise ImageError(f"{self.name(index)}: the checksum does not match the index")
        return data

    def identify(self, index: int) -> bytes:
        """The length and checksum in the index, so that nothing is read."""
        return self.read(index) if self._crc is None else b"%d %d" % (self._length[index], self._crc[index])

    def name(self, index: int) -> str:
        return self._names[index]

    def __getstate__(self) -> dict[str, Any]:
        """Without file descriptors: another process opens the shards itself."""
        return {**self.__dict__, "_files": {}}


def _scan(folder: Path) -> pa.Table:
    """Build an index from the headers of tars: KEY.jpg with KEY.cls or {"label": N} in KEY.json."""
    columns: dict[str, list[Any]] = {key: [] for key in INDEXED}
    for path in sorted(folder.glob("*.tar")):
        for name, *numbers in _read_samples(path):
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")  # names may be any bytes
            for column, value in zip(columns.values(), (path.name, shown, *numbers), strict=True):
                column.append(value)
    return pa.table(columns, schema=pa.schema(list(INDEXED.items())))


def _read_samples(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """(name, offset, length, label) of each image. The key of a sample is its path up to the first dot of the name."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[tuple[str, str], int] = {}
    with path.open("rb") as file:
        for name, offset, length in _read_members(path):
            folder, _, base = name.rpartition("/")
            stem, _, suffix = base.partition(".")
            if stem and f".{suffix.lower()}" in SUFFIXES:
                images[f"{folder}/{stem}"] = name, offset, length
            elif suffix in ("cls", "json") and 0 <= length < 2**20:
                file.seek(offset)
                labels[f"{folder}/{stem}", suffix] = _parse_label(file.read(length), suffix, path)
    for key, image in images.items():
        yield *image, labels.get((key, "cls"), labels.get((key, "json"), -1))


class _LimitedFile(io.FileIO):
    """A file with a size limit per read: tarfile alone reads as many bytes as a header says."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= HEADER_LIMIT:
            raise tarfile.ReadError(f"a header has {size:,} bytes, above the limit of {HEADER_LIMIT:,}")
        return super().read(size)


def _read_members(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, length) of each member of a tar but folders. Raises DataError if it is damaged."""
    try:
        with _LimitedFile(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                archive.members = []  # pyright: ignore - tarfile would keep all in memory
                if not member.isdir():
                    is_file = member.isreg() and not member.issparse()
                    yield member.name, member.offset_data, member.size if is_file else NOT_A_FILE
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile also stops at a damaged header
                raise tarfile.ReadError(f"invalid header at byte {archive.offset:,}")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} is cut short or not a tar file: {error}") from error


def _parse_label(data: bytes, suffix: str, path: Path) -> int:
    """The label in a .cls or .json member; -1 if a .json has none."""
    if suffix == "cls":
        if not data.strip().removeprefix(b"-").isdigit():
            raise DataError(f"{path}: a .cls member must contain an integer, got {data[:20]!r}")
        label = int(data)
    else:
        try:
            label = json.loads(data).get("label", -1)
        except (ValueError, AttributeError, RecursionError):
            return -1
        label = label if type(label) is int else -1
    if not -1 <= label < MOST_CLASSES:
        raise DataError(f"{path}: the label {label} is invalid (0 to {MOST_CLASSES - 1:,}, or -1 for none)")
    return label
