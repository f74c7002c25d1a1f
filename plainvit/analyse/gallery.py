"""Images with what a model said of them: the predictions of a page as figure, CSV and section, and a contact sheet.

predictions(samples, Path("runs/pets"))                          a section; figures/gallery.png and .csv beside it
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
from plainvit.analyse.page import NONE, SPACE, Html, Section, bar, counted, element, figure_links, join, picture
from plainvit.data.decode import ImageError
from plainvit.data.sources import Source

SIDE = 0.92  # of a picture, where its cell is 1 wide
SHOWN = 24  # pictures of a gallery
MOST = 96  # pictures of a contact sheet
PIXELS = 192  # of a thumbnail on it
BYTES = 4_000_000  # of its PNG
TALL = 1.3  # a cell of it: names and probability stand below the picture


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
            raise ValueError(f"{self.name}: an image is uint8 [h, w, 3], got {self.image.dtype} {self.image.shape}")


def wrong_first(samples: Sequence[Sample]) -> list[Sample]:
    """Mistakes before the rest, the surest of them first: they teach most."""
    right = [one for one in samples if one.guess == one.truth]
    wrong = [one for one in samples if one.guess != one.truth]
    return sorted(wrong, key=lambda one: np.nan_to_num(-number(one.probability), nan=1.0)) + right


@styled()
def draw_gallery(samples: Sequence[Sample]) -> Figure:
    """Predictions as a picture, mistakes first."""
    shown = wrong_first(samples)[:SHOWN]
    columns = min(max(len(shown), 1), 6)
    rows = max(math.ceil(len(shown) / columns), 1)
    figure, one = new_axes((1.45 * columns, 1.75 * rows))
    for index, sample in enumerate(shown):
        _draw_guess(one, sample, index % columns, index // columns * 1.21)
    one.set(xlim=(-0.02, columns - 0.06), ylim=(1.21 * rows, -0.05), aspect="equal")
    one.set_axis_off()
    return figure


def _draw_guess(axes: Axes, sample: Sample, left: float, top: float) -> None:
    _show(axes, sample.image, left, top)
    colour = RIGHT if sample.guess == sample.truth else WRONG
    axes.add_patch(Rectangle((left, top), SIDE, SIDE, fill=False, edgecolor=colour, linewidth=1.5))
    words = f"{printable(sample.guess, 14)} {_percent(sample.probability)}".strip()
    below = {"ha": "left", "va": "top", "fontsize": 6.5, "parse_math": False}
    axes.text(left, top + SIDE + 0.03, words, color=colour, **below)
    if sample.guess != sample.truth:
        axes.text(left, top + SIDE + 0.135, f"truth: {printable(sample.truth, 15)}", color=COLOURS["muted"], **below)


def _show(axes: Axes, pixels: np.ndarray, left: float, top: float) -> None:
    """In the middle of its cell, whatever its shape; tiny ones keep their pixels."""
    height, width = pixels.shape[:2]
    tall, wide = SIDE * height / max(height, width), SIDE * width / max(height, width)
    x, y = left + (SIDE - wide) / 2, top + (SIDE - tall) / 2
    smoothing = "nearest" if max(height, width) <= 64 else "antialiased"
    axes.imshow(pixels, extent=(x, x + wide, y + tall, y), interpolation=smoothing, aspect="auto")


def _percent(share: float) -> str:
    return "" if math.isnan(number(share)) else f"{100 * share:.0f} %"


def write_gallery(samples: Sequence[Sample], path: Path) -> None:
    rows = [[one.name, one.truth, one.guess, cell(number(one.probability))] for one in wrong_first(samples)]
    write_csv(path, [["name", "truth", "guess", "probability"], *rows])


def predictions(
    samples: Sequence[Sample], folder: Path, title: str = "Predictions", judged: tuple[int, int] | None = None
) -> Section | None:
    """With the figure and its numbers in the folder's figures/. judged: the mistakes and images there are in all."""
    if not samples:
        return None
    ordered = wrong_first(samples)
    save(draw_gallery(samples), folder / "figures" / "gallery.png")
    write_gallery(samples, folder / "figures" / "gallery.csv")
    wrong = [one for one in ordered if one.guess != one.truth]
    parts: list[object] = [element("p", _chosen_of(len(wrong), len(ordered), judged), class_="note")]
    for kind, shown in (("Wrong", wrong), ("Right", ordered[len(wrong) :])):
        if shown:
            parts.append(element("h3", kind, " ", element("span", len(shown), class_="quiet")))
            parts.append(element("div", *map(_framed, shown), class_="samples"))
    return Section(title, join([*parts, figure_links("gallery")]))


