"""Shards: parquet as the Hugging Face hub stores it, and WebDataset tars with an index for random access.

    plainvit data pack photos/ shards/ --side 320

A packed folder holds SPLIT-00000.tar ... (plain tars: KEY.jpg, KEY.cls) and index.parquet with each image's shard,
offset, length, label, size and checksum. A folder of tars without an index is scanned once and read just the same.
"""

import json
import os
import tarfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from plainvit import hub
from plainvit.data.decode import DataError
from plainvit.data.sources import SPLITS, SUFFIXES, Names, Source

IN_MEMORY = 4 * 2**30  # parquet files up to this size in all are held in memory, larger ones read by row group
INDEX = "index.parquet"


def fetch(address: str) -> Path:
    """The parquet files of a hub data set: downloaded, or found in the hub's cache."""
    return hub.fetch(address, ["*.parquet", "**/*.parquet"], kind="dataset")


def _parquet_files(folder: Path) -> list[Path]:
    return [
        path for path in sorted(folder.glob("*.parquet")) + sorted(folder.glob("*/*.parquet")) if path.name != INDEX
    ]


def has_parquet(folder: Path) -> bool:
    return bool(_parquet_files(folder))


def open_parquet(folder: Path, split: str) -> Source:
    """Files named after their split: train-00.parquet, data/train-00000-of-00002.parquet, train/0000.parquet."""
    files = _parquet_files(folder)
    chosen = [path for path in files if _split_of(path, folder) == split]
    if not chosen and split == "train" and not any(_split_of(path, folder) for path in files):
        chosen = files  # one set without splits
    if not chosen:
        raise DataError(
            f"{folder} has no {split} split among its parquet files ({', '.join(p.name for p in files[:4])})"
        )
    return Parquet(chosen)


def _split_of(path: Path, folder: Path) -> str | None:
    for part in reversed(path.relative_to(folder).parts):
        for split, names in SPLITS.items():
            if any(part == name or part.startswith((f"{name}-", f"{name}_", f"{name}.")) for name in names):
                return split
    return None


