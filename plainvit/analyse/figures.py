"""The figures of a run, and the one visual style of every figure in the project.

from plainvit.analyse.figures import new_figure, save, styled, svg

@styled()
def losses(steps, values) -> Figure:
    figure, [[axes]] = new_figure()
    axes.plot(steps, values, color=COLOURS["blue"])
    return figure

save(losses(steps, values), Path("figures/losses.png"))   # for papers and slides, on white
svg(losses(steps, values), "Loss by step")                # for a page: follows its font and its dark mode

Matplotlib's objects alone, without pyplot: no figure is kept anywhere, no display is needed. Its settings are
process-wide by nature; they are the project's inside `styled` and as they were after it.
"""

import contextlib
import io
import math
import re
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from plainvit.disk import write_atomically
from plainvit.evaluate.parts import write_rows

# Style ----------------------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, told apart by colour-blind eyes; a page gives each name a second value for dark mode
COLOURS = {
    "paper": "#ffffff",
    "ink": "#1d2329",
    "muted": "#66707a",
    "line": "#e3e6e9",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "purple": "#a3568a",
    "grey": "#a9b1b8",
}
RIGHT, WRONG = COLOURS["green"], COLOURS["orange"]
PANEL = (4.6, 2.7)  # inches
DPI = 150
LARGEST = 300_000  # bytes of a picture

_SETTINGS: dict[str, Any] = {
    "font.size": 8.5,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "text.color": COLOURS["ink"],
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.titlecolor": COLOURS["ink"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["grey"],
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.xmargin": 0.02,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["grey"],
    "xtick.labelcolor": COLOURS["muted"],
    "xtick.major.size": 3,
    "ytick.color": COLOURS["grey"],
    "ytick.labelcolor": COLOURS["muted"],
    "ytick.major.size": 0,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "lines.markersize": 3.5,
    "legend.facecolor": COLOURS["paper"],
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "legend.fontsize": 7.5,
    "legend.borderaxespad": 0.2,
    "legend.labelcolor": COLOURS["muted"],
    "legend.handlelength": 1.4,
    "figure.facecolor": "none",
    "svg.fonttype": "none",  # text stays text: small, and in the page's own font
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """The project's style, whatever the user's matplotlibrc says. As a decorator: of a function that draws."""
    with matplotlib.style.context(["default", _SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # names in any script are allowed; the font has not all
        yield


@styled()
def new_figure(rows: int = 1, columns: int = 1, panel: tuple[float, float] = PANEL) -> tuple[Figure, np.ndarray]:
    """A figure and its axes [rows, columns], each panel of the given width and height in inches."""
    spacing = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.06)
    figure = Figure((panel[0] * columns, panel[1] * rows), layout=spacing)
    return figure, figure.subplots(rows, columns, squeeze=False)


@styled()
def save(figure: Figure, path: Path, limit: int = LARGEST) -> None:
    """As PNG on white, whole or not at all. Photos in it take fewer colours, then fewer pixels, until it is small."""
    dpi, image = float(DPI), _raster(figure, DPI)
    data = _png(image)
    if len(data) > limit:
        data = _png(image.quantize())
    while len(data) > limit and dpi > 20:
        dpi *= 0.95 * math.sqrt(limit / len(data))  # bytes go with pixels, or nearly
        data = _png(_raster(figure, dpi).quantize())
    write_atomically(path, lambda target: target.write_bytes(data))


def _raster(figure: Figure, dpi: float) -> Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=COLOURS["paper"], pil_kwargs={"compress_level": 1})
    return Image.open(buffer).convert("RGB")


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@styled()
def svg(figure: Figure, label: str) -> str:
    """As an <svg> element for a page that defines the colours as CSS variables (--ink, --blue ...)."""
    matplotlib.rcParams["svg.hashsalt"] = label  # names inside are repeatable, and differ between figures of a page
    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], count=2, flags=re.S)
    opening = re.match(r"<svg[^>]*?viewBox=\"([\d. ]+)\"[^>]*>", text)
    assert opening, "matplotlib's svg has a viewBox"
    text = f'<svg viewBox="{opening[1]}" role="img" aria-label="{_attribute(label)}">' + text[opening.end() :]
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # an id must be unique in a page
    return re.sub(r'style="[^"]*"', _in_variables, text).strip()


