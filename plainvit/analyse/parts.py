"""The parts of an analysis: each takes a model and images, and gives figures, numbers and words on how to read them.

What does not apply to a model is a ValueError that says why; `understand` puts it into the page and goes on. Parts that
take many passes look at as many images as a bounded number of multiply-adds allows, and say at how many.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from plainvit.analyse import attention, drawings, embeddings, robust, tokens
from plainvit.analyse.page import Html, element, join, picture, table
from plainvit.evaluate.chance import mean_interval
from plainvit.evaluate.cost import macs
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT

SHOWN = 6  # images with maps
JUDGED = 32  # images over which maps are judged
LEAST = 16  # images below which accuracy says nothing
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)  # of the patches that are hidden
WORK = {"cpu": 7e11, "cuda": 2e14}  # multiply-adds of a part that takes many passes: some ten seconds
SURE = 0.05  # a claim in words is made where chance would do as much less often


@dataclass
class Subject:
    """A model, and images as it sees them."""

    predictor: Predictor
    images: Tensor  # [n, 3, H, W] uint8
    names: list[str]
    labels: Tensor | None  # [n], where they are known and are the model's classes
    against: Predictor | None = None
    other: str = ""  # what the model that it is compared with is called
    thorough: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.predictor.model

    @property
    def grid(self) -> tuple[int, int]:
        """The model's patches; a ResNet has none, and gets squares of about a fourteenth of the image."""
        if isinstance(self.model, ViT):
            return self.model.config.grid
        height, width = self.model.config.image_size
        return _divisor(height), _divisor(width)

    def affordable(self, passes: float, most: int, least: int = LEAST) -> int:
        """Images that a part with so many passes over each may look at."""
        count = min(most, len(self.images))
        if self.thorough:
            return count
        work = WORK.get(self.predictor.device.split(":")[0], WORK["cpu"])
        return max(min(count, int(work / (passes * macs(self.model.config)))), min(least, count))

    @cached_property
    def answers(self) -> Tensor:
        """[n, K] logits of all images."""
        return robust.logits(self.model, self.images)

    def some(self, count: int) -> tuple[Tensor, Tensor]:
        """Images with labels; the model's own answers where there are none."""
        if self.model.head is None:
            raise ValueError("the model has no head, so there is no answer to lose")
        labels = self.answers.argmax(-1) if self.labels is None else self.labels
        return self.images[:count], labels[:count]

    def guesses(self, count: int) -> list[str]:
        """What the model says of the first images, in words."""
        if self.model.head is None:
            return [""] * min(count, len(self.images))
        best, names = self.answers[:count].softmax(-1).max(-1), self.predictor.class_names
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [f"{names[at]} ({100 * p:.0f} %)" for p, at in pairs]


def _divisor(side: int) -> int:
    return max(count for count in range(1, 15) if side % count == 0)


class Drawing(NamedTuple):
    """A figure and its numbers, which are written side by side."""

    figure: Figure
    numbers: Any


@dataclass
class Part:
    """One figure or more, with words on how to read them."""

    name: str
    title: str
    words: str
    drawings: dict[str, Drawing]
    html: Html | None = None  # what the page shows in place of the figures, where pictures are many
    table: Html | None = None  # and what it shows below them


Parts = Iterator[Part]


def filters(subject: Subject) -> Parts:
    found = embeddings.filters(subject.model)
    share, (high, wide) = 100 * float(found.variance.sum()), found.tiles.shape[1:3]
    numbers = {"variance": found.variance.tolist(), "tiles": found.tiles.round(5).tolist()}
    pictures = embeddings.as_pictures(found.tiles)
    tiles = [
        element("figure", picture(one, f"component {number}"), element("figcaption", f"{100 * part:.1f} %"))
        for number, (one, part) in enumerate(zip(pictures, found.variance, strict=True), 1)
    ]
    yield Part(
        "filters",
        "Embedding filters",
        f"What the first layer can see of a patch: the principal components of its {high} x {wide} kernels, the "
        f"strongest first. The number is the share of the variance that each explains, together {share:.0f} %. Smooth "
        "waves and colours are learned; noise is what is left of the beginning. Grey is nought.",
        {"": Drawing(drawings.draw_filters(found), numbers)},
        element("div", *tiles, class_="tiles"),
    )


