"""The explorer: a page in which one clicks a patch and sees where it looks, layer by layer and head by head.

Attention is in the page as small grey pictures, one for each image and view (a layer's mean over heads, or one head).
The class token, which has no place in the image, has a column of its own there and a cell of its own beside the image.
What would make the page too large is pooled or left out, and the page says so.
"""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from plainvit.analyse.attention import Reduced, whole
from plainvit.analyse.drawings import hides_shade
from plainvit.analyse.page import CRISP, Html, element
from plainvit.models import ViT
from plainvit.models.inference import in_eval_mode

BUDGET = 6_120_000  # bytes of attention before it is compressed: as base64 8.2 MB at worst; the page stays below 10
IMAGES = 6
COARSEST = 6  # keys along a side: below, a map of a head says nothing


@dataclass
class Plan:
    """Which attention goes into the page."""

    images: int
    keys: tuple[int, int]  # the grid of keys of a layer's mean, perhaps coarser than the patches
    head_keys: tuple[int, int]  # the same of single heads
    heads: list[list[int]]  # of each layer, those that are there besides the mean

    def size(self, queries: int) -> int:
        """Bytes before compression."""
        means, single = len(self.heads), sum(map(len, self.heads))
        cells = means * (self.keys[0] * self.keys[1] + 1) + single * (self.head_keys[0] * self.head_keys[1] + 1)
        return self.images * queries * cells


def plan(model: ViT, images: int, budget: int = BUDGET) -> Plan:
    """The first of the plans that fits; the coarsest means of one image where none does."""
    found = None
    for found in _plans(model, min(images, IMAGES)):
        if found.size(_queries(model)) <= budget:
            return found
    assert found is not None
    return found


def _plans(model: ViT, images: int) -> Iterator[Plan]:
    """From all there is to ever less: images go first, then fineness, then the heads of some layers, then of all."""
    grid, layers, heads = model.config.grid, len(model.blocks), list(range(model.config.heads))
    single = [_pooled(grid, times) for times in (1, 2, 4, 8) if times == 1 or max(_pooled(grid, times)) >= COARSEST]
    for apart in (1, 2, 3, 4, 6, 8, layers, 0):  # between layers whose heads are there; the last layer always is
        chosen = [heads if apart and (layers - 1 - layer) % apart == 0 else [] for layer in range(layers)]
        for count in range(images, 0, -1):
            for head_keys in single if apart else single[-1:]:
                for times in (1, 2):
                    yield Plan(count, _pooled(grid, times), head_keys, chosen)
    for times in (4, 8, 16, 32):
        yield Plan(1, _pooled(grid, times), single[-1], [[] for _ in range(layers)])