def _in_variables(style: re.Match[str]) -> str:
    text = style[0]
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


_HARMLESS = "\u00a0\u202f\u200c\u200d"  # spaces, and joiners that are parts of words in Persian and Indic scripts


def printable(text: object, longest: int = 0) -> str:
    """Text from outside without what could break a line, a file or the order of reading; shortened where asked."""
    clean = str(text)
    if not clean.isprintable():
        clean = "".join(letter if letter.isprintable() or letter in _HARMLESS else "\ufffd" for letter in clean)
    return clean if not longest or len(clean) <= longest else clean[: longest - 1] + "…"


# Curves ---------------------------------------------------------------------------------------------------------------

TRAINING = ("epoch", "loss", "accuracy", "lr", "norm", "waiting", "skipped")
JUDGED = ("top1", "top5", "nll", "loss")  # the last where there are no labels
VALIDATION = tuple(f"{kind}_{name}" for kind in ("val", "val_ema") for name in JUDGED)
BUCKETS = 250

Table = dict[str, np.ndarray]  # column -> its values, NaN where there is none; one row per step, in order


def number(value: object) -> float:
    """A finite number as it is, anything else as NaN: metrics hold null, and perhaps worse."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # a whole number beyond all floats
        return math.nan


def tabulate(metrics: Iterable[Mapping[str, Any]]) -> Table:
    """The lines of metrics.jsonl as columns. Of a step that a resumed run made twice, the later line holds."""
    rows: dict[float, int] = {}
    columns = {name: array("d") for name in ("step", *TRAINING, *VALIDATION)}
    for line in metrics:
        step = number(line.get("step"))
        if math.isnan(step):
            continue
        row = rows.setdefault(step, len(rows))
        if row == len(columns["step"]):
            for column in columns.values():
                column.append(math.nan)
        for name, value in _measured(line).items():
            columns[name][row] = value
    table = {name: np.array(column) for name, column in columns.items()}
    order = np.argsort(table["step"])
    return {name: values[order] for name, values in table.items()}


def _measured(line: Mapping[str, Any]) -> dict[str, float]:
    found = {"step": number(line["step"])}
    if "loss" in line:  # a training step: what it lacks, a line before it does not supply
        found |= {name: number(line.get(name)) for name in TRAINING}
    for kind in ("val", "val_ema"):
        if isinstance(values := line.get(kind), Mapping):
            found |= {f"{kind}_{name}": number(values.get(name)) for name in JUDGED}
    return found


def thin(values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Indices to draw instead of all: the first, the last, and the lowest and highest of each of so many stretches."""
    where = np.flatnonzero(np.isfinite(values))
    if len(where) <= 2 * buckets:
        return where
    kept = {where[0], where[-1]}
    for part in np.array_split(where, buckets):
        kept |= {part[np.argmin(values[part])], part[np.argmax(values[part])]}
    return np.array(sorted(kept))


def thin_table(table: Table, buckets: int = BUCKETS) -> Table:
    """The rows that any training curve needs, all validations and some of the skipped steps; and the smoothed loss."""
    keep = [thin(table[name], buckets) for name in TRAINING if name != "skipped"]
    keep += [np.flatnonzero(np.isfinite(table[name])) for name in VALIDATION]
    skipped = np.flatnonzero(table["skipped"] > 0)
    keep.append(skipped[np.linspace(0, len(skipped) - 1, min(len(skipped), buckets)).astype(int)])
    rows = np.unique(np.concatenate(keep)).astype(int)
    smoothed = {f"{name}_smoothed": smooth(table[name], rows) for name in ("loss", "accuracy", "norm", "waiting")}
    return {name: values[rows] for name, values in table.items()} | smoothed


