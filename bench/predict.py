"""Prediction over many photos compared with the bare model on the same batches, in the same run.

    python -m bench.predict --data DIR [--json FILE] [--device cuda] [--model ViT-S/16]

DIR holds `imagenet-photos` as parquet shards; the photos are repeated as hard links. Four rates, interleaved: the bare
model on ready batches; Predictor.logits on them; the whole of predict on them, from batches to rows in a file; and
predict from the files, where decoding takes its part of the same cores. The target: the second and third within 10 %
of the first. On a CPU that others use too, --clock cpu --workers (none) compares what the model and predict work.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import plainvit
from bench.input import write_folder
from bench.measure import interleaved, make_parser, report, seconds_a_call, summary
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.sources import Source
from plainvit.evaluate import inputs
from plainvit.evaluate.predict import OutputBatches, PredictionJob, predict_batches, predict_locally, write
from plainvit.evaluate.predictor import Predictor


def bare(predictor: Predictor, batches: list[Batch]) -> None:
    """As one would write it by hand."""
    kind = predictor.device.split(":")[0]
    low = predictor.dtype is not torch.float32
    with torch.no_grad(), torch.autocast(kind, predictor.dtype, enabled=low):
        for batch in batches:
            predictor.model(batch.images)


def through_predictor(predictor: Predictor, batches: list[Batch]) -> None:
    for batch in batches:
        predictor.logits(batch.images)


def to_file(question: PredictionJob, source: Source, out: Path, engine: Callable[..., OutputBatches]) -> None:
    write(question, source, out, engine=engine, force=True)


def on_ready(batches: list[Batch], question: PredictionJob, source: Source, steps: np.ndarray) -> OutputBatches:
    """predict's engine without the decoding; every step's batch is there already."""
    assert len(steps) == len(batches)
    yield from predict_batches(question, source, np.arange(len(source)), iter(batches))


def measure(
    predictor: Predictor, source: Source, work: Path, repeats: int, workers: list[int], clock: Callable[[], float]
) -> dict[str, Any]:
    device, question = predictor.device, PredictionJob(predictor, 5)
    how: dict[str, Any] = {"batch": predictor.batch, "size": predictor.size, "preprocess": predictor.preprocess}
    batches = list(evaluation_batches(source, device=device, **how))
    ready = partial(on_ready, batches)
    runs: dict[str, Callable[[], object]] = {
        "bare model": partial(bare, predictor, batches),
        "Predictor.logits": partial(through_predictor, predictor, batches),
        "predict, ready batches to .jsonl": partial(to_file, question, source, work / "ready.jsonl", ready),
    }
    for count in workers:
        engine = partial(predict_locally, workers=count)
        runs[f"predict, photos to .jsonl, {count} workers"] = partial(
            to_file, question, source, work / f"{count}.jsonl", engine
        )
    bare(predictor, batches[:2])  # warm
    timed = {name: lambda run=run: len(source) / seconds_a_call(run, 1, device, clock) for name, run in runs.items()}
    return {name: summary(values) for name, values in interleaved(timed, repeats).items()}


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--data", type=Path, required=True, help="folder with imagenet-photos")
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--copies", type=int, default=8, help="times that each photo is taken")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2], help="none: ready batches alone")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: seconds of this process's cores")
    options = parser.parse_args()
    model = plainvit.create(options.model, classes=1000)
    torch.nn.init.normal_(model.head.weight, std=0.02)  # zeros would give ties
    predictor = Predictor(model, device=options.device, precision=options.precision, batch=options.batch)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        count = write_folder(str(options.data / "imagenet-photos"), work / "photos", options.copies)
        source = inputs.find([str(work / "photos")])
        found = measure(predictor, source, work, options.repeats, options.workers, clock)
    first = found["bare model"]["median"]
    unit = f"img/s ({count} images, batch {options.batch}, {options.clock} time)"
    rows = [
        {"what": name, **value, "unit": unit, "remark": f"{value['median'] / first:.1%} of the bare model"}
        for name, value in found.items()
    ]
    about = f"{options.model} on {predictor.device}, {str(predictor.dtype).removeprefix('torch.')}"
    report("bench.predict", f"prediction, {about}", rows, options.json)


if __name__ == "__main__":
    main()