def _pooled(grid: tuple[int, int], times: int) -> tuple[int, int]:
    return -(-grid[0] // times), -(-grid[1] // times)


def _queries(model: ViT) -> int:
    return model.config.grid[0] * model.config.grid[1] + (model.config.prefix > 0)


@dataclass
class Views:
    """Of one image: matrices as `_matrix` makes them, and the largest of each of their rows."""

    means: list[np.ndarray]
    largest: list[np.ndarray]  # [queries] of each layer: the share of attention at the brightest place, in per mille
    singles: list[np.ndarray]
    largest_singles: list[np.ndarray]  # the same of each head


@torch.no_grad()
@in_eval_mode
def views(model: ViT, image: Tensor, wanted: Plan) -> Views:
    """Of one image [3, H, W], by one pass that keeps one layer at a time."""
    found = Views([], [], [], [])

    def use(layer: int, attention: Tensor) -> None:
        mean, largest = _matrix(model, attention[0].mean(0), wanted.keys)
        found.means.append(mean)
        found.largest.append(largest)
        for head in wanted.heads[layer]:
            single, largest = _matrix(model, attention[0, head], wanted.head_keys)
            found.singles.append(single)
            found.largest_singles.append(largest)

    whole(model)(image[None].to(model.embedding.weight.device), Reduced(use))
    return found


def _matrix(model: ViT, attention: Tensor, keys: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """[N, N] -> uint8 [patches, keys], each row to its own largest; and that in per mille.

    With a class token there is a row for it, the last, and a column: its share of all attention, 255 for the whole.
    """
    prefix, grid = model.config.prefix, model.config.grid
    rows = [attention[prefix:, prefix:], attention[:1, prefix:]] if prefix else [attention]
    found = torch.cat(rows).float()  # [queries, n]
    token = torch.cat((attention[prefix:, :1], attention[:1, :1])).float() if prefix else found[:, :0]  # [queries, 1]
    if keys != grid:
        found = F.adaptive_avg_pool2d(found.view(-1, 1, *grid), keys).flatten(1)
        found = found * (grid[0] * grid[1] / (keys[0] * keys[1]))  # the attention of all patches of a place
    largest = found.amax(1, keepdim=True)
    shares = torch.cat((found / largest.clamp(min=torch.finfo(found.dtype).tiny), token), 1)
    shown = (255 * shares).round().to(torch.uint8)  # [queries, keys (+ 1)]
    return shown.cpu().numpy(), (1000 * largest[:, 0]).round().int().cpu().numpy()


def explorer(model: ViT, images: Tensor, shown: list[dict[str, Any]], wanted: Plan) -> tuple[Html, str]:
    """(what goes into the page, its script). `shown` has of each image: source (a data: address), name, guess."""
    height, width = model.config.image_size
    seen = [views(model, image, wanted) for image in images[: wanted.images]]
    data = {
        "images": [one | {"width": width, "height": height} for one in shown[: wanted.images]],
        "grid": model.config.grid,
        "keys": wanted.keys,
        "tokens": model.config.tokens,
        "headKeys": wanted.head_keys,
        "token": "class token" if model.config.class_token else "first token" if model.config.prefix else "",
        "reads": model.config.pool == "token",
        "heat": hides_shade(images[: wanted.images].permute(0, 2, 3, 1).numpy()),
        "crisp": max(height, width) < CRISP,
        "heads": wanted.heads,
        "means": [[_png(view) for view in one.means] for one in seen],
        "largest": [[view.tolist() for view in one.largest] for one in seen],
        "singles": [[_png(view) for view in one.singles] for one in seen],
        "largestSingles": [[view.tolist() for view in one.largest_singles] for one in seen],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no name can end the element
    without = "The explorer needs a browser with JavaScript; all else on this page does not."
    body = element(
        "div",
        Html(f'<script type="application/json" id="explorer-data">{text}</script>'),
        element("div", id="explorer-stage", class_="explorer"),
        element("noscript", element("p", without)),
    )
    return body, Path(__file__).with_name("explorer.js").read_text(encoding="utf-8")


def omissions(wanted: Plan, model: ViT, images: int) -> str:
    """What was left out, in words; empty where all is there."""
    there, layers = [layer for layer, heads in enumerate(wanted.heads, 1) if heads], len(wanted.heads)
    words = []
    if wanted.images < min(images, IMAGES):
        words.append(f"it shows {wanted.images} image{'s' if wanted.images > 1 else ''}")
    if wanted.keys != model.config.grid:
        words.append(f"maps of layers are pooled to {wanted.keys[0]} x {wanted.keys[1]}")
    if there and wanted.head_keys != model.config.grid:
        words.append(f"maps of heads are pooled to {wanted.head_keys[0]} x {wanted.head_keys[1]}")
    if not there:
        words.append("single heads are left out")
    elif len(there) < layers:
        words.append(f"single heads are there for {len(there)} of {layers} layers")
    return f"To stay below 10 MB, {', '.join(words)}." if words else ""


def _png(view: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(view).save(buffer, "PNG", compress_level=9)
    return base64.b64encode(buffer.getvalue()).decode()
