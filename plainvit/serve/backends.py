"""The library that runs a served model: PyTorch, ONNX Runtime or OpenVINO, whichever is fastest on this machine.

    name, backend, speeds = choose_backend(Predictor("runs/photos"), "auto", "auto")
    backend.logits(images)

Exports are written once per model into the cache folder, compared with PyTorch, and opened again at the next start. As
in `load(optimize=True)`, bf16 is tried on CPUs that are faster at it. On a GPU, PyTorch is used.
"""

import hashlib
import importlib.util
import json
import logging
import statistics
from typing import Literal

import torch
from torch import Tensor

from plainvit.config import to_json
from plainvit.device import cache_folder
from plainvit.evaluate.predictor import Predictor
from plainvit.models.fast.inference import TOLERANCE, cpu_computes_bf16
from plainvit.serve.export import export, time_call
from plainvit.serve.formats import SUFFIXES, Graph, describe, open_graph

Backend = Predictor | Graph
Name = Literal["auto", "torch", "onnx", "openvino"]
Precision = Literal["auto", "fp32", "bf16"]
RUNTIMES: dict[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
BATCH, SECONDS = 8, 1.0  # of the measurement of each backend
log = logging.getLogger("plainvit")


def choose_backend(
    predictor: Predictor, name: Name = "auto", precision: Precision = "auto"
) -> tuple[str, Backend, dict[str, float]]:
    """The fastest of the allowed backends: its name, the backend, and images/s of all that were measured."""
    if predictor.device != "cpu":
        if name not in ("auto", "torch"):
            raise ValueError(f"--backend {name} runs on a CPU, but the device is {predictor.device}: use --device cpu")
        return f"torch {'fp32' if predictor.dtype is torch.float32 else 'bf16'}", predictor, {}
    installed = [kind for kind, modules in RUNTIMES.items() if all(map(importlib.util.find_spec, modules))]
    kinds = ["torch", *installed] if name == "auto" else [name]
    precisions = [precision] if precision != "auto" else ["fp32", "bf16"] if cpu_computes_bf16() else ["fp32"]
    backends: dict[str, Backend] = {}
    reason = "ONNX Runtime computes in fp32 only"
    pairs = [(kind, dtype) for kind in kinds for dtype in precisions if (kind, dtype) != ("onnx", "bf16")]
    for kind, dtype in pairs:
        try:
            backends[f"{kind} {dtype}"] = open_backend(predictor, kind, dtype)
        except (ValueError, RuntimeError) as error:  # the other backends still work
            reason = str(error).splitlines()[0]
            log.warning("backend %s %s is not used: %s", kind, dtype, reason)
    if not backends:
        raise ValueError(f"--backend {name} --precision {precision} cannot be used: {reason}")
    measured = backends if len(backends) > 1 else {}
    speeds = {kind: measure_speed(backend, predictor) for kind, backend in measured.items()}
    best = max(speeds, key=speeds.__getitem__, default=next(iter(backends)))
    return best, backends[best], speeds


def open_backend(predictor: Predictor, kind: str, precision: str) -> Backend:
    """Opens the export of this model in the cache folder, or writes it first. bf16 must agree with fp32."""
    if kind == "torch":
        backend = predictor if precision == "fp32" else Predictor(predictor.model, precision="bf16")
    else:
        settings = to_json(predictor.model.config)  # the same weights may run with another activation
        key = json.dumps([describe(predictor), settings, torch.__version__], sort_keys=True)
        folder = cache_folder() / "exports" / hashlib.sha256(key.encode()).hexdigest()[:16]
        file = folder / f"model{SUFFIXES[kind]}"
        if not file.is_file():
            export(predictor, make_noise(predictor), [kind], folder)  # pyright: ignore[reportArgumentType]
        backend = open_graph(file, precision)
    if precision == "bf16" and (difference := measure_difference(backend, predictor)) > TOLERANCE["bf16"]:
        limit = f"the limit is {TOLERANCE['bf16']:.0%}: use --precision fp32"
        raise ValueError(f"bf16 outputs differ from fp32 by {difference:.1%} of their standard deviation, {limit}")
    return backend


def make_noise(predictor: Predictor) -> Tensor:
    size = (BATCH, 3, *predictor.size)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def measure_difference(backend: Backend, predictor: Predictor) -> float:
    """Root mean square of the differences from the predictor, over the standard deviation of its outputs."""
    output, images = "logits" if predictor.classes else "features", make_noise(predictor)
    expected, actual = (getattr(model, output)(images) for model in (predictor, backend))
    return float((actual - expected).square().mean().sqrt() / expected.std().clamp(min=1e-6))


def measure_speed(backend: Backend, predictor: Predictor) -> float:
    """Images per second in batches of BATCH, by the median time."""
    images = make_noise(predictor)
    compute = backend.logits if predictor.classes else backend.features
    compute(images)
    return BATCH / statistics.median(time_call(lambda: compute(images), SECONDS))
