"""Lists of image files with labels.

labels.csv      a header and lines of file,label[,split]
"""

import csv
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from plainvit.config import nearest
from plainvit.data.decode import DataError
from plainvit.data.folders import order_classes
from plainvit.data.sources import SPLITS, FileSource, MissingSplitError, Source, is_inside

COLUMNS = {
    "file": ("file", "file_name", "path", "filename", "image"),
    "label": ("label", "class"),
    "split": ("split",),
}
SPLIT_NAMES = ("", *chain.from_iterable(SPLITS.values()))
LIST = "labels.csv"
LIST_LIMIT = 2**30  # bytes


class _Row(NamedTuple):
    file: str
    label: str
    split: str


def open_list(path: Path, split: str) -> Source:
    """Open the images of one split; rows without a split are training images."""
    rows = _read_rows(path)
    classes = order_classes({row.label for row in rows})
    number = {name: label for label, name in enumerate(classes)}
    chosen = [row for row in rows if (row.split or "train") in SPLITS[split]]
    if not chosen:
        raise MissingSplitError(f"{path} lists no images for the {split} split")
    return FileSource(path.parent, [row.file for row in chosen], [number[row.label] for row in chosen], classes)


def _read_rows(path: Path) -> list[_Row]:
    if path.stat().st_size > LIST_LIMIT:
        raise DataError(f"{path} is larger than {LIST_LIMIT >> 30} GiB, the limit for a list of images")
    rows: list[_Row] = []
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
        reader = csv.DictReader(file)
        try:
            for cells in reader:
                row = _Row(*(_read_cell(cells, synonyms) for synonyms in COLUMNS.values()))
                extra_cells = cells.get(None) or ()  # pyright: ignore[reportArgumentType, reportCallIssue]
                problem = _find_problem(row, reader.fieldnames or (), any(extra_cells))
                if problem:
                    raise DataError(f"{path} line {reader.line_num}: {problem}")
                rows.append(row)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not valid UTF-8: save it as UTF-8") from error
        except csv.Error as error:
            raise DataError(f"{path} is not valid CSV after line {reader.line_num}: {error}") from error
    return rows


def _read_cell(cells: dict[str, str], synonyms: Sequence[str]) -> str:
    """The first cell that is not empty among columns with these names."""
    for name in synonyms:
        if cells.get(name):
            return cells[name]
    return ""


def _find_problem(row: _Row, header: Sequence[str], has_extra_cells: bool) -> str:
    """What is wrong with a row; empty if nothing."""
    if has_extra_cells:
        return f"it has more than the {len(header)} cells of the header: put a name with a comma into quotes"
    if not row.file or not row.label:
        columns = ", ".join(map(repr, header[:6]))
        return f"a file or a label is missing: expected the columns file,label[,split], got {columns}"
    if row.split not in SPLIT_NAMES:
        return f"the split {row.split!r} is unknown; {nearest(row.split, SPLIT_NAMES[1:])}"
    return "" if is_inside(row.file) else f"{row.file!r} is outside the list's folder"
