"""Self-contained HTML pages: offline, responsive, with dark mode and no external resources.

from plainvit.analyse.html import make_section, render_page, table
sizes = table(["class", "images"], [("zero", 178)], numbers=[1])
render_page("Digits", "Images by class.", [make_section("Classes", "The training images.", sizes)])

Every string that is not `Html` is escaped, so class and file names cannot inject markup.
"""

import base64
import hashlib
import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from plainvit.analyse import figures
from plainvit.analyse.figures import printable
from plainvit.config import pluralize

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
CRISP = 64  # pixels along a side; smaller images are shown without smoothing
THUMB = 200  # pixels of the longer side; 48 of them stay below 400 KB
SPACE = "\u202f"  # narrow no-break space
NONE = "\u2013"  # a missing value
SCALE = 6.1  # rem for an inch of a figure: two panels fit side by side
WIDE = 5.0  # inches above which a figure scrolls on a phone instead of shrinking
UNFOLDED = 20  # classes shown before the rest is folded
SPLIT = {"test": "test", "val": "validation", "train": "training"}  # reports show the first that exists
DARK = {
    "paper": "#14171a",
    "ink": "#e4e8eb",
    "muted": "#98a3ad",
    "line": "#2b3238",
    "blue": "#5ab0ea",
    "orange": "#f58b4c",
    "green": "#3cc79a",
    "purple": "#d690c0",
    "gray": "#66717b",
}


class Html(str):
    """Markup; any other string is escaped."""


class Section(NamedTuple):
    """Part of a page with a heading."""

    title: str
    body: Html


def make_section(title: str, *parts: str) -> Section:
    """A section of texts, tables and figures: plain text becomes a paragraph, empty parts are omitted."""
    return Section(title, join(part if isinstance(part, Html) else element("p", part) for part in parts if part))


def escape(text: object) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(printable(text), quote=True))


def join(parts: Iterable[object]) -> Html:
    return Html("".join(map(escape, parts)))


def element(name: str, *children: object, **attributes: str | None) -> Html:
    """element("p", "a < b", class_="note") is <p class="note">a &lt; b</p>; attributes of None are omitted."""
    present = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = "".join((f"<{name}", *(f' {key}="{escape(value)}"' for key, value in present.items()), ">"))
    return Html(opening if name == "img" else f"{opening}{join(children)}</{name}>")


def render_page(
    title: str, lead: str, sections: Iterable[Section | None], *, subtitle: Iterable[str] = (), script: str = ""
) -> str:
    """A page with a title, a lead (plain text or Html) and sections; those that are None are omitted.

    subtitle: parts of the small line above the title. The content security policy allows no script but the given one.
    """
    shown, small = [section for section in sections if section], " · ".join(filter(None, subtitle))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_read("page.html")).substitute(
        policy=POLICY + (f"; script-src 'sha256-{digest}'" if script else ""),
        title=escape(title),
        style=_make_stylesheet(),
        eyebrow=element("p", small, class_="eyebrow") if small else "",
        lead=lead if isinstance(lead, Html) else element("p", lead, class_="lead"),
        contents=_make_contents(shown) if len(shown) > 2 else "",
        sections=join(element("section", element("h2", title), body, id=_anchor(title)) for title, body in shown),
        footer="Made by plainvit. This page loads no external resources" + ("." if script else " and runs no scripts."),
        script=f"<script>{script}</script>" if script else "",
    )


def _make_contents(sections: Sequence[Section]) -> Html:
    links = [element("li", element("a", title, href=f"#{_anchor(title)}")) for title, _ in sections]
    return element("nav", element("ul", *links), aria_label="Contents")


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _make_stylesheet() -> str:
    light, dark = (
        "".join(f"--{name}:{color};" for name, color in colors.items())
        for colors in (figures.COLORS | {"soft": "#f3f5f6"}, DARK | {"soft": "#1e2327"})
    )
    colors = f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return colors + _read("page.css")


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()) -> Html:
    """A table; the columns in `numbers` are right-aligned."""
    aligned = dict.fromkeys(numbers, "number")
    head = element("tr", *(element("th", title, class_=aligned.get(column)) for column, title in enumerate(titles)))
    cells = ([element("td", value, class_=aligned.get(column)) for column, value in enumerate(row)] for row in rows)
    body = [element("tr", *row) for row in cells]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="scroll")


