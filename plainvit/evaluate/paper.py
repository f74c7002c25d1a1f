"""Tables 2 and 5 to 9 of the ViT paper as data, with your evaluations as additional rows.

    plainvit paper 5 runs/cifar evaluations/pets

Source: arXiv 2010.11929; the numbers are in paper.json. Rows are models and columns are data sets.
"""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from plainvit.data.known import official_split
from plainvit.evaluate.card import read_card, read_run_settings

Cell = Any  # a number, [mean, standard deviation], text as printed, or None where it is not reported


@dataclass(frozen=True)
class PaperTable:
    """One table; `columns` maps each title to its data set, or to "" where the column has none."""

    number: int
    title: str
    caption: str
    digits: int
    notes: list[str]
    columns: dict[str, str]
    rows: list[tuple[str, list[Cell]]]


def tables() -> dict[int, PaperTable]:
    """All stored tables, by number."""
    stored = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))["tables"]
    return {int(key): PaperTable(int(key), **part | {"columns": dict(part["columns"])}) for key, part in stored.items()}


def table(number: int) -> PaperTable:
    known = tables()
    if number not in known:
        raise ValueError(f"Table {number} is not stored: choose one of {', '.join(map(str, known))}")
    return known[number]


def add_cards(paper: PaperTable, paths: Sequence[Path]) -> PaperTable:
    """Appends your results: one row per pre-trained model, with the mean over its runs for each dataset."""
    by_model: dict[str, dict[str, list[float]]] = {}
    for path in dict.fromkeys(paths):
        card = read_card(path)
        spec = card.data["spec"].replace("vtab/", "vtab1000/")  # both have the same test images
        if not spec or spec not in paper.columns.values():
            raise ValueError(
                f"{path}: Table {paper.number} has no column for {spec or 'a folder'}, only {', '.join(paper.columns)}"
            )
        if card.data["split"] not in ("test", official_split(spec, "test")):
            raise ValueError(f"{path} is on the {card.data['split']} split, but the paper reports the test split")
        init = str(Path(read_run_settings(path, card).get("init") or card.name))
        by_model.setdefault(init, {}).setdefault(spec, []).append(100 * card.metrics["top1"])
    names = Counter(Path(init).name for init in by_model)
    rows = []
    for init, results in by_model.items():
        name = Path(init).name if names[Path(init).name] == 1 else init
        rows.append((f"yours: {name}", [_summarize(results.get(spec, [])) for spec in paper.columns.values()]))
    return replace(paper, rows=[*paper.rows, *rows])


def _summarize(values: list[float]) -> Cell:
    """The mean and standard deviation of several values, a single value, or None without any."""
    if len(values) > 1:
        return [statistics.fmean(values), statistics.stdev(values)]
    return values[0] if values else None


def render(paper: PaperTable) -> Group:
    """The table for a terminal, transposed where it has more columns than rows."""
    grid = [["", *paper.columns], *([name, *_format_row(paper, cells)] for name, cells in paper.rows)]
    grid = list(zip(*grid, strict=True)) if len(paper.columns) > len(paper.rows) else grid
    shown = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for column, title in enumerate(grid[0]):
        shown.add_column(Text(title.replace(" (", "\n(")), justify="right" if column else "left", overflow="fold")
    for line in grid[1:]:
        shown.add_row(*map(Text, line))
    notes = [Text(f"- {note}", style="dim") for note in paper.notes]
    return Group(Text(f"Table {paper.number}: {paper.title}", style="bold"), Text(f"{paper.caption}\n"), shown, *notes)


def _format_row(paper: PaperTable, cells: Sequence[Cell]) -> list[str]:
    column_digits = [paper.digits if spec else 0 for spec in paper.columns.values()]
    return [_format_cell(cell, digits) for cell, digits in zip(cells, column_digits, strict=True)]


def _format_cell(cell: Cell, digits: int) -> str:
    match cell:
        case [mean, spread]:
            return f"{mean:,.{digits}f}±{spread:.{digits}f}"
        case float() | int():
            return f"{cell:,.{digits}f}"
    return str(cell or "-")
