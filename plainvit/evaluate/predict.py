"""Batch prediction: one row of predictions or features per image, in the order of the inputs.

    plainvit predict runs/photos photos/ --out results.jsonl
    plainvit embed runs/photos photos/ --out features.parquet

Worker processes decode while the model computes. An unreadable image, or one with a non-finite prediction, is a row
with an error. The rows of a batch depend on the batch alone, so a resumed job writes the same file; another --batch
changes at most the last digits.
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
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.sources import Source, Subset
from plainvit.disk import run_folder
from plainvit.evaluate.outputs import FEATURE_FORMATS, ROW_FORMATS, Parts, check_out, summarize
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.runtime.display import Display
from plainvit.runtime.folder import read_results

PART = 1024  # images per part of the output, rounded up to full batches
NON_FINITE = "the prediction is NaN or Inf"

OutputBatches = Iterator[tuple[int, pa.Table]]  # (step, rows of its batch), in any order
Engine = Callable[["PredictionJob", Source, np.ndarray], OutputBatches]


@dataclass(frozen=True)
class PredictionJob:
    """What to predict: the `top` most probable classes, or features if `top` is 0."""

    predictor: Predictor
    top: int = 0

    def __post_init__(self) -> None:
        classes = self.predictor.classes
        if self.top and not classes:
            raise ValueError("the model has no head and cannot predict classes: use `plainvit embed` for its features")
        if not 0 <= self.top <= classes:
            raise ValueError(f"--top must be at most the model's {classes} classes, got {self.top}")

    @property
    def batch(self) -> int:
        return self.predictor.batch

    def steps(self, source: Source) -> int:
        return -(-len(source) // self.batch)

    def run(self, images: Tensor) -> "PendingOutput":
        """Runs the model. On a GPU this returns before the results are ready."""
        outputs = self.predictor.logits(images) if self.top else self.predictor.features(images)
        finite = outputs.isfinite().all(-1)
        if not self.top:
            return _copy_to_host(finite, outputs)
        best = outputs.softmax(-1).topk(self.top)
        return _copy_to_host(finite, best.values, best.indices)

    def make_table(self, output: "PendingOutput", names: list[str], errors: list[str | None]) -> pa.Table:
        """One row per image: name, predictions or features, error."""
        finite, *outputs = output.wait()
        pairs = zip(errors, finite.tolist(), strict=True)
        errors = [NON_FINITE if error is None and not is_finite else error for error, is_finite in pairs]
        if self.top:
            probabilities, classes = outputs
            values = self._make_predictions(probabilities, classes, errors)
        else:
            values = _make_features(outputs[0], errors)
        columns = {"name": _make_texts(names), "predictions" if self.top else "features": values}
        columns["error"] = _make_texts(errors)
        return pa.table(columns).replace_schema_metadata({"top": str(self.top)})

    def _make_predictions(self, values: Tensor, classes: Tensor, errors: list[str | None]) -> pa.Array:
        """Built by column: row by row would be slower than a GPU at thousands of images per second."""
        valid = torch.tensor([error is None for error in errors])
        probabilities = [float(f"{p:.7g}") for p in values[valid].flatten().tolist()]
        labels = self.class_names.take(pa.array(classes[valid].flatten().numpy()))
        ends = torch.cat((torch.zeros(1, dtype=torch.int32), (valid * self.top).cumsum(0, dtype=torch.int32)))
        pairs = pa.StructArray.from_arrays([labels, pa.array(probabilities, pa.float64())], ["label", "probability"])
        return pa.ListArray.from_arrays(pa.array(ends.numpy()), pairs)

    @functools.cached_property
    def class_names(self) -> pa.Array:
        return pa.array(self.predictor.class_names, pa.string())

    def describe(self, source: Source) -> dict[str, Any]:
        """Everything that the rows depend on, except the batch size, which changes at most the last digits."""
        return {
            "plainvit": __version__,
            **self.predictor.describe(),
            "class names": list(self.predictor.class_names) if self.top else [],
            "inputs": source.fingerprint(),
            "images": len(source),
            "top": self.top,
        }


class PendingOutput(NamedTuple):
    """Tensors that are being copied to the host."""

    tensors: tuple[Tensor, ...]
    event: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        if self.event:
            self.event.synchronize()
        return self.tensors


def _copy_to_host(*tensors: Tensor) -> PendingOutput:
    """Starts the copies before the next batch, so that the GPU is busy while the host waits for them."""
    if not tensors[0].is_cuda:
        return PendingOutput(tensors, None)
    copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    event = torch.cuda.Event()
    event.record()
    return PendingOutput(copies, event)


def _make_features(features: Tensor, errors: list[str | None]) -> pa.Array:
    """A list per image, or null. Not of a fixed size: before version 26, pyarrow cannot read such lists with nulls."""
    rows = np.array([error is None for error in errors])
    offsets = np.concatenate(([0], np.cumsum(rows * features.shape[1])))
    values = pa.array(features.numpy()[rows].reshape(-1))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=pa.array(~rows))


def _make_texts(column: Sequence[str | None]) -> pa.Array:
    """Valid UTF-8: the name of a file may be any bytes."""
    texts = (None if text is None else os.fsencode(text).decode("utf-8", "backslashreplace") for text in column)
    return pa.array(list(texts), pa.string())


# On this machine ------------------------------------------------------------------------------------------------------


def predict_locally(job: PredictionJob, source: Source, steps: np.ndarray, workers: int | None = None) -> OutputBatches:
    """The rows of these steps, on this machine; workers decode ahead of the model."""
    size = job.batch
    index = (steps[:, None] * size + np.arange(size)).reshape(-1)
    index = index[index < len(source)]
    batches = evaluation_batches(
        Subset(source, index),
        batch=size,
        size=job.predictor.size,
        preprocess=job.predictor.preprocess,
        workers=workers,
        device=job.predictor.device,
    )
    yield from predict_batches(job, source, index, batches)


def predict_batches(job: PredictionJob, source: Source, index: np.ndarray, batches: Iterator[Batch]) -> OutputBatches:
    """The rows of batches, whose images are at `index` in the source; the model runs one batch ahead of the rows."""
    started = ((batch, job.run(batch.images)) for batch in batches)
    pending = next(started, None)
    while pending:
        (batch, output), pending = pending, next(started, None)
        positions, bad = index[batch.index], dict(batch.bad)
        names = [source.name(position) for position in positions.tolist()]
        errors = [bad.get(position) for position in batch.index.tolist()]
        yield int(positions[0]) // job.batch, job.make_table(output, names, errors)


# The job --------------------------------------------------------------------------------------------------------------


def describe_accuracy_of_run(model: str | Path) -> str:
    """The accuracy of a run on its test images, else on its validation images; "" if it is not known."""
    try:
        results = read_results(run_folder(model))
    except ValueError:  # next to another library's weights it may be any file
        return ""
    for split, title in (("test", "test"), ("val", "validation")):
        metrics = results.get(split, {})
        if {"top1", "images"} <= metrics.keys():
            correct, images = round(metrics["top1"] * metrics["images"]), metrics["images"]
            interval = "-".join(f"{100 * end:.0f}" for end in wilson(correct, images))
            return f"{correct:,} of {images:,} {title} images were correct (95 % interval {interval} %)"
    return ""


@dataclass(frozen=True)
class Summary:
    """Counts of a finished job."""

    out: str
    images: int
    unreadable: int  # or with a non-finite prediction
    first_error: str
    resumed: int  # images finished by an earlier call
    seconds: float

    @property
    def line(self) -> str:
        computed = self.images - self.resumed
        counts = [f"{self.images:,} images"]
        counts += [f"{self.unreadable:,} failed ({self.first_error})"] if self.unreadable else []
        counts += [f"{self.resumed:,} resumed"] if self.resumed else []
        counts += [f"{computed / self.seconds:,.0f} images/s"] if computed else []
        return f"{', '.join(counts)}: {self.out}"


def write(
    job: PredictionJob,
    source: Source,
    out: Path,
    *,
    engine: Engine = predict_locally,
    force: bool = False,
    quiet: bool = True,
    part: int = PART,
    keep: Sequence[int] | np.ndarray = (),
) -> tuple[Summary, list[dict[str, Any]]]:
    """Writes the rows of all images into one file. After a kill, call it again to resume.

    Also returns the rows at the positions in `keep`.
    """
    check_out(out, ROW_FORMATS if job.top else FEATURE_FORMATS)
    start, size = time.monotonic(), job.batch
    parts = Parts(out, job.describe(source), images=len(source), batch=size, part=part, force=force)
    missing = parts.missing()
    todo = sum(min(size, len(source) - int(step) * size) for step in missing)
    done = len(source) - todo
    with Display("images", len(source), done, quiet=quiet) as display:
        for step, table in engine(job, source, missing) if todo else ():
            parts.add(step, table)
            done += len(table)
            display.advance(done, f"{(done + todo - len(source)) / (time.monotonic() - start):,.0f}/s")
    counts, kept = summarize(parts.tables(), np.asarray(keep, np.int64))
    parts.finish()
    return Summary(str(out), *counts, len(source) - todo, time.monotonic() - start), kept


def predict_rows(job: PredictionJob, source: Source, *, engine: Engine = predict_locally) -> Iterator[dict[str, Any]]:
    """Yields the rows of all images in order, without a file."""
    waiting: dict[int, pa.Table] = {}
    next_step = 0
    for step, table in engine(job, source, np.arange(job.steps(source))):
        waiting[step] = table
        while next_step in waiting:
            yield from waiting.pop(next_step).to_pylist()
            next_step += 1
