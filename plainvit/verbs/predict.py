"""What a model says of many pictures: predict, embed."""

import contextlib
import functools
import json as _json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from plainvit.verbs.words import Model, PixelFlags, chosen_workers, given_pixels, show

if TYPE_CHECKING:
    from rich.table import Table

    from plainvit.data.sources import Source
    from plainvit.evaluate.predict import Engine, Question, Summary

Pictures = Annotated[tuple[str, ...], Positional, arg(metavar="INPUT ...", help_behavior_hint="(required)")]
MOST_SHOWN = 200  # pictures whose guesses are printed for people; more belong into a file


@dataclass(frozen=True, kw_only=True)
class How(PixelFlags):
    """How pictures are found and asked about, whatever is asked of them."""

    batch: int = 64  # Pictures that the model sees at a time; may change when a job is continued
    image_size: int | None = None  # Height and width in pixels at which the model sees them; its own by default
    device: str = "auto"  # cpu, cuda, cuda:1; auto: a GPU where there is one
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # Of the arithmetic; auto is bf16 on a GPU, else fp32
    workers: int = -1  # Processes that read images; -1: as many as suit the machine
    engine: Literal["local", "ray"] = "local"
    """local is this machine; ray is a cluster, whose machines must all see the inputs under the same paths"""
    address: str | None = None
    """A running Ray cluster, HOST:PORT or auto; without it, one is started on this machine and ended again"""
    split: str = "test"  # Of an input that is a data set: train, val or test
    data_root: Path | None = None  # Where known data sets lie, each in a folder of its name


Options = Annotated[How, arg(name="")]


def predict(
    model: Model,
    inputs: Pictures,
    /,
    *,
    out: Path | None = None,
    top: int | None = None,
    sheet: Path | None = None,
    config: Options = How(),  # noqa: B008 - it is frozen
    force: bool = False,
    json: bool = False,
) -> None:
    """The most probable classes of every picture, to a file (.jsonl, .csv, .parquet) or, for a few, to the screen.

    One row a picture, in the order of the inputs; one that cannot be read is a row with its error. Killed at any time,
    the same line goes on with the pictures that are missing. Exit code 3 if no picture has an answer. In a .csv file,
    text that a spreadsheet would take for a formula has an apostrophe before it.

    Args:
        model: A run folder, weights of any library, hf:org/name, a name from `plainvit weights`, or timm:NAME.
        inputs: Files, folders, globs in quotes, archives (.zip, .tar ...), a known data set; - reads names from stdin.
        out: Write the rows to this file.
        top: Guesses for each picture: 5, or all classes where there are fewer.
        sheet: Also draw up to 96 of the pictures with their guesses to this PNG.
        config: How they are found and asked about.
        force: Begin anew over an existing file, or over parts of another job.
        json: Print JSON for machines: a line a picture or, with --out, a summary.
    """
    from plainvit.evaluate import outputs

    if top is not None and top < 1:
        raise ValueError(f"top is {top}: at least 1")
    for path, kinds in ((out, outputs.ROWS), (sheet, (".png",))):
        if path:
            outputs.check_out(path, kinds)
    if out:
        with _asked(model, inputs, top, config) as asked:
            summary = _written(model, *asked, out, sheet, force, json)
        _tell(summary, json, _beside(model, sheet))
    else:
        _print(model, _asked(model, inputs, top, config), sheet, json)


def embed(
    model: Model,
    inputs: Pictures,
    /,
    *,
    out: Path,
    config: Options = How(),  # noqa: B008 - it is frozen
    force: bool = False,
    json: bool = False,
) -> None:
    """The features of every picture, what the model's last layer reads, to a file (.parquet, .safetensors).

    One row a picture, in the order of the inputs; one that cannot be read is a row with its error. A .safetensors file
    has features [N, D], with NaN for such rows, and names and errors as UTF-8 with a zero byte between two of them; it
    is put together in memory, a .parquet file is not. Killed at any time, the same line goes on with what is missing.

    Args:
        model: A run folder, weights of any library, hf:org/name, a name from `plainvit weights`, or timm:NAME.
        inputs: Files, folders, globs in quotes, archives (.zip, .tar ...), a known data set; - reads names from stdin.
        out: Write the features to this file.
        config: How they are found and asked about.
        force: Begin anew over an existing file, or over parts of another job.
        json: Print a summary in JSON for machines.
    """
    from plainvit.evaluate import outputs

    outputs.check_out(out, outputs.FEATURES)
    with _asked(model, inputs, 0, config) as asked:
        summary = _written(model, *asked, out, None, force, json)
    _tell(summary, json, ())


