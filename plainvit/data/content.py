"""Whether images are still the ones they were: names alone do not tell.

sample_hash(source)       of the bytes of some images, wherever they lie: equal for copies
content_stamp(source)     changes also with the size and the time of change of every file
"""

import hashlib
import os

import numpy as np

from plainvit.data.decode import ImageError
from plainvit.data.sources import Source

SAMPLE = 64
CONTENT = 256  # images of a card whose bytes tell sets of the same names apart


def sample_hash(source: Source, count: int = SAMPLE) -> str:
    """Of so many images, spread evenly; one that cannot be read counts as that."""
    digest = hashlib.sha256()
    for index in np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).astype(int)):
        try:
            data = source.read(int(index))
            digest.update(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes())
        except (ImageError, OSError):
            digest.update(b"unreadable\n")
    return digest.hexdigest()[:16]


def content_stamp(source: Source) -> str:
    """An edited file is noticed, unless its size and its time stay the same and it is none of the sample."""
    digest = hashlib.sha256(sample_hash(source).encode())
    for path in source.files():
        try:
            status = os.stat(path)  # noqa: PTH116 - a million times
            digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
        except OSError:
            digest.update(b"absent\n")
    return digest.hexdigest()[:16]
