"""The config of a model from the names and shapes of its weights, the same for every format.

Bare weights show neither the sides of the grid of patches nor the number of heads: these come from the caller, from a
file next to the weights, or from a convention, which is then called an assumption.
"""

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plainvit.config import RESNET_NUMERICS, STEM_NUMERICS, ResNetConfig, pair
from plainvit.names import SIZES
from plainvit.weights.layout import FIRST, Layout, Shapes, read_shapes

Grid = tuple[tuple[int, int], int, str]
GIVEN = "given by the caller"
BLOCK, STEM = "blocks.{i}.", "stem.stages.{s}.{u}."


@dataclass(frozen=True)
class Hints:
    """What is known about a file besides its weights."""

    heads: int | None = None  # these three from the caller
    image_size: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None
    stated_heads: tuple[int, str] | None = None  # (heads, source), from a file next to the weights
    stated_size: Any = None  # the image size there; with rows "any" it counts only if it fits the number of rows


def read_vit(
    layout: Layout,
    shapes: Shapes,
    family: str,
    hints: Hints,
    *,
    optional: Container[str] = (),
    rows: str = "class",
    stem: str = "timm",
    rotary: str = "none",
) -> tuple[dict[str, Any], dict[str, str]]:
    """(settings, sources) of a ViT.

    Args:
        layout: The names of the file.
        shapes: Its tensors.
        family: Its name in messages.
        hints: What is known besides the weights.
        optional: Parts (fields of ViTConfig) that the format's models have or not; without the weights of any other
            part a file is incomplete.
        rows: The tokens before the patches that have rows of positions: none, class (with the distillation token), all,
            or any of these, by the number of rows.
        stem: The numerics of a hybrid's stem (STEM_NUMERICS).
        rotary: The rotary positions, which imply the heads of DINOv3.
    """
    ours = read_shapes(layout, shapes)
    _check_required(ours, layout, family)
    settings = _read_sizes(ours)
    settings |= {name: value for name, value in _read_parts(ours, layout).items() if name in optional}
    settings["stem"] = _read_stem(ours, layout, shapes, stem)
    if settings["stem"]:
        settings["channels"] = settings["stem"].channels
    settings["depth"] = count_layers(shapes, layout)
    settings["image_size"], settings["posemb_prefix"], size_source = _read_image_size(settings, ours, hints, rows)
    settings["heads"], heads_source = hints.stated_heads or _assume_heads(ours, hints, family, rotary)
    return settings, {"heads": heads_source, "image_size": size_source}


def _read_image_size(
    settings: Mapping[str, Any], ours: Shapes, hints: Hints, rows: str
) -> tuple[tuple[int, int], str, str]:
    """(image size, posemb_prefix, source of the size)."""
    stride = settings["stem"].stride if settings["stem"] else 1
    cell = (settings["patch"][0] * stride, settings["patch"][1] * stride)
    tokens = settings["class_token"] + settings["distillation"]
    counts = {"none": 0, "class": tokens, "all": tokens + settings["registers"]}
    prefixes = (counts[rows],) if rows in counts else (counts["class"], counts["all"], 0)
    table = ours["positions.0.table"][-2] if settings["posemb"] == "1d" else None
    hints = _add_grid(hints, cell, table, prefixes if rows == "any" else None)
    if settings["posemb"] == "bias" and not hints.grid:  # (2h-1)(2w-1) + 3 rows: a square grid, unless it is stated
        side = (math.isqrt(max(ours[f"{BLOCK}attention.relative.table"][0] - 3, 0)) + 1) // 2
        hints = replace(hints, grid=(side, side))
    size, prefix_rows, source = read_grid(table, cell, prefixes, hints)
    if rows == "any":
        rows = {tokens: "class", 0: "none"}.get(prefix_rows, "all")
    return size, rows, source


def _check_required(ours: Shapes, layout: Layout, family: str) -> None:
    required = {"embedding.weight": 4, f"{BLOCK}attention.qkv.weight": 2}
    for name, sides in (required | {f"{BLOCK}mlp.fc1.weight": 2, f"{BLOCK}mlp.fc2.weight": 2}).items():
        if len(ours.get(name, ())) != sides:
            theirs = layout[name].names[0].format(**FIRST)
            raise ValueError(f"this {family} file has no valid {theirs}: it is incomplete, or of another model")


def _count_rows(ours: Shapes, name: str) -> int:
    """The rows of a weight, so the outputs of a layer; 0 if the file does not have it."""
    return ours[name][0] if ours.get(name) else 0


