"""What a model says of many pictures: predict, embed."""

import contextlib
import functools
import json as _json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from plainvit.verbs.words import show

if TYPE_CHECKING:
    from rich.table import Table

    from plainvit.data.sources import Source
    from plainvit.evaluate.predict import Engine, Question, Summary

Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
Pictures = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
Precision = Literal["auto", "fp32", "bf16"]
MOST_SHOWN = 200  # pictures whose guesses are printed for people; more belong into a file


def predict(
    model: Model,
    inputs: Pictures,
    /,
    *,
    out: Path | None = None,
    top: int | None = None,
    sheet: Path | None = None,
    batch: int = 64,
    image_size: int | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    split: str = "test",
    data_root: Path | None = None,
    force: bool = False,
    json: bool = False,
) -> None:
    """The most probable classes of every picture, to a file (.jsonl, .csv, .parquet) or, for a few, to the screen.

    One row a picture, in the order of the inputs; one that cannot be read is a row with its error. Killed at any time,
    the same line goes on with the pictures that are missing. Exit code 3 if no picture can be read.

    Args:
        model: A run's folder, weights of any library, hf:org/name, a name from `plainvit weights`, or timm:NAME.
        inputs: Files, folders, globs in quotes, archives (.zip, .tar, .tar.gz ...), - for names on standard input, or
            a known data set.
        out: Write the rows to this file.
        top: Guesses for each picture: 5, or all classes where there are fewer.
        sheet: Also draw up to 96 of the pictures with their guesses to this PNG.
        batch: Pictures that the model sees at a time.
        image_size: Height and width in pixels at which the model sees them; its own by default.
        device: cpu, cuda, cuda:1, or auto.
        precision: Of the arithmetic; auto is bf16 on a GPU, else fp32.
        workers: Processes that read and decode; by default as many as serve.
        engine: local is this machine; ray is a cluster, whose machines must all see the inputs under the same paths.
        address: A running Ray cluster, HOST:PORT or auto; without it, one is started on this machine and ended again.
        split: Of an input that is a data set: train, val or test.
        data_root: Where known data sets lie, each in a folder of its name.
        force: Begin anew over an existing file, or over parts of another job.
        json: Print JSON for machines: a line a picture or, with --out, a summary.
    """
    from plainvit.evaluate import parts

    if top is not None and top < 1:
        raise ValueError(f"top is {top}: at least 1")
    if out:
        parts.check_suffix(out, parts.ROWS)
    how: dict[str, Any] = {"batch": batch, "image_size": image_size, "device": device, "precision": precision}
    how |= {"workers": workers, "engine": engine, "address": address, "split": split, "data_root": data_root}
    with _asked(model, inputs, top=top, **how) as (question, source, run):
        if out:
            _tell(_written(question, source, out, run, sheet, force, json), json)
        else:
            _print(question, source, run, sheet, json)


def embed(
    model: Model,
    inputs: Pictures,
    /,
    *,
    out: Path,
    batch: int = 64,
    image_size: int | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    split: str = "test",
    data_root: Path | None = None,
    force: bool = False,
    json: bool = False,
) -> None:
    """The features of every picture, what the model's last layer reads, to a file (.parquet, .safetensors).

    One row a picture, in the order of the inputs; one that cannot be read is a row with its error. A .safetensors file
    has features [N, D], with NaN for such rows, and names and errors as UTF-8 with a zero byte between two of them; it
    is put together in memory, a .parquet file is not. Killed at any time, the same line goes on with what is missing.

    Args:
        model: A run's folder, weights of any library, hf:org/name, a name from `plainvit weights`, or timm:NAME.
        inputs: Files, folders, globs in quotes, archives (.zip, .tar, .tar.gz ...), - for names on standard input, or
            a known data set.
        out: Write the features to this file.
        batch: Pictures that the model sees at a time.
        image_size: Height and width in pixels at which the model sees them; its own by default.
        device: cpu, cuda, cuda:1, or auto.
        precision: Of the arithmetic; auto is bf16 on a GPU, else fp32.
        workers: Processes that read and decode; by default as many as serve.
        engine: local is this machine; ray is a cluster, whose machines must all see the inputs under the same paths.
        address: A running Ray cluster, HOST:PORT or auto; without it, one is started on this machine and ended again.
        split: Of an input that is a data set: train, val or test.
        data_root: Where known data sets lie, each in a folder of its name.
        force: Begin anew over an existing file, or over parts of another job.
        json: Print a summary in JSON for machines.
    """
    from plainvit.evaluate import parts

    parts.check_suffix(out, parts.FEATURES)
    how: dict[str, Any] = {"batch": batch, "image_size": image_size, "device": device, "precision": precision}
    how |= {"workers": workers, "engine": engine, "address": address, "split": split, "data_root": data_root}
    with _asked(model, inputs, top=0, **how) as (question, source, run):
        _tell(_written(question, source, out, run, None, force, json), json)


