"""A page that is complete in itself: opens offline, suits a phone and dark mode, loads nothing.

from plainvit.analyse.page import Section, element, page, table
page("Digits", "What came out.", [Section("Numbers", table(["class", "images"], [("zero", 178)], numbers=[1]))])

Every text that is not `Html` is escaped when it enters the page, so names of classes and files can do no harm.
"""

import base64
import hashlib
import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from plainvit.analyse import figures
from plainvit.analyse.figures import Figure, printable
from plainvit.disk import write_text

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
CRISP = 64  # pixels along a side: in smaller images each is drawn as a square
THUMB = 200  # pixels of the longer side: sharp on a phone, and 48 of them stay below 400 KB
SPACE = "\u202f"  # narrow, and no line breaks at it
NONE = "\u2013"  # stands for a value that is not there
WORST = 20  # classes shown before the rest is folded
SPLIT = {"test": "test", "val": "validation", "train": "training"}  # in words; the first there is, is judged by
DARK = {
    "paper": "#14171a",
    "ink": "#e4e8eb",
    "muted": "#98a3ad",
    "line": "#2b3238",
    "blue": "#5ab0ea",
    "orange": "#f58b4c",
    "green": "#3cc79a",
    "purple": "#d690c0",
    "grey": "#66717b",
}


class Html(str):
    """Markup that is ready for the page; any other string is escaped when it enters it."""


class Section(NamedTuple):
    title: str
    body: Html


def escape(text: object) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(printable(text), quote=True))


def join(parts: Iterable[object]) -> Html:
    return Html("".join(map(escape, parts)))


def element(name: str, *children: object, **attributes: str | None) -> Html:
    """element("p", "a < b", class_="note") is <p class="note">a &lt; b</p>; an attribute of None is left out."""
    there = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = "".join((f"<{name}", *(f' {key}="{escape(value)}"' for key, value in there.items()), ">"))
    return Html(opening if name in ("img", "input", "meta") else f"{opening}{join(children)}</{name}>")


def page(title: str, lead: str, sections: Sequence[Section], eyebrow: str = "", script: str = "") -> str:
    """A whole page: what it is about, the result (plain text, or Html with more than words), and the details.

    It runs no script but the one given, which its policy names by its hash.
    """
    may = f"; script-src {_digest(script)}" if script else ""
    made = "This page is complete in itself: it loads nothing" + ("." if script else " and runs no script.")
    above = element("p", eyebrow, class_="eyebrow") if eyebrow else ""
    body = element(
        "main",
        element("header", above, element("h1", title), _lead(lead)),
        _contents(sections) if len(sections) > 2 else "",
        *(element("section", element("h2", one.title), one.body, id=_anchor(one.title)) for one in sections),
        element("footer", f"Made by plainvit. {made}"),
        Html(f"<script>{script}</script>") if script else "",
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}{may}">'),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        Html('<meta name="color-scheme" content="light dark">'),
        element("title", title),
        element("style", Html(_stylesheet())),
    )
    return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{body}\n</body>\n</html>\n'


def write_page(
    path: Path, title: str, lead: str, sections: Iterable[Section | None], above: Iterable[str], script: str = ""
) -> Path:
    """A page of the sections there are as a file, whole or not at all; `above` are the words of the eyebrow."""
    text = page(title, lead, [one for one in sections if one], " · ".join(filter(None, above)), script)
    write_text(path, text)
    return path


