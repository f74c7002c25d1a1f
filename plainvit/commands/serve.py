"""Export, measure and serve a model: export, bench, serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from plainvit.commands.parsing import Model, PixelFlags, PixelOptions, given_pixel_flags, print_result

if TYPE_CHECKING:
    from plainvit.evaluate.predictor import Predictor

Models = Annotated[tuple[str, ...], Positional, arg(metavar="MODEL ...", help_behavior_hint="(required)")]


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
    pixels: PixelOptions = PixelFlags(),  # noqa: B008 - it is frozen
    json: bool = False,
) -> None:
    """Write a model for ONNX Runtime, OpenVINO, torch.export or AOTInductor, and compare it with PyTorch.

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
        data: Photos to compare on: a folder, archive, glob or dataset; default: the test images of the run
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
