"""Many pictures -> rows: what a model says of each, or its features, in the order of the inputs, every image once.

    plainvit predict runs/photos photos/ --out results.jsonl
    plainvit embed runs/photos photos.zip --out features.parquet

Worker processes read and decode while the model answers. A picture that cannot be read, or whose answer is not finite,
is a row with its error. The rows of each batch are a function of the batch alone, so a job that was killed and taken
up again gives the same file; with another --batch it differs in the last digits at most.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from plainvit import __version__
from plainvit.config import Checked, to_json
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.sources import Source, Subset
from plainvit.disk import read_json, run_folder
from plainvit.evaluate.chance import wilson
from plainvit.evaluate.outputs import FEATURES, ROWS, Parts, check_out, look_over
from plainvit.evaluate.predictor import Predictor
from plainvit.runtime.checkpoint import tensor_hash
from plainvit.runtime.display import Display

PART = 1024  # images of a part, or as few batches as hold so many
NOT_FINITE = "the model's answer is not finite"

Answered = Iterator[tuple[int, pa.Table]]  # steps, in any order, each with the rows of its batch
Engine = Callable[["Question", Source, np.ndarray], Answered]


class MemoryFault(ValueError):
    """The device is too small; the command ends with exit code 5."""

    exit_code = 5


@dataclass(frozen=True)
class Question:
    """What is asked of every picture: its `top` most probable classes or, where that is 0, its features."""

    predictor: Predictor
    top: int = 0

    def __post_init__(self) -> None:
        classes = self.predictor.classes
        if self.top and not classes:
            raise ValueError("the model has no head, so it can name no class: plainvit embed gives its features")
        if not 0 <= self.top <= classes:
            raise ValueError(f"top is {self.top}, the model has {classes} classes")

    @property
    def batch(self) -> int:
        return self.predictor.batch

    def steps(self, source: Source) -> int:
        return -(-len(source) // self.batch)

    def ask(self, images: Tensor) -> "Answer":
        """On a GPU this returns at once: the answer is under way."""
        try:
            found = self.predictor.logits(images) if self.top else self.predictor.features(images)
            finite = found.isfinite().all(-1)
            if not self.top:
                return _under_way(finite, found)
            best = found.softmax(-1).topk(self.top)
            return _under_way(finite, best.values, best.indices)
        except torch.OutOfMemoryError as error:
            raise MemoryFault(f"the GPU has no room for a batch of {len(images)}: give a smaller --batch") from error

    def rows(self, answer: "Answer", names: list[str], errors: list[str | None]) -> pa.Table:
        """One row a picture: name, guesses or features, error."""
        finite, *found = answer.wait()
        pairs = zip(errors, finite.tolist(), strict=True)
        errors = [NOT_FINITE if error is None and not good else error for error, good in pairs]
        values = self._guesses(found[0], found[1], errors) if self.top else _features(found[0], errors)
        columns = {"name": _texts(names), "guesses" if self.top else "features": values, "error": _texts(errors)}
        return pa.table(columns).replace_schema_metadata({"top": str(self.top)})

    def _guesses(self, values: Tensor, places: Tensor, errors: list[str | None]) -> pa.Array:
        """By columns: at thousands of images a second, rows made one by one would be what the GPU waits for."""
        good = torch.tensor([error is None for error in errors])
        sure = [float(f"{p:.7g}") for p in values[good].flatten().tolist()]
        labels = self.class_names.take(pa.array(places[good].flatten().numpy()))
        ends = torch.cat((torch.zeros(1, dtype=torch.int32), (good * self.top).cumsum(0, dtype=torch.int32)))
        pairs = pa.StructArray.from_arrays([labels, pa.array(sure, pa.float64())], ["label", "probability"])
        return pa.ListArray.from_arrays(pa.array(ends.numpy()), pairs)

    @functools.cached_property
    def class_names(self) -> pa.Array:
        return pa.array(self.predictor.class_names, pa.string())

    def describe(self, source: Source) -> dict[str, Any]:
        """All that the rows depend on, but for the batch, which changes their last digits at most."""
        predictor, config = self.predictor, self.predictor.model.config
        return {
            "plainvit": __version__,
            "model": predictor.weights_hash,
            "config": to_json(config) if isinstance(config, Checked) else str(config),
            "class names": tensor_hash({"/".join(predictor.class_names): torch.zeros(0)})[:16],
            "inputs": source.fingerprint(),
            "images": len(source),
            "top": self.top,
            "precision": str(predictor.dtype).removeprefix("torch."),
            "preprocess": to_json(predictor.preprocess),
            "image size": list(predictor.size),
        }


class Answer(NamedTuple):
    """Tensors on their way to the host."""

    tensors: tuple[Tensor, ...]
    event: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        if self.event:
            self.event.synchronize()
        return self.tensors


def _under_way(*tensors: Tensor) -> Answer:
    """Copied behind the model's work but before the next batch's, so that waiting for it leaves the GPU at work."""
    if not tensors[0].is_cuda:
        return Answer(tensors, None)
    here = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    event = torch.cuda.Event()
    event.record()
    return Answer(here, event)


def _features(found: Tensor, errors: list[str | None]) -> pa.Array:
    wrong = np.array([error is not None for error in errors])
    flat = pa.array(found.numpy().reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, found.shape[1], mask=pa.array(wrong))


def _texts(column: Sequence[str | None]) -> pa.Array:
    """A file's name may be any bytes; these are UTF-8."""
    shown = (None if text is None else os.fsencode(text).decode("utf-8", "backslashreplace") for text in column)
    return pa.array(list(shown), pa.string())


