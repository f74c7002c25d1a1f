"""Tables 2 and 5 to 9 of the ViT paper as data, and what a user has evaluated in the same columns.

    plainvit paper 5 evaluations/pets runs/cifar
    table(5).value("ViT-B/16 (ImageNet-21k)", "CIFAR-10")       98.95

Source: arXiv 2010.11929; paper.json holds the numbers. Rows are models and columns data sets in all of them, though the
paper prints some the other way round. Cards of weights that were fine-tuned from the same weights share a row; several
of one data set are its mean and standard deviation, as in the paper. What was made otherwise is noted (departures.py).
"""

import functools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from plainvit.config import nearest
from plainvit.data.decode import DataError
from plainvit.data.known import official_split
from plainvit.disk import read_json
from plainvit.evaluate.card import read_card, settings_of
from plainvit.evaluate.departures import departures

FILES = ("card.json", "vtab.json", "verdict.json")  # what holds numbers of the user's, in a folder
ON_ITS_SIDE = (2, 9)  # printed with data sets below each other: they have too many for a terminal
STUDIES = {"positions": "stem"}  # study -> the column of Table 8 that its arms belong to
AVERAGES = {7: "mean", 9: "vtab"}  # the column that is the mean of the others


@dataclass(frozen=True)
class Cell:
    """A number as printed; `words` where the paper prints more than one."""

    value: float
    spread: float | None = None
    words: str = ""


@dataclass(frozen=True)
class Row:
    name: str
    cells: tuple[Cell | None, ...]
    whose: Literal["paper", "yours"] = "paper"
    notes: tuple[str, ...] = ()  # of the user's, in what it departs from the paper's


@dataclass(frozen=True)
class PaperTable:
    """One table: the columns by their titles, each with the data set that it is of, or nothing."""

    number: int
    title: str
    caption: str
    digits: int
    notes: tuple[str, ...]
    columns: dict[str, str]
    rows: tuple[Row, ...]

    def value(self, row: str, column: str) -> float | None:
        """One number; of rows of the same name the first."""
        cells = {one.name: one.cells for one in reversed(self.rows)}
        for name, known in ((row, cells), (column, self.columns)):
            if name not in known:
                raise ValueError(f"Table {self.number} has no {name!r}; {nearest(name, known)}")
        cell = cells[row][list(self.columns).index(column)]
        return cell.value if cell else None


def tables() -> dict[int, PaperTable]:
    """All that are here, by number."""
    return {int(number): _read(int(number), said) for number, said in _stored()["tables"].items()}


def table(number: int) -> PaperTable:
    known = tables()
    if number not in known:
        raise ValueError(f"there is no Table {number} here: there are {', '.join(map(str, known))}")
    return known[number]


@functools.cache
def _stored() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


def _read(number: int, said: Mapping[str, Any]) -> PaperTable:
    return PaperTable(
        number=number,
        title=said["title"],
        caption=said["caption"],
        digits=said["digits"],
        notes=tuple(said["notes"]),
        columns=dict(said["columns"]),
        rows=tuple(Row(name, tuple(map(_cell, cells))) for name, cells in said["rows"]),
    )


def _cell(said: Any) -> Cell | None:
    match said:
        case None:
            return None
        case str():
            return Cell(float(said.split("/")[0]), words=said)
        case [value, spread]:
            return Cell(value, spread)
        case _:
            return Cell(said)


# What the user has ----------------------------------------------------------------------------------------------------


@dataclass
class Yours:
    """A row in the making: shares by data set, one for each card, and each note once."""

    name: str
    values: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def add(self, number: "Number") -> None:
        self.values.setdefault(number.spec, []).append(number.value)
        self.notes |= dict.fromkeys([number.note] if number.note else [])

    def said(self) -> tuple[str, ...]:
        """How many runs a number is of, and the notes."""
        counts = sorted({len(values) for values in self.values.values()})
        several = f"{' or '.join(map(str, counts))} runs a number, ± is their standard deviation"
        return ("one run a number, so without ±" if counts == [1] else several, *self.notes)


