"""A data set held in device memory as uint8, cropped and augmented there, several steps at a time.

With small images on a GPU the host is the bottleneck: kernels are compiled, launched for several steps at once, and
launched by a thread while the device works on earlier steps.
"""

import logging
import math
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.config import Augment
from plainvit.data.content_hash import map_images
from plainvit.data.cores_and_memory import MEMORY_FRACTION, available_memory, memory_budget
from plainvit.data.decode import ImageError, decode
from plainvit.data.sources import Source
from plainvit.data.transforms import augment_batch, crop_boxes
from plainvit.data.workers import check_bad_count, read_next

log = logging.getLogger("plainvit")
PIXELS_AT_ONCE = 2**25  # augmented together: some hundred megabytes
T = TypeVar("T")


def prefetch(make: Callable[[int], T], items: Iterable[int]) -> Generator[T]:
    """Like map, with a thread that computes the next result. Both threads use one CUDA stream, so the order holds."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # a new thread would use GPU 0
    with ThreadPoolExecutor(1, "prefetch", torch.cuda.set_device, (device,)) as pool:
        pending = None
        for item in items:
            previous, pending = pending, pool.submit(make, item)
            if previous:
                yield previous.result()
        if pending:
            yield pending.result()


def steps_at_once(images: int, size: tuple[int, int], device: torch.device) -> int:
    """Steps to make together on a GPU, where launching kernels takes longer than running them on small batches."""
    pixels = images * 3 * size[0] * size[1]
    return min(max(PIXELS_AT_ONCE // pixels, 1), 32) if device.type == "cuda" else 1


class ResidentMemoryError(ValueError):
    """Images of a run that must be resident do not fit into memory; the command ends with exit code 5."""

    exit_code = 5


def find_resident_sizes(source: Source, device: torch.device, required: bool, force: bool) -> np.ndarray | None:
    """Sizes [N, 2] of all images if they fit into memory, padded to the largest; otherwise None.

    required: the run started with resident images, which may take all free memory; if they do not fit, that is an
    error, or with `force` a warning. Otherwise a sample of 64 images is tested first.
    """
    if len(source) > 2_000_000 and not required:
        return None
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if required:
        side_limit, byte_limit = math.inf, free
    elif device.type == "cuda":
        side_limit, byte_limit = 256, free * MEMORY_FRACTION
    else:  # on a CPU, cropping a large padded image takes longer than decoding it again
        side_limit, byte_limit = 160, min(memory_budget(), 4e9)

    def count_bytes(sizes: np.ndarray) -> float:
        """Memory for all images, padded to the largest of these; infinite if that is too large."""
        height, width = (int(side) for side in sizes.max(0))
        return math.inf if height * width > side_limit**2 else len(source) * height * width * 3

    if not required and count_bytes(np.array([_read_size(source, index) for index in source.sample()])) > byte_limit:
        return None
    reading = f"reading the sizes of {len(source):,} images"
    sizes = np.array(list(map_images(partial(_read_size, source), source, reading)))
    needed = count_bytes(sizes)
    if needed <= byte_limit:
        return sizes
    if required:
        gigabytes = f"{needed / 1e9:.3g} GB of images in memory, but {device} has {free / 1e9:.3g} GB free"
        problem = f"the run started with its {gigabytes}"
        if not force:
            raise ResidentMemoryError(f"{problem}: free memory, or use --force to read images from disk")
        log.warning("%s: images are read from disk from now on, which resizes them slightly differently", problem)
    return None


def _read_size(source: Source, index: int) -> tuple[int, int]:
    """The size of an image, or of the next readable one, which replaces it."""
    try:
        return source.extent(index)
    except (ImageError, OSError):
        return read_next(source, index)[2]


class Resident:
    """All images as uint8 on the device, each padded to the size of the largest."""

    def __init__(self, source: Source, device: torch.device, bad: dict[int, str], extents: np.ndarray) -> None:
        images, sizes = decode_all(source, bad, extents)
        self.is_unpadded = bool((sizes == torch.tensor(images.shape[2:])).all())
        self.images, self.sizes = images.to(device), sizes.to(device)  # [N, 3, H, W], [N, 2]
        self.labels = torch.from_numpy(source.labels).long().to(device)
        # Compiling turns some hundred small kernels into a few. Uniforms are not compiled (Inductor's CPU code for
        # their 64-bit arithmetic wrote out of bounds under torch 2.15), nor is RandAugment (slices change each step).
        on_gpu = device.type == "cuda"
        self.batch = torch.compile(self._batch, dynamic=False) if on_gpu else self._batch
        self.finish = torch.compile(augment_batch, dynamic=False) if on_gpu else augment_batch

    def _batch(self, index: Tensor, u: Tensor, augment: Augment, out: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Augmented images and labels of these samples."""
        return augment_batch(self.crop(index, u, augment, out), u, augment), self.labels[index]

    def crop(self, index: Tensor, u: Tensor, augment: Augment, out: tuple[int, int]) -> Tensor:
        """Crop and resize a batch: floats in [0, 1], or uint8 if nothing is resampled."""
        images = self.images[index]
        has_output_size = self.is_unpadded and tuple(images.shape[2:]) == out
        if has_output_size and augment.crop == "none":
            return images
        boxes = crop_boxes(u, self.sizes[index], augment, out)
        if has_output_size and augment.crop == "pad":
            return shift(images, boxes[:, :2].long(), augment.pad)
        return resize_boxes(images, boxes, out, augment.pad if augment.crop == "pad" else 0)


