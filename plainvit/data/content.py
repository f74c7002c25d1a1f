"""Hashes that show whether images have changed: names alone do not.

sample_hash(source)       hash of the bytes of some images: equal for copies in another place
content_stamp(source)     also changes with the size and modification time of every file
content_numbers(source)   a number in [0, 1) for each image: equal for copies under any name
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from plainvit.data.decode import ImageError
from plainvit.data.machine import count_cores
from plainvit.data.sources import Source

CONTENT = 256  # images hashed for a card
LOG_INTERVAL = 10.0  # seconds between progress lines
T = TypeVar("T")
log = logging.getLogger("plainvit")


def sample_hash(source: Source, count: int = 64) -> str:
    """Hash of the bytes of `count` evenly spaced images; an unreadable image is hashed as unreadable."""
    digest = hashlib.sha256()
    for index in source.sample(count):
        try:
            data = source.read(index)
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


def content_numbers(source: Source) -> np.ndarray:
    """Numbers [N] in [0, 1), uniform, from the bytes that `Source.identify` returns; an unreadable image's name."""

    def compute(index: int) -> float:
        try:
            data = source.identify(index)
        except (ImageError, OSError):
            data = source.name(index).encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) / 2**64

    source.load()
    with ThreadPoolExecutor(1 if source.is_sequential() else min(count_cores(), 16)) as pool:
        chunks = [range(start, min(start + 256, len(source))) for start in range(0, len(source), 256)]
        numbers = pool.map(lambda chunk: [compute(index) for index in chunk], chunks)
        return np.concatenate([*log_progress(numbers, len(chunks), f"hashing {len(source):,} images")])


def log_progress(items: Iterable[T], count: int, title: str) -> Iterator[T]:
    """Yield the items and log the progress now and then, in the main process only."""
    last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last > LOG_INTERVAL and os.environ.get("RANK", "0") == "0":
            last = time.monotonic()
            log.warning("%s: %d %%", title, 100 * done // count)
