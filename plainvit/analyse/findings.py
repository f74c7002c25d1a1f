"""What a model has learned: each analysis yields figures with their data and text (Figures 6, 7, 10, 11 and 14).

for finding in analyse_distance(subject): finding.title, finding.text, finding.figure
"""

from dataclasses import asdict

import numpy as np
import torch

from plainvit.analyse import attention, drawings, embeddings
from plainvit.analyse.gallery import Cell, draw_cells
from plainvit.analyse.html import Html, element, embed_image, join
from plainvit.analyse.subject import Finding, Findings, Subject

SHOWN = 6  # images with maps


def analyse_filters(subject: Subject) -> Findings:
    filters = embeddings.filters(subject.model)
    explained, (height, width) = 100 * float(filters.variance.sum()), filters.tiles.shape[1:3]
    yield Finding(
        "filters",
        "Embedding filters",
        f"Principal components of the {height} x {width} kernels of the first layer, with the variance that each "
        f"explains (together {explained:.0f} %). Smooth patterns and colors are learned; noise remains from the "
        "initialization, and so do colors if the training images are gray. Gray is zero.",
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


def analyse_maps(subject: Subject) -> Findings:
    model, images = attention.require_global_attention(subject.model), subject.images[:SHOWN]
    maps = {
        "rollout": attention.rollout(model, images),
        "rollout, no residual": attention.rollout(model, images, residual=False),
        "last layer": attention.attention_maps(model, images)[:, -1].mean(1),
    }
    gradient = ""
    if model.head is not None:
        maps["relevance"] = attention.relevance(model, images)
        gradient = "; relevance weights attention by the gradient of the predicted class"
    names = subject.names[:SHOWN]
    predictions = subject.describe_predictions(SHOWN)
    captions = [f"{name}: {text}" if text else name for name, text in zip(names, predictions, strict=True)]
    tiles = []  # for each image: the image, and each map over it
    for number, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        overlays = {name: drawings.overlay_heat(image, heat[number].float().numpy()) for name, heat in maps.items()}
        tiles.append({"image": image} | overlays)
    rows = zip(tiles, predictions, strict=True)
    cells = [Cell(tile, name, prediction) for row, prediction in rows for name, tile in row.items()]
    yield Finding(
        "attention-maps",
        "Attention maps",
        "Which patches the prediction may depend on: yellow where a map is high, each map on its own scale. Rollout "
        "multiplies attention through the layers, with and without residual connections; the last layer is what the "
        f"head reads{gradient}. A bright object proves little: an untrained model can attend to it, too.",
        draw_cells(cells, len(maps) + 1),
        {"names": names} | {name: heat.float().round(decimals=6).tolist() for name, heat in maps.items()},
        html=_map_table(tiles, captions),
    )


def _map_table(tiles: list[dict[str, np.ndarray]], captions: list[str]) -> Html:
    """Images in rows under the names of the maps: sharper and smaller than one large figure."""
    rows = [element("div", *(element("b", name) for name in tiles[0]), class_="row")]
    for row, caption in zip(tiles, captions, strict=True):
        cells = [embed_image(tile, f"{name} of {caption}") for name, tile in row.items()]
        rows.append(join((element("div", *cells, class_="row"), element("p", caption, class_="note"))))
    scale = element("p", "min ", element("span", class_="ramp heat"), " max of each map", class_="note")
    return element("div", *rows, scale, class_="maps", style=f"--columns:{len(tiles[0])}")
