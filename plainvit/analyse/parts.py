"""The parts of an analysis but for the maps: each takes a model and images, and gives figures, numbers and words.

for part in heads(subject): part.title, part.words, part.drawings

First what is inside the model (filters, positions, heads, tokens, layers), then what an answer hangs on (heads and
layers that are taken out, hidden and shuffled patches, shifts). maps.py has the maps, subject.py what they all share.
"""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plainvit.analyse import attention, drawings, embeddings, robust, tokens
from plainvit.analyse.page import element, picture
from plainvit.analyse.subject import LEAST, Drawing, Part, Parts, Subject
from plainvit.evaluate.chance import wilson
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)  # of the patches that are hidden
# Figures of shifts: name, what of robust.Shifted, title; answers are a matter of models with a head
SHIFTED = (
    ("", "cosine", "Cosine of features with those unmoved"),
    ("answers", "same", "Answers that stay, %"),
    ("accuracy", "accuracy", "Accuracy, %"),
)
SURE = 0.05  # a claim in words is made where chance would do as much less often


# Inside the model -----------------------------------------------------------------------------------------------------


def filters(subject: Subject) -> Parts:
    found = embeddings.filters(subject.model)
    share, (high, wide) = 100 * float(found.variance.sum()), found.tiles.shape[1:3]
    numbers = {"variance": found.variance.tolist(), "tiles": found.tiles.round(5).tolist()}
    pictures = embeddings.as_pictures(found.tiles)
    tiles = [
        element("figure", picture(one, f"component {number}"), element("figcaption", f"{100 * part:.1f} %"))
        for number, (one, part) in enumerate(zip(pictures, found.variance, strict=True), 1)
    ]
    colourless = bool((subject.images == subject.images[:, :1]).all()) and subject.images.shape[1] > 1
    learned = (
        "Smooth waves are learned; noise is what is left of the beginning. So are colours where a model was trained on "
        "grey images such as these: it learns of their channels, which are all the same, only the sum."
        if colourless
        else "Smooth waves and colours are learned; noise is what is left of the beginning."
    )
    yield Part(
        "filters",
        "Embedding filters",
        f"What the first layer can see of a patch: the principal components of its {high} x {wide} kernels, the "
        f"strongest first. The number is the share of the variance that each explains, together {share:.0f} %. "
        f"{learned} Grey is nought.",
        {"": Drawing(drawings.draw_filters(found), numbers)},
        element("div", *tiles, class_="tiles"),
    )


def positions(subject: Subject) -> Parts:
    model = attention.check(subject.model)
    similar, (h, w) = embeddings.similarity(model), model.config.grid
    found = embeddings.structure(similar)
    chance = embeddings.chance_of(similar)
    numbers = {
        "grid": (h, w),
        **_structured(found),
        "chance": chance._asdict(),
        "similarity": similar.round(4).tolist(),
    }
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
        "Each tile belongs to one patch of the image, and shows how alike the vector of its place is to those of all "
        f"places (cosine: 1 the same, 0 nothing in common). {_verdict(found, chance)}{words}",
        made,
    )