def smooth(values: np.ndarray, at: np.ndarray, windows: int = 25) -> np.ndarray:
    """Means around some of the values, over 4 % of the run; each summed afresh: a spike would spoil a running sum."""
    where = np.flatnonzero(np.isfinite(values))
    half = max(len(where) // windows // 2, 1)
    smoothed = np.full(len(at), math.nan)
    for index, row in enumerate(at):
        if np.isfinite(values[row]):
            centre = int(np.searchsorted(where, row))
            smoothed[index] = values[where[max(centre - half, 0) : centre + half + 1]].mean()
    return smoothed


def curves(metrics: Iterable[Mapping[str, Any]]) -> Figure:
    """Everything that was measured while training, as small multiples."""
    return draw_curves(thin_table(tabulate(metrics)))


@styled()
def draw_curves(table: Table) -> Figure:
    names = panels(table)
    columns = min(2, max(len(names), 1))
    figure, axes = new_figure(max(math.ceil(len(names) / columns), 1), columns)
    for one, name in zip(axes.flat, names, strict=False):
        _draw_panel(one, table, name)
    for one in axes.flat[len(names) :]:
        one.set_axis_off()
    if not names:
        axes[0, 0].text(0.5, 0.5, "no step was recorded", ha="center", color=COLOURS["muted"])
    return figure


@styled()
def draw_curve(table: Table, name: str) -> Figure:
    """One panel alone, for a page that lays them out itself: all with the same margins, so that they align."""
    figure = Figure(PANEL)
    left, width = 0.115, 0.88
    axes = figure.add_axes((left, 0.17, width, 0.71))
    _draw_panel(axes, table, name)
    axes.set_title(_PANELS[name][0], x=-left / width)
    return figure


# panel -> what it is called and its lines: (column, its label, colour)
_PANELS: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "loss": ("Training loss", [("loss", "each step", "grey"), ("loss_smoothed", "smoothed", "blue")]),
    "top1": (
        "Top-1 accuracy, %",
        [
            ("accuracy_smoothed", "training batches", "grey"),
            ("val_top1", "validation", "blue"),
            ("val_ema_top1", "validation, averaged weights", "orange"),
        ],
    ),
    "nll": (
        "Validation negative log-likelihood",
        [("val_nll", "validation", "blue"), ("val_ema_nll", "validation, averaged weights", "orange")],
    ),
    "val_loss": ("Validation loss", [("val_loss", "validation", "blue")]),
    "lr": ("Learning rate", [("lr", "", "blue")]),
    "norm": (
        "Norm of the gradient",
        [("norm", "each step", "grey"), ("norm_smoothed", "smoothed", "blue")],
    ),
    "waiting": ("Share of time waiting for data, %", [("waiting_smoothed", "", "blue")]),
}


def panels(table: Table) -> list[str]:
    """The panels that there is anything to draw in."""
    return [
        name for name, (_, lines) in _PANELS.items() if any(np.isfinite(table[column]).any() for column, _, _ in lines)
    ]


def _draw_panel(axes: Axes, table: Table, name: str) -> None:
    title, lines = _PANELS[name]
    scale = 100 if title.endswith("%") else 1
    drawn = [_draw_line(axes, table, line, scale) for line in lines]
    axes.set_title(title)
    axes.set_xlabel("step")
    first, last = table["step"][[0, -1]]
    margin = 0.02 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)  # the same for all panels, though validations begin later
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    if name in ("loss", "nll", "norm") and _spans_decades([values for values in drawn if len(values)]):
        _make_logarithmic(axes)
    elif name in ("lr", "waiting"):  # nought is the measure of both, and a few per cent of waiting are no mountain
        axes.set_ylim(0, max(axes.get_ylim()[1], 10 if name == "waiting" else 1e-12))
    if name == "loss":
        _mark_skipped(axes, table)
    if len(axes.get_legend_handles_labels()[0]) > 1 and name != "norm":  # whose lines are as those of the loss
        axes.legend(loc="lower right" if name == "top1" else "upper right")


