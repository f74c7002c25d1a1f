"""`plainvit export`: a model as one file for another runtime, compared with PyTorch before it is written.

    written, checks = export(Predictor("runs/photos"), images, ["onnx", "openvino"], Path("exports"))

An fp32 export must give the logits of PyTorch within 1e-4, an int8 export the same top-1 class for most images. One
that does not is deleted, and the command fails. Images for int8 calibration and for the comparison are never the same.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import MissingSplitError, Source
from plainvit.data.splits import choose_split
from plainvit.disk import make_folder, run_folder, run_settings, sync_folder, write_synced
from plainvit.evaluate import inputs
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.serve import make_table
from plainvit.serve.formats import SUFFIXES, Format, Graph, describe, open_graph, trace_program, write_graph

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 1e-4  # of logits; relative for those above 1
MIN_AGREEMENT = 0.9  # fraction of images on which an int8 export must predict the class that PyTorch does
BATCH = 16
log = logging.getLogger("plainvit")


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
    agreeing: int  # images with the same top-1 class; of a model without a head, those within the tolerance
    images_per_second: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the fraction of images with the same top-1 class."""
        return wilson(self.agreeing, self.images)


def find_images(source: str | Path, data: str, data_root: str | Path | None) -> Source:
    """The images of --data, or those that the run was evaluated on. Data without a test split is used whole."""
    if data:
        with contextlib.suppress(MissingSplitError):
            return inputs.find([data], data_root=data_root)
        return inputs.find([data], data_root=data_root, split="train")
    stored = run_settings(source)
    if not isinstance(stored.get("data"), str) or not stored["data"]:
        raise ValueError("--data is required: name a folder or a dataset with photos, or use --no-verify")
    return choose_split(source, stored["data"], "", data_root or stored.get("data_root"))


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


def export(
    predictor: Predictor,
    images: Tensor | None,
    formats: Sequence[Format],
    folder: Path,
    *,
    int8: bool = False,
    uint8: bool = True,
    verify: bool = True,
) -> tuple[list[Path], list[Check]]:
    """Writes each format into the folder and, with `verify`, compares it with PyTorch on `images` first.

    int8 exports are calibrated on every second image and compared on the others.
    """
    if int8 and (wrong := set(formats) - {"onnx", "openvino"}):
        raise ValueError(f"--int8 is not supported for --format {' '.join(sorted(wrong))}: use onnx or openvino")
    if int8 and (images is None or len(images) < 2):
        raise ValueError("--int8 needs at least two images to calibrate on: use --data")
    make_folder(folder)
    calibration, compared = (images[::2], images[1::2]) if int8 and images is not None else (None, images)
    about, program = describe(predictor, uint8), trace_program(predictor.model, uint8)
    written, checks = [], []
    if verify:
        assert compared is not None
        size = sum(weight.nbytes for weight in predictor.model.parameters())
        checks.append(_check(predictor, predictor, compared, "torch fp32", size))
    for kind in formats:
        name = f"model{'.int8' * int8}{SUFFIXES[kind]}"
        with TemporaryDirectory(dir=folder, prefix=".export-") as temporary:
            file = Path(temporary) / name
            if calibration is not None:
                from plainvit.serve.quantize import write_int8

                write_int8(predictor, calibration, file, kind, about)
            else:
                write_graph(program, file, kind, about)
            if compared is not None and verify:
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
    expected = torch.cat([getattr(reference, output)(batch).cpu() for batch in images.split(BATCH)])
    compute = getattr(tested, output)
    compute(images[:1])  # compile for one image first: the batch size is dynamic
    start = time.perf_counter()
    outputs = torch.cat([compute(batch).cpu() for batch in images.split(BATCH)])
    seconds = time.perf_counter() - start
    tolerance = TOLERANCE * max(float(expected.abs().max()), 1.0)
    difference = (outputs - expected).abs().amax(1)  # [N]
    agreeing = outputs.argmax(1) == expected.argmax(1) if reference.classes else difference <= tolerance
    worst = float(difference.max()) if bool(outputs.isfinite().all()) else float("inf")
    return Check(name, size / 1e6, len(images), worst, tolerance, int(agreeing.sum()), len(images) / seconds)


def _require_agreement(check: Check, int8: bool) -> None:
    if int8 and check.agreeing < MIN_AGREEMENT * check.images:
        raise DisagreementError(
            f"{check.name} predicts the same class as PyTorch for {check.agreeing} of {check.images} images, below "
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


def default_folder(source: str | Path) -> Path:
    """RUN/exports for a run, exports/NAME for other weights."""
    if run_settings(source):
        return run_folder(source) / "exports"
    return Path("exports") / (Path(str(source)).stem or "model")


def table(checks: Sequence[Check]) -> "Table":
    rows = []
    for check in checks:
        low, high = (f"{100 * end:.1f}" for end in check.interval)
        agreement = (f"{check.agreeing} of {check.images}", f"{low}-{high} %")
        numbers = (f"{check.megabytes:.1f}", f"{check.difference:.1e}")
        rows.append((check.name, *numbers, *agreement, f"{check.images_per_second:.1f}"))
    return make_table(("format", "MB", "largest difference", "same top-1", "95 % interval", "images/s"), rows)
