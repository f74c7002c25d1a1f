"""Evaluation with cards: evaluate, compare."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from plainvit.verbs.words import Model, PixelFlags, PixelOptions, Processes, chosen_workers, given_pixels, show

if TYPE_CHECKING:
    from plainvit.evaluate.classify import Result

Cards = Annotated[tuple[Path, ...], Positional, arg(metavar="CARD ...", help_behavior_hint="(required)")]


def score(
    model: Model,
    /,
    *,
    data: str,
    split: str = "",
    data_root: Path | None = None,
    out: Path | None = None,
    image_size: int | None = None,
    pixels: PixelOptions = PixelFlags(),  # noqa: B008 - it is frozen
    antialias: bool = False,
    no_antialias: bool = False,
    batch: int = 64,
    workers: int = -1,
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    devices: int = 1,
    json: bool = False,
) -> "Processes | None":
    """How good a model is on a set: accuracy, likelihood, calibration, each class, the worst errors, with a card.

    The preprocessing is the model's own unless a flag says otherwise. imagenet-real, imagenet-v2, imagenet-a,
    imagenet-r, imagenet-sketch and objectnet are scored as their authors do. The folder holds a page, the figures,
    card.json, which `plainvit compare` reads, and a row for each image in images.parquet.

    Args:
        model: A run folder, weights of any library, hf:org/name, a name from `plainvit weights`, or timm:NAME[@FILE].
        data: A folder, a list (labels.csv), shards, hf:org/dataset, a known set, digits or shapes.
        split: train, val or test; where not given test, or what the run held out, or all that there is.
        data_root: Where known sets lie, each in a folder of its name.
        out: Where the results go; evaluations/MODEL-DATA-SPLIT-HASH where not given.
        image_size: Height and width in pixels, in place of the model's own; positions are resampled.
        pixels: In place of the model's own.
        antialias: Make a smaller image without aliasing.
        no_antialias: Make it with aliasing.
        batch: Images at a time.
        workers: Processes that read images; -1: as many as suit the machine.
        device: cpu, cuda, cuda:1; auto: a GPU where there is one.
        precision: Of the arithmetic; auto is bf16 on a GPU.
        devices: Processes on this machine, one a device; on several machines start it with torchrun.
        json: Print the card as JSON instead of a table.
    """
    if devices < 1:
        raise ValueError(f"--devices is at least 1, got {devices}")
    if antialias and no_antialias:
        raise ValueError("--antialias and --no-antialias contradict each other: give one of them")
    if no_antialias and pixels.interpolation == "lanczos":
        raise ValueError("--interpolation lanczos always antialiases: remove --no-antialias, or give bilinear")
    if devices > 1 and "RANK" not in os.environ:
        return Processes(devices, 0, device)
    from dataclasses import asdict

    from rich.console import Group
    from rich.text import Text

    from plainvit.analyse.evaluation import assess, summary_table
    from plainvit.runtime.folder import finite

    smooth = True if antialias else False if no_antialias else None
    changes: dict[str, object] = {**given_pixels(pixels), **({} if smooth is None else {"antialias": smooth})}
    done = assess(
        model,
        data,
        split=split,
        data_root=data_root,
        out=out,
        preprocess=changes,
        image_size=image_size,
        batch=batch,
        workers=chosen_workers(workers),
        device=device,
        precision=precision,
        quiet=json,
    )
    if done:  # the first of several processes speaks for all
        said = {"folder": str(done.folder), **asdict(done.card)}
        show(finite(said), None if json else Group(summary_table(done), *map(Text, _in_words(done.result))))
    return None


def _in_words(result: "Result") -> list[str]:
    from plainvit.evaluate.chance import in_words

    return in_words(int(result.right.sum()), len(result.labels), result.guessing)


def compare(cards: Cards, /, *, force: bool = False, json: bool = False) -> None:
    """Cards side by side, with the difference from the first and how much of it may be chance.

    Image by image where both have results of the same images, else as two samples; beside the paper's or another
    published number where one is known. Of runs, the settings that differ are named; of other cards, those of the
    models. Runs that differ in the seed alone are also taken together: mean and standard deviation, and the difference
    from the first such group with its interval over seeds. Cards of other images, another split or another rule are
    refused.

    Args:
        cards: Folders of runs or those that `plainvit evaluate` wrote; the others are held against the first.
        force: Compare although they are not alike, and say what differs.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.evaluate import compare as side_by_side
    from plainvit.runtime.folder import finite

    found = side_by_side.compare(cards, force=force)
    show(finite(found), None if json else side_by_side.table(found))
