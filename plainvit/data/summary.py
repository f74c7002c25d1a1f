"""The number, size and color of a dataset's training images, for recipes that depend on them."""

from pathlib import Path

import numpy as np

from plainvit.config import DataSummary
from plainvit.data.decode import ImageError
from plainvit.data.sources import open_source


def summarize(data: str, data_root: str | Path | None = None) -> DataSummary:
    """Count the training images and classes, and read some images for their size and color."""
    source = open_source(data, "train", data_root=data_root or None)
    sides: list[int] = []
    is_gray = True
    error: ImageError | None = None
    for index in source.sample():
        try:
            image = source.image(index)
        except ImageError as unreadable:  # training reports them
            error = unreadable
            continue
        sides.append(min(image.shape[:2]))
        is_gray = is_gray and bool((image == image[..., :1]).all())
    if not sides and error:
        raise error
    return DataSummary(images=len(source), classes=len(source.classes), side=int(np.median(sides)), is_gray=is_gray)
