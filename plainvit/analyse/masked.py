"""Figures of masked prediction: originals, masked images and predictions.

Each validation writes figures/masked-0001000.png in the run folder; the report shows three of them.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from plainvit.disk import write_atomically

GAP = 4  # pixels between images
SIDE = 112  # pixels; images are enlarged or reduced by integer factors to about this size
LARGEST = 4096  # pixels a side of a figure that the report reads


def draw_masked(folder: Path, step: int, rows: Sequence[np.ndarray]) -> Path:
    """Rows: originals, masked images and predictions, each uint8 [m, H, W, 3]."""
    path = folder / "figures" / f"masked-{step:07d}.png"
    path.parent.mkdir(exist_ok=True)
    image = Image.fromarray(mosaic(rows))
    write_atomically(path, lambda target: image.save(target, "PNG", optimize=True))
    return path


def mosaic(rows: Sequence[np.ndarray]) -> np.ndarray:
    """One canvas with white gaps."""
    shown = [[_resize(image) for image in row] for row in rows]
    height, width, _ = shown[0][0].shape
    down, across = height + GAP, width + GAP
    page = np.full((len(rows) * down - GAP, len(shown[0]) * across - GAP, 3), 255, np.uint8)
    for y, row in enumerate(shown):
        for x, image in enumerate(row):
            page[y * down : y * down + height, x * across : x * across + width] = image
    return page


def _resize(image: np.ndarray) -> np.ndarray:
    """Enlarges without smoothing."""
    times = max(SIDE // max(image.shape[:2]), 1)
    smaller = Image.fromarray(image).reduce(-(-max(image.shape[:2]) // SIDE))
    return np.asarray(smaller).repeat(times, 0).repeat(times, 1)


def masked_pictures(folder: Path) -> list[tuple[int, np.ndarray]]:
    """(step, figure) of an early, a middle and the last validation, if there are any."""
    found = {}
    for path in (folder / "figures").glob("masked-*.png"):
        if number := re.fullmatch(r"masked-(\d+)\.png", path.name):
            found[int(number[1])] = path
    steps = sorted(found)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return [(step, pixels) for step in chosen if (pixels := _read(found[step])) is not None]


def _read(path: Path) -> np.ndarray | None:
    """None if it is not a readable PNG or too large."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            return np.asarray(image.convert("RGB")) if max(image.size) <= LARGEST else None
    except (OSError, ValueError):
        return None
