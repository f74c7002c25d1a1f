"""The figures of an analysis, in the project's style: each takes numbers and gives a figure.

save(draw_filters(filters(model)), Path("figures/filters.png"))

A figure says in its title what is drawn, in which unit; colours that mean a number have a bar. Panels of charts are all
of one size, so that their letters are alike wherever they stand side by side.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from PIL import Image

from plainvit.analyse.embeddings import Filters, as_pictures
from plainvit.analyse.figures import COLOURS, new_axes, printable, styled
from plainvit.analyse.page import CRISP

LINES = ("blue", "orange", "green", "purple", "grey")
MOST_TILES = 14  # positions along a side of the similarity figure
PANEL = (4.2, 2.6)  # inches
BROAD = 8.7  # inches of a figure that takes a page's width
RANDOM = "random order"
DARK = 48  # of 255


@styled()
def draw_filters(found: Filters) -> Figure:
    """Tiles in the order of what they explain, seven to a row as in Figure 7."""
    pictures = as_pictures(found.tiles)
    columns = min(7, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    figure, one = new_axes((0.95 * columns, 1.12 * rows + 0.3))
    for place, (picture, share) in enumerate(zip(pictures, found.variance, strict=True)):
        x, y = place % columns, 1.25 * (place // columns)
        one.imshow(picture, extent=(x, x + 0.9, y + 0.9, y), interpolation="nearest", aspect="equal")
        one.text(x + 0.45, y + 1, f"{100 * share:.1f} %", fontsize=7, color=COLOURS["muted"], ha="center", va="center")
    one.set(xlim=(-0.02, columns), ylim=(1.25 * rows, -0.02))
    one.set_title("Principal components of the first layer, share of the variance")
    one.set_axis_off()
    return figure


@styled()
def draw_similarity(similar: np.ndarray, title: str) -> Figure:
    """A tile for each position: the cosine of its vector with all others' (Figure 7, centre)."""
    h, w = similar.shape[:2]
    rows, columns = (np.unique(np.linspace(0, side - 1, min(side, MOST_TILES)).round().astype(int)) for side in (h, w))
    gap = max(1, h // 12)
    shown = similar[rows][:, columns]
    figure, one = new_axes((PANEL[0], 0.5 + 3.2 * min(max(len(rows) * h / (len(columns) * w), 0.2), 2)))
    image = one.imshow(_sheet(shown, gap), vmin=-1, vmax=1, cmap="viridis", interpolation="none")
    _numbered(one.xaxis, columns, w + gap, w)
    _numbered(one.yaxis, rows, h + gap, h)
    one.set(xlabel="column of the patch", ylabel="row of the patch", title=title)
    _plain(one)
    _bar(figure, image, one, "cosine similarity", ticks=(-1, -0.5, 0, 0.5, 1))
    return figure


def _sheet(tiles: np.ndarray, gap: int) -> np.ndarray:
    """[rows, columns, h, w] -> one canvas, nothing between the tiles."""
    rows, columns, h, w = tiles.shape
    canvas = np.full((rows * (h + gap) - gap, columns * (w + gap) - gap), np.nan)
    for i in range(rows):
        for j in range(columns):
            canvas[i * (h + gap) : i * (h + gap) + h, j * (w + gap) : j * (w + gap) + w] = tiles[i, j]
    return canvas


def _numbered(axis: Axis, numbers: Sequence[int] | np.ndarray, step: int, wide: int) -> None:
    """At most 12 labels, counted from 1, at the middle of their tiles."""
    places = np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), 12)).round().astype(int))
    axis.set_ticks([place * step + (wide - 1) / 2 for place in places], [str(numbers[place] + 1) for place in places])