def folded_table(titles: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int]) -> Html:
    """A row for each class; all but the first ones are folded."""
    parts = [table(titles, rows[:UNFOLDED], numbers)]
    if rows[UNFOLDED:]:
        summary = element("summary", f"The other {pluralize(len(rows) - UNFOLDED, 'class', 'classes')}")
        parts.append(element("details", summary, table(titles, rows[UNFOLDED:], numbers)))
    return join(parts)


def pairs(values: Mapping[str, object]) -> Html:
    """A table of names and values."""
    rows = [element("tr", element("td", key, class_="key"), element("td", value)) for key, value in values.items()]
    return element("table", element("tbody", *rows), class_="pairs")


def bar(fraction: float) -> Html:
    length = 100 * min(max(np.nan_to_num(fraction), 0), 1)
    return element("span", element("i", style=f"width:{length:.1f}%"), class_="bar")


def notice(*parts: object, warning: bool = False) -> Html:
    return element("p", *parts, class_="notice warning" if warning else "notice")


def fact(name: str, value: str, *notes: object, is_headline: bool = False) -> Html:
    """A large number with its name above and notes below."""
    below = [element("dd", line, class_="under") for line in notes if line]
    digits, space, unit = value.partition(SPACE)
    large = element("dd", digits, space, element("small", unit) if unit else "")
    return element("div", element("dt", name), large, *below, class_="fact headline" if is_headline else "fact")


def code_block(line: str) -> Html:
    return element("pre", element("code", line))


def inline_figure(figure: Figure, label: str) -> Html:
    """A figure at the scale of all figures; a wide one scrolls on a phone instead of shrinking."""
    inches = figure.get_figwidth()
    kind, width = "plot wide" if inches > WIDE else "plot", f"--width:{inches * SCALE:.1f}rem"
    svg = Html(figures.to_svg(figure, label))  # matplotlib escapes its text
    return element("figure", svg, class_=kind, style=width)


def publish_figure(
    folder: Path, name: str, figure: Figure, rows: Iterable[Sequence[object]] = (), *, data: str = ""
) -> Html:
    """Saves figures/NAME.png and .csv, and returns links to them; `data` is another file that holds the numbers."""
    figures.save(figure, folder / "figures" / f"{name}.png")
    if not data:
        data = f"figures/{name}.csv"
        figures.write_csv(folder / data, rows)
    links = [element("a", path, href=path) for path in (data, f"figures/{name}.png")]
    return element("p", "Data: ", links[0], ". Figure: ", links[1], ".", class_="note")


def embed_image(image: np.ndarray, alt: str, side: int = THUMB) -> Html:
    """An embedded image: PNG if small, otherwise a JPEG thumbnail."""
    thumbnail = Image.fromarray(image)
    tiny = max(thumbnail.size) < CRISP
    if not tiny:
        thumbnail.thumbnail((side, side))
    source = data_url(thumbnail, "png" if tiny else "jpeg", optimize=tiny)
    return element("img", src=source, alt=alt, class_="small" if tiny else None)


def data_url(image: Image.Image, kind: Literal["png", "jpeg"], *, quality: int = 82, optimize: bool = False) -> str:
    """An image as a data: URL."""
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=quality, optimize=optimize)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


# Formatting -----------------------------------------------------------------------------------------------------------


def percent(fraction: float, images: float = 0) -> str:
    """A fraction as a percentage; two decimals from 10,000 images on."""
    if math.isnan(fraction):
        return NONE
    return f"{100 * fraction:.{2 if images >= 10_000 else 1}f}{SPACE}%"


def points(gap: float) -> str:
    """A difference of fractions in percentage points."""
    return f"{100 * gap:.1f}{SPACE}points"


def describe_unreadable(count: float, image: str) -> str:
    return f"{pluralize(count, image)} could not be read and {'is' if count == 1 else 'are'} not included."