def positions(subject: Subject) -> Parts:
    model = attention.check(subject.model)
    similar, (h, w) = embeddings.similarity(model), model.config.grid
    found = embeddings.structure(similar)
    numbers = {"grid": (h, w), **_structured(found), "similarity": similar.round(4).tolist()}
    made = {"": Drawing(drawings.draw_similarity(similar, f"Similarity of positions, {h} x {w} patches"), numbers)}
    words = ""
    if model.config.posemb != "relative":
        larger = math.ceil(1.5 * h), math.ceil(1.5 * w)
        resampled = embeddings.similarity(model, grid=larger)
        after = {"grid": larger, **_structured(embeddings.structure(resampled))}
        title = f"Resampled to {larger[0]} x {larger[1]} patches"
        made["resampled"] = Drawing(drawings.draw_similarity(resampled, title), after)
        words = " The second figure shows the same positions resampled for larger images: it should look alike, finer."
    yield Part(
        "positions",
        "Position similarity",
        "Each tile belongs to one patch of the image, and shows how alike its position's vector is to those of all "
        "patches. A bright spot where the tile itself lies, with a bright row and column through it, means that the "
        f"model knows where a patch is. Mean cosine within a row {found.row:.2f}, within a column {found.column:.2f}, "
        f"elsewhere {found.elsewhere:.2f}; rank correlation of similarity with nearness {found.nearness:.2f} (1: the "
        f"nearer is always the more alike).{words}",
        made,
    )


def _structured(found: embeddings.Structure) -> dict[str, float]:
    return asdict(found) | {"contrast": found.contrast}


def heads(subject: Subject) -> Parts:
    model = attention.check(subject.model)
    found = attention.heads(model, subject.images)
    count, (height, width) = len(subject.images), model.config.image_size
    even = float(torch.stack([attention.distances(model, layer).mean() for layer in range(len(model.blocks))]).mean())
    drawn = drawings.draw_heads(
        found.distance.numpy(), "Mean attention distance, pixels", even, "attention to all alike"
    )
    numbers = {"images": count, "unit": "pixels", "even": even, "distance": found.distance.tolist()}
    yield Part(
        "attention-distance",
        "Attention distance",
        f"How far a head looks: the mean distance in pixels between a patch and where it attends, over {count} images "
        f"of {width} x {height} pixels. Heads near the bottom look close by, as a convolution does; those near the "
        f"dashed line, {even:.0f} pixels, look at the whole image.",
        {"": Drawing(drawn, numbers)},
    )
    seen = max(model.config.grid) if model.config.axial else model.config.tokens
    largest, outside = math.log(seen), 100 * float(found.outside.mean())
    drawn = drawings.draw_heads(found.entropy.numpy(), "Attention entropy, nats", largest, "attention to all alike")
    numbers = {"images": count, "unit": "nats", "entropy": found.entropy.tolist(), "outside": found.outside.tolist()}
    elsewhere = f" {outside:.0f} % of it goes to tokens that are no patches." if model.config.prefix else ""
    yield Part(
        "attention-entropy",
        "Attention entropy",
        f"How widely a head spreads its attention: 0 if every patch looks at one token alone, {largest:.2f} (dashed) "
        f"if it looks at all {seen} alike.{elsewhere}",
        {"": Drawing(drawn, numbers)},
    )


# Maps -----------------------------------------------------------------------------------------------------------------


