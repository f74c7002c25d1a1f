"""Export, measure and serve a model: export, bench, serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plainvit.commands.parsing import Model, PixelFlags, given_pixel_flags, print_result

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
    data_root: Path | None = None,
    images: int = 256,
    min_agreement: float = 0.9,
    image_size: int | None = None,
    pixels: PixelFlags = PixelFlags(),  # noqa: B008 - it is frozen
    json: bool = False,
) -> None:
    """Write a model for ONNX Runtime, OpenVINO, torch.export or AOTInductor, checked against PyTorch.

    One graph with the normalisation inside, for any batch size, with class names and preprocessing in its metadata.
    Both models run on the same images; an export whose outputs differ is not written, and the exit code is 4. aoti
    needs a C++ compiler and runs on machines like this one. int8 uses half of the images to measure activations.

    Args:
        model: Run folder, weights file of any library, hf:org/name, or name from `plainvit weights`
        format: Formats to write: onnx, openvino, pt2 (torch.export) and aoti (AOTInductor)
        out: Output folder; default: RUN/exports, or exports/NAME
        input: Type of the input images: uint8, or floats in [0, 1]
        int8: Quantize weights and activations to 8 bits (onnx and openvino)
        no_verify: Write without comparing the outputs
        data: Photos to compare on: a folder, glob or dataset; default: the test images of the run
        data_root: Folder with the known datasets, each in a folder of its name
        images: Number of photos, spread over the data
        min_agreement: Fraction of photos on which an int8 export must predict the class that PyTorch does
        image_size: Height and width in pixels; the position embedding is resampled
        pixels: Preprocessing, if the file does not say it
        json: Print JSON instead of a table
    """
    from rich.console import Group
    from rich.text import Text

    from plainvit.serve import export as exports

    if images < 2:
        raise ValueError(f"--images must be at least 2, got {images}")
    source = None if no_verify and not int8 else exports.find_images(model, data, data_root)
    predictor = _load(model, image_size, pixels)
    written, checks = exports.export(
        predictor,
        None if source is None else exports.load_images(predictor, source, images),
        format,
        out or exports.default_folder(model),
        int8=int8,
        uint8=input == "uint8",
        min_agreement=0.0 if no_verify else min_agreement,
    )
    value = {"written": [str(path) for path in written], "checks": exports.to_rows(checks)}
    lines = Text("\n".join(f"written: {path}" for path in written))
    print_result(value, None if json else Group(exports.table(checks), lines) if checks else lines)


def _load(model: str, image_size: int | None, pixels: PixelFlags) -> "Predictor":
    from plainvit.evaluate.predictor import Predictor

    return Predictor(model, device="cpu", precision="fp32", image_size=image_size, **given_pixel_flags(pixels))


def bench(
    model: Model,
    /,
    *,
    format: tuple[Literal["torch", "onnx", "openvino", "pt2", "aoti"], ...] = ("torch", "onnx", "openvino"),  # noqa: A002
    int8: bool = False,
    batches: tuple[int, ...] = (1, 8, 32),
    seconds: float = 3.0,
    data: str = "",
    data_root: Path | None = None,
    images: int = 256,
    image_size: int | None = None,
    pixels: PixelFlags = PixelFlags(),  # noqa: B008 - it is frozen
    json: bool = False,
) -> None:
    """Measure latency, speed, memory and accuracy of a model in several formats.

    Each format runs in a process of its own. Latency is that of one batch: median and 99th percentile.

    Args:
        model: Run folder, weights file of any library, hf:org/name, or name from `plainvit weights`
        format: Formats to measure: torch, onnx, openvino, pt2 and aoti
        int8: Also measure int8 for onnx and openvino; needs --data or a run
        batches: Batch sizes
        seconds: Time to measure each format at each batch size
        data: Labelled photos for the accuracy: a folder or a dataset; default: the test images of the run
        data_root: Folder with the known datasets, each in a folder of its name
        images: Number of photos, spread over the data
        image_size: Height and width in pixels; the position embedding is resampled
        pixels: Preprocessing, if the file does not say it
        json: Print JSON instead of a table
    """
    from plainvit.serve import bench as measurements

    if not batches or min(batches) < 1 or seconds <= 0:
        raise ValueError("--batches must be at least 1 and --seconds above 0")
    predictor = _load(model, image_size, pixels)
    photos = measurements.load_photos(predictor, data, data_root, images)
    formats = [*format, *(f"{kind} int8" for kind in format if int8 and kind in ("onnx", "openvino"))]
    rows = measurements.measure(predictor, formats, batches, photos, seconds)
    print_result([vars(row) for row in rows], None if json else measurements.table(rows))


def serve(
    models: tuple[str, ...],
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    no_auth: bool = False,
    backend: Literal["auto", "torch", "onnx", "openvino"] = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    device: str = "auto",
    neighbours: str = "",
    data_root: Path | None = None,
    no_explain: bool = False,
    max_batch: int = 32,
    max_queue: int = 256,
    max_megabytes: float = 20.0,
    max_megapixels: float = 25.0,
    deadline: float = 10.0,
) -> None:
    """Serve models over HTTP, with a page to try them: POST /predict, /embed and /explain.

    Binds to this machine only. Another --host needs the environment variable PLAINVIT_TOKEN, which clients send as
    `Authorization: Bearer TOKEN`, or --no-auth. SIGTERM answers everything that was accepted, then ends.

    Args:
        models: Run folders or weights, each MODEL or NAME=MODEL; the first is the default
        host: IP address to bind to
        port: TCP port
        no_auth: Let anybody who can connect use the server
        backend: What computes: torch, onnx or openvino; auto measures those that are installed and takes the fastest
        precision: Precision of the computation; auto: bf16 on a GPU, and on a CPU where it agrees and is faster
        device: Device of torch: cpu, cuda, cuda:1; auto picks a GPU if there is one
        neighbours: Training photos among which the page shows the nearest: a folder or a dataset
        data_root: Folder with the known datasets, each in a folder of its name
        no_explain: Turn off /explain, which needs PyTorch in addition to the backend
        max_batch: Images per forward pass
        max_queue: Images that may wait; further requests get status 429
        max_megabytes: Largest request
        max_megapixels: Largest image
        deadline: Seconds in which a request must be answered
    """
    from plainvit.serve import require

    if not models:
        raise ValueError("no MODEL given: name a run folder or weights")
    require("serve", "starlette", "uvicorn", "prometheus_client")
    from plainvit.serve import server
    from plainvit.serve.limits import Limits

    if min(max_batch, max_queue) < 1 or min(max_megabytes, max_megapixels, deadline) <= 0:
        raise ValueError("--max-batch, --max-queue, --max-megabytes, --max-megapixels and --deadline must be above 0")
    token, hosts = server.check_access(host, no_auth)
    limits = Limits(
        max_batch=max_batch,
        max_queue=max_queue,
        max_megabytes=max_megabytes,
        max_megapixels=max_megapixels,
        deadline=deadline,
    )
    settings = server.Settings(
        models=models,
        backend=backend,
        precision=precision,
        device=device,
        neighbours=neighbours,
        data_root=data_root,
        explain=not no_explain,
        limits=limits,
    )
    server.make_server(server.load_app(settings, token=token, hosts=hosts), host, port, limits).run()
