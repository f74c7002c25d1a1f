"""Images with their predictions: contact sheets (PNG) and the predictions section of a report.

plainvit predict runs/photos photos/ --contact-sheet sheet.png           contact_sheet(source, index, rows)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from rich.cells import cell_len, set_cell_size

from plainvit.analyse import html
from plainvit.analyse.figures import COLORS, new_axes, number, printable, styled
from plainvit.analyse.html import Html, Section
from plainvit.data.decode import ImageError
from plainvit.data.sources import Source

SIDE = 0.92  # of an image, in cells
MAX_TILES = 96  # images of a contact sheet
PIXELS = 192  # longer side of a thumbnail
TALL = 1.3  # height of its cells, with the text below the image


@dataclass(frozen=True)
class Sample:
    """One prediction to show."""

    image: np.ndarray  # uint8 [h, w, 3]
    truth: str
    prediction: str
    probability: float  # of the prediction
    name: str  # of the file

    @property
    def is_correct(self) -> bool:
        return self.prediction == self.truth


# Contact sheets -------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One image of a contact sheet and the text below it."""

    image: np.ndarray | None  # None if it cannot be read
    label: str
    detail: str  # a smaller second line
    probability: float = math.nan  # NaN: not shown


def choose_evenly(count: int, most: int = MAX_TILES) -> np.ndarray:
    """Indices of the images on a contact sheet: all, or a number of them spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def contact_sheet(source: Source, index: Sequence[int] | np.ndarray, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The images at `index` with their rows as `plainvit predict` writes them."""
    pairs = zip(np.asarray(index).tolist(), rows, strict=True)
    return draw_cells([_prediction_cell(source, position, row) for position, row in pairs])


def _prediction_cell(source: Source, index: int, row: Mapping[str, Any]) -> Cell:
    image, name = thumbnail(source, index), str(row["name"]).rpartition("/")[2]
    if not row["predictions"]:
        return Cell(image, "no prediction", name)
    best = row["predictions"][0]
    return Cell(image, str(best["label"]), name, number(best["probability"]))


def thumbnail(source: Source, index: int) -> np.ndarray | None:
    """None if the image cannot be read."""
    try:
        image = Image.fromarray(source.image(index))
    except (ImageError, OSError):
        return None
    image.thumbnail((PIXELS, PIXELS))
    return np.asarray(image)


@styled()
def draw_cells(cells: Sequence[Cell], columns: int = 0) -> Figure:
    """A grid of images with text below each. columns: by default 6, or 8 for more than 24 images."""
    columns = columns or min(max(len(cells), 1), 8 if len(cells) > 24 else 6)
    lines = max(math.ceil(len(cells) / columns), 1)
    figure, axes = new_axes((1.3 * columns, 1.3 * TALL * lines))
    for position, cell in enumerate(cells):
        _draw_cell(axes, cell, position % columns, position // columns * TALL)
    axes.set(xlim=(-0.04, columns - 0.04), ylim=(TALL * lines - 0.04, -0.04), aspect="equal")
    axes.set_axis_off()
    return figure


def _draw_cell(axes: Axes, cell: Cell, left: float, top: float) -> None:
    axes.add_patch(Rectangle((left, top), SIDE, SIDE, facecolor=COLORS["line"], alpha=0.45, linewidth=0, zorder=-1))
    if cell.image is not None:  # centered; small images keep sharp pixels
        height, width = cell.image.shape[:2]
        h, w = SIDE * height / max(height, width), SIDE * width / max(height, width)
        x, y = left + (SIDE - w) / 2, top + (SIDE - h) / 2
        smoothing = "nearest" if max(height, width) <= 64 else "antialiased"
        axes.imshow(cell.image, extent=(x, x + w, y + h, y), interpolation=smoothing, aspect="auto")
    below: dict[str, Any] = {"va": "top", "parse_math": False, "clip_on": False}
    label = truncate(cell.label, 22 if math.isnan(cell.probability) else 15)
    axes.text(left, top + SIDE + 0.07, label, fontsize=6.5, color=COLORS["ink"], **below)
    axes.text(left, top + SIDE + 0.19, truncate(cell.detail, 26, 10), fontsize=4.5, color=COLORS["muted"], **below)
    if math.isnan(cell.probability):
        return
    for length, color in ((1.0, COLORS["line"]), (cell.probability, COLORS["blue"])):
        axes.add_patch(Rectangle((left, top + SIDE + 0.02), SIDE * length, 0.025, facecolor=color, linewidth=0))
    percent = f"{cell.probability:.0%}"
    axes.text(left + SIDE, top + SIDE + 0.07, percent, color=COLORS["muted"], fontsize=6.5, ha="right", **below)


def truncate(text: str, columns: int, ending: int = 0) -> str:
    """Printable text of at most this many columns, `ending` of them for its end. East Asian characters take two."""
    text = printable(text)
    if cell_len(text) <= columns:
        return text
    start, end = set_cell_size(text, columns - 1 - ending), set_cell_size(text[::-1], ending)[::-1]
    return f"{start.rstrip()}…{end.lstrip()}"


# Report section -------------------------------------------------------------------------------------------------------


def predictions_section(
    samples: Sequence[Sample], title: str = "Predictions", totals: tuple[int, int] | None = None
) -> Section | None:
    """Errors first, the most confident at the top. totals: numbers of errors and images in the whole split."""
    if not samples:
        return None
    errors = [sample for sample in samples if not sample.is_correct]
    errors.sort(key=lambda sample: float(np.nan_to_num(-number(sample.probability), nan=1.0)))
    correct = [sample for sample in samples if sample.is_correct]
    parts = [html.element("p", _describe_selection(len(errors), len(correct), totals), class_="note")]
    for kind, group in (("Errors", errors), ("Correct", correct)):
        if group:
            parts.append(html.element("h3", kind, " ", html.element("span", len(group), class_="quiet")))
            parts.append(html.element("div", *map(_sample_card, group), class_="samples"))
    return html.make_section(title, *parts)


def _describe_selection(wrong: int, right: int, totals: tuple[int, int] | None) -> str:
    """Which predictions are shown: the selection may not reflect the accuracy."""
    errors, images = totals or (wrong, wrong + right)
    text = f"Shown: {wrong:,} of {html.pluralize(errors, 'error')}, the most confident first"
    return f"{text}, and {right:,} of {images - errors:,} correct predictions." if right else f"{text}."


def _sample_card(sample: Sample) -> Html:
    probability = number(sample.probability)
    confidence = html.NONE if math.isnan(probability) else f"{100 * probability:.0f}{html.SPACE}%"
    first = html.element("b", sample.prediction), html.element("span", confidence, class_="quiet")
    caption = [
        html.element("div", *first, class_="line"),
        "" if sample.is_correct else html.element("div", html.element("span", "true: ", class_="quiet"), sample.truth),
        html.element("div", sample.name, class_="file", title=sample.name),
    ]
    image = html.embed_image(sample.image, f"{sample.truth}, predicted {sample.prediction}")
    kind = "sample right" if sample.is_correct else "sample wrong"
    return html.element("figure", image, html.bar(probability), html.element("figcaption", *caption), class_=kind)
