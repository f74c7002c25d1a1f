"""Interactive attention explorer: click a patch to see its attention in every layer and head.

The report embeds attention as small grey PNGs, one for each image and view (the mean of a layer's heads, or one head).
The class token has its own column in them and its own cell next to the image. What would make the file too large is
pooled or omitted, and the report says so.
"""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from plainvit.analyse.attention import AttentionReducer, require_global_attention
from plainvit.analyse.page import CRISP, Html, element
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


def plan(model: ViT, images: int, budget: int = BUDGET) -> Plan:
    """The first plan within the budget; if there is none, the smallest one."""
    (h, w), candidate = model.config.grid, None
    for candidate in _list_plans(model, min(images, IMAGES)):
        if candidate.size(h * w + (model.config.prefix > 0)) <= budget:
            return candidate
    assert candidate is not None
    return candidate


def _list_plans(model: ViT, images: int) -> Iterator[Plan]:
    """From everything to less: fewer images, then coarser maps, then the heads of fewer layers, then no heads."""
    (h, w), layers, heads = model.config.grid, len(model.blocks), list(range(model.config.heads))
    full, half, quarter, *coarser = [(-(-h // factor), -(-w // factor)) for factor in (1, 2, 4, 8, 16, 32)]
    single = [full, *(pooled for pooled in (half, quarter) if max(pooled) >= COARSEST)]
    for stride in (1, 2, 3, 4, 6, 8, layers, 0):  # every so many layers with single heads, always with the last
        chosen = [heads if stride and (layers - 1 - layer) % stride == 0 else [] for layer in range(layers)]
        for count in range(images, 0, -1):
            for head_keys in single if stride else single[-1:]:
                yield Plan(count, full, head_keys, chosen)
                yield Plan(count, half, head_keys, chosen)
    for keys in (quarter, *coarser):
        yield Plan(1, keys, single[-1], [[] for _ in range(layers)])


class Views(NamedTuple):
    """Attention of one image: for each layer and for each single head the result of `_attention_matrix`."""

    means: list[tuple[np.ndarray, np.ndarray]]
    singles: list[tuple[np.ndarray, np.ndarray]]


@torch.no_grad()
@in_eval_mode
def views(model: ViT, image: Tensor, wanted: Plan) -> Views:
    """Views of one image [3, H, W] from one forward pass."""
    found = Views([], [])

    def add(layer: int, attention: Tensor) -> None:
        found.means.append(_attention_matrix(model, attention[0].mean(0), wanted.keys))
        for head in wanted.heads[layer]:
            found.singles.append(_attention_matrix(model, attention[0, head], wanted.head_keys))

    require_global_attention(model)(image[None].to(model.embedding.weight.device), AttentionReducer(add))
    return found


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
    shares = torch.cat((weights / largest.clamp(min=torch.finfo(weights.dtype).tiny), token), 1)
    shown = (255 * shares).round().to(torch.uint8)  # [queries, keys (+ 1)]
    return shown.cpu().numpy(), (1000 * largest[:, 0]).round().int().cpu().numpy()


def explorer(model: ViT, images: Tensor, shown: list[dict[str, Any]], wanted: Plan) -> tuple[Html, str]:
    """(HTML, script). `shown` has for each image: source (a data: URL), name, prediction."""
    height, width = model.config.image_size
    images = images[: wanted.images]
    seen = [views(model, image, wanted) for image in images]
    crisp = max(height, width) < CRISP
    data = {
        "images": [one | {"width": width, "height": height} for one in shown[: wanted.images]],
        "grid": model.config.grid,
        "keys": wanted.keys,
        "tokens": model.config.tokens,
        "headKeys": wanted.head_keys,
        "token": "class token" if model.config.class_token else "first token" if model.config.prefix else "",
        "reads": model.config.pool == "token",
        "heat": crisp or float(images.float().median()) < DARK,  # shading hides details of small and dark images
        "crisp": crisp,
        "heads": wanted.heads,
        "means": [[_png(view) for view, _ in one.means] for one in seen],
        "largest": [[largest.tolist() for _, largest in one.means] for one in seen],
        "singles": [[_png(view) for view, _ in one.singles] for one in seen],
        "largestSingles": [[largest.tolist() for _, largest in one.singles] for one in seen],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no name can close the element
    body = element(
        "div",
        Html(f'<script type="application/json" id="explorer-data">{text}</script>'),
        element("div", id="explorer-stage", class_="explorer"),
        element("noscript", element("p", "The explorer needs JavaScript; the rest of the report works without it.")),
    )
    return body, Path(__file__).with_name("explorer.js").read_text(encoding="utf-8")


def describe_omissions(wanted: Plan, model: ViT, images: int) -> str:
    """What the report omits to stay small; empty if nothing."""
    grid, with_heads, layers = model.config.grid, sum(map(bool, wanted.heads)), len(wanted.heads)
    words = []
    if wanted.images < min(images, IMAGES):
        words.append(f"the explorer shows {wanted.images} image{'s' * (wanted.images > 1)}")
    if wanted.keys != grid:
        words.append(f"maps of layers are pooled to {wanted.keys[0]} x {wanted.keys[1]}")
    if with_heads and wanted.head_keys != grid:
        words.append(f"maps of heads are pooled to {wanted.head_keys[0]} x {wanted.head_keys[1]}")
    if with_heads < layers:
        words.append(f"single heads are shown for {with_heads or 'none'} of {layers} layers")
    return f"To keep this file below 10 MB, {', '.join(words)}." if words else ""


def _png(view: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(view).save(buffer, "PNG", compress_level=9)
    return base64.b64encode(buffer.getvalue()).decode()
