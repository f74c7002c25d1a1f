"""Tables of images: parquet files as on the Hugging Face hub, and folders of `datasets.save_to_disk`.

train-00000-of-00002.parquet      a column of images (bytes, or a struct with bytes) and one of labels
DatasetDict.save_to_disk(DIR)     DIR/train/{state.json, dataset_info.json, data-00000-of-00001.arrow}

Labels are integers, with class names from the schema, or strings, which are the class names.
"""

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plainvit.data.decode import DataError, ImageError
from plainvit.data.group_cache import GroupCache, memory_limit
from plainvit.data.sources import SPLITS, MissingSplitError, Source, class_names, order_classes
from plainvit.disk import read_json

IN_MEMORY = 4 * 2**30  # bytes of decoded row groups that a process and its workers cache together
RECENT = 64 * 2**20  # bytes of further row groups that each process keeps, at least one group
MOST_CLASSES = 1_000_000  # larger labels without class names are invalid
INDEX = "index.parquet"  # the index of tar shards (shards.py), not a table of images
log = logging.getLogger("plainvit")


def map_file(path: Path) -> pa.MemoryMappedFile:
    """Open a file for pyarrow, whose other functions read a path such as lr:3e-4/train.parquet as a URI.

    A Python file object would not do: pyarrow's threads may release it while the interpreter exits, which aborts.
    """
    return pa.memory_map(os.fsencode(path))  # pyright: ignore[reportArgumentType]


def damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is truncated or damaged: {(str(error).splitlines() or ['cannot be read'])[0]}")


# Files of each split --------------------------------------------------------------------------------------------------


def _find_parquet_files(folder: Path) -> list[Path]:
    """Files in the folder, in its subfolders and in CONFIG/SPLIT/ (the hub's layout), without a full search."""
    split_names = [name for names in SPLITS.values() for name in names]
    candidates = (f"{folder}/{top}/{name}" for top in class_names(folder) for name in split_names)
    deep = [part for part in candidates if os.path.isdir(part)]  # noqa: PTH112  (thousands of classes: Path is slow)
    found = [*sorted(folder.glob("*.parquet")), *sorted(folder.glob("*/*.parquet"))]
    found += [path for part in deep for path in sorted(Path(part).glob("*.parquet"))]
    return [path for path in found if path.name != INDEX]


def has_parquet(folder: Path) -> bool:
    return bool(_find_parquet_files(folder))


def open_parquet(folder: Path, split: str) -> "Parquet":
    """Files named after their split: train-00.parquet, data/train-00000-of-00002.parquet, all/train/0000.parquet."""
    files = _find_parquet_files(folder)
    parts = {name: [path for path in files if find_split(path, folder) == name] for name in SPLITS}
    if not any(parts.values()):
        parts["train"] = files
    chosen = parts[split]
    if not chosen:
        names = ", ".join(path.name for path in files[:4])
        raise MissingSplitError(f"{folder} has no {split} split among its parquet files ({names})")
    configs = sorted({_find_config(path, folder) for path in chosen})
    if len(configs) > 1 and chosen is not files:
        raise DataError(f"{folder} has several configurations ({', '.join(configs)}): give the folder of one of them")
    return _warn_if_slow(Parquet(chosen, parts["train"] or files))


def open_table(path: Path, split: str) -> Source:
    """One .parquet or .arrow file: the split in its name, otherwise train."""
    own = _parse_split(path.name) or "train"
    if own != split:
        raise MissingSplitError(f"{path} has no {split} split: by its name it is {own}")
    return _warn_if_slow(Parquet([path])) if path.suffix == ".parquet" else ArrowFiles([path])


def _warn_if_slow(source: "Parquet") -> "Parquet":
    slow = source.largest_uncached_group()
    if slow > RECENT // 8:
        log.warning(
            "%s: each read decodes a row group of %d MiB, because the images do not fit into memory; "
            "`plainvit data pack` writes a copy that reads faster",
            source.paths[0].parent,
            slow >> 20,
        )
    return source


def find_split(path: Path, folder: Path) -> str | None:
    """The split that a path below a folder is named after, from the innermost part outwards."""
    return next((split for part in reversed(path.relative_to(folder).parts) if (split := _parse_split(part))), None)


