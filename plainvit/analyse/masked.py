"""What masked prediction looks like: each image, what was left of it, and what was predicted in its place.

figures/masked-0001000.png in a run folder, one a validation; the report shows the last, beside an early one.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from plainvit.disk import write_atomically

GAP = 4  # pixels between images
SIDE = 112  # near which images are shown: enlarged or reduced by whole factors
LARGEST = 4096  # pixels a side that a picture may have to be read again


def draw_masked(folder: Path, step: int, rows: Sequence[np.ndarray]) -> Path:
    """A row each of originals, of corrupted images and of predictions, uint8 [m, H, W, 3]; a column an image."""
    path = folder / "figures" / f"masked-{step:07d}.png"
    path.parent.mkdir(exist_ok=True)
    image = Image.fromarray(mosaic(rows))
    write_atomically(path, lambda beside: image.save(beside, "PNG", optimize=True))
    return path


def mosaic(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The rows below each other on white."""
    shown = [[_sized(image) for image in row] for row in rows]
    height, width, _ = shown[0][0].shape
    down, across = height + GAP, width + GAP
    page = np.full((len(rows) * down - GAP, len(shown[0]) * across - GAP, 3), 255, np.uint8)
    for y, row in enumerate(shown):
        for x, image in enumerate(row):
            page[y * down : y * down + height, x * across : x * across + width] = image
    return page


def _sized(image: np.ndarray) -> np.ndarray:
    """Without smoothing where it is enlarged."""
    times = max(SIDE // max(image.shape[:2]), 1)
    smaller = Image.fromarray(image).reduce(-(-max(image.shape[:2]) // SIDE))
    return np.asarray(smaller).repeat(times, 0).repeat(times, 1)


def masked_pictures(folder: Path) -> list[tuple[int, np.ndarray]]:
    """(step, picture) of an early, a middle and the last validation, as far as there are any."""
    found = {}
    for path in (folder / "figures").glob("masked-*.png"):
        if number := re.fullmatch(r"masked-(\d+)\.png", path.name):
            found[int(number[1])] = path
    steps = sorted(found)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return [(step, pixels) for step in chosen if (pixels := _read(found[step])) is not None]


def _read(path: Path) -> np.ndarray | None:
    """None where it is no picture of a size that this draws."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            return np.asarray(image.convert("RGB")) if max(image.size) <= LARGEST else None
    except (OSError, ValueError):
        return None
