"""Attention maps of an analysis, and a test of which of them are faithful to the model."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plainvit.analyse import attention, drawings, robust
from plainvit.analyse.page import Html, element, embed_image, join, table
from plainvit.analyse.subject import Drawing, Finding, Findings, Subject
from plainvit.evaluate.statistics import student_interval

SHOWN = 6  # images with maps
TESTED = 32  # images of the faithfulness test
_PASSES = 5 * 2 * len(robust.SHARES) + 10  # forward passes per image: five maps, two curves, and the maps


def analyse_maps(subject: Subject) -> Findings:
    model = attention.require_global_attention(subject.model)
    images = subject.images[: subject.affordable_images(_PASSES, TESTED, SHOWN + 2)]
    maps = {
        "rollout": attention.rollout(model, images),
        "rollout, no residual": attention.rollout(model, images, residual=False),
        "last layer": attention.attention_maps(model, images)[:, -1].mean(1),
    }
    if model.head is not None:
        maps["relevance"] = attention.relevance(model, images)
    yield _find_maps(subject, maps)
    if model.head is not None:
        yield _find_faithfulness(subject, maps)


def _find_maps(subject: Subject, maps: dict[str, Tensor]) -> Finding:
    shown = subject.images[:SHOWN].permute(0, 2, 3, 1).numpy()
    arrays = {name: values[:SHOWN].float().numpy() for name, values in maps.items()}
    pairs = zip(subject.names, subject.describe_predictions(SHOWN), strict=False)
    captions = [f"{name}: {prediction}" if prediction else name for name, prediction in pairs]
    rounded = {name: values.round(decimals=6).tolist() for name, values in arrays.items()}
    gradient = "; relevance weights attention by the gradient of the predicted class" if "relevance" in maps else ""
    return Finding(
        "attention-maps",
        "Attention maps",
        "Which patches the prediction may depend on: yellow where a map is high, each map on its own scale. Rollout "
        "multiplies attention through the layers, with and without residual connections; the last layer is what the "
        f"head reads{gradient}. The section on faithfulness tests which maps to trust.",
        {"": Drawing(drawings.draw_maps(shown, arrays, captions), {"names": subject.names[:SHOWN]} | rounded)},
        _map_table(shown, arrays, captions),
    )


def _map_table(images: np.ndarray, maps: dict[str, np.ndarray], captions: list[str]) -> Html:
    """Images in rows under the names of the maps: sharper and smaller than one large figure."""
    rows = [element("div", *(element("b", name) for name in ("image", *maps)), class_="row")]
    for row, (image, caption) in enumerate(zip(images, captions, strict=True)):
        shown = [embed_image(image, caption)]
        for name, values in maps.items():
            shown.append(embed_image(drawings.overlay_heat(image, values[row]), f"{name} of {caption}"))
        rows.append(join((element("div", *shown, class_="row"), element("p", caption, class_="note"))))
    scale = element("p", "min ", element("span", class_="ramp heat"), " max of each map", class_="note")
    return element("div", *rows, scale, class_="maps", style=f"--columns:{len(maps) + 1}")


# Faithfulness ---------------------------------------------------------------------------------------------------------


def _find_faithfulness(subject: Subject, maps: dict[str, Tensor]) -> Finding:
    count = len(next(iter(maps.values())))
    random_maps = torch.rand(count, *subject.grid, generator=torch.Generator().manual_seed(0))
    found = {
        name: robust.faithfulness(subject.model, subject.images[:count], values)
        for name, values in (maps | {drawings.RANDOM: random_maps}).items()
    }
    base = found[drawings.RANDOM]
    deletion = {name: compute_gain(base.deletion_areas, found[name].deletion_areas) for name in maps}
    insertion = {name: compute_gain(found[name].insertion_areas, base.insertion_areas) for name in maps}
    rows = [(name, str(deletion[name]), str(insertion[name])) for name in maps]
    return Finding(
        "faithfulness",
        "Faithfulness of the maps",
        f"Deletion: patches of {count} images are replaced by the image's mean colour, highest map value "
        "first; a faithful map makes the probability of the predicted class fall fast. Insertion: patches are restored "
        "in that order; a faithful map makes it rise fast. A map that is no better than a random order explains "
        "nothing. The table shows the mean difference from the random order in percentage points, with its 95 % "
        "confidence interval; negative is worse than random.",
        {
            "": _draw_curves(found, "deletion", "patches hidden, %", deletion),
            "insertion": _draw_curves(found, "insertion", "patches shown, %", insertion),
        },
        table=table(("map", "deletion, compared with random", "insertion, compared with random"), rows),
    )


def _draw_curves(found: dict[str, robust.Faithfulness], kind: str, xlabel: str, gains: dict[str, "Gain"]) -> Drawing:
    shares = next(iter(found.values())).shares
    curves = {name: getattr(one, kind) for name, one in found.items()}
    title = f"{kind.capitalize()}: probability of the predicted class, %"
    numbers = {
        "shares": shares,
        "curves": curves,
        "areas": {name: getattr(one, f"{kind}_areas") for name, one in found.items()},  # of each image
        "better_than_random": {name: one._asdict() for name, one in gains.items()},
    }
    return Drawing(drawings.draw_lines([100 * share for share in shares], curves, title, xlabel), numbers)


class Gain(NamedTuple):
    """Mean improvement over a random order, as a probability, with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" ({100 * self.low:+.1f} to {100 * self.high:+.1f})"
        return f"{self.verdict}: {100 * self.mean:+.1f}{interval}"

    @property
    def verdict(self) -> str:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no better"


def compute_gain(larger: list[float], smaller: list[float]) -> Gain:
    """Interval by Student's t; NaN for a single image."""
    differences = np.subtract(larger, smaller)
    ends = student_interval(differences.tolist()) if len(differences) > 1 else (math.nan, math.nan)
    return Gain(float(differences.mean()), *ends)