class Parquet(Source):
    """Columns `image` (bytes, or a struct with bytes and path) and `label`; class names from the schema."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        try:
            self._files = [pq.ParquetFile(path, memory_map=True) for path in paths]
            self.labels, self.classes = self._read_labels()
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{paths[0].parent}: a parquet file is cut short or damaged ({reason})") from error
        groups = [file.metadata.row_group(i).num_rows for file in self._files for i in range(file.num_row_groups)]
        self._homes = [(f, i) for f, file in enumerate(self._files) for i in range(file.num_row_groups)]
        self._ends = np.cumsum(groups)
        self._keep = sum(path.stat().st_size for path in paths) <= IN_MEMORY
        self._columns: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def _read_labels(self) -> tuple[np.ndarray, tuple[str, ...]]:
        schema = self._files[0].schema_arrow
        self._image = next((name for name in ("image", "img", "jpg") if name in schema.names), "")
        label = next((name for name in ("label", "labels", "fine_label", "cls") if name in schema.names), None)
        if not self._image:
            raise DataError(f"{self.paths[0]} has no column of images: its columns are {', '.join(schema.names)}")
        rows = sum(file.metadata.num_rows for file in self._files)
        labels = np.full(rows, -1, np.int32)
        if label:
            columns = [file.read([label]).column(0) for file in self._files]
            labels = np.concatenate([column.to_numpy() for column in columns]).astype(np.int32)
        classes = _hub_names(schema.metadata or {}, label) or tuple(map(str, range(labels.max(initial=-1) + 1)))
        if labels.max(initial=-1) >= len(classes) or labels.min(initial=0) < -1:
            raise DataError(f"{self.paths[0].parent} has labels outside its list of {len(classes)} classes")
        return labels, classes

    def read(self, index: int) -> bytes:
        group = int(np.searchsorted(self._ends, index, "right"))
        row = index - (int(self._ends[group - 1]) if group else 0)
        return self._column(group)[row].as_py() or b""

    def _column(self, group: int) -> Any:
        with self._lock:
            if group in self._columns:
                self._columns.move_to_end(group)
                return self._columns[group]
            file, inside = self._homes[group]
            try:
                column = self._files[file].read_row_group(inside, [self._image]).column(0).combine_chunks()
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.paths[file]} is cut short or damaged: {str(error).splitlines()[0]}") from error
            if pa.types.is_struct(column.type):
                column = column.field("bytes")
            self._columns[group] = column
            if not self._keep and len(self._columns) > 4:
                self._columns.popitem(last=False)
            return column

    def name(self, index: int) -> str:
        group = int(np.searchsorted(self._ends, index, "right"))
        row = index - (int(self._ends[group - 1]) if group else 0)
        file, inside = self._homes[group]
        before = sum(self._files[file].metadata.row_group(i).num_rows for i in range(inside))
        return f"{self.paths[file].name}#{before + row}"

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["paths"])


def _hub_names(metadata: dict[bytes, bytes], label: str | None) -> tuple[str, ...]:
    """Class names the way the `datasets` library writes them into the schema."""
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label]
        return tuple(str(name) for name in feature["names"])
    except (KeyError, ValueError, TypeError):
        return ()


def has_tars(folder: Path) -> bool:
    return (folder / INDEX).is_file() or next(folder.glob("*.tar"), None) is not None


def open_tars(folder: Path, split: str) -> Source:
    table = pq.read_table(folder / INDEX) if (folder / INDEX).is_file() else scan(folder)
    shards = [Path(name).name for name in table.column("shard").unique().to_pylist()]
    chosen = [name for name in shards if _split_of(folder / name, folder) == split]
    if not chosen and split == "train" and not any(_split_of(folder / name, folder) for name in shards):
        chosen = shards
    if not chosen:
        raise DataError(f"{folder} has no {split} split among its shards ({', '.join(shards[:4])})")
    return Tars(folder, table.filter(pa.array(np.isin(table.column("shard").to_pylist(), chosen))))


class Tars(Source):
    """Members of tar files read by their offsets; checksums are tested on the way where the index has them."""

    def __init__(self, folder: Path, table: pa.Table) -> None:
        self.folder = folder
        self.shards: list[str] = table.column("shard").unique().to_pylist()
        number = {name: index for index, name in enumerate(self.shards)}
        self._shard = np.array([number[name] for name in table.column("shard").to_pylist()], np.int32)
        self._offset, self._length = (table.column(name).to_numpy() for name in ("offset", "length"))
        self._crc = table.column("crc32").to_numpy() if "crc32" in table.column_names else None
        self._names = Names(table.column("name").to_pylist())
        self.labels = table.column("label").to_numpy().astype(np.int32)
        described = json.loads((table.schema.metadata or {}).get(b"plainvit", b"{}"))
        self.classes = tuple(described.get("classes", ())) or tuple(map(str, range(self.labels.max(initial=-1) + 1)))
        self._check()
        self._files: dict[int, int] = {}

    def _check(self) -> None:
        """A shard that is missing or cut short is found before training starts."""
        for number, name in enumerate(self.shards):
            path, here = self.folder / name, self._shard == number
            if not path.is_file():
                raise DataError(f"{self.folder} lacks the shard {name} that its index names")
            if path.stat().st_size < int((self._offset[here] + self._length[here]).max(initial=0)):
                raise DataError(f"{path} is cut short: its index names images beyond its end")

    def read(self, index: int) -> bytes:
        shard = int(self._shard[index])
        if shard not in self._files:
            self._files[shard] = os.open(self.folder / self.shards[shard], os.O_RDONLY)
        data = os.pread(self._files[shard], int(self._length[index]), int(self._offset[index]))
        if self._crc is not None and zlib.crc32(data) != self._crc[index]:
            raise DataError(f"{self.name(index)}: its checksum does not match the index")
        return data

    def name(self, index: int) -> str:
        return self._names[index]


def scan(folder: Path) -> pa.Table:
    """An index for tars that have none, from their headers: KEY.jpg with KEY.cls or {"label": N} in KEY.json."""
    columns: dict[str, list[Any]] = {name: [] for name in ("shard", "name", "offset", "length", "label")}
    for path in sorted(folder.glob("*.tar")):
        for name, offset, length, label in _members(path):
            for key, value in zip(columns, (path.name, name, offset, length, label), strict=True):
                columns[key].append(value)
    return pa.table(columns)


def _members(path: Path) -> Iterator[tuple[str, int, int, int]]:
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                key, _, suffix = member.name.partition(".")
                if f".{suffix.lower()}" in SUFFIXES:
                    images[key] = member.name, member.offset_data, member.size
                elif suffix in ("cls", "json") and member.size < 2**20:
                    file = archive.extractfile(member)
                    labels[key] = _label(file.read() if file else b"", suffix)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is cut short or not a tar file: {error}") from error
    for key, (name, offset, length) in images.items():
        yield name, offset, length, labels.get(key, -1)


def _label(data: bytes, suffix: str) -> int:
    try:
        return int(data if suffix == "cls" else json.loads(data).get("label", -1))
    except (ValueError, AttributeError, TypeError):
        return -1
