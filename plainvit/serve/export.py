"""`plainvit export`: a model as one file for another runtime, compared with PyTorch before it is written.

    written, checks = export(Predictor("runs/photos"), images, ["onnx", "openvino"], Path("exports"))

An fp32 export must give the logits of PyTorch within 1e-4, an int8 export the same top-1 class for most images. One
that does not is deleted, and the command fails. Images for int8 calibration and for the comparison are never the same.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import MissingSplitError, Source
from plainvit.data.splits import choose_split
from plainvit.disk import make_folder, run_folder, run_settings, sync_folder, write_synced
from plainvit.evaluate import inputs
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.serve import make_table, require
from plainvit.serve.formats import MODULES, SUFFIXES, Format, Graph, describe, open_graph, trace_program, write_graph

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 1e-4  # of logits; relative for those above 1
MIN_AGREEMENT = 0.9  # fraction of images on which an int8 export must agree with PyTorch
MIN_COSINE = 0.98  # similarity of features that agree; int8 features of ViT-Ti/16 have 0.99 and more
INT8_FORMATS = ("onnx", "openvino")
BATCH = 16


class DisagreementError(ValueError):
    """An export whose outputs differ from PyTorch's; the command ends with exit code 4."""

    exit_code = 4


@dataclass(frozen=True)
class Check:
    """One format compared with PyTorch on the same images."""

    name: str
    megabytes: float
    images: int
    difference: float  # largest absolute difference of an output
    tolerance: float
    agreeing: int  # images with the same top-1 class; of a model without a head, with similar features
    interval: tuple[float, float]  # 95 % interval of the fraction of agreeing images
    images_per_second: float  # in batches of BATCH
    milliseconds: float  # of a single image, median


def find_images(source: str | Path, data: str, data_root: str | Path | None) -> Source | None:
    """The images of --data, or those that the run was evaluated on. Data without a test split is used whole."""
    if data:
        try:
            return inputs.find([data], data_root=data_root)
        except MissingSplitError:
            return inputs.find([data], data_root=data_root, split="train")
    stored = run_settings(source)
    if not stored.get("data"):
        return None
    return choose_split(source, stored["data"], "", data_root or stored.get("data_root"))


def require_photos(is_given: bool) -> None:
    """Raises ValueError without photos, which only int8 cannot do without."""
    if not is_given:
        raise ValueError("--int8 needs photos to measure activations on: name a folder or a dataset with --data")


def load_images(predictor: Predictor, source: Source, count: int) -> tuple[Tensor, list[int]]:
    """Up to `count` readable images, spread evenly over the source: uint8 [N, 3, H, W], and their positions."""
    images, positions, reason = [], [], ""
    for index in np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int).tolist():
        try:
            images.append(predictor.load_image(source.read(index)))
            positions.append(index)
        except (ImageError, OSError) as error:
            reason = f"{source.name(index)}: {error}"
    if not images:
        raise DataError(f"no image of {source.spec or 'the data'} can be read: {reason}")
    return torch.stack(images), positions


def make_noise(predictor: Predictor) -> Tensor:
    """Random images, to compare and to time models without photos."""
    size = (8, 3, *predictor.size)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def export(
    predictor: Predictor,
    images: Tensor,
    formats: Sequence[Format],
    folder: Path,
    *,
    dtype: torch.dtype = torch.uint8,
    int8: bool = False,
    verify: bool = True,
) -> tuple[list[Path], list[Check]]:
    """Writes each format, for input images of `dtype`; with `verify` only if it agrees with PyTorch on `images`.

    int8 exports are calibrated on every second image and compared on the others.
    """
    for kind in formats:
        if int8 and kind not in INT8_FORMATS:
            raise ValueError(f"--int8 is not supported for --format {kind}: use {' or '.join(INT8_FORMATS)}")
    if int8 and len(images) < 2:
        raise ValueError("--int8 needs at least two images: one half calibrates, the other is compared")
    for kind in formats:
        require("export", *MODULES[kind])
    calibration, compared = (images[::2], images[1::2]) if int8 else (images[:0], images)
    make_folder(folder)
    about, program = describe(predictor, dtype), trace_program(predictor.model, dtype)
    written, checks = [], []
    if verify:
        size = sum(weight.nbytes for weight in predictor.model.parameters())
        checks.append(_check(predictor, predictor, compared, "torch fp32", size))
    for kind in formats:
        with TemporaryDirectory(dir=folder, prefix=".export-") as temporary:
            file = Path(temporary) / f"model{'.int8' if int8 else ''}{SUFFIXES[kind]}"
            if int8:
                from plainvit.serve.quantize import write_int8

                write_int8(program, calibration, file, kind, about)
            else:
                write_graph(program, file, kind, about)
            if verify:
                size = sum(part.stat().st_size for part in file.parent.iterdir())
                name = f"{kind} {'int8' if int8 else 'fp32'}"
                checks.append(_check(predictor, open_graph(file), compared, name, size))
                _require_agreement(checks[-1], int8)
            written += _move(file, folder)
    return written, checks


