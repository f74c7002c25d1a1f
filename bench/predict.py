"""Prediction over many photos compared with the model alone on the same batches, interleaved.

    python -m bench.predict --data DIR [--json FILE] [--device cuda] [--model ViT-S/16]

The photos of imagenet-photos are repeated as hard links. Measured: the model alone on preprocessed batches;
Predictor.logits on them; `plainvit predict` on them, with rows written to a file; and `plainvit predict` from photo
files, where decoding uses the same cores. Target: the second and third within 10 % of the first. With --http also
`plainvit serve`: clients in four processes on the same cores send one or 16 photos per request.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import plainvit
from bench.clients import encode_request, find_port, measure_server, start_server
from bench.measure import make_parser, report, run_interleaved, summarize, time_calls
from bench.photos import BY_CLASS, read_photos, write_images
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.sources import Source, open_source
from plainvit.evaluate import inputs
from plainvit.evaluate.predict import OutputBatches, PredictionJob, predict_batches, predict_locally, write
from plainvit.evaluate.predictor import Predictor

MODEL_ALONE = "model alone"
CLIENTS, PROCESSES = 64, 4


def run_model(predictor: Predictor, batches: list[Batch]) -> None:
    kind = predictor.device.split(":")[0]
    is_low = predictor.dtype is not torch.float32
    with torch.no_grad(), torch.autocast(kind, predictor.dtype, enabled=is_low):
        for batch in batches:
            predictor.model(batch.images)


def run_predictor(predictor: Predictor, batches: list[Batch]) -> None:
    for batch in batches:
        predictor.logits(batch.images)


def predict_preprocessed(batches: list[Batch], job: PredictionJob, source: Source, steps: np.ndarray) -> OutputBatches:
    """An engine of `plainvit predict` that reads no files."""
    assert len(steps) == len(batches)
    yield from predict_batches(job, source, np.arange(len(source)), iter(batches))


def measure(predictor: Predictor, source: Source, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    device, job = predictor.device, PredictionJob(predictor, 5)
    options: dict[str, Any] = {"batch": predictor.batch, "size": predictor.size, "preprocess": predictor.preprocess}
    batches = list(evaluation_batches(source, device=device, **options))
    engines: dict[str, Callable[..., OutputBatches]] = {"preprocessed batches": partial(predict_preprocessed, batches)}
    engines |= {f"photo files, {count} workers": partial(predict_locally, workers=count) for count in args.workers}
    runs: dict[str, Callable[[], object]] = {
        MODEL_ALONE: partial(run_model, predictor, batches),
        "Predictor.logits": partial(run_predictor, predictor, batches),
    }
    run_model(predictor, batches[:2])  # warm up
    with tempfile.TemporaryDirectory() as folder:
        for name, engine in engines.items():
            out = Path(folder) / f"{name}.jsonl"
            runs[f"predict, {name}"] = partial(write, job, source, out, engine=engine, force=True)
        rates = {name: lambda run=run: len(source) / time_calls(run, 1, device) for name, run in runs.items()}
        return {name: summarize(values) for name, values in run_interleaved(rates, args.repeats).items()}


def measure_http(weights: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Photos/s of `plainvit serve` with one and with 16 photos per request."""
    photos, port = read_photos(args.data), find_port()
    command = [sys.executable, "-m", "plainvit", "serve", f"model={weights}", "--port", str(port)]
    command += ["--device", args.device, "--backend", "torch", "--deadline", "60"]
    command += ["--max-queue", "4096", "--max-batch", str(args.batch)]
    results: dict[str, dict[str, Any]] = {}
    with start_server(command, port, [encode_request(photos[:1])]) as session:
        for size in (1, 16):
            requests = [encode_request((photos * size)[start : start + size]) for start in range(len(photos))]
            options = {"clients": CLIENTS, "seconds": args.http, "processes": PROCESSES}
            runs = [measure_server(session, port, requests, **options) for _ in range(args.repeats)]
            name = f"HTTP, photos per request: {size}, {CLIENTS} clients"
            results[name] = summarize([size * run["rate"] for run in runs])
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=5, data="imagenet-photos")
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--copies", type=int, default=8, help="How often each of the 48 photos is predicted")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2], help="Numbers of decoding processes")
    parser.add_argument("--http", type=float, default=0.0, help="Also measure `plainvit serve`, for so many seconds")
    args = parser.parse_args(arguments)
    model = plainvit.create(args.model, classes=1000)
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, std=0.02)  # a head of zeros would give ties
    predictor = Predictor(model, device=args.device, batch=args.batch)
    with tempfile.TemporaryDirectory() as folder:
        photos = open_source(str(args.data / "imagenet-photos"))
        count = write_images(photos, Path(folder) / "photos", f"{BY_CLASS}.jpg", args.copies)
        results = measure(predictor, inputs.find([f"{folder}/photos"]), args)
        if args.http:
            results |= measure_http(plainvit.save(model, Path(folder) / "model.safetensors"), args)
    baseline = results[MODEL_ALONE]["median"]
    unit = f"img/s ({count} images, batch {args.batch})"
    rows = [
        {"name": name, **values, "unit": unit, "remark": f"{values['median'] / baseline:.1%} of the model"}
        for name, values in results.items()
    ]
    dtype = str(predictor.dtype).removeprefix("torch.")
    report("bench.predict", arguments, args.json, f"prediction, {args.model} on {predictor.device}, {dtype}", rows)


if __name__ == "__main__":
    main()
