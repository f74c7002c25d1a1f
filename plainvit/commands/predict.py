"""Predictions and features of many images: predict, embed."""

import contextlib
import functools
import json as _json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plainvit.commands.parsing import Model, PixelFlags, given_pixel_flags, print_result, resolve_workers

if TYPE_CHECKING:
    from rich.table import Table

    from plainvit.data.sources import Source
    from plainvit.evaluate.predict import Engine, PredictionJob, Summary

MAX_PRINTED = 200  # images in a printed table; more need --out


@dataclass(frozen=True, kw_only=True)
class InferenceFlags(PixelFlags):
    """How images are found, read and run through the model."""

    batch: int = 64  # Images per forward pass
    image_size: int | None = None  # Height and width in pixels; the position embedding is resampled
    device: str = "auto"  # Device to run on: cpu, cuda, cuda:1; auto picks a GPU if there is one
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # Precision of the computation; auto: bf16 on a GPU, else fp32
    workers: int = -1  # Number of processes that read images; -1 chooses by the number of cores
    #: Where to run: local is this machine; ray is a cluster whose machines see the inputs under the same paths
    engine: Literal["local", "ray"] = "local"
    #: Address of a running Ray cluster, HOST:PORT or auto; default: start one on this machine and stop it
    address: str | None = None
    split: str = "test"  # Split of an input that is a dataset: train, val or test
    data_root: Path | None = None  # Folder with the known datasets, each in a folder of its name


def predict(
    model: Model,
    inputs: tuple[str, ...],
    /,
    *,
    out: Path | None = None,
    top: int | None = None,
    sheet: Path | None = None,
    class_names: Path | None = None,
    config: InferenceFlags = InferenceFlags(),  # noqa: B008 - it is frozen
    force: bool = False,
    json: bool = False,
) -> None:
    """Predict the most probable classes of images, into a file or as a table.

    One row per image, in the order of the inputs; an unreadable image is a row with its error. The same command resumes
    an interrupted job. Exit code 3 if no image can be read. In a .csv file, text that a spreadsheet would run as a
    formula is preceded by an apostrophe.

    Args:
        model: Run folder, weights file of any library, hf:org/name, or name from `plainvit weights`
        inputs: Files, folders, quoted globs, or a known dataset; - reads names from stdin
        out: Write the rows to this .jsonl, .csv or .parquet file
        top: Number of classes per image; default: 5, or all if there are fewer
        sheet: Draw up to 96 of the images with their predictions into this PNG file
        class_names: File with the names of the model's classes: one per line, or a JSON list
        config: How images are read and run through the model
        force: Overwrite an existing file, or the parts of another job
        json: Print JSON: one line per image or, with --out, a summary
    """
    from plainvit.evaluate import outputs

    if top is not None and top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    for path, kinds in ((out, outputs.ROWS), (sheet, (".png",))):
        if path:
            outputs.check_out(path, kinds)
    if out:
        with _set_up(model, inputs, top, config, class_names) as job:
            summary = _write_rows(model, *job, out, sheet, force, json)
        _print_summary(summary, json, _describe_trust(model, sheet))
    else:
        _print_predictions(model, _set_up(model, inputs, top, config, class_names), sheet, json)


def embed(
    model: Model,
    inputs: tuple[str, ...],
    /,
    *,
    out: Path,
    config: InferenceFlags = InferenceFlags(),  # noqa: B008 - it is frozen
    force: bool = False,
    json: bool = False,
) -> None:
    """Compute the features of images, the input of the model's head, into a file.

    One row per image, in the order of the inputs; an unreadable image is a row with its error. A .npz file holds the
    arrays features [N, D], with NaN for such rows, names and errors; it is built in memory, a .parquet file is not. The
    same command resumes an interrupted job.

    Args:
        model: Run folder, weights file of any library, hf:org/name, or name from `plainvit weights`
        inputs: Files, folders, quoted globs, or a known dataset; - reads names from stdin
        out: Write the features to this .parquet or .npz file
        config: How images are read and run through the model
        force: Overwrite an existing file, or the parts of another job
        json: Print a summary as JSON
    """
    from plainvit.evaluate import outputs

    outputs.check_out(out, outputs.FEATURES)
    with _set_up(model, inputs, 0, config) as job:
        summary = _write_rows(model, *job, out, None, force, json)
    _print_summary(summary, json, ())


@contextlib.contextmanager
def _set_up(
    model: str, inputs: Sequence[str], top: int | None, flags: InferenceFlags, class_names: Path | None = None
) -> "Iterator[tuple[PredictionJob, Source, Engine]]":
    """Find the images, then load the model: the images are the more likely to be missing."""
    if flags.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {flags.batch}")
    workers = resolve_workers(flags.workers)
    if flags.address and flags.engine != "ray":
        raise ValueError("--address requires --engine ray")
    from plainvit.evaluate import inputs as images
    from plainvit.evaluate.predict import PredictionJob, predict_locally
    from plainvit.evaluate.predictor import Predictor

    source = images.find(inputs, split=flags.split, data_root=flags.data_root)
    run: Engine = functools.partial(predict_locally, workers=workers)
    device, precision = flags.device, flags.precision
    with contextlib.ExitStack() as stack:
        if flags.engine == "ray":
            from plainvit.evaluate import cluster

            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray prints to stdout, which is for rows
            run = stack.enter_context(cluster.connect_cluster(flags.address, device))
            device, precision = "cpu", run.precision(precision)  # the model is loaded here and runs on the cluster
        settings: dict[str, Any] = {"image_size": flags.image_size, "batch": flags.batch, "class_names": class_names}
        predictor = Predictor(model, device=device, precision=precision, **settings | given_pixel_flags(flags))
        yield PredictionJob(predictor, min(5, predictor.classes) or 1 if top is None else top), source, run


