"""Predictions and features of many images: predict, embed."""

import contextlib
import functools
import json as _json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from plainvit.commands import parsing
from plainvit.commands.parsing import ClassNames, Model, collect_pixel_flags, print_result

if TYPE_CHECKING:
    from plainvit.data.sources import Source
    from plainvit.evaluate.predict import Engine, PredictionJob, Summary

MAX_PRINTED = 200  # images in a printed table; more need --out
Inputs = Annotated[tuple[str, ...], "Image files, folders, quoted globs, or a known dataset; - reads names from stdin"]
Force = Annotated[bool, "Overwrite an existing file, or the parts of another job"]


@dataclass(frozen=True, kw_only=True)
class InferenceFlags(parsing.InferenceFlags):
    """How images are read and run through the model, on this machine or on a cluster."""

    #: Where to run: on this machine, or on a Ray cluster whose machines see the images under the same paths
    engine: Literal["local", "ray"] = "local"
    #: Address of a running Ray cluster, HOST:PORT or auto; default: start one on this machine and stop it
    address: str | None = None
    split: str = "test"  # Split of an input that is a dataset: train, val or test


def predict(
    model: Model,
    inputs: Inputs,
    /,
    *,
    out: Path | None = None,
    top: int | None = None,
    contact_sheet: Path | None = None,
    class_names: ClassNames = None,
    flags: InferenceFlags,
    force: Force = False,
    json: bool = False,
) -> None:
    """Predict the most probable classes of images, into a file or as a table.

    One row per image, in the order of the inputs; an unreadable image is a row with its error. The same command resumes
    an interrupted job. Exit code 3 if no image can be read. In a .csv file, text that a spreadsheet would run as a
    formula is preceded by an apostrophe.

    Args:
        out: Write the rows to this .jsonl, .csv or .parquet file
        top: Number of classes per image; default: 5, or all if there are fewer
        contact_sheet: Draw up to 96 of the images with their predictions into this PNG file
        json: Print JSON: one line per image or, with --out, a summary
    """
    from plainvit.evaluate import outputs
    from plainvit.evaluate.predict import describe_accuracy_of_run, write

    if top is not None and top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    for path, kinds in ((out, outputs.ROW_FORMATS), (contact_sheet, (".png",))):
        if path:
            outputs.check_out(path, kinds)
    stdout = sys.stdout
    with _open_job(model, inputs, top, flags, class_names) as (job, source, engine):
        drawn: list[int] = []
        if contact_sheet:
            from plainvit.analyse.gallery import choose_evenly

            drawn = choose_evenly(len(source)).tolist()
        if out:
            summary, rows = write(job, source, out, engine=engine, force=force, quiet=json, keep=drawn)
            drawn_rows = rows
        else:
            keep = bool(contact_sheet) or not json
            summary, rows = _predict_rows(job, source, engine, stdout if json else None, keep=keep)
            drawn_rows = [rows[index] for index in drawn]
    if contact_sheet:
        from plainvit.analyse import figures, gallery

        figures.save(gallery.contact_sheet(source, drawn, drawn_rows), contact_sheet)
    accuracy = describe_accuracy_of_run(model)
    notes = [f"{model}: {accuracy}"] if accuracy else []
    if contact_sheet:
        notes.append(f"contact sheet: {contact_sheet}")
    if out:
        _print_summary(summary, json, notes)
    elif not json and summary.unreadable < summary.images:
        _print_table(rows, notes)
    outputs.check_any_readable(summary.images, summary.unreadable, summary.first_error)
    if summary.unreadable and not out:
        count = f"{summary.unreadable:,} of {summary.images:,}"
        print(f"plainvit: {count} images could not be read", file=sys.stderr)


