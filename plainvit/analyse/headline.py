"""The scores of one split as large numbers: the first rows of the reports of runs and of evaluations.

`scores` is an entry of results.json, or `Result.summary()`; what is missing is omitted.
"""

import math
from collections.abc import Mapping
from typing import Any

from plainvit.analyse.figures import number
from plainvit.analyse.html import NONE, Html, fact, percent, pluralize, points
from plainvit.evaluate.statistics import describe_confidence


def make_headline(scores: Mapping[str, Any], split: str = "") -> Html:
    """The main result: top-1 accuracy, or the loss of a run without labels."""
    images, top1, majority = (number(scores.get(name)) for name in ("images", "top1", "majority_accuracy"))
    if "top1" not in scores and "loss" in scores:
        accuracy = number(scores.get("accuracy"))
        note = "on masked pixels" if math.isnan(accuracy) else f"{percent(accuracy)} of the masked colors correct"
        return fact(f"{split} loss", f"{number(scores['loss']):.4f}", note, is_headline=True)
    correct = "" if math.isnan(top1 * images) else f"{top1 * images:,.0f} of {pluralize(images, 'image')} correct"
    notes = " · ".join(filter(None, (_format_interval(scores), correct)))
    chance = "" if math.isnan(majority) else f"always the most frequent class: {percent(majority)}"
    return fact(f"{split} top-1 accuracy".strip(), percent(top1, images), notes, chance, is_headline=True)


def make_facts(scores: Mapping[str, Any], split: str = "") -> list[Html]:
    """Top-5 accuracy, negative log-likelihood, F1 and calibration error; the last one's note takes a row."""
    images, *values = (number(scores.get(name)) for name in ("images", "top5", "nll", "f1", "ece"))
    top5, nll, f1, error = values
    facts = {
        "top-5": (top5, percent(top5, images)),
        "NLL": (nll, f"{nll:.3f}", "negative log-likelihood"),
        "F1": (f1, percent(f1, images), "mean over the classes"),
        "calibration error": (error, points(error), _compare_confidence(scores)),
    }
    known_facts = {name: notes for name, (value, *notes) in facts.items() if not math.isnan(value)}
    return [fact(f"{split} {name}".strip(), *notes) for name, notes in known_facts.items()]


def _format_interval(scores: Mapping[str, Any]) -> str:
    ends = scores.get("interval")
    ends = [percent(number(end), number(scores.get("images"))) for end in ends] if isinstance(ends, list) else []
    return f"95 % interval {ends[0]} to {ends[1]}" if len(ends) == 2 and NONE not in ends else ""


def _compare_confidence(scores: Mapping[str, Any]) -> str:
    """Mean confidence compared with accuracy, if both are recorded."""
    images, top1, confidence = (number(scores.get(name)) for name in ("images", "top1", "probability"))
    known = images >= 1 and 0 <= top1 <= 1 and 0 <= confidence <= 1
    return describe_confidence(confidence, round(top1 * images), int(images)) if known else ""
