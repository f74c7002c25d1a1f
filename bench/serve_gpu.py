"""Photos per second over HTTP as a share of the same Predictor offline, on a GPU.

    python -m bench.serve_gpu --data DIR [--models Ti/16,B/16] [--seconds 10] [--json FILE]
    python -m bench.serve_gpu --data DIR --device cpu --models Ti/16 --seconds 2 --images 192     a trial

DIR has imagenet-photos: 48 JPEGs of about 100 kB, sent again and again. The weights are random. Rows:

model alone           the Predictor on batches of --batch images that are on the device already
offline, photos       `plainvit predict` without its file: workers decode while the model computes
N per request         `plainvit serve` and --clients clients on this machine, each with one request at a time

The clients run in --processes processes next to the server, so server and clients share the cores. "CPU ms" is the time
of the server's processes per photo.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import plainvit
from bench.clients import (
    encode_request,
    find_port,
    read_cpu_seconds,
    read_photos,
    send_from_processes,
    start,
    summarise,
)
from bench.measure import make_parser, publish, settle, show
from plainvit.data.sources import Subset, open_source
from plainvit.evaluate.predict import PredictionJob, predict_locally
from plainvit.evaluate.predictor import Predictor


def measure_model(predictor: Predictor, batch: int, seconds: float) -> dict[str, float]:
    images = torch.randint(0, 256, (batch, 3, *predictor.size), dtype=torch.uint8).to(predictor.device)
    for _ in range(3):
        predictor.logits(images)
    settle(predictor.device)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + seconds:
        predictor.logits(images)
        settle(predictor.device)
        count += batch
    return {"rate": count / (time.perf_counter() - begun)}


def measure_offline(predictor: Predictor, data: Path, images: int) -> dict[str, float]:
    """From the first batch to the last: the workers have started then."""
    source = open_source(str(data / "imagenet-photos"))
    job = PredictionJob(predictor, 5)
    some = Subset(source, np.arange(images) % len(source))
    marks = [time.perf_counter() for _ in predict_locally(job, some, np.arange(job.steps(some)))]
    return {"rate": (images - predictor.batch) / (marks[-1] - marks[0])}


def measure_server(weights: Path, photos: list[bytes], options: Any) -> Iterator[dict[str, Any]]:
    port = find_port()
    command = [sys.executable, "-m", "plainvit", "serve", f"model={weights}", "--port", str(port)]
    flags = ["--device", options.device, "--backend", "torch", "--deadline", "60", "--max-queue", "4096"]
    with start([*command, *flags, "--max-batch", str(options.batch)], port, [encode_request(photos[:1])]) as session:
        for size in map(int, options.per_request.split(",")):
            some = [encode_request((photos * size)[at : at + size]) for at in range(len(photos))]
            how = {"clients": options.clients, "processes": options.processes}
            send_from_processes(port, some, seconds=2.0, **how)  # warm up
            cpu = read_cpu_seconds(session)
            found = summarise(answers := send_from_processes(port, some, seconds=options.seconds, **how))
            cpu = (read_cpu_seconds(session) - cpu) / max(size * len(answers), 1)
            found |= {"rate": size * found["rate"], "cpu_ms": 1e3 * cpu}
            yield {"what": f"{size} per request, {options.clients} clients", **found}


def measure(name: str, options: Any) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        weights = Path(folder) / "model.safetensors"
        model = plainvit.create(f"ViT-{name}", classes=1000, seed=0)
        assert model.head is not None
        torch.nn.init.normal_(model.head.weight, std=0.02)  # it starts as zeros
        plainvit.save(model, weights)
        predictor = Predictor(weights, device=options.device, batch=options.batch)
        rows = [{"what": "model alone", **measure_model(predictor, options.batch, min(options.seconds, 5.0))}]
        rows += [{"what": "offline, photos", **measure_offline(predictor, options.data, options.images)}]
        del predictor
        for row in measure_server(weights, read_photos(options.data), options):
            print(f"  {name}, {row['what']}: {row['rate']:,.0f} images/s", file=sys.stderr, flush=True)
            rows.append(row)
    for row in rows:
        row |= {"model": name, "of_model": row["rate"] / rows[0]["rate"], "of_offline": row["rate"] / rows[1]["rate"]}
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the data root, with imagenet-photos")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="Ti/16,B/16")
    parser.add_argument("--batch", type=int, default=64, help="images per forward pass, at most")
    parser.add_argument("--images", type=int, default=16384, help="photos of the offline measurement")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4, help="processes of the clients")
    parser.add_argument("--per-request", default="1,16", help="photos per request, separated by commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    options = parser.parse_args(arguments)
    rows = [row for name in options.models.split(",") for row in measure(name, options)]
    title = f"Photos per second, {options.device}, {options.clients} clients"
    columns = ("model", "what", "images/s", "of the model", "of offline", "p50 ms", "p99 ms", "CPU ms", "failed")
    shown = []
    for row in rows:
        times = [f"{row[key]:.1f}" if key in row else "" for key in ("p50_ms", "p99_ms", "cpu_ms")]
        shares = [f"{row[key]:.1%}" for key in ("of_model", "of_offline")]
        shown.append([row["model"], row["what"], f"{row['rate']:,.0f}", *shares, *times, row.get("failed", "")])
    show(title, columns, shown, left=("model", "what"))
    publish("bench.serve_gpu", arguments, options.json, title=title, rows=rows)


if __name__ == "__main__":
    main()