def _read_sizes(ours: Shapes) -> dict[str, Any]:
    """The settings that every file shows."""
    width, channels, *patch = ours["embedding.weight"]
    if len(ours.get("positions.0.table", ())) >= 2:
        posemb = "1d"
    else:
        posemb = "bias" if f"{BLOCK}attention.relative.table" in ours else "none"
    return {
        "width": width,
        "channels": channels,
        "patch": (patch[0], patch[1]),
        "mlp_dim": ours[f"{BLOCK}mlp.fc2.weight"][1],
        "classes": _count_rows(ours, "head.weight"),
        "representation": _count_rows(ours, "pre_logits.weight"),
        "class_token": "class_token" in ours,
        "posemb": posemb,
        "distillation": False,
        "gated": False,
        "registers": 0,
    }


def _read_parts(ours: Shapes, layout: Layout) -> dict[str, Any]:
    """The parts whose presence names and shapes show."""
    fc1, fc2, registers = ours[f"{BLOCK}mlp.fc1.weight"], ours[f"{BLOCK}mlp.fc2.weight"], ours.get("registers", ())
    return {
        "distillation": "distillation_token" in ours,
        "registers": registers[-2] if len(registers) >= 2 else 0,
        "gated": fc1[0] == 2 * fc2[1],
        "projection": _count_rows(ours, "projection.weight"),
        "layer_scale": 1e-5 if f"{BLOCK}residual1.scale" in ours else None,
        "norm_kind": "layer" if f"{BLOCK}norm1.bias" in ours else "rms",
        "norm_embedding": _first_present(ours, {"norm_tokens.weight": "tokens", "norm_patches.weight": "patches"}),
        "norm_inner": _first_present(ours, {f"{BLOCK}attention.norm.weight": "both", f"{BLOCK}mlp.norm.weight": "mlp"}),
        "norm_final": "norm.weight" in ours,
        "qk_norm": f"{BLOCK}attention.query_keys.norm_q.weight" in ours,
        "block_bias": _find_block_bias(ours, layout),
        "embedding_bias": "embedding.bias" in ours,
    }


def _first_present(ours: Shapes, values: Mapping[str, str]) -> str:
    """The value of the first of these weights that a file has, or "none"."""
    return next((value for name, value in values.items() if name in ours), "none")


def _find_block_bias(ours: Shapes, layout: Layout) -> str:
    qkv_bias = f"{BLOCK}attention.qkv.bias"
    if qkv_bias in ours:
        return "no_k" if len(layout[qkv_bias].names) == 2 else "all"  # two names: those of q and v
    return "no_qkv" if f"{BLOCK}attention.out.bias" in ours else "none"


def _read_stem(ours: Shapes, layout: Layout, shapes: Shapes, numerics: str) -> ResNetConfig | None:
    """The ResNet of a hybrid; None: a plain ViT."""
    if "stem.root.weight" not in ours:
        return None
    stem = {"preactivation": False, "padding": "same", "classes": 0} | STEM_NUMERICS[numerics]
    return ResNetConfig(**_read_resnet("stem", ours, layout, shapes), **stem)


def read_bit(layout: Layout, shapes: Shapes, family: str) -> ResNetConfig:
    """BiT, with the numerics of the format (RESNET_NUMERICS)."""
    ours = read_shapes(layout, shapes)
    classes = _count_rows(ours, "head.weight")
    return ResNetConfig(**_read_resnet("body", ours, layout, shapes), classes=classes, **RESNET_NUMERICS[family])


