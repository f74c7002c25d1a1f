"""Images with their predictions: a gallery (figure, CSV and report section) and contact sheets.

plainvit predict runs/photos photos/ --sheet sheet.png           contact_sheet(source, index, rows)
plainvit data info photos/ --sheet sheet.png                     class_sheet(source)
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from plainvit.analyse.figures import COLOURS, RIGHT, WRONG, cell, new_axes, number, printable, save, styled, write_csv
from plainvit.analyse.page import NONE, SPACE, Html, Section, bar, element, figure_links, join, picture, pluralize
from plainvit.data.decode import ImageError
from plainvit.data.sources import Source

SIDE = 0.92  # of an image, in cells
SHOWN = 24  # images of a gallery
MOST = 96  # images of a contact sheet
PIXELS = 192  # of a thumbnail on it
BYTES = 4_000_000  # of its PNG
TALL = 1.3  # height of its cells, with the text below the image


@dataclass(frozen=True)
class Sample:
    """One prediction to show."""

    image: np.ndarray  # uint8 [h, w, 3]
    truth: str
    guess: str
    probability: float  # of the guess
    name: str  # of the file

    def __post_init__(self) -> None:
        if self.image.dtype != np.uint8 or self.image.ndim != 3 or self.image.shape[2] != 3 or not self.image.size:
            raise ValueError(
                f"{self.name}: expected a uint8 image [h, w, 3], got {self.image.dtype} {self.image.shape}"
            )


def sort_wrong_first(samples: Sequence[Sample]) -> list[Sample]:
    """Errors first, the most confident at the top."""
    right = [sample for sample in samples if sample.guess == sample.truth]
    wrong = [sample for sample in samples if sample.guess != sample.truth]
    return sorted(wrong, key=lambda sample: np.nan_to_num(-number(sample.probability), nan=1.0)) + right


@styled()
def draw_gallery(samples: Sequence[Sample]) -> Figure:
    """Predictions as a figure, errors first."""
    shown = sort_wrong_first(samples)[:SHOWN]
    columns = min(max(len(shown), 1), 6)
    rows = max(math.ceil(len(shown) / columns), 1)
    figure, axes = new_axes((1.45 * columns, 1.75 * rows))
    for index, sample in enumerate(shown):
        _draw_sample(axes, sample, index % columns, index // columns * 1.21)
    axes.set(xlim=(-0.02, columns - 0.06), ylim=(1.21 * rows, -0.05), aspect="equal")
    axes.set_axis_off()
    return figure


def _draw_sample(axes: Axes, sample: Sample, left: float, top: float) -> None:
    _draw_image(axes, sample.image, left, top)
    colour = RIGHT if sample.guess == sample.truth else WRONG
    axes.add_patch(Rectangle((left, top), SIDE, SIDE, fill=False, edgecolor=colour, linewidth=1.5))
    words = f"{printable(sample.guess, 14)} {_percent(sample.probability)}".strip()
    below = {"ha": "left", "va": "top", "fontsize": 6.5, "parse_math": False}
    axes.text(left, top + SIDE + 0.03, words, color=colour, **below)
    if sample.guess != sample.truth:
        axes.text(left, top + SIDE + 0.135, f"true: {printable(sample.truth, 15)}", color=COLOURS["muted"], **below)


def _draw_image(axes: Axes, pixels: np.ndarray, left: float, top: float) -> None:
    """Centred in its cell; small images keep sharp pixels."""
    height, width = pixels.shape[:2]
    h, w = SIDE * height / max(height, width), SIDE * width / max(height, width)
    x, y = left + (SIDE - w) / 2, top + (SIDE - h) / 2
    smoothing = "nearest" if max(height, width) <= 64 else "antialiased"
    axes.imshow(pixels, extent=(x, x + w, y + h, y), interpolation=smoothing, aspect="auto")


def _percent(share: float) -> str:
    return "" if math.isnan(number(share)) else f"{100 * share:.0f} %"


def write_gallery(samples: Sequence[Sample], path: Path) -> None:
    rows = [[each.name, each.truth, each.guess, cell(number(each.probability))] for each in sort_wrong_first(samples)]
    write_csv(path, [["name", "truth", "guess", "probability"], *rows])


def predictions_section(
    samples: Sequence[Sample], folder: Path, title: str = "Predictions", totals: tuple[int, int] | None = None
) -> Section | None:
    """Also writes figures/gallery.png and .csv. totals: numbers of errors and images in the whole split."""
    if not samples:
        return None
    ordered = sort_wrong_first(samples)
    save(draw_gallery(samples), folder / "figures" / "gallery.png")
    write_gallery(samples, folder / "figures" / "gallery.csv")
    wrong = [sample for sample in ordered if sample.guess != sample.truth]
    parts: list[object] = [element("p", _describe_selection(len(wrong), len(ordered), totals), class_="note")]
    for kind, shown in (("Errors", wrong), ("Correct", ordered[len(wrong) :])):
        if shown:
            parts.append(element("h3", kind, " ", element("span", len(shown), class_="quiet")))
            parts.append(element("div", *map(_sample_card, shown), class_="samples"))
    return Section(title, join([*parts, figure_links("gallery")]))


def _describe_selection(wrong: int, shown: int, totals: tuple[int, int] | None) -> str:
    """Which predictions are shown; a warning where the selection does not reflect the accuracy."""
    biased = "Errors are over-represented in this selection."
    if totals is None:
        return f"{pluralize(wrong, 'error')} in {pluralize(shown, 'image')}. {biased}"
    errors, images = totals
    if shown == images:
        return f"All {pluralize(images, 'image')}: {pluralize(errors, 'error')}."
    if not errors:
        return f"No errors in {pluralize(images, 'image')}; {shown:,} of them are shown."
    right = f" and {shown - wrong:,} of {images - errors:,} correct predictions" if shown > wrong else ""
    if wrong == errors:
        return f"All errors ({wrong:,} of {pluralize(images, 'image')}){right}."
    return f"The {wrong:,} most confident of {errors:,} errors in {pluralize(images, 'image')}{right}. {biased}"


def _sample_card(sample: Sample) -> Html:
    right, share = sample.guess == sample.truth, number(sample.probability)
    confidence = NONE if math.isnan(share) else f"{100 * share:.0f}{SPACE}%"
    words = [
        element("div", element("b", sample.guess), element("span", confidence, class_="quiet"), class_="line"),
        "" if right else element("div", element("span", "true: ", class_="quiet"), sample.truth),
        element("div", sample.name, class_="file", title=sample.name),
    ]
    shown = picture(sample.image, f"{sample.truth}, predicted {sample.guess}")
    kind = "sample right" if right else "sample wrong"
    return element("figure", shown, bar(share), element("figcaption", *words), class_=kind)


# Contact sheet --------------------------------------------------------------------------------------------------------


def choose_evenly(count: int, most: int = MOST) -> np.ndarray:
    """Indices of the images on a contact sheet: all, or a number of them spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


