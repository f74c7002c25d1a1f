"""What a model has learned, on one page: the paper's figures 6, 7, 10, 11 and 14, and what lies beyond them.

    plainvit analyse runs/photos                              its test images, or those that it held out
    plainvit analyse B_16.npz --data photos/ --against BiT-M-R50x1.npz

Writes figures/*.png, the numbers of each beside it as JSON, and analysis.html. What does not apply to a model is said
in a line and left out.
"""

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from PIL import Image

from plainvit.analyse.curves import read_metrics
from plainvit.analyse.explorer import IMAGES, explorer, omissions, plan
from plainvit.analyse.figures import save
from plainvit.analyse.maps import maps
from plainvit.analyse.page import Html, Section, address, element, inline_svg, join, notice, write_page
from plainvit.analyse.parts import filters, heads, likeness, outlying, positions, removal, robustness, shifts
from plainvit.analyse.subject import LEAST, Drawing, Part, Parts, Subject, gather, images_of
from plainvit.disk import DiskError, write_text
from plainvit.evaluate.chance import wilson
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT
from plainvit.runtime.display import Display
from plainvit.runtime.folder import finite
from plainvit.weights.pixels import Pixels

SCALE = 6.7  # rem of the page for an inch of a figure: two panels fit side by side
LARGEST = 1_000_000  # bytes of a PNG: photographs under maps keep their colours
MEMORISED = 0.2  # accuracy on training images beyond what chance allows on others: they are known by heart
BROAD = 5.0  # inches above which a figure scrolls on a phone rather than shrinks
# The parts of an analysis in the order of the page, by what they are called where they do not apply
PARTS: dict[str, Callable[[Subject], Parts]] = {
    "embedding filters": filters,
    "position similarity": positions,
    "attention distance and entropy": heads,
    "attention maps": maps,
    "token norms": outlying,
    "similarity of layers": likeness,
    "removal of heads and layers": removal,
    "hidden and shuffled patches": robustness,
    "shifts": shifts,
}


@dataclass
class Written:
    """What an analysis left on disk, and what it could not do."""

    page: Path
    figures: list[Path]
    notes: list[str]


def understand(
    model: str | Path,
    images: str = "",
    out: str | Path = "",
    *,
    split: str = "",
    data_root: str = "",
    count: int = 128,
    against: str = "",
    thorough: bool = False,
    device: str = "auto",
    quiet: bool = False,
    **pixels: Unpack[Pixels],
) -> Written:
    """Writes the page and its figures below `out`."""
    if count < 1:
        raise ValueError(f"--count is the number of images, at least 1, got {count}")
    wanted = images_of(model, images, split, data_root)
    predictor = Predictor(model, device=device, precision="fp32", **pixels)
    other = _other(against, device) if against else None
    subject = gather(predictor, *wanted, count, model)
    subject.against, subject.other, subject.thorough = other, name_of(against), thorough
    subject.notes[:0] = warnings_of(subject, trained_accuracy(Path(model)) if subject.held_out else math.nan)
    folder = Path(out) if out else _beside(Path(model))
    _check_folder(folder)
    with Display("analysis", len(PARTS) + 1, quiet=quiet) as display, _threads(predictor.device) as settle:
        parts = _parts(subject, display, settle)
        figures = [path for part in parts for path in _write(part, folder / "figures")]
        path = _write_page(subject, parts, name_of(model), folder / "analysis.html")
        display.advance(len(PARTS) + 1, "page")
    return Written(path, figures, subject.notes)


def _parts(subject: Subject, display: Display, settle: Callable[[], None]) -> list[Part]:
    """All that apply; of the others, those of one reason in one note."""
    parts: list[Part] = []
    without: dict[str, list[str]] = {}
    for number, (name, make) in enumerate(PARTS.items(), 1):
        settle()
        try:
            parts.extend(make(subject))
        except ValueError as error:
            without.setdefault(str(error), []).append(name)
        display.advance(number, name)
    subject.notes += [f"Left out: {', '.join(names)}; {reason}." for reason, names in without.items()]
    return parts


def _other(against: str, device: str) -> Predictor:
    try:
        return Predictor(against, device=device, precision="fp32")
    except (ValueError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"--against {against} cannot be loaded: {reason}") from error


@contextlib.contextmanager
def _threads(device: str) -> Iterator[Callable[[], None]]:
    """Gives a function that takes one thread where more are slower, and puts back what was there.

    On a busy machine they are: each small product waits until all threads had their turn, up to twenty times as long.
    """
    many = torch.get_num_threads()

    def choose() -> None:
        if device == "cpu" and many > 1:
            torch.set_num_threads(min((many, 1), key=_seconds))

    try:
        yield choose
    finally:
        torch.set_num_threads(many)


def _seconds(threads: int) -> float:
    """What a few products of a small model's size take."""
    torch.set_num_threads(threads)
    x, weights, start = torch.ones(512, 192), torch.ones(192, 768), 0.0
    for number in range(24):
        start = time.perf_counter() if number == 4 else start
        torch.nn.functional.gelu(x @ weights)
    return time.perf_counter() - start


# What is looked at ----------------------------------------------------------------------------------------------------


