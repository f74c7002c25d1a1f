"""The output of a long job, in parts: each is written whole beside it, and a job that was killed makes what it lacks.

parts = Parts(Path("results.jsonl"), {"model": ..., "inputs": ...}, images=10_000, batch=64, part=1024)
for step in parts.missing(): parts.add(step, table)        # in any order
parts.finish()                                             # results.jsonl from all of them; the parts are removed

results.jsonl.parts/ holds job.json, which says what the parts are of and whether the job may replace an output that is
there, and one parquet file a part. The output is written in one go from all parts, so it is there and whole, or not
there. In a .csv file, text that a spreadsheet would take for a formula has an apostrophe before it.
"""

import contextlib
import csv
import fcntl
import functools
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
FORMULAS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # how they begin; the last four are = + - @ in full width
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
            self._spare()
        self._own()
        self._begin(job, batch, force)
        self.done = {part for part in range(self.count) if self._is_whole(part)}

    def _spare(self) -> None:
        """An output that is there is replaced only by leave, or by the job that has written it."""
        if self.out.exists() and not self.replaces:
            raise ValueError(f"{self.out} is there already: --force writes it anew, or give another --out")

    def _own(self) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise DiskError(f"cannot write into {self.folder}: {error.strerror}") from error
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # data workers, which may outlive us, do not hold it
        except OSError as error:
            self._lock.close()
            raise ValueError(f"another process is writing {self.out}: wait for it, or give another --out") from error

    def _begin(self, job: dict[str, Any], batch: int, force: bool) -> None:
        """Parts of the same job are kept, those of another refused."""
        found = read_json(self.folder / "job.json")
        unlike = [key for key in job if job[key] != found.get(key)]
        parts = list(self.folder.glob("part-*.parquet"))
        if parts and not unlike and not force:
            self._resize(found, batch)
        self.job = {**job, "batch": batch, "part": self.per_part * batch}
        if found and unlike and parts and not force:
            self._lock.close()
            raise ValueError(
                f"{self.folder} holds {len(parts)} finished parts of another job (not the same: {', '.join(unlike)}): "
                "--force begins anew, or give another --out"
            )
        self.replaces = force or (not unlike and found.get("replaces") is True)
        try:
            self._spare()
        except ValueError:
            if not found:  # a finished job that was killed while it removed its parts
                self._remove()
            self._lock.close()
            raise
        beside = self.out.parent.glob(f".{glob.escape(self.out.name)}.{'[0-9a-f]' * 8}.tmp")  # as plainvit.disk writes
        for litter in (*beside, *self.folder.glob(".*.tmp"), *(parts if unlike or force else ())):
            litter.unlink()
        self._describe()

    def _resize(self, found: dict[str, Any], batch: int) -> None:
        """The finished parts keep their number of images, whatever the batch that goes on: it has to divide it."""
        part, before = (found.get(key) for key in ("part", "batch"))
        if not isinstance(part, int) or part < 1 or part % batch:
            self._lock.close()
            raise ValueError(
                f"{self.folder} holds parts of {part} images, which --batch {batch} does not divide: --batch {before} "
                "continues the job, --force starts over"
            )
        self.per_part = part // batch
        if batch != before:
            log.warning("continuing with --batch %d after %s: the last digits of the rows may differ", batch, before)

    def _describe(self) -> None:
        text = json.dumps({**self.job, "replaces": self.replaces}, indent=2) + "\n"
        write_text(self.folder / "job.json", text)

    @property
    def count(self) -> int:
        return -(-self.steps // self.per_part)

    def missing(self) -> np.ndarray:
        """Steps of the parts that are not there."""
        return np.array([step for step in range(self.steps) if step // self.per_part not in self.done], np.int64)

    def add(self, step: int, table: pa.Table) -> None:
        """The rows of one step. With the last step of its part, the part is written."""
        part = step // self.per_part
        held = self._unwritten.setdefault(part, {})
        held[step] = table
        if len(held) == len(self._steps(part)):
            whole = pa.concat_tables([held[one] for one in sorted(held)])
            write_atomically(self._path(part), lambda beside: _write_parquet(beside, iter([whole])))
            self.done.add(part)
            del self._unwritten[part]

    def tables(self) -> Iterator[pa.Table]:
        """All rows, in order."""
        assert len(self.done) == self.count
        for part in range(self.count):
            yield pq.ParquetFile(map_file(self._path(part))).read()

    def finish(self) -> None:
        """The output, all of it at once. The parts are then no longer wanted."""
        write = WRITERS[self.out.suffix.lower()]
        self._spare()
        self.replaces = True
        self._describe()  # killed from here on, it knows the output for its own
        write_atomically(self.out, lambda beside: write(beside, self.tables()))
        self.done = set()

    def close(self) -> None:
        """Lets go of the folder; where it holds nothing more that is wanted, removes it."""
        if not self.done:
            self._remove()
        self._lock.close()

    def _remove(self) -> None:
        for path in (*self.folder.glob("part-*.parquet"), self.folder / "job.json", self.folder / ".lock"):
            path.unlink(missing_ok=True)  # in this order: parts without their description would have no meaning
        with contextlib.suppress(OSError):  # it holds something else, which is none of ours
            self.folder.rmdir()

    def _steps(self, part: int) -> range:
        return range(part * self.per_part, min((part + 1) * self.per_part, self.steps))

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.parquet"

    def _is_whole(self, part: int) -> bool:
        try:
            return pq.ParquetFile(map_file(self._path(part))).metadata.num_rows > 0
        except (OSError, pa.ArrowException):
            return False


# Formats --------------------------------------------------------------------------------------------------------------


def _write_jsonl(path: Path, tables: Iterator[pa.Table]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            file.writelines(_json_lines(table))


def _json_lines(table: pa.Table) -> Iterator[str]:
    """What json.dumps writes of each row, twice as fast: a label's text is made once, and a probability is finite."""
    plain = json.JSONEncoder(ensure_ascii=False).encode
    text = functools.cache(plain)
    guesses: Any = table["guesses"].combine_chunks()
    flat, ends = guesses.flatten(), guesses.offsets.to_pylist()
    pairs = zip(flat.field("label").to_pylist(), flat.field("probability").to_pylist(), strict=True)
    shown = [f'{{"label": {text(label)}, "probability": {sure!r}}}' for label, sure in pairs]
    rows = zip(table["name"].to_pylist(), ends, ends[1:], table["error"].to_pylist(), strict=False)
    for name, start, end, error in rows:
        said = ", ".join(shown[start - ends[0] : end - ends[0]])
        yield f'{{"name": {plain(name)}, "guesses": [{said}], "error": {text(error)}}}\n'


def _write_csv(path: Path, tables: Iterator[pa.Table]) -> None:
    """name, label_1, probability_1, label_2 ..., error."""
    first = next(tables)
    top = int((first.schema.metadata or {})[b"top"])
    pairs = [f"{word}_{place}" for place in range(1, top + 1) for word in ("label", "probability")]
    with path.open("w", encoding="utf-8", newline="") as file:
        write_rows(file, [["name", *pairs, "error"]])
        for table in itertools.chain([first], tables):
            write_rows(file, (_cells(row, 2 * top) for row in table.to_pylist()))


def _cells(row: dict[str, Any], width: int) -> list[Any]:
    guesses = [cell for guess in row["guesses"] for cell in (guess["label"], guess["probability"])]
    return [row["name"], *guesses, *[""] * (width - len(guesses)), row["error"] or ""]


def write_rows(file: TextIO, rows: Iterable[Sequence[Any]]) -> None:
    """CSV lines, harmless in a spreadsheet. A carriage return is quoted, as csv does only where lines end in one."""
    ends: Any = SimpleNamespace(write=lambda line: file.write(line.removesuffix("\r\n") + "\n"))
    csv.writer(ends).writerows([_harmless(cell) for cell in row] for row in rows)


def _harmless(cell: Any) -> Any:
    """What a spreadsheet would take for a formula, as text (OWASP, CSV injection)."""
    formula = isinstance(cell, str) and cell.startswith(FORMULAS) and not re.fullmatch(NUMBER, cell)
    return f"'{cell}" if formula else cell


def _write_parquet(path: Path, tables: Iterator[pa.Table]) -> None:
    """To an open file: pyarrow takes a path such as lr:3e-4/rows.parquet for a URI."""
    first = next(tables)
    with path.open("wb") as file, pq.ParquetWriter(file, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)


def _write_safetensors(path: Path, tables: Iterator[pa.Table]) -> None:
    """features [N, D], NaN where an image could not be read; names and errors as UTF-8 with a zero byte between two."""
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
    """Before the work, whether its file can be written at all."""
    if out.suffix.lower() not in allowed:
        raise ValueError(f"cannot write {out}: its name should end in {' or '.join(allowed)}")
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"cannot write {out}: {'it is' if out.is_dir() else f'{out.parent} is not'} a folder")


def look_over(tables: Iterator[pa.Table], keep: np.ndarray) -> tuple[tuple[int, int, str], list[dict[str, Any]]]:
    """(rows, rows with an error, the first of these errors); and the rows whose numbers are to be kept."""
    rows, bad, first, kept = 0, 0, "", []
    for table in tables:
        wrong = table.filter(table["error"].is_valid())
        if len(wrong) and not first:
            first = f"{wrong['name'][0]}: {wrong['error'][0]}"
        here = keep[(keep >= rows) & (keep < rows + len(table))] - rows
        kept += table.take(pa.array(here)).to_pylist()
        rows, bad = rows + len(table), bad + len(wrong)
    return (rows, bad, first), kept


def refuse_all_bad(rows: int, bad: int, first: str) -> None:
    if rows == bad:
        raise DataError(f"none of the {rows:,} images has an answer; {first}" if rows > 1 else first)
