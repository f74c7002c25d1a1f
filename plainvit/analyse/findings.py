"""What a model has learned, apart from maps: each analysis yields figures with their data and text.

for finding in analyse_distance(subject): finding.title, finding.text, finding.figure
"""

from dataclasses import asdict

import torch

from plainvit.analyse import attention, drawings, embeddings
from plainvit.analyse.subject import Finding, Findings, Subject


def analyse_filters(subject: Subject) -> Findings:
    filters = embeddings.filters(subject.model)
    explained, (height, width) = 100 * float(filters.variance.sum()), filters.tiles.shape[1:3]
    yield Finding(
        "filters",
        "Embedding filters",
        f"Principal components of the {height} x {width} kernels of the first layer, with the variance that each "
        f"explains (together {explained:.0f} %). Smooth patterns and colours are learned; noise remains from the "
        "initialisation, and so do colours if the training images are grey. Grey is zero.",
        drawings.draw_filters(filters),
        {"variance": filters.variance.tolist(), "tiles": filters.tiles.round(5).tolist()},
    )


def analyse_positions(subject: Subject) -> Findings:
    model = attention.require_vit(subject.model)
    similar, (h, w) = embeddings.similarity(model), model.config.grid
    structure = embeddings.structure(similar)
    yield Finding(
        "positions",
        "Position similarity",
        "Each tile shows the cosine similarity of one patch's position embedding with all others. Mean similarity "
        f"{structure.row:.2f} in a row, {structure.column:.2f} in a column, {structure.elsewhere:.2f} elsewhere: an "
        "embedding that encodes the grid is more similar within rows and columns.",
        drawings.draw_similarity(similar, f"Similarity of positions, {h} x {w} patches"),
        {"grid": (h, w), **asdict(structure), "similarity": similar.round(4).tolist()},
    )


def analyse_distance(subject: Subject) -> Findings:
    model = attention.require_vit(subject.model)
    distance = attention.attention_distance(model, subject.images)
    count, (height, width) = len(subject.images), model.config.image_size
    means = [attention.patch_distances(model, layer).mean() for layer in range(len(model.blocks))]
    uniform = float(torch.stack(means).mean())
    yield Finding(
        "attention-distance",
        "Attention distance",
        f"Mean distance in pixels between a patch and the patches it attends to, over {count} images of {width} x "
        f"{height} pixels. Low: local, like a convolution. At the dashed line, {uniform:.0f} pixels: attention to the "
        "whole image.",
        drawings.draw_heads(distance.numpy(), "Mean attention distance, pixels", uniform),
        {"images": count, "unit": "pixels", "uniform": uniform, "distance": distance.tolist()},
    )