@styled()
def contact_sheet(
    source: Source, index: Sequence[int] | np.ndarray, rows: Sequence[Mapping[str, Any]], note: str = ""
) -> Figure:
    """The images at `index` with their rows as `plainvit predict` writes them, and a note below.

    A row with `label` instead of `predictions` shows that label.
    """
    columns = min(len(rows), 8 if len(rows) > 24 else 6)
    lines = math.ceil(len(rows) / columns)
    note_lines = textwrap.wrap(printable(note), 26 * columns)
    foot = 0.02 + 0.11 * len(note_lines) if note_lines else 0.0
    figure, axes = new_axes((1.3 * columns, 1.3 * (TALL * lines + foot)))
    for place, (at, row) in enumerate(zip(index, rows, strict=True)):
        _draw_cell(axes, _thumbnail(source, int(at)), row, place % columns, place // columns * TALL)
    below: dict[str, Any] = {"fontsize": 6, "color": COLOURS["muted"], "va": "top", "parse_math": False}
    axes.text(0, TALL * lines + 0.01, "\n".join(note_lines), **below)
    axes.set(xlim=(-0.04, columns - 0.04), ylim=(TALL * lines + foot - 0.04, -0.04), aspect="equal")
    axes.set_axis_off()
    return figure


def class_sheet(source: Source) -> Figure:
    """Images spread evenly over the classes, with class and file name."""
    index = np.argsort(source.labels, kind="stable")[choose_evenly(len(source))]
    classes = {at: source.classes[label] if (label := source.labels[at]) >= 0 else "no label" for at in index}
    return contact_sheet(source, index, [{"name": source.name(int(at)), "label": classes[at]} for at in index])


def _thumbnail(source: Source, index: int) -> np.ndarray | None:
    try:
        shown = Image.fromarray(source.image(index))
    except (ImageError, OSError):
        return None
    shown.thumbnail((PIXELS, PIXELS))
    return np.asarray(shown)


def _draw_cell(axes: Axes, pixels: np.ndarray | None, row: Mapping[str, Any], left: float, top: float) -> None:
    axes.add_patch(Rectangle((left, top), SIDE, SIDE, facecolor=COLOURS["line"], alpha=0.45, linewidth=0, zorder=-1))
    if pixels is not None:
        _draw_image(axes, pixels, left, top)
    below: dict[str, Any] = {"va": "top", "parse_math": False, "clip_on": False}
    name = printable(str(row["name"]).rpartition("/")[2], 24)
    axes.text(left, top + SIDE + 0.21, name, fontsize=4.5, color=COLOURS["muted"], ha="left", **below)
    if "label" in row:
        axes.text(left, top + SIDE + 0.06, printable(row["label"], 18), fontsize=6.5, ha="left", **below)
        return
    if not row["predictions"]:
        axes.text(left, top + SIDE + 0.06, "no prediction", fontsize=6.5, color=WRONG, ha="left", **below)
        return
    guess = row["predictions"][0]
    confidence = guess["probability"]
    for share, colour in ((1.0, COLOURS["line"]), (confidence, COLOURS["blue"])):
        axes.add_patch(Rectangle((left, top + SIDE + 0.02), SIDE * share, 0.025, facecolor=colour, linewidth=0))
    axes.text(left, top + SIDE + 0.07, printable(guess["label"], 15), fontsize=6.5, ha="left", **below)
    axes.text(
        left + SIDE, top + SIDE + 0.07, f"{confidence:.0%}", color=COLOURS["muted"], fontsize=6.5, ha="right", **below
    )