@contextlib.contextmanager
def _asked(model: str, inputs: Sequence[str], top: int | None, how: How) -> "Iterator[tuple[Question, Source, Engine]]":
    """The question, the pictures and who answers. The pictures come first: they are the likelier to be missing."""
    if not inputs:
        raise ValueError("no INPUT is given: files, folders, globs, archives, or - for names on standard input")
    if how.batch < 1:
        raise ValueError(f"batch is {how.batch}: at least 1")
    workers = chosen_workers(how.workers)
    if how.address and how.engine != "ray":
        raise ValueError("--address goes with --engine ray")
    from plainvit.evaluate import inputs as pictures
    from plainvit.evaluate.predict import Question, locally
    from plainvit.evaluate.predictor import Predictor

    source = pictures.find(inputs, split=how.split, data_root=how.data_root)
    run: Engine = functools.partial(locally, workers=workers)
    device, precision = how.device, how.precision
    with contextlib.ExitStack() as stack:
        if how.engine == "ray":
            from plainvit.evaluate import cluster

            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray prints at any time; stdout is for rows
            run = stack.enter_context(cluster.joined(how.address, device))
            device, precision = "cpu", run.precision(precision)  # the model is loaded here and answers there
        settings: dict[str, Any] = {"image_size": how.image_size, "batch": how.batch} | given_pixels(how)
        predictor = Predictor(model, device=device, precision=precision, **settings)
        yield Question(predictor, min(5, predictor.classes) or 1 if top is None else top), source, run


def _written(
    model: str,
    question: "Question",
    source: "Source",
    run: "Engine",
    out: Path,
    sheet: Path | None,
    force: bool,
    quiet: bool,
) -> "Summary":
    from plainvit.evaluate.predict import write

    if not sheet:
        return write(question, source, out, engine=run, force=force, quiet=quiet)[0]
    from plainvit.analyse.gallery import chosen

    shown = chosen(len(source))
    summary, rows = write(question, source, out, engine=run, force=force, quiet=quiet, keep=shown)
    _draw(model, source, shown, rows, sheet)
    return summary


def _draw(model: str, source: "Source", shown: Any, rows: list[dict[str, Any]], sheet: Path) -> None:
    from plainvit.analyse.figures import save
    from plainvit.analyse.gallery import BYTES, contact_sheet
    from plainvit.evaluate.predict import trust

    said = trust(model)
    save(contact_sheet(source, shown, rows, f"{model}: {said}" if said else ""), sheet, BYTES)


def _beside(model: str, sheet: Path | None) -> list[str]:
    """The last lines for people: how far to trust the answers, where that is known, and where the pictures are."""
    from plainvit.evaluate.predict import trust

    said = trust(model)
    return [*([f"{model}: {said}"] if said else []), *([f"sheet: {sheet}"] if sheet else [])]


def _tell(summary: "Summary", json: bool, beside: Sequence[str]) -> None:
    """How it ended, then exit code 3 where nothing could be read."""
    from rich.text import Text

    from plainvit.evaluate.outputs import refuse_all_bad

    show(asdict(summary), None if json else Text("\n".join((summary.line, *beside)), overflow="fold"))
    refuse_all_bad(summary.images, summary.unreadable, summary.first_error)


def _print(
    model: str,
    asking: "contextlib.AbstractContextManager[tuple[Question, Source, Engine]]",
    sheet: Path | None,
    json: bool,
) -> None:
    """A line of JSON a picture as it comes, or a table."""
    from rich.console import Group
    from rich.text import Text

    from plainvit.evaluate.outputs import refuse_all_bad
    from plainvit.evaluate.predict import rows

    stdout, kept, bad, first = sys.stdout, [], 0, ""
    with asking as (question, source, run):
        if len(source) > MOST_SHOWN and not json:
            said = "are too many for the screen: give --out FILE.jsonl, .csv or .parquet"
            raise ValueError(f"{len(source):,} images {said}")
        for row in rows(question, source, engine=run):
            if row["error"] is not None:
                bad, first = bad + 1, first or f"{row['name']}: {row['error']}"
            kept += [row] if sheet or not json else []
            if json:
                print(_json.dumps(row), file=stdout, flush=True)
    if sheet:
        _sheet(model, source, kept, sheet)
    if not json and bad < len(source):
        show(None, Group(_table(kept), *map(Text, _beside(model, sheet))))
    refuse_all_bad(len(source), bad, first)
    if bad:
        print(f"plainvit: {bad:,} of {len(source):,} images have no answer", file=sys.stderr)


def _sheet(model: str, source: "Source", rows: list[dict[str, Any]], sheet: Path) -> None:
    from plainvit.analyse.gallery import chosen

    shown = chosen(len(rows))
    _draw(model, source, shown, [rows[at] for at in shown], sheet)


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
