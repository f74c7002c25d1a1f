"""The formats of an export: write a traced model, open the file again, run it.

    program = trace_program(model)
    write_graph(program, Path("model.onnx"), "onnx", describe(predictor))
    graph = open_graph(Path("model.onnx"))
    graph.logits(images)                      # the methods that the batcher calls on a Predictor

A graph takes images [B, 3, H, W], uint8 or floats in [0, 1], for any B; the normalization is inside. Its outputs are
`logits` [B, K], where the model has a head, and `features` [B, D]. Class names and preprocessing are in the metadata.
pt2 and aoti files are loaded by PyTorch's own code, which trusts them: open only those that you wrote.
"""

import contextlib
import copy
import functools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from plainvit import __version__
from plainvit.config import to_json
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ResNet, ViT
from plainvit.models.resnet import StdConv
from plainvit.models.vit import attention_weights
from plainvit.serve import require

Format = Literal["onnx", "openvino", "pt2", "aoti"]
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "openvino": ".xml", "pt2": ".pt2", "aoti": ".aoti.pt2"}
MODULES: dict[str, tuple[str, ...]] = {  # that write and run a format
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
    "pt2": (),
    "aoti": (),
}
OPSET = 20  # the first with Gelu
MAX_PROTOBUF_BYTES = 2 * 10**9  # of the weights in one ONNX file
KEY = "plainvit"  # of our metadata
INPUTS = {torch.uint8: "uint8", torch.float32: "floats in [0, 1]"}


class ExportModule(nn.Module):
    """A model that returns its logits and its features from one forward pass."""

    def __init__(self, model: ViT | ResNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.model, ResNet):
            features = self.model.feature_map(images).mean((2, 3))  # [B, D]
            return (features,) if self.model.head is None else (self.model.head(features), features)
        tokens = self.model.encode(images)  # [B, N, D]
        features = self.model.represent(tokens)  # [B, D]
        if self.model.head is None:
            return (features,)
        logits = self.model.classify(tokens)  # [B, K]
        assert isinstance(logits, Tensor)  # in training mode, a model with a distillation token returns two
        return logits, features


def describe(predictor: Predictor, dtype: torch.dtype = torch.uint8) -> dict[str, Any]:
    """The metadata of an export: all that a program needs to turn a photo into a named class."""
    return {
        "plainvit": __version__,
        "weights": predictor.weights_hash,
        "input": INPUTS[dtype],
        "image_size": list(predictor.size),
        "preprocess": to_json(predictor.preprocess),
        "class_names": list(predictor.class_names),
        "outputs": ["logits", "features"] if predictor.classes else ["features"],
    }


def trace_program(model: nn.Module, dtype: torch.dtype = torch.uint8) -> ExportedProgram:
    """torch.export of the model in fp32 on the CPU, for any number of images of this dtype."""
    if not isinstance(model, ViT | ResNet):
        raise ValueError(f"{type(model).__name__} models cannot be exported: only the models of plainvit can")
    module = ExportModule(copy.deepcopy(model).cpu().float()).eval()
    _fold_standardization(module)
    images = torch.zeros((2, model.config.channels, *model.config.image_size), dtype=dtype)
    with torch.no_grad(), _use_explicit_formulas(model):
        return torch.export.export(module, (images,), dynamic_shapes=({0: Dim("batch")},))


def _fold_standardization(module: nn.Module) -> None:
    """Computes the standardized weights of BiT's convolutions once, so that they are constants."""
    for conv in module.modules():
        if isinstance(conv, StdConv):
            conv.weight = nn.Parameter(conv.standardized().detach())
            conv.standardized = lambda conv=conv: conv.weight


@contextlib.contextmanager
def _use_explicit_formulas(model: ViT | ResNet) -> Iterator[None]:
    """Replaces two functions while a model is traced.

    torch.onnx cannot decompose masked attention, as the strides of the fused kernel differ from those of its formula.
    ONNX Runtime merges BiT's zero padding into the max pooling after it, which pads with -inf: logits are off by 1e-4.
    """
    saved = F.scaled_dot_product_attention, F.max_pool2d
    if isinstance(model, ViT) and model.config.posemb in ("relative", "bias"):
        F.scaled_dot_product_attention = lambda q, k, v, attn_mask=None: attention_weights(q, k, attn_mask, None) @ v
    F.max_pool2d = _pool_slices
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.max_pool2d = saved