# On this machine ------------------------------------------------------------------------------------------------------


def locally(question: Question, source: Source, steps: np.ndarray, workers: int | None = None) -> Answered:
    """The rows of these steps: while a batch is with the model, workers decode the next and the last one's are made."""
    size, device = question.batch, question.predictor.device
    index = (steps[:, None] * size + np.arange(size)).reshape(-1)
    index = index[index < len(source)]
    batches = evaluation_batches(
        Subset(source, index),
        batch=size,
        size=question.predictor.size,
        preprocess=question.predictor.preprocess,
        workers=_workers(len(index), device) if workers is None else workers,
        device=device,
    )
    yield from answered(question, source, index, batches)


def answered(question: Question, source: Source, index: np.ndarray, batches: Iterator[Batch]) -> Answered:
    """The rows of ready batches, whose images stand at `index` in the source."""
    waiting: tuple[Batch, Answer] | None = None
    for batch in batches:
        answer = question.ask(batch.images)
        if waiting:
            yield _finished(question, source, index, *waiting)
        waiting = batch, answer
    if waiting:
        yield _finished(question, source, index, *waiting)


def _finished(
    question: Question, source: Source, index: np.ndarray, batch: Batch, answer: Answer
) -> tuple[int, pa.Table]:
    where, bad = index[batch.index], dict(batch.bad)
    errors = [bad.get(int(one)) for one in batch.index]
    return int(where[0]) // question.batch, question.rows(answer, [source.name(int(one)) for one in where], errors)


def _workers(images: int, device: str) -> int:
    """None for what is over before they have started; on a CPU the model needs the cores more than they do."""
    cores = os.cpu_count() or 1
    return 0 if images < 64 else min(cores, 16) if device.startswith("cuda") else max(min(cores // 2, 8), 1)


# The job --------------------------------------------------------------------------------------------------------------


def trust(model: str | Path) -> str:
    """How often a run was right on images that it had not learned from; empty where that is not known."""
    try:
        stored = read_json(run_folder(model) / "results.json")
    except ValueError:  # a file of this name beside another library's weights may be anything
        return ""
    for split in ("test", "val"):
        found = stored.get(split)
        top1, images = (found.get("top1"), found.get("images")) if isinstance(found, dict) else (None, None)
        if isinstance(top1, int | float) and 0 <= top1 <= 1 and isinstance(images, int) and images > 0:
            right = round(top1 * images)
            between = "-".join(f"{100 * end:.0f}" for end in wilson(right, images))
            return f"of {images:,} images kept apart {right:,} were right (95 % interval {between} %)"
    return ""


@dataclass(frozen=True)
class Summary:
    """How a job ended."""

    out: str
    images: int
    unreadable: int  # or without a finite answer
    first_error: str
    resumed: int  # images whose rows were there already
    seconds: float

    @property
    def line(self) -> str:
        done = self.images - self.resumed
        words = [f"{self.images:,} images", f"{self.unreadable:,} without an answer ({self.first_error})"]
        words += [f"{self.resumed:,} done before"] if self.resumed else []
        rate = f", {done / self.seconds:,.0f} images/s" if done else ""
        return f"{', '.join(words if self.unreadable else [words[0], *words[2:]])}{rate}: {self.out}"


def write(
    question: Question,
    source: Source,
    out: Path,
    *,
    engine: Engine = locally,
    force: bool = False,
    quiet: bool = True,
    part: int = PART,
    keep: Sequence[int] | np.ndarray = (),
) -> tuple[Summary, list[dict[str, Any]]]:
    """Every image's row into one file. Killed at any time and called again, it goes on with what is missing.

    Also gives back the rows numbered in `keep`, for whoever wants to show some.
    """
    check_out(out, ROWS if question.top else FEATURES)
    start, size = time.monotonic(), question.batch
    parts = Parts(out, question.describe(source), images=len(source), batch=size, part=part, force=force)
    try:
        missing = parts.missing()
        todo = sum(min(size, len(source) - int(step) * size) for step in missing)
        done = len(source) - todo
        with Display("images", len(source), done, quiet=quiet) as display:
            for step, table in engine(question, source, missing) if todo else ():
                parts.add(step, table)
                done += len(table)
                display.advance(done, f"{(done + todo - len(source)) / (time.monotonic() - start):,.0f}/s")
        found, kept = look_over(parts.tables(), np.asarray(keep, np.int64))
        parts.finish()
    finally:
        parts.close()
    return Summary(str(out), *found, len(source) - todo, time.monotonic() - start), kept


def rows(question: Question, source: Source, *, engine: Engine = locally) -> Iterator[dict[str, Any]]:
    """Every image's row, in order, for few images or for a pipe."""
    held: dict[int, pa.Table] = {}
    due = 0
    for step, table in engine(question, source, np.arange(question.steps(source))):
        held[step] = table
        while due in held:
            yield from held.pop(due).to_pylist()
            due += 1
