"""Figures of an analysis: each function takes numbers and returns a figure.

The title says what is drawn and its unit; colours that stand for numbers have a colour bar. All panels have the same
size, so that text has the same size in figures side by side.
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

from plainvit.analyse.embeddings import Filters, filters_to_rgb
from plainvit.analyse.figures import COLOURS, new_axes, printable, styled

LINES = ("blue", "orange", "green", "purple", "grey")
MOST_TILES = 14  # positions along a side of the similarity figure
PANEL = (4.2, 2.6)  # inches
RANDOM = "random order"


@styled()
def draw_filters(found: Filters) -> Figure:
    """Tiles sorted by explained variance, seven to a row as in Figure 7."""
    images = filters_to_rgb(found.tiles)
    columns = min(7, len(images))
    rows = math.ceil(len(images) / columns)
    figure, axes = new_axes((0.7 * columns, 0.83 * rows + 0.3))
    for at, (image, share) in enumerate(zip(images, found.variance, strict=True)):
        x, y = at % columns, 1.25 * (at // columns)
        axes.imshow(image, extent=(x, x + 0.9, y + 0.9, y), interpolation="nearest", aspect="equal")
        axes.text(x + 0.45, y + 1, f"{100 * share:.1f} %", fontsize=6, color=COLOURS["muted"], ha="center", va="center")
    axes.set(xlim=(-0.02, columns), ylim=(1.25 * rows, -0.02))
    axes.set_title("Principal components of the first layer, explained variance")
    axes.set_axis_off()
    return figure


@styled()
def draw_similarity(similar: np.ndarray, title: str) -> Figure:
    """A tile for each position: the cosine similarity of its embedding with all others (Figure 7, centre)."""
    h, w = similar.shape[:2]
    rows, columns = (np.unique(np.linspace(0, side - 1, min(side, MOST_TILES)).round().astype(int)) for side in (h, w))
    gap = max(1, h // 12)
    shown = similar[rows][:, columns]
    figure, axes = new_axes((PANEL[0], 0.5 + 3.2 * min(max(len(rows) * h / (len(columns) * w), 0.2), 2)))
    image = axes.imshow(_tile_grid(shown, gap), vmin=-1, vmax=1, cmap="viridis", interpolation="none")
    _number_ticks(axes.xaxis, columns, w + gap, w)
    _number_ticks(axes.yaxis, rows, h + gap, h)
    axes.set(xlabel="patch column", ylabel="patch row", title=title)
    _remove_frame(axes)
    _add_colorbar(figure, image, axes, "cosine similarity", ticks=(-1, -0.5, 0, 0.5, 1))
    return figure


def _tile_grid(tiles: np.ndarray, gap: int) -> np.ndarray:
    """[rows, columns, h, w] -> one canvas with empty gaps between the tiles."""
    rows, columns, h, w = tiles.shape
    canvas = np.full((rows * (h + gap) - gap, columns * (w + gap) - gap), np.nan)
    for i in range(rows):
        for j in range(columns):
            canvas[i * (h + gap) : i * (h + gap) + h, j * (w + gap) : j * (w + gap) + w] = tiles[i, j]
    return canvas


def _number_ticks(axis: Axis, numbers: Sequence[int] | np.ndarray, step: int, width: int) -> None:
    """At most 14 labels, counted from 1, centred on their tiles."""
    chosen = range(0, len(numbers), math.ceil(len(numbers) / 14))
    axis.set_ticks([at * step + (width - 1) / 2 for at in chosen], [str(numbers[at] + 1) for at in chosen])


@styled()
def draw_heads(values: np.ndarray, title: str, uniform: float) -> Figure:
    """A dot for each head by layer, the mean of each layer, and the value of uniform attention (Figure 7, right)."""
    layers, heads = values.shape
    figure, axes = new_axes(PANEL)
    at = np.arange(1, layers + 1)
    axes.axhline(uniform, color=COLOURS["grey"], linewidth=1, linestyle=(0, (4, 3)), label="uniform attention")
    dots = {"s": 14, "color": COLOURS["blue"], "alpha": 0.55, "linewidths": 0}
    axes.scatter(np.repeat(at, heads), values.ravel(), label="head", **dots)
    axes.plot(at, values.mean(1), color=COLOURS["orange"], marker="" if layers > 1 else "o", label="mean of layer")
    axes.set(xlim=(0.5, layers + 0.5), ylim=(0, 1.06 * max(uniform, float(np.nanmax(values)), 1e-6)))
    _label_layers(axes, title)
    _add_legend(figure, axes)
    return figure


@styled()
def draw_matrix(values: np.ndarray, title: str, rows: str, columns: str, label: str) -> Figure:
    """A coloured square for each pair, from 0 to 1, numbered from 1."""
    down, across = values.shape
    side = min(3.1 / across, 4.2 / down, 0.6)  # inches of a square
    figure, axes = new_axes((PANEL[0], side * down + 0.85))
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, interpolation="none", aspect="equal")
    _number_ticks(axes.xaxis, range(across), 1, 1)
    _number_ticks(axes.yaxis, range(down), 1, 1)
    axes.set(xlabel=printable(columns, 48), ylabel=printable(rows, 48), title=title)
    _remove_frame(axes)
    _add_colorbar(figure, image, axes, label)
    return figure


@styled()
def draw_lines(x: Sequence[float], lines: Mapping[str, Sequence[float]], title: str, xlabel: str) -> Figure:
    """Fractions as percentages over x, whose axis is logarithmic if all x are positive."""
    figure, axes = new_axes(PANEL)
    for colour, (name, values) in zip(LINES * 4, lines.items(), strict=False):
        style, colour = ("--", "grey") if name == RANDOM else ("-", colour)
        label = printable(name, 36)
        axes.plot(x, 100 * np.asarray(values), style, marker="o", color=COLOURS[colour], label=label)
    axes.set(xlabel=xlabel, title=title, ylim=(0, max(axes.get_ylim()[1], 1e-6)))
    if min(x) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(x, [f"{value:g}" for value in x])
    if len(lines) > 1:
        _add_legend(figure, axes)
    return figure


@styled()
def draw_removed_layers(full: float, layers: Sequence[float]) -> Figure:
    """Bars: accuracy without each layer; line: accuracy of the full model."""
    figure, axes = new_axes(PANEL)
    at = np.arange(1, len(layers) + 1)
    axes.bar(at, 100 * np.asarray(layers), color=COLOURS["blue"], width=0.7, label="without the layer")
    axes.axhline(100 * full, color=COLOURS["orange"], linewidth=1.4, label="full model")
    axes.set(xlim=(0.4, len(layers) + 0.6), ylim=(0, max(105 * full, 105 * max(layers), 1)))
    _label_layers(axes, "Accuracy without each layer, %")
    _add_legend(figure, axes)
    return figure


def _label_layers(axes: Axes, title: str) -> None:
    axes.set(xlabel="layer", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))


@styled()
def draw_norms(ratios: np.ndarray, threshold: float) -> Figure:
    """Histogram of token norms in medians, with the threshold of outliers."""
    figure, axes = new_axes(PANEL)
    limit = max(float(ratios.max()), 1.1 * threshold)
    axes.hist(ratios.ravel(), bins=60, range=(0, limit), color=COLOURS["blue"], log=True)
    label = f"outliers: above {threshold:g} medians"
    axes.axvline(threshold, color=COLOURS["orange"], linewidth=1.4, label=label)
    axes.set(xlim=(0, limit), ylim=(0.7, None), xlabel="norm / median norm")
    axes.set_title("Patches by the norm of their last token")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _add_legend(figure, axes)
    return figure


# Maps -----------------------------------------------------------------------------------------------------------------


def overlay_heat(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The map [h, w], scaled to [0, 1], as colours over the image [H, W, 3] in grey."""
    (height, width), low, high = image.shape[:2], float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
    large = Image.fromarray((255 * scaled).round().astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    colours = 255 * colormaps["plasma"](np.asarray(large))[..., :3]
    return (0.25 * image.mean(2, keepdims=True) + 0.75 * colours).round().astype(np.uint8)


@styled()
def draw_maps(images: np.ndarray, maps: Mapping[str, np.ndarray], names: Sequence[str]) -> Figure:
    """A row for each image: the image, then each map over it."""
    columns, ratio = ["image", *maps], images.shape[1] / images.shape[2]
    tall = 0.94 * ratio + 0.16
    figure, axes = new_axes((1.5 * len(columns), 1.5 * tall * len(images) + 0.3))
    smoothing = "nearest" if max(images.shape[1:3]) <= 64 else "antialiased"
    for row, (image, name) in enumerate(zip(images, names, strict=True)):
        y = row * tall
        for x, shown in enumerate([image, *(overlay_heat(image, values[row]) for values in maps.values())]):
            axes.imshow(shown, extent=(x, x + 0.94, y + 0.94 * ratio, y), interpolation=smoothing, aspect="equal")
        below = {"fontsize": 6, "va": "top", "color": COLOURS["muted"], "parse_math": False}
        axes.text(0, y + 0.94 * ratio + 0.02, printable(name, 60), **below)
    for x, name in enumerate(columns):
        axes.text(x + 0.47, -0.04, name, fontsize=7.5, ha="center", va="bottom")
    axes.set(xlim=(-0.02, len(columns)), ylim=(tall * len(images), -0.14))
    axes.set_axis_off()
    return figure


def _remove_frame(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.set_anchor("NW")  # aligns the tops of figures side by side
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, so that it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, columnspacing=1.2, fontsize=8)


def _add_colorbar(
    figure: Figure, image: AxesImage, axes: Axes, label: str, ticks: Sequence[float] | None = None
) -> Colorbar:
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, label=label, ticks=ticks, aspect=18)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return bar