@contextlib.contextmanager
def _asked(
    model: str,
    inputs: Sequence[str],
    *,
    top: int | None,
    batch: int,
    image_size: int | None,
    device: str,
    precision: Precision,
    workers: int | None,
    engine: str,
    address: str | None,
    split: str,
    data_root: Path | None,
) -> "Iterator[tuple[Question, Source, Engine]]":
    """The question, the pictures and who answers. The pictures come first: they are the likelier to be missing."""
    if not inputs:
        raise ValueError("no INPUT is given: files, folders, globs, archives, or - for names on standard input")
    if batch < 1 or (workers or 0) < 0:
        raise ValueError(f"batch is {batch}: at least 1" if batch < 1 else f"workers is {workers}: at least 0")
    if address and engine != "ray":
        raise ValueError("--address goes with --engine ray")
    from plainvit.evaluate import inputs as pictures
    from plainvit.evaluate.predict import Question, locally
    from plainvit.evaluate.predictor import Predictor

    source = pictures.find(inputs, split=split, data_root=data_root)
    run: Engine = functools.partial(locally, workers=workers)
    with contextlib.ExitStack() as stack:
        if engine == "ray":
            from plainvit.evaluate import cluster

            run = stack.enter_context(cluster.joined(address, device))
            device, precision = "cpu", run.precision(precision)  # the model is loaded here and answers there
        predictor = Predictor(model, device=device, precision=precision, image_size=image_size, batch=batch)
        yield Question(predictor, min(5, predictor.classes) or 1 if top is None else top), source, run


def _written(
    question: "Question", source: "Source", out: Path, run: "Engine", sheet: Path | None, force: bool, quiet: bool
) -> "Summary":
    from plainvit.evaluate.predict import write

    if not sheet:
        return write(question, source, out, engine=run, force=force, quiet=quiet)[0]
    from plainvit.analyse.sheet import chosen

    shown = chosen(len(source))
    summary, rows = write(question, source, out, engine=run, force=force, quiet=quiet, keep=shown)
    _draw(source, shown, rows, sheet)
    return summary


def _draw(source: "Source", shown: Any, rows: list[dict[str, Any]], sheet: Path) -> None:
    from plainvit.analyse.figures import save
    from plainvit.analyse.sheet import BYTES, contact_sheet

    save(contact_sheet(source, shown, rows), sheet, BYTES)


def _tell(summary: "Summary", json: bool) -> None:
    """How it ended, then exit code 3 where nothing could be read."""
    from rich.text import Text

    from plainvit.evaluate.parts import refuse_all_bad

    show(asdict(summary), None if json else Text(summary.line))
    refuse_all_bad(summary.images, summary.unreadable, summary.first_error)


def _print(question: "Question", source: "Source", run: "Engine", sheet: Path | None, json: bool) -> None:
    """A line of JSON a picture as it comes, or a table."""
    from plainvit.evaluate.parts import refuse_all_bad
    from plainvit.evaluate.predict import rows

    if len(source) > MOST_SHOWN and not json:
        raise ValueError(f"{len(source):,} images are too many for the screen: give --out FILE.jsonl, .csv or .parquet")
    kept: list[dict[str, Any]] = []
    bad = 0
    for row in rows(question, source, engine=run):
        bad += row["error"] is not None
        kept += [row] if sheet or not json or bad == 1 else []
        if json:
            print(_json.dumps(row))
    if not json and bad < len(source):
        show(None, _table(kept))
    if sheet:
        _sheet(source, kept, sheet)
    refuse_all_bad(len(source), bad, next((f"{row['name']}: {row['error']}" for row in kept if row["error"]), ""))
    if bad:
        print(f"plainvit: {bad:,} of {len(source):,} images cannot be read", file=sys.stderr)


def _sheet(source: "Source", rows: list[dict[str, Any]], sheet: Path) -> None:
    from plainvit.analyse.sheet import chosen

    shown = chosen(len(rows))
    _draw(source, shown, [rows[at] for at in shown], sheet)


def _table(rows: list[dict[str, Any]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("picture", style="cyan", overflow="fold")
    table.add_column("guess", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("or" if max(len(row["guesses"]) for row in rows) > 1 else "", style="dim", overflow="fold")
    for row in rows:
        name, guesses = Text(repr(row["name"])[1:-1]), row["guesses"]
        if row["error"]:
            table.add_row(name, Text(row["error"], style="red"), "", "")
            continue
        others = ", ".join(f"{_short(one['label'])} {_percent(one['probability'])}" for one in guesses[1:])
        table.add_row(name, Text(_short(guesses[0]["label"])), _percent(guesses[0]["probability"]), Text(others))
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"  # never on two lines


def _short(label: str) -> str:
    """A table holds less than a file."""
    return label if len(label) <= 28 else label[:27] + "\u2026"
