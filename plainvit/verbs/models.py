"""Models and their weights: models, inspect, convert, weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from plainvit.verbs.words import UNSAID, Model, Pattern, PixelFlags, PixelOptions, given_pixels, show

if TYPE_CHECKING:
    from rich.console import Group

    from plainvit.weights.published import Published

Target = Annotated[Path, Positional, arg(metavar="TARGET")]


def models(pattern: Pattern = "*", /, *, image_size: int = 224, json: bool = False) -> None:
    """Table of the named models: tokens, parameters, compute, size of their weights.

    Any other patch size works too, for instance ViT-B/20 at 240 px. exaFLOPs is the paper's pre-training of that
    model on JFT-300M (Table 6); where the paper trained it twice, both are given.

    Args:
        pattern: Only names that match, shell-style, such as '*B/16' or 'BiT-*'.
        image_size: Height and width of the images in pixels.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.names import list_models
    from plainvit.planning import cost

    names = list_models(pattern)
    if not names:
        raise ValueError(f"no model matches {pattern!r}; `plainvit models` lists them all")
    rows = [cost.summary(name, image_size) for name in names]
    show(rows, None if json else cost.table(rows))


def inspect(
    model: Model,
    /,
    *,
    image: Path | None = None,
    image_size: int | None = None,
    heads: int | None = None,
    pixels: PixelOptions = PixelFlags(),  # noqa: B008 - it is frozen
    seed: int = 0,
    json: bool = False,
) -> None:
    """What a weights file holds and means; or, for a model's name, every step of one real forward pass.

    Of a file it prints each setting and where it was learned: from the shapes, from a file beside it, or from what is
    known of that library's code. Of a name such as ViT-B/16 it prints the names that a Trace takes, with the shape,
    mean and spread of each: model(images, Trace("block*/attention")).

    Args:
        model: A run folder, weights of any library, hf:org/name, a name from `plainvit weights`, or ViT-B/16 and so on.
        image: A photo to run a named model on; without one, a colour gradient.
        image_size: Height and width of the images in pixels.
        heads: Heads of the file's model, where the file cannot say.
        pixels: What the file does not say of its images.
        seed: Draws a named model's weights.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.names import is_model

    if is_model(model):
        told = given_pixels(pixels) | ({} if heads is None else {"heads": heads})
        if told:
            raise ValueError(f"--{next(iter(told))} goes with a weights file; a named model has its own")
        from plainvit.evaluate import forward

        report = forward.report(model, image, 224 if image_size is None else image_size, seed)
        show(report, None if json else forward.tables(report))
        return
    if image is not None:
        raise ValueError("--image goes with a model's name; a weights file is described, not run")
    from plainvit.evaluate import describe

    described = describe.describe(model, heads=heads, image_size=image_size, **given_pixels(pixels))
    show(described, None if json else describe.table(described))


def convert(
    model: Model,
    target: Target,
    /,
    *,
    format: Literal["plainvit", "google", "timm", "transformers", "torchvision"],  # noqa: A002
    drop: Annotated[tuple[str, ...], UNSAID] = (),
    heads: int | None = None,
    image_size: int | None = None,
    classes: int | None = None,
    pixels: PixelOptions = PixelFlags(),  # noqa: B008 - it is frozen
    json: bool = False,
) -> None:
    """Weights from any library's format to another's, every number as it was.

    What the target cannot express (a hidden layer in the head, another GELU, registers ...) is refused by name; --drop
    NAME goes on without it. google writes an .npz; transformers a folder that the library loads; timm a folder with
    its config.json, or a bare file where the name ends in .safetensors or .pth.

    Args:
        model: A run folder, weights of any library, hf:org/name, or a name from `plainvit weights`.
        target: The file or folder to write.
        format: Whose format to write.
        drop: Parts to leave out, by the names that the refusal gives.
        heads: Heads of the model, where the file cannot say.
        image_size: Resample the positions to this size first.
        classes: Replace the head by one of zeros with so many classes first.
        pixels: What the file does not say of its images.
        json: Print JSON for machines instead of the path that was written.
    """
    from plainvit.weights import convert as run

    told = {"heads": heads, "image_size": image_size, "classes": classes} | given_pixels(pixels)
    written = run(model, target, format, drop, **told)
    if json:
        show({"path": str(written), "format": format}, None)
    else:
        print(written)  # on one line, however long


def weights(pattern: Pattern = "*", /, *, json: bool = False) -> None:
    """Published weights by name, with their size, licence and reported accuracy, and which to start from.

    Any of the names loads: plainvit.load("vit_b16_augreg_i21k_i1k_224"). top-1 and ReaL (the same by corrected labels,
    which allow an image several) are those of timm's results files, in per cent; an empty field was not at hand.
    --json has the hub addresses too.

    Args:
        pattern: Only names that match, shell-style, such as '*mae*'.
        json: Print JSON for machines instead of a table.
    """
    from dataclasses import asdict
    from fnmatch import fnmatchcase

    from plainvit.weights.published import PUBLISHED

    found = {name: entry for name, entry in PUBLISHED.items() if fnmatchcase(name, pattern)}
    if not found:
        raise ValueError(f"no published weights match {pattern!r}; `plainvit weights` lists them all")
    show({name: asdict(entry) for name, entry in found.items()}, None if json else _published_table(found))


def _published_table(found: "dict[str, Published]") -> "Group":
    from rich.console import Group
    from rich.table import Table

    from plainvit.weights.published import TO_START

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("name", style="cyan", no_wrap=True)
    for title in ("params", "MB", "top-1", "ReaL"):
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column("licence", overflow="fold")
    for name, entry in found.items():
        numbers = ["" if value is None else f"{value:.2f}" for value in (entry.top1, entry.real)]
        millions = entry.parameters / 1e6
        shown.add_row(name, f"{millions:.1f}M", f"{4 * millions:,.0f}", *numbers, entry.licence)
    real = "ReaL: top-1 by the corrected labels of ImageNet, which allow an image several"
    start = [f"to fine-tune with a {machine}: {name}" for machine, name in TO_START.items()]
    return Group(shown, "\nMB: of the file, in fp32; hub addresses: --json", real, *start)
