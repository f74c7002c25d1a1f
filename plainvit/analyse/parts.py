"""The parts of an analysis except for maps: each yields figures, their data and text.

for part in analyse_heads(subject): part.title, part.words, part.drawings

First what the model has learned (filters, positions, heads, tokens, layers), then what its predictions depend on.
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
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.models import ViT

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)  # of hidden patches
# Figures of shifts: name, field of robust.Shifted, title; all but the first need a head
SHIFTED = (
    ("", "cosine", "Cosine similarity with unshifted features"),
    ("answers", "same", "Unchanged predictions, %"),
    ("accuracy", "accuracy", "Accuracy, %"),
)
SIGNIFICANT = 0.05  # p-value of a claim in the text


# What is learned ------------------------------------------------------------------------------------------------------


def analyse_filters(subject: Subject) -> Parts:
    found = embeddings.filters(subject.model)
    explained, (height, width) = 100 * float(found.variance.sum()), found.tiles.shape[1:3]
    numbers = {"variance": found.variance.tolist(), "tiles": found.tiles.round(5).tolist()}
    pairs = zip(embeddings.filters_to_rgb(found.tiles), found.variance, strict=True)
    tiles = [
        element("figure", picture(tile, f"component {number}"), element("figcaption", f"{100 * share:.1f} %"))
        for number, (tile, share) in enumerate(pairs, 1)
    ]
    is_grey = bool((subject.images == subject.images[:, :1]).all()) and subject.images.shape[1] > 1
    learned = "Smooth patterns and colours are learned; noise remains from the initialisation."
    if is_grey:
        learned = "Smooth patterns are learned; noise, and the colours of grey images, remain from the initialisation."
    yield Part(
        "filters",
        "Embedding filters",
        f"Principal components of the {height} x {width} kernels of the first layer, with the variance that each "
        f"explains (together {explained:.0f} %). {learned} Grey is zero.",
        {"": Drawing(drawings.draw_filters(found), numbers)},
        element("div", *tiles, class_="tiles"),
    )


def analyse_positions(subject: Subject) -> Parts:
    model = attention.require_vit(subject.model)
    similar, (h, w) = embeddings.similarity(model), model.config.grid
    found = embeddings.structure(similar)
    chance = embeddings.permutation_test(similar)
    numbers = {
        "grid": (h, w),
        **_structure_numbers(found),
        "chance": chance._asdict(),
        "similarity": similar.round(4).tolist(),
    }
    figures = {"": Drawing(drawings.draw_similarity(similar, f"Similarity of positions, {h} x {w} patches"), numbers)}
    words = ""
    if model.config.posemb != "relative":
        larger = math.ceil(1.5 * h), math.ceil(1.5 * w)
        resampled = embeddings.similarity(model, grid=larger)
        numbers = {"grid": larger, **_structure_numbers(embeddings.structure(resampled))}
        title = f"Resampled to {larger[0]} x {larger[1]} patches"
        figures["resampled"] = Drawing(drawings.draw_similarity(resampled, title), numbers)
        words = " The second figure shows the positions resampled for larger images: the same pattern, but finer."
    yield Part(
        "positions",
        "Position similarity",
        "Each tile shows the cosine similarity of one patch's position embedding with all others. "
        f"{describe_structure(found, chance)}{words}",
        figures,
    )


def describe_structure(found: embeddings.Structure, chance: embeddings.PValues) -> str:
    """Whether the position embeddings encode the rows and columns of the grid."""
    means = (
        f"mean similarity {found.row:.2f} within a row (p {chance.row:.3f}), {found.column:.2f} within a column "
        f"(p {chance.column:.3f}), {found.elsewhere:.2f} elsewhere (p-values of a permutation test)."
    )
    rows, columns = (p_value < SIGNIFICANT / 2 for p_value in chance)  # two tests
    if not (rows or columns):
        return f"The positions encode neither rows nor columns of the grid: {means}"
    seen = (
        "rows and columns"
        if rows and columns
        else "rows, but not the columns,"
        if rows
        else "columns, but not the rows,"
    )
    return (
        f"The positions encode the {seen} of the grid: {means} Rank correlation of similarity and nearness: "
        f"{found.nearness:.2f}."
    )


def _structure_numbers(found: embeddings.Structure) -> dict[str, float]:
    return asdict(found) | {"contrast": found.contrast}


def analyse_heads(subject: Subject) -> Parts:
    model = attention.require_vit(subject.model)
    found = attention.measure_heads(model, subject.images)
    count, (height, width) = len(subject.images), model.config.image_size
    means = [attention.patch_distances(model, layer).mean() for layer in range(len(model.blocks))]
    uniform = float(torch.stack(means).mean())
    drawn = drawings.draw_heads(found.distance.numpy(), "Mean attention distance, pixels", uniform, "uniform attention")
    numbers = {"images": count, "unit": "pixels", "even": uniform, "distance": found.distance.tolist()}
    yield Part(
        "attention-distance",
        "Attention distance",
        f"Mean distance in pixels between a patch and the patches it attends to, over {count} images of {width} x "
        f"{height} pixels. Low: local, like a convolution. At the dashed line, {uniform:.0f} pixels: attention to the "
        "whole image.",
        {"": Drawing(drawn, numbers)},
    )
    keys = max(model.config.grid) if model.config.axial else model.config.tokens
    largest, outside = math.log(keys), 100 * float(found.outside.mean())
    drawn = drawings.draw_heads(found.entropy.numpy(), "Attention entropy, nats", largest, "uniform attention")
    numbers = {"images": count, "unit": "nats", "entropy": found.entropy.tolist(), "outside": found.outside.tolist()}
    elsewhere = f" {outside:.0f} % of it goes to the class token and registers." if model.config.prefix else ""
    yield Part(
        "attention-entropy",
        "Attention entropy",
        f"How widely a head spreads its attention: 0 if every patch attends to a single token, {largest:.2f} (dashed) "
        f"if it attends to all {keys} equally.{elsewhere}",
        {"": Drawing(drawn, numbers)},
    )


def analyse_token_norms(subject: Subject) -> Parts:
    found = tokens.outliers(attention.require_vit(subject.model), subject.images)
    median = float(found.norms.median())
    ratios = found.norms.numpy() / max(median, 1e-30)
    counts, edges = np.histogram(ratios, bins=60)
    numbers = {"share": found.share, "images": found.images, "largest": found.largest, "median": median,
               "counts": counts.tolist(), "edges": edges.round(4).tolist()}  # fmt: skip
    drawn = drawings.draw_histogram(
        ratios, "Patches by the norm of their last token", "norm / median norm", tokens.OUTLYING,
        f"outliers: above {tokens.OUTLYING:g} medians",
    )  # fmt: skip
    result = "No patch is above the line: this model has no such artefacts."
    if found.share:
        result = f"{100 * found.share:.2f} % of the patches are, in {100 * found.images:.0f} % of the images."
    yield Part(
        "token-norms",
        "Token norms",
        "Large models store global information in some background patches, whose tokens then have a norm far above the "
        f"median and disturb attention maps; register tokens prevent this. {result} The largest norm is "
        f"{found.largest:.1f} medians.",
        {"": Drawing(drawn, numbers)},
    )


def analyse_layer_similarity(subject: Subject) -> Parts:
    own = tokens.pool_tokens(subject.model, subject.images)
    found, stage = tokens.cka_matrix(own, own).numpy(), _stage_name(subject.model)
    drawn = drawings.draw_matrix(found, f"Similarity of this model's {stage}s", stage, stage, "CKA")
    figures = {"": Drawing(drawn, {"images": len(subject.images), "cka": found.round(4).tolist()})}
    words = ""
    if subject.against:
        other = subject.against
        resized = torch.nn.functional.interpolate(subject.images.float(), other.size, mode="bilinear", antialias=True)
        theirs = tokens.pool_tokens(other.model, resized.round().to(torch.uint8))
        between = tokens.cka_matrix(own, theirs).numpy()
        drawn = drawings.draw_matrix(
            between, "Similarity with the other model", f"{stage} of this model",
            f"{_stage_name(other.model)} of {subject.other}", "CKA",
        )  # fmt: skip
        figures["against"] = Drawing(drawn, {"other": subject.other, "cka": between.round(4).tolist()})
        words = f" The second figure compares with {subject.other}."
    yield Part(
        "layer-similarity",
        f"Similarity of {stage}s",
        f"Linear CKA of mean tokens over {len(subject.images)} images: 1 if two {stage}s represent the images "
        f"equivalently, 0 if they are unrelated. A block of one colour: similar {stage}s.{words}",
        figures,
    )


def _stage_name(model: Any) -> str:
    return "layer" if isinstance(model, ViT) else "stage"


# What predictions need ------------------------------------------------------------------------------------------------


def analyse_removal(subject: Subject) -> Parts:
    model = attention.require_vit(subject.model)
    depth = len(model.blocks)
    passes = depth * (1 + model.config.heads) * (depth + 1) / (2 * depth)
    single = subject.affordable_images(passes, 48, 0) >= min(LEAST, len(subject.images))
    images, labels = subject.labelled_images(subject.affordable_images(passes if single else depth / 2, 48))
    found = robust.measure_removal(model, images, labels, heads=single)
    drawn = drawings.draw_removed_layers(found.whole, found.layers.tolist())
    figures = {"layers": Drawing(drawn, _removal_numbers(found, len(images), found.layers, found.layers_chance))}
    words = "Single heads were not measured, to save time: use --thorough or a GPU."
    if found.heads is not None and found.heads_chance is not None:
        heads, words = _draw_head_removal(found, len(images), found.heads, found.heads_chance)
        figures = {"": heads} | figures
    significant = [
        str(layer + 1) for layer in torch.nonzero(found.layers_chance < SIGNIFICANT / depth).flatten().tolist()
    ]
    yield Part(
        "removal",
        "Importance of heads and layers",
        "Accuracy when the output of one head is set to zero, or one layer is skipped, without retraining; "
        f"{len(images)} images, {100 * found.whole:.1f} % with the full model. {words} Layers with a significant "
        f"effect: {', '.join(significant) or 'none'} (McNemar's test, p < {SIGNIFICANT:g}, Bonferroni-corrected).",
        figures,
    )


def _draw_head_removal(found: robust.Removal, images: int, heads: Tensor, chance: Tensor) -> tuple[Drawing, str]:
    change = 100 * (heads - found.whole).numpy()
    title = "Change of accuracy without each head, points"
    drawn = drawings.draw_matrix(change.T, title, "head", "layer", "points", diverging=True)
    significant = int((chance < SIGNIFICANT / heads.numel()).sum())
    words = (
        f"Red: accuracy falls without the head. One image is {100 / images:.1f} points. Heads with a significant "
        f"effect: {significant} of {heads.numel()}."
    )
    return Drawing(drawn, _removal_numbers(found, images, heads, chance)), words


def _removal_numbers(found: robust.Removal, images: int, without: Tensor, chance: Tensor) -> dict[str, Any]:
    return {"images": images, "whole": found.whole, "without": without.tolist(), "chance": chance.tolist()}


def analyse_occlusion(subject: Subject) -> Parts:
    images, labels = subject.labelled_images(subject.affordable_images(10, 128))
    hidden = robust.measure_occlusion(subject.model, images, labels, subject.grid, SHARES)
    grids = sorted({grid for grid in ((1, 1), (2, 2), (4, 4), subject.grid) if _is_divisible(images, grid)})
    mixed = robust.measure_shuffling(subject.model, images, labels, grids)
    count = len(images)
    occlusion = drawings.draw_lines([100 * share for share in SHARES], {"": hidden}, "Accuracy, %", "patches hidden, %")
    pieces = [a * b for a, b in grids]
    shuffling = drawings.draw_lines(pieces, {"": mixed}, "Accuracy, %", "shuffled pieces")
    intervals = [wilson(accuracy * count, count) for accuracy in (*hidden, *mixed)]
    widest = max(high - low for low, high in intervals)
    yield Part(
        "hidden-patches",
        "Hidden and shuffled patches",
        "First figure: a random fraction of the patches is replaced by the image's mean colour; accuracy that falls "
        "late shows that the model uses the whole image. Second figure: the image is split into a grid and reassembled "
        "in random order; accuracy that stays high shows that the model relies on texture rather than shape. "
        f"{count} images: the 95 % confidence intervals are at most ± {50 * widest:.0f} points.",
        {
            "": Drawing(occlusion, {"images": count, "shares": SHARES, "accuracy": hidden}),
            "shuffled": Drawing(shuffling, {"images": count, "grids": grids, "accuracy": mixed}),
        },
    )


def _is_divisible(images: Tensor, grid: tuple[int, int]) -> bool:
    return images.shape[2] % grid[0] == 0 and images.shape[3] % grid[1] == 0


def analyse_shifts(subject: Subject) -> Parts:
    count, has_head = subject.affordable_images(9, 48), subject.model.head is not None
    images, labels = subject.labelled_images(count) if has_head else (subject.images[:count], None)
    size = subject.model.config.image_size
    patch = size[0] // subject.grid[0] if isinstance(subject.model, ViT) else 16
    patch = min(patch, min(size) - 1)  # limit of reflection padding
    pixels = sorted({0, *np.unique(np.linspace(1, max(patch, 1), min(max(patch, 1), 8)).round().astype(int)).tolist()})
    found = {"this model": robust.measure_shifts(subject.model, images, labels, pixels)}
    if subject.against:
        found |= _shift_other_model(subject, subject.against, images, labels, pixels)
    figures = {}
    for name, kind, title in SHIFTED if has_head else SHIFTED[:1]:
        lines = {key: getattr(one, kind) for key, one in found.items() if not np.isnan(getattr(one, kind)).any()}
        drawn = drawings.draw_lines(pixels, lines, title, "shift, pixels", share=kind != "cosine")
        figures[name] = Drawing(drawn, {"images": len(images), "pixels": pixels, kind: lines})
    yield Part(
        "shifts",
        "Shifted images",
        f"{len(images)} images shifted down and to the right by up to {patch} pixel{'s' * (patch > 1)}, with "
        "reflection padding. Features of a convolution shift with the image and stay similar; a ViT splits the image "
        "into other patches until the shift is a whole patch. "
        + ("" if subject.against else "Use --against to compare with another model."),
        figures,
    )


def _shift_other_model(
    subject: Subject, other: Predictor, images: Tensor, labels: Tensor | None, pixels: list[int]
) -> dict[str, robust.Shifts]:
    """The shifts of the other model, if it has the same image size."""
    ours = subject.predictor
    if other.size != ours.size:
        theirs, own = (f"{one[1]} x {one[0]}" for one in (other.size, ours.size))
        subject.notes.append(f"Shifts of {subject.other} are omitted: its images are {theirs} pixels, not {own}.")
        return {}
    known = labels if subject.labels is not None and other.classes == ours.classes else None
    return {subject.other: robust.measure_shifts(other.model, images, known, pixels)}
