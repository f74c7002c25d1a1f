"""Understand what a model has learned: analyse."""

from pathlib import Path
from typing import Annotated

from plainvit.commands.parsing import DataRoot, Device, Model, PixelFlags, collect_pixel_flags, print_result


def analyse(
    model: Model,
    /,
    *,
    data: str = "",
    out: Path | None = None,
    split: str = "",
    data_root: DataRoot = None,
    count: int = 128,
    pixels: PixelFlags,
    device: Device = "auto",
    json: Annotated[bool, "Print the written paths and the notes as JSON"] = False,
) -> None:
    """Show what a model has learned: filters, position embedding, attention distance, attention maps.

    Writes figures/*.png, each with its numbers as JSON next to it, and analysis.html, which works offline: click a
    patch to see what it attends to. A run folder needs no --data: its test or held-out images are used.

    Args:
        data: Folder, glob, or known dataset
        out: Output folder; default: the run folder, or analysis/NAME
        split: Split of a dataset: train, val or test; default: test if there is one
        count: Number of images to analyse, spread over the dataset
    """
    from rich.text import Text

    from plainvit.analyse.analysis import analyse_model
    from plainvit.hub import UnreachableError

    options = {"split": split, "data_root": str(data_root or ""), "count": count, "device": device, "quiet": json}
    try:
        files = analyse_model(model, data, out or "", **options, **collect_pixel_flags(pixels))
    except UnreachableError as error:
        own = "plainvit train pixels --out runs/px, then plainvit analyse runs/px"
        raise ValueError(f"{error}; or analyse a model that you train: {own}") from error
    paths = {"report": str(files.report), "figures": [str(path) for path in files.figures], "notes": files.notes}
    lines = "\n".join((f"analysis: {files.report}", *(f"note: {note}" for note in files.notes)))
    print_result(paths, None if json else Text(lines))