def _parse_split(part: str) -> str | None:
    """The split in the name of a file or folder."""
    for split, names in SPLITS.items():
        if any(part == name or part.startswith((f"{name}-", f"{name}_", f"{name}.")) for name in names):
            return split
    return None


def _find_config(path: Path, folder: Path) -> str:
    """The path above the split: the configuration of a hub data set, which may have several."""
    parts = list(path.relative_to(folder).parts)
    while parts and not _parse_split(parts[-1]):
        parts.pop()
    return "/".join(parts[:-1]) or "."


def has_saved(folder: Path) -> bool:
    """Whether this is a folder of `datasets.save_to_disk`."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def open_saved(folder: Path, split: str) -> Source:
    """Open a split of a save_to_disk folder: one folder per split, or a single one without splits."""
    if (folder / "state.json").is_file():
        parts = {"train": folder}
    else:
        parts = {name: folder / one for name, names in SPLITS.items() for one in names if (folder / one).is_dir()}
    if split not in parts:
        raise MissingSplitError(f"{folder} has no {split} split: save_to_disk wrote {', '.join(parts) or 'none'}")
    return ArrowFiles(_read_saved_files(parts[split]), _read_saved_files(parts.get("train", parts[split])))


def _read_saved_files(folder: Path) -> list[Path]:
    entries = read_json(folder / "state.json").get("_data_files")
    names = [one.get("filename") for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name or "\0" in name]
    if not names or outside:
        raise DataError(
            f"{folder / 'state.json'} names {repr(outside[0]) if outside else 'no files'}: save the data again"
        )
    return [folder / name for name in names]


# Columns --------------------------------------------------------------------------------------------------------------


def read_integers(column: pa.ChunkedArray, where: str) -> np.ndarray:
    if not pa.types.is_integer(column.type) or column.null_count:
        found = f"{column.null_count} empty cells" if column.null_count else f"{column.type}"
        raise DataError(f"{where} must contain integers, got {found}")
    return column.to_numpy().astype(np.int64)


def check_range(labels: np.ndarray, names: tuple[str, ...], where: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as int32 and their classes, which are numbers if `names` is empty."""
    top = int(labels.max(initial=-1))
    if top >= (len(names) or MOST_CLASSES) or labels.min(initial=0) < -1:
        raise DataError(f"{where} has labels outside its {len(names) or MOST_CLASSES:,} classes")
    return labels.astype(np.int32), names or tuple(map(str, range(top + 1)))


def _is_text(column: pa.ChunkedArray) -> bool:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _read_names(columns: Sequence[pa.ChunkedArray], where: Path) -> tuple[str, ...]:
    """The distinct strings of the label columns, in label order."""
    names = {name for column in columns for name in column.unique().to_pylist() if name is not None}
    if len(names) > MOST_CLASSES:
        raise DataError(f"{where} has {len(names):,} different labels, over the limit of {MOST_CLASSES:,}")
    return tuple(order_classes(names))


def _convert_names(column: pa.ChunkedArray, names: tuple[str, ...], where: str) -> np.ndarray:
    found = pc.index_in(column.cast(pa.string()), value_set=pa.array(names, pa.string()))
    if found.null_count:
        other = column.filter(found.is_null())[0].as_py()
        problem = f"the class {other!r}, which the training images lack" if other else "empty labels"
        raise DataError(f"{where} has {problem}")
    return found.to_numpy().astype(np.int64)


Layout = tuple[str, str | None, tuple[str, ...]]  # column of images, column of labels, class names


def _find_common_layout(paths: Sequence[Path], schemas: Sequence[pa.Schema]) -> Layout:
    """The layout of the files, which must be the same in all."""
    first, *others = [_find_columns(path, schema) for path, schema in zip(paths, schemas, strict=True)]
    for path, other in zip(paths[1:], others, strict=True):
        if other[:2] != first[:2]:
            raise DataError(f"{path} has the columns {other[:2]}, but {paths[0].name} has {first[:2]}")
        if other[2] != first[2]:
            raise DataError(f"{path} has other class names than {paths[0].name}")
    return first


def _find_columns(path: Path, schema: pa.Schema) -> Layout:
    image = next((name for name in ("image", "img", "jpg") if name in schema.names), None)
    label = next((name for name in ("label", "labels", "fine_label", "cls") if name in schema.names), None)
    if image is None:
        raise DataError(f"{path} has no column image, img or jpg: its columns are {', '.join(schema.names)}")
    kind = schema.field(image).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        raise _paths_error(path)
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise DataError(f"the column {image} of {path} must contain encoded images, got {kind}")
    return image, label, _read_hub_names(schema.metadata or {}, label)