def _verdict(found: embeddings.Structure, chance: embeddings.Chance) -> str:
    """Whether rows and columns of patches can be read off their positions, with the numbers that say so."""
    means = (
        f"{found.row:.2f} within a row (p {chance.row:.3f}), {found.column:.2f} within a column "
        f"(p {chance.column:.3f}), {found.elsewhere:.2f} elsewhere (means; p: how often places in a random order show "
        "as much)."
    )
    rows, columns = (one < SURE / 2 for one in chance)  # two tests
    if not (rows or columns):
        return f"These show neither rows nor columns of the grid: {means}"
    seen = "rows and columns" if rows and columns else "rows, not the columns," if rows else "columns, not the rows,"
    return (
        f"These show the {seen} of the grid, places of one being more alike than others: {means} Likeness goes with "
        f"nearness by {found.nearness:.2f} (rank correlation; 1: the nearer is always the more alike, 0: no relation)."
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
    drawn = drawings.draw_removed_layers(found.whole, found.layers.tolist())
    made = {"layers": Drawing(drawn, _counts(found, len(images), found.layers, found.layers_chance))}
    words = "Single heads were left out: that takes many passes, which a GPU, or --thorough, makes."
    if found.heads is not None and found.heads_chance is not None:
        heads, words = _without_heads(found, len(images), found.heads, found.heads_chance)
        made = {"": heads} | made
    told = [str(layer + 1) for layer in torch.nonzero(found.layers_chance < SURE / depth).flatten().tolist()]
    yield Part(
        "removal",
        "What each part is worth",
        "What was done: one head's output was set to nought, or one layer was passed over, its tokens going on as "
        f"they came; nothing was trained anew. Accuracy over {len(images)} images, {100 * found.whole:.1f} % with all "
        f"parts. {words} Layers that matter beyond chance: {', '.join(told) or 'none'} (McNemar's exact test, "
        f"p < {SURE:g} divided by the number of parts).",
        made,
    )


def _without_heads(found: robust.Removed, images: int, heads: Tensor, chance: Tensor) -> tuple[Drawing, str]:
    change = 100 * (heads - found.whole).numpy()
    title = "Change of accuracy without a head, points"
    drawn = drawings.draw_matrix(change.T, title, "head", "layer", "points", diverging=True)
    told = int((chance < SURE / heads.numel()).sum())
    words = (
        f"Red: accuracy is lost without the head. One answer is {100 / images:.1f} points; "
        f"{told or 'none'} of the {heads.numel()} heads change{'' if told > 1 else 's'} it by more than chance would."
    )
    return Drawing(drawn, _counts(found, images, heads, chance)), words


def _counts(found: robust.Removed, images: int, without: Tensor, chance: Tensor) -> dict[str, Any]:
    return {"images": images, "whole": found.whole, "without": without.tolist(), "chance": chance.tolist()}


def robustness(subject: Subject) -> Parts:
    images, labels = subject.some(subject.affordable(10, 128))
    hidden = robust.occluded(subject.model, images, labels, subject.grid, SHARES)
    grids = sorted({one for one in ((1, 1), (2, 2), (4, 4), subject.grid) if _divides(images, one)})
    mixed = robust.shuffled(subject.model, images, labels, grids)
    count = len(images)
    drawn = drawings.draw_lines([100 * s for s in SHARES], {"": hidden}, "Accuracy, %", "patches hidden, %")
    pieces = [a * b for a, b in grids]
    again = drawings.draw_lines(pieces, {"": mixed}, "Accuracy, %", "pieces that are shuffled")
    intervals = [wilson(accuracy * count, count) for accuracy in (*hidden, *mixed)]
    widest = max(high - low for low, high in intervals)
    yield Part(
        "hidden-patches",
        "Hidden and shuffled patches",
        "What was done, to the images and not to the model: first a random share of the patches became the image's "
        "mean colour; then the image was cut into a grid and its pieces were put back in a random order. A model that "
        "falls late at the first sees the whole; one that stays high at the second looks at texture rather than shape. "
        f"Accuracy over {count} images, which tell it within {50 * widest:.0f} points at worst.",
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
    size = subject.model.config.image_size
    patch = size[0] // subject.grid[0] if isinstance(subject.model, ViT) else 16
    patch = min(patch, min(size) - 1)  # what comes into view is a mirror image of the rest
    pixels = sorted({0, *np.unique(np.linspace(1, max(patch, 1), min(max(patch, 1), 8)).round().astype(int)).tolist()})
    found = {"this model": robust.shifted(subject.model, images, labels, pixels)}
    if subject.against:
        found |= _of_the_other(subject, subject.against, images, labels, pixels)
    made = {}
    for name, kind, title in SHIFTED if headed else SHIFTED[:1]:
        lines = {key: getattr(one, kind) for key, one in found.items() if not np.isnan(getattr(one, kind)).any()}
        drawn = drawings.draw_lines(pixels, lines, title, "shift, pixels", share=kind != "cosine")
        made[name] = Drawing(drawn, {"images": len(images), "pixels": pixels, kind: lines})
    yield Part(
        "shifts",
        "Shifted images",
        f"What was done: {len(images)} images were moved down and to the right by up to {patch} "
        f"pixel{'s' * (patch > 1)}, the border filled with their mirror image. A convolution's features move with the "
        "image and stay alike; a ViT cuts other "
        "patches until the shift is a whole one. "
        + ("" if subject.against else "Another model stands beside it where --against names one."),
        made,
    )


def _of_the_other(
    subject: Subject, other: Predictor, images: Tensor, labels: Tensor | None, pixels: list[int]
) -> dict[str, robust.Shifted]:
    """The same of the model beside it, where it takes images of the same size."""
    ours = subject.predictor
    if other.size != ours.size:
        theirs, own = (f"{one[1]} x {one[0]}" for one in (other.size, ours.size))
        subject.notes.append(f"Shifts of {subject.other} are left out: it takes {theirs} pixels, this model {own}.")
        return {}
    known = labels if subject.labels is not None and other.classes == ours.classes else None
    return {subject.other: robust.shifted(other.model, images, known, pixels)}
