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
from pathlib import Path

import torch

from plainvit.config import to_json
from plainvit.device import cache_folder
from plainvit.evaluate.predictor import Predictor
from plainvit.models.fast.inference import TOLERANCE, cpu_computes_bf16
from plainvit.serve.export import export, make_noise, time_call
from plainvit.serve.formats import MODULES, SUFFIXES, Graph, describe, open_graph

Backend = Predictor | Graph
SECONDS = 1.0  # of the measurement of each backend
log = logging.getLogger("plainvit")


def choose_backend(
    predictor: Predictor, name: str = "auto", precision: str = "auto"
) -> tuple[str, Backend, dict[str, float]]:
    """The fastest of the allowed backends: its name, the backend, and images/s of all that were measured."""
    if predictor.device != "cpu":
        if name not in ("auto", "torch"):
            raise ValueError(f"--backend {name} runs on a CPU, but the device is {predictor.device}: use --device cpu")
        precision = "fp32" if predictor.dtype is torch.float32 else "bf16"
        return f"torch {precision}", predictor, {}
    backends: dict[str, Backend] = {}
    reason = "ONNX Runtime computes in fp32 only"
    for kind, dtype in list_candidates(name, precision):
        try:
            backends[f"{kind} {dtype}"] = open_backend(predictor, kind, dtype)
        except (ValueError, RuntimeError) as error:  # the other backends still work
            reason = str(error).splitlines()[0]
            log.warning("backend %s %s is not used: %s", kind, dtype, reason)
    if not backends:
        raise ValueError(f"--backend {name} --precision {precision} cannot be used: {reason}")
    if len(backends) == 1:
        ((only, backend),) = backends.items()
        return only, backend, {}
    speeds = {label: measure_speed(backend, predictor) for label, backend in backends.items()}
    fastest = max(speeds, key=speeds.__getitem__)
    return fastest, backends[fastest], speeds


def list_candidates(name: str, precision: str) -> list[tuple[str, str]]:
    """The allowed pairs of a backend and a precision."""
    kinds = [name]
    if name == "auto":
        installed = [kind for kind in ("onnx", "openvino") if all(map(importlib.util.find_spec, MODULES[kind]))]
        kinds = ["torch", *installed]
    precisions = [precision]
    if precision == "auto":
        precisions = ["fp32", "bf16"] if cpu_computes_bf16() else ["fp32"]
    return [(kind, dtype) for kind in kinds for dtype in precisions if (kind, dtype) != ("onnx", "bf16")]


def open_backend(predictor: Predictor, kind: str, precision: str) -> Backend:
    """Opens the backend; bf16 must agree with fp32."""
    if kind != "torch":
        backend = open_graph(find_export(predictor, kind), precision)
    elif precision == "bf16":
        backend = Predictor(predictor.model, precision="bf16")
    else:
        backend = predictor
    if precision == "bf16":
        difference, limit = measure_difference(backend, predictor), TOLERANCE["bf16"]
        if difference > limit:
            raise ValueError(
                f"bf16 outputs differ from fp32 by {difference:.1%} of their standard deviation, the limit is "
                f"{limit:.0%}: use --precision fp32"
            )
    return backend


def find_export(predictor: Predictor, kind: str) -> Path:
    """The export of this model in the cache folder, which is written first if it is missing."""
    settings = to_json(predictor.model.config)  # the same weights may run with another activation
    key = json.dumps([describe(predictor), settings, torch.__version__], sort_keys=True)
    folder = cache_folder() / "exports" / hashlib.sha256(key.encode()).hexdigest()[:16]
    file = folder / f"model{SUFFIXES[kind]}"
    if not file.is_file():
        export(predictor, make_noise(predictor), [kind], folder)  # pyright: ignore[reportArgumentType]
    return file


def measure_difference(backend: Backend, predictor: Predictor) -> float:
    """Root mean square of the differences from the predictor, over the standard deviation of its outputs."""
    output, images = "logits" if predictor.classes else "features", make_noise(predictor)
    expected, actual = (getattr(model, output)(images) for model in (predictor, backend))
    return float((actual - expected).square().mean().sqrt() / expected.std().clamp(min=1e-6))


def measure_speed(backend: Backend, predictor: Predictor) -> float:
    """Images per second of a small batch, by the median time."""
    images = make_noise(predictor)
    compute = backend.logits if predictor.classes else backend.features
    compute(images)
    return len(images) / statistics.median(time_call(lambda: compute(images), SECONDS))
