"""Decode once: training images as pixels in memory, shared by a process and the workers that it forks.

    images = open_cache(source, augment, size=(224, 224))     # None if they do not fit into memory
    images.read(i)                                            # decoded at the first read, later only copied

An image is stored whole, unless the crops need less than half of its pixels; then it is shrunk, with antialiasing, to
the size that a crop of a quarter of its area (`MIN_AREA`) needs, or the smallest crop that the augmentation draws, if
that is larger. Pixels do not depend on memory: a run that resumes where nothing fits decodes and shrinks each image
again.
"""

import math
import mmap

import numpy as np

from plainvit.config import Augment
from plainvit.data.cores_and_memory import memory_budget
from plainvit.data.decode import ImageError, decode, get_image_size
from plainvit.data.sources import Source, Subset
from plainvit.data.transforms import resize_image

MIN_AREA = 0.25  # smaller crops of a shrunk image may be enlarged: by 2.2 for 5 % of the area


class CachedSource(Subset):
    """A source's images as pixels, each decoded at its first use. Create it before workers are forked."""

    def __init__(self, source: Source, least: tuple[float, float], slot: int = 0) -> None:
        """Every image has `slot` bytes, which take memory when written; larger images are not kept."""
        super().__init__(source, np.arange(len(source)))
        self.least, self.slot = least, slot
        self._sizes = np.frombuffer(mmap.mmap(-1, 16 * len(source)), np.uint32).reshape(-1, 4)  # stored, original
        self._pixels = np.frombuffer(mmap.mmap(-1, max(slot * len(source), 1)), np.uint8)

    def read(self, index: int) -> np.ndarray:
        return self.read_with_extent(index)[0]

    def extent(self, index: int) -> tuple[int, int]:
        return self.read_with_extent(index)[1]

    def read_with_extent(self, index: int) -> tuple[np.ndarray, tuple[int, int]]:
        """Pixels as stored, and the (height, width) of the original."""
        height, width, *extent = self._sizes[index].tolist()
        start = index * self.slot
        if all((height, width, *extent)):
            return self._pixels[start : start + 3 * height * width].reshape(height, width, 3), (extent[0], extent[1])
        data = self.source.read(index)
        pixels, extent = shrink(data, self.least), get_image_size(data)
        if pixels.nbytes <= self.slot:
            self._pixels[start : start + pixels.nbytes] = pixels.reshape(-1)
            self._sizes[index] = *pixels.shape[:2], *extent  # two workers may store an image twice: the bytes are equal
        return pixels, extent


def open_cache(source: Source, augment: Augment, out: tuple[int, int], required: bool = False) -> CachedSource | None:
    """The images of a source in memory if they fit, else None; if `required`, the same pixels decoded each time."""
    least = _find_least_size(augment, out)
    stored = _measure(source, least)
    available = memory_budget() / len(source)
    if stored is None or stored > available:
        return CachedSource(source, least) if required else None
    return CachedSource(source, least, min(math.ceil(4 * stored), int(available)))  # photos differ in shape and size


def _find_least_size(augment: Augment, out: tuple[int, int]) -> tuple[float, float]:
    """(height, width) that an image must keep."""
    if augment.crop == "pad":  # counts pixels of the original
        return math.inf, math.inf
    if augment.crop == "random":
        return augment.resized_side(out[0]), augment.resized_side(out[1])
    factor = 1.0 if augment.crop == "none" else max(augment.area[0], MIN_AREA) ** -0.5
    return out[0] * factor, out[1] * factor


def _measure(source: Source, least: tuple[float, float]) -> float | None:
    """Mean bytes of a stored image in a sample; None if there is nothing to decode."""
    stored: list[int] = []
    for index in source.sample():
        try:
            data = source.read(index)
            if isinstance(data, np.ndarray):
                return None
            stored.append(3 * math.prod(_find_stored_size(get_image_size(data), least)))
        except (ImageError, OSError):
            continue
    return float(np.mean(stored)) if stored else None


def _find_stored_size(extent: tuple[int, int], least: tuple[float, float]) -> tuple[int, int]:
    """The size that an image is stored in: its own, unless that would at least halve its pixels."""
    scale = max(least[0] / extent[0], least[1] / extent[1])
    return extent if scale > 0.5**0.5 else (round(extent[0] * scale), round(extent[1] * scale))


def shrink(data: bytes | np.ndarray, least: tuple[float, float]) -> np.ndarray:
    """Decode to the size in which an image is stored."""
    extent = get_image_size(data)
    target = _find_stored_size(extent, least)
    if target == extent:
        return decode(data)
    return resize_image(decode(data, target), target).permute(1, 2, 0).contiguous().numpy()
