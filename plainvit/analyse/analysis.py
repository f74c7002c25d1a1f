"""Analyses a model and writes a report: Figures 6, 7, 10, 11 and 14 of the paper, and more.

    plainvit analyse runs/photos                              on the run's test or held-out images
    plainvit analyse B_16.npz --data photos/ --against BiT-M-R50x1.npz

Writes analysis.html, figures/*.png and a JSON file with the data of each figure. Analyses that do not apply to the
model are omitted with a note.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from PIL import Image

from plainvit.analyse import findings
from plainvit.analyse.explorer import IMAGES, describe_omissions, explorer, plan
from plainvit.analyse.figures import save
from plainvit.analyse.maps import analyse_maps
from plainvit.analyse.page import (
    CRISP,
    Html,
    Section,
    data_url,
    element,
    inline_svg,
    join,
    notice,
    pluralize,
    write_page,
)
from plainvit.analyse.subject import LEAST, Drawing, Finding, Findings, Subject, gather, resolve_images
from plainvit.disk import make_folder, write_text
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.models import ViT
from plainvit.runtime.display import Display
from plainvit.runtime.folder import finite
from plainvit.weights.pixels import Pixels

SCALE = 6.7  # rem for an inch of a figure: two panels fit side by side
LARGEST = 1_000_000  # bytes of a PNG with photographs
WIDE = 5.0  # inches above which a figure scrolls on a phone instead of shrinking
# In the order of the report
ANALYSES: dict[str, Callable[[Subject], Findings]] = {
    "embedding filters": findings.analyse_filters,
    "position similarity": findings.analyse_positions,
    "attention distance and entropy": findings.analyse_heads,
    "attention maps": analyse_maps,
    "token norms": findings.analyse_token_norms,
    "similarity of layers": findings.analyse_layer_similarity,
    "removal of layers": findings.analyse_removal,
    "hidden and shuffled patches": findings.analyse_occlusion,
}


@dataclass
class Written:
    """The files of an analysis, and its notes."""

    report: Path
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
    """Writes the report and its figures to `out`."""
    if count < 1:
        raise ValueError(f"--count must be at least 1, got {count}")
    data = resolve_images(model, images, split, data_root)
    predictor = Predictor(model, device=device, precision="fp32", **pixels)
    other = _load_other(against, device) if against else None
    subject = gather(predictor, *data, count, model)
    subject.against, subject.other, subject.thorough = other, display_name(against), thorough
    subject.notes[:0] = find_warnings(subject)
    default = Path(model) if Path(model).is_dir() else Path("analysis") / display_name(model)
    folder = Path(out or default)
    make_folder(folder / "figures")  # fails before the analysis if it cannot be written
    with Display("analysis", len(ANALYSES) + 1, quiet=quiet) as display:
        found = run_analyses(subject, display)
        figures = [path for finding in found for path in _write_figures(finding, folder / "figures")]
        path = _write_report(subject, found, display_name(model), folder / "analysis.html")
        display.advance(len(ANALYSES) + 1, "report")
    return Written(path, figures, subject.notes)


def run_analyses(subject: Subject, display: Display) -> list[Finding]:
    """All analyses that apply; the others become notes, one for each reason."""
    found: list[Finding] = []
    omitted: dict[str, list[str]] = {}
    for number, (name, analyse) in enumerate(ANALYSES.items(), 1):
        try:
            found.extend(analyse(subject))
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


def display_name(model: str | Path) -> str:
    """The name of a run, or of a file without its suffix; model.safetensors has the name of its run."""
    path = Path(model)
    if path.is_file() or path.suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin"):
        generic = path.stem in ("model", "pytorch_model", "checkpoint", "weights")
        return path.resolve().parent.name if generic and path.is_file() else path.stem
    return (path.resolve() if path.is_dir() else path).name or str(model)


def find_warnings(subject: Subject) -> list[str]:
    """A warning for a model at chance level."""
    classes, count = subject.predictor.classes, len(subject.images)
    if subject.labels is None or count < LEAST or classes < 2:
        return []
    correct = int((subject.logits.argmax(-1) == subject.labels).sum())
    if wilson(correct, count)[0] > 1 / classes:
        return []
    accuracy = f"The accuracy on these {count} images is {100 * correct / count:.0f} %"
    return [f"{accuracy}, not above chance ({100 / classes:.0f} %): the maps show a model that has not learned."]


# The report -----------------------------------------------------------------------------------------------------------


def _write_figures(finding: Finding, folder: Path) -> Iterator[Path]:
    """Each figure as PNG, its data as JSON."""
    for name, drawing in finding.drawings.items():
        path = folder / f"{finding.name}-{name}.png" if name else folder / f"{finding.name}.png"
        save(drawing.figure, path, LARGEST)
        write_text(path.with_suffix(".json"), json.dumps(finite(drawing.numbers)) + "\n")
        yield path


def _write_report(subject: Subject, found: list[Finding], name: str, path: Path) -> Path:
    sections = [_section(finding) for finding in found]
    script = ""
    if isinstance(subject.model, ViT) and not subject.model.config.axial:
        section, script = _explorer_section(subject)
        sections.insert(0, section)
    lead = join((element("p", _describe_subject(subject), class_="lead"), *map(notice, subject.notes)))
    return write_page(path, f"Analysis of {name}", lead, sections, ["plainvit analyse"], script=script)


def _describe_subject(subject: Subject) -> str:
    config, count = subject.model.config, len(subject.images)
    height, width = config.image_size
    images = f"for images of {width} x {height} pixels; analysed with {count} {subject.which}."
    if not isinstance(subject.model, ViT):
        return f"A ResNet {images}"
    (h, w), layers = config.grid, pluralize(len(subject.model.blocks), "layer")
    patches = f"{h} x {w} patches of {height // h} x {width // w} pixels"
    heads = pluralize(config.heads, "head")
    return f"A Vision Transformer with {layers}, {heads}, width {config.width} and {patches}, {images}"


def _section(finding: Finding) -> Section:
    figures = [_figure_element(drawing, finding.title) for drawing in finding.drawings.values()]
    shown = finding.html or element("div", *figures, class_="figures")
    return Section(finding.title, join((element("p", finding.text), shown, finding.table or "")))


def _figure_element(drawing: Drawing, label: str) -> Html:
    inches = drawing.figure.get_size_inches()[0]
    shown = inline_svg(drawing.figure, label)
    return element("figure", shown, class_="broad" if inches > WIDE else None, style=f"--wide:{inches * SCALE:.1f}rem")


def _explorer_section(subject: Subject) -> tuple[Section, str]:
    wanted = plan(subject.model, len(subject.images))
    body, script = explorer(subject.model, subject.images, _explorer_images(subject), wanted)
    text = (
        "Click a patch, or use the arrow keys, to see its attention; select a layer (Page Up, Page Down) and a head to "
        "enlarge them. On dark images, switch to the heat map. "
    )
    if subject.model.config.class_token:
        text += (
            "The cell next to the image is the class token: it shows its fraction of the attention; click it to see "
            "its own attention. "
        )
    omitted = describe_omissions(wanted, subject.model, len(subject.images))
    return Section("Attention explorer", join((element("p", text, omitted), body))), script


def _explorer_images(subject: Subject) -> list[dict[str, Any]]:
    images = subject.images[:IMAGES].permute(0, 2, 3, 1).numpy()
    kind = "png" if subject.images.shape[-1] < CRISP else "jpeg"
    sources = [data_url(Image.fromarray(image), kind, quality=88) for image in images]
    rows = zip(sources, subject.names, subject.describe_predictions(IMAGES), strict=False)
    return [{"source": source, "name": name, "prediction": prediction} for source, name, prediction in rows]
