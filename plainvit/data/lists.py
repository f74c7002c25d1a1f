"""Lists of image files with labels.

labels.csv      file,label[,split]; without a header it has these columns in this order
classes.txt     fixes the order of the classes where it is next to the list
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from plainvit.config import nearest
from plainvit.data.decode import DataError
from plainvit.data.folders import order_classes
from plainvit.data.sources import SPLITS, SUFFIXES, Files, MissingSplitError, Source

COLUMNS = {
    "file": ("file", "file_name", "path", "filename", "image"),
    "label": ("label", "class"),
    "split": ("split",),
}
LIST = "labels.csv"
LIST_LIMIT = 2**30  # bytes


class _Row(NamedTuple):
    line: int
    file: str
    label: str
    split: str


def find_list(folder: Path) -> Path | None:
    """The list in a folder, if there is one."""
    return folder / LIST if (folder / LIST).is_file() else None


def open_list(path: Path, split: str, *, folder_of: str = "", classes: Sequence[str] | None = None) -> Source:
    """Open the images of one split.

    Rows without a split are training images. In a split folder (`folder_of` names its split) all rows belong to it.
    `classes` overrides the classes of the list.
    """
    rows = _read_rows(path)
    classes = _find_classes(path, rows) if classes is None else classes
    number = {name: label for label, name in enumerate(classes)}
    for row in rows:
        problem = _find_problem(row, number, folder_of)
        if problem:
            raise DataError(f"{path} line {row.line}: {problem}")
    chosen = [row for row in rows if (row.split or folder_of or "train") in SPLITS[split]]
    if not chosen:
        raise MissingSplitError(f"{path} lists no images for the {split} split")
    return Files(path.parent, [row.file for row in chosen], [number[row.label] for row in chosen], classes)


def list_classes(path: Path) -> list[str]:
    return _find_classes(path, _read_rows(path))


def _find_classes(path: Path, rows: Sequence[_Row]) -> list[str]:
    return _read_class_list(path.with_name("classes.txt")) or order_classes({row.label for row in rows})


def _read_class_list(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        names = [name for name in path.read_text(encoding="utf-8-sig").split("\n") if name]
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from error
    if len(set(names)) < len(names):
        raise DataError(f"{path} lists a class twice: remove the duplicate")
    return names


def _find_problem(row: _Row, classes: dict[str, int], folder_of: str) -> str:
    """What is wrong with a row; empty if nothing."""
    split_names = [name for names in SPLITS.values() for name in names]
    path = Path(row.file)
    if row.split not in ("", *split_names):
        return f"the split {row.split!r} is unknown; {nearest(row.split, split_names)}"
    if folder_of and row.split and row.split not in SPLITS[folder_of]:
        return f"the split {row.split!r} contradicts the folder, which holds the {folder_of} split"
    if row.label not in classes:
        return f"the label {row.label!r} is not in classes.txt, or not among the classes of the training images"
    if "\0" in row.file:
        return f"{row.file!r} is not a valid file name"
    if path.is_absolute() or ".." in path.parts:
        return f"{row.file!r} is outside the list's folder"
    return ""


def _read_rows(path: Path) -> list[_Row]:
    if path.stat().st_size > LIST_LIMIT:
        raise DataError(f"{path} is larger than {LIST_LIMIT >> 30} GiB, the limit for a list of images")
    rows: list[_Row] = []
    line = 0
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
        try:
            for line, cells in _read_csv(file):
                values = {key: next(filter(None, map(cells.get, names)), "") for key, names in COLUMNS.items()}
                if not values["file"] or not values["label"]:
                    expected = f"expected the columns file,label[,split], found {', '.join(map(repr, list(cells)[:6]))}"
                    raise DataError(f"{path} line {line} lacks a file or a label: {expected}")
                rows.append(_Row(line, **values))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} is not a well-formed list after line {line}: {error}") from error
    return rows


def _read_csv(file: TextIO) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows as dicts by the header's names; a first row that starts with an image's name is not a header."""
    reader = csv.reader(file)
    header: list[str] | None = None
    for cells in reader:
        if not cells:
            continue
        if header is None:
            has_no_header = len(cells) in (2, 3) and cells[0].lower().endswith(SUFFIXES)
            header = list(COLUMNS)[: len(cells)] if has_no_header else cells
            if not has_no_header:
                continue
        yield reader.line_num, dict(zip(header, cells, strict=False))