def shift(images: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """Shift each image by its (top, left) offset [B, 2] of up to `pad` pixels, filling with zeros."""
    _, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    rows = offsets[:, :1] + pad + torch.arange(height, device=images.device)  # [B, H]
    columns = offsets[:, 1:] + pad + torch.arange(width, device=images.device)  # [B, W]
    index = rows.unsqueeze(2) * padded.shape[3] + columns.unsqueeze(1)  # [B, H, W]
    return padded.flatten(2).gather(2, index.flatten(1).unsqueeze(1).expand(-1, 3, -1)).view_as(images)


def resize_boxes(images: Tensor, boxes: Tensor, out: tuple[int, int], pad: int = 0) -> Tensor:
    """Resize a box (top, left, height, width) of each image: floats in [0, 1], [B, 3, *out].

    The filter is torchvision's and Pillow's antialiased bilinear one: results equal those of streamed images, except
    that these are rounded to uint8. Boxes may extend `pad` pixels beyond the image, where pixels are zero.
    """
    top, left, height, width = (boxes[:, i : i + 1].float() for i in range(4))
    x = _resize_rows(images, top, height, out[0], pad)  # [B, 3, out, W]
    x = _resize_rows(x.transpose(2, 3), left, width, out[1], pad).transpose(2, 3)  # [B, 3, *out]
    return (x / 255).clamp(max=1)


def _resize_rows(images: Tensor, start: Tensor, length: Tensor, out: int, pad: int) -> Tensor:
    """Resize rows [start, start + length) of each image [B, 3, H, W] to [B, 3, out, W].

    Added tap by tap, not with a matmul, so that results do not depend on the batch size.
    """
    size, scale = images.shape[2], length / out  # [B, 1]
    center = start + (torch.arange(out, device=images.device) + 0.5) * scale  # [B, out]
    reach = scale.clamp(min=1)
    first = (center - reach).floor()
    total, weights = 0.0, 0.0
    for tap in range(2 * math.ceil(max((size + 2 * pad) / out, 1)) + 1):
        row = first + tap
        weight = (1 - (row + 0.5 - center).abs() / reach).clamp(min=0)
        weight = weight * ((row + 0.5 > start) & (row + 0.5 < start + length))
        inside = weight * ((row >= 0) & (row < size))
        index = row.clamp(0, size - 1).long()[:, None, :, None].expand(-1, images.shape[1], -1, images.shape[3])
        total = total + inside[:, None, :, None] * images.gather(2, index)
        weights = weights + weight
    assert isinstance(weights, Tensor)
    return total / weights[:, None, :, None]


def decode_all(source: Source, bad: dict[int, str], extents: np.ndarray) -> tuple[Tensor, Tensor]:
    """Decode every image of these sizes: uint8 [N, 3, H, W] and sizes [N, 2]."""
    count = len(source)
    height, width = (int(side) for side in extents.max(0))
    images = torch.zeros((count, 3, height, width), dtype=torch.uint8)
    canvas = images.numpy()

    def fill(index: int) -> None:
        try:
            pixels = decode(source.read(index))
            canvas[index, :, : pixels.shape[0], : pixels.shape[1]] = pixels.transpose(2, 0, 1)
            extents[index] = pixels.shape[:2]
        except (ImageError, OSError) as error:
            bad[index] = str(error)

    for _ in map_images(fill, source, f"reading {count:,} images"):
        pass
    check_bad_count(len(bad), count)
    return images, torch.from_numpy(extents)