def name_of(model: str | Path) -> str:
    """A run's name, or that of a file without its ending; delivered weights have the name of their run."""
    path = Path(model)
    if path.is_file() or path.suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin"):
        generic = path.stem in ("model", "pytorch_model", "checkpoint", "weights")
        return path.resolve().parent.name if generic and path.is_file() else path.stem
    return (path.resolve() if path.is_dir() else path).name or str(model)


def _beside(model: Path) -> Path:
    return model if model.is_dir() else Path("analysis") / name_of(model)


def _check_folder(folder: Path) -> None:
    """Before all the work: that its results can be written."""
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / "figures"):
            pass
    except OSError as error:
        raise DiskError(f"cannot write to {folder}: {error.strerror}; --out names another folder") from error


def warnings_of(subject: Subject, trained: float) -> list[str]:
    """What a reader must know before any map: that the model is at chance, or far better on its training images."""
    classes, count = subject.predictor.classes, len(subject.images)
    if subject.labels is None or count < LEAST or classes < 2:
        return []
    right = int((subject.answers.argmax(-1) == subject.labels).sum())
    share, (low, high) = 100 * right / count, wilson(right, count)
    said = f"This model gets {share:.0f} % of these {count} images right"
    if low <= 1 / classes:
        return [f"{said}, guessing {100 / classes:.0f} %: its maps show a model that cannot tell them apart."]
    if trained > high + MEMORISED:
        return [
            f"{said}, and {100 * trained:.0f} % of its training images: it knows many of those by heart, and its maps "
            "show that as well."
        ]
    return []


def trained_accuracy(run: Path) -> float:
    """On training images, in the last tenth of a run's steps; NaN where that is not known."""
    try:
        seen = read_metrics(run / "metrics.jsonl")["accuracy"]
    except OSError:
        return math.nan
    seen = seen[np.isfinite(seen)]
    return float(seen[-max(len(seen) // 10, 1) :].mean()) if len(seen) else math.nan


# The page -------------------------------------------------------------------------------------------------------------


def _write(part: Part, folder: Path) -> Iterator[Path]:
    """Each figure, and its numbers beside it."""
    for name, drawing in part.drawings.items():
        path = folder / f"{part.name}-{name}.png" if name else folder / f"{part.name}.png"
        save(drawing.figure, path, LARGEST)
        text = json.dumps(finite(drawing.numbers)) + "\n"
        write_text(path.with_suffix(".json"), text)
        yield path


def _write_page(subject: Subject, parts: list[Part], name: str, path: Path) -> Path:
    sections = [Section(part.title, join((element("p", part.words), _figures(part)))) for part in parts]
    script = ""
    if isinstance(subject.model, ViT) and not subject.model.config.axial:
        section, script = _explorer(subject)
        sections.insert(0, section)
    lead = join((element("p", _lead(subject), class_="lead"), *map(notice, subject.notes)))
    return write_page(path, f"What {name} has learned", lead, sections, ["plainvit analyse"], script)


def _explorer(subject: Subject) -> tuple[Section, str]:
    wanted = plan(subject.model, len(subject.images))
    body, script = explorer(subject.model, subject.images, _shown(subject), wanted)
    words = (
        "Click a patch, or move with the arrow keys, and see where it looks; choose a layer (or Page Up and Page Down) "
        "and a head to see them large. Dark places of a photo hide what lies on them: the heat map does not. "
    )
    if subject.model.config.class_token:
        words += (
            "The class token has no place in the image: the cell beside it shows how much of the attention it gets, "
            "and a click there where it looks itself. "
        )
    left_out = omissions(wanted, subject.model, len(subject.images))
    return Section("Explorer", join((element("p", words, left_out), body))), script


def _lead(subject: Subject) -> str:
    config, count = subject.model.config, len(subject.images)
    high, wide = config.image_size
    looked = f"for images of {wide} x {high} pixels, looked at with {count} {subject.which}."
    if not isinstance(subject.model, ViT):
        return f"A ResNet {looked}"
    (h, w), depth = config.grid, len(subject.model.blocks)
    layers, heads = f"{depth} layer{'s' * (depth > 1)}", f"{config.heads} head{'s' * (config.heads > 1)}"
    across, down = wide // w, high // h
    side = f"{across} x {down} pixel{'s' * (across * down > 1)}"
    patches = f"{h * w} patches ({h} row{'s' * (h > 1)} of {w}) of {side}"
    return f"A Vision Transformer of {layers}, {heads}, width {config.width} and {patches} each, {looked}"


def _figures(part: Part) -> Html:
    drawn = part.html or element("div", *(_drawn(one, part.title) for one in part.drawings.values()), class_="figures")
    return join((drawn, part.table or ""))


def _drawn(drawing: Drawing, label: str) -> Html:
    wide = drawing.figure.get_size_inches()[0]
    inner = inline_svg(drawing.figure, label)
    return element("figure", inner, class_="broad" if wide > BROAD else None, style=f"--wide:{wide * SCALE:.1f}rem")


def _shown(subject: Subject) -> list[dict[str, Any]]:
    """The images as the explorer's page holds them."""
    pixels = [Image.fromarray(image) for image in subject.images[:IMAGES].permute(0, 2, 3, 1).numpy()]
    rows = zip(pixels, subject.names, subject.guesses(IMAGES), strict=False)
    kind = "png" if subject.images.shape[-1] <= 64 else "jpeg"
    return [{"source": address(one, kind, quality=88), "name": name, "guess": guess} for one, name, guess in rows]