def _draw_line(axes: Axes, table: Table, line: tuple[str, str, str], scale: float) -> np.ndarray:
    column, label, colour = line
    there = np.isfinite(table[column])
    steps, values = table["step"][there], np.clip(table[column][there] * scale, -1e99, 1e99)  # axes bear no more
    if len(values):
        marker = "o" if column.startswith("val_") or len(values) == 1 else ""
        width = 0.7 if column in ("loss", "norm") else 1.7
        axes.plot(steps, values, color=COLOURS[colour], label=label, linewidth=width, marker=marker)
    return values


def _spans_decades(lines: Sequence[np.ndarray]) -> bool:
    low, high = min(map(np.min, lines)), max(map(np.max, lines))
    return low > 0 and high / low > 12


def _make_logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0, 3.0) if decades < 3.5 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))


def _mark_skipped(axes: Axes, table: Table) -> None:
    steps = table["step"][table["skipped"] > 0]
    if len(steps):
        bottom = axes.get_xaxis_transform()  # x in steps, y as a share of the panel
        height = np.full(len(steps), 0.03)
        axes.plot(steps, height, "|", color=WRONG, markersize=7, transform=bottom, label="skipped, not finite")


def write_curves(table: Table, path: Path) -> None:
    """The rows that were drawn, in full precision."""
    columns = [name for name in table if name == "step" or np.isfinite(table[name]).any()]
    rows = zip(*(table[name].tolist() for name in columns), strict=True)
    cells = [[_cell(value) for value in row] for row in rows]
    write_csv(path, [columns, *cells])


def _cell(value: float) -> str:
    return "" if math.isnan(value) else str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    write_rows(text, rows)
    write_atomically(path, lambda target: target.write_bytes(text.getvalue().encode("utf-8", "backslashreplace")))


# Confusion ------------------------------------------------------------------------------------------------------------

NUMBERED = 20  # classes up to which a cell shows its number
NAMED = 60  # and up to which the axes show names


@styled()
def confusion(matrix: np.ndarray, classes: Sequence[str]) -> Figure:
    """Shares of each row (truth), right blue, wrong orange; depth grows with the root of the share: rare ones show."""
    count = len(matrix)
    assert matrix.shape == (count, count) == (len(classes), len(classes)), "one row, one column and one name per class"
    totals = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros(matrix.shape), where=totals > 0)  # [K, K]
    side = min(max(0.36 * count, 1.5), 7.2) if count <= NUMBERED else 7.2
    room = 0.075 * max((len(printable(name, 22)) for name in classes), default=0) if count <= NAMED else 0.2
    figure, axes = new_figure(panel=(side + room + 0.6, side + room + 0.6))
    one: Axes = axes[0, 0]
    if count <= NUMBERED:
        _draw_cells(one, shares)
    else:
        one.imshow(_tinted(shares), interpolation="none" if count <= 1000 else "antialiased", aspect="equal")
    _name_axes(one, classes)
    return figure


def _tinted(shares: np.ndarray) -> np.ndarray:
    """[K, K, 4]: the colour says whether it is right, its opacity how often: so it suits a dark page as well."""
    colours = np.empty((*shares.shape, 4))
    colours[..., :3] = to_rgb(COLOURS["orange"])
    colours[range(len(shares)), range(len(shares)), :3] = to_rgb(COLOURS["blue"])
    colours[..., 3] = np.where(shares > 0, 0.2 + 0.8 * np.sqrt(shares), 0)
    return colours


def _draw_cells(axes: Axes, shares: np.ndarray) -> None:
    corners = 0.47 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    squares = np.argwhere(shares >= 0)[:, None, ::-1] + corners  # [K * K, 4, 2]
    colours = _tinted(shares).reshape(-1, 4)
    colours[shares.ravel() <= 0] = (*to_rgb(COLOURS["line"]), 0.45)
    axes.add_collection(PolyCollection(list(squares), facecolors=colours))
    for row, column in np.argwhere(shares > 0).tolist():
        share = 100 * shares[row, column]
        deep = COLOURS["paper" if share > 45 else "ink"]
        axes.text(column, row, f"{share:.0f}" if share >= 0.5 else "<1", color=deep, ha="center", va="center_baseline")
    axes.set_aspect("equal")


