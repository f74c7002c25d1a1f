"""Photos of the data root as bytes and as files, for benchmarks that send or read them."""

import os
from pathlib import Path

import numpy as np

from plainvit.data.sources import Source, Subset, open_source

BY_CLASS = "class{label:04d}/{index:05d}-{copy:03d}"


def read_photos(data: Path) -> list[bytes]:
    """The 48 encoded JPEGs of imagenet-photos."""
    source = open_source(str(data / "imagenet-photos"))
    return [read_encoded(source, index) for index in range(len(source))]


def read_encoded(source: Source, index: int) -> bytes:
    image = source.read(index)
    assert isinstance(image, bytes)
    return image


def select_per_class(source: Source, classes: int, count: int) -> Subset:
    """The first `count` images of each of the first classes."""
    return Subset(source, np.concatenate([np.flatnonzero(source.labels == c)[:count] for c in range(classes)]))


def write_images(source: Source, folder: Path, pattern: str, copies: int = 1) -> int:
    """Writes the encoded images to files and returns their number; further copies are hard links."""
    for index in range(len(source)):
        paths = [folder / pattern.format(label=int(source.labels[index]), index=index, copy=c) for c in range(copies)]
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        paths[0].write_bytes(read_encoded(source, index))
        for path in paths[1:]:
            os.link(paths[0], path)
    return len(source) * copies
