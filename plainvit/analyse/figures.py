"""The visual style of all figures, and how figures and their data are saved.

from plainvit.analyse.figures import new_axes, save, styled, to_svg

@styled()
def losses(steps, values) -> Figure:
    figure, axes = new_axes()
    axes.plot(steps, values, color=COLORS["blue"])
    return figure

save(losses(steps, values), Path("figures/losses.png"))   # on white, for papers and slides
to_svg(losses(steps, values), "Loss by step")             # for HTML: uses its font and dark mode

Uses Matplotlib without pyplot: no global figures, no display. Matplotlib's settings are global; `styled` restores them.
"""

import contextlib
import functools
import html
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from plainvit.disk import write_atomically
from plainvit.evaluate.outputs import write_rows

# Okabe and Ito's color-blind-safe palette; an HTML page gives each name a second value for dark mode
COLORS = {
    "paper": "#ffffff",
    "ink": "#1d2329",
    "muted": "#66707a",
    "line": "#e3e6e9",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "purple": "#a3568a",
    "gray": "#a9b1b8",
}
PANEL = (4.6, 2.7)  # inches
DPI = 150

_OTHER_SCRIPTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Hiragino Sans", "PingFang SC")
_OTHER_SCRIPTS += ("Apple SD Gothic Neo", "Microsoft YaHei", "Malgun Gothic", "Yu Gothic", "Noto Sans Devanagari")
_SETTINGS: dict[str, Any] = {
    "font.size": 8.5,
    "text.color": COLORS["ink"],
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.labelcolor": COLORS["muted"],
    "axes.edgecolor": COLORS["gray"],
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.xmargin": 0.02,
    "grid.color": COLORS["line"],
    "grid.linewidth": 0.8,
    "xtick.color": COLORS["gray"],
    "xtick.labelcolor": COLORS["muted"],
    "xtick.major.size": 3,
    "ytick.color": COLORS["gray"],
    "ytick.labelcolor": COLORS["muted"],
    "ytick.major.size": 0,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "lines.markersize": 3.5,
    "legend.facecolor": COLORS["paper"],
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "legend.fontsize": 7.5,
    "legend.borderaxespad": 0.2,
    "legend.labelcolor": COLORS["muted"],
    "legend.handlelength": 1.4,
    "figure.facecolor": "none",
    "svg.fonttype": "none",  # text stays text: small, and in the page's own font
}


@functools.cache
def _font_families() -> list[str]:
    """DejaVu Sans, which ships with matplotlib, then installed fonts for the scripts that it lacks."""
    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in _OTHER_SCRIPTS if name in installed)]


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """The project's style, whatever the user's matplotlibrc says. Also a decorator for functions that draw."""
    settings = _SETTINGS | {"font.family": _font_families()}
    with matplotlib.style.context(["default", settings]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # class names may use scripts that the font lacks
        yield


@styled()
def new_figure(rows: int = 1, columns: int = 1, panel: tuple[float, float] = PANEL) -> tuple[Figure, np.ndarray]:
    """A figure and its axes [rows, columns], each panel of the given width and height in inches."""
    spacing = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.06)
    figure = Figure((panel[0] * columns, panel[1] * rows), layout=spacing)
    return figure, figure.subplots(rows, columns, squeeze=False)


def new_axes(panel: tuple[float, float] = PANEL) -> tuple[Figure, Axes]:
    """A figure of one panel."""
    figure, axes = new_figure(panel=panel)
    return figure, axes[0, 0]


@styled()
def save(figure: Figure, path: Path) -> None:
    """Writes a PNG atomically."""
    options = {"format": "png", "dpi": DPI, "facecolor": COLORS["paper"]}
    write_atomically(path, lambda target: figure.savefig(target, **options))


@styled()
def to_svg(figure: Figure, label: str) -> str:
    """An <svg> element for a page that defines the colors as CSS variables (--ink, --blue ...)."""
    matplotlib.rcParams["svg.hashsalt"] = label  # deterministic ids that differ between figures
    buffer = io.StringIO()
    no_metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], count=2, flags=re.S)
    opening = re.match(r"<svg[^>]*?viewBox=\"([\d. ]+)\"[^>]*>", text)
    assert opening, "matplotlib's svg has a viewBox"
    text = f'<svg viewBox="{opening[1]}" role="img" aria-label="{html.escape(label)}">' + text[opening.end() :]
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # ids must be unique in a page
    variables = {color: f"var(--{name})" for name, color in COLORS.items()}
    return re.sub(r"(?<=: )#[0-9a-f]{6}(?=[;\"])", lambda match: variables.get(match[0], match[0]), text).strip()


# Text and numbers -----------------------------------------------------------------------------------------------------

_ALLOWED = "\u00a0\u202f\u200c\u200d"  # spaces, and joiners that Persian and Indic words need


def printable(text: object, longest: int = 0) -> str:
    """Untrusted text without control characters, truncated to `longest` if given."""
    clean = str(text)
    if not clean.isprintable():
        clean = "".join(letter if letter.isprintable() or letter in _ALLOWED else "\ufffd" for letter in clean)
    return clean if not longest or len(clean) <= longest else clean[: longest - 1] + "…"


def number(value: object) -> float:
    """A finite number, or NaN for anything else, such as null."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer too large for a float
        return math.nan


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    write_rows(text, rows)
    write_atomically(path, lambda target: target.write_bytes(text.getvalue().encode("utf-8", "backslashreplace")))
