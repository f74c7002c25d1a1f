"""Analyses a model and writes one page: Figures 6, 7, 10, 11 and 14 of the paper, and more.

    plainvit analyse runs/photos                              on the run's test or held-out images
    plainvit analyse B_16.npz --data photos/ --against BiT-M-R50x1.npz

Writes analysis.html, figures/*.png and a JSON file with the data of each figure. Parts that do not apply to the model
are omitted with a note.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from PIL import Image

from plainvit.analyse import parts
from plainvit.analyse.curves import read_metrics
from plainvit.analyse.explorer import IMAGES, describe_omissions, explorer, plan
from plainvit.analyse.figures import save
from plainvit.analyse.maps import analyse_maps
from plainvit.analyse.page import Html, Section, data_url, element, inline_svg, join, notice, write_page
from plainvit.analyse.subject import LEAST, Drawing, Part, Parts, Subject, gather, resolve_images
from plainvit.disk import DiskError, write_text
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.models import ViT
from plainvit.runtime.display import Display
from plainvit.runtime.folder import finite
from plainvit.weights.pixels import Pixels

SCALE = 6.7  # rem for an inch of a figure: two panels fit side by side
LARGEST = 1_000_000  # bytes of a PNG with photographs
OVERFITTED = 0.2  # training accuracy above the confidence interval of the accuracy on other images
WIDE = 5.0  # inches above which a figure scrolls on a phone instead of shrinking
# The parts of an analysis in the order of the page
PARTS: dict[str, Callable[[Subject], Parts]] = {
    "embedding filters": parts.analyse_filters,
    "position similarity": parts.analyse_positions,
    "attention distance and entropy": parts.analyse_heads,
    "attention maps": analyse_maps,
    "token norms": parts.analyse_token_norms,
    "similarity of layers": parts.analyse_layer_similarity,
    "removal of heads and layers": parts.analyse_removal,
    "hidden and shuffled patches": parts.analyse_occlusion,
    "shifts": parts.analyse_shifts,
}


@dataclass
class Written:
    """The files of an analysis, and its notes."""

    page: Path
    figures: list[Path]
    notes: list[str]


def analyse_model(
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
    """Writes the page and its figures to `out`."""
    if count < 1:
        raise ValueError(f"--count must be at least 1, got {count}")
    data = resolve_images(model, images, split, data_root)
    predictor = Predictor(model, device=device, precision="fp32", **pixels)
    other = _load_other(against, device) if against else None
    subject = gather(predictor, *data, count, model)
    subject.against, subject.other, subject.thorough = other, display_name(against), thorough
    subject.notes[:0] = find_warnings(subject, training_accuracy(Path(model)) if subject.held_out else math.nan)
    folder = Path(out) if out else _default_folder(Path(model))
    _check_folder(folder)
    with Display("analysis", len(PARTS) + 1, quiet=quiet) as display:
        sections = _run_parts(subject, display)
        figures = [path for part in sections for path in _write_figures(part, folder / "figures")]
        path = _write_page(subject, sections, display_name(model), folder / "analysis.html")
        display.advance(len(PARTS) + 1, "page")
    return Written(path, figures, subject.notes)


def _run_parts(subject: Subject, display: Display) -> list[Part]:
    """All parts that apply; the others become notes, one for each reason."""
    found: list[Part] = []
    omitted: dict[str, list[str]] = {}
    for number, (name, make) in enumerate(PARTS.items(), 1):
        try:
            found.extend(make(subject))
        except ValueError as error:
            omitted.setdefault(str(error), []).append(name)
        display.advance(number, name)
    subject.notes += [f"Omitted: {', '.join(names)} ({reason})." for reason, names in omitted.items()]
    return found


def _load_other(against: str, device: str) -> Predictor:
    try:
        return Predictor(against, device=device, precision="fp32")
    except (ValueError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"cannot load --against {against}: {reason}") from error


# Inputs and warnings---------------------------------------------------------------------------------------------------


def display_name(model: str | Path) -> str:
    """The name of a run, or of a file without its suffix; model.safetensors has the name of its run."""
    path = Path(model)
    if path.is_file() or path.suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin"):
        generic = path.stem in ("model", "pytorch_model", "checkpoint", "weights")
        return path.resolve().parent.name if generic and path.is_file() else path.stem
    return (path.resolve() if path.is_dir() else path).name or str(model)


def _default_folder(model: Path) -> Path:
    return model if model.is_dir() else Path("analysis") / display_name(model)


def _check_folder(folder: Path) -> None:
    """Fails before the analysis if its results cannot be written."""
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / "figures"):
            pass
    except OSError as error:
        raise DiskError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from error


def find_warnings(subject: Subject, training: float) -> list[str]:
    """Warnings for a model at chance level, or far better on its training images."""
    classes, count = subject.predictor.classes, len(subject.images)
    if subject.labels is None or count < LEAST or classes < 2:
        return []
    correct = int((subject.logits.argmax(-1) == subject.labels).sum())
    share, (low, high) = 100 * correct / count, wilson(correct, count)
    accuracy = f"The accuracy on these {count} images is {share:.0f} %"
    if low <= 1 / classes:
        return [f"{accuracy}, not above chance ({100 / classes:.0f} %): the maps show a model that has not learned."]
    if training > high + OVERFITTED:
        return [
            f"{accuracy}, and {100 * training:.0f} % on training images: the model overfits, and its maps show that."
        ]
    return []


def training_accuracy(run: Path) -> float:
    """Accuracy on training batches in the last tenth of a run; NaN if unknown."""
    try:
        values = read_metrics(run / "metrics.jsonl")["accuracy"]
    except OSError:
        return math.nan
    values = values[np.isfinite(values)]
    return float(values[-max(len(values) // 10, 1) :].mean()) if len(values) else math.nan


# The page -------------------------------------------------------------------------------------------------------------


def _write_figures(part: Part, folder: Path) -> Iterator[Path]:
    """Each figure as PNG, its data as JSON."""
    for name, drawing in part.drawings.items():
        path = folder / f"{part.name}-{name}.png" if name else folder / f"{part.name}.png"
        save(drawing.figure, path, LARGEST)
        write_text(path.with_suffix(".json"), json.dumps(finite(drawing.numbers)) + "\n")
        yield path


def _write_page(subject: Subject, found: list[Part], name: str, path: Path) -> Path:
    sections = [Section(part.title, join((element("p", part.words), _figures(part)))) for part in found]
    script = ""
    if isinstance(subject.model, ViT) and not subject.model.config.axial:
        section, script = _explorer_section(subject)
        sections.insert(0, section)
    lead = join((element("p", _describe_subject(subject), class_="lead"), *map(notice, subject.notes)))
    return write_page(path, f"Analysis of {name}", lead, sections, ["plainvit analyse"], script)


def _explorer_section(subject: Subject) -> tuple[Section, str]:
    wanted = plan(subject.model, len(subject.images))
    body, script = explorer(subject.model, subject.images, _explorer_images(subject), wanted)
    words = (
        "Click a patch, or use the arrow keys, to see its attention; select a layer (Page Up, Page Down) and a head to "
        "enlarge them. On dark images, switch to the heat map. "
    )
    if subject.model.config.class_token:
        words += (
            "The cell next to the image is the class token: it shows its fraction of the attention; click it to see "
            "its own attention. "
        )
    omitted = describe_omissions(wanted, subject.model, len(subject.images))
    return Section("Attention explorer", join((element("p", words, omitted), body))), script


def _describe_subject(subject: Subject) -> str:
    config, count = subject.model.config, len(subject.images)
    height, width = config.image_size
    images = f"for images of {width} x {height} pixels; analysed with {count} {subject.which}."
    if not isinstance(subject.model, ViT):
        return f"A ResNet {images}"
    (h, w), depth = config.grid, len(subject.model.blocks)
    layers, heads = f"{depth} layer{'s' * (depth > 1)}", f"{config.heads} head{'s' * (config.heads > 1)}"
    patches = f"{h} x {w} patches of {height // h} x {width // w} pixels"
    return f"A Vision Transformer with {layers}, {heads}, width {config.width} and {patches}, {images}"


def _figures(part: Part) -> Html:
    drawn = part.html or element(
        "div", *(_figure_element(drawing, part.title) for drawing in part.drawings.values()), class_="figures"
    )
    return join((drawn, part.table or ""))


def _figure_element(drawing: Drawing, label: str) -> Html:
    inches = drawing.figure.get_size_inches()[0]
    inner = inline_svg(drawing.figure, label)
    return element("figure", inner, class_="broad" if inches > WIDE else None, style=f"--wide:{inches * SCALE:.1f}rem")


def _explorer_images(subject: Subject) -> list[dict[str, Any]]:
    images = [Image.fromarray(image) for image in subject.images[:IMAGES].permute(0, 2, 3, 1).numpy()]
    rows = zip(images, subject.names, subject.describe_predictions(IMAGES), strict=False)
    kind = "png" if subject.images.shape[-1] <= 64 else "jpeg"
    return [{"source": data_url(image, kind, quality=88), "name": name, "guess": guess} for image, name, guess in rows]
