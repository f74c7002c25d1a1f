"""Interactive attention explorer: click a patch to see its attention in every layer and head.

The report embeds attention as small grey PNGs, one for each image and view (the mean of a layer's heads, or one head).
The class token has its own column in them and its own cell next to the image. What would make the file too large is
pooled or omitted, and the report says so.
"""

import base64
import io
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from plainvit.analyse.attention import AttentionReducer, require_global_attention
from plainvit.analyse.page import CRISP, Html, element, pluralize
from plainvit.models import ViT
from plainvit.models.inference import in_eval_mode

BUDGET = 6_120_000  # bytes of attention before it is compressed: as base64 8.2 MB at worst; the report stays below 10
IMAGES = 6
COARSEST = 6  # keys along a side; coarser maps of single heads are not useful
DARK = 48  # median pixel value, of 255


@dataclass
class Plan:
    """Which attention the report embeds."""

    images: int
    keys: tuple[int, int]  # grid of the layer means, may be coarser than the patches
    head_keys: tuple[int, int]  # grid of single heads
    heads: list[list[int]]  # single heads of each layer

    def size(self, queries: int) -> int:
        """Bytes before compression."""
        means, single = len(self.heads), sum(map(len, self.heads))
        cells = means * (self.keys[0] * self.keys[1] + 1) + single * (self.head_keys[0] * self.head_keys[1] + 1)
        return self.images * queries * cells


def plan_explorer(model: ViT, images: int, budget: int = BUDGET) -> Plan:
    """The first plan within the budget; if there is none, the smallest one."""
    (h, w), plans = model.config.grid, _list_plans(model, min(images, IMAGES))
    queries = h * w + (model.config.prefix > 0)
    return next((candidate for candidate in plans if candidate.size(queries) <= budget), plans[-1])


def _list_plans(model: ViT, images: int) -> list[Plan]:
    """From everything to less: fewer images, then coarser maps, then the heads of fewer layers, then no heads."""
    (h, w), layers, heads = model.config.grid, len(model.blocks), list(range(model.config.heads))
    full, half, quarter, *coarser = [(-(-h // factor), -(-w // factor)) for factor in (1, 2, 4, 8, 16, 32)]
    single = [full, *(pooled for pooled in (half, quarter) if max(pooled) >= COARSEST)]
    plans = []
    for stride in (1, 2, 3, 4, 6, 8, layers, 0):  # every so many layers with single heads, always with the last
        chosen = [heads if stride and (layers - 1 - layer) % stride == 0 else [] for layer in range(layers)]
        for count in range(images, 0, -1):
            grids = itertools.product(single if stride else single[-1:], (full, half))
            plans += [Plan(count, keys, head_keys, chosen) for head_keys, keys in grids]
    return [*plans, *(Plan(1, keys, single[-1], [[]] * layers) for keys in (quarter, *coarser))]


class Views(NamedTuple):
    """Attention of one image: for each layer and for each single head the result of `_attention_matrix`."""

    means: list[tuple[np.ndarray, np.ndarray]]
    singles: list[tuple[np.ndarray, np.ndarray]]


@torch.no_grad()
@in_eval_mode
def views(model: ViT, image: Tensor, plan: Plan) -> Views:
    """Views of one image [3, H, W] from one forward pass."""
    computed = Views([], [])

    def add(layer: int, attention: Tensor) -> None:
        computed.means.append(_attention_matrix(model, attention[0].mean(0), plan.keys))
        for head in plan.heads[layer]:
            computed.singles.append(_attention_matrix(model, attention[0, head], plan.head_keys))

    require_global_attention(model)(image[None].to(model.embedding.weight.device), AttentionReducer(add))
    return computed


def _attention_matrix(model: ViT, attention: Tensor, keys: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """[N, N] -> uint8 [queries, keys], each row scaled by its maximum; and the maxima in thousandths.

    A class token adds a last row, and a last column with its fraction of the attention (255: all of it).
    """
    prefix, grid = model.config.prefix, model.config.grid
    rows = torch.cat((attention[prefix:], attention[: min(prefix, 1)])).float()  # [queries, N]: patches, then the token
    weights, token = rows[:, prefix:], rows[:, : min(prefix, 1)]
    if keys != grid:
        weights = F.adaptive_avg_pool2d(weights.reshape(-1, 1, *grid), keys).flatten(1)
        weights = weights * (grid[0] * grid[1] / (keys[0] * keys[1]))  # sums instead of means
    largest = weights.amax(1, keepdim=True)
    scaled = torch.cat((weights / largest.clamp(min=torch.finfo(weights.dtype).tiny), token), 1)
    grey = (255 * scaled).round().to(torch.uint8)  # [queries, keys (+ 1)]
    return grey.cpu().numpy(), (1000 * largest[:, 0]).round().int().cpu().numpy()


def explorer(model: ViT, images: Tensor, rows: list[dict[str, Any]], plan: Plan) -> tuple[Html, str]:
    """(HTML, script). `rows` has for each image: source (a data: URL), name, prediction."""
    height, width = model.config.image_size
    images = images[: plan.images]
    computed = [views(model, image, plan) for image in images]
    crisp = max(height, width) < CRISP
    data = {
        "images": [row | {"width": width, "height": height} for row in rows[: plan.images]],
        "grid": model.config.grid,
        "keys": plan.keys,
        "tokens": model.config.tokens,
        "headKeys": plan.head_keys,
        "token": "class token" if model.config.class_token else "first token" if model.config.prefix else "",
        "reads": model.config.pool == "token",
        "heat": crisp or float(images.float().median()) < DARK,  # shading hides details of small and dark images
        "crisp": crisp,
        "heads": plan.heads,
        "means": [[_png(view) for view, _ in image.means] for image in computed],
        "largest": [[largest.tolist() for _, largest in image.means] for image in computed],
        "singles": [[_png(view) for view, _ in image.singles] for image in computed],
        "largestSingles": [[largest.tolist() for _, largest in image.singles] for image in computed],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no name can close the element
    body = element(
        "div",
        Html(f'<script type="application/json" id="explorer-data">{text}</script>'),
        element("div", id="explorer-stage", class_="explorer"),
        element("noscript", element("p", "The explorer needs JavaScript; the rest of the report works without it.")),
    )
    return body, Path(__file__).with_name("explorer.js").read_text(encoding="utf-8")


def describe_omissions(plan: Plan, model: ViT, images: int) -> str:
    """What the report omits to stay small; empty if nothing."""
    layers, with_heads = len(plan.heads), sum(map(bool, plan.heads))
    if plan == _list_plans(model, min(images, IMAGES))[0]:
        return ""
    keys, head_keys = (" x ".join(map(str, grid)) for grid in (plan.keys, plan.head_keys))
    heads = f"the heads of {with_heads} of {layers} layers as maps of {head_keys}" if with_heads else "no single heads"
    images_shown = pluralize(plan.images, "image")
    return f"To keep this file below 10 MB, the explorer shows {images_shown}, layers as maps of {keys}, and {heads}."


def _png(view: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(view).save(buffer, "PNG", compress_level=9)
    return base64.b64encode(buffer.getvalue()).decode()
