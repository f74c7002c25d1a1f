"""Interactive attention explorer: click a patch to see its attention in every layer and head.

The report embeds attention as small gray PNGs, one for each image and view (the mean of a layer's heads, or one head).
The class token has its own column in them and its own cell next to the image. What would make the file too large is
pooled or omitted, and the report says so.
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from plainvit.analyse.attention import reduce_attention, require_global_attention
from plainvit.analyse.html import CRISP, Html, Section, data_url, element, make_section, pluralize
from plainvit.analyse.subject import Subject
from plainvit.models import ViT
from plainvit.models.inference import in_eval_mode

BUDGET = 6_120_000  # bytes of attention before it is compressed: as base64 8.2 MB at worst; the report stays below 10
IMAGES = 6
COARSEST = 6  # cells along a side; coarser maps of single heads are not useful
QUANTILE = 0.97  # of a map, where its scale ends, so that a few large values do not hide all others
MIN_LIMIT = 0.1  # of its largest value, where its scale ends if the quantile is lower


@dataclass(frozen=True)
class Plan:
    """Which attention the report embeds. A cell of a map is the sum over pool x pool patches."""

    images: int
    pool: int  # of the mean of a layer's heads
    head_pool: int  # of single heads
    layers: list[int]  # with single heads


def pooled_grid(model: ViT, pool: int) -> tuple[int, int]:
    h, w = model.config.grid
    return math.ceil(h / pool), math.ceil(w / pool)


def count_bytes(model: ViT, plan: Plan) -> int:
    """Bytes before compression."""
    means, heads = len(model.blocks), len(plan.layers) * model.config.heads
    queries = math.prod(model.config.grid)
    if model.config.prefix > 0:
        queries += 1
    cells, head_cells = (math.prod(pooled_grid(model, pool)) + 1 for pool in (plan.pool, plan.head_pool))
    return plan.images * queries * (means * cells + heads * head_cells)


def plan_explorer(model: ViT, images: int, budget: int = BUDGET) -> Plan:
    """The first plan within the budget; if there is none, the smallest one."""
    plans = _list_plans(model, min(images, IMAGES))
    return next((plan for plan in plans if count_bytes(model, plan) <= budget), plans[-1])


def _list_plans(model: ViT, images: int) -> list[Plan]:
    """From everything to less: fewer images, then coarser maps, then the heads of fewer layers, then no heads."""
    depth, counts = len(model.blocks), range(images, 0, -1)
    head_pools = [1, *(pool for pool in (2, 4) if max(pooled_grid(model, pool)) >= COARSEST)]
    plans = []
    for stride in (1, 2, 3, 4, 6, 8, depth):
        layers = list(range((depth - 1) % stride, depth, stride))  # always the last
        sizes = itertools.product(counts, head_pools, (1, 2))
        plans += [Plan(count, pool, head_pool, layers) for count, head_pool, pool in sizes]
    without_heads = [*itertools.product(counts, (1, 2)), *((1, pool) for pool in (4, 8, 16, 32))]
    return plans + [Plan(count, pool, 1, []) for count, pool in without_heads]


class View(NamedTuple):
    """Attention of one image in one head, or the mean of the heads of a layer."""

    gray: np.ndarray  # uint8 [queries, cells]; in each row 255 is its limit or more
    largest: np.ndarray  # [queries], the maxima in thousandths
    limit: np.ndarray  # [queries], where the scales of the maps end, in thousandths


@torch.no_grad()
@in_eval_mode
def compute_views(model: ViT, image: Tensor, plan: Plan) -> list[View]:
    """Views of one image [3, H, W] from one forward pass: for each layer its mean, then its single heads if planned."""

    def make_views(layer: int, attention: Tensor) -> list[View]:
        mean = _make_view(model, attention[0].mean(0), plan.pool)
        heads = attention[0] if layer in plan.layers else ()
        return [mean, *(_make_view(model, head, plan.head_pool) for head in heads)]

    images = image[None].to(model.embedding.weight.device)
    return list(itertools.chain(*reduce_attention(require_global_attention(model), images, make_views)))


def _make_view(model: ViT, attention: Tensor, pool: int) -> View:
    """From attention [N, N]. A class token adds a last row, and a last column with its fraction (255: all of it)."""
    prefix = model.config.prefix
    rows = torch.cat((attention[prefix:], attention[: min(prefix, 1)])).float()  # [queries, N]: patches, then the token
    patches, token = rows[:, prefix:].unflatten(1, model.config.grid), rows[:, : min(prefix, 1)]
    sums = F.avg_pool2d(patches[:, None], pool, ceil_mode=True, divisor_override=1).flatten(1)  # [queries, cells]
    largest, limit = sums.amax(1), find_limits(sums)
    scaled = torch.cat(((sums / limit[:, None]).clamp(max=1), token), 1)
    gray = (255 * scaled).round().to(torch.uint8)
    return View(gray.cpu().numpy(), _to_thousandths(largest), _to_thousandths(limit))


def find_limits(maps: Tensor) -> Tensor:
    """[queries]: where the scale of each map [queries, cells] ends; larger values have the color of that end."""
    quantile = maps.kthvalue(math.ceil(QUANTILE * maps.shape[1]), 1).values
    smallest = (MIN_LIMIT * maps.amax(1)).clamp(min=torch.finfo(maps.dtype).tiny)
    return quantile.maximum(smallest)


def _to_thousandths(values: Tensor) -> np.ndarray:
    return (1000 * values).round().int().cpu().numpy()


def explorer_section(subject: Subject, plan: Plan | None = None) -> tuple[Section, str]:
    """The section of the report, and its script."""
    model, count = subject.model, len(subject.images)
    plan = plan or plan_explorer(model, count)
    text = (
        "Click a patch, or use the arrow keys, to see its attention; select a layer (Page Up, Page Down) and a head to "
        "enlarge them. The scale of a map ends at its 97th percentile, so that a few patches with much attention do "
        "not hide the rest. "
    )
    if model.config.class_token:
        text += (
            "The cell next to the image is the class token: it shows its fraction of the attention; click it to see "
            "its own attention. "
        )
    data = json.dumps(_collect_data(subject, plan), separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # so that no name can close the element
    body = element(
        "div",
        Html(f'<script type="application/json" id="explorer-data">{data}</script>'),
        element("div", id="explorer-stage", class_="explorer"),
        element("noscript", element("p", "The explorer needs JavaScript; the rest of the report works without it.")),
    )
    section = make_section("Attention explorer", text + describe_omissions(plan, model, count), body)
    return section, Path(__file__).with_name("explorer.js").read_text(encoding="utf-8")


def _collect_data(subject: Subject, plan: Plan) -> dict[str, object]:
    """What explorer.js reads."""
    config, images = subject.model.config, subject.images[: plan.images]
    views = [compute_views(subject.model, image, plan) for image in images]
    height, width = config.image_size
    is_crisp = max(height, width) < CRISP
    token = reads = ""
    if config.prefix:
        token = "class token" if config.class_token else "first token"
    if config.pool == "token":
        reads = "class token and the distillation token" if config.distillation else "class token"
    sources = [_image_url(image) for image in images]
    described = zip(sources, subject.names, subject.describe_predictions(plan.images), strict=False)
    return {
        "images": [{"source": source, "name": name, "prediction": text} for source, name, text in described],
        "size": [height, width],
        "grid": config.grid,
        "tokens": config.tokens,
        "layers": len(subject.model.blocks),
        "heads": config.heads,
        "layersWithHeads": plan.layers,
        "pool": plan.pool,
        "headPool": plan.head_pool,
        "token": token,
        "reads": reads,
        "crisp": is_crisp,
        "maps": [[data_url(Image.fromarray(view.gray), "png", optimize=True) for view in row] for row in views],
        "largest": [[view.largest.tolist() for view in row] for row in views],
        "limit": [[view.limit.tolist() for view in row] for row in views],
    }


def _image_url(image: Tensor) -> str:
    pixels = image.permute(1, 2, 0).numpy()
    return data_url(Image.fromarray(pixels), "png" if pixels.shape[1] < CRISP else "jpeg", quality=88)


def describe_omissions(plan: Plan, model: ViT, images: int) -> str:
    """What the report omits to stay small; empty if nothing."""
    if plan == _list_plans(model, min(images, IMAGES))[0]:
        return ""
    cells, head_cells = (" x ".join(map(str, pooled_grid(model, pool))) for pool in (plan.pool, plan.head_pool))
    count, depth = len(plan.layers), len(model.blocks)
    heads = f"the heads of {'all' if count == depth else f'{count} of {depth}'} layers as maps of {head_cells}"
    shown = f"{pluralize(plan.images, 'image')}, layers as maps of {cells}, and {heads if plan.layers else 'no heads'}"
    return f"To keep this file below 10 MB, the explorer shows {shown}."
