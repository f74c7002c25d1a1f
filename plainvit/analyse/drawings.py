"""Figures of an analysis: each function takes numbers and returns a figure.

The title says what is drawn and its unit; colors that stand for numbers have a color bar.
"""

import math

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from plainvit.analyse.embeddings import Filters, filters_to_rgb
from plainvit.analyse.figures import COLORS, PANEL, new_axes, styled
from plainvit.analyse.gallery import choose_evenly

MAX_TILES = 14  # positions along a side of the similarity figure


@styled()
def draw_filters(filters: Filters) -> Figure:
    """Tiles sorted by explained variance, seven to a row as in Figure 7."""
    images = filters_to_rgb(filters.tiles)
    columns = min(7, len(images))
    rows = math.ceil(len(images) / columns)
    figure, axes = new_axes((0.7 * columns, 0.83 * rows + 0.3))
    for number, (image, variance) in enumerate(zip(images, filters.variance, strict=True)):
        x, y = number % columns, 1.25 * (number // columns)
        axes.imshow(image, extent=(x, x + 0.9, y + 0.9, y), interpolation="nearest", aspect="equal")
        axes.text(
            x + 0.45, y + 1, f"{100 * variance:.1f} %", fontsize=6, color=COLORS["muted"], ha="center", va="center"
        )
    axes.set(xlim=(-0.02, columns), ylim=(1.25 * rows, -0.02))
    axes.set_title("Principal components of the first layer, explained variance")
    axes.set_anchor("NW")
    axes.set_axis_off()
    return figure


@styled()
def draw_similarity(similar: np.ndarray, title: str) -> Figure:
    """A tile for each position: the cosine similarity of its embedding with all others (Figure 7, center)."""
    h, w = similar.shape[:2]
    rows, columns = choose_evenly(h, MAX_TILES), choose_evenly(w, MAX_TILES)
    gap = max(1, h // 12)
    tiles = similar[rows][:, columns]
    figure, axes = new_axes((PANEL[0], 0.5 + 3.2 * min(max(len(rows) * h / (len(columns) * w), 0.2), 2)))
    image = axes.imshow(_tile_grid(tiles, gap), vmin=-1, vmax=1, cmap="viridis", interpolation="none")
    _number_tiles(axes.xaxis, columns, w + gap, w)
    _number_tiles(axes.yaxis, rows, h + gap, h)
    axes.set(xlabel="patch column", ylabel="patch row", title=title)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_anchor("NW")
    ticks = (-1, -0.5, 0, 0.5, 1)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, label="cosine similarity", ticks=ticks, aspect=18)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def _tile_grid(tiles: np.ndarray, gap: int) -> np.ndarray:
    """[rows, columns, h, w] -> one canvas with empty gaps between the tiles."""
    rows, _, h, _ = tiles.shape
    padded = np.pad(tiles, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    return padded.transpose(0, 2, 1, 3).reshape(rows * (h + gap), -1)[:-gap, :-gap]


def _number_tiles(axis: Axis, numbers: np.ndarray, step: int, width: int) -> None:
    """Labels that count from 1, centered on the tiles."""
    axis.set_ticks(np.arange(len(numbers)) * step + (width - 1) / 2, [str(number + 1) for number in numbers])


@styled()
def draw_heads(values: np.ndarray, title: str, uniform: float) -> Figure:
    """A dot for each head by layer, the mean of each layer, and the value of uniform attention (Figure 7, right)."""
    figure, axes = new_axes(PANEL)
    axes.axhline(uniform, color=COLORS["gray"], linewidth=1, linestyle=(0, (4, 3)), label="uniform attention")
    plot_heads(axes, values[None], title)
    axes.set(ylim=(0, 1.06 * max(uniform, float(np.nanmax(values)), 1e-6)))
    figure.legend(loc="outside lower left", ncols=3, columnspacing=1.2, fontsize=8)  # covers no data
    return figure


def plot_heads(axes: Axes, values: np.ndarray, title: str) -> None:
    """A dot for each head by layer, and the mean of each layer; values [runs, layers, heads]."""
    layers = np.arange(1, values.shape[1] + 1)
    x = np.broadcast_to(layers[:, None], values.shape)
    axes.scatter(x, values, s=14, color=COLORS["blue"], alpha=0.55, linewidths=0, label="head")
    marker = "" if len(layers) > 1 else "o"
    axes.plot(layers, values.mean((0, 2)), color=COLORS["orange"], marker=marker, label="mean of layer")
    axes.set(xlabel="layer", xlim=(0.5, len(layers) + 0.5), title=title)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))


def overlay_heat(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The map [h, w], scaled to [0, 1], as colors over the image [H, W, 3] in gray."""
    (height, width), low, high = image.shape[:2], float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
    large = Image.fromarray((255 * scaled).round().astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    colors = 255 * colormaps["plasma"](np.asarray(large))[..., :3]
    return (0.25 * image.mean(2, keepdims=True) + 0.75 * colors).round().astype(np.uint8)