def _write_rows(
    model: str,
    job: "PredictionJob",
    source: "Source",
    run: "Engine",
    out: Path,
    sheet: Path | None,
    force: bool,
    quiet: bool,
) -> "Summary":
    from plainvit.evaluate.predict import write

    if not sheet:
        return write(job, source, out, engine=run, force=force, quiet=quiet)[0]
    from plainvit.analyse.gallery import choose_evenly

    drawn = choose_evenly(len(source))
    summary, rows = write(job, source, out, engine=run, force=force, quiet=quiet, keep=drawn)
    _draw_sheet(model, source, drawn, rows, sheet)
    return summary


def _draw_sheet(model: str, source: "Source", drawn: Any, rows: list[dict[str, Any]], sheet: Path) -> None:
    from plainvit.analyse.figures import save
    from plainvit.analyse.gallery import BYTES, contact_sheet
    from plainvit.evaluate.predict import describe_accuracy_of_run

    accuracy = describe_accuracy_of_run(model)
    save(contact_sheet(source, drawn, rows, f"{model}: {accuracy}" if accuracy else ""), sheet, BYTES)


def _describe_trust(model: str, sheet: Path | None) -> list[str]:
    """The last lines of the output: the model's accuracy, if known, and the path of the contact sheet."""
    from plainvit.evaluate.predict import describe_accuracy_of_run

    accuracy = describe_accuracy_of_run(model)
    return [*([f"{model}: {accuracy}"] if accuracy else []), *([f"sheet: {sheet}"] if sheet else [])]


def _print_summary(summary: "Summary", json: bool, notes: Sequence[str]) -> None:
    """Print the summary of a job; an error if no image could be read."""
    from rich.text import Text

    from plainvit.evaluate.outputs import check_any_readable

    print_result(asdict(summary), None if json else Text("\n".join((summary.line, *notes)), overflow="fold"))
    check_any_readable(summary.images, summary.unreadable, summary.first_error)


def _print_predictions(
    model: str,
    opened: "contextlib.AbstractContextManager[tuple[PredictionJob, Source, Engine]]",
    sheet: Path | None,
    json: bool,
) -> None:
    """Print one line of JSON per image as soon as it is predicted, or a table at the end."""
    from rich.console import Group
    from rich.text import Text

    from plainvit.evaluate.outputs import check_any_readable
    from plainvit.evaluate.predict import rows

    stdout, kept, bad, first = sys.stdout, [], 0, ""
    with opened as (job, source, run):
        if len(source) > MAX_PRINTED and not json:
            raise ValueError(
                f"{len(source):,} images are too many to print (at most {MAX_PRINTED}): "
                "use --out FILE.jsonl, .csv or .parquet"
            )
        for row in rows(job, source, engine=run):
            if row["error"] is not None:
                bad, first = bad + 1, first or f"{row['name']}: {row['error']}"
            kept += [row] if sheet or not json else []
            if json:
                print(_json.dumps(row), file=stdout, flush=True)
    if sheet:
        from plainvit.analyse.gallery import choose_evenly

        drawn = choose_evenly(len(kept))
        _draw_sheet(model, source, drawn, [kept[at] for at in drawn], sheet)
    if not json and bad < len(source):
        print_result(None, Group(_table(kept), *map(Text, _describe_trust(model, sheet))))
    check_any_readable(len(source), bad, first)
    if bad:
        print(f"plainvit: {bad:,} of {len(source):,} images could not be read", file=sys.stderr)


def _table(rows: list[dict[str, Any]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("image", style="cyan", overflow="fold")
    table.add_column("prediction", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("next" if max(len(row["predictions"]) for row in rows) > 1 else "", style="dim", overflow="fold")
    for row in rows:
        name, classes = Text(repr(row["name"])[1:-1]), row["predictions"]
        if row["error"]:
            table.add_row(name, Text(row["error"], style="red"), "", "")
            continue
        rest = ", ".join(f"{_truncate(one['label'])} {_percent(one['probability'])}" for one in classes[1:])
        table.add_row(name, Text(_truncate(classes[0]["label"])), _percent(classes[0]["probability"]), Text(rest))
    return table


def _percent(probability: float) -> str:
    return f"{100 * probability:.1f}\u00a0%"  # no line break before the sign


def _truncate(label: str) -> str:
    return label if len(label) <= 28 else label[:27] + "\u2026"