def maps(subject: Subject) -> Parts:
    model = attention.whole(subject.model)
    count = subject.affordable(_JUDGING, JUDGED, SHOWN + 2)
    images = subject.images[:count]
    looks = attention.looks(model, images)  # [B, L, H, h, w]
    made = {
        "rollout": attention.rollout(model, images),
        "rollout, no residual": attention.rollout(model, images, residual=False),
        "last layer": looks[:, -1].mean(1),
    }
    if model.head is not None:
        made["relevance"] = attention.relevance(model, images)
    shown = images[:SHOWN].permute(0, 2, 3, 1).numpy()
    over = {name: one[:SHOWN].float().numpy() for name, one in made.items()}
    captions = [_caption(*pair) for pair in zip(subject.names, subject.guesses(SHOWN), strict=False)]
    numbers = {"names": subject.names[:SHOWN]} | {name: one.round(decimals=6).tolist() for name, one in over.items()}
    gradient = "; relevance weighs attention by the gradient of the model's answer" if model.head is not None else ""
    yield Part(
        "attention-maps",
        "Attention maps",
        "What an answer may rest on: the image stays bright where a map is high, each map on its own scale. Rollout "
        "multiplies attention through the layers, with and without the residual connections; the last layer is what "
        f"the output reads{gradient}. Faithfulness, below, tells which of them to believe.",
        {"": Drawing(drawings.draw_maps(shown, over, captions), numbers)},
        _map_table(shown, over, captions),
    )
    who = "the class token looks" if model.config.pool == "token" else "all patches together look"
    drawn = drawings.draw_looks(looks[0].float().numpy(), f"Where {who}, on the first image")
    yield Part(
        "every-head",
        "Every head",
        f"Where {who} in each head of each layer, on the first image above; each map on its own scale.",
        {"": Drawing(drawn, {"name": subject.names[0], "looks": looks[0].float().numpy().round(6).tolist()})},
    )
    if model.head is not None:
        yield faithful(subject, made)


def _caption(name: str, guess: str) -> str:
    return f"{name}: {guess}" if guess else name


def _map_table(images: np.ndarray, maps: dict[str, np.ndarray], captions: list[str]) -> Html:
    """Pictures in rows under the names of the maps: sharper, smaller and better on a phone than one large figure."""
    head = element("div", *(element("b", name) for name in ("image", *maps)), class_="row")
    rows = []
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        shown = [picture(image, caption)]
        shown += [picture(drawings.heat(image, one[place]), f"{name} of {caption}") for name, one in maps.items()]
        rows.append(join((element("div", *shown, class_="row"), element("p", caption, class_="note"))))
    ramp = element("p", "least ", element("span", class_="ramp"), " most of each map", class_="note")
    return element("div", head, *rows, ramp, class_="maps", style=f"--columns:{len(maps) + 1}")


_JUDGING = 5 * 2 * (len(robust.SHARES) - 2) + 10  # passes over an image: five maps, two curves, and to make the maps


