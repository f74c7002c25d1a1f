"""Tables of images: parquet files as on the Hugging Face hub.

train-00000-of-00002.parquet      a column of images (bytes, or a struct with bytes) and one of labels

Labels are integers, with class names from the schema, or strings, which are the class names.
"""

import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from plainvit.data.columns import Layout, ParquetFile, check_range, convert_labels, is_text, read_names
from plainvit.data.cores_and_memory import memory_budget
from plainvit.data.decode import DataError, ImageError
from plainvit.data.folders import list_class_folders
from plainvit.data.sources import SPLITS, MissingSplitError, Source, find_part

MEMORY_LIMIT = 4 * 2**30  # bytes of images that a process and its workers keep in memory at most
SLOW_GROUP = 8 * 2**20  # bytes of a row group that is slow to decode for each image
INDEX = "index.parquet"  # the index of tar shards (shards.py), not a table of images
log = logging.getLogger("plainvit")


# Files of each split --------------------------------------------------------------------------------------------------


def has_parquet(folder: Path) -> bool:
    return bool(_find_parquet_files(folder))


def _find_parquet_files(folder: Path) -> list[Path]:
    """Files in the folder, in its subfolders and in CONFIG/SPLIT/ (the hub's layout), without a full search."""
    files = [*sorted(folder.glob("*.parquet")), *sorted(folder.glob("*/*.parquet"))]
    split_names = list(chain.from_iterable(SPLITS.values()))
    for subfolder in list_class_folders(folder):
        for split_name in split_names:
            path = f"{folder}/{subfolder}/{split_name}"
            if os.path.isdir(path):  # noqa: PTH112 - there may be thousands of classes
                files += sorted(Path(path).glob("*.parquet"))
    return [path for path in files if path.name != INDEX]


def open_parquet(path: Path, split: str) -> "ParquetSource":
    """Open a file or a folder: train-00.parquet, data/train-00000-of-00002.parquet, all/train/0000.parquet."""
    folder, files = (path, _find_parquet_files(path)) if path.is_dir() else (path.parent, [path])
    by_split = group_by_split(files, folder, split)
    folders = sorted({str(file.parent.relative_to(folder)) for file in by_split[split]})
    if len(folders) > 1:  # configurations of one set, whose rows would have equal names
        raise DataError(f"{folder} has {split} files in several folders ({', '.join(folders)}): give one of them")
    return ParquetSource(by_split[split], by_split["train"] or files)


def group_by_split(files: Sequence[Path], folder: Path, split: str) -> dict[str, list[Path]]:
    """The files of each split, by the names of the files and their folders; there must be some of `split`.

    If no name contains a split, all are training files.
    """
    splits = [_find_split(file, folder) for file in files]
    default = None if any(splits) else "train"
    groups: dict[str, list[Path]] = {name: [] for name in SPLITS}
    for file, own in zip(files, splits, strict=True):
        name = own or default
        if name:
            groups[name].append(file)
    if not groups[split]:
        names = ", ".join(file.name for file in files[:4]) + (", ..." if len(files) > 4 else "")
        raise MissingSplitError(f"{folder} has no {split} split: no file or folder is named after it ({names})")
    return groups


def _find_split(path: Path, folder: Path) -> str | None:
    """The split that a path below a folder is named after, from the innermost name outwards."""
    for name in reversed(path.relative_to(folder).parts):
        split = _parse_split(name)
        if split:
            return split
    return None


def _parse_split(name: str) -> str | None:
    """The split in the name of a file or folder."""
    for split, synonyms in SPLITS.items():
        if re.match(rf"({'|'.join(synonyms)})([-_.]|$)", name):
            return split
    return None


# Source ---------------------------------------------------------------------------------------------------------------


class ParquetSource(Source):
    """Rows of several files. If labels are strings, the classes are those in `class_paths`."""

    def __init__(self, paths: Sequence[Path], class_paths: Sequence[Path] = ()) -> None:
        self.paths, self.class_paths = list(paths), list(class_paths or paths)
        self._files = [ParquetFile(path) for path in self.paths]
        layout = self._files[0].layout
        for file in self._files[1:]:
            if file.layout != layout:
                raise DataError(f"{file.path} has other columns or class names than {self.paths[0].name}")
        self._groups = [(file, group) for file in self._files for group in range(len(file.rows))]
        self._group_ends = np.cumsum([rows for file in self._files for rows in file.rows], dtype=np.int64)
        self._file_ends = np.cumsum([sum(file.rows) for file in self._files], dtype=np.int64)
        self.labels, self.classes = self._read_labels(layout)
        self._images: dict[int, pa.ChunkedArray] = {}  # of each group; of the last one if memory is short
        self._fits: bool | None = None  # whether all images fit into memory; None until they are loaded
        self._lock = threading.Lock()

    def _read_labels(self, layout: Layout) -> tuple[np.ndarray, tuple[str, ...]]:
        where, names = self.paths[0].parent, layout.names
        if layout.label is None:
            return check_range(np.full(sum(sum(file.rows) for file in self._files), -1), names, where)
        columns = [file.read_labels() for file in self._files]
        if not names and all(is_text(column.type) for column in columns):
            others = [] if self.class_paths == self.paths else [ParquetFile(path) for path in self.class_paths]
            names = read_names([file.read_labels() for file in others] or columns)
        labels = [convert_labels(column, names, path) for column, path in zip(columns, self.paths, strict=True)]
        return check_range(np.concatenate(labels), names, where)

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self._files)

    def is_sequential(self) -> bool:
        return self._fits is False

    def load(self) -> None:
        """Read all images into memory if they fit, once for this process and the workers that it forks."""
        if self._fits is not None:
            return
        limit, total = min(MEMORY_LIMIT, memory_budget()), 0
        for number in range(len(self._groups) if self.total_bytes <= limit else 0):
            self._images[number] = self._read_group(number)
            total += self._images[number].nbytes
            if total > limit:  # more than the files: parquet stores equal images once
                self._images.clear()
                break
        self._fits = len(self._images) == len(self._groups)
        mean = self.total_bytes // max(len(self._groups), 1)
        if not self._fits and mean > SLOW_GROUP:
            log.warning(
                "%s: each read decodes a row group of %d MiB, because the images do not fit into memory; "
                "`plainvit data pack` writes a copy that reads faster",
                self.paths[0].parent,
                mean >> 20,
            )

    def read(self, index: int) -> bytes:
        number, row = find_part(self._group_ends, index)
        images = self._images.get(number)
        if images is None:
            with self._lock:
                self.load()
                if number not in self._images:
                    self._images = {number: self._read_group(number)}
                images = self._images[number]
        data = images[row].as_py()
        if not data:
            raise ImageError("the row has no image bytes, only a path or nothing")
        return data

    def identify(self, index: int) -> bytes:
        """The image, or its name if the files are so large that reading all would take minutes.

        The limit is the same on every machine, so that the same images are held out.
        """
        return self.read(index) if self.total_bytes <= MEMORY_LIMIT else self.name(index).encode()

    def _read_group(self, number: int) -> pa.ChunkedArray:
        file, group = self._groups[number]
        return file.read_images(group)

    def name(self, index: int) -> str:
        number, row = find_part(self._file_ends, index)
        return f"{self.paths[number].name}#{row}"

    def files(self) -> Iterator[str]:
        return map(str, self.paths)

    def __getstate__(self) -> dict[str, Any]:
        """What another machine needs to open the files itself."""
        return {name: getattr(self, name) for name in ("paths", "class_paths", "spec", "split")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["paths"], state["class_paths"])
        vars(self).update(state)
