"""Resumable output of a long job: finished parts on disk, combined into one file at the end.

parts = Parts(Path("results.jsonl"), {"model": ..., "inputs": ...}, images=10_000, batch=64, part=1024)
for step in parts.missing(): parts.add(step, table)        # in any order
parts.finish()                                             # results.jsonl from all of them; the parts are removed

results.jsonl.parts/ contains one parquet file per part and job.json, which describes the job and whether it may replace
an existing output. The output is written atomically from all parts. In a .csv file, text that a spreadsheet would read
as a formula gets a leading apostrophe.
"""

import contextlib
import csv
import fcntl
import glob
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from plainvit.data.decode import DataError
from plainvit.data.tables import map_file
from plainvit.disk import DiskError, read_json, write_atomically, write_text

log = logging.getLogger("plainvit")
FORMULAS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # first characters; the last four are full-width = + - @
NUMBER = r"[-+]?[0-9.]+(e[-+]?[0-9]+)?"


class Parts:
    """The finished parts of one job, locked while it is open."""

    def __init__(
        self, out: Path, job: dict[str, Any], *, images: int, batch: int, part: int, force: bool = False
    ) -> None:
        self.out, self.folder = out, out.with_name(f"{out.name}.parts")
        self.steps, self.per_part = -(-images // batch), -(-part // batch)  # batches, all and of a part
        self._unwritten: dict[int, dict[int, pa.Table]] = {}
        self.replaces = force
        if not self.folder.exists():
            self._check_output()
        self._acquire_lock()
        self._start(job, batch, force)
        self.done = {part for part in range(self.count) if self._is_complete(part)}

    def _check_output(self) -> None:
        """Raises ValueError if the output exists and this job may not replace it."""
        if self.out.exists() and not self.replaces:
            raise ValueError(f"{self.out} exists: use --force to overwrite it, or give another --out")

    def _acquire_lock(self) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise DiskError(f"cannot write into {self.folder}: {error.strerror}") from error
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by data workers
        except OSError as error:
            self._lock.close()
            raise ValueError(f"another process is writing {self.out}: wait for it, or give another --out") from error

    def _start(self, job: dict[str, Any], batch: int, force: bool) -> None:
        """Keeps the finished parts of the same job. Raises ValueError for those of another."""
        stored = read_json(self.folder / "job.json")
        changed = [key for key in job if job[key] != stored.get(key)]
        parts = list(self.folder.glob("part-*.parquet"))
        if parts and not changed and not force:
            self._keep_part_size(stored, batch)
        self.job = {**job, "batch": batch, "part": self.per_part * batch}
        if stored and changed and parts and not force:
            self._lock.close()
            raise ValueError(
                f"{self.folder} contains {len(parts)} parts of another job (different: {', '.join(changed)}): "
                "use --force to start over, or give another --out"
            )
        self.replaces = force or (not changed and stored.get("replaces") is True)
        try:
            self._check_output()
        except ValueError:
            if not stored:  # a finished job that was killed while it deleted its parts
                self._delete()
            self._lock.close()
            raise
        temporary = self.out.parent.glob(f".{glob.escape(self.out.name)}.{'[0-9a-f]' * 8}.tmp")  # of plainvit.disk
        for path in (*temporary, *self.folder.glob(".*.tmp"), *(parts if changed or force else ())):
            path.unlink()
        self._write_job()

    def _keep_part_size(self, stored: dict[str, Any], batch: int) -> None:
        """Parts keep their number of images in a resumed job; another batch size must divide it."""
        part, old_batch = (stored.get(key) for key in ("part", "batch"))
        if not isinstance(part, int) or part < 1 or part % batch:
            self._lock.close()
            raise ValueError(
                f"{self.folder} contains parts of {part} images, which --batch {batch} does not divide: use "
                f"--batch {old_batch} to resume, or --force to start over"
            )
        self.per_part = part // batch
        if batch != old_batch:
            log.warning("resuming with --batch %d after %s: the last digits may differ", batch, old_batch)

    def _write_job(self) -> None:
        text = json.dumps({**self.job, "replaces": self.replaces}, indent=2) + "\n"
        write_text(self.folder / "job.json", text)

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
        if len(tables) == len(self._steps(part)):
            rows = pa.concat_tables([tables[one] for one in sorted(tables)])
            write_atomically(self._path(part), lambda path: _write_parquet(path, iter([rows])))
            self.done.add(part)
            del self._unwritten[part]

    def tables(self) -> Iterator[pa.Table]:
        """All rows, in order."""
        assert len(self.done) == self.count
        for part in range(self.count):
            yield pq.ParquetFile(map_file(self._path(part))).read()

    def finish(self) -> None:
        """Writes the output; `close` then deletes the parts."""
        write = WRITERS[self.out.suffix.lower()]
        self._check_output()
        self.replaces = True
        self._write_job()  # a kill from here on leaves an output that this job may replace
        write_atomically(self.out, lambda path: write(path, self.tables()))
        self.done = set()

    def close(self) -> None:
        """Releases the lock; deletes the folder if no finished part is needed."""
        if not self.done:
            self._delete()
        self._lock.close()

    def _delete(self) -> None:
        for path in (*self.folder.glob("part-*.parquet"), self.folder / "job.json", self.folder / ".lock"):
            path.unlink(missing_ok=True)  # parts first: they are useless without job.json
        with contextlib.suppress(OSError):  # it contains other files
            self.folder.rmdir()

    def _steps(self, part: int) -> range:
        return range(part * self.per_part, min((part + 1) * self.per_part, self.steps))

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
    pairs = [f"{word}_{place}" for place in range(1, top + 1) for word in ("label", "probability")]
    with path.open("w", encoding="utf-8", newline="") as file:
        write_rows(file, [["name", *pairs, "error"]])
        for table in itertools.chain([first], tables):
            write_rows(file, (_make_cells(row, 2 * top) for row in table.to_pylist()))


def _make_cells(row: dict[str, Any], width: int) -> list[Any]:
    guesses = [cell for guess in row["guesses"] for cell in (guess["label"], guess["probability"])]
    return [row["name"], *guesses, *[""] * (width - len(guesses)), row["error"] or ""]


def write_rows(file: TextIO, rows: Iterable[Sequence[Any]]) -> None:
    """Writes CSV without formulas. Lines end in \\n; csv quotes carriage returns only if its own lines end in one."""
    newlines: Any = SimpleNamespace(write=lambda line: file.write(line.removesuffix("\r\n") + "\n"))
    csv.writer(newlines).writerows([_escape_formula(cell) for cell in row] for row in rows)


def _escape_formula(cell: Any) -> Any:
    """Prefixes text that a spreadsheet would run as a formula (OWASP, CSV injection)."""
    formula = isinstance(cell, str) and cell.startswith(FORMULAS) and not re.fullmatch(NUMBER, cell)
    return f"'{cell}" if formula else cell


def _write_parquet(path: Path, tables: Iterator[pa.Table]) -> None:
    """Writes to an open file: pyarrow reads a path such as lr:3e-4/rows.parquet as a URI."""
    first = next(tables)
    with path.open("wb") as file, pq.ParquetWriter(file, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)


def _write_safetensors(path: Path, tables: Iterator[pa.Table]) -> None:
    """features [N, D], NaN for unreadable images; names and errors as UTF-8 separated by zero bytes."""
    features: list[np.ndarray] = []
    names: list[str] = []
    errors: list[str] = []
    for table in tables:
        column: Any = table["features"].combine_chunks()
        width = column.type.list_size
        rows = np.full((len(column), width), np.nan, np.float32)
        rows[column.is_valid().to_numpy(zero_copy_only=False)] = column.flatten().to_numpy().reshape(-1, width)
        features.append(rows)
        names += table["name"].to_pylist()
        errors += [error or "" for error in table["error"].to_pylist()]
    texts = {"names": names, "errors": errors}
    encoded = {key: np.frombuffer("\0".join(value).encode(), np.uint8) for key, value in texts.items()}
    save_file({"features": np.concatenate(features), **encoded}, path)


WRITERS: dict[str, Callable[[Path, Iterator[pa.Table]], None]] = {
    ".jsonl": _write_jsonl,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".safetensors": _write_safetensors,
}
ROWS, FEATURES = (".jsonl", ".csv", ".parquet"), (".parquet", ".safetensors")


def check_out(out: Path, allowed: Sequence[str]) -> None:
    """Raises ValueError if the output cannot be written, before any work."""
    if out.suffix.lower() not in allowed:
        raise ValueError(f"cannot write {out}: its name must end in {' or '.join(allowed)}")
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"cannot write {out}: {'it is' if out.is_dir() else f'{out.parent} is not'} a folder")


def summarise(tables: Iterator[pa.Table], keep: np.ndarray) -> tuple[tuple[int, int, str], list[dict[str, Any]]]:
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


def refuse_all_bad(rows: int, bad: int, first: str) -> None:
    if rows == bad:
        raise DataError(f"all {rows:,} images failed; {first}" if rows > 1 else first)
