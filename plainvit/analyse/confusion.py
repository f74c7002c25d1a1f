"""What is taken for what: the confusion matrix as a figure, as CSV, in words, and the accuracy of each class.

mistakes(matrix, ["cat", "dog"], "test", Path("runs/pets"))      a section of a page; the figure is in figures/

A matrix [K, K] counts images: rows are the truth, columns the guess.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from plainvit.analyse.figures import COLOURS, cell, new_axes, printable, save, styled, write_csv
from plainvit.analyse.page import (
    Html,
    Section,
    bar,
    counted,
    element,
    figure_links,
    folded_table,
    inline_svg,
    join,
    percent,
    table,
)

NUMBERED = 20  # classes up to which a cell shows its number
NAMED = 60  # and up to which the axes show names


@styled()
def draw_confusion(matrix: np.ndarray, classes: Sequence[str]) -> Figure:
    """Shares of each row (truth), right blue, wrong orange; depth grows with the root of the share: rare ones show."""
    count = len(matrix)
    assert matrix.shape == (count, count) == (len(classes), len(classes)), "one row, one column and one name per class"
    totals = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros(matrix.shape), where=totals > 0)  # [K, K]
    side = min(max(0.36 * count, 1.5), 7.2) if count <= NUMBERED else 7.2
    room = 0.075 * max((len(printable(name, 22)) for name in classes), default=0) if count <= NAMED else 0.2
    figure, one = new_axes((side + room + 0.6, side + room + 0.6))
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
    rows = [[name, *map(cell, row)] for name, row in zip(classes, matrix.astype(float).tolist(), strict=True)]
    write_csv(path, [["truth \\ guess", *classes], *rows])


# Sections -------------------------------------------------------------------------------------------------------------


def mistakes(matrix: np.ndarray, classes: Sequence[str], split: str, folder: Path) -> Section:
    """With the figure and its numbers in the folder's figures/."""
    figure = draw_confusion(matrix, classes)
    save(figure, folder / "figures" / "confusion.png")
    write_confusion(matrix, classes, folder / "figures" / "confusion.csv")
    wide = f"min-width:{min(figure.get_figwidth() * 72, 620):.0f}px;max-width:{figure.get_figwidth() * 110:.0f}px"
    note = "Each row is a class, each column a guess: blue where they agree, orange where not, deeper where more often."
    numbers = " Numbers are per cent of the row." if len(matrix) <= NUMBERED else ""
    shown = element("div", element("div", inline_svg(figure, "Confusion matrix"), style=wide), class_="picture")
    drawn = join([shown, element("p", note + numbers, class_="note")])
    beside = "beside" if len(matrix) <= 12 else None  # a larger matrix needs the width
    body = element("div", element("div", _confusions(matrix, classes, split)), element("div", drawn), class_=beside)
    return Section("What is taken for what", join([body, figure_links("confusion")]))


def frequent_confusions(matrix: np.ndarray, most: int = 10) -> list[tuple[int, int]]:
    """(truth, guess) of the mistakes made most often; of equals, the one that is a larger share of its class first."""
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    wrong = np.argwhere((matrix > 0) & ~np.eye(len(matrix), dtype=bool))
    found = [(truth, guess) for truth, guess in wrong.tolist()]
    return sorted(found, key=lambda at: (-matrix[at], -shares[at], at))[:most]


def _confusions(matrix: np.ndarray, classes: Sequence[str], split: str) -> Html:
    found = frequent_confusions(matrix)
    if not found:
        return element("p", f"No {split} image was taken for another class.")
    totals, mistakes = matrix.sum(1), matrix.sum() - np.trace(matrix)
    first = f"{counted(mistakes, 'mistake')} among {counted(matrix.sum(), f'{split} image')}."
    rows = [
        (
            join([element("b", classes[truth]), " taken for ", element("b", classes[guess])]),
            f"{matrix[truth, guess]:,.0f} of {totals[truth]:,.0f}",
            percent(matrix[truth, guess] / totals[truth]),
        )
        for truth, guess in found
    ]
    return join([element("p", first), table(["most often", "images", "of the class"], rows, numbers=(1, 2))])


def by_class(matrix: np.ndarray, classes: Sequence[str], split: str) -> Section:
    totals = matrix.sum(1)
    seen = np.flatnonzero(totals > 0)
    shares = np.diag(matrix)[seen] / totals[seen]
    order = seen[np.lexsort((seen, -totals[seen], shares))]  # worst first; of equals, the one with more images
    rows = [_class_row(matrix, classes, int(one)) for one in order]
    mean = f"Averaged over classes, {percent(shares.mean())} of the {split} images are recognised."
    unseen = len(matrix) - len(seen)
    note = f" {counted(unseen, 'class', 'classes')} had no image." if unseen else ""
    titles = ["class", element("th", class_="measure"), "accuracy", "right / images", "most often taken for"]
    return Section("Accuracy by class", join([element("p", mean + note), folded_table(titles, rows, (2, 3))]))


def _class_row(matrix: np.ndarray, classes: Sequence[str], one: int) -> tuple[object, ...]:
    row, total = matrix[one], matrix[one].sum()
    others = row.copy()
    others[one] = 0
    guess = int(others.argmax())
    taken = f"{classes[guess]} ({others[guess]:,.0f})" if others[guess] else ""
    share = row[one] / total
    measure = element("td", bar(share), class_="measure")
    return classes[one], measure, percent(share), f"{row[one]:,.0f} / {total:,.0f}", taken
