"""Resumable output of a long job: finished parts on disk, combined into one file at the end.

parts = Parts(Path("results.jsonl"), {"model": ..., "inputs": ...}, images=10_000, batch=64, part=1024)
for step in parts.missing(): parts.add(step, table)        # in any order
parts.finish()                                             # results.jsonl from all of them; the parts are removed

results.jsonl.parts/ contains one parquet file per part and job.json, which describes the job. The output is written
atomically from all parts. In a .csv file, text that a spreadsheet would read as a formula gets a leading apostrophe.
"""

import contextlib
import csv
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from plainvit.data.columns import map_file, write_table
from plainvit.data.decode import DataError
from plainvit.disk import DiskError, make_folder, read_json, write_atomically, write_text

FORMULA_STARTS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # first characters; the last four are full-width = + - @
NUMBER = r"[-+]?[0-9.]+(e[-+]?[0-9]+)?"


class Parts:
    """The finished parts of one job."""

    def __init__(
        self, out: Path, job: dict[str, Any], *, images: int, batch: int, part: int, force: bool = False
    ) -> None:
        if os.path.lexists(out) and not force:
            raise ValueError(f"{out} exists: use --force to overwrite it, or give another --out")
        self.out, self.folder, self.force = out, out.with_name(f"{out.name}.parts"), force
        self.steps, self.per_part = -(-images // batch), -(-part // batch)  # batches, all and of a part
        self._unwritten: dict[int, dict[int, pa.Table]] = {}
        self._open_folder({**job, "batch": batch, "part": self.per_part * batch})
        self.done = {part for part in range(self.count) if self._is_complete(part)}

    def _open_folder(self, job: dict[str, Any]) -> None:
        """Keeps the finished parts of the same job; deletes those of another job with force, else raises ValueError."""
        try:
            make_folder(self.folder)
        except DiskError as error:
            raise DiskError(f"cannot write {self.out}: {error}") from error
        stored, parts = read_json(self.folder / "job.json"), list(self.folder.glob("part-*.parquet"))
        changed = [key for key in job if job[key] != stored.get(key)]
        if stored and changed and parts and not self.force:
            raise ValueError(
                f"{self.folder} contains {len(parts)} parts of another job (different: {', '.join(changed)}): "
                "use --force to start over, or give another --out"
            )
        for path in (*self.folder.glob(".*.tmp"), *(parts if changed else ())):
            path.unlink()
        write_text(self.folder / "job.json", json.dumps(job, indent=2) + "\n")

    @property
    def count(self) -> int:
        return -(-self.steps // self.per_part)

    def missing(self) -> np.ndarray:
        """Steps of the unfinished parts."""
        return np.array([step for step in range(self.steps) if step // self.per_part not in self.done], np.int64)

    def add(self, step: int, table: pa.Table) -> None:
        """Adds the rows of one step; a part is written when it is complete."""
        part = step // self.per_part
        tables = self._unwritten.setdefault(part, {})
        tables[step] = table
        if len(tables) == min(self.per_part, self.steps - part * self.per_part):
            rows = pa.concat_tables([tables[step] for step in sorted(tables)])
            write_atomically(self._path(part), lambda path: write_table(rows, path))
            self.done.add(part)
            del self._unwritten[part]

    def tables(self) -> Iterator[pa.Table]:
        """All rows, in order."""
        assert len(self.done) == self.count
        for part in range(self.count):
            yield pq.ParquetFile(map_file(self._path(part))).read()

    def finish(self) -> None:
        """Writes the output and deletes the parts; without force, it replaces no file that appeared meanwhile."""
        write = WRITERS[self.out.suffix.lower()]
        try:
            write_atomically(self.out, lambda path: write(path, self.tables()), overwrite=self.force)
        except FileExistsError as error:
            raise ValueError(
                f"{self.out} was written by another process meanwhile: run again with --force to replace it (the "
                "finished parts are used)"
            ) from error
        for path in (*self.folder.glob("part-*.parquet"), self.folder / "job.json"):
            path.unlink(missing_ok=True)  # parts first: they are useless without job.json
        with contextlib.suppress(OSError):  # it contains other files
            self.folder.rmdir()

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.parquet"

    def _is_complete(self, part: int) -> bool:
        try:
            return pq.ParquetFile(map_file(self._path(part))).metadata.num_rows > 0
        except (OSError, pa.ArrowException):
            return False


# Formats --------------------------------------------------------------------------------------------------------------


def _write_jsonl(path: Path, tables: Iterator[pa.Table]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())


def _write_csv(path: Path, tables: Iterator[pa.Table]) -> None:
    """name, label_1, probability_1, label_2 ..., error."""
    first = next(tables)
    top = int((first.schema.metadata or {})[b"top"])
    header = ["name"]
    for rank in range(1, top + 1):
        header += [f"label_{rank}", f"probability_{rank}"]
    with path.open("w", encoding="utf-8", newline="") as file:
        write_rows(file, [[*header, "error"]])
        for table in itertools.chain([first], tables):
            write_rows(file, (_make_cells(row, top) for row in table.to_pylist()))


def _make_cells(row: dict[str, Any], top: int) -> list[Any]:
    cells = [row["name"]]
    for prediction in row["predictions"]:
        cells += [prediction["label"], prediction["probability"]]
    empty = [""] * 2 * (top - len(row["predictions"]))
    return [*cells, *empty, row["error"] or ""]


def write_rows(file: TextIO, rows: Iterable[Sequence[Any]]) -> None:
    """Writes CSV without formulas. Lines end in \\n; csv quotes carriage returns only if its own lines end in one."""
    newlines: Any = SimpleNamespace(write=lambda line: file.write(line.removesuffix("\r\n") + "\n"))
    csv.writer(newlines).writerows([_escape_formula(cell) for cell in row] for row in rows)


def _escape_formula(cell: Any) -> Any:
    """Prefixes text that a spreadsheet would run as a formula (OWASP, CSV injection)."""
    formula = isinstance(cell, str) and cell.startswith(FORMULA_STARTS) and not re.fullmatch(NUMBER, cell)
    return f"'{cell}" if formula else cell


def _write_parquet(path: Path, tables: Iterator[pa.Table]) -> None:
    """Writes to an open file: pyarrow reads a path such as lr:3e-4/rows.parquet as a URI."""
    first = next(tables)
    with path.open("wb") as file, pq.ParquetWriter(file, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)


def _write_npz(path: Path, tables: Iterator[pa.Table]) -> None:
    """features [N, D], NaN for unreadable images; names [N] and errors [N], "" without one."""
    table = pa.concat_tables(list(tables))
    rows: Any = table["features"].combine_chunks()
    valid = rows.is_valid().to_numpy(zero_copy_only=False)
    values = rows.flatten().to_numpy()
    features = np.full((len(rows), len(values) // max(1, valid.sum())), np.nan, np.float32)
    features[valid] = values.reshape(valid.sum(), features.shape[1])
    names, errors = np.array(table["name"].to_pylist()), np.array([text or "" for text in table["error"].to_pylist()])
    with path.open("wb") as file:  # savez adds .npz to the name of a path
        np.savez(file, features=features, names=names, errors=errors)


WRITERS: dict[str, Callable[[Path, Iterator[pa.Table]], None]] = {
    ".jsonl": _write_jsonl,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".npz": _write_npz,
}
ROW_FORMATS, FEATURE_FORMATS = (".jsonl", ".csv", ".parquet"), (".parquet", ".npz")


def check_out(out: Path, allowed: Sequence[str]) -> None:
    """Raises ValueError if the output cannot be written, before any work."""
    if out.suffix.lower() not in allowed:
        raise ValueError(f"cannot write {out}: its name must end in {' or '.join(allowed)}")
    if out.is_dir():
        raise ValueError(f"cannot write {out}: it is a folder")
    if not out.parent.is_dir():
        raise ValueError(f"cannot write {out}: {out.parent} is not a folder")


def summarize(tables: Iterator[pa.Table], keep: np.ndarray) -> tuple[tuple[int, int, str], list[dict[str, Any]]]:
    """Returns (rows, rows with an error, first error), and the rows at the positions in `keep`."""
    rows, bad, first, kept = 0, 0, "", []
    for table in tables:
        failed = table.filter(table["error"].is_valid())
        if len(failed) and not first:
            first = f"{failed['name'][0]}: {failed['error'][0]}"
        here = keep[(keep >= rows) & (keep < rows + len(table))] - rows
        kept += table.take(pa.array(here)).to_pylist()
        rows, bad = rows + len(table), bad + len(failed)
    return (rows, bad, first), kept


def check_any_readable(rows: int, bad: int, first: str) -> None:
    """Raises DataError if every image failed."""
    if rows == bad:
        raise DataError(f"all {rows:,} images failed; {first}" if rows > 1 else first)
