"""Understanding: analyse."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from plainvit.verbs.words import Model, PixelFlags, PixelOptions, given_pixels, show


def analyse(
    model: Model,
    /,
    *,
    data: Annotated[str, arg(aliases=("--images",))] = "",
    out: Path | None = None,
    split: str = "",
    data_root: str = "",
    count: int = 128,
    against: str = "",
    thorough: bool = False,
    pixels: PixelOptions = PixelFlags(),  # noqa: B008 - it is frozen
    device: str = "auto",
    json: bool = False,
) -> None:
    """What a model has learned: filters, positions, attention, maps and how far to trust them, on one page.

    Writes figures/*.png with the numbers of each as JSON beside it, and analysis.html, which opens offline and lets you
    click a patch to see where it looks. A run folder needs no --data: its test images are taken,
    or those that it held out.

    Args:
        model: A run folder, weights of any library, hf:org/name, or a name from `plainvit weights`.
        data: A folder, an archive, a glob, or a set that `plainvit data info` knows.
        out: Where to write; the run folder itself, or analysis/NAME.
        split: Of a set: train, val or test; without one, test where there is one.
        data_root: Where known sets lie, each in a folder of its name.
        count: Images to look at, spread over the set.
        against: Another model, whose layers and shifts are compared.
        thorough: Spend as many passes as it takes, also on a CPU: more images for maps, and single heads of any model.
        pixels: What the model's file does not say of its images.
        device: cpu, cuda, cuda:1; auto: a GPU where there is one.
        json: Print the paths that were written, and what was left out, as JSON.
    """
    from rich.text import Text

    from plainvit.analyse.understand import understand
    from plainvit.hub import UnreachableError

    try:
        written = understand(
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
            **given_pixels(pixels),
        )
    except UnreachableError as error:
        own = "plainvit train pixels --out runs/px, then plainvit analyse runs/px"
        raise ValueError(f"{error}; or look at a model of your own: {own}") from error
    found = {"page": str(written.page), "figures": [str(path) for path in written.figures], "notes": written.notes}
    words = "\n".join((f"analysis: {written.page}", *(f"note: {note}" for note in written.notes)))
    show(found, None if json else Text(words))
