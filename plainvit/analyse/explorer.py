"""The explorer: a page in which one clicks a patch and sees where it looks, layer by layer and head by head.

Attention is in the page as small grey pictures, one for each image and view (a layer's mean over heads, or one head).
What would make the page too large is left out, and the page says so: first heads, then the fineness of the keys.
"""

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from plainvit.analyse.attention import Reduced, check
from plainvit.analyse.page import Html, element
from plainvit.models import ViT

BUDGET = 4_000_000  # bytes of attention before it is compressed: the page stays below 10 MB whatever it is


@dataclass
class Plan:
    """Which attention goes into the page."""

    keys: tuple[int, int]  # the grid of keys, perhaps coarser than the patches
    heads: list[list[int]]  # of each layer, those that are there besides the mean


def plan(model: ViT, images: int) -> Plan:
    """All means, keys pooled until they fit; then the heads of as many layers as there is room for, spread evenly."""
    (h, w), layers, heads = model.config.grid, len(model.blocks), model.config.heads
    queries, keys = h * w + 1, (h, w)
    while layers * queries * keys[0] * keys[1] * images > BUDGET and max(keys) > 4:
        keys = (max(keys[0] // 2, 1), max(keys[1] // 2, 1))
    one = queries * keys[0] * keys[1] * images
    room = max((BUDGET - layers * one) // (heads * one), 0)
    chosen = set(np.linspace(0, layers - 1, min(room, layers)).round().astype(int).tolist()) if room else set()
    return Plan(keys, [list(range(heads)) if layer in chosen else [] for layer in range(layers)])


@torch.no_grad()
def views(model: ViT, image: Tensor, wanted: Plan) -> list[np.ndarray]:
    """Of one image [3, H, W]: matrices [queries, keys] as uint8, each row to its own largest; means, then heads."""
    means: list[np.ndarray] = []
    singles: list[np.ndarray] = []

    def use(layer: int, attention: Tensor) -> None:
        means.append(_matrix(model, attention[0].mean(0), wanted.keys))
        singles.extend(_matrix(model, attention[0, head], wanted.keys) for head in wanted.heads[layer])

    check(model).eval()(image[None].to(model.embedding.weight.device), Reduced(use))
    return means + singles


def _matrix(model: ViT, attention: Tensor, keys: tuple[int, int]) -> np.ndarray:
    """[N, N] -> [patches (+ 1 for the class token), keys]."""
    prefix, grid = model.config.prefix, model.config.grid
    rows = [attention[prefix:, prefix:], attention[:1, prefix:]] if prefix else [attention]
    found = torch.cat(rows).float()  # [queries, n]
    if keys != grid:
        found = F.adaptive_avg_pool2d(found.view(-1, 1, *grid), keys).flatten(1)
    found = found / found.amax(1, keepdim=True).clamp(min=torch.finfo(found.dtype).tiny)
    return (255 * found).round().to(torch.uint8).cpu().numpy()


def explorer(model: ViT, images: Tensor, shown: list[dict[str, Any]]) -> tuple[Html, str]:
    """(what goes into the page, its script). `shown` has of each image: source (a data: address), name, guess."""
    wanted = plan(model, len(images))
    layers, at = [], len(wanted.heads)
    for number, heads in enumerate(wanted.heads):
        layers.append(
            {
                "number": number,
                "mean": number,
                "heads": [{"number": head, "view": at + i} for i, head in enumerate(heads)],
            }
        )
        at += len(heads)
    height, width = model.config.image_size
    data = {
        "images": [one | {"width": width, "height": height} for one in shown],
        "grid": model.config.grid,
        "keys": wanted.keys,
        "token": bool(model.config.prefix),
        "layers": layers,
        "maps": [[_png(view) for view in views(model, image, wanted)] for image in images],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no name can end the element
    body = element(
        "div",
        Html(f'<script type="application/json" id="explorer-data">{text}</script>'),
        element("div", id="explorer-stage", class_="explorer"),
        element(
            "noscript", element("p", "The explorer needs a browser with JavaScript; all else on this page does not.")
        ),
    )
    return body, Path(__file__).with_name("explorer.js").read_text(encoding="utf-8")


def omissions(wanted: Plan, model: ViT) -> str:
    """What was left out, in words; empty where all is there."""
    missing = sum(not heads for heads in wanted.heads)
    words = []
    if wanted.keys != model.config.grid:
        words.append(f"keys are pooled to {wanted.keys[0]} x {wanted.keys[1]}")
    if missing:
        words.append(f"single heads are there for {len(wanted.heads) - missing} of {len(wanted.heads)} layers")
    return "To keep the page small, " + " and ".join(words) + "." if words else ""


def _png(view: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(view).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