@styled()
def draw_heads(values: np.ndarray, title: str, highest: float, words: str) -> Figure:
    """A dot for each head over its layer, the layers' means, and a line for the most there can be (Figure 7, right)."""
    layers, heads = values.shape
    figure, one = new_axes(PANEL)
    at = np.arange(1, layers + 1)
    one.axhline(highest, color=COLOURS["grey"], linewidth=1, linestyle=(0, (4, 3)), label=words)
    dots = {"s": 14, "color": COLOURS["blue"], "alpha": 0.55, "linewidths": 0}
    one.scatter(np.repeat(at, heads), values.ravel(), label="a head", **dots)
    one.plot(at, values.mean(1), color=COLOURS["orange"], marker="" if layers > 1 else "o", label="mean of the layer")
    one.set(xlabel="layer", ylim=(0, 1.06 * max(highest, float(np.nanmax(values)), 1e-6)), xlim=(0.5, layers + 0.5))
    one.set_title(title)
    one.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    _legend(figure, one)
    return figure


@styled()
def draw_matrix(
    values: np.ndarray, title: str, rows: str, columns: str, label: str, *, diverging: bool = False
) -> Figure:
    """A square for each pair, numbered from 1, with a bar that says what its colour means."""
    down, across = values.shape
    side = min(3.1 / across, 4.2 / down)  # of a square, so that all matrices have room in one panel
    figure, one = new_axes((PANEL[0], side * down + 0.85))
    reach = max(float(np.nanmax(abs(values))), 1e-9)
    colours, low, high = ("RdBu", -reach, reach) if diverging else ("viridis", 0, 1)
    image = one.imshow(values, cmap=colours, vmin=low, vmax=high, interpolation="none", aspect="equal")
    _numbered(one.xaxis, range(across), 1, 1)
    _numbered(one.yaxis, range(down), 1, 1)
    one.set(xlabel=printable(columns, 48), ylabel=printable(rows, 48), title=title)
    _plain(one)
    _bar(figure, image, one, label)
    return figure


@styled()
def draw_lines(
    x: Sequence[float], lines: Mapping[str, Sequence[float]], title: str, across: str, *, share: bool = True
) -> Figure:
    """Curves over one axis; shares are drawn in per cent, from nought."""
    figure, one = new_axes(PANEL)
    for colour, (name, values) in zip(LINES * 4, lines.items(), strict=False):
        style, colour = ("--", "grey") if name == RANDOM else ("-", colour)
        shown = np.asarray(values) * (100 if share else 1)
        one.plot(x, shown, style, marker="o", color=COLOURS[colour], label=printable(name, 36))
    one.set(xlabel=across, title=title)
    if share:
        one.set_ylim(0, max(one.get_ylim()[1], 1e-6))
    one.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 5, 10]))
    if len(lines) > 1:
        _legend(figure, one)
    return figure


@styled()
def draw_removed_layers(whole: float, layers: Sequence[float]) -> Figure:
    """Accuracy without each layer, as bars below the line of the whole model's."""
    figure, one = new_axes(PANEL)
    at = np.arange(1, len(layers) + 1)
    one.bar(at, 100 * np.asarray(layers), color=COLOURS["blue"], width=0.7, label="without the layer")
    one.axhline(100 * whole, color=COLOURS["orange"], linewidth=1.4, label="with all layers")
    one.set(xlabel="layer", ylim=(0, max(105 * whole, 105 * max(layers), 1)), xlim=(0.4, len(layers) + 0.6))
    one.set_title("Accuracy without a layer, %")
    one.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    _legend(figure, one)
    return figure


@styled()
def draw_histogram(values: np.ndarray, title: str, label: str, mark: float, words: str) -> Figure:
    figure, one = new_axes(PANEL)
    reach = max(float(values.max()), 1.1 * mark)
    one.hist(values.ravel(), bins=60, range=(0, reach), color=COLOURS["blue"], log=True)
    one.axvline(mark, color=COLOURS["orange"], linewidth=1.4, label=words)
    one.set(xlabel=label, xlim=(0, reach), ylim=(0.7, None), title=title)
    one.yaxis.set_minor_locator(NullLocator())
    one.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _legend(figure, one)
    return figure


