"""The analyses of a model except for maps: each yields figures, their data and text.

for finding in analyse_heads(subject): finding.title, finding.text, finding.drawings

First what the model has learned (filters, positions, heads, tokens, layers), then what its predictions depend on.
"""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from plainvit.analyse import attention, drawings, embeddings, robust, tokens
from plainvit.analyse.subject import Drawing, Finding, Findings, Subject
from plainvit.evaluate.statistics import wilson
from plainvit.models import ViT

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)  # fractions of hidden patches
SIGNIFICANT = 0.05  # p-value of a claim in the text


# What is learned ------------------------------------------------------------------------------------------------------


def analyse_filters(subject: Subject) -> Findings:
    found = embeddings.filters(subject.model)
    explained, (height, width) = 100 * float(found.variance.sum()), found.tiles.shape[1:3]
    is_grey = bool((subject.images == subject.images[:, :1]).all())
    learned = "Smooth patterns and colours are learned; noise remains from the initialisation."
    if is_grey:
        learned = "Smooth patterns are learned; noise, and the colours of grey images, remain from the initialisation."
    numbers = {"variance": found.variance.tolist(), "tiles": found.tiles.round(5).tolist()}
    yield Finding(
        "filters",
        "Embedding filters",
        f"Principal components of the {height} x {width} kernels of the first layer, with the variance that each "
        f"explains (together {explained:.0f} %). {learned} Grey is zero.",
        {"": Drawing(drawings.draw_filters(found), numbers)},
    )


def analyse_positions(subject: Subject) -> Findings:
    model = attention.require_vit(subject.model)
    similar, (h, w) = embeddings.similarity(model), model.config.grid
    found, chance = embeddings.structure(similar), embeddings.permutation_test(similar)
    numbers = {"grid": (h, w), **asdict(found), "contrast": found.contrast, "chance": chance._asdict()}
    numbers["similarity"] = similar.round(4).tolist()
    drawn = drawings.draw_similarity(similar, f"Similarity of positions, {h} x {w} patches")
    yield Finding(
        "positions",
        "Position similarity",
        "Each tile shows the cosine similarity of one patch's position embedding with all others. "
        f"{describe_structure(found, chance)}",
        {"": Drawing(drawn, numbers)},
    )


def describe_structure(found: embeddings.Structure, chance: embeddings.PValues) -> str:
    """Whether the position embeddings encode the rows and columns of the grid."""
    rows, columns = (p_value < SIGNIFICANT / 2 for p_value in chance)  # two tests
    encoded = {
        (True, True): "the rows and columns",
        (True, False): "the rows, but not the columns,",
        (False, True): "the columns, but not the rows,",
        (False, False): "neither rows nor columns",
    }
    return (
        f"The positions encode {encoded[rows, columns]} of the grid: mean similarity {found.row:.2f} within a row (p "
        f"{chance.row:.3f}), {found.column:.2f} within a column (p {chance.column:.3f}), {found.elsewhere:.2f} "
        "elsewhere (p-values of a permutation test). Rank correlation of similarity and nearness: "
        f"{found.nearness:.2f}."
    )


def analyse_heads(subject: Subject) -> Findings:
    model = attention.require_vit(subject.model)
    found = attention.measure_heads(model, subject.images)
    count, (height, width) = len(subject.images), model.config.image_size
    means = [attention.patch_distances(model, layer).mean() for layer in range(len(model.blocks))]
    uniform = float(torch.stack(means).mean())
    drawn = drawings.draw_heads(found.distance.numpy(), "Mean attention distance, pixels", uniform)
    numbers = {"images": count, "unit": "pixels", "uniform": uniform, "distance": found.distance.tolist()}
    yield Finding(
        "attention-distance",
        "Attention distance",
        f"Mean distance in pixels between a patch and the patches it attends to, over {count} images of {width} x "
        f"{height} pixels. Low: local, like a convolution. At the dashed line, {uniform:.0f} pixels: attention to the "
        "whole image.",
        {"": Drawing(drawn, numbers)},
    )
    keys = max(model.config.grid) if model.config.axial else model.config.tokens
    largest, outside = math.log(keys), 100 * float(found.outside.mean())
    drawn = drawings.draw_heads(found.entropy.numpy(), "Attention entropy, nats", largest)
    numbers = {"images": count, "unit": "nats", "entropy": found.entropy.tolist(), "outside": found.outside.tolist()}
    elsewhere = f" {outside:.0f} % of it goes to the class token and registers." if model.config.prefix else ""
    yield Finding(
        "attention-entropy",
        "Attention entropy",
        f"How widely a head spreads its attention: 0 if every patch attends to a single token, {largest:.2f} (dashed) "
        f"if it attends to all {keys} equally.{elsewhere}",
        {"": Drawing(drawn, numbers)},
    )