def embed(
    model: Model,
    inputs: Inputs,
    /,
    *,
    out: Path,
    flags: InferenceFlags,
    force: Force = False,
    json: Annotated[bool, "Print a summary as JSON"] = False,
) -> None:
    """Compute the features of images, the input of the model's head, into a file.

    One row per image, in the order of the inputs; an unreadable image is a row with its error. A .npz file holds the
    arrays features [N, D], with NaN for such rows, names and errors; it is built in memory, a .parquet file is not. The
    same command resumes an interrupted job.

    Args:
        out: Write the features to this .parquet or .npz file
    """
    from plainvit.evaluate import outputs
    from plainvit.evaluate.predict import write

    outputs.check_out(out, outputs.FEATURE_FORMATS)
    with _open_job(model, inputs, 0, flags) as (job, source, engine):
        summary, _ = write(job, source, out, engine=engine, force=force, quiet=json)
    _print_summary(summary, json, ())
    outputs.check_any_readable(summary.images, summary.unreadable, summary.first_error)


@contextlib.contextmanager
def _open_job(
    model: str, inputs: Sequence[str], top: int | None, flags: InferenceFlags, class_names: Path | None = None
) -> "Iterator[tuple[PredictionJob, Source, Engine]]":
    """Find the images, then load the model, which takes longer."""
    if flags.address and flags.engine != "ray":
        raise ValueError("--address requires --engine ray")
    from plainvit.evaluate import inputs as images
    from plainvit.evaluate.predict import PredictionJob, predict_locally
    from plainvit.evaluate.predictor import Predictor

    source = images.find(inputs, split=flags.split, data_root=flags.data_root)
    engine: Engine = functools.partial(predict_locally, workers=flags.processes)
    device, precision = flags.device, flags.precision
    with contextlib.ExitStack() as stack:
        if flags.engine == "ray":
            from plainvit.evaluate import cluster

            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray prints to stdout, which is for rows
            engine = stack.enter_context(cluster.connect_cluster(flags.address, device))
            device, precision = "cpu", engine.precision(precision)  # the model is loaded here and runs on the cluster
        settings: dict[str, Any] = {"image_size": flags.image_size, "batch": flags.batch, "class_names": class_names}
        predictor = Predictor(model, device=device, precision=precision, **settings | collect_pixel_flags(flags))
        yield PredictionJob(predictor, min(5, predictor.classes) or 1 if top is None else top), source, engine


def _predict_rows(
    job: "PredictionJob", source: "Source", engine: "Engine", stdout: TextIO | None, *, keep: bool
) -> "tuple[Summary, list[dict[str, Any]]]":
    """Counts, and with `keep` the rows; with `stdout` each row is printed as JSON as soon as it is predicted."""
    from plainvit.evaluate.predict import Summary, predict_rows

    if len(source) > MAX_PRINTED and not stdout:
        raise ValueError(
            f"{len(source):,} images need --out FILE (.jsonl, .csv or .parquet): at most {MAX_PRINTED} are printed as "
            "a table; --json prints any number"
        )
    kept, unreadable, first_error = [], 0, ""
    for row in predict_rows(job, source, engine=engine):
        if row["error"] is not None:
            unreadable, first_error = unreadable + 1, first_error or f"{row['name']}: {row['error']}"
        if keep:
            kept.append(row)
        if stdout:
            print(_json.dumps(row), file=stdout, flush=True)
    return Summary("", len(source), unreadable, first_error, resumed=0, seconds=0.0), kept


def _print_summary(summary: "Summary", json: bool, notes: Sequence[str]) -> None:
    from rich.text import Text

    print_result(asdict(summary), None if json else Text("\n".join((summary.line, *notes)), overflow="fold"))


def _print_table(rows: list[dict[str, Any]], notes: Sequence[str]) -> None:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("image", style="cyan", overflow="fold")
    table.add_column("prediction", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("next" if max(len(row["predictions"]) for row in rows) > 1 else "", style="dim", overflow="fold")
    for row in rows:
        name = Text(repr(row["name"])[1:-1])
        if row["error"]:
            table.add_row(name, Text(row["error"], style="red"), "", "")
            continue
        labels = [_truncate(entry["label"]) for entry in row["predictions"]]
        values = [f"{100 * entry['probability']:.1f}\u00a0%" for entry in row["predictions"]]  # no line break before %
        rest = ", ".join(f"{label} {value}" for label, value in zip(labels[1:], values[1:], strict=True))
        table.add_row(name, Text(labels[0]), values[0], Text(rest))
    print_result(None, Group(table, *map(Text, notes)))


def _truncate(label: str) -> str:
    return label if len(label) <= 28 else label[:27] + "\u2026"
