"""Attention maps of several images (Figures 6 and 14)."""

import numpy as np

from plainvit.analyse import attention
from plainvit.analyse.drawings import overlay_heat
from plainvit.analyse.gallery import Cell, draw_cells
from plainvit.analyse.page import Html, element, embed_image, join
from plainvit.analyse.subject import Finding, Findings, Subject

SHOWN = 6  # images


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
    tiles = _make_tiles(images.permute(0, 2, 3, 1).numpy(), {name: one.float().numpy() for name, one in maps.items()})
    rows = zip(tiles, predictions, strict=True)
    cells = [Cell(tile, name, prediction) for row, prediction in rows for name, tile in row.items()]
    yield Finding(
        "attention-maps",
        "Attention maps",
        "Which patches the prediction may depend on: yellow where a map is high, each map on its own scale. Rollout "
        "multiplies attention through the layers, with and without residual connections; the last layer is what the "
        f"head reads{gradient}. A bright object proves little: an untrained model can attend to it, too.",
        draw_cells(cells, len(maps) + 1),
        {"names": names} | {name: one.float().round(decimals=6).tolist() for name, one in maps.items()},
        html=_map_table(tiles, captions),
    )


def _make_tiles(images: np.ndarray, maps: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """For each image [H, W, 3]: the image, and each map over it."""
    return [
        {"image": image} | {name: overlay_heat(image, values[row]) for name, values in maps.items()}
        for row, image in enumerate(images)
    ]


def _map_table(tiles: list[dict[str, np.ndarray]], captions: list[str]) -> Html:
    """Images in rows under the names of the maps: sharper and smaller than one large figure."""
    rows = [element("div", *(element("b", name) for name in tiles[0]), class_="row")]
    for row, caption in zip(tiles, captions, strict=True):
        cells = [embed_image(tile, f"{name} of {caption}") for name, tile in row.items()]
        rows.append(join((element("div", *cells, class_="row"), element("p", caption, class_="note"))))
    scale = element("p", "min ", element("span", class_="ramp heat"), " max of each map", class_="note")
    return element("div", *rows, scale, class_="maps", style=f"--columns:{len(tiles[0])}")
