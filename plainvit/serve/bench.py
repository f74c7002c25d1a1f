"""`plainvit bench`: latency, throughput, memory and accuracy of a model in several formats.

Each format is exported, then measured in a new process, so that its peak memory can be read.
"""

import functools
import logging
import multiprocessing
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plainvit.config import Preprocess
from plainvit.data.splits import choose_split
from plainvit.disk import run_settings
from plainvit.evaluate.labels import align
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.serve import make_table
from plainvit.serve.export import export, find_images, load_images, time_call
from plainvit.serve.formats import open_graph
from plainvit.weights import save

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger("plainvit")


@dataclass(frozen=True)
class Row:
    """One format at one batch size."""

    format: str
    batch: int
    p50_ms: float
    p99_ms: float
    images_per_second: float
    memory_mb: float  # peak of the process
    top1: float | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Photos:
    """Images [N, 3, H, W] and, if known, the correct classes of each [N, M], padded with -1."""

    images: Tensor
    right: np.ndarray | None = None
    columns: np.ndarray | None = None  # outputs of the model that the labels are positions in; None: all


def load_photos(predictor: Predictor, data: str, data_root: Path | None, count: int) -> Photos | None:
    """Photos of --data or of the run; None without either. Data without the model's classes gives no accuracy."""
    settings = run_settings(predictor.source)
    data = data or settings.get("data", "")
    if not data:
        return None
    try:
        source = choose_split(predictor.source, data, "", data_root or settings.get("data_root") or None)
        labels = align(source, predictor.classes, predictor.model.about.class_names)
    except ValueError as error:
        log.warning("no accuracy: %s", error)
        return Photos(load_images(predictor, find_images(predictor.source, data, data_root), count)[0])
    images, positions = load_images(predictor, labels.source, count)
    return Photos(images, labels.targets[positions], labels.columns)


def measure(
    predictor: Predictor, formats: Sequence[str], batches: Sequence[int], photos: Photos | None, seconds: float
) -> list[Row]:
    """The rows of each format, such as "torch", "onnx" or "onnx int8"."""
    if photos is None and any(kind.endswith("int8") for kind in formats):
        raise ValueError("--int8 needs photos to measure activations on: use --data")
    rows, images = [], photos.images if photos else None
    with TemporaryDirectory(prefix="plainvit-bench-") as name:
        folder = Path(name)
        weights = save(predictor.model, folder / "model.safetensors")
        for kind in formats:
            file, (form, _, int8) = weights, kind.partition(" ")
            if form != "torch":
                written, _ = export(predictor, images, [form], folder, int8=bool(int8), verify=False)  # pyright: ignore
                file = written[-1]  # the graph, after its weights
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows += pool.apply(_measure_format, (kind, file, predictor.size, batches, photos, seconds))
    return rows


def _measure_format(
    kind: str, file: Path, size: tuple[int, int], batches: Sequence[int], photos: Photos | None, seconds: float
) -> list[Row]:
    """Runs in its own process."""
    model: Any = open_graph(file) if kind != "torch" else Predictor(file, device="cpu", preprocess=Preprocess())
    has_head = "logits" in model.about["outputs"] if kind != "torch" else model.classes
    compute = model.logits if has_head else model.features
    times: dict[int, list[float]] = {}
    for batch in batches:
        call = functools.partial(compute, torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8))
        call()
        call()  # warm up
        times[batch] = time_call(call, seconds)
    accuracy: dict[str, Any] = {}
    if photos is not None and photos.right is not None:
        logits = torch.cat([compute(images) for images in photos.images.split(32)])
        predicted = (logits if photos.columns is None else logits[:, photos.columns]).argmax(1).numpy()
        right = int((photos.right == predicted[:, None]).any(1).sum())
        accuracy = {"top1": right / len(predicted), "interval": wilson(right, len(predicted))}
    memory = _read_peak_memory() / 1e6
    quantiles = {batch: np.quantile(seconds, (0.5, 0.99)).tolist() for batch, seconds in times.items()}
    return [Row(kind, n, 1e3 * p50, 1e3 * p99, n / p50, memory, **accuracy) for n, (p50, p99) in quantiles.items()]


def _read_peak_memory() -> int:
    """Bytes of this process. ru_maxrss would include the parent's, which Linux keeps when a process is started."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def table(rows: Sequence[Row]) -> "Table":
    shown = []
    for row in rows:
        ends = "-".join(f"{100 * end:.1f}" for end in row.interval) if row.interval else ""
        accuracy = f"{100 * row.top1:.1f} % ({ends} %)" if row.top1 is not None else ""
        times = (f"{row.p50_ms:.1f}", f"{row.p99_ms:.1f}", f"{row.images_per_second:.1f}")
        shown.append((row.format, str(row.batch), *times, f"{row.memory_mb:.0f}", accuracy))
    return make_table(("format", "batch", "p50 ms", "p99 ms", "images/s", "peak MB", "top-1 (95 % interval)"), shown)