def _read_resnet(name: str, ours: Shapes, layout: Layout, shapes: Shapes) -> dict[str, Any]:
    root = ours.get(f"{name}.root.weight", ())
    if len(root) != 4:
        raise ValueError(f"this file has no valid root convolution, its shape is {root}: it is incomplete")
    blocks = count_units(shapes, layout, f"{name}.stages.{{s}}.{{u}}.conv1.weight")
    return {"blocks": blocks, "widen": max(root[0] // 64, 1), "channels": root[1]}


def _add_grid(hints: Hints, cell: tuple[int, int], rows: int | None, prefixes: Sequence[int] | None) -> Hints:
    """Adds the grid of the stated image size; with `prefixes` only if it fits the rows of positions."""
    if hints.grid or hints.stated_size is None:
        return hints
    height, width = pair(hints.stated_size)
    grid = height // cell[0], width // cell[1]
    fits = prefixes is None or rows is None or rows - grid[0] * grid[1] in prefixes
    return replace(hints, grid=grid) if fits else hints


def read_grid(rows: int | None, cell: tuple[int, int], prefixes: Sequence[int], hints: Hints) -> Grid:
    """(image size, rows of other tokens, source) of a table; `prefixes`: how many rows may belong to other tokens.

    A square number of patches is a square grid, by every family's convention. Any other number is an error unless the
    caller gives the grid, or an image size that fits the rows.
    """
    if rows is None:
        size = (hints.grid[0] * cell[0], hints.grid[1] * cell[1]) if hints.grid else hints.image_size
        if size:
            return size, 0, GIVEN
        assumed = tuple(max(224 // side, 1) * side for side in cell)
        return (assumed[0], assumed[1]), 0, "assumed: the file has no table of positions"
    if hints.grid:
        h, w = hints.grid
        if rows - h * w not in prefixes:
            raise ValueError(f"grid {h} x {w} does not fit {rows} positions")
        return (h * cell[0], w * cell[1]), rows - h * w, f"grid {GIVEN}"
    distinct = list(dict.fromkeys(prefixes))
    squares = [prefix for prefix in distinct if _square_side(rows - prefix)]
    fitting = [prefix for prefix in distinct if rows - prefix == _count_patches(hints.image_size, cell)]
    if len(squares) == 1 and (not fitting or distinct.index(squares[0]) <= distinct.index(fitting[0])):
        side = _square_side(rows - squares[0])
        return (side * cell[0], side * cell[1]), squares[0], f"{rows} rows of positions, taken as {side} x {side}"
    if fitting and hints.image_size:
        return hints.image_size, fitting[0], f"image size {GIVEN}; {rows} rows of positions fit it"
    raise ValueError(
        f"the grid of {rows} positions is unknown (not a square, or several are possible): use "
        "load(..., grid=(rows, columns)); or load(..., image_size=(height, width)) or --image-size HEIGHT WIDTH with "
        "the size of its training"
    )


def _square_side(count: int) -> int:
    """The side of a square of `count` patches; 0 if count is not a square number."""
    side = math.isqrt(max(count, 0))
    return side if side * side == count else 0


def _count_patches(size: tuple[int, int] | None, cell: tuple[int, int]) -> int | None:
    """The number of patches of an image; None if they do not fill it."""
    if size is None or size[0] % cell[0] or size[1] % cell[1]:
        return None
    return (size[0] // cell[0]) * (size[1] // cell[1])


def _match_all(names: Iterable[str], layout: Layout, ours: str) -> Iterable[re.Match[str]]:
    """Matches all names of one of our parameters in a file; groups are its indices."""
    parts = re.split(r"(?<!\{)\{[isu]1?(?::02d)?\}", layout[ours].names[0])
    pattern = r"(\d+)".join(re.escape(part.format()) for part in parts)
    matches = (re.fullmatch(pattern, name) for name in names)
    return [match for match in matches if match]


def count_layers(names: Iterable[str], layout: Layout) -> int:
    """Counts the layers of a file; they must be numbered from 0 without gaps."""
    numbers = {int(match[1]) for match in _match_all(names, layout, f"{BLOCK}norm1.weight")}
    if not numbers or max(numbers) + 1 != len(numbers):
        raise ValueError(f"the file's layers are not numbered 0, 1, 2 ... ({len(numbers)} found): it is incomplete")
    return len(numbers)


def count_units(names: Iterable[str], layout: Layout, ours: str) -> tuple[int, ...]:
    """Counts the units in each stage of a ResNet; both must be numbered without gaps."""
    first = int("{s1}" in layout[ours].names[0])  # Google counts from 1
    pairs = {(int(match[1]) - first, int(match[2]) - first) for match in _match_all(names, layout, ours)}
    stages = sorted({stage for stage, _ in pairs})
    units = tuple(sum(1 for stage, _ in pairs if stage == number) for number in stages)
    if stages != list(range(len(stages))) or any((s, u) not in pairs for s, n in enumerate(units) for u in range(n)):
        raise ValueError("the file's stages and units are not numbered without gaps: it is incomplete")
    return units


def _assume_heads(ours: Shapes, hints: Hints, family: str, rotary: str) -> tuple[int, str]:
    """(heads, source): the shape of q, k and v does not show them."""
    width, biases = ours["embedding.weight"][0], ours.get(f"{BLOCK}attention.relative.table", ())
    if len(biases) == 2:
        return biases[1], "columns of relative_position_bias_table"
    if hints.heads:
        return hints.heads, GIVEN
    if rotary == "dinov3" and width % 64 == 0:
        heads = 32 if width == 4096 else width // 64
        return heads, f"assumed: DINOv3 of width {width} has {heads} heads"
    known = {size["width"]: size["heads"] for name, size in SIZES.items() if name != "b"} | {1152: 16}  # So400m
    if width in known:
        return known[width], f"assumed: a ViT of width {width} has {known[width]} heads"
    if width % 64 == 0 and width != 1536:  # published ViTs of width 1536 have 12, 16 or 24 heads
        return width // 64, f"assumed: {family}'s convention of 64 per head"
    raise ValueError(
        f"the number of heads of this {family} file of width {width} is unknown: use load(..., heads=N), or "
        "plainvit convert with --heads N"
    )


def check_names(names: Iterable[str], unsupported: Mapping[str, str]) -> None:
    """Raises an error if a name has one of the patterns {pattern: the model that has such names}."""
    for pattern, model in unsupported.items():
        found = next((name for name in names if re.search(pattern, name)), None)
        if found:
            raise unsupported_model(model, found)


def unsupported_model(model: str, evidence: str) -> ValueError:
    return ValueError(f"this looks like {model} ({evidence}), which plainvit does not support")
