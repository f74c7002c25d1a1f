"""The report of one evaluation: report.html and figures/, from its card, labels and predictions."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plainvit.analyse import figures
from plainvit.analyse.confusion import class_section, confusion_section
from plainvit.analyse.gallery import Sample, predictions_section
from plainvit.analyse.page import (
    SPLIT,
    Html,
    Section,
    code_block,
    describe_unreadable,
    element,
    fact,
    figure_links,
    inline_svg,
    join,
    notice,
    pairs,
    percent,
    pluralize,
    points,
    write_page,
)
from plainvit.evaluate.card import Card
from plainvit.evaluate.classify import MOST_CONFUSED, Result
from plainvit.evaluate.compare import published
from plainvit.evaluate.labels import Labels
from plainvit.evaluate.statistics import FEW


def write_evaluation(card: Card, labels: Labels, result: Result, errors: Sequence[Sample], folder: Path) -> None:
    """report.html with its figures."""
    sections = [
        _confusion_section(card, labels, result, folder),
        class_section(result.by_class(), labels.class_names, "classes.csv") if labels.single else None,
        _calibration_section(result, folder),
        predictions_section(errors, folder, "Most confident errors", (int((~result.right).sum()), len(result.right))),
        _command_section(card),
        _settings_section(card),
    ]
    title = f"{slug(card.name)} on {slug(card.data['spec'])}"
    above = "Evaluation", card.data["split"], str(card.environment.get("started") or "")[:10]
    write_page(folder / "report.html", title, _summary(card, result), sections, above)


def slug(text: str) -> str:
    """The last part of a path, in characters that every file system accepts."""
    parts = [part for part in re.split(r"[/\\]", text) if part not in ("", ".", "..")]
    return re.sub(r"[^A-Za-z0-9._]+", "-", parts[-1] if parts else "").strip("-.")[:60]


def _summary(card: Card, result: Result) -> Html:
    data, images = card.data, card.images
    lead = f"{card.name} on {pluralize(images, SPLIT[data['split']] + ' image')} of {data['spec']}, "
    lead += f"{pluralize(data['classes'], 'class', 'classes')}. A prediction is correct if it is {data['rule']}."
    low, high = (percent(end, images) for end in card.intervals["top1"])
    chance = "" if result.majority_accuracy is None else f"chance level {percent(result.majority_accuracy)}"
    score = f"95 % interval {low} to {high} · {card.counts['top1']:,} of {images:,} correct"
    chief = fact("top-1 accuracy", percent(card.metrics["top1"], images), score, chance, chief=True)
    facts = [fact("top-5", percent(card.metrics["top5"], images))] if result.classes > FEW else []
    facts.append(fact("NLL", f"{card.metrics['nll']:.3f}", "negative log-likelihood"))
    if "f1" in card.metrics:
        facts.append(fact("F1", percent(card.metrics["f1"], images), "mean over the classes"))
    calibration = points(card.metrics["ece"]), result.confidence_sentence, "expected calibration error, 15 bins"
    facts.append(fact("calibration error", *calibration))
    rows = [element("dl", chief, class_="facts"), element("dl", *facts, class_="facts")]
    return join([element("p", lead, class_="lead"), *rows, *_notices(card)])


def _notices(card: Card) -> list[Html]:
    found: list[Html] = []
    if card.unreadable:
        found.append(notice(describe_unreadable(card.unreadable, "image"), warning=True))
    if card.data["left_out"]:
        found.append(notice(f"{pluralize(card.data['left_out'], 'image')} excluded by the rule."))
    found += [notice(f"{percent(one['top1'], 10_000)} in {one['source']}.") for one in published(card)]
    return found


def _confusion_section(card: Card, labels: Labels, result: Result, folder: Path) -> Section | None:
    """None if predictions are not classes of the dataset, or if there are too many for a matrix."""
    if not labels.single or result.classes > MOST_CONFUSED:
        return None
    names = [figures.printable(name) for name in labels.class_names]
    return confusion_section(result.confusion.astype(float), names, SPLIT[card.data["split"]], folder)


def _calibration_section(result: Result, folder: Path) -> Section:
    bins = result.bins()
    figure = draw_calibration(bins)
    figures.save(figure, folder / "figures" / "calibration.png")
    titles = ["images", "mean probability", "accuracy"]
    figures.write_csv(folder / "figures" / "calibration.csv", [titles, *bins.tolist()])
    summary, error = result.confidence_sentence, points(result.calibration_error)
    words = f"{summary[:1].upper()}{summary[1:]}. Expected calibration error: {error} (15 bins). Bars below the line: "
    words += "overconfident. Darker bars: more images."
    shown = element("div", inline_svg(figure, "Reliability diagram"), style="max-width:520px")
    return Section("Calibration", join([element("p", words), shown, figure_links("calibration")]))


@figures.styled()
def draw_calibration(bins: np.ndarray) -> figures.Figure:
    """Reliability diagram: accuracy by predicted probability; opacity shows the number of images."""
    figure, axes = figures.new_axes((4.6, 3.4))
    width, (images, _, accuracy) = 1 / len(bins), bins.T
    for at, (count, share) in enumerate(zip(images, accuracy, strict=True)):
        if count:
            opacity = 0.25 + 0.75 * float(np.sqrt(count / images.max()))
            axes.bar((at + 0.5) * width, share, 0.92 * width, color=figures.COLOURS["blue"], alpha=opacity)
            axes.plot((at + 0.5) * width, share, "_", color=figures.COLOURS["blue"], markersize=9)
    axes.plot([0, 1], [0, 1], color=figures.COLOURS["orange"], linewidth=1, label="perfect calibration")
    axes.legend(loc="upper left")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted probability", ylabel="accuracy")
    return figure


def _command_section(card: Card) -> Section | None:
    command = str(card.environment.get("command") or "")
    if not command:
        return None
    commit = card.environment.get("commit")
    note = element("p", f"Commit {commit}.", class_="note") if commit else ""
    return Section("Reproduce", join([element("p", "Run the same evaluation:"), code_block(command), note]))


def _settings_section(card: Card) -> Section:
    data, preprocess = card.data, card.preprocess
    settings = {
        "model": card.name,
        "weights (sha256 of the tensors)": card.model["weights"],
        "parameters": f"{card.model['parameters']:,}",
        "data": f"{data['spec']}, {data['split']}",
        "fingerprint of file names and labels": data["fingerprint"],
        "preprocessing": ", ".join(f"{key} {value}" for key, value in preprocess["settings"].items()),
        "image size": " x ".join(map(str, preprocess["image_size"])),
        "precision": card.precision,
        **{key: str(card.environment.get(key) or "") for key in ("device", "plainvit", "torch", "started")},
    }
    return Section("Settings", pairs({key: value for key, value in settings.items() if value}))
