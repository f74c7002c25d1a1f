"""Settings that bare weights do not show: the grid of patches and the number of heads."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plainvit.names import SIZES


@dataclass(frozen=True)
class Hints:
    """What the caller states about a file."""

    heads: int | None = None
    image_size: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Grid:
    image_size: tuple[int, int]
    prefix_rows: int
    source: str


def read_grid(rows: int | None, cell: tuple[int, int], prefixes: Sequence[int], hints: Hints) -> Grid:
    """The image size of a table of positions; `prefixes` lists how many rows may belong to other tokens.

    A square number of patches is a square grid, by every family's convention. Any other number is an error unless the
    caller gives the grid, or an image size that fits the rows.
    """
    if rows is None:
        size = (hints.grid[0] * cell[0], hints.grid[1] * cell[1]) if hints.grid else hints.image_size
        if size:
            return Grid(size, 0, "given by the caller")
        assumed = tuple(max(224 // side, 1) * side for side in cell)
        return Grid((assumed[0], assumed[1]), 0, "assumed: the file has no table of positions")
    if hints.grid:
        h, w = hints.grid
        if rows - h * w not in prefixes:
            raise ValueError(f"grid {h} x {w} does not fit {rows} positions")
        return Grid((h * cell[0], w * cell[1]), rows - h * w, "grid given by the caller")
    distinct = list(dict.fromkeys(prefixes))
    squares = [prefix for prefix in distinct if _square_side(rows - prefix)]
    fitting = [prefix for prefix in distinct if rows - prefix == _count_patches(hints.image_size, cell)]
    if len(squares) == 1 and (not fitting or distinct.index(squares[0]) <= distinct.index(fitting[0])):
        side = _square_side(rows - squares[0])
        return Grid((side * cell[0], side * cell[1]), squares[0], f"{rows} rows of positions, taken as {side} x {side}")
    if fitting and hints.image_size:
        return Grid(hints.image_size, fitting[0], f"image size given by the caller; {rows} rows of positions fit it")
    raise ValueError(
        f"the grid of {rows} positions is unknown (not a square, or several are possible): use "
        "load(..., grid=(rows, columns)), or load(..., image_size=(height, width)) with the size of its training"
    )


def _square_side(count: int) -> int:
    """The side of a square of `count` patches; 0 if count is not a square number."""
    side = math.isqrt(max(count, 0))
    return side if side * side == count else 0


def _count_patches(size: tuple[int, int] | None, cell: tuple[int, int]) -> int | None:
    """The number of patches of an image; None if they do not fill it."""
    return None if size is None or size[0] % cell[0] or size[1] % cell[1] else size[0] // cell[0] * (size[1] // cell[1])


def count_layers(names: Iterable[str], pattern: str) -> int:
    """Counts the layers of a file; they must be numbered from 0 without gaps."""
    numbers = {int(match[1]) for name in names if (match := re.match(pattern, name))}
    if not numbers or max(numbers) + 1 != len(numbers):
        raise ValueError(f"the file's layers are not numbered 0, 1, 2 ... ({len(numbers)} found): it is incomplete")
    return len(numbers)


def count_units(names: Iterable[str], pattern: str, first: int) -> tuple[int, ...]:
    """Counts the units in each stage of a ResNet; both must be numbered from `first` without gaps."""
    pairs = {(int(match[1]) - first, int(match[2]) - first) for name in names if (match := re.match(pattern, name))}
    stages = sorted({stage for stage, _ in pairs})
    units = tuple(sum(1 for stage, _ in pairs if stage == number) for number in stages)
    if stages != list(range(len(stages))) or any((s, u) not in pairs for s, n in enumerate(units) for u in range(n)):
        raise ValueError("the file's stages and units are not numbered without gaps: it is incomplete")
    return units


def read_heads(width: int, hints: Hints, family: str) -> tuple[int, str]:
    """(heads, source): the shape of q, k and v does not show them."""
    if hints.heads:
        return hints.heads, "given by the caller"
    known = {size["width"]: size["heads"] for name, size in SIZES.items() if name != "b"} | {1152: 16}  # So400m
    if width in known:
        return known[width], f"assumed: a ViT of width {width} has {known[width]} heads"
    if width % 64 == 0 and width != 1536:  # published ViTs of width 1536 have 12, 16 or 24 heads
        return width // 64, f"assumed: {family}'s convention of 64 per head"
    raise ValueError(f"the number of heads of this {family} file of width {width} is unknown: use load(..., heads=N)")


def unsupported_model(model: str, evidence: str) -> ValueError:
    return ValueError(f"this looks like {model} ({evidence}), which plainvit does not support")
