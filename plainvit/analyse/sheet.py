"""A contact sheet of predictions: pictures in rows, beneath each what the model said and how sure it was.

plainvit predict runs/photos photos/ --sheet sheet.png
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from plainvit.analyse.figures import COLOURS, WRONG, new_figure, printable, styled
from plainvit.data.decode import ImageError
from plainvit.data.sources import Source

MOST = 96  # pictures of a sheet
SIDE = 192  # pixels of a thumbnail
BYTES = 4_000_000  # of the PNG
CELL, TALL = 1.0, 1.3  # a picture takes 0.92 of its cell's width; names and probability stand below


def chosen(count: int, most: int = MOST) -> np.ndarray:
    """Which of so many pictures are shown: all, or some spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


@styled()
def contact_sheet(source: Source, index: Sequence[int] | np.ndarray, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The pictures at `index` of the source with their rows, as `plainvit predict` writes them."""
    columns = min(len(rows), 8 if len(rows) > 24 else 6)
    lines = math.ceil(len(rows) / columns)
    figure, axes = new_figure(panel=(1.3 * columns, 1.3 * TALL * lines))
    one: Axes = axes[0, 0]
    for place, (at, row) in enumerate(zip(index, rows, strict=True)):
        _draw(one, _thumbnail(source, int(at)), row, place % columns * CELL, place // columns * TALL)
    one.set(xlim=(-0.04, columns - 0.04), ylim=(TALL * lines - 0.04, -0.04), aspect="equal")
    one.set_axis_off()
    return figure


def _thumbnail(source: Source, index: int) -> np.ndarray | None:
    try:
        picture = Image.fromarray(source.image(index))
    except (ImageError, OSError):
        return None
    picture.thumbnail((SIDE, SIDE))
    return np.asarray(picture)


def _draw(axes: Axes, picture: np.ndarray | None, row: Mapping[str, Any], left: float, top: float) -> None:
    side = 0.92
    axes.add_patch(Rectangle((left, top), side, side, facecolor=COLOURS["line"], alpha=0.45, linewidth=0, zorder=-1))
    if picture is not None:
        height, width = picture.shape[:2]
        tall, wide = side * height / max(height, width), side * width / max(height, width)
        x, y = left + (side - wide) / 2, top + (side - tall) / 2
        smoothing = "nearest" if max(height, width) <= 64 else "antialiased"
        axes.imshow(picture, extent=(x, x + wide, y + tall, y), interpolation=smoothing, aspect="auto")
    below: dict[str, Any] = {"va": "top", "parse_math": False, "clip_on": False}
    name = printable(str(row["name"]).rpartition("/")[2], 24)
    axes.text(left, top + side + 0.21, name, fontsize=4.5, color=COLOURS["muted"], ha="left", **below)
    if not row["guesses"]:
        axes.text(left, top + side + 0.06, "no answer", fontsize=6.5, color=WRONG, ha="left", **below)
        return
    guess = row["guesses"][0]
    sure = guess["probability"]
    for share, colour in ((1.0, COLOURS["line"]), (sure, COLOURS["blue"])):  # a bar as long as the model is sure
        axes.add_patch(Rectangle((left, top + side + 0.02), side * share, 0.025, facecolor=colour, linewidth=0))
    axes.text(left, top + side + 0.07, printable(guess["label"], 15), fontsize=6.5, ha="left", **below)
    axes.text(left + side, top + side + 0.07, f"{sure:.0%}", fontsize=6.5, color=COLOURS["muted"], ha="right", **below)
