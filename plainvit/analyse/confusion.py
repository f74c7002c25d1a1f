"""Confusion matrix and metrics by class: figure, CSV and report sections.

A matrix [K, K] counts images: rows are true classes, columns are predicted classes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from plainvit.analyse import html
from plainvit.analyse.figures import COLORS, new_axes, printable, styled
from plainvit.analyse.html import Html, Section

NUMBERED = 20  # classes up to which a cell shows its number
NAMED = 60  # classes up to which the axes show names


@styled()
def draw_confusion(matrix: np.ndarray, classes: Sequence[str]) -> Figure:
    """Fractions of each row; correct in blue, errors in orange, opacity by the square root so that rare ones show."""
    count = len(matrix)
    assert matrix.shape == (count, count) == (len(classes), len(classes)), "one row, one column and one name per class"
    totals = matrix.sum(1, keepdims=True)
    fractions = np.divide(matrix, totals, out=np.zeros(matrix.shape), where=totals > 0)  # [K, K]
    side = min(max(0.36 * count, 1.5), 7.2) if count <= NUMBERED else 7.2
    label_width = 0.075 * max((len(printable(name, 22)) for name in classes), default=0) if count <= NAMED else 0.2
    figure, axes = new_axes((side + label_width + 0.6, side + label_width + 0.6))
    if count <= NUMBERED:
        _draw_cells(axes, fractions)
    else:
        axes.imshow(_cell_colors(fractions), interpolation="none" if count <= 1000 else "antialiased")
    _label_axes(axes, classes)
    return figure


def _cell_colors(fractions: np.ndarray) -> np.ndarray:
    """[K, K, 4]: hue for correct or wrong, opacity for frequency, so that it also works in dark mode."""
    colors = np.empty((*fractions.shape, 4))
    colors[..., :3] = to_rgb(COLORS["orange"])
    colors[range(len(fractions)), range(len(fractions)), :3] = to_rgb(COLORS["blue"])
    colors[..., 3] = np.where(fractions > 0, 0.2 + 0.8 * np.sqrt(fractions), 0)
    return colors


def _draw_cells(axes: Axes, fractions: np.ndarray) -> None:
    """Numbered squares, as polygons: a page shows them in its own colors."""
    corners = 0.47 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    squares = np.argwhere(fractions >= 0)[:, None, ::-1] + corners  # [K * K, 4, 2]
    colors = _cell_colors(fractions).reshape(-1, 4)
    colors[fractions.ravel() <= 0] = (*to_rgb(COLORS["line"]), 0.45)
    axes.add_collection(PolyCollection(list(squares), facecolors=colors))
    for row, column in np.argwhere(fractions > 0).tolist():
        percentage = 100 * fractions[row, column]
        label = f"{percentage:.0f}" if percentage >= 0.5 else "<1"
        color = COLORS["paper" if percentage > 45 else "ink"]
        axes.text(column, row, label, color=color, ha="center", va="center_baseline")


def _label_axes(axes: Axes, classes: Sequence[str]) -> None:
    count = len(classes)
    axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), aspect="equal")
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.grid(visible=False)
    if count > NAMED:
        axes.set(xlabel="predicted class (index from 0)", ylabel="true class (index)")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
    else:
        names = [printable(name, 22) for name in classes]
        size = 8.5 if count <= NUMBERED else 6.5
        upright = max(map(len, names)) <= 3
        axes.set_xticks(range(count), names, rotation=0 if upright else 90, fontsize=size, parse_math=False)
        axes.set_yticks(range(count), names, fontsize=size, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(count > NUMBERED)


# Sections -------------------------------------------------------------------------------------------------------------


def confusion_section(matrix: np.ndarray, classes: Sequence[str], images: str, folder: Path) -> Section:
    """Also writes figures/confusion.png and .csv."""
    figure = draw_confusion(matrix, classes)
    rows = [[name, *row] for name, row in zip(classes, matrix.astype(int).tolist(), strict=True)]
    links = html.publish_figure(folder, "confusion", figure, [["truth \\ prediction", *classes], *rows])
    note = "Rows are true classes, columns predicted classes: correct in blue, errors in orange, darker when frequent."
    note += " Numbers are percentages of the row." if len(matrix) <= NUMBERED else ""
    confusions = html.element("div", _confusion_table(matrix, classes, images))
    drawn = html.element("div", html.inline_figure(figure, "Confusion matrix"), html.element("p", note, class_="note"))
    layout = "side-by-side" if len(matrix) <= 12 else None  # a larger matrix needs the full width
    return html.make_section("Confusion matrix", html.element("div", confusions, drawn, class_=layout), links)


def find_frequent_confusions(matrix: np.ndarray, most: int = 10) -> list[tuple[int, int]]:
    """(true class, predicted class) of the most frequent errors; ties by their fraction of the true class."""
    fractions = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    wrong = np.argwhere((matrix > 0) & ~np.eye(len(matrix), dtype=bool))
    cells = [(truth, predicted) for truth, predicted in wrong.tolist()]
    return sorted(cells, key=lambda cell: (-matrix[cell], -fractions[cell], cell))[:most]


def _confusion_table(matrix: np.ndarray, classes: Sequence[str], images: str) -> Html:
    rows = []
    for truth, predicted in find_frequent_confusions(matrix):
        count, total = matrix[truth, predicted], matrix[truth].sum()
        rows.append((classes[truth], classes[predicted], f"{count:,.0f} of {total:,.0f}", html.percent(count / total)))
    if not rows:
        return html.element("p", f"No errors on the {images}.")
    errors = matrix.sum() - np.trace(matrix)
    summary = f"{html.pluralize(errors, 'error')} in {html.pluralize(matrix.sum(), images.removesuffix('s'))}."
    titles = ["true class", "predicted as", "images", "of the class"]
    return html.join([html.element("p", summary), html.table(titles, rows, numbers=(2, 3))])


def class_section(numbers: Mapping[str, np.ndarray], classes: Sequence[str], data: str = "") -> Section:
    """A row for each class that has images, the lowest recall first. data: a file to link to."""
    images, recall = numbers["images"], numbers["recall"]
    seen = np.flatnonzero(images > 0)
    order = seen[np.lexsort((seen, -images[seen], recall[seen]))]  # ties: more images first
    rows = []
    for label in order.tolist():
        ratios = (html.percent(float(numbers[name][label])) for name in ("recall", "precision", "f1"))
        rows.append((html.join((classes[label], html.bar(float(recall[label])))), *ratios, f"{images[label]:,.0f}"))
    text = f"Lowest recall (accuracy within the class) first. Mean recall: {html.percent(recall[seen].mean())}."
    unseen = len(images) - len(seen)
    text += f" {html.pluralize(unseen, 'class', 'classes')} without images." if unseen else ""
    link = html.element("p", "Data: ", html.element("a", data, href=data), ".", class_="note") if data else ""
    titles = ["class", "recall", "precision", "F1", "images"]
    return html.make_section("Metrics by class", text, html.folded_table(titles, rows, (1, 2, 3, 4)), link)
