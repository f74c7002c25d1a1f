"""Columns of parquet files: which holds images, which labels, and the files that they are read from."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plainvit.data.decode import DataError
from plainvit.data.folders import order_classes
from plainvit.errors import first_line

MAX_CLASSES = 1_000_000


class Layout(NamedTuple):
    """The columns of a file and its class names, if the schema has them."""

    image: str
    label: str | None
    names: tuple[str, ...]


# Files ----------------------------------------------------------------------------------------------------------------


def map_file(path: Path) -> pa.MemoryMappedFile:
    """Open a file for pyarrow, whose other functions read a path such as lr:3e-4/train.parquet as a URI.

    A Python file object would not do: pyarrow's threads may release it while the interpreter exits, which aborts.
    """
    return pa.memory_map(os.fsencode(path))  # pyright: ignore[reportArgumentType]


def write_table(table: pa.Table, path: Path) -> None:
    """Write to an open file, not to a path, for the same reason."""
    with path.open("wb") as file:
        pq.write_table(table, file, compression="zstd")


@contextlib.contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Turn pyarrow's errors into a DataError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # ValueError: an empty file cannot be mapped
        raise DataError(f"{path} is truncated or damaged: {first_line(error)}") from error


class ParquetFile:
    """An open file. To read one image, parquet decodes its whole row group: up to thousands of images."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with report_damage(path):
            self.file = pq.ParquetFile(map_file(path))
        self.layout, self.bytes = find_columns(path, self.file.schema_arrow), path.stat().st_size
        self.rows = [self.file.metadata.row_group(group).num_rows for group in range(self.file.num_row_groups)]

    def read_labels(self) -> pa.ChunkedArray:
        with report_damage(self.path):
            return self.file.read([self.layout.label], use_threads=False).column(0)

    def read_images(self, group: int) -> pa.ChunkedArray:
        with report_damage(self.path):
            column = self.file.read_row_group(group, [self.layout.image], use_threads=False).column(0)
        if not pa.types.is_struct(column.type):
            return column
        return pa.chunked_array([chunk.field("bytes") for chunk in column.chunks], column.type.field("bytes").type)


def find_columns(path: Path, schema: pa.Schema) -> Layout:
    image = next((name for name in ("image", "img", "jpg") if name in schema.names), None)
    label = next((name for name in ("label", "labels", "fine_label", "cls") if name in schema.names), None)
    if image is None:
        raise DataError(f"{path} has no column image, img or jpg: its columns are {', '.join(schema.names)}")
    kind = schema.field(image).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if is_text(kind):
        raise DataError(f"{path} contains image paths, not bytes: give the folder of the images, or a labels.csv")
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise DataError(f"the column {image} of {path} must contain encoded images, got {kind}")
    try:  # class names as the `datasets` library stores them
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]
        names = tuple(str(name) for name in feature["names"])
    except (KeyError, ValueError, TypeError, RecursionError):
        names = ()
    return Layout(image, label, names)


# Labels ---------------------------------------------------------------------------------------------------------------


def is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def read_names(columns: Sequence[pa.ChunkedArray]) -> tuple[str, ...]:
    """The distinct strings of the label columns, in label order."""
    names: set[str] = set()
    for column in columns:
        names.update(column.unique().to_pylist())
    return tuple(order_classes(names - {None}))


def convert_labels(column: pa.ChunkedArray, names: tuple[str, ...], where: Path) -> np.ndarray:
    """Labels as integers; strings are looked up in the class names."""
    if is_text(column.type):
        labels = pc.index_in(column.cast(pa.string()), value_set=pa.array(names, pa.string()))  # pyright: ignore
        if labels.null_count:
            unknown = column.filter(labels.is_null())[0].as_py()
            problem = f"the label {unknown!r}, which the training images lack" if unknown else "empty labels"
            raise DataError(f"{where} has {problem}")
        return labels.to_numpy().astype(np.int64)
    if not pa.types.is_integer(column.type) or column.null_count:
        content = f"{column.null_count} empty cells" if column.null_count else f"{column.type}"
        raise DataError(f"the labels of {where} must be integers or strings, got {content}")
    return column.to_numpy().astype(np.int64)


def check_range(labels: np.ndarray, names: tuple[str, ...], where: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as int32 and their classes, which are numbers if `names` is empty."""
    if len(names) > MAX_CLASSES:
        raise DataError(f"{where} has {len(names):,} classes, over the limit of {MAX_CLASSES:,}")
    top = int(labels.max(initial=-1))
    if top >= (len(names) or MAX_CLASSES) or labels.min(initial=0) < -1:
        raise DataError(f"{where} has labels outside its {len(names) or MAX_CLASSES:,} classes")
    return labels.astype(np.int32), names or tuple(map(str, range(top + 1)))