# Maps -----------------------------------------------------------------------------------------------------------------


def hides_shade(images: np.ndarray) -> bool:
    """Whether maps by shade would show little: on images [N, H, W, 3] that are small, or mostly dark."""
    return max(images.shape[1:3]) < CRISP or float(np.median(images)) < DARK


def dimmed(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A map [h, w] over an image [H, W, 3]: bright where it is high, dark where it is low (Figure 6)."""
    return (image * (0.15 + 0.85 * _grown(values, image)[..., None])).round().astype(np.uint8)


def heated(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The same as colours over the image in grey: dark places of the image hide nothing."""
    grey = image.mean(2, keepdims=True)
    return (0.25 * grey + 0.75 * 255 * colormaps["plasma"](_grown(values, image))[..., :3]).round().astype(np.uint8)


def _grown(values: np.ndarray, image: np.ndarray) -> np.ndarray:
    """[h, w] -> [H, W] in [0, 1], from its least to its largest."""
    height, width = image.shape[:2]
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
    grown = Image.fromarray((255 * scaled).round().astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(grown, np.float32) / 255


@styled()
def draw_maps(images: np.ndarray, maps: Mapping[str, np.ndarray], names: Sequence[str]) -> Figure:
    """A row for each image: the image, then each map laid over it."""
    columns, ratio = ["image", *maps], images.shape[1] / images.shape[2]
    tall = 0.94 * ratio + 0.16
    figure, one = new_axes((1.5 * len(columns), 1.5 * tall * len(images) + 0.3))
    smoothing = "nearest" if max(images.shape[1:3]) <= 64 else "antialiased"
    for row, (image, name) in enumerate(zip(images, names, strict=True)):
        y = row * tall
        for x, picture in enumerate([image, *(dimmed(image, values[row]) for values in maps.values())]):
            one.imshow(picture, extent=(x, x + 0.94, y + 0.94 * ratio, y), interpolation=smoothing, aspect="equal")
        below = {"fontsize": 6, "va": "top", "color": COLOURS["muted"], "parse_math": False}
        one.text(0, y + 0.94 * ratio + 0.02, printable(name, 60), **below)
    for x, name in enumerate(columns):
        one.text(x + 0.47, -0.04, name, fontsize=7.5, ha="center", va="bottom")
    one.set(xlim=(-0.02, len(columns)), ylim=(tall * len(images), -0.14))
    one.set_axis_off()
    return figure


@styled()
def draw_looks(values: np.ndarray, title: str) -> Figure:
    """[layers, heads, h, w] as one sheet: each map by its own scale, layers across, heads downwards."""
    layers, heads, h, w = values.shape
    low, high = values.min((2, 3), keepdims=True), values.max((2, 3), keepdims=True)
    scaled = (values - low) / np.where(high > low, high - low, 1)
    gap = max(1, w // 8)
    side = min(0.6, (BROAD - 1.2) / layers)  # inches of a tile
    tall = side * h / w
    figure, one = new_axes((max(side * layers + 1.3, 3.4), max(tall * heads, 0.9) + 0.75))
    image = one.imshow(_sheet(scaled.transpose(1, 0, 2, 3), gap), cmap="magma", vmin=0, vmax=1, interpolation="none")
    _numbered(one.xaxis, range(layers), w + gap, w)
    _numbered(one.yaxis, range(heads), h + gap, h)
    one.set(xlabel="layer", ylabel="head", title=title)
    _plain(one)
    bar = _bar(figure, image, one, "attention", ticks=(0, 1))
    bar.ax.set_yticklabels(["least", "most"])
    return figure


def _plain(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.set_anchor("NW")  # figures side by side begin at one height
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, columnspacing=1.2, fontsize=8)


def _bar(figure: Figure, image: AxesImage, axes: Axes, label: str, ticks: Sequence[float] | None = None) -> Colorbar:
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, label=label, ticks=ticks, aspect=18)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return bar
