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
from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import SPLITS, SUFFIXES, AbsentSplit, Names, Source, class_names

IN_MEMORY = 4 * 2**30  # parquet files up to this size in all are held in memory, larger ones read by row group
INDEX = "index.parquet"
UNFINISHED = "UNFINISHED"  # lies in a packed folder until its index is written: half a pack must not look like a whole
MOST_CLASSES = 1_000_000  # a larger label without class names is damage
INDEXED = {"shard": pa.string(), "name": pa.string(), "offset": pa.int64(), "length": pa.int64(), "label": pa.int64()}


def fetch(address: str) -> Path:
    """The parquet files of a hub data set: downloaded, or found in the hub's cache."""
    return hub.fetch(address, ["*.parquet", "**/*.parquet"], kind="dataset")


def _parquet_files(folder: Path) -> list[Path]:
    """At the top, in folders, and in CONFIG/SPLIT/ as the hub converts a set; never a walk through a million images."""
    words = [word for names in SPLITS.values() for word in names]
    asked = (f"{folder}/{top}/{word}" for top in class_names(folder) for word in words)
    deep = [part for part in asked if os.path.isdir(part)]  # noqa: PTH112  (thousands of classes: Path is slow)
    found = [*sorted(folder.glob("*.parquet")), *sorted(folder.glob("*/*.parquet"))]
    found += [path for part in deep for path in sorted(Path(part).glob("*.parquet"))]
    return [path for path in found if path.name != INDEX]


def has_parquet(folder: Path) -> bool:
    return bool(_parquet_files(folder))


def open_parquet(folder: Path, split: str) -> Source:
    """Files named after their split: train-00.parquet, data/train-00000-of-00002.parquet, all/train/0000.parquet."""
    files = _parquet_files(folder)
    chosen = [path for path in files if _split_of(path, folder) == split]
    if not chosen and split == "train" and not any(_split_of(path, folder) for path in files):
        chosen = files  # one set without splits
    if not chosen:
        raise AbsentSplit(
            f"{folder} has no {split} split among its parquet files ({', '.join(p.name for p in files[:4])})"
        )
    configs = sorted({_config_of(path, folder) for path in chosen})
    if len(configs) > 1 and chosen is not files:
        raise DataError(f"{folder} holds several sets, {', '.join(configs)}: name the folder of one of them")
    return Parquet(chosen)


def _split_of(path: Path, folder: Path) -> str | None:
    return next((split for part in reversed(path.relative_to(folder).parts) if (split := _meant(part))), None)


def _meant(part: str) -> str | None:
    """The split that a file or a folder is named after."""
    for split, names in SPLITS.items():
        if any(part == name or part.startswith((f"{name}-", f"{name}_", f"{name}.")) for name in names):
            return split
    return None


def _config_of(path: Path, folder: Path) -> str:
    """What lies above the split: a set on the hub may hold several versions of itself, which must not be mixed."""
    parts = list(path.relative_to(folder).parts)
    while parts and not _meant(parts[-1]):
        parts.pop()
    return "/".join(parts[:-1]) or "."


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is cut short or damaged: {(str(error).splitlines() or ['it cannot be read'])[0]}")


def _whole_numbers(column: pa.ChunkedArray, where: str) -> np.ndarray:
    if not pa.types.is_integer(column.type) or column.null_count:
        kind = f"{column.null_count} empty cells" if column.null_count else f"{column.type}"
        raise DataError(f"{where} should hold whole numbers, but has {kind}")
    return column.to_numpy().astype(np.int64)