def _move(file: Path, folder: Path) -> list[Path]:
    """Renames the synced files of one export, the graph last: it refers to the weights next to it."""
    parts = sorted(file.parent.iterdir(), key=lambda part: part == file)
    for part in parts:
        write_synced(part, lambda _: None)
        part.replace(folder / part.name)
    sync_folder(folder)
    return [folder / part.name for part in parts]


def _check(reference: Predictor, tested: Predictor | Graph, images: Tensor, name: str, size: int) -> Check:
    output = "logits" if reference.classes else "features"
    compute_expected, compute = getattr(reference, output), getattr(tested, output)
    expected = torch.cat([compute_expected(batch).cpu() for batch in images.split(BATCH)])
    compute(images[:1])  # compile for one image first: the batch size is dynamic
    start = time.perf_counter()
    outputs = torch.cat([compute(batch).cpu() for batch in images.split(BATCH)])
    seconds = time.perf_counter() - start
    tolerance = TOLERANCE * max(float(expected.abs().max()), 1.0)
    difference = (outputs - expected).abs().amax(1)  # [N]
    if reference.classes:
        agreeing = int((outputs.argmax(1) == expected.argmax(1)).sum())
    else:
        agreeing = int((F.cosine_similarity(outputs, expected) > MIN_COSINE).sum())
    return Check(
        name=name,
        megabytes=size / 1e6,
        images=len(images),
        difference=float(difference.max()) if bool(outputs.isfinite().all()) else float("inf"),
        tolerance=tolerance,
        agreeing=agreeing,
        interval=wilson(agreeing, len(images)),
        images_per_second=len(images) / seconds,
        milliseconds=1e3 * statistics.median(time_call(lambda: compute(images[:1]), 0.2)),
    )


def _require_agreement(check: Check, int8: bool) -> None:
    if int8 and check.agreeing < MIN_AGREEMENT * check.images:
        raise DisagreementError(
            f"{check.name} agrees with PyTorch on {check.agreeing} of {check.images} images, below "
            f"{MIN_AGREEMENT:.0%}: it is not written; use more or other images with --data, or --no-verify"
        )
    if not int8 and not check.difference <= check.tolerance:
        raise DisagreementError(
            f"{check.name} differs from PyTorch by {check.difference:.2g}, above {check.tolerance:.2g}: not written"
        )


def time_call(call: Callable[[], object], min_seconds: float) -> list[float]:
    """Seconds of each of at least three calls, until `min_seconds` have passed."""
    times: list[float] = []
    while sum(times) < min_seconds or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def choose_folder(source: str | Path) -> Path:
    """RUN/exports for a run, exports/NAME for other weights."""
    if run_settings(source):
        return run_folder(source) / "exports"
    return Path("exports") / (Path(str(source)).stem or "model")


def table(checks: Sequence[Check]) -> "Table":
    rows = []
    for check in checks:
        low, high = (f"{100 * end:.1f}" for end in check.interval)
        rows.append(
            [
                check.name,
                f"{check.megabytes:.1f}",
                f"{check.difference:.1e}",
                f"{check.agreeing} of {check.images}",
                f"{low}-{high} %",
                f"{check.images_per_second:.1f}",
                f"{check.milliseconds:.1f}",
            ]
        )
    columns = ["format", "MB", "largest difference", "same top-1", "95 % interval", "images/s", "ms per image"]
    return make_table(columns, rows)