def with_cards(one: PaperTable, paths: Sequence[Path]) -> PaperTable:
    """The table with the user's rows below: of cards, of `plainvit vtab`'s reports, for Table 8 of its study."""
    rows: dict[str, Yours] = {}
    seen: set[str] = set()
    for path in paths:
        for number in _numbers(one, path):
            known = number.identity + number.spec
            if known not in seen:  # a card that is given twice is one card
                rows.setdefault(number.key, Yours(number.name)).add(number)
            seen.add(known)
    yours = tuple(Row(row.name, tuple(_cells(one, row.values)), "yours", row.said()) for row in rows.values())
    return replace(one, rows=one.rows + yours)


class Number(NamedTuple):
    """One of the user's."""

    key: str  # of its row
    name: str  # of its row
    identity: str  # what it is known by
    spec: str  # data set
    value: float  # a share
    note: str = ""


def _numbers(one: PaperTable, path: Path) -> Iterator[Number]:
    file = next((path / name for name in FILES if (path / name).is_file()), path / FILES[0]) if path.is_dir() else path
    if file.name == "vtab.json":
        return _of_vtab(one, file)
    if file.name == "verdict.json":
        return _of_study(one, file)
    return _of_card(one, file)


def _of_card(one: PaperTable, file: Path) -> Iterator[Number]:
    card = read_card(file)
    spec = card.data["spec"].replace("vtab/", "vtab1000/")  # of both the test images are the same
    if not spec or spec not in one.columns.values():
        raise ValueError(f"{file} is of {spec or 'no known set'}, and Table {one.number} {_sets(one)}")
    if card.data["split"] not in ("test", official_split(spec, "test")):
        raise ValueError(f"{file} is of the split {card.data['split']}, and the paper's numbers are of test images")
    run = settings_of(file, card)
    begun = str(run.get("init") or "")
    config = {name: value for name, value in card.model.get("config", {}).items() if name != "classes"}
    key = json.dumps([begun or card.model["weights"], config], sort_keys=True)
    name = f"{Path(begun).name}, fine-tuned" if begun else Path(card.name).name or card.name
    note = departures(one.number, spec, card, run)
    yield Number(key, name, card.identity(), spec, card.metrics["top1"], note)


def _of_vtab(one: PaperTable, file: Path) -> Iterator[Number]:
    said = _told(file, "tasks", "means", "setting")
    found = {f"vtab1000/{task}": row["top1"] for task, row in said["tasks"].items() if row.get("state") == "done"}
    found |= {"vtab": said["means"]["vtab"]} if "vtab" in said["means"] else {}
    there = {spec: value for spec, value in found.items() if spec in one.columns.values()}
    if not there:
        lack = "it has no VTAB score, some tasks are missing" if "vtab" in one.columns.values() else _sets(one)
        raise ValueError(f"{file} is of VTAB-1k, and Table {one.number} {lack}")
    begun = str(said["setting"].get("init", ""))
    for spec, value in there.items():
        yield Number(json.dumps([begun, "vtab"]), f"{Path(begun).name}, fine-tuned", str(file.resolve()), spec, value)


def _of_study(one: PaperTable, file: Path) -> Iterator[Number]:
    said = _told(file, "study", "values", "budget", "metric")
    column = STUDIES.get(said["study"], "")
    if one.number != 8 or not column:
        raise ValueError(f"{file} is of the study {said['study']}: only Table 8 takes a study, {', '.join(STUDIES)}")
    note = f"held-out top-1 of the study at budget {said['budget']}, the paper's 5-shot ImageNet of ViT-B/16"
    for arm, values in said["values"].items():
        for seed, value in enumerate(values):
            identity = f"{file.resolve()}, seed {seed} of {arm}, "
            yield Number(arm, f"{arm}, held-out top-1", identity, column, value[said["metric"]], note)


def _told(file: Path, *needed: str) -> dict[str, Any]:
    said = read_json(file)
    for name in needed:
        if name not in said:
            raise DataError(f"{file} is not what plainvit writes under this name: {name} is missing")
    return said


