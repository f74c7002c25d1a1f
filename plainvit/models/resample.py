"""Changes the image size of a ViT (paper 3.2): resamples its positions.

model = resize(model, image_size=384)                   # as the code that the weights come from
model = resize(model, (256, 192), method="bicubic-antialias")
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.config import nearest, pair
from plainvit.models.buffers import fill_buffers
from plainvit.models.vit import ViT

METHODS: dict[str, dict[str, Any]] = {
    "bilinear-aligned": {"mode": "bilinear", "align_corners": True},  # Google: scipy's zoom of order 1
    "bilinear": {"mode": "bilinear", "align_corners": False},
    "bicubic": {"mode": "bicubic", "align_corners": False},  # transformers, DeiT, MAE
    "bicubic-antialias": {"mode": "bicubic", "align_corners": False, "antialias": True},  # timm, DINOv2 with registers
    "bicubic-aligned": {"mode": "bicubic", "align_corners": True},  # torchvision
    "bicubic-offset": {"mode": "bicubic", "align_corners": False},  # DINO, DINOv2: sampled as if 0.1 cells larger
}
GEOMETRIC = "geometric"  # of biases only: BEiT's own code and timm, see `_resample_geometric`
# The method of each family's own code (About.family); Google's for any other
FAMILY_METHODS = {
    "timm": "bicubic-antialias",
    **{f"transformers {kind}": "bicubic" for kind in ("ViT", "DeiT", "CLIP", "SigLIP", "DINOv2", "I-JEPA", "AIMv2")},
    "transformers DINOv2 with registers": "bicubic-antialias",
    "open_clip": "bicubic-antialias",
    "CLIP": "bicubic-antialias",
    "EVA": "bicubic-antialias",
    "torchvision": "bicubic-aligned",
    "DeiT": "bicubic",
    "DeiT III": "bicubic",
    "MAE": "bicubic",
    "DINO": "bicubic-offset",
    "DINOv2": "bicubic-offset",
}


def choose_method(model: ViT) -> str:
    """The method of the code that the weights come from."""
    if model.config.posemb == "bias":
        return "bilinear" if model.about.family.startswith("transformers") else GEOMETRIC
    if model.about.family == "DINOv2" and model.config.registers:
        return "bicubic-antialias"
    return FAMILY_METHODS.get(model.about.family, "bilinear-aligned")


def resize(model: ViT, image_size: int | tuple[int, int], *, method: str | None = None) -> ViT:
    """A model for another image size, which shares the weights that do not change.

    method is one of METHODS, or "geometric" for BEiT's biases; None: as the code that the weights come from.
    """
    old = model.config
    method = choose_method(model) if method is None else method
    if not (method == GEOMETRIC and old.posemb == "bias"):
        _check_method(method)
    new = old.replace(image_size=pair(image_size))
    if old.posemb == "relative" and new.grid != old.grid:
        raise ValueError(f"relative positions cannot be resampled: use images of {old.grid[0]} x {old.grid[1]} patches")
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.startswith("positions.") and new.grid != old.grid:
            weights[name] = _resample_positions(name, weight, old.grid, new.grid, method)
        elif name.endswith("attention.relative.table") and new.grid != old.grid:
            weights[name] = resample_biases(weight, old.grid, new.grid, method)
    with torch.device("meta"):
        resized = ViT(new)
    fill_buffers(resized, model.embedding.weight.device)
    resized.load_state_dict(weights, assign=True)
    resized.about = model.about
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, parameter in resized.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return resized.train(model.training)


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"resampling method {method!r} is unknown; {nearest(method, METHODS)}")


def _resample_positions(name: str, weight: Tensor, old: tuple[int, int], new: tuple[int, int], method: str) -> Tensor:
    match name.rsplit(".", 1)[1]:
        case "rows":
            return resample_table(weight, (old[0], 1), (new[0], 1), method)
        case "columns":
            return resample_table(weight, (1, old[1]), (1, new[1]), method)
        case _:
            rows = len(weight) - old[0] * old[1]  # those of the tokens before the patches stay as they are
            return torch.cat((weight[:rows], resample_table(weight[rows:], old, new, method)))


def resample_table(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], method: str = "bilinear-aligned"
) -> Tensor:
    """Resamples a table [h*w, D] from one grid to another; the same grid gives the same table."""
    if len(table) != old[0] * old[1]:
        raise ValueError(f"a table of {len(table)} positions does not fit a grid of {old[0]} x {old[1]}")
    _check_method(method)
    if old == new:
        return table
    exact = table.to(torch.promote_types(table.dtype, torch.float32))
    grid = exact.view(1, *old, -1).permute(0, 3, 1, 2)  # [1, D, h, w]
    size: dict[str, Any] = {"size": new}
    if method == "bicubic-offset":
        size = {"scale_factor": tuple((after + 0.1) / before for before, after in zip(old, new, strict=True))}
    grid = F.interpolate(grid, **size, **METHODS[method])  # [1, D, h', w']
    return grid.flatten(2)[0].mT.to(table.dtype).contiguous()  # [h'*w', D]


def resample_biases(table: Tensor, old: tuple[int, int], new: tuple[int, int], method: str) -> Tensor:
    """BEiT's biases [(2h-1)(2w-1) + 3, H] for another grid; the last three, of the class token, stay as they are."""
    old_offsets, new_offsets = ((2 * h - 1, 2 * w - 1) for h, w in (old, new))
    if method == GEOMETRIC:
        biases = _resample_geometric(table[:-3], old_offsets, new_offsets)
    else:
        biases = resample_table(table[:-3], old_offsets, new_offsets, method)
    return torch.cat((biases, table[-3:]))


def _resample_geometric(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resamples biases [h*w, H] as BEiT's own code does: most finely near the center, where they vary most."""
    rows, columns = (_make_geometric_weights(*sizes).to(table.device) for sizes in zip(old, new, strict=True))
    grid = torch.einsum("ah,bw,hwd->abd", rows, columns, table.double().view(*old, -1))  # [h', w', H]
    return grid.flatten(0, 1).to(table.dtype)


def _make_geometric_weights(old: int, new: int) -> Tensor:
    """The matrix [new, old] of linear interpolation along one axis, from points whose distances grow geometrically.

    New offsets are whole numbers around 0. Beyond the last point its value is repeated.
    """
    points = _place_geometrically(old // 2, new // 2)
    offsets = torch.arange(new, dtype=torch.float64) - new // 2
    right = torch.bucketize(offsets, points).clamp(min(1, old - 1), old - 1)
    left = (right - 1).clamp(0)
    fraction = ((offsets - points[left]) / (points[right] - points[left])).nan_to_num(0).clamp(0, 1)
    weights = torch.zeros(new, old, dtype=torch.float64)
    weights[torch.arange(new), right] = fraction
    weights[torch.arange(new), left] = 1 - fraction
    return weights


def _place_geometrically(count: int, largest: int) -> Tensor:
    """Points ..., -1, 0, 1, 1 + q, 1 + q + q^2, ..., `count` on each side; q, found by bisection, ends at `largest`."""
    low, high, q = 1.01, 1.5, 1.01
    while high - low > 1e-6:
        q = (low + high) / 2
        if (1 - q**count) / (1 - q) > largest:
            high = q
        else:
            low = q
    points = torch.cumsum(q ** torch.arange(count, dtype=torch.float64), 0)
    return torch.cat((-points.flip(0), points.new_zeros(1), points))
