"""Understand what a model has learned: analyse."""

from pathlib import Path

from plainvit.commands.parsing import Model, PixelFlags, given_pixel_flags, print_result


def analyse(
    model: Model,
    /,
    *,
    data: str = "",
    out: Path | None = None,
    split: str = "",
    data_root: str = "",
    count: int = 128,
    against: str = "",
    thorough: bool = False,
    pixels: PixelFlags = PixelFlags(),  # noqa: B008 - it is frozen
    device: str = "auto",
    json: bool = False,
) -> None:
    """Show what a model has learned: filters, position embedding, attention, saliency maps.

    Writes figures/*.png, each with its numbers as JSON next to it, and analysis.html, which works offline: click a
    patch to see what it attends to. A run folder needs no --data: its test or held-out images are used.

    Args:
        model: Run folder, weights file of any library, hf:org/name, or name from `plainvit weights`
        data: Folder, glob, or known dataset
        out: Output folder; default: the run folder, or analysis/NAME
        split: Split of a dataset: train, val or test; default: test if there is one
        data_root: Folder with the known datasets, each in a folder of its name
        count: Number of images to analyse, spread over the dataset
        against: Another model to compare layer by layer
        thorough: Use all images for every section, however long it takes
        pixels: Preprocessing, if the file does not say it
        device: Device to run on: cpu, cuda, cuda:1; auto picks a GPU if there is one
        json: Print the written paths and the notes as JSON
    """
    from rich.text import Text

    from plainvit.analyse.analysis import analyse_model
    from plainvit.hub import UnreachableError

    try:
        written = analyse_model(
            model,
            data,
            out or "",
            split=split,
            data_root=data_root,
            count=count,
            against=against,
            thorough=thorough,
            device=device,
            quiet=json,
            **given_pixel_flags(pixels),
        )
    except UnreachableError as error:
        own = "plainvit train pixels --out runs/px, then plainvit analyse runs/px"
        raise ValueError(f"{error}; or analyse a model that you train: {own}") from error
    paths = {"report": str(written.report), "figures": [str(path) for path in written.figures], "notes": written.notes}
    lines = "\n".join((f"analysis: {written.report}", *(f"note: {note}" for note in written.notes)))
    print_result(paths, None if json else Text(lines))