def _paths_error(path: Path) -> DataError:
    command = "datasets.Dataset.from_parquet(FILE).cast_column('image', datasets.Image()).save_to_disk(DIR)"
    return DataError(f"{path} contains image paths, not bytes: embed the images with {command}, then use --data DIR")


def _read_hub_names(metadata: dict[bytes, bytes], label: str | None) -> tuple[str, ...]:
    """Class names as the `datasets` library stores them in the schema."""
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label]
        return tuple(str(name) for name in feature["names"])
    except (KeyError, ValueError, TypeError, RecursionError):
        return ()


# Sources --------------------------------------------------------------------------------------------------------------


class Table(Source):
    """Rows of several files. If labels are strings, the classes are those in `class_paths`."""

    def __init__(self, paths: Sequence[Path], class_paths: Sequence[Path] = ()) -> None:
        self.paths, self.class_paths = list(paths), list(class_paths or paths)

    def _set_parts(self, files: list[int], counts: list[int]) -> None:
        """Set the file number and row count of each part (row group or chunk)."""
        self._file_of, self._ends = files, np.cumsum(counts, dtype=np.int64)
        per_file = np.bincount(files, counts, len(self.paths)).astype(np.int64)
        self._first = np.cumsum(per_file) - per_file

    def _locate(self, index: int) -> tuple[int, int]:
        """(part, row in it)."""
        part = int(np.searchsorted(self._ends, index, "right"))
        return part, index - (int(self._ends[part - 1]) if part else 0)

    def name(self, index: int) -> str:
        file = self._file_of[self._locate(index)[0]]
        return f"{self.paths[file].name}#{index - int(self._first[file])}"

    def _set_labels(self, label: str | None, names: tuple[str, ...]) -> None:
        where, columns = self.paths[0].parent, self._read_columns(self.paths, label) if label else []
        titles = [f"the column {label} of {path}" for path in self.paths]
        if label and all(map(_is_text, columns)):
            if not names:
                own = self.class_paths == self.paths
                names = _read_names(columns if own else self._read_columns(self.class_paths, label), where)
            found = [_convert_names(column, names, title) for column, title in zip(columns, titles, strict=True)]
        elif label:
            found = [read_integers(column, title) for column, title in zip(columns, titles, strict=True)]
        else:
            found = [np.full(int(self._ends[-1]) if len(self._ends) else 0, -1, np.int64)]
        self.labels, self.classes = check_range(np.concatenate(found), names, where)

    def _read_columns(self, paths: Sequence[Path], name: str) -> list[pa.ChunkedArray]:
        raise NotImplementedError

    def files(self) -> Iterator[str]:
        return map(str, self.paths)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to open the files itself."""
        return {name: getattr(self, name) for name in ("paths", "class_paths", "spec", "split")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["paths"], state["class_paths"])
        self.__dict__.update(state)


def _require_bytes(data: bytes | None) -> bytes:
    if not data:
        raise ImageError("the row has no image bytes")
    return data


class Parquet(Table):
    """Columns `image` (bytes, or a struct with bytes and path) and `label`; class names from the schema."""

    def __init__(self, paths: Sequence[Path], class_paths: Sequence[Path] = ()) -> None:
        super().__init__(paths, class_paths)
        self._files = [_open_parquet(path) for path in self.paths]
        self._image, label, names = _find_common_layout(self.paths, [file.schema_arrow for file in self._files])
        self._groups = [
            (f, g) for f, file in enumerate(self._files) for g in range(file.num_row_groups)
        ]  # (file, row group)
        groups = [self._files[f].metadata.row_group(g) for f, g in self._groups]
        rows = [group.num_rows for group in groups]
        self._set_parts([f for f, _ in self._groups], rows)
        self._set_labels(label, names)
        chunks = [_find_image_chunk(group, self._image) for group in groups]
        if chunks and all(_is_null(chunk) for chunk in chunks):
            raise _paths_error(self.paths[0])
        self._sizes = [chunk.total_uncompressed_size for chunk in chunks]
        self._cache = GroupCache(rows, self._sizes, memory_limit(IN_MEMORY))
        self._recent: OrderedDict[int, pa.Array] = OrderedDict()
        self._lock = threading.Lock()

    def _read_columns(self, paths: Sequence[Path], name: str) -> list[pa.ChunkedArray]:
        found: list[pa.ChunkedArray] = []
        for path in paths:
            file = self._files[self.paths.index(path)] if path in self.paths else _open_parquet(path)
            try:
                found.append(file.read([name], use_threads=False).column(0))
            except (pa.ArrowException, OSError) as error:
                raise damaged(path, error) from error
        return found

    def largest_uncached_group(self) -> int:
        return max((size for group, size in enumerate(self._sizes) if not self._cache.fits(group)), default=0)

    def read(self, index: int) -> bytes:
        group, row = self._locate(index)
        data = self._cache.read(group, row)
        return _require_bytes(self._decode(group, row) if data is None else data)

    def _decode(self, group: int, row: int) -> bytes | None:
        """Read a row of a group that is not cached yet, or is too large for the cache."""
        with self._lock:
            data = self._cache.read(group, row)  # another thread may have stored it
            if data is not None:
                return data
            if self._cache.fits(group) and self._cache.store(group, self._read_pieces(group)):
                return self._cache.read(group, row)
            if group not in self._recent:
                self._recent[group] = pa.concat_arrays([*self._read_pieces(group)])
            self._recent.move_to_end(group)
            while len(self._recent) > 1 and sum(one.nbytes for one in self._recent.values()) > RECENT:
                self._recent.popitem(last=False)
            return self._recent[group][row].as_py()

    def _read_pieces(self, group: int) -> Iterator[pa.Array]:
        """The images of a row group, 64 rows at a time."""
        file, inside = self._groups[group]
        try:
            batches = self._files[file].iter_batches(64, row_groups=[inside], columns=[self._image], use_threads=False)
            for batch in batches:
                column = batch.column(0)
                yield column.field("bytes") if pa.types.is_struct(column.type) else column
        except (pa.ArrowException, OSError) as error:
            raise damaged(self.paths[file], error) from error


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(map_file(path))
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise damaged(path, error) from error


def _find_image_chunk(group: Any, image: str) -> Any:
    """Metadata of the image column in a row group."""
    chunks = [group.column(at) for at in range(group.num_columns)]
    return next(chunk for chunk in chunks if chunk.path_in_schema in (image, f"{image}.bytes"))


def _is_null(chunk: Any) -> bool:
    statistics = chunk.statistics
    return statistics is not None and statistics.has_null_count and 0 < chunk.num_values == statistics.null_count


class ArrowFiles(Table):
    """Memory-mapped Arrow files: rows are read from the page cache, which all processes share."""

    def __init__(self, paths: Sequence[Path], class_paths: Sequence[Path] = ()) -> None:
        super().__init__(paths, class_paths)
        image, label, names = _find_common_layout(self.paths, [_open_arrow(path).schema for path in self.paths])
        found = [(f, one) for f, images in enumerate(self._read_columns(self.paths, image)) for one in images.chunks]
        self._chunks = [chunk for _, chunk in found]
        self._set_parts([f for f, _ in found], [len(chunk) for chunk in self._chunks])
        self._set_labels(label, names)
        if len(self) and all(chunk.null_count == len(chunk) for chunk in self._chunks):
            raise _paths_error(self.paths[0])

    def _read_columns(self, paths: Sequence[Path], name: str) -> list[pa.ChunkedArray]:
        return [_check_column(path, _open_arrow(path), name) for path in paths]

    def read(self, index: int) -> bytes:
        chunk, row = self._locate(index)
        return _require_bytes(self._chunks[chunk][row].as_py())


def _open_arrow(path: Path) -> pa.Table:
    """Read an Arrow stream, as `datasets` writes it, or an Arrow file with a footer."""
    try:
        file = map_file(path)
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(path, error) from error


def _check_column(path: Path, table: pa.Table, name: str) -> pa.ChunkedArray:
    """Validate and return a column (of images, their bytes): a damaged one could be read out of bounds."""
    try:
        column = table.column(name)
        column.validate()
        if pa.types.is_struct(column.type):
            column = pa.chunked_array([one.field("bytes") for one in column.chunks], column.type.field("bytes").type)
        column.validate(full=True)
    except (pa.ArrowException, KeyError) as error:
        raise damaged(path, error) from error
    return column