def faithful(subject: Subject, made: dict[str, Tensor]) -> Part:
    count = len(next(iter(made.values())))
    images, grid = subject.images[:count], subject.grid
    random = torch.rand(count, *grid, generator=torch.Generator().manual_seed(0))
    known = robust.ends(subject.model, images)
    found = {name: robust.faithfulness(subject.model, images, one, known=known) for name, one in made.items()}
    base = robust.faithfulness(subject.model, images, random, known=known)
    gains = {
        name: (_gain(base.deletion_areas, one.deletion_areas), _gain(one.insertion_areas, base.insertion_areas))
        for name, one in found.items()
    }
    found[drawings.RANDOM] = base
    return Part(
        "faithfulness",
        "Faithfulness of the maps",
        f"Patches of {count} images are hidden in the order of each map, the most important first: the faster the "
        "probability of the answer falls, the truer the map. In the second figure they come back in that order: the "
        "faster it rises, the truer. A map that is no better than a random order explains nothing: the table has the "
        "mean distance from the random curve in points of probability, with its 95 % interval; below 0 it is worse.",
        {
            "": _curves(found, "deletion", "go", "patches hidden, %", {name: one[0] for name, one in gains.items()}),
            "insertion": _curves(
                found, "insertion", "come", "patches shown, %", {name: one[1] for name, one in gains.items()}
            ),
        },
        table=_verdicts(gains),
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


def _gain(larger: list[float], smaller: list[float]) -> Gain:
    apart = np.subtract(larger, smaller)
    return Gain(float(apart.mean()), *mean_interval(apart))


def _verdicts(gains: dict[str, tuple[Gain, Gain]]) -> Html:
    """Of each map: better than random, worse, or not told apart from it."""
    rows = [(name, *(f"{gain.verdict}: {gain}" for gain in both)) for name, both in gains.items()]
    return table(("map", "than random, by hiding", "than random, by showing"), rows)


# Tokens ---------------------------------------------------------------------------------------------------------------


def outlying(subject: Subject) -> Parts:
    found = tokens.outliers(attention.check(subject.model), subject.images)
    median = float(found.norms.median())
    medians = found.norms.numpy() / max(median, 1e-30)
    counts, edges = np.histogram(medians, bins=60)
    numbers = {"share": found.share, "images": found.images, "largest": found.largest, "median": median,
               "counts": counts.tolist(), "edges": edges.round(4).tolist()}  # fmt: skip
    drawn = drawings.draw_histogram(
        medians, "Patches by the length of their last token", "length, in medians", tokens.OUTLYING,
        f"beyond {tokens.OUTLYING:g} medians: outlying",
    )  # fmt: skip
    said = (
        f"{100 * found.share:.2f} % of the patches lie beyond the line, in {100 * found.images:.0f} % of the images: "
        "the artefacts that register tokens cure."
        if found.share
        else "None lies beyond the line: this model has no such artefacts."
    )
    yield Part(
        "token-norms",
        "Token norms",
        "Large models misuse some background patches as scratch paper; their tokens become many times as long as the "
        f"others and spoil attention maps. {said} The longest has {found.largest:.1f} medians.",
        {"": Drawing(drawn, numbers)},
    )


def likeness(subject: Subject) -> Parts:
    own = tokens.pooled(subject.model, subject.images)
    found, stage = tokens.likeness(own, own).numpy(), _stage(subject.model)
    drawn = drawings.draw_matrix(found, f"Similarity of this model's {stage}s", stage, stage, "CKA")
    made = {"": Drawing(drawn, {"images": len(subject.images), "cka": found.round(4).tolist()})}
    words = ""
    if subject.against:
        other = subject.against
        pictures = torch.nn.functional.interpolate(subject.images.float(), other.size, mode="bilinear", antialias=True)
        theirs = tokens.pooled(other.model, pictures.round().to(torch.uint8))
        between = tokens.likeness(own, theirs).numpy()
        drawn = drawings.draw_matrix(
            between, "Similarity with the other model", f"{stage} of this model",
            f"{_stage(other.model)} of {subject.other}", "CKA",
        )  # fmt: skip
        made["against"] = Drawing(drawn, {"other": subject.other, "cka": between.round(4).tolist()})
        words = f" The second figure compares with {subject.other}."
    yield Part(
        "layer-similarity",
        f"Similarity of {stage}s",
        f"Linear CKA of mean tokens over {len(subject.images)} images: 1 where two {stage}s tell images apart in the "
        f"same way, 0 where they have nothing in common. A block of one colour: {stage}s that do alike.{words}",
        made,
    )


def _stage(model: Any) -> str:
    return "layer" if isinstance(model, ViT) else "stage"


# What an answer hangs on ----------------------------------------------------------------------------------------------


def removal(subject: Subject) -> Parts:
    model = attention.check(subject.model)
    depth = len(model.blocks)
    passes = depth * (1 + model.config.heads) * (depth + 1) / (2 * depth)
    single = subject.affordable(passes, 48, 0) >= min(LEAST, len(subject.images))
    images, labels = subject.some(subject.affordable(passes if single else depth / 2, 48))
    found = robust.removed(model, images, labels, heads=single)
    numbers = {"images": len(images), "whole": found.whole}
    layers = numbers | {"without": found.layers.tolist(), "chance": found.layers_chance.tolist()}
    made = {"layers": Drawing(drawings.draw_removed_layers(found.whole, found.layers.tolist()), layers)}
    words = "Single heads were left out: that takes many passes, which a GPU, or the option thorough, makes."
    if found.heads is not None and found.heads_chance is not None:
        change = 100 * (found.heads - found.whole).numpy()
        title = "Change of accuracy without a head, points"
        drawn = drawings.draw_matrix(change.T, title, "head", "layer", "points", diverging=True)
        more = numbers | {"without": found.heads.tolist(), "chance": found.heads_chance.tolist()}
        made = {"": Drawing(drawn, more)} | made
        told = int((found.heads_chance < SURE / found.heads.numel()).sum())
        words = (
            f"Red: accuracy is lost without the head. One answer is {100 / len(images):.1f} points; "
            f"{told or 'none'} of the {found.heads.numel()} heads change more than chance would, all taken together."
        )
    told = [str(layer + 1) for layer in torch.nonzero(found.layers_chance < SURE / depth).flatten().tolist()]
    yield Part(
        "removal",
        "What each part is worth",
        f"Accuracy over {len(images)} images when a head or a whole layer is taken out; {100 * found.whole:.1f} % with "
        f"all. {words} Layers that matter beyond chance: {', '.join(told) or 'none'} (McNemar's exact test, "
        f"p < {SURE:g} divided by the number of parts).",
        made,
    )


def robustness(subject: Subject) -> Parts:
    images, labels = subject.some(subject.affordable(10, 128))
    hidden = robust.occluded(subject.model, images, labels, subject.grid, SHARES)
    grids = sorted({one for one in ((1, 1), (2, 2), (4, 4), subject.grid) if _divides(images, one)})
    mixed = robust.shuffled(subject.model, images, labels, grids)
    count = len(images)
    drawn = drawings.draw_lines([100 * s for s in SHARES], {"": hidden}, "Accuracy, %", "patches hidden, %")
    pieces = [a * b for a, b in grids]
    again = drawings.draw_lines(pieces, {"": mixed}, "Accuracy, %", "pieces that are shuffled")
    spread = 100 * 1.96 * math.sqrt(hidden[0] * (1 - hidden[0]) / count)
    yield Part(
        "hidden-patches",
        "Hidden and shuffled patches",
        f"Accuracy over {count} images when a random share of the patches is replaced by the image's mean colour; and "
        "when the image is cut into a grid and its pieces are put back in a random order. A model that falls late at "
        "the first sees the whole; one that stays high at the second looks at texture rather than shape. So many "
        f"images tell the accuracy within {spread:.0f} points.",
        {
            "": Drawing(drawn, {"images": count, "shares": SHARES, "accuracy": hidden}),
            "shuffled": Drawing(again, {"images": count, "grids": grids, "accuracy": mixed}),
        },
    )


def _divides(images: Tensor, grid: tuple[int, int]) -> bool:
    return images.shape[2] % grid[0] == 0 and images.shape[3] % grid[1] == 0


def shifts(subject: Subject) -> Parts:
    count, headed = subject.affordable(9, 48), subject.model.head is not None
    images, labels = subject.some(count) if headed else (subject.images[:count], None)
    size, patch = subject.model.config.image_size, 16
    if isinstance(subject.model, ViT):
        patch = size[0] // subject.grid[0]
    patch = min(patch, min(size) - 1)  # what comes into view is a mirror image of the rest
    pixels = sorted({0, *np.unique(np.linspace(1, max(patch, 1), min(max(patch, 1), 8)).round().astype(int)).tolist()})
    found = {"this model": robust.shifted(subject.model, images, labels, pixels)}
    other = subject.against
    if other and other.size == subject.predictor.size:
        known = labels if subject.labels is not None and other.classes == subject.predictor.classes else None
        found[subject.other] = robust.shifted(other.model, images, known, pixels)
    elif other:
        theirs, ours = (f"{one[1]} x {one[0]}" for one in (other.size, subject.predictor.size))
        subject.notes.append(f"Shifts of {subject.other} are left out: it takes {theirs} pixels, this model {ours}.")
    kinds = {"": ("cosine", "Cosine of features with those unmoved", False)}
    if headed:
        kinds["answers"] = ("same", "Answers that stay, %", True)
        kinds["accuracy"] = ("accuracy", "Accuracy, %", True)
    made = {}
    for name, (kind, title, share) in kinds.items():
        lines = {key: getattr(one, kind) for key, one in found.items() if not np.isnan(getattr(one, kind)).any()}
        drawn = drawings.draw_lines(pixels, lines, title, "shift, pixels", share=share)
        made[name] = Drawing(drawn, {"images": len(images), "pixels": pixels, kind: lines})
    yield Part(
        "shifts",
        "Shifted images",
        f"The image moves down and to the right by up to {patch} pixels, over {len(images)} images. A convolution's "
        "features move with the image and stay alike; a ViT cuts other patches until the shift is a whole one. "
        + ("" if subject.against else "Another model stands beside it where one is named (option against)."),
        made,
    )


PARTS: dict[str, Callable[[Subject], Parts]] = {
    "embedding filters": filters,
    "position similarity": positions,
    "attention distance and entropy": heads,
    "attention maps": maps,
    "token norms": outlying,
    "similarity of layers": likeness,
    "removal of heads and layers": removal,
    "hidden and shuffled patches": robustness,
    "shifts": shifts,
}
