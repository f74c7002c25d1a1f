"""Analyses a model and writes a report: Figures 6, 7, 10, 11 and 14 of the paper.

    plainvit analyse runs/photos                              on the run's test or held-out images
    plainvit analyse B_16.npz --data photos/

Writes analysis.html, figures/*.png and a JSON file with the data of each figure. Analyses that do not apply to the
model are omitted with a note.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from plainvit.analyse import findings, html
from plainvit.analyse.attention import NotApplicableError
from plainvit.analyse.explorer import explorer_section
from plainvit.analyse.figures import save
from plainvit.analyse.subject import Finding, Findings, Subject, gather, resolve_data
from plainvit.disk import make_folder, write_text
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT
from plainvit.runtime.display import Display
from plainvit.runtime.folder import replace_non_finite
from plainvit.weights.pixels import Pixels

# In the order of the report
ANALYSES: dict[str, Callable[[Subject], Findings]] = {
    "embedding filters": findings.analyse_filters,
    "position similarity": findings.analyse_positions,
    "attention distance": findings.analyse_distance,
    "attention maps": findings.analyse_maps,
}


@dataclass
class Analysis:
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
    device: str = "auto",
    quiet: bool = False,
    **pixels: Unpack[Pixels],
) -> Analysis:
    """Writes the report and its figures to `out`."""
    if count < 1:
        raise ValueError(f"--count must be at least 1, got {count}")
    data, data_root = resolve_data(model, images, data_root)
    predictor = Predictor(model, device=device, precision="fp32", **pixels)
    subject = gather(predictor, data, split, data_root, count, model)
    subject.notes[:0] = subject.find_warnings()
    default = Path(model) if Path(model).is_dir() else Path("analysis") / display_name(model)
    folder = Path(out or default)
    make_folder(folder / "figures")  # fails before the analysis if it cannot be written
    with Display("analysis", len(ANALYSES) + 1, quiet=quiet) as display:
        results = run_analyses(subject, display)
        figures = [_write_figure(finding, folder / "figures") for finding in results]
        write_text(folder / "analysis.html", _render_report(subject, results, display_name(model)))
        display.advance(len(ANALYSES) + 1, "report")
    return Analysis(folder / "analysis.html", figures, subject.notes)


def run_analyses(subject: Subject, display: Display) -> list[Finding]:
    """All analyses that apply; the others become notes, one for each reason."""
    results: list[Finding] = []
    omitted: dict[str, list[str]] = {}
    for number, (name, analyse) in enumerate(ANALYSES.items(), 1):
        try:
            results.extend(analyse(subject))
        except NotApplicableError as error:
            omitted.setdefault(str(error), []).append(name)
        display.advance(number, name)
    subject.notes += [f"Omitted: {', '.join(names)} ({reason})." for reason, names in omitted.items()]
    return results


def display_name(model: str | Path) -> str:
    """The name of a run, or of a file without its suffix; model.safetensors has the name of its run."""
    path = Path(model)
    if path.is_file() and path.stem in ("model", "pytorch_model", "checkpoint", "weights"):
        path = path.parent
    return path.stem if path.is_file() else path.resolve().name


# The report -----------------------------------------------------------------------------------------------------------


def _write_figure(finding: Finding, folder: Path) -> Path:
    """The figure as PNG, its data as JSON."""
    path = folder / f"{finding.name}.png"
    save(finding.figure, path)
    write_text(path.with_suffix(".json"), json.dumps(replace_non_finite(finding.data)) + "\n")
    return path


def _render_report(subject: Subject, results: list[Finding], name: str) -> str:
    script = ""
    sections = [
        html.make_section(
            finding.title, finding.text, finding.html or html.inline_figure(finding.figure, finding.title)
        )
        for finding in results
    ]
    if isinstance(subject.model, ViT) and not subject.model.config.axial:
        section, script = explorer_section(subject)
        sections.insert(0, section)
    lead = html.element("p", _describe_subject(subject), class_="lead")
    lead = html.join((lead, *map(html.notice, subject.notes)))
    return html.render_page(f"Analysis of {name}", lead, sections, script=script)


def _describe_subject(subject: Subject) -> str:
    config, count = subject.model.config, len(subject.images)
    height, width = config.image_size
    images = f"for images of {width} x {height} pixels; analysed with {count} {subject.description}."
    if not isinstance(subject.model, ViT):
        return f"A ResNet {images}"
    (h, w), layers = config.grid, html.pluralize(len(subject.model.blocks), "layer")
    patches = f"{h} x {w} patches of {height // h} x {width // w} pixels"
    heads = html.pluralize(config.heads, "head")
    return f"A Vision Transformer with {layers}, {heads}, width {config.width} and {patches}, {images}"
