"""A set that fits into the device's memory, as uint8: cut and augmented there, several steps at a time.

On a GPU the host is what is slow with small images: their kernels are compiled, they are started for many images at
once, and by a thread while the device is at work on the steps before.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.config import Augment
from plainvit.data.decode import ImageError, decode
from plainvit.data.sources import Source
from plainvit.data.transforms import crop_boxes, finish
from plainvit.data.workers import readable, refuse_many

log = logging.getLogger("plainvit")
EVERY = 10.0  # seconds between lines that tell how far it is
MADE_AT_ONCE = 2**25  # pixels that are augmented together: some hundred megabytes
SHARE = 0.3  # of the free device memory that a set may take
T = TypeVar("T")


def ahead(make: Callable[[int], T], items: Iterable[int]) -> Generator[T]:
    """As map, with the next result made by a thread meanwhile: the host is free while it waits for the device.

    Threads of a process share its stream, so that what uses a result comes after what makes it there too.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # a new thread would take the first
    with ThreadPoolExecutor(1, "ahead", torch.cuda.set_device, (device,)) as pool:
        coming = None
        for item in items:
            last, coming = coming, pool.submit(make, item)
            if last:
                yield last.result()
        if coming:
            yield coming.result()


def steps_at_once(images: int, size: tuple[int, int], device: torch.device) -> int:
    """On a GPU, small batches would wait for Python, which starts as many kernels for few images as for many."""
    pixels = images * 3 * size[0] * size[1]
    return min(max(MADE_AT_ONCE // pixels, 1), 32) if device.type == "cuda" else 1


class ResidentMemoryError(ValueError):
    """Images that have to be resident do not fit into memory; the command ends with exit code 5."""

    exit_code = 5


def available_bytes(device: torch.device) -> int:
    """Of the device's memory; of the host's including what the page cache would give back."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def extents_that_fit(
    source: Source, device: torch.device, wanted: bool = False, force: bool = False
) -> np.ndarray | None:
    """Sizes [N, 2] of all images if they fit, padded to the largest: judged by a sample of them, then by all.

    wanted: the run began with them in memory, and they may take all of it; where they do not fit, that is an error,
    or with `force` a warning.
    """
    if len(source) > 2_000_000 and not wanted:
        return None
    free = available_bytes(device)
    if wanted:
        side, most = math.inf, free
    elif device.type == "cuda":
        side, most = 256, free * SHARE
    else:  # where cutting a small image out of a large canvas takes longer than decoding it again
        side, most = 160, min(free * SHARE, 4e9)
    extents = np.empty((0, 2), int)
    few = np.unique(np.linspace(0, len(source) - 1, min(len(source), 64)).astype(int))
    for chosen in (np.arange(len(source)),) if wanted else (few, np.arange(len(source))):
        extents = _extents(source, chosen)
        height, width = (int(one) for one in extents.max(0))
        needed = len(source) * height * width * 3
        if height * width > side * side or needed > most:
            if wanted:
                _tell_short(needed, free, device, force)
            return None
    return extents


def _tell_short(needed: float, free: float, device: torch.device, force: bool) -> None:
    words = (
        f"the run began with its images in memory, {needed / 1e9:.3g} GB, but {free / 1e9:.3g} GB are free on {device}"
    )
    if not force:
        raise ResidentMemoryError(f"{words}: free memory, or give --force to read them from disk from now on")
    log.warning("%s: they are read from disk from now on, and rounded to grey levels", words)


def _extents(source: Source, index: np.ndarray) -> np.ndarray:
    title = f"the sizes of {len(index):,} images are read"
    return np.array([_extent(source, int(one)) for one in _told(index, len(index), title)])


def _extent(source: Source, index: int) -> tuple[int, int]:
    """Of an image that cannot be read, that of the next one, which stands in for it."""
    try:
        return source.extent(index)
    except (ImageError, OSError):
        return readable(source, index)[2]


def _told(items: Iterable[T], count: int, title: str) -> Iterator[T]:
    """The same items, with a line now and then; of several processes that do the same, the first tells of it."""
    last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last > EVERY and os.environ.get("RANK", "0") == "0":
            last = time.monotonic()
            log.warning("%s: %d %%", title, 100 * done // count)


class Resident:
    """A whole set as uint8 on the device, each image in the corner of a canvas as large as the largest."""

    def __init__(
        self, source: Source, device: torch.device, bad: dict[int, str], extents: np.ndarray | None = None
    ) -> None:
        images, sizes = decode_all(source, bad, extents=extents)
        self.full = bool((sizes == torch.tensor(images.shape[2:])).all())  # no image leaves a part of its canvas free
        self.images, self.sizes = images.to(device), sizes.to(device)  # [N, 3, H, W], [N, 2]
        self.labels = torch.from_numpy(source.labels).long().to(device)
        # On a GPU some hundred small kernels would wait for Python: compiled they are a handful. The uniforms stay
        # outside (Inductor's CPU code for their 64-bit arithmetic wrote out of bounds under torch 2.15), and so does
        # a policy, whose slices are others at each step.
        on_gpu = device.type == "cuda"
        self.batch = torch.compile(self._batch, dynamic=False) if on_gpu else self._batch
        self.finish = torch.compile(finish, dynamic=False) if on_gpu else finish

    def _batch(self, where: Tensor, u: Tensor, augment: Augment, out: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Images and labels of the samples `where`, augmented as their uniforms say."""
        return finish(self.cut(where, u, augment, out), u, augment), self.labels[where]

    def cut(self, index: Tensor, u: Tensor, augment: Augment, out: tuple[int, int]) -> Tensor:
        """The boxes of a batch, resized: floats in [0, 1], or uint8 where nothing is resampled."""
        images = self.images[index]
        same = self.full and tuple(images.shape[2:]) == out
        if same and augment.crop == "none":
            return images
        boxes = crop_boxes(u, self.sizes[index], augment, out)
        if same and augment.crop == "pad":
            return shifted(images, boxes[:, :2].long(), augment.pad)
        return resize_boxes(images, boxes, out, augment.pad if augment.crop == "pad" else 0)


def shifted(images: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """Windows of the images' own size at (top, left) [B, 2], up to `pad` beyond them, where there are zeros."""
    _, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    rows = offsets[:, :1] + pad + torch.arange(height, device=images.device)  # [B, H]
    columns = offsets[:, 1:] + pad + torch.arange(width, device=images.device)  # [B, W]
    places = rows.unsqueeze(2) * padded.shape[3] + columns.unsqueeze(1)  # [B, H, W]
    return padded.flatten(2).gather(2, places.flatten(1).unsqueeze(1).expand(-1, 3, -1)).view_as(images)


def resize_boxes(images: Tensor, boxes: Tensor, out: tuple[int, int], pad: int = 0) -> Tensor:
    """A box (top, left, height, width) of each image, resized: floats in [0, 1], [B, 3, *out].

    The filter is that of antialiased bilinear resizing in torchvision and Pillow, so images in memory equal those read
    from disk, except that the latter are rounded to grey levels. Boxes may reach `pad` pixels beyond the image, into
    zeros.
    """
    top, left, height, width = (boxes[:, i : i + 1].float() for i in range(4))
    x = _resize_rows(images, top, height, out[0], pad)  # [B, 3, out, W]
    x = _resize_rows(x.transpose(2, 3), left, width, out[1], pad).transpose(2, 3)  # [B, 3, *out]
    return (x / 255).clamp(max=1)


def _resize_rows(images: Tensor, start: Tensor, length: Tensor, out: int, pad: int) -> Tensor:
    """Rows [start, start + length) of each image [B, 3, H, W] to [B, 3, out, W].

    Tap by tap in place of one matrix product: sums are then the same however many images are in the batch.
    """
    size, scale = images.shape[2], length / out  # [B, 1]
    centre = start + (torch.arange(out, device=images.device) + 0.5) * scale  # [B, out]
    reach = scale.clamp(min=1)
    first = (centre - reach).floor()
    total, weights = 0.0, 0.0
    for tap in range(2 * math.ceil(max((size + 2 * pad) / out, 1)) + 1):
        row = first + tap
        weight = (1 - (row + 0.5 - centre).abs() / reach).clamp(min=0)
        weight = weight * ((row + 0.5 > start) & (row + 0.5 < start + length))
        inside = weight * ((row >= 0) & (row < size))
        index = row.clamp(0, size - 1).long()[:, None, :, None].expand(-1, images.shape[1], -1, images.shape[3])
        total = total + inside[:, None, :, None] * images.gather(2, index)
        weights = weights + weight
    assert isinstance(weights, Tensor)
    return total / weights[:, None, :, None]


def decode_all(
    source: Source, bad: dict[int, str], threads: int | None = None, extents: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """Every image as uint8 [N, 3, H, W] with its size [N, 2]; threads, since the decoder lets go of the interpreter."""
    count, threads = len(source), threads or os.cpu_count() or 1
    extents = _extents(source, np.arange(count)) if extents is None else extents
    height, width = (int(one) for one in extents.max(0))
    images = torch.zeros((count, 3, height, width), dtype=torch.uint8)
    canvas = images.numpy()

    def fill(start: int) -> None:
        for index in range(start, min(start + 256, count)):
            try:
                pixels = decode(source.read(index))
                canvas[index, :, : pixels.shape[0], : pixels.shape[1]] = pixels.transpose(2, 0, 1)
                extents[index] = pixels.shape[:2]
            except (ImageError, OSError) as error:
                bad[index] = str(error)

    with ThreadPoolExecutor(threads) as pool:
        starts = range(0, count, 256)
        list(_told(pool.map(fill, starts), len(starts), f"{count:,} images are read"))
    refuse_many(len(bad), count)
    return images, torch.from_numpy(extents)
