"""Export, measure and serve a model: export, bench, serve."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plainvit.commands.parsing import (
    DataRoot,
    Device,
    ImageSize,
    Json,
    Model,
    PixelFlags,
    collect_pixel_flags,
    print_result,
)

if TYPE_CHECKING:
    from plainvit.evaluate.predictor import Predictor


def export(
    model: Model,
    /,
    *,
    format: tuple[Literal["onnx", "openvino", "pt2", "aoti"], ...] = ("onnx",),  # noqa: A002 - the flag's name
    out: Path | None = None,
    input: Literal["uint8", "float"] = "uint8",  # noqa: A002 - the flag's name
    int8: bool = False,
    no_verify: bool = False,
    data: str = "",
    data_root: DataRoot = None,
    images: int = 256,
    image_size: ImageSize = None,
    pixels: PixelFlags,
    json: Json = False,
) -> None:
    """Write a model for ONNX Runtime, OpenVINO, torch.export or AOTInductor, compared with PyTorch.

    An export is one graph for any batch size that includes the normalization; class names and preprocessing are in its
    metadata. Both models run on the same photos, or on random images without --data and a run. If the outputs differ,
    nothing is written and the exit code is 4. --int8 measures the ranges of activations on half of the photos and
    compares the other half.

    Args:
        format: Formats to write; pt2: torch.export; aoti: AOTInductor, for machines like this one, needs a C++ compiler
        out: Output folder; default: RUN/exports, or exports/NAME
        input: Type of the input images: uint8, or floats in [0, 1]
        int8: Quantize weights and activations to 8 bits (onnx and openvino)
        no_verify: Write without comparing the outputs
        data: Photos to compare on: a folder, glob or dataset; default: the test images of the run
        images: Number of photos, spread over the data
    """
    import torch
    from rich.console import Group
    from rich.text import Text

    from plainvit.serve import export as exports

    if images < 2:
        raise ValueError(f"--images must be at least 2, got {images}")
    source = None
    if int8 or not no_verify:
        source = exports.find_images(model, data, data_root)  # before the model, which is slower
    if int8:
        exports.require_photos(source is not None)
    predictor = _load(model, image_size, pixels)
    loaded = exports.make_noise(predictor) if source is None else exports.load_images(predictor, source, images)[0]
    folder, dtype = out or exports.choose_folder(model), torch.uint8 if input == "uint8" else torch.float32
    written, checks = exports.export(predictor, loaded, format, folder, dtype=dtype, int8=int8, verify=not no_verify)
    if json:
        print_result({"written": list(map(str, written)), "checks": list(map(vars, checks))}, None)
        return
    lines = Text("\n".join(f"written: {path}" for path in written))
    print_result(None, Group(exports.table(checks), lines) if checks else lines)


def _load(model: str, image_size: int | None, pixels: PixelFlags) -> "Predictor":
    from plainvit.evaluate.predictor import Predictor

    return Predictor(model, device="cpu", precision="fp32", image_size=image_size, **collect_pixel_flags(pixels))


def bench(
    model: Model,
    /,
    *,
    format: tuple[Literal["torch", "onnx", "openvino", "pt2", "aoti"], ...] = ("torch", "onnx", "openvino"),  # noqa: A002
    int8: bool = False,
    batches: tuple[int, ...] = (1, 8, 32),
    seconds: float = 3.0,
    data: str = "",
    data_root: DataRoot = None,
    images: int = 256,
    image_size: ImageSize = None,
    pixels: PixelFlags,
    json: Json = False,
) -> None:
    """Measure latency, speed, memory and accuracy of a model in several formats on this machine.

    The latency is that of one batch: median and 99th percentile. Each format runs in its own process.

    Args:
        format: Formats to measure
        int8: Also measure int8 for onnx and openvino; needs --data or a run
        batches: Batch sizes
        seconds: Time to measure each format at each batch size
        data: Labeled photos for the accuracy: a folder or a dataset; default: the test images of the run
        images: Number of photos, spread over the data
    """
    from plainvit.serve import bench as measurements
    from plainvit.serve.export import INT8_FORMATS

    for flag, given in {"--batches": min(batches), "--images": images}.items():
        if given < 1:
            raise ValueError(f"{flag} must be at least 1, got {given}")
    if seconds <= 0:
        raise ValueError(f"--seconds must be above 0, got {seconds:g}")
    predictor = _load(model, image_size, pixels)
    photos = measurements.load_photos(predictor, data, data_root, images)
    formats: list[str] = list(format)
    if int8:
        formats += [f"{kind} int8" for kind in format if kind in INT8_FORMATS]
    rows = measurements.measure(predictor, formats, batches, photos, seconds)
    print_result([vars(row) for row in rows], None if json else measurements.table(rows))


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Options of `plainvit.serve.server.load_app`."""

    #: Library that runs the model; auto measures the installed ones and takes the fastest
    backend: Literal["auto", "torch", "onnx", "openvino"] = "auto"
    #: Precision of the computation; auto: bf16 on a GPU, and on a CPU if it agrees with fp32 and is faster
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: Device = "auto"
    neighbors: str = ""  # Training photos for "nearest training photos" on the page: a folder or a dataset
    data_root: DataRoot = None
    no_explain: bool = False  # Turn off /explain (attention maps) and the field confidence of /predict


@dataclass(frozen=True, kw_only=True)
class LimitFlags:
    """Fields of `plainvit.serve.requests.Limits`."""

    max_batch: int = 32  # Largest number of images per forward pass
    max_queue: int = 256  # Largest number of waiting images; further requests get status 429
    max_megabytes: float = 20.0  # Largest size of a request
    max_megapixels: float = 25.0  # Largest number of pixels of an image, in millions
    deadline: float = 10.0  # Seconds until a request that is not answered gets status 503


def serve(
    models: tuple[str, ...],
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    no_auth: bool = False,
    flags: ServerFlags,
    limits: LimitFlags,
) -> None:
    """Serve models over HTTP, with a web page to try them: POST /predict, /embed and /explain.

    Only programs on this machine can connect. For other machines, set --host and a token in the environment variable
    PLAINVIT_TOKEN, which clients send as `Authorization: Bearer TOKEN`. SIGTERM answers every accepted request, then
    ends the server.

    Args:
        models: Run folders or weights, each as MODEL or NAME=MODEL; the first is the default of ?model=NAME
        host: IP address to listen on; 0.0.0.0 for all
        port: TCP port
        no_auth: Allow another --host without a token: anybody who can connect may use the server
    """
    from plainvit.serve import require

    for name, value in vars(limits).items():
        if value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    require("serve", "starlette", "uvicorn", "prometheus_client")
    from plainvit.serve import server
    from plainvit.serve.requests import Limits

    token, hosts = server.check_access(host, no_auth)
    with server.bind_port(host, port) as bound:
        server.run(bound, models, Limits(**vars(limits)), token=token, hosts=hosts, **vars(flags))
