"""What a model has learned, on one page: the paper's figures 6, 7, 10, 11 and 14, and what lies beyond them.

    plainvit analyse runs/photos                              its own held-out images
    plainvit analyse B_16.npz --images photos/ --against BiT-M-R50x1.npz

Writes figures/*.png, the numbers of each beside it as JSON, and analysis.html. What does not apply to a model is said
in a line and left out.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from plainvit.analyse import robust
from plainvit.analyse.explorer import explorer, omissions, plan
from plainvit.analyse.figures import save, svg
from plainvit.analyse.page import Html, Section, element, join, notice, page
from plainvit.analyse.parts import PARTS, Part, Subject
from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import Source, open_source
from plainvit.disk import read_json, write_atomically
from plainvit.evaluate.inputs import find
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT
from plainvit.runtime.display import Display
from plainvit.runtime.folder import finite


def understand(
    model: str | Path,
    images: str = "",
    out: str | Path = "",
    *,
    split: str = "",
    data_root: str = "",
    count: int = 128,
    against: str = "",
    device: str = "auto",
    quiet: bool = False,
) -> Path:
    """Writes the page and its figures below `out`, and gives the page's path."""
    if count < 1:
        raise ValueError(f"--count is the number of images, at least 1, got {count}")
    predictor = Predictor(model, device=device, precision="fp32")
    subject = gather(predictor, *_images_of(model, images, split, data_root), count)
    subject.against = Predictor(against, device=device, precision="fp32") if against else None
    folder = Path(out) if out else _beside(Path(model))
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Part] = []
    with Display("analysis", len(PARTS) + 1, quiet=quiet) as display:
        for number, make in enumerate(PARTS, 1):
            try:
                parts += [part for part in make(subject) if part]
            except ValueError as error:
                subject.notes.append(f"{(make.__doc__ or make.__name__).splitlines()[0]} {error}.")
            display.advance(number, parts[-1].title if parts else "")
        for part in parts:
            _write(part, folder / "figures")
        text = _page(subject, parts, str(model))
        write_atomically(folder / "analysis.html", lambda beside: beside.write_text(text, encoding="utf-8"))
        display.advance(len(PARTS) + 1, "page")
    return folder / "analysis.html"


def _beside(model: Path) -> Path:
    return model if model.is_dir() else Path("analysis") / model.stem


def _images_of(model: str | Path, images: str, split: str, data_root: str) -> tuple[str, str, str]:
    """Without --images, those that a run held out."""
    if images:
        return images, split, data_root
    stored = read_json(Path(model) / "config.json") if Path(model).is_dir() else {}
    if not stored.get("data"):
        raise ValueError("which images? --images takes a folder, an archive, or a set that `plainvit data info` knows")
    return stored["data"], split, data_root or stored.get("data_root", "")


def gather(predictor: Predictor, spec: str, split: str, data_root: str, count: int) -> Subject:
    """Images spread evenly over the source, as the model sees them; those that cannot be read are passed over."""
    source = _opened(spec, split, data_root)
    rows: list[tuple[Tensor, str, int]] = []
    for index in np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int)).tolist():
        try:
            rows.append((predictor.prepare(source.read(index)), source.name(index), int(source.labels[index])))
        except (ImageError, OSError):
            continue
    if not rows:
        raise DataError(f"no image of {spec} can be read")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()  # sets lie sorted by class
    rows = [rows[place] for place in order]
    labels = torch.tensor([label for _, _, label in rows])
    names, ours = source.classes, predictor.model.about.class_names
    fits = len(names) == predictor.classes and (not ours or tuple(ours) == tuple(names)) and bool((labels >= 0).all())
    subject = Subject(
        predictor, torch.stack([row[0] for row in rows]), [row[1] for row in rows], labels if fits else None
    )
    if not fits:
        subject.notes.append(
            "Labels are not known, or not the model's classes: accuracy is agreement with its answers."
        )
    return subject


def _opened(spec: str, split: str, data_root: str) -> Source:
    """A set with labels where it is one, its test images first; otherwise just images."""
    for one in (split,) if split else ("test", "val", "train"):
        try:
            return open_source(spec, one, data_root=data_root or None)
        except (DataError, ValueError):
            continue
    return find([spec], split=split or "test", data_root=data_root or None)


# The page -------------------------------------------------------------------------------------------------------------


def _write(part: Part, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in part.figures.items():
        save(figure, folder / f"{_file(part, name)}.png")
    text = json.dumps(finite(part.numbers))
    write_atomically(folder / f"{part.name}.json", lambda beside: beside.write_text(text + "\n", encoding="utf-8"))


def _file(part: Part, name: str) -> str:
    return f"{part.name}-{name}" if name else part.name


def _page(subject: Subject, parts: list[Part], source: str) -> str:
    sections = [Section(part.title, join((element("p", part.words), _figures(part)))) for part in parts]
    script = ""
    if isinstance(subject.model, ViT) and not subject.model.config.axial:
        body, script = explorer(subject.model, subject.shown(), _shown(subject))
        words = "Click a patch, or move with the arrow keys, and see where it looks."
        left_out = omissions(plan(subject.model, len(subject.shown())), subject.model)
        sections.insert(0, Section("Explorer", join((element("p", words, " ", left_out), body))))
    lead = join((element("p", _lead(subject), class_="lead"), *map(notice, subject.notes)))
    return page(f"What {Path(source).name or source} has learned", lead, sections, "plainvit analyse", script)


def _lead(subject: Subject) -> str:
    config = subject.model.config
    size = f"{config.image_size[1]} x {config.image_size[0]} pixels"
    if not isinstance(subject.model, ViT):
        return f"A ResNet for images of {size}, looked at with {len(subject.images)} of them."
    h, w = config.grid
    shape = f"{config.depth} layers, {config.heads} heads, width {config.width}, {h} x {w} patches"
    return f"A Vision Transformer of {shape}, for images of {size}, looked at with {len(subject.images)} of them."


def _figures(part: Part) -> Html:
    made = [_raster(one, part.title) if part.raster else _drawn(one, part.title) for one in part.figures.values()]
    return element("div", *made, class_="panels" if len(made) > 1 and not part.raster else "wide")


def _drawn(figure: Figure, label: str) -> Html:
    return element("figure", Html(svg(figure, label)))


def _raster(figure: Figure, label: str) -> Html:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    data = base64.b64encode(buffer.getvalue()).decode()
    return element("figure", element("img", src=f"data:image/png;base64,{data}", alt=label, class_="figure"))


def _shown(subject: Subject) -> list[dict[str, Any]]:
    images = subject.shown()
    if subject.model.head is None:
        guesses = ["nothing, it has no head"] * len(images)
    else:
        best = robust.logits(subject.model, images).softmax(-1).max(-1)
        names = subject.predictor.class_names
        guesses = [
            f"{names[at]} ({100 * p:.0f} %)" for p, at in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
    return [
        {"source": _address(image), "name": name, "guess": guess}
        for image, name, guess in zip(images, subject.names, guesses, strict=False)
    ]


def _address(image: Tensor) -> str:
    buffer = io.BytesIO()
    small = image.shape[-1] <= 64
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, "PNG" if small else "JPEG", quality=88)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"
