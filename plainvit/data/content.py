"""Hashes that show whether images have changed: names alone do not.

sample_hash(source)       hash of the bytes of some images: equal for copies in another place
content_stamp(source)     also changes with the size and modification time of every file
"""

import hashlib
import os

import numpy as np

from plainvit.data.decode import ImageError
from plainvit.data.sources import Source

SAMPLE = 64  # images hashed by default
CONTENT = 256  # images hashed for a card


def sample_hash(source: Source, count: int = SAMPLE) -> str:
    """Hash of the bytes of `count` evenly spaced images; an unreadable image is hashed as unreadable."""
    digest = hashlib.sha256()
    for index in np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).astype(int)):
        try:
            data = source.read(int(index))
            digest.update(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes())
        except (ImageError, OSError):
            digest.update(b"unreadable\n")
    return digest.hexdigest()[:16]


def content_stamp(source: Source) -> str:
    """Hash of the sample and of every file's size and modification time."""
    digest = hashlib.sha256(sample_hash(source).encode())
    for path in source.files():
        try:
            status = os.stat(path)  # noqa: PTH116 - a million times
            digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
        except OSError:
            digest.update(b"absent\n")
    return digest.hexdigest()[:16]