def _sets(one: PaperTable) -> str:
    if one.number == 8:
        return "is of kinds of positions: give the folder that `plainvit study positions` wrote"
    names = (spec.removeprefix("vtab1000/") for spec in one.columns.values() if spec not in ("", "mean"))
    return f"has {', '.join(names)}"


def _cells(one: PaperTable, values: Mapping[str, Sequence[float]]) -> Iterator[Cell | None]:
    scale = 1 if one.number == 8 else 100
    average = AVERAGES.get(one.number, "")
    specs = [spec for spec in one.columns.values() if spec not in ("", average)]
    means = {spec: scale * statistics.fmean(found) for spec, found in values.items()}
    for spec in one.columns.values():
        if spec in values:
            found = [scale * value for value in values[spec]]
            yield Cell(means[spec], statistics.stdev(found) if len(found) > 1 else None)
        elif average and spec == average and all(name in means for name in specs):
            yield Cell(statistics.fmean(means[name] for name in specs))
        else:
            yield None


# For people and machines ----------------------------------------------------------------------------------------------


def as_json(one: PaperTable) -> dict[str, Any]:
    return {
        "table": one.number,
        "title": one.title,
        "caption": one.caption,
        "columns": list(one.columns),
        "data": list(one.columns.values()),
        "rows": [
            {
                "name": row.name,
                "whose": row.whose,
                "cells": [_plain(cell) for cell in row.cells],
                **({"notes": list(row.notes)} if row.whose == "yours" else {}),
            }
            for row in one.rows
        ],
        "notes": list(one.notes),
        "source": _stored()["source"],
    }


def _plain(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    return {"value": cell.value, "std": cell.spread, **({"printed": cell.words} if cell.words else {})}


def contents() -> Table:
    """Every table's number and title."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("table", style="cyan", justify="right")
    shown.add_column("title", overflow="fold")
    for number, one in tables().items():
        shown.add_row(str(number), one.title)
    return shown


def shown(one: PaperTable) -> Group:
    """The table in a terminal: models below each other; a wide one on its side."""
    grid = [["", *one.columns], *([_name(row), *_printed(one, row)] for row in one.rows)]
    wide = one.number in ON_ITS_SIDE
    grid = [list(line) for line in zip(*grid, strict=True)] if wide else grid
    made = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for at, title in enumerate(grid[0]):
        yours = wide and at and one.rows[at - 1].whose == "yours"
        justify = "right" if at else "left"
        made.add_column(
            Text(title.replace(" (", "\n(") if wide else title),
            justify=justify,
            style="green" if yours else "",
            overflow="fold",
        )
    for at, line in enumerate(grid[1:]):
        yours = not wide and one.rows[at].whose == "yours"
        made.add_row(*map(Text, line), style="green" if yours else "")
    title = Text(f"Table {one.number}: {one.title}", style="bold")
    told = {}  # rows with the same notes are told of once
    for row in one.rows:
        for note in row.notes:
            told.setdefault(note, []).append(row.name)
    notes = [Text(f"- {note}", style="dim") for note in one.notes]
    mine = [row.name for row in one.rows if row.whose == "yours"]
    for note, names in told.items():
        whose = "yours" if names == mine else f"yours, {'; '.join(names)}"
        notes.append(Text(f"- {whose}: {note}", style="green"))
    return Group(title, Text(f"{one.caption}\n"), made, *([Text(""), *notes] if notes else []))


def _name(row: Row) -> str:
    return f"yours: {row.name}" if row.whose == "yours" else row.name


def _printed(one: PaperTable, row: Row) -> Iterator[str]:
    for cell, spec in zip(row.cells, one.columns.values(), strict=True):
        if cell is None:
            yield "-"
        elif cell.words:
            yield cell.words
        else:
            digits = one.digits if spec else 0
            spread = f"±{cell.spread:.{digits}f}" if cell.spread is not None else ""
            yield f"{cell.value:,.{digits}f}{spread}"
