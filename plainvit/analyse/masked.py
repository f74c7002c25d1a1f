"""Figures of masked prediction: originals, masked images and predictions.

Each validation writes figures/masked-0001000.png in the run folder; the report shows three of them.
"""

import contextlib
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
    space = (0, GAP), (0, GAP), (0, 0)
    lines = [np.concatenate([np.pad(_resize(image), space, constant_values=255) for image in row], 1) for row in rows]
    return np.concatenate(lines)[:-GAP, :-GAP]


def _resize(image: np.ndarray) -> np.ndarray:
    """Enlarges without smoothing."""
    times = max(SIDE // max(image.shape[:2]), 1)
    smaller = Image.fromarray(image).reduce(-(-max(image.shape[:2]) // SIDE))
    return np.asarray(smaller).repeat(times, 0).repeat(times, 1)


def read_masked_figures(folder: Path) -> list[tuple[int, np.ndarray]]:
    """(step, figure) of an early, a middle and the last validation; none of files that are damaged or too large."""
    paths = sorted((folder / "figures").glob("masked-" + "[0-9]" * 7 + ".png"))
    chosen = sorted({paths[0], paths[len(paths) // 2], paths[-1]}) if paths else []
    figures = []
    for path in chosen:
        errors = OSError, ValueError, Image.DecompressionBombError
        with contextlib.suppress(*errors), Image.open(path, formats=("PNG",)) as image:
            if max(image.size) <= LARGEST:
                figures.append((int(path.stem.removeprefix("masked-")), np.asarray(image.convert("RGB"))))
    return figures
