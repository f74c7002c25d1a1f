"""The page of one evaluation: report.html and its figures, made of a card, the labels and what the model said.

plainvit evaluate runs/photos --data photos/        evaluation.py does the work, this says what came out
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plainvit.analyse import figures
from plainvit.analyse.confusion import mistakes
from plainvit.analyse.gallery import Sample, predictions
from plainvit.analyse.page import (
    SPLIT,
    Html,
    Section,
    command_line,
    counted,
    element,
    fact,
    folded_table,
    inline_svg,
    join,
    not_scored,
    notice,
    pairs,
    percent,
    points,
    write_page,
)
from plainvit.evaluate.card import Card
from plainvit.evaluate.chance import FEW
from plainvit.evaluate.classify import MOST_CONFUSED, Result
from plainvit.evaluate.compare import published
from plainvit.evaluate.labels import Labels


def write_evaluation(card: Card, labels: Labels, result: Result, errors: Sequence[Sample], folder: Path) -> None:
    """report.html with its figures."""
    sections = [
        _mistakes(card, labels, result, folder),
        _classes(labels, result),
        _calibration(result, folder),
        predictions(errors, folder, "The surest errors", (int((~result.right).sum()), len(result.right))),
        _repeat(card),
        _settings(card),
    ]
    title = f"{slug(card.name)} on {slug(card.data['spec'])}"
    above = "Evaluation", card.data["split"], str(card.environment.get("started") or "")[:10]
    write_page(folder / "report.html", title, _head(card, result), sections, above)


def slug(text: str) -> str:
    """The end of a path, in characters that any file system takes."""
    parts = [part for part in re.split(r"[/\\]", text) if part not in ("", ".", "..")]
    return re.sub(r"[^A-Za-z0-9._]+", "-", parts[-1] if parts else "").strip("-.")[:60]


def _head(card: Card, result: Result) -> Html:
    data, images = card.data, card.images
    lead = f"{card.name} on {counted(images, SPLIT[data['split']] + ' image')} of {data['spec']}, "
    lead += f"{counted(data['classes'], 'class', 'classes')}. Right is {data['rule']}."
    low, high = (percent(end, images) for end in card.intervals["top1"])
    chief = fact(
        "top-1 accuracy",
        percent(card.metrics["top1"], images),
        f"95 % interval {low} to {high} · {card.counts['top1']:,} of {images:,} right",
        "" if result.guessing is None else f"guessing would get {percent(result.guessing)}",
        chief=True,
    )
    facts = [fact("top-5", percent(card.metrics["top5"], images))] if result.classes > FEW else []
    facts.append(fact("NLL", f"{card.metrics['nll']:.3f}", "negative log-likelihood"))
    if "f1" in card.metrics:
        facts.append(fact("F1", percent(card.metrics["f1"], images), "mean over the classes"))
    error = points(card.metrics["ece"])
    facts.append(fact("calibration error", error, result.sureness, "expected calibration error, 15 bins"))
    rows = [element("dl", chief, class_="facts"), element("dl", *facts, class_="facts")]
    return join([element("p", lead, class_="lead"), *rows, *_notices(card)])


def _notices(card: Card) -> list[Html]:
    found: list[Html] = []
    if card.unreadable:
        found.append(notice(not_scored(card.unreadable, "image"), warning=True))
    if card.data["left_out"]:
        found.append(notice(f"{counted(card.data['left_out'], 'image')} left out, as the rule says."))
    found += [notice(f"{percent(one['top1'], 10_000)} in {one['source']}.") for one in published(card)]
    return found


def _mistakes(card: Card, labels: Labels, result: Result, folder: Path) -> Section | None:
    """Where guesses are classes of the set, and not too many for a matrix."""
    if not labels.single or result.classes > MOST_CONFUSED:
        return None
    names = [figures.printable(name) for name in labels.guess_names]
    return mistakes(result.confusion.astype(float), names, SPLIT[card.data["split"]], folder)


def _classes(labels: Labels, result: Result) -> Section | None:
    """Precision, recall and F1 of each class, worst first."""
    if not labels.single:
        return None
    found = result.by_class()
    seen = np.flatnonzero(found["images"] > 0)
    order = seen[np.lexsort((seen, found["f1"][seen]))]
    shares = zip(*(map(percent, found[name][order]) for name in ("precision", "recall", "f1")), strict=True)
    rows = [
        (labels.guess_names[one], f"{found['images'][one]:,}", *three) for one, three in zip(order, shares, strict=True)
    ]
    titles = ["class", "images", "precision", "recall", "F1"]
    link = element("a", "classes.csv", href="classes.csv")
    words = element("p", "Worst first, by F1. All numbers are in ", link, ".")
    return Section("By class", join([words, folded_table(titles, rows, (1, 2, 3, 4))]))


def _calibration(result: Result, folder: Path) -> Section:
    bins = result.bins()
    figure = draw_calibration(bins)
    figures.save(figure, folder / "figures" / "calibration.png")
    titles = ["images", "mean probability", "share right"]
    figures.write_csv(folder / "figures" / "calibration.csv", [titles, *bins.tolist()])
    said, gap = result.sureness, points(result.calibration_error)
    words = f"{said[:1].upper()}{said[1:]}. Bar by bar, the two are {gap} apart, in the mean over the images (expected "
    words += "calibration error). A bar below the line: surer than right; a deeper one: more images."
    shown = element("div", inline_svg(figure, "Accuracy by probability"), style="max-width:520px")
    return Section("Is it as sure as it should be", join([element("p", words), shown]))


@figures.styled()
def draw_calibration(bins: np.ndarray) -> figures.Figure:
    """Accuracy of each bin of probability as a bar, against the line where both are equal; opacity is its share."""
    figure, one = figures.new_axes((4.6, 3.4))
    width, (images, _, accuracy) = 1 / len(bins), bins.T
    for place, (count, share) in enumerate(zip(images, accuracy, strict=True)):
        if count:
            opacity = 0.25 + 0.75 * float(np.sqrt(count / images.max()))
            one.bar((place + 0.5) * width, share, 0.92 * width, color=figures.COLOURS["blue"], alpha=opacity)
            one.plot((place + 0.5) * width, share, "_", color=figures.COLOURS["blue"], markersize=9)
    one.plot([0, 1], [0, 1], color=figures.COLOURS["orange"], linewidth=1)
    one.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the guess", ylabel="share that is right")
    return figure


def _repeat(card: Card) -> Section | None:
    command = str(card.environment.get("command") or "")
    if not command:
        return None
    commit = card.environment.get("commit")
    note = element("p", f"With commit {commit}.", class_="note") if commit else ""
    return Section("Repeat", join([element("p", "The same evaluation again:"), command_line(command), note]))


def _settings(card: Card) -> Section:
    data, seen = card.data, card.preprocess
    said = {
        "model": card.name,
        "weights (sha256 of the tensors)": card.model["weights"],
        "parameters": f"{card.model['parameters']:,}",
        "data": f"{data['spec']}, {data['split']}",
        "fingerprint of names and labels": data["fingerprint"],
        "preprocessing": ", ".join(f"{key} {value}" for key, value in seen["settings"].items()),
        "image size": " x ".join(map(str, seen["image_size"])),
        "precision": card.precision,
        **{key: str(card.environment.get(key) or "") for key in ("device", "plainvit", "torch", "started")},
    }
    return Section("What was evaluated, and how", pairs({key: value for key, value in said.items() if value}))
