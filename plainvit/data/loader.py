"""Training and evaluation batches. The order depends on (seed, step) alone.

    loader = Loader(source, batch=512, size=(64, 64), augment=Augment(), seed=0, device="cuda")
    for batch in loader.batches(start=step):            # continues exactly where another process stopped

mode="streamed"    worker processes read, decode, crop and flip to uint8; the device does the rest
mode="cached"      the same, but each image is decoded once and its pixels are kept (cache.py)
mode="resident"    images are decoded into device memory as uint8, and augmented there (resident.py)

All use the same random numbers, but resizing differs slightly, so a run records its mode.
"""

import contextlib
import itertools
import logging
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plainvit.config import Augment, Preprocess, pluralize
from plainvit.data.cache import open_cache
from plainvit.data.decode import DataError
from plainvit.data.order import Order, uniforms
from plainvit.data.resident import Resident, find_resident_sizes, prefetch, steps_at_once
from plainvit.data.sources import Source
from plainvit.data.transforms import NUM_UNIFORMS, augment_batch, to_device
from plainvit.data.workers import (
    EvaluationBatches,
    TrainingBatches,
    check_bad_count,
    default_workers,
    inference_workers,
    run_workers,
)

log = logging.getLogger("plainvit")


@dataclass
class Batch:
    """Images [B, 3, H, W] (uint8, or floats in [0, 1]), labels [B] and their indices in the source."""

    images: Tensor
    labels: Tensor
    index: np.ndarray
    bad: list[tuple[int, str]] = field(default_factory=list)  # (index, reason) of images that could not be decoded

    @property
    def readable(self) -> Tensor:
        """[B], whether each image could be decoded."""
        return torch.from_numpy(~np.isin(self.index, [index for index, _ in self.bad]))


