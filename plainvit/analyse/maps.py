"""The part of an analysis on attention maps: what an answer may rest on, and which of the maps tells the truth.

for part in maps(subject): part.title, part.words, part.drawings
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plainvit.analyse import attention, drawings, robust
from plainvit.analyse.page import Html, element, join, picture, table
from plainvit.analyse.subject import Drawing, Part, Parts, Subject
from plainvit.evaluate.chance import student

SHOWN = 6  # images with maps
JUDGED = 32  # images over which maps are judged
_JUDGING = 5 * 2 * (len(robust.SHARES) - 2) + 10  # passes over an image: five maps, two curves, and to make the maps


def maps(subject: Subject) -> Parts:
    model = attention.whole(subject.model)
    images = subject.images[: subject.affordable(_JUDGING, JUDGED, SHOWN + 2)]
    looks = attention.looks(model, images)  # [B, L, H, h, w]
    made = {
        "rollout": attention.rollout(model, images),
        "rollout, no residual": attention.rollout(model, images, residual=False),
        "last layer": looks[:, -1].mean(1),
    }
    if model.head is not None:
        made["relevance"] = attention.relevance(model, images)
    yield _overlaid(subject, made)
    yield _every_head(subject, looks[0].float().numpy())
    if model.head is not None:
        yield faithful(subject, made)


def _overlaid(subject: Subject, made: dict[str, Tensor]) -> Part:
    shown = subject.images[:SHOWN].permute(0, 2, 3, 1).numpy()
    over = {name: one[:SHOWN].float().numpy() for name, one in made.items()}
    captions = [_caption(*pair) for pair in zip(subject.names, subject.guesses(SHOWN), strict=False)]
    numbers = {"names": subject.names[:SHOWN]} | {name: one.round(decimals=6).tolist() for name, one in over.items()}
    gradient = "; relevance weighs attention by the gradient of the model's answer" if "relevance" in made else ""
    return Part(
        "attention-maps",
        "Attention maps",
        "What an answer may rest on: the image stays bright, or is yellow as a heat map, where a map is high, each map "
        "on its own scale. Rollout "
        "multiplies attention through the layers, with and without the residual connections; the last layer is what "
        f"the output reads{gradient}. Faithfulness, below, tells which of them to believe.",
        {"": Drawing(drawings.draw_maps(shown, over, captions), numbers)},
        _map_table(shown, over, captions),
    )


def _every_head(subject: Subject, looks: np.ndarray) -> Part:
    who = "the class token looks" if subject.model.config.pool == "token" else "all patches together look"
    drawn = drawings.draw_looks(looks, f"Where {who}")
    return Part(
        "every-head",
        "Every head",
        f"Where {who} in each head of each layer, on the first image above; each map on its own scale.",
        {"": Drawing(drawn, {"name": subject.names[0], "looks": looks.round(6).tolist()})},
    )


def _caption(name: str, guess: str) -> str:
    return f"{name}: {guess}" if guess else name


def _map_table(images: np.ndarray, maps: dict[str, np.ndarray], captions: list[str]) -> Html:
    """Pictures in rows under the names of the maps: sharper, smaller and better on a phone than one large figure."""
    head = element("div", *(element("b", name) for name in ("image", *maps)), class_="row")
    rows = []
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        shown = [picture(image, caption)]
        shown += [_both_ways(image, one[place], f"{name} of {caption}") for name, one in maps.items()]
        rows.append(join((element("div", *shown, class_="row"), element("p", caption, class_="note"))))
    ramp = element("p", "least ", element("span", class_="ramp"), " most of each map", class_="note")
    checked = "" if drawings.hides_shade(images) else None
    switch = element("input", type="checkbox", class_="switch", id="as-heat-maps", checked=checked)
    label = element("label", " as heat maps, in which dark places of the image hide nothing", for_="as-heat-maps")
    pictures = element("div", head, *rows, ramp, class_="maps", style=f"--columns:{len(maps) + 1}")
    return element("div", switch, label, pictures)


def _both_ways(image: np.ndarray, values: np.ndarray, words: str) -> Html:
    """A map as shade and as heat; the page shows the one that its switch says."""
    return element(
        "div",
        element("div", picture(drawings.dimmed(image, values), words), class_="dimmed"),
        element("div", picture(drawings.heated(image, values), words), class_="heated"),
    )


# Faithfulness ---------------------------------------------------------------------------------------------------------


def faithful(subject: Subject, made: dict[str, Tensor]) -> Part:
    count = len(next(iter(made.values())))
    images, grid = subject.images[:count], subject.grid
    random = torch.rand(count, *grid, generator=torch.Generator().manual_seed(0))
    known = robust.ends(subject.model, images)
    found = {name: robust.faithfulness(subject.model, images, one, known=known) for name, one in made.items()}
    base = robust.faithfulness(subject.model, images, random, known=known)
    falls = {name: gain(base.deletion_areas, one.deletion_areas) for name, one in found.items()}
    rises = {name: gain(one.insertion_areas, base.insertion_areas) for name, one in found.items()}
    found[drawings.RANDOM] = base
    return Part(
        "faithfulness",
        "Faithfulness of the maps",
        f"What was done: patches of {count} images became the image's mean colour in the order of each map, the most "
        "important first: the faster the probability of the answer falls, the truer the map. In the second figure they "
        "come back in that order: the faster it rises, the truer. A map that is no better than a random order explains "
        "nothing: the table has the mean distance from the random curve in points of probability, with its 95 % "
        "interval; below 0 it is worse.",
        {
            "": _curves(found, "deletion", "go", "patches hidden, %", falls),
            "insertion": _curves(found, "insertion", "come", "patches shown, %", rises),
        },
        table=_verdicts(falls, rises),
    )


def _curves(found: dict[str, robust.Faithful], kind: str, how: str, across: str, gains: dict[str, "Gain"]) -> Drawing:
    shares = next(iter(found.values())).shares
    curves = {name: getattr(one, kind) for name, one in found.items()}
    title = f"Probability of the answer as patches {how}, %"
    numbers = {
        "shares": shares,
        "curves": curves,
        "areas": {name: getattr(one, f"{kind}_areas") for name, one in found.items()},  # of each image
        "better_than_random": {name: one._asdict() for name, one in gains.items()},
    }
    return Drawing(drawings.draw_lines([100 * share for share in shares], curves, title, across), numbers)


class Gain(NamedTuple):
    """A mean over images of how much better than random, in probability, with 95 % of it."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{100 * self.mean:+.1f}"
        return f"{100 * self.mean:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"

    @property
    def verdict(self) -> str:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no better"


def gain(larger: list[float], smaller: list[float]) -> Gain:
    """Of few images, so by Student's t; of one there is no interval."""
    apart = np.subtract(larger, smaller)
    ends = student(apart.tolist()) if len(apart) > 1 else (math.nan, math.nan)
    return Gain(float(apart.mean()), *ends)


def _verdicts(falls: dict[str, Gain], rises: dict[str, Gain]) -> Html:
    """Of each map: better than random, worse, or not told apart from it."""
    rows = [(name, *(f"{one.verdict}: {one}" for one in (falls[name], rises[name]))) for name in falls]
    return table(("map", "than random, by hiding", "than random, by showing"), rows)
