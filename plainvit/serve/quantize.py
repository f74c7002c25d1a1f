"""int8 exports for ONNX Runtime and OpenVINO: weights per channel, activations by ranges measured on images.

    write_int8(trace_program(model), images, Path("model.int8.onnx"), "onnx", describe(predictor))

Matmuls and convolutions with constant weights are quantized by ONNX Runtime; attention, softmax and norms stay in fp32.
So do the 10 % of layers with the largest error: in a ViT these are the second MLP layers of a few blocks, whose
inputs have outliers. OpenVINO reads the quantized ONNX graph.
"""

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor
from torch.export import ExportedProgram

from plainvit.serve import require
from plainvit.serve.formats import KEY, MAX_PROTOBUF_BYTES, convert_images, convert_to_openvino, write_onnx

FP32_FRACTION = 0.1  # fraction of the layers that stay in fp32
BATCH = 8
SAMPLES = 2  # images on which the errors of the layers are measured
OPERATORS = ["MatMul", "Gemm", "Conv"]


def write_int8(program: ExportedProgram, images: Tensor, path: Path, kind: str, about: dict[str, Any]) -> None:
    """Quantizes a traced model with ranges of activations measured on images, uint8 [N, 3, H, W]."""
    require("export", "onnxruntime")
    import onnx

    if sum(weight.nbytes for weight in program.state_dict.values()) > MAX_PROTOBUF_BYTES:
        raise ValueError("--int8 is not supported for models with more than 2 GB of weights")
    with TemporaryDirectory(dir=path.parent) as folder, _silence():
        exact, quantized = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        write_onnx(program, exact, about)
        _quantize(exact, quantized, convert_images(images, about))
        if kind == "openvino":
            convert_to_openvino(quantized, path, about)
            return
        graph = onnx.load(quantized)
        onnx.helper.set_model_props(graph, {KEY: json.dumps(about)})
        onnx.save(graph, path)


def _quantize(exact: Path, quantized: Path, pixels: np.ndarray) -> None:
    """Writes the int8 ONNX graph; the layers with the largest error stay in fp32."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class CalibrationReader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter(np.split(pixels, range(BATCH, len(pixels), BATCH)))

        def get_next(self) -> dict[str, np.ndarray] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
            batch = next(self.batches, None)
            return None if batch is None else {"images": batch}

    folded = exact.with_name("folded.onnx")
    quant_pre_process(exact, folded, skip_symbolic_shape=True)
    errors = measure_errors(folded, pixels[:SAMPLES])
    if not errors:
        raise ValueError("--int8 is not supported for this model: it has no matmul with constant weights")
    by_error = sorted(errors, key=errors.__getitem__, reverse=True)
    quantize_static(
        folded,
        quantized,
        CalibrationReader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=OPERATORS,
        nodes_to_quantize=by_error[round(FP32_FRACTION * len(by_error)) :],  # all but the layers with the largest error
        extra_options={"OpTypesToExcludeOutputQuantization": OPERATORS},
    )


def measure_errors(file: Path, pixels: np.ndarray) -> dict[str, float]:
    """Relative error of each layer's output if its input and weights were int8; 0 for convolutions."""
    import onnx
    import onnxruntime

    graph = onnx.load(file)
    weights = {weight.name: weight for weight in graph.graph.initializer}
    layers = [node for node in graph.graph.node if node.op_type in OPERATORS and node.input[1] in weights]
    matmuls = [node for node in layers if node.op_type != "Conv"]
    inputs = sorted({node.input[0] for node in matmuls})
    del graph.graph.output[:]
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inputs)
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    values = dict(zip(inputs, session.run(inputs, {"images": pixels}), strict=True)) if inputs else {}
    errors = dict.fromkeys((node.name for node in layers), 0.0)
    for node in matmuls:
        weight = onnx.numpy_helper.to_array(weights[node.input[1]])
        if any(attribute.name == "transB" and attribute.i for attribute in node.attribute):
            weight = weight.T
        errors[node.name] = _matmul_error(np.asarray(values[node.input[0]]).reshape(-1, len(weight)), weight)
    return errors


def _matmul_error(x: np.ndarray, weight: np.ndarray) -> float:
    """||Q(x) Q(w) - x w|| / ||x w|| with one range for x and one per column of w."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = (high - low) / 255 or 1.0
    steps = np.abs(weight).max(0, keepdims=True) / 127 + np.finfo(np.float32).tiny
    exact = x @ weight
    quantized = (x / step).round() * step @ ((weight / steps).round() * steps)
    return float(np.linalg.norm(quantized - exact) / (np.linalg.norm(exact) or 1.0))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """ONNX Runtime prints its progress, and advises to use the preprocessing that was just used."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
