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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plainvit.data.columns import MAX_CLASSES, check_range, map_file, report_damage
from plainvit.data.decode import DataError, ImageError
from plainvit.data.folders import list_class_folders
from plainvit.data.sources import SUFFIXES, Names, Source, check_length
from plainvit.data.tables import INDEX, group_by_split

HEADER_LIMIT = 2**20  # bytes of one header of a tar
UNFINISHED = "UNFINISHED"  # marks a folder whose packing has not finished
NOT_A_FILE = -1  # length of a member that is no regular file
INDEXED = {"shard": pa.string(), "name": pa.string(), "offset": pa.int64(), "length": pa.int64(), "label": pa.int64()}


def has_tars(folder: Path) -> bool:
    """Whether the images of a folder are in tars. A tar next to class folders may be the download of their images."""
    if any((folder / name).is_file() for name in (INDEX, UNFINISHED)):
        return True
    return next(folder.glob("*.tar"), None) is not None and not list_class_folders(folder)


def open_tars(folder: Path, split: str) -> Source:
    """Open one split. If no shard name contains a split, all shards are training images."""
    if (folder / UNFINISHED).is_file():
        raise DataError(f"{folder} is incomplete: delete it and run `plainvit data pack` again")
    if not (folder / INDEX).is_file():
        return TarSource(folder, _scan(group_by_split(sorted(folder.glob("*.tar")), folder, split)[split]))
    table = _read_index(folder / INDEX)
    shards = [folder / name for name in table.column("shard").unique().to_pylist()]
    names = [path.name for path in group_by_split(shards, folder, split)[split]]
    chosen = pc.is_in(table.column("shard"), value_set=pa.array(names))  # pyright: ignore
    return TarSource(folder, table.filter(chosen))


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
        problem = f"{path} names the shard {outside[0]!r}, which is outside its folder"
        raise DataError(f"{problem}: run `plainvit data pack` again")
    return table


class TarSource(Source):
    """Members of tar files, read at their offsets; checksums are verified if the index has them."""

    def __init__(self, folder: Path, table: pa.Table) -> None:
        self.folder = folder
        shards = table.column("shard").combine_chunks().dictionary_encode()
        self.shards, self._shard = shards.dictionary.to_pylist(), shards.indices.to_numpy()
        self._offset, self._length = (table.column(name).to_numpy() for name in ("offset", "length"))
        self._crc = table.column("crc32").to_numpy() if "crc32" in table.column_names else None
        self._names = Names(table.column("name").to_pylist())
        try:
            classes = json.loads((table.schema.metadata or {}).get(b"plainvit", b"{}")).get("classes", ())
            names = tuple(map(str, classes))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{folder / INDEX} has no readable list of classes ({error}): run `plainvit data pack` again"
            ) from error
        self.labels, self.classes = check_range(table.column("label").to_numpy(), names, folder)
        self._check_shards()

    def files(self) -> Iterator[str]:
        return (str(self.folder / name) for name in self.shards)

    def _check_shards(self) -> None:
        """Find missing and truncated shards before training starts."""
        ends = np.zeros(len(self.shards), np.int64)
        np.maximum.at(ends, self._shard, self._offset + self._length)
        for name, end in zip(self.shards, ends, strict=True):
            path = self.folder / name
            if not path.is_file():
                raise DataError(
                    f"{self.folder} lacks the shard {name}, which its index names: run `plainvit data pack` again"
                )
            if path.stat().st_size < end:
                raise DataError(
                    f"{path} is truncated: its index names images beyond its end; run `plainvit data pack` again"
                )

    def read(self, index: int) -> bytes:
        length = int(self._length[index])
        if length == NOT_A_FILE:
            raise ImageError("it is a link, a pipe, a device or a sparse file in the tar: store the image itself")
        check_length(length)
        with io.FileIO(self.folder / self.shards[self._shard[index]]) as file:  # a set may have more than can stay open
            data = os.pread(file.fileno(), length, int(self._offset[index]))
        if self._crc is not None and zlib.crc32(data) != self._crc[index]:
            raise ImageError(f"{self.name(index)}: the checksum does not match the index")
        return data

    def identify(self, index: int) -> bytes:
        """The length and checksum in the index, so that nothing is read."""
        return self.read(index) if self._crc is None else b"%d %d" % (self._length[index], self._crc[index])

    def name(self, index: int) -> str:
        return self._names[index]


def _scan(paths: Iterable[Path]) -> pa.Table:
    """Build an index from the headers of tars with members KEY.jpg and KEY.cls."""
    columns: dict[str, list[Any]] = {key: [] for key in INDEXED}
    for path in paths:
        for name, *numbers in _read_samples(path):
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")  # names may be any bytes
            for column, value in zip(columns.values(), (path.name, shown, *numbers), strict=True):
                column.append(value)
    return pa.table(columns, schema=pa.schema(list(INDEXED.items())))


def _read_samples(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """(name, offset, length, label) of each image. The key of a sample is its path up to the first dot of the name."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    with path.open("rb") as file:
        for name, offset, length in _read_members(path):
            folder, _, base = name.rpartition("/")
            stem, _, suffix = base.partition(".")
            if stem and f".{suffix.lower()}" in SUFFIXES:
                images[f"{folder}/{stem}"] = name, offset, length
            elif suffix == "cls" and 0 <= length < 100:
                file.seek(offset)
                labels[f"{folder}/{stem}"] = _parse_label(file.read(length), path)
    for key, image in images.items():
        yield *image, labels.get(key, -1)


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
        raise DataError(f"{path} is not a complete tar file ({error}): create or copy the shard again") from error


def _parse_label(data: bytes, path: Path) -> int:
    """The label in a .cls member."""
    if not data.strip().removeprefix(b"-").isdigit():
        raise DataError(f"{path}: a .cls member must contain an integer, got {data[:20]!r}")
    label = int(data)
    if not -1 <= label < MAX_CLASSES:
        raise DataError(f"{path}: the label {label} is invalid (0 to {MAX_CLASSES - 1:,}, or -1 for none)")
    return label
