"""What computes the outputs of a served model: PyTorch, ONNX Runtime or OpenVINO, whichever is fastest here.

backend, speeds = choose_backend(Predictor("runs/photos"), "auto")
backend.logits(images)

Exports for the other two are written once per model into the cache folder, compared with PyTorch, and opened again at
the next start. On a GPU, PyTorch is used.
"""

import hashlib
import importlib.util
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from plainvit.device import cache_folder
from plainvit.evaluate.predictor import Predictor
from plainvit.serve.export import export
from plainvit.serve.formats import SUFFIXES, describe, open_graph

Name = Literal["auto", "torch", "onnx", "openvino"]
RUNTIMES: dict[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
BATCH, SECONDS = 8, 1.0  # of the measurement of each backend
log = logging.getLogger("plainvit")


class Backend(Protocol):
    """What a batcher calls; a Predictor is one."""

    def logits(self, images: Tensor) -> Tensor: ...
    def features(self, images: Tensor) -> Tensor: ...


def choose_backend(predictor: Predictor, name: Name = "auto") -> tuple[str, Backend, dict[str, float]]:
    """The backend of that name or the fastest one: its name, itself, and the images/s of all that were measured."""
    if name == "torch" or predictor.device != "cpu":
        if name not in ("auto", "torch"):
            raise ValueError(f"--backend {name} runs on a CPU, but the device is {predictor.device}: use --device cpu")
        return "torch", predictor, {}
    if name != "auto":
        return name, open_backend(predictor, name), {}
    found: dict[str, Backend] = {"torch": predictor}
    for kind, modules in RUNTIMES.items():
        if all(importlib.util.find_spec(module) for module in modules):
            try:
                found[kind] = open_backend(predictor, kind)
            except (ValueError, RuntimeError) as error:  # the other backends still work
                log.warning("backend %s is not used: %s", kind, str(error).splitlines()[0])
    speeds = {kind: measure_speed(backend, predictor) for kind, backend in found.items()} if len(found) > 1 else {}
    best = max(speeds, key=speeds.__getitem__, default="torch")
    return best, found[best], speeds


def open_backend(predictor: Predictor, kind: str) -> Backend:
    """Opens the export of this model in the cache folder, or writes it first."""
    key = json.dumps([describe(predictor), torch.__version__], sort_keys=True)
    folder = cache_folder() / "exports" / hashlib.sha256(key.encode()).hexdigest()[:16]
    file: Path = folder / f"model{SUFFIXES[kind]}"
    if not file.is_file():
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(0, 256, (BATCH, 3, *predictor.size), dtype=torch.uint8, generator=generator)
        export(predictor, noise, [kind], folder)  # pyright: ignore[reportArgumentType]
    return open_graph(file)


def measure_speed(backend: Backend, predictor: Predictor) -> float:
    """Images per second in batches of BATCH, by the median time."""
    images = torch.zeros(BATCH, 3, *predictor.size, dtype=torch.uint8)
    compute = backend.logits if predictor.classes else backend.features
    times: list[float] = []
    compute(images)
    while sum(times) < SECONDS or len(times) < 3:
        start = time.perf_counter()
        compute(images)
        times.append(time.perf_counter() - start)
    return BATCH / statistics.median(times)
