"""Models and their weights: models, inspect, convert, weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plainvit.commands.parsing import (
    Heads,
    ImageSize,
    Json,
    Model,
    PixelFlags,
    TextHead,
    collect_pixel_flags,
    print_result,
)

if TYPE_CHECKING:
    from rich.console import Group

    from plainvit.weights.published import Published


def models(pattern: str = "*", /, *, image_size: int = 224, json: Json = False) -> None:
    """List the named models: tokens, parameters, FLOPs, size of the weights.

    Use a name in plainvit train RECIPE --model NAME, plainvit inspect NAME or plainvit.create(NAME). Other patch sizes
    work too, for example ViT-B/20 at 240 px.

    Args:
        pattern: Shell-style pattern of names, such as '*B/16' or 'BiT-*'
        image_size: Height and width of the images in pixels
    """
    from plainvit.names import list_models
    from plainvit.planning import cost

    names = list_models(pattern)
    if not names:
        raise ValueError(f"no model matches {pattern!r}; `plainvit models` lists all")
    rows = [cost.summary(name, image_size) for name in names]
    print_result(rows, None if json else cost.table(rows))


def inspect(
    model: Model,
    /,
    *,
    image_size: ImageSize = None,
    heads: Heads = None,
    pixels: PixelFlags,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Describe a weights file, or every intermediate of a named model.

    For a run or weights: the settings of the model, and the source of each (shapes of the weights, a file next to them,
    or the defaults of their library). For a name such as ViT-B/16: the shape, mean and standard deviation of each
    intermediate, under its name in a Trace: model(images, Trace("block*/attention")).

    Args:
        model: Run folder, weights file of any library, hf:org/name, name from `plainvit weights` or `plainvit models`
        seed: Seed of a named model's random weights
    """
    from plainvit.evaluate import inspection
    from plainvit.names import is_model

    if is_model(model) and not Path(model).exists():
        given = collect_pixel_flags(pixels) | ({} if heads is None else {"heads": heads})
        if given:
            flag = next(iter(given))
            raise ValueError(f"--{flag} requires a weights file, {model} is the name of a model: remove it")
        report = inspection.trace_model(model, 224 if image_size is None else image_size, seed)
        print_result(report, None if json else inspection.trace_table(report))
        return
    described = inspection.describe_weights(model, heads=heads, image_size=image_size, **collect_pixel_flags(pixels))
    print_result(described, None if json else inspection.weights_table(described))


def convert(
    model: Model,
    target: Path,
    /,
    *,
    format: Literal["plainvit", "google", "timm", "transformers", "torchvision", "open_clip"],  # noqa: A002
    drop: tuple[str, ...] = (),
    heads: Heads = None,
    image_size: ImageSize = None,
    classes: int | None = None,
    text_head: TextHead = None,
    pixels: PixelFlags,
    json: Json = False,
) -> None:
    """Convert weights from the format of any library to another, without changing a value.

    What the target format cannot express (a hidden layer in the head, another GELU, registers ...) is an error that
    names it; --drop NAME leaves it out. google writes an .npz; transformers a folder that the library loads; timm a
    folder with its config.json, or only the weights if the name ends in .safetensors, .pth, .pt or .bin.

    Args:
        target: File or folder to write
        format: Library whose format to write
        drop: Parts to leave out, by the names in the error message
        classes: Replace the head by zeros for this number of classes
        json: Print JSON instead of the written path
    """
    from plainvit.weights import convert as convert_weights

    settings = {"heads": heads, "image_size": image_size, "classes": classes, "text_head": text_head}
    settings |= collect_pixel_flags(pixels)
    written = convert_weights(model, target, format, drop, **settings)
    if json:
        print_result({"path": str(written), "format": format}, None)
    else:
        print(written)  # not wrapped, however long


def weights(
    pattern: str = "*",
    /,
    *,
    for_: Literal["cpu", "gpu"] | None = None,
    task: Literal["features", "finetune", "dense"] | None = None,
    json: Json = False,
) -> None:
    """List published weights: size, license, reported accuracy, and which to start from.

    Use a name wherever weights are expected: plainvit finetune --init NAME, plainvit.load(NAME).
    The weights are downloaded from the Hugging Face hub when they are first used.

    A name is MODEL_RECIPE_DATA_PIXELS: vit_b16_augreg_i21k_i1k_224 is a ViT-B/16 that AugReg pre-trained on
    ImageNet-21k (i21k) and fine-tuned on ImageNet (i1k) at 224 px. top-1 and ReaL (accuracy with the corrected
    multi-label annotations) are percentages from timm's results files; an empty field means not reported. A license
    that does not allow every use is marked with *.

    Args:
        pattern: Shell-style pattern of names, such as '*mae*'
        for_: Recommend weights for this machine
        task: Recommend weights for this task: image features, fine-tuning, or dense features of patches
        json: Print JSON instead of a table, with the hub addresses
    """
    from dataclasses import asdict
    from fnmatch import fnmatchcase

    from plainvit.weights.published import PUBLISHED, RECOMMENDED

    if for_ or task:
        if pattern != "*":
            raise ValueError("PATTERN cannot be combined with --for or --task: remove one")
        rows = [
            {"for": machine, "task": purpose, "name": name, "reason": reason}
            for (machine, purpose), (name, reason) in RECOMMENDED.items()
            if (for_ is None or for_ == machine) and (task is None or task == purpose)
        ]
        lines = [f"{row['for']} {row['task']}: {row['name']}\n  {row['reason']}" for row in rows]
        print_result(rows, None if json else "\n".join(lines))
        return
    entries = {name: entry for name, entry in PUBLISHED.items() if fnmatchcase(name, pattern)}
    if not entries:
        raise ValueError(f"no published weights match {pattern!r}; `plainvit weights` lists all")
    print_result({name: asdict(entry) for name, entry in entries.items()}, None if json else _make_table(entries))


def _make_table(entries: "dict[str, Published]") -> "Group":
    from rich.console import Group
    from rich.table import Table

    from plainvit.weights.published import TO_START

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", style="cyan", no_wrap=True)
    for title in ("params", "MB", "top-1", "ReaL"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("license", overflow="fold")
    for name, entry in entries.items():
        numbers = ["" if value is None else f"{value:.2f}" for value in (entry.top1, entry.real)]
        millions = entry.parameters / 1e6
        mark = "*" if entry.restriction else ""
        table.add_row(name, f"{millions:.1f}M", f"{4 * millions:,.0f}", *numbers, f"{entry.license}{mark}")
    terms = "*: not for every use (cc-by-nc: non-commercial; others: the authors' own terms)"
    real = "ReaL: top-1 with the corrected, multi-label annotations of ImageNet"
    start = [f"to fine-tune with a {machine}: {name}" for machine, name in TO_START.items()]
    return Group(table, "\nMB: size of the file in fp32; hub addresses: --json", terms, real, *start)