def _chosen_of(wrong: int, shown: int, judged: tuple[int, int] | None) -> str:
    """Which of all predictions are shown, where they might be taken for all."""
    if judged is None:
        note = f"{wrong} wrong among {counted(shown, 'image')}" if wrong else "All of these are right"
        return f"{note}. They are a choice, so the share of mistakes here is not the accuracy."
    mistakes, images = judged
    if shown == images:
        return f"All {counted(images, 'image')}: {mistakes:,} wrong."
    if not mistakes:
        return f"No mistake in {counted(images, 'image')}; these are {shown:,} of them."
    right = f" and {shown - wrong:,} of the {images - mistakes:,} right answers" if shown > wrong else ""
    if wrong == mistakes:
        every = f"All {wrong:,} mistakes" if wrong > 1 else "The one mistake"
        return f"{every} of {counted(images, 'image')}{right}."
    note = f"The surest {wrong:,} of {mistakes:,} mistakes of {counted(images, 'image')}{right}."
    return f"{note} They are a choice, so the share of mistakes here is not the accuracy."


def _framed(sample: Sample) -> Html:
    right, share = sample.guess == sample.truth, number(sample.probability)
    sure = NONE if math.isnan(share) else f"{100 * share:.0f}{SPACE}%"
    words = [
        element("div", element("b", sample.guess), element("span", sure, class_="quiet"), class_="line"),
        "" if right else element("div", element("span", "truth: ", class_="quiet"), sample.truth),
        element("div", sample.name, class_="file", title=sample.name),
    ]
    shown = picture(sample.image, f"{sample.truth}, guessed {sample.guess}")
    kind = "sample right" if right else "sample wrong"
    return element("figure", shown, bar(share), element("figcaption", *words), class_=kind)


# Contact sheet --------------------------------------------------------------------------------------------------------


def chosen(count: int, most: int = MOST) -> np.ndarray:
    """Which of so many pictures are shown: all, or some spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


@styled()
def contact_sheet(
    source: Source, index: Sequence[int] | np.ndarray, rows: Sequence[Mapping[str, Any]], note: str = ""
) -> Figure:
    """The pictures at `index` of the source with their rows, as `plainvit predict` writes them, and a line below.

    A row with a `label` in place of `guesses` is shown with this label alone.
    """
    columns = min(len(rows), 8 if len(rows) > 24 else 6)
    lines = math.ceil(len(rows) / columns)
    told = textwrap.wrap(printable(note), 26 * columns)
    foot = 0.02 + 0.11 * len(told) if told else 0.0
    figure, one = new_axes((1.3 * columns, 1.3 * (TALL * lines + foot)))
    for place, (at, row) in enumerate(zip(index, rows, strict=True)):
        _draw_row(one, _thumbnail(source, int(at)), row, place % columns, place // columns * TALL)
    below: dict[str, Any] = {"fontsize": 6, "color": COLOURS["muted"], "va": "top", "parse_math": False}
    one.text(0, TALL * lines + 0.01, "\n".join(told), **below)
    one.set(xlim=(-0.04, columns - 0.04), ylim=(TALL * lines + foot - 0.04, -0.04), aspect="equal")
    one.set_axis_off()
    return figure


def class_sheet(source: Source) -> Figure:
    """Images spread evenly over the classes, each with its class and file name."""
    index = np.argsort(source.labels, kind="stable")[chosen(len(source))]
    classes = {at: source.classes[label] if (label := source.labels[at]) >= 0 else "no label" for at in index}
    return contact_sheet(source, index, [{"name": source.name(int(at)), "label": classes[at]} for at in index])


def _thumbnail(source: Source, index: int) -> np.ndarray | None:
    try:
        shown = Image.fromarray(source.image(index))
    except (ImageError, OSError):
        return None
    shown.thumbnail((PIXELS, PIXELS))
    return np.asarray(shown)


def _draw_row(axes: Axes, pixels: np.ndarray | None, row: Mapping[str, Any], left: float, top: float) -> None:
    axes.add_patch(Rectangle((left, top), SIDE, SIDE, facecolor=COLOURS["line"], alpha=0.45, linewidth=0, zorder=-1))
    if pixels is not None:
        _show(axes, pixels, left, top)
    below: dict[str, Any] = {"va": "top", "parse_math": False, "clip_on": False}
    name = printable(str(row["name"]).rpartition("/")[2], 24)
    axes.text(left, top + SIDE + 0.21, name, fontsize=4.5, color=COLOURS["muted"], ha="left", **below)
    if "label" in row:
        axes.text(left, top + SIDE + 0.06, printable(row["label"], 18), fontsize=6.5, ha="left", **below)
        return
    if not row["guesses"]:
        axes.text(left, top + SIDE + 0.06, "no answer", fontsize=6.5, color=WRONG, ha="left", **below)
        return
    guess = row["guesses"][0]
    sure = guess["probability"]
    for share, colour in ((1.0, COLOURS["line"]), (sure, COLOURS["blue"])):  # a bar as long as the model is sure
        axes.add_patch(Rectangle((left, top + SIDE + 0.02), SIDE * share, 0.025, facecolor=colour, linewidth=0))
    axes.text(left, top + SIDE + 0.07, printable(guess["label"], 15), fontsize=6.5, ha="left", **below)
    axes.text(left + SIDE, top + SIDE + 0.07, f"{sure:.0%}", fontsize=6.5, color=COLOURS["muted"], ha="right", **below)