def _digest(script: str) -> str:
    """As a Content-Security-Policy names a script that may run."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def _lead(lead: str) -> Html:
    return lead if isinstance(lead, Html) else element("p", lead, class_="lead")


def _contents(sections: Sequence[Section]) -> Html:
    links = [element("li", element("a", one.title, href=f"#{_anchor(one.title)}")) for one in sections]
    return element("nav", element("ul", *links), aria_label="Contents")


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _stylesheet() -> str:
    light = _variables(figures.COLOURS | {"soft": "#f3f5f6"})
    dark = _variables(DARK | {"soft": "#1e2327"})
    colours = f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return colours + Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def _variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()) -> Html:
    """Rows under titles; the columns named in numbers are set to the right, so that digits align."""
    aligned = dict.fromkeys(numbers, "number")
    head = element("tr", *(_cell("th", title, aligned.get(at)) for at, title in enumerate(titles)))
    body = [element("tr", *(_cell("td", value, aligned.get(at)) for at, value in enumerate(row))) for row in rows]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="scroll")


def folded_table(titles: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int]) -> Html:
    """A row for each class, the first of them in sight."""
    shown = table(titles, rows[:WORST], numbers)
    if not rows[WORST:]:
        return shown
    rest = element("summary", f"The other {counted(len(rows) - WORST, 'class', 'classes')}")
    return join([shown, element("details", rest, table(titles, rows[WORST:], numbers))])


def _cell(name: str, value: object, kind: str | None) -> Html:
    """Html that is a cell already stays as it is."""
    return value if isinstance(value, Html) and value.startswith(f"<{name}") else element(name, value, class_=kind)


def pairs(values: Mapping[str, object], changed: Iterable[str] = ()) -> Html:
    """Names and values; those that changed stand out."""
    marked = dict.fromkeys(changed, "changed")
    rows = [
        element("tr", element("td", key, class_="key"), element("td", value), class_=marked.get(key))
        for key, value in values.items()
    ]
    return element("table", element("tbody", *rows), class_="pairs")


def bar(share: float) -> Html:
    length = 100 * min(max(np.nan_to_num(share), 0), 1)
    return element("span", element("i", style=f"width:{length:.1f}%"), class_="bar")


def notice(*words: object, warning: bool = False) -> Html:
    return element("p", *words, class_="notice warning" if warning else "notice")


def fact(name: str, value: str, *under: object, chief: bool = False) -> Html:
    """A number in large figures, what it is above it, more words below."""
    below = [element("dd", line, class_="under") for line in under if line]
    digits, space, unit = value.partition(SPACE)
    large = element("dd", digits, space, element("small", unit) if unit else "")
    return element("div", element("dt", name), large, *below, class_="fact chief" if chief else "fact")


def command_line(line: str) -> Html:
    return element("pre", element("code", line))


def inline_svg(figure: Figure, label: str) -> Html:
    return Html(figures.svg(figure, label))  # its own text is escaped by matplotlib


def figure_links(name: str) -> Html:
    """Where the numbers of a figure are."""
    links = [element("a", f"figures/{name}.{kind}", href=f"figures/{name}.{kind}") for kind in ("csv", "png")]
    return element("p", "The numbers are in ", links[0], ", the picture in ", links[1], ".", class_="note")


def picture(image: np.ndarray, alt: str, side: int = THUMB) -> Html:
    """Pixels as a small image inside the page: tiny ones as they are, photos as JPEG."""
    shown = Image.fromarray(image)
    tiny = max(shown.size) < CRISP
    if not tiny:
        shown.thumbnail((side, side))
    source = address(shown, "png" if tiny else "jpeg", optimize=tiny)
    return element("img", src=source, alt=alt, class_="small" if tiny else None)


def address(image: Image.Image, kind: Literal["png", "jpeg"], *, quality: int = 82, optimize: bool = False) -> str:
    """An image as an address that needs no file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=quality, optimize=optimize)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


# Words and numbers ----------------------------------------------------------------------------------------------------


def percent(share: float, images: float = 0) -> str:
    """With as many digits as so many images can tell apart."""
    if math.isnan(share):
        return NONE
    return f"{100 * share:.{2 if images >= 10_000 else 1}f}{SPACE}%"


def points(gap: float) -> str:
    """The difference of two shares: it is no share itself."""
    return f"{100 * gap:.1f}{SPACE}points"


def duration(seconds: float) -> str:
    if math.isnan(seconds):
        return NONE
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min" if seconds >= 600 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
    hours, minutes = divmod(minutes, 60)
    days, rest = divmod(round(seconds / 3600), 24)
    return f"{hours} h {minutes} min" if hours < 48 else f"{days} days {rest} h"


def counted(count: float, one: str, many: str = "") -> str:
    return f"{count:,.0f} {one if count == 1 else many or one + 's'}"


def not_scored(count: float, image: str) -> str:
    return f"{counted(count, image)} could not be read and {'is' if count == 1 else 'are'} not scored."
