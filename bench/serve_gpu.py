"""Photos per second over HTTP relative to offline prediction with the same model, on a GPU.

    python -m bench.serve_gpu --data DIR [--models Ti/16,B/16] [--seconds 10] [--json FILE]
    python -m bench.serve_gpu --data DIR --device cpu --models Ti/16 --seconds 2 --images 192     a trial

The 48 photos of imagenet-photos, JPEGs of about 100 kB, are sent again and again. The weights are random.

model alone           Predictor.logits on batches that are on the device already
offline, photos       `plainvit predict` without writing a file: worker processes decode while the model computes
N per request         `plainvit serve`, and clients with one request at a time each

The clients run in four processes on the same cores as the server. "CPU ms" is the CPU time of the server per photo.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch

import plainvit
from bench.clients import encode_request, find_port, measure_server, start_server
from bench.measure import count_calls, make_parser, print_table, synchronize, time_calls, write_results
from bench.photos import read_photos
from plainvit.data.sources import Subset, open_source
from plainvit.evaluate.predict import PredictionJob, predict_locally
from plainvit.evaluate.predictor import Predictor

BATCH, CLIENTS, PROCESSES = 64, 64, 4


def measure_model(predictor: Predictor, seconds: float) -> float:
    """Images/s."""
    images = torch.randint(0, 256, (BATCH, 3, *predictor.size), dtype=torch.uint8).to(predictor.device)

    def run() -> None:
        predictor.logits(images)
        synchronize(predictor.device)

    run()  # warm up
    return BATCH / time_calls(run, count_calls(run, predictor.device, seconds), predictor.device)


def measure_offline(predictor: Predictor, data: Path, count: int) -> float:
    """Images/s from the first batch to the last, so that the start of the workers does not count."""
    photos = open_source(str(data / "imagenet-photos"))
    job, source = PredictionJob(predictor, 5), Subset(photos, np.arange(count) % len(photos))
    times = [perf_counter() for _ in predict_locally(job, source, np.arange(job.steps(source)))]
    return (count - BATCH) / (times[-1] - times[0])


def measure_http(weights: Path, photos: list[bytes], args: Any) -> Iterator[dict[str, Any]]:
    """Rows of one photo and of 16 photos per request."""
    port = find_port()
    command = [
        sys.executable,
        "-m",
        "plainvit",
        "serve",
        f"model={weights}",
        "--port",
        str(port),
        "--device",
        args.device,
    ]
    command += ["--backend", "torch", "--deadline", "60", "--max-queue", "4096", "--max-batch", str(BATCH)]
    with start_server(command, port, [encode_request(photos[:1])]) as session:
        for size in (1, 16):
            requests = [encode_request((photos * size)[start : start + size]) for start in range(len(photos))]
            options = {"clients": CLIENTS, "seconds": args.seconds, "processes": PROCESSES}
            result = measure_server(session, port, requests, **options)
            result |= {"rate": size * result["rate"], "cpu_ms": result["cpu_ms"] / size}
            yield {"name": f"{size} per request, {CLIENTS} clients", **result}


def measure(name: str, args: Any) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        weights = Path(folder) / "model.safetensors"
        model = plainvit.create(f"ViT-{name}", classes=1000, seed=0)
        assert model.head is not None
        torch.nn.init.normal_(model.head.weight, std=0.02)  # a head of zeros would give ties
        plainvit.save(model, weights)
        predictor = Predictor(weights, device=args.device, batch=BATCH)
        rows: list[dict[str, Any]] = [{"name": "model alone", "rate": measure_model(predictor, min(args.seconds, 5.0))}]
        rows.append({"name": "offline, photos", "rate": measure_offline(predictor, args.data, args.images)})
        del predictor
        for row in measure_http(weights, read_photos(args.data), args):
            print(f"  {name}, {row['name']}: {row['rate']:,.0f} images/s", file=sys.stderr, flush=True)
            rows.append(row)
    model_rate, offline_rate = rows[0]["rate"], rows[1]["rate"]
    return [
        {"model": name, **row, "of_model": row["rate"] / model_rate, "of_offline": row["rate"] / offline_rate}
        for row in rows
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, data="imagenet-photos")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="Ti/16,B/16", help="Sizes, separated by commas")
    parser.add_argument("--images", type=int, default=16384, help="Photos of the offline measurement")
    parser.add_argument("--seconds", type=float, default=10.0, help="Duration of each measurement")
    args = parser.parse_args(arguments)
    rows = [row for name in args.models.split(",") for row in measure(name, args)]
    title = f"photos per second, {args.device}, {CLIENTS} clients"
    columns = ("model", "name", "images/s", "of the model", "of offline", "p50 ms", "p99 ms", "CPU ms", "failed")
    lines = []
    for row in rows:
        times = [f"{row[key]:.1f}" if key in row else "" for key in ("p50_ms", "p99_ms", "cpu_ms")]
        ratios = [f"{row[key]:.1%}" for key in ("of_model", "of_offline")]
        lines.append([row["model"], row["name"], f"{row['rate']:,.0f}", *ratios, *times, row.get("failed", "")])
    print_table(title, columns, lines, left=("model", "name"))
    write_results("bench.serve_gpu", arguments, args.json, title=title, rows=rows)


if __name__ == "__main__":
    main()