def _name_axes(axes: Axes, classes: Sequence[str]) -> None:
    count = len(classes)
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(count - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set(xlabel="guess", ylabel="truth")
    if count > NAMED:
        axes.set(xlabel="guess (number of the class, from 0)", ylabel="truth (number of the class)")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
    else:
        names = [printable(name, 22) for name in classes]
        size = 8.5 if count <= NUMBERED else 6.5
        upright = max(map(len, names)) <= 3
        axes.set_xticks(range(count), names, rotation=0 if upright else 90, fontsize=size, parse_math=False)
        axes.set_yticks(range(count), names, fontsize=size, parse_math=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(count > NUMBERED)


def write_confusion(matrix: np.ndarray, classes: Sequence[str], path: Path) -> None:
    rows = [[name, *map(_cell, row)] for name, row in zip(classes, matrix.astype(float).tolist(), strict=True)]
    write_csv(path, [["truth \\ guess", *classes], *rows])


# Gallery --------------------------------------------------------------------------------------------------------------


class Guess(Protocol):
    """A prediction to show: an image with the class it shows and the class that was guessed."""

    @property
    def image(self) -> np.ndarray: ...  # uint8 [h, w, 3]
    @property
    def truth(self) -> str: ...
    @property
    def guess(self) -> str: ...
    @property
    def probability(self) -> float: ...
    @property
    def name(self) -> str: ...


G = TypeVar("G", bound=Guess)


def wrong_first(samples: Sequence[G]) -> list[G]:
    """Mistakes before the rest, the surest of them first: they teach most."""
    right = [one for one in samples if one.guess == one.truth]
    wrong = [one for one in samples if one.guess != one.truth]
    return sorted(wrong, key=lambda one: np.nan_to_num(-number(one.probability), nan=1.0)) + right


@styled()
def gallery(samples: Sequence[Guess], most: int = 24) -> Figure:
    """Predictions as a picture, mistakes first."""
    shown = wrong_first(samples)[:most]
    columns = min(max(len(shown), 1), 6)
    rows = max(math.ceil(len(shown) / columns), 1)
    figure, axes = new_figure(panel=(1.45 * columns, 1.75 * rows))
    one: Axes = axes[0, 0]
    for index, sample in enumerate(shown):
        _draw_guess(one, sample, index % columns, index // columns * 1.21)
    one.set(xlim=(-0.02, columns - 0.06), ylim=(1.21 * rows, -0.05), aspect="equal")
    one.set_axis_off()
    return figure


def _draw_guess(axes: Axes, sample: Guess, left: float, top: float, side: float = 0.92) -> None:
    height, width = sample.image.shape[:2]
    tall, wide = side * height / max(height, width), side * width / max(height, width)
    x, y = left + (side - wide) / 2, top + (side - tall) / 2
    smoothing = "nearest" if max(height, width) <= 64 else "antialiased"
    axes.imshow(sample.image, extent=(x, x + wide, y + tall, y), interpolation=smoothing, aspect="auto")
    colour = RIGHT if sample.guess == sample.truth else WRONG
    axes.add_patch(Rectangle((left, top), side, side, fill=False, edgecolor=colour, linewidth=1.5))
    words = f"{printable(sample.guess, 14)} {_percent(sample.probability)}".strip()
    below = {"ha": "left", "va": "top", "fontsize": 6.5, "parse_math": False}
    axes.text(left, top + side + 0.03, words, color=colour, **below)
    if sample.guess != sample.truth:
        axes.text(left, top + side + 0.135, f"truth: {printable(sample.truth, 15)}", color=COLOURS["muted"], **below)


def _percent(share: float) -> str:
    return "" if math.isnan(number(share)) else f"{100 * share:.0f} %"


def write_gallery(samples: Sequence[Guess], path: Path) -> None:
    rows = [[one.name, one.truth, one.guess, _cell(number(one.probability))] for one in wrong_first(samples)]
    write_csv(path, [["name", "truth", "guess", "probability"], *rows])