def analyse_token_norms(subject: Subject) -> Findings:
    found = tokens.outliers(attention.require_vit(subject.model), subject.images)
    median = float(found.norms.median())
    ratios = found.norms.numpy() / max(median, 1e-30)
    counts, edges = np.histogram(ratios, bins=60)
    numbers = {"share": found.share, "images": found.images, "largest": found.largest, "median": median}
    numbers |= {"counts": counts.tolist(), "edges": edges.round(4).tolist()}
    drawn = drawings.draw_norms(ratios, tokens.OUTLYING)
    result = f"No patch is above {tokens.OUTLYING:g} medians: this model has no such artefacts."
    if found.share:
        result = (
            f"{100 * found.share:.2f} % of the patches are above {tokens.OUTLYING:g} medians, "
            f"in {100 * found.images:.0f} % of the images."
        )
    yield Finding(
        "token-norms",
        "Token norms",
        "Large models store global information in some background patches, whose tokens then have a norm far above the "
        f"median and disturb attention maps; register tokens prevent this. {result} The largest norm is "
        f"{found.largest:.1f} medians.",
        {"": Drawing(drawn, numbers)},
    )


def analyse_layer_similarity(subject: Subject) -> Findings:
    own = tokens.pool_tokens(subject.model, subject.images)
    found, stage = tokens.cka_matrix(own, own).numpy(), _stage_name(subject.model)
    drawn = drawings.draw_matrix(found, f"Similarity of this model's {stage}s", stage, stage, "CKA")
    figures = {"": Drawing(drawn, {"images": len(subject.images), "cka": found.round(4).tolist()})}
    text = ""
    if other := subject.against:
        resized = torch.nn.functional.interpolate(subject.images.float(), other.size, mode="bilinear", antialias=True)
        between = tokens.cka_matrix(own, tokens.pool_tokens(other.model, resized.round().to(torch.uint8))).numpy()
        labels = f"{stage} of this model", f"{_stage_name(other.model)} of {subject.other}"
        drawn = drawings.draw_matrix(between, "Similarity with the other model", *labels, "CKA")
        figures["against"] = Drawing(drawn, {"other": subject.other, "cka": between.round(4).tolist()})
        text = f" The second figure compares with {subject.other}."
    yield Finding(
        "layer-similarity",
        f"Similarity of {stage}s",
        f"Linear CKA of mean tokens over {len(subject.images)} images: 1 if two {stage}s represent the images "
        f"equivalently, 0 if they are unrelated. A block of one colour: similar {stage}s.{text}",
        figures,
    )


def _stage_name(model: Any) -> str:
    return "layer" if isinstance(model, ViT) else "stage"


# What predictions depend on -------------------------------------------------------------------------------------------


def analyse_removal(subject: Subject) -> Findings:
    model = attention.require_vit(subject.model)
    depth = len(model.blocks)
    images, labels = subject.labelled_images(subject.affordable_images(depth + 1, 128))
    found, count = robust.measure_removal(model, images, labels), len(images)
    significant = [str(layer) for layer, p in enumerate(found.p_values, 1) if p < SIGNIFICANT / depth]
    drawn = drawings.draw_removed_layers(found.full, found.layers)
    yield Finding(
        "removal",
        "Importance of layers",
        f"Accuracy when one layer is skipped, without retraining; {count} images, {100 * found.full:.1f} % with the "
        f"full model. Layers with a significant effect: {', '.join(significant) or 'none'} (McNemar's test, "
        f"p < {SIGNIFICANT:g}, Bonferroni-corrected).",
        {"": Drawing(drawn, {"images": count, **asdict(found)})},
    )


def analyse_occlusion(subject: Subject) -> Findings:
    images, labels = subject.labelled_images(subject.affordable_images(10, 128))
    count, (height, width) = len(images), images.shape[2:]
    hidden = robust.measure_occlusion(subject.model, images, labels, subject.grid, SHARES)
    grids = {(h, w) for h, w in ((1, 1), (2, 2), (4, 4), subject.grid) if height % h == 0 and width % w == 0}
    shuffled = robust.measure_shuffling(subject.model, images, labels, sorted(grids))
    occlusion = drawings.draw_lines(
        [100 * share for share in SHARES], {"": hidden}, "Accuracy with hidden patches, %", "patches hidden, %"
    )
    pieces = [h * w for h, w in sorted(grids)]
    shuffling = drawings.draw_lines(pieces, {"": shuffled}, "Accuracy with shuffled patches, %", "shuffled pieces")
    intervals = [wilson(accuracy * count, count) for accuracy in (*hidden, *shuffled)]
    widest = max(high - low for low, high in intervals)
    yield Finding(
        "hidden-patches",
        "Hidden and shuffled patches",
        "First figure: a random fraction of the patches is replaced by the image's mean colour; accuracy that falls "
        "late shows that the model uses the whole image. Second figure: the image is split into a grid and reassembled "
        "in random order; accuracy that stays high shows that the model relies on texture rather than shape. "
        f"{count} images: the 95 % confidence intervals are at most ± {50 * widest:.0f} points.",
        {
            "": Drawing(occlusion, {"images": count, "shares": SHARES, "accuracy": hidden}),
            "shuffled": Drawing(shuffling, {"images": count, "grids": sorted(grids), "accuracy": shuffled}),
        },
    )
