"""The figures of an analysis, in the project's style: each takes numbers and gives a figure.

save(draw_filters(filters(model)), Path("figures/filters.png"))
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from PIL import Image

from plainvit.analyse.embeddings import Filters, as_pictures
from plainvit.analyse.figures import COLOURS, PANEL, new_figure, printable, styled

LINES = ("blue", "orange", "green", "purple", "grey")
MOST_TILES = 14  # positions along a side of the similarity figure
HEAT = "magma"


@styled()
def draw_filters(found: Filters) -> Figure:
    """Tiles in the order of what they explain, seven to a row as in Figure 7."""
    pictures = as_pictures(found.tiles)
    columns = min(7, len(pictures))
    figure, axes = new_figure(math.ceil(len(pictures) / columns), columns, (0.95, 1.12))
    for one, picture, share in zip(axes.flat, pictures, found.variance, strict=False):
        one.imshow(picture, interpolation="nearest")
        one.set_title(
            f"{100 * share:.1f} %", fontsize=7, fontweight="normal", color=COLOURS["muted"], pad=3, loc="center"
        )
    for one in axes.flat:
        one.set_axis_off()
    return figure


@styled()
def draw_similarity(similar: np.ndarray) -> Figure:
    """A tile for each position: the cosine of its vector with all others' (Figure 7, centre)."""
    h, w = similar.shape[:2]
    rows, columns = (np.unique(np.linspace(0, side - 1, min(side, MOST_TILES)).round().astype(int)) for side in (h, w))
    gap = max(1, h // 12)
    canvas = np.full((len(rows) * (h + gap) - gap, len(columns) * (w + gap) - gap), np.nan)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            canvas[i * (h + gap) : i * (h + gap) + h, j * (w + gap) : j * (w + gap) + w] = similar[row, column]
    figure, axes = new_figure(panel=(5.2, 4.6))
    one: Axes = axes[0, 0]
    image = one.imshow(canvas, vmin=-1, vmax=1, cmap="viridis", interpolation="nearest")
    one.set_xticks([j * (w + gap) + (w - 1) / 2 for j in range(len(columns))], columns + 1)
    one.set_yticks([i * (h + gap) + (h - 1) / 2 for i in range(len(rows))], rows + 1)
    one.set(xlabel="column of the patch", ylabel="row of the patch")
    _plain(one)
    _bar(figure, image, one, "cosine similarity")
    return figure


@styled()
def draw_heads(values: np.ndarray, label: str, highest: float | None = None) -> Figure:
    """A dot for each head over its layer, and the layers' means (Figure 7, right)."""
    layers, heads = values.shape
    figure, axes = new_figure(panel=PANEL)
    one: Axes = axes[0, 0]
    at = np.arange(1, layers + 1)
    one.scatter(
        np.repeat(at, heads), values.ravel(), s=14, color=COLOURS["blue"], alpha=0.55, linewidths=0, label="a head"
    )
    one.plot(at, values.mean(1), color=COLOURS["orange"], label="mean of the layer")
    one.set(xlabel="layer", ylabel=label, ylim=(0, highest))
    one.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    one.legend(loc="best", ncols=2)
    return figure


@styled()
def draw_matrix(values: np.ndarray, rows: str, columns: str, label: str, *, diverging: bool = False) -> Figure:
    """A square for each pair, numbered from 1, with a bar that says what its colour means."""
    count = max(values.shape)
    side = min(max(0.24 * count, 2.2), 4.6)
    figure, axes = new_figure(panel=(side * values.shape[1] / count + 1.6, side * values.shape[0] / count + 0.8))
    one: Axes = axes[0, 0]
    if diverging:
        reach = max(float(np.nanmax(abs(values))), 1e-9)
        image = one.imshow(values, cmap="RdBu", vmin=-reach, vmax=reach, interpolation="nearest", aspect="equal")
    else:
        image = one.imshow(values, cmap="viridis", vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    for axis, size in ((one.xaxis, values.shape[1]), (one.yaxis, values.shape[0])):
        places = np.unique(np.linspace(0, size - 1, min(size, 12)).round().astype(int))
        axis.set_ticks(list(places), [str(place + 1) for place in places])
    one.set(xlabel=columns, ylabel=rows)
    _plain(one)
    _bar(figure, image, one, label)
    return figure


@styled()
def draw_lines(
    x: Sequence[float], lines: Mapping[str, Sequence[float]], across: str, up: str, *, share: bool = True
) -> Figure:
    """Curves over one axis; shares are drawn in per cent."""
    figure, axes = new_figure(panel=PANEL)
    one: Axes = axes[0, 0]
    for colour, (name, values) in zip(LINES * 4, lines.items(), strict=False):
        dashed = "--" if name == "random order" else "-"
        one.plot(x, np.asarray(values) * (100 if share else 1), dashed, color=COLOURS[colour], marker="o", label=name)
    one.set(xlabel=across, ylabel=up)
    if share:
        one.set_ylim(0, None)
    one.legend(loc="best")
    return figure


@styled()
def draw_histogram(values: np.ndarray, label: str, mark: float, words: str) -> Figure:
    figure, axes = new_figure(panel=PANEL)
    one: Axes = axes[0, 0]
    one.hist(values.ravel(), bins=60, color=COLOURS["blue"], log=True)
    one.axvline(mark, color=COLOURS["orange"], linewidth=1.2, label=words)
    one.set(xlabel=label, ylabel="patches (log scale)")
    one.legend(loc="best")
    return figure


# Maps -----------------------------------------------------------------------------------------------------------------


def heat(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A map [h, w] over an image [H, W, 3]: bright where it is high, dark where it is low (Figure 6)."""
    height, width = image.shape[:2]
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
    grown = Image.fromarray((255 * scaled).round().astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    weight = np.asarray(grown, np.float32)[..., None] / 255
    return (image * (0.15 + 0.85 * weight)).round().astype(np.uint8)


@styled()
def draw_maps(images: np.ndarray, maps: Mapping[str, np.ndarray], names: Sequence[str]) -> Figure:
    """A row for each image: the image, then each map laid over it."""
    columns = ["image", *maps]
    figure, axes = new_figure(len(images), len(columns), (1.5, 1.6))
    for row, (image, name) in enumerate(zip(images, names, strict=True)):
        shown = [image, *(heat(image, values[row]) for values in maps.values())]
        for one, picture, title in zip(axes[row], shown, columns, strict=True):
            one.imshow(picture, interpolation="nearest" if len(image) <= 64 else "antialiased")
            one.set_axis_off()
            if row == 0:
                one.set_title(title, fontsize=7.5, loc="center", pad=4)
        under = {"transform": axes[row, 0].transAxes, "fontsize": 6, "va": "top", "parse_math": False}
        axes[row, 0].text(0, -0.03, printable(name, 26), color=COLOURS["muted"], **under)
    return figure


@styled()
def draw_looks(values: np.ndarray) -> Figure:
    """[layers, heads, h, w] as one sheet: each map by its own scale, layers downwards, heads across."""
    layers, heads, h, w = values.shape
    gap = 1
    canvas = np.full((layers * (h + gap) - gap, heads * (w + gap) - gap), np.nan)
    for layer in range(layers):
        for head in range(heads):
            one = values[layer, head]
            spread = one.max() - one.min()
            scaled = (one - one.min()) / spread if spread else np.zeros_like(one)
            canvas[layer * (h + gap) : layer * (h + gap) + h, head * (w + gap) : head * (w + gap) + w] = scaled
    side = 0.42
    figure, axes = new_figure(panel=(max(side * heads, 2.4) + 1.2, max(side * layers, 1.2) + 0.6))
    one = axes[0, 0]
    image = one.imshow(canvas, cmap=HEAT, vmin=0, vmax=1, interpolation="nearest")
    one.set_xticks([head * (w + gap) + (w - 1) / 2 for head in range(heads)], range(1, heads + 1))
    one.set_yticks([layer * (h + gap) + (h - 1) / 2 for layer in range(layers)], range(1, layers + 1))
    one.set(xlabel="head", ylabel="layer")
    _plain(one)
    _bar(figure, image, one, "attention, least to most of each map")
    return figure


def _plain(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=7)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _bar(figure: Figure, image: AxesImage, axes: Axes, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, label=label)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(labelsize=7)
