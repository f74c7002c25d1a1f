"""Hashes that show whether images have changed: names alone do not.

sample_hash(source)             hash of the bytes of some images: equal for copies in another place
content_stamp(source)           also changes with the size and modification time of every file
hash_to_unit_interval(source)   a number in [0, 1) for each image: equal for copies under any name
"""

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np

from plainvit.data.cores_and_memory import count_cores
from plainvit.data.decode import ImageError
from plainvit.data.sources import Source

CARD_SAMPLE = 256  # images hashed for a card
CHUNK = 32  # images that a thread works on at a time
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


def hash_to_unit_interval(source: Source) -> np.ndarray:
    """A number in [0, 1) for each image [N], uniformly distributed: a hash of the bytes that `Source.identify` returns.

    If an image cannot be read, its name is hashed instead.
    """

    def compute(index: int) -> float:
        try:
            data = source.identify(index)
        except (ImageError, OSError):
            data = source.name(index).encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) / 2**64

    return np.array(list(map_images(compute, source, f"hashing {len(source):,} images")))


def map_images(work: Callable[[int], T], source: Source, title: str) -> Iterator[T]:
    """Yield work(index) for every image, in order, computed by threads: decoders and disks release the GIL.

    The main process logs the progress now and then.
    """
    source.load()
    threads = 1 if source.is_sequential() else min(count_cores(), 32)
    chunks = (range(start, min(start + CHUNK, len(source))) for start in range(0, len(source), CHUNK))
    is_main, last, done = os.environ.get("RANK", "0") == "0", time.monotonic(), 0
    pool = ThreadPoolExecutor(threads)
    try:
        pending = deque(pool.submit(list, map(work, chunk)) for chunk in islice(chunks, 2 * threads))
        while pending:
            results = pending.popleft().result()
            pending.extend(pool.submit(list, map(work, chunk)) for chunk in islice(chunks, 1))
            yield from results
            done += len(results)
            if is_main and time.monotonic() - last > LOG_INTERVAL:
                last = time.monotonic()
                log.warning("%s: %d %%", title, 100 * done // len(source))
    finally:
        pool.shutdown(cancel_futures=True)