class Loader:
    """Training batches of one source: this process's part of each global batch."""

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        size: tuple[int, int],
        augment: Augment,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int | None = None,
        device: str | torch.device = "cpu",
        mode: Literal["auto", "streamed", "cached", "resident"] = "auto",
        force: bool = False,
    ) -> None:
        """mode="resident" raises if memory is too small; with `force` the images are streamed instead."""
        if batch % world_size:
            raise ValueError(f"--batch {batch} must be a multiple of the {world_size} processes")
        self.source, self.size, self.augment, self.seed = source, size, augment, seed
        self.batch, self.rank, self.local_batch = batch, rank, batch // world_size
        self.device = torch.device(device)
        self.workers = default_workers() if workers is None else workers
        self.order = Order(len(source), seed, repeats=augment.repeats)
        self.bad: dict[int, str] = {}
        self.randaugment = None
        if augment.randaugment[0] or augment.three_augment:
            from plainvit.data.randaugment import RandAugment  # imports torchvision, which takes a second

            self.randaugment = RandAugment(augment, size, self.device)
        self._draws = NUM_UNIFORMS + (self.randaugment.draws if self.randaugment else 0)
        # Color and erasing follow RandAugment, if there is one; flips come before it
        self._augment_before = augment.replace(color=0.0, erase=0.0) if self.randaugment else augment
        self._augment_after = augment.replace(flip=0.0)
        self.resident = self.cache = None
        if mode in ("auto", "resident"):
            self.resident = self._open_resident(required=mode == "resident", force=force)
        if mode in ("auto", "cached") and not self.resident:
            self.cache = open_cache(source, augment, size, required=mode == "cached")

    def _open_resident(self, *, required: bool, force: bool) -> Resident | None:
        sizes = find_resident_sizes(self.source, self.device, required, force)
        if sizes is None:
            return None
        resident = Resident(self.source, self.device, self.bad, sizes)
        for index, reason in self.bad.items():
            log.warning("%s: %s", self.source.name(index), reason)
        return resident

    @property
    def mode(self) -> Literal["streamed", "cached", "resident"]:
        if self.resident:
            return "resident"
        return "streamed" if self.cache is None else "cached"

    def stream(self) -> None:
        """Decode images for each batch: where the processes of a run have memory for different modes."""
        self.resident = self.cache = None

    def positions(self, step: int) -> range:
        """Global positions of this process's part of a step's batch."""
        start = step * self.batch + self.rank * self.local_batch
        return range(start, start + self.local_batch)

    def batches(self, start: int = 0, stop: int | None = None) -> Generator[Batch]:
        """Yield the batches of steps `start` to `stop`, without end if `stop` is None."""
        batches = self._resident_batches(start, stop) if self.resident else self._streamed_batches(start, stop)
        with contextlib.closing(batches):  # ends the workers, also when the caller breaks or raises
            for batch in batches:
                self._record_bad(batch.bad)
                yield batch

    def _streamed_batches(self, start: int, stop: int | None) -> Generator[Batch]:
        self.source.load()
        items = run_workers(TrainingBatches(self), start, stop, self.workers, pin=self.device.type == "cuda")
        with contextlib.closing(items):
            for step, (images, labels, index, bad) in items:
                images, labels = (x.to(self.device, non_blocking=True) for x in (images, labels))
                if self.randaugment or self._augment_after.color or self._augment_after.erase:
                    images = self._finish(images, self._draw_uniforms(range(step, step + 1)))
                yield Batch(images, labels, index.numpy(), bad)

    def _resident_batches(self, start: int, stop: int | None) -> Generator[Batch]:
        """Make several steps at once. A step is always made with the same others, so that resuming is exact."""
        chunk = steps_at_once(self.local_batch, self.size, self.device)
        first = start - start % chunk
        firsts = itertools.count(first, chunk) if stop is None else range(first, stop, chunk)
        make_ahead = prefetch if chunk > 1 else map
        chunks = make_ahead(lambda step: self._make_batches(range(step, step + chunk)), firsts)
        batches = itertools.chain.from_iterable(chunks)
        yield from itertools.islice(batches, start - first, None if stop is None else stop - first)

    def _make_batches(self, steps: range) -> list[Batch]:
        assert self.resident is not None
        index = self._replace_bad(self.order.sample(np.concatenate([self.positions(step) for step in steps])))
        u = self._draw_uniforms(steps)
        device_index, device_u = (to_device(x, self.device) for x in (torch.from_numpy(index), u))
        images, labels = self.resident.batch(device_index, device_u, self._augment_before, self.size)
        images = self._finish(images, u) if self.randaugment else images
        parts = images.split(self.local_batch), labels.split(self.local_batch), np.split(index, len(steps))
        return [Batch(*part) for part in zip(*parts, strict=True)]

    def _finish(self, images: Tensor, u: Tensor) -> Tensor:
        """The augmentation after cropping and flipping: policy, color and erasing."""
        augment = self._augment_after
        if self.randaugment:
            images = self.randaugment(images, u[:, NUM_UNIFORMS:])
        if augment.color or augment.erase:
            apply = self.resident.finish if self.resident else augment_batch
            images = apply(images, to_device(u, self.device), augment)
        return images

    def _draw_uniforms(self, steps: range) -> Tensor:
        """Random numbers of these steps: on the host if a policy reads them, otherwise on the device."""
        device = "cpu" if self.randaugment else self.device
        position = torch.cat([torch.arange(p.start, p.stop, device=device) for p in map(self.positions, steps)])
        return uniforms(self.seed, position // len(self.source), position % len(self.source), self._draws)

    def _replace_bad(self, index: np.ndarray) -> np.ndarray:
        """Replace each image that cannot be decoded by the next one that can."""
        if len(self.bad) == len(self.source):
            raise DataError("no image of the set can be decoded")
        bad = list(self.bad)
        is_bad = np.isin(index, bad)
        while is_bad.any():
            index = np.where(is_bad, (index + 1) % len(self.source), index)
            is_bad = np.isin(index, bad)
        return index

    def _record_bad(self, bad: list[tuple[int, str]]) -> None:
        for index, reason in bad:
            if index not in self.bad:
                self.bad[index] = reason
                count = pluralize(len(self.bad), "unreadable image")
                log.warning("%s: %s (%s so far)", self.source.name(index), reason, count)
        check_bad_count(len(self.bad), len(self.source))


def evaluation_batches(
    source: Source,
    *,
    batch: int,
    size: tuple[int, int],
    preprocess: Preprocess,
    rank: int = 0,
    world_size: int = 1,
    workers: int | None = 0,
    device: str | torch.device = "cpu",
) -> Generator[Batch]:
    """Yield every image of the source once over all processes, in order; the last batch may be smaller.

    workers=None chooses the number.
    """
    index = np.arange(rank, len(source), world_size)
    work = EvaluationBatches(source, index, batch, size, preprocess)
    workers = min(inference_workers(len(index), device) if workers is None else workers, len(work))
    if workers:
        source.load()
    items = run_workers(work, 0, len(work), workers, pin=torch.device(device).type == "cuda")
    with contextlib.closing(items):
        for _, (images, labels, indices, bad) in items:
            images, labels = (x.to(device, non_blocking=True) for x in (images, labels))
            yield Batch(images, labels, indices.numpy(), bad)