def _pool_slices(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Max pooling as the maximum of shifted, strided slices."""
    h, w = ((side - kernel) // stride * stride + 1 for side in x.shape[-2:])
    shifts = [(i, j) for i in range(kernel) for j in range(kernel)]
    return functools.reduce(torch.maximum, (x[..., i : i + h : stride, j : j + w : stride] for i, j in shifts))


def write_graph(program: ExportedProgram, path: Path, kind: Format, about: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn of their own deprecations
        if kind == "onnx":
            write_onnx(program, path, about)
        elif kind == "openvino":
            _write_openvino(program, path, about)
        elif kind == "pt2":
            torch.export.save(program, path, extra_files={KEY: json.dumps(about)})
        else:  # compiled by Inductor for the CPU of this machine
            configs = {"aot_inductor.metadata": {KEY: json.dumps(about)}}
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)


def write_onnx(program: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """One file; weights that are too large for it go into a second one, NAME.onnx.data."""
    size = sum(weight.nbytes for weight in program.state_dict.values())
    names = {"input_names": ["images"], "output_names": about["outputs"]}
    graph = torch.onnx.export(program, (), dynamo=True, opset_version=OPSET, verbose=False, **names)
    assert graph is not None
    graph.model.metadata_props[KEY] = json.dumps(about)
    graph.save(str(path), external_data=size > MAX_PROTOBUF_BYTES)


def _write_openvino(program: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """Through ONNX; path.xml has the graph and path.bin the weights."""
    with TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder) / "model.onnx"
        write_onnx(program, file, about)
        convert_to_openvino(file, path, about)


def convert_to_openvino(onnx_file: Path, path: Path, about: dict[str, Any]) -> None:
    import openvino

    graph = openvino.Core().read_model(onnx_file)  # unlike openvino.convert_model, this sends no telemetry
    graph.set_rt_info(json.dumps(about), KEY)
    openvino.save_model(graph, path, compress_to_fp16=False)


# Opening --------------------------------------------------------------------------------------------------------------


class Graph:
    """An exported model; `run` maps a batch and the name of an output to its values."""

    def __init__(self, run: Callable[[np.ndarray, str], np.ndarray], about: dict[str, Any]) -> None:
        self.run, self.about = run, about

    def logits(self, images: Tensor) -> Tensor:  # uint8 [B, 3, H, W] -> [B, K]
        return torch.from_numpy(self.run(convert_images(images, self.about), "logits"))

    def features(self, images: Tensor) -> Tensor:  # uint8 [B, 3, H, W] -> [B, D]
        return torch.from_numpy(self.run(convert_images(images, self.about), "features"))


def convert_images(images: Tensor, about: dict[str, Any]) -> np.ndarray:
    """uint8 images as the input of a graph with this metadata."""
    if about["input"] != INPUTS[torch.uint8]:
        images = images.float() / 255
    return images.numpy()


def open_graph(path: Path, precision: str = "fp32") -> Graph:
    """Opens an export by its suffix. Only OpenVINO also computes in bf16."""
    if path.suffix == SUFFIXES["openvino"]:
        return _open_openvino(path, precision)
    if path.suffix == SUFFIXES["onnx"]:
        return _open_onnx(path)
    return _open_torch(path)


def _open_onnx(path: Path) -> Graph:
    require("export", "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the decoders need the cores
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map[KEY])
    return Graph(lambda images, output: session.run([output], {"images": images})[0], about)  # pyright: ignore


def _open_openvino(path: Path, precision: str) -> Graph:
    require("export", "openvino")
    import openvino

    graph = openvino.Core().read_model(path)
    hint = "f32" if precision == "fp32" else precision
    settings = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.compile_model(graph, "CPU", settings)
    return Graph(lambda images, output: compiled([images])[output].copy(), json.loads(graph.get_rt_info(KEY).value))


def _open_torch(path: Path) -> Graph:
    metadata = {KEY: ""}
    if path.name.endswith(SUFFIXES["aoti"]):
        module = torch._inductor.aoti_load_package(str(path))
        metadata = module.get_metadata()
    else:
        module = torch.export.load(path, extra_files=metadata).module()  # fills the metadata
    about = json.loads(metadata[KEY])

    @torch.inference_mode()
    def run(images: np.ndarray, output: str) -> np.ndarray:
        return module(torch.from_numpy(images))[about["outputs"].index(output)].numpy()

    return Graph(run, about)
