"""Export and serve a model: export, serve."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plainvit.commands.parsing import (
    DataRoot,
    Device,
    ImageSize,
    Json,
    Model,
    PixelFlags,
    given_pixel_flags,
    print_result,
)


def export(
    model: Model,
    /,
    *,
    format: tuple[Literal["onnx", "openvino", "pt2"], ...] = ("onnx",),  # noqa: A002 - the flag's name
    out: Path | None = None,
    int8: bool = False,
    data: str = "",
    data_root: DataRoot = None,
    images: int = 256,
    image_size: ImageSize = None,
    pixels: PixelFlags,
    json: Json = False,
) -> None:
    """Write a model for ONNX Runtime, OpenVINO or torch.export, compared with PyTorch.

    An export is one graph for any batch size that includes the normalization; class names and preprocessing are in its
    metadata. Both models run on the same photos, or on random images without --data and a run. If the outputs differ,
    nothing is written and the exit code is 4. --int8 measures the ranges of activations on half of the photos and
    compares the other half.

    Args:
        format: Formats to write; pt2 is that of torch.export
        out: Output folder; default: RUN/exports, or exports/NAME
        int8: Quantize weights and activations to 8 bits (onnx and openvino)
        data: Photos to compare on: a folder, glob or dataset; default: the test images of the run
        images: Number of photos, spread over the data
    """
    from rich.console import Group
    from rich.text import Text

    from plainvit.evaluate.predictor import Predictor
    from plainvit.serve import export as exports

    if images < 2:
        raise ValueError(f"--images must be at least 2, got {images}")
    source = exports.find_images(model, data, data_root)  # before the model, which is slower
    if int8 and source is None:
        raise ValueError("--int8 needs photos to measure activations on: name a folder or a dataset with --data")
    options = {"device": "cpu", "precision": "fp32", "image_size": image_size}
    predictor = Predictor(model, **options, **given_pixel_flags(pixels))
    compared = exports.make_noise(predictor) if source is None else exports.load_images(predictor, source, images)
    folder = out or exports.default_folder(model)
    written, checks = exports.export(predictor, compared, format, folder, int8=int8)
    if json:
        print_result({"written": list(map(str, written)), "checks": list(map(vars, checks))}, None)
        return
    lines = Text("\n".join(f"written: {path}" for path in written))
    print_result(None, Group(exports.table(checks), lines))


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
    backend: Literal["auto", "torch", "onnx", "openvino"] = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    device: Device = "auto",
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
        backend: Library that runs the model; auto measures the installed ones and takes the fastest
        precision: Precision of the computation; auto: bf16 on a GPU, and on a CPU if it agrees with fp32 and is faster
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
        options = {"backend": backend, "precision": precision, "device": device, "token": token, "hosts": hosts}
        server.run(bound, models, Limits(**vars(limits)), **options)
