"""The report of one evaluation: report.html and figures/, from its card, labels and predictions."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.analyse import figures, html
from plainvit.analyse.confusion import class_section, confusion_section
from plainvit.analyse.gallery import Sample, predictions_section
from plainvit.analyse.headline import make_facts, make_headline
from plainvit.analyse.html import Html, Section
from plainvit.disk import write_text
from plainvit.evaluate.card import Card
from plainvit.evaluate.compare import find_published
from plainvit.evaluate.labels import Labels
from plainvit.evaluate.metrics import MAX_CONFUSION_CLASSES, Result
from plainvit.evaluate.statistics import FEW_CLASSES


def write_evaluation(card: Card, labels: Labels, result: Result, errors: Sequence[Sample], folder: Path) -> None:
    """Writes report.html and its figures to the folder."""
    sections: list[Section | None] = []
    if labels.single:  # predictions are classes of the dataset
        names = [figures.printable(name) for name in labels.class_names]
        if result.classes <= MAX_CONFUSION_CLASSES:
            matrix = result.confusion.astype(float)
            sections.append(confusion_section(matrix, names, name_images(card), folder))
        sections.append(class_section(result.by_class(), names, "classes.csv"))
    totals = int((~result.correct).sum()), len(result.correct)  # errors, images
    sections += [
        _calibration_section(result, folder),
        predictions_section(errors, "Most confident errors", totals),
        _command_section(card),
        _settings_section(card),
    ]
    title = f"{slug(card.name)} on {slug(card.data['spec'])}"
    subtitle = "Evaluation", card.data["split"], str(card.environment.get("started") or "")[:10]
    write_text(folder / "report.html", html.render_page(title, _summarize(card, result), sections, subtitle=subtitle))


def name_images(card: Card) -> str:
    """Such as "test images"; "images" if the data has no splits."""
    return f"{html.SPLIT.get(card.data['split'], '')} images".strip()


def slug(text: str) -> str:
    """The last part of a path, in characters that every file system accepts."""
    parts = [part for part in re.split(r"[/\\]", text) if part not in ("", ".", "..")]
    return re.sub(r"[^A-Za-z0-9._]+", "-", parts[-1] if parts else "").strip("-.")[:60]


def _summarize(card: Card, result: Result) -> Html:
    data = card.data
    scores: dict[str, Any] = {
        **{name: value for name, value in card.metrics.items() if name != "top5" or result.classes > FEW_CLASSES},
        "images": card.images,
        "interval": card.intervals["top1"],
        "probability": float(result.probabilities.mean()),
        "majority_accuracy": result.majority_accuracy,
    }
    lead = f"{card.name} on {html.pluralize(card.images, name_images(card).removesuffix('s'))} of {data['spec']}, "
    lead += f"{html.pluralize(data['classes'], 'class', 'classes')}. A prediction is correct if it is {data['rule']}."
    facts = [html.element("dl", *row, class_="facts") for row in ([make_headline(scores)], make_facts(scores))]
    notices: list[Html] = []
    if card.unreadable:
        notices.append(html.notice(html.describe_unreadable(card.unreadable, "image"), warning=True))
    if data["left_out"]:
        notices.append(html.notice(f"{html.pluralize(data['left_out'], 'image')} excluded by the rule."))
    notices += [html.notice(f"{html.percent(row['top1'], 10_000)} in {row['source']}.") for row in find_published(card)]
    return html.join([html.element("p", lead, class_="lead"), *facts, *notices])


def _calibration_section(result: Result, folder: Path) -> Section:
    bins, summary = result.bins(), result.confidence_sentence
    figure = draw_calibration(bins)
    rows = [["images", "mean probability", "accuracy"], *bins.tolist()]
    links = html.publish_figure(folder, "calibration", figure, rows)
    text = f"{summary[:1].upper()}{summary[1:]}. Expected calibration error: {html.points(result.calibration_error)} "
    text += "(15 bins). The line is perfect calibration; bars below it: overconfident. Darker bars: more images."
    return html.make_section("Calibration", text, html.inline_figure(figure, "Reliability diagram"), links)


@figures.styled()
def draw_calibration(bins: np.ndarray) -> figures.Figure:
    """Reliability diagram: accuracy by predicted probability; opacity shows the number of images."""
    figure, axes = figures.new_axes((4.6, 3.4))
    width, (images, _, accuracy) = 1 / len(bins), bins.T
    for number, (count, height) in enumerate(zip(images, accuracy, strict=True)):
        if count:
            opacity = 0.25 + 0.75 * float(np.sqrt(count / images.max()))
            axes.bar((number + 0.5) * width, height, 0.92 * width, color=figures.COLORS["blue"], alpha=opacity)
    axes.plot([0, 1], [0, 1], color=figures.COLORS["orange"], linewidth=1)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted probability", ylabel="accuracy")
    return figure


def _command_section(card: Card) -> Section | None:
    command, commit = card.environment.get("command"), card.environment.get("commit")
    if not command:
        return None
    note = html.element("p", f"Commit {commit}.", class_="note") if commit else ""
    return html.make_section("Reproduce", "Run the same evaluation:", html.code_block(str(command)), note)


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
    return html.make_section("Settings", html.pairs({key: value for key, value in settings.items() if value}))