def _labelled(labels: np.ndarray, names: tuple[str, ...], where: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as int32 and their classes; numbers stand for names that are not given."""
    top = int(labels.max(initial=-1))
    if top >= (len(names) or MOST_CLASSES) or labels.min(initial=0) < -1:
        raise DataError(f"{where} has labels outside its list of {len(names) or MOST_CLASSES:,} classes")
    return labels.astype(np.int32), names or tuple(map(str, range(top + 1)))


class Parquet(Source):
    """Columns `image` (bytes, or a struct with bytes and path) and `label`; class names from the schema."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._files = [_opened(path) for path in paths]
        self._image, label, names = _layout(paths, self._files)
        self.labels, self.classes = _labelled(self._read_labels(label), names, paths[0].parent)
        groups = [[file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] for file in self._files]
        self._homes = [(f, i) for f, sizes in enumerate(groups) for i in range(len(sizes))]
        self._first = [int(end) - size for sizes in groups for end, size in zip(np.cumsum(sizes), sizes, strict=True)]
        self._ends = np.cumsum([size for sizes in groups for size in sizes])
        self._keep = sum(path.stat().st_size for path in paths) <= IN_MEMORY
        self._columns: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def files(self) -> Iterator[str]:
        return map(str, self.paths)

    def _read_labels(self, label: str | None) -> np.ndarray:
        if label is None:
            return np.full(sum(file.metadata.num_rows for file in self._files), -1, np.int64)
        parts: list[np.ndarray] = []
        for path, file in zip(self.paths, self._files, strict=True):
            try:
                column = file.read([label]).column(0)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(path, error) from error
            parts.append(_whole_numbers(column, f"the column {label} of {path}"))
        return np.concatenate(parts)

    def read(self, index: int) -> bytes:
        group, row = self._place(index)
        return self._column(group)[row].as_py() or b""

    def _place(self, index: int) -> tuple[int, int]:
        """(group, row inside it)."""
        group = int(np.searchsorted(self._ends, index, "right"))
        return group, index - (int(self._ends[group - 1]) if group else 0)

    def _column(self, group: int) -> Any:
        with self._lock:
            if group in self._columns:
                self._columns.move_to_end(group)
                return self._columns[group]
            file, inside = self._homes[group]
            try:
                column = self._files[file].read_row_group(inside, [self._image]).column(0).combine_chunks()
            except (pa.ArrowException, OSError) as error:
                raise _damaged(self.paths[file], error) from error
            if pa.types.is_struct(column.type):
                column = column.field("bytes")
            self._columns[group] = column
            if not self._keep and len(self._columns) > 4:
                self._columns.popitem(last=False)
            return column

    def name(self, index: int) -> str:
        group, row = self._place(index)
        return f"{self.paths[self._homes[group][0]].name}#{self._first[group] + row}"

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to open the files for itself."""
        return {"paths": self.paths, "spec": self.spec, "split": self.split}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["paths"])
        self.spec, self.split = state["spec"], state["split"]


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _layout(paths: list[Path], files: list[pq.ParquetFile]) -> tuple[str, str | None, tuple[str, ...]]:
    """(column of images, column of labels, class names), on which all files must agree."""
    first, *others = [_columns(path, file.schema_arrow) for path, file in zip(paths, files, strict=True)]
    for path, other in zip(paths[1:], others, strict=True):
        if other[:2] != first[:2]:
            raise DataError(f"{path} has other columns than {paths[0].name}: {other[:2]}, not {first[:2]}")
        if other[2] != first[2]:
            raise DataError(f"{path} has other class names than {paths[0].name}, so its labels mean something else")
    return first


def _columns(path: Path, schema: pa.Schema) -> tuple[str, str | None, tuple[str, ...]]:
    image = next((name for name in ("image", "img", "jpg") if name in schema.names), None)
    label = next((name for name in ("label", "labels", "fine_label", "cls") if name in schema.names), None)
    if image is None:
        raise DataError(f"{path} has no column of images: its columns are {', '.join(schema.names)}")
    kind = schema.field(image).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise DataError(f"{path} has no encoded images in its column {image}, but {kind}")
    return image, label, _hub_names(schema.metadata or {}, label)


def _hub_names(metadata: dict[bytes, bytes], label: str | None) -> tuple[str, ...]:
    """Class names the way the `datasets` library writes them into the schema."""
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label]
        return tuple(str(name) for name in feature["names"])
    except (KeyError, ValueError, TypeError, RecursionError):
        return ()


def has_tars(folder: Path) -> bool:
    ours = any((folder / name).is_file() for name in (INDEX, UNFINISHED))
    return ours or next(folder.glob("*.tar"), None) is not None


def open_tars(folder: Path, split: str) -> Source:
    if (folder / UNFINISHED).is_file():
        raise DataError(f"{folder} was not packed to its end: delete it and pack again")
    table = _read_index(folder / INDEX) if (folder / INDEX).is_file() else scan(folder)
    shards: list[str] = table.column("shard").unique().to_pylist()
    chosen = [name for name in shards if _split_of(folder / name, folder) == split]
    if not chosen and split == "train" and not any(_split_of(folder / name, folder) for name in shards):
        chosen = shards
    if not chosen:
        raise AbsentSplit(f"{folder} has no {split} split among its shards ({', '.join(shards[:4])})")
    return Tars(folder, table.filter(pa.array(np.isin(table.column("shard").to_pylist(), chosen))))


def _read_index(path: Path) -> pa.Table:
    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    missing = [name for name in INDEXED if name not in table.column_names]
    if missing:
        raise DataError(f"{path} lacks the column {missing[0]}: it is no index of shards")
    for name, kind in INDEXED.items():
        column = table.column(name)
        if pa.types.is_integer(kind):
            _whole_numbers(column, f"the column {name} of {path}")
        elif column.type != kind or column.null_count:
            raise DataError(f"the column {name} of {path} should hold names, but has {column.type}")
    strangers = [name for name in table.column("shard").unique().to_pylist() if Path(name).name != name]
    if strangers:
        raise DataError(f"{path} names the shard {strangers[0]!r}, which is outside its folder")
    return table


def _described(table: pa.Table, folder: Path) -> tuple[str, ...]:
    """Class names as `plainvit data pack` writes them into the index."""
    try:
        return tuple(map(str, json.loads((table.schema.metadata or {}).get(b"plainvit", b"{}")).get("classes", ())))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{folder / INDEX} has no readable list of classes: {error}") from error


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
        self.labels, self.classes = _labelled(table.column("label").to_numpy(), _described(table, folder), folder)
        self._check()
        self._files: dict[int, int] = {}

    def files(self) -> Iterator[str]:
        return (str(self.folder / name) for name in self.shards)

    def _check(self) -> None:
        """A shard that is missing or cut short is found before training starts."""
        if min(self._offset.min(initial=0), self._length.min(initial=0)) < 0:
            raise DataError(f"{self.folder / INDEX} is damaged: an offset or a length is below 0")
        ends = np.zeros(len(self.shards), np.int64)
        np.maximum.at(ends, self._shard, self._offset + self._length)
        for name, end in zip(self.shards, ends, strict=True):
            path = self.folder / name
            if not path.is_file():
                raise DataError(f"{self.folder} lacks the shard {name} that its index names")
            if path.stat().st_size < end:
                raise DataError(f"{path} is cut short: its index names images beyond its end")

    def read(self, index: int) -> bytes:
        shard = int(self._shard[index])
        if shard not in self._files:
            self._files[shard] = os.open(self.folder / self.shards[shard], os.O_RDONLY)
        data = os.pread(self._files[shard], int(self._length[index]), int(self._offset[index]))
        if self._crc is not None and zlib.crc32(data) != self._crc[index]:
            raise ImageError(f"{self.name(index)}: its checksum does not match the index")
        return data

    def name(self, index: int) -> str:
        return self._names[index]

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the shards for itself: these descriptors mean nothing there."""
        return {**self.__dict__, "_files": {}}


def scan(folder: Path) -> pa.Table:
    """An index for tars that have none, from their headers: KEY.jpg with KEY.cls or {"label": N} in KEY.json."""
    columns: dict[str, list[Any]] = {name: [] for name in INDEXED}
    for path in sorted(folder.glob("*.tar")):
        for name, offset, length, label in _members(path):
            if not -1 <= label < MOST_CLASSES:
                raise DataError(f"{path} has the label {label} for {name}, outside any list of classes")
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")
            for key, value in zip(columns, (path.name, shown, offset, length, label), strict=True):
                columns[key].append(value)
    return pa.table(columns, schema=pa.schema(list(INDEXED.items())))


def _members(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """(name, offset, length, label) of each image. A sample's key is its name up to the first dot after the folder."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[tuple[str, str], int] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                key = f"{folder}/{stem}"
                if stem and f".{suffix.lower()}" in SUFFIXES:
                    images[key] = member.name, member.offset_data, member.size
                elif suffix in ("cls", "json") and member.size < 2**20:
                    file = archive.extractfile(member)
                    labels[key, suffix] = _label(file.read() if file else b"", suffix)
            _check_end(path, archive.offset)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is cut short or not a tar file: {error}") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    for key, (name, offset, length) in images.items():
        yield name, offset, length, labels.get((key, "cls"), labels.get((key, "json"), -1))


def _check_end(path: Path, offset: int) -> None:
    """tarfile takes a cut or damaged header for the end; the true end is a block of zeros."""
    with path.open("rb") as file:
        file.seek(offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"its list of members breaks off at byte {offset:,}")


def _label(data: bytes, suffix: str) -> int:
    """-1 where a description has none; a .cls that holds no whole number is an error."""
    if suffix == "cls":
        if not data.strip().removeprefix(b"-").isdigit():
            raise ValueError(f"a .cls member should hold a whole number, but has {data[:20]!r}")
        return int(data)
    try:
        label = json.loads(data).get("label", -1)
    except (ValueError, AttributeError, RecursionError):
        return -1
    return label if type(label) is int else -1
