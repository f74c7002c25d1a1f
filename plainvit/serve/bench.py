"""`plainvit bench`: latency, throughput, memory and accuracy of a model in several formats.

    predictor = Predictor("runs/photos", device="cpu", precision="fp32")
    rows = measure(predictor, ["torch", "onnx", "onnx int8"], [1, 8], load_photos(predictor, "", None, 256), seconds=3)

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
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from plainvit.data.splits import choose_split
from plainvit.disk import run_settings
from plainvit.evaluate.labels import align
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.serve import make_table
from plainvit.serve.export import BATCH, export, find_images, load_images, make_noise, require_photos, time_call
from plainvit.serve.formats import Graph, open_graph
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
    """Images and, if known, their correct classes."""

    images: Tensor  # uint8 [N, 3, H, W]
    targets: np.ndarray | None = None  # [N, M] correct classes of each image, padded with -1
    columns: np.ndarray | None = None  # outputs of the model that `targets` numbers; None: all

    def count_correct(self, model: Predictor | Graph) -> int:
        logits = torch.cat([model.logits(images) for images in self.images.split(BATCH)])
        if self.columns is not None:
            logits = logits[:, self.columns]
        return int((logits.argmax(1, keepdim=True).numpy() == self.targets).any(1).sum())


def load_photos(predictor: Predictor, data: str, data_root: Path | None, count: int) -> Photos | None:
    """Photos of --data or of the run; None without either. Data without the model's classes gives no accuracy."""
    settings = run_settings(predictor.source)
    data, root = data or settings.get("data", ""), data_root or settings.get("data_root")
    if not data:
        return None
    try:
        source = choose_split(predictor.source, data, "", root)
        labels = align(source, predictor.classes, predictor.model.about.class_names, data_root=root)
    except ValueError as error:
        log.warning("no accuracy: %s", error)
        source = find_images(predictor.source, data, root)
        assert source is not None
        return Photos(load_images(predictor, source, count)[0])
    images, positions = load_images(predictor, labels.source, count)
    return Photos(images, labels.targets[positions], labels.columns)


def measure(
    predictor: Predictor, formats: Sequence[str], batches: Sequence[int], photos: Photos | None, seconds: float
) -> list[Row]:
    """The rows of each format, such as "torch", "onnx" or "onnx int8"."""
    if any(label.endswith("int8") for label in formats):
        require_photos(photos is not None)
    rows, images = [], photos.images if photos else make_noise(predictor)
    output = "logits" if predictor.classes else "features"
    with TemporaryDirectory(prefix="plainvit-bench-") as name:
        folder = Path(name)
        weights = save(predictor.model, folder / "model.safetensors")
        for label in formats:
            kind, _, precision = label.partition(" ")
            file = weights
            if kind != "torch":
                int8 = precision == "int8"
                written, _ = export(predictor, images, [kind], folder, int8=int8, verify=False)  # pyright: ignore
                file = written[-1]  # the graph, after its weights
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows += pool.apply(_measure_format, (label, file, output, predictor.size, batches, photos, seconds))
    return rows


def _measure_format(
    label: str,
    file: Path,
    output: str,
    size: tuple[int, int],
    batches: Sequence[int],
    photos: Photos | None,
    seconds: float,
) -> list[Row]:
    """Runs in its own process."""
    model = Predictor(file, device="cpu", precision="fp32") if label == "torch" else open_graph(file)
    compute = getattr(model, output)
    times: dict[int, list[float]] = {}
    for batch in batches:
        call = functools.partial(compute, torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8))
        call()
        call()  # warm up
        times[batch] = time_call(call, seconds)
    top1 = interval = None
    if photos is not None and photos.targets is not None:
        correct, count = photos.count_correct(model), len(photos.images)
        top1, interval = correct / count, wilson(correct, count)
    memory = _read_peak_memory() / 1e6
    rows = []
    for batch, measured in times.items():
        p50, p99 = np.quantile(measured, (0.5, 0.99)).tolist()
        rows.append(Row(label, batch, 1e3 * p50, 1e3 * p99, batch / p50, memory, top1, interval))
    return rows


def _read_peak_memory() -> int:
    """Bytes of this process. ru_maxrss would include the parent's, which Linux keeps when a process is started."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def table(rows: Sequence[Row]) -> "Table":
    lines = []
    for row in rows:
        accuracy = ""
        if row.top1 is not None and row.interval is not None:
            low, high = (f"{100 * end:.1f}" for end in row.interval)
            accuracy = f"{100 * row.top1:.1f} % ({low}-{high} %)"
        numbers = (row.p50_ms, row.p99_ms, row.images_per_second)
        lines.append(
            [row.format, str(row.batch), *(f"{number:.1f}" for number in numbers), f"{row.memory_mb:.0f}", accuracy]
        )
    return make_table(["format", "batch", "p50 ms", "p99 ms", "images/s", "peak MB", "top-1 (95 % interval)"], lines)
