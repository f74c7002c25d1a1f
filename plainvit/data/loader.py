"""Batches in an order that is a function of (seed, step) alone, by one of two ways to the device.

    loader = Loader(source, batch=512, size=(64, 64), augment=Augment(), seed=0, device="cuda")
    for batch in loader.batches(start=step):            # goes on exactly where another process stopped

Streamed: worker processes read, decode, crop and flip to uint8; the device does the rest. Resident: a set that fits is
decoded once into device memory as uint8, and everything happens there, batched. Boxes, flips, operations and colours
come from the same numbers either way; resizing differs slightly, so a run records which way it began (`mode`). A worker
that dies is replaced, and its batch made again.
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

from plainvit.config import Augment, Preprocess
from plainvit.data.decode import DataError
from plainvit.data.order import Order, uniforms
from plainvit.data.policy import Policy, to_device
from plainvit.data.resident import Resident, ahead, extents_that_fit, steps_at_once
from plainvit.data.sources import Source
from plainvit.data.transforms import DRAWS, finish
from plainvit.data.workers import Evaluate, Train, default_workers, in_order, refuse_many

log = logging.getLogger("plainvit")


@dataclass
class Batch:
    """Images [B, 3, H, W] (uint8, or floats in [0, 1]), labels [B], and where they stand in the source."""

    images: Tensor
    labels: Tensor
    index: np.ndarray
    bad: list[tuple[int, str]] = field(default_factory=list)  # (index, why) of images that could not be decoded


class Loader:
    """Training batches of one source: this process's share of each global batch."""

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        size: tuple[int, int],
        augment: Augment,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        device: str | torch.device = "cpu",
        mode: Literal["auto", "streamed", "resident"] = "auto",
        force: bool = False,
    ) -> None:
        """mode resident is an error where memory is too small for it; forced, images are streamed then."""
        if batch % world:
            raise ValueError(f"a batch of {batch} cannot be shared equally by {world} processes")
        self.source, self.size, self.augment, self.seed = source, size, augment, seed
        self.batch, self.rank, self.share = batch, rank, batch // world
        self.device = torch.device(device)
        self.workers = default_workers() if workers is None else workers
        self.order = Order(len(source), seed, repeats=augment.repeats)
        self.bad: dict[int, str] = {}
        wanted = augment.randaugment[0] or augment.three_augment
        self.policy = Policy(augment, size, self.device) if wanted else None
        self._draws = DRAWS + (self.policy.draws if self.policy else 0)
        self._before = augment.replace(colour=0.0, erase=0.0) if self.policy else augment  # in resident memory
        self._after = augment.replace(flip=0.0)  # the workers have flipped, or what comes before a policy has
        extents = None if mode == "streamed" else extents_that_fit(source, self.device, mode == "resident", force)
        self.resident = None if extents is None else Resident(source, self.device, self.bad, extents)
        for index, reason in self.bad.items():
            log.warning("%s: %s", source.name(index), reason)

    @property
    def mode(self) -> Literal["streamed", "resident"]:
        return "resident" if self.resident else "streamed"

    def positions(self, step: int) -> np.ndarray:
        """Global positions of this process's part of a step's batch."""
        return np.arange(*self._part(step))

    def _part(self, step: int) -> tuple[int, int]:
        start = step * self.batch + self.rank * self.share
        return start, start + self.share

    def batches(self, start: int = 0, stop: int | None = None) -> Generator[Batch]:
        """From step `start` on, without end unless `stop` is given."""
        made = self._resident(start, stop) if self.resident else self._streamed(start, stop)
        with contextlib.closing(made):  # the workers end with the loop that asked for batches, however it ends
            for batch in made:
                self._count(batch.bad)
                yield batch

    def _streamed(self, start: int, stop: int | None) -> Generator[Batch]:
        made = in_order(Train(self), start, stop, self.workers, pin=self.device.type == "cuda")
        with contextlib.closing(made):
            for step, (images, labels, index, bad) in made:
                images, labels = (x.to(self.device, non_blocking=True) for x in (images, labels))
                if self.policy or self._after.colour or self._after.erase:
                    images = self._finished(images, self._uniforms(range(step, step + 1)))
                yield Batch(images, labels, index.numpy(), bad)

    def _resident(self, start: int, stop: int | None) -> Generator[Batch]:
        """Several steps' images are made at once, and always the same steps together, wherever a run goes on."""
        chunk = steps_at_once(self.share, self.size, self.device)
        first = start - start % chunk
        chunks = itertools.count(first, chunk) if stop is None else range(first, stop, chunk)
        made = (ahead if chunk > 1 else map)(lambda at: self._made(range(at, at + chunk)), chunks)
        batches = itertools.chain.from_iterable(made)
        yield from itertools.islice(batches, start - first, None if stop is None else stop - first)

    def _made(self, steps: range) -> list[Batch]:
        assert self.resident is not None
        index = self._good(self.order.sample(np.concatenate([self.positions(step) for step in steps])))
        u = self._uniforms(steps)
        where, there = (to_device(x, self.device) for x in (torch.from_numpy(index), u))
        images, labels = self.resident.batch(where, there, self._before, self.size)
        images = self._finished(images, u) if self.policy else images
        parts = images.split(self.share), labels.split(self.share), np.split(index, len(steps))
        return [Batch(*part) for part in zip(*parts, strict=True)]

    def _finished(self, images: Tensor, u: Tensor) -> Tensor:
        """What follows cropping and flipping: policy, colours and holes."""
        if self.policy:
            images = self.policy(images, u[:, DRAWS:])
        if self._after.colour or self._after.erase:
            finished = self.resident.finish if self.resident else finish
            images = finished(images, to_device(u, self.device), self._after)
        return images

    def _uniforms(self, steps: range) -> Tensor:
        """On the host where a policy reads them, otherwise on the device: they are the same."""
        where = "cpu" if self.policy else self.device
        position = torch.cat([torch.arange(*self._part(step), device=where) for step in steps])
        return uniforms(self.seed, position // len(self.source), position % len(self.source), self._draws)

    def _good(self, index: np.ndarray) -> np.ndarray:
        """The next image that can be decoded stands in for one that cannot."""
        if self.bad:
            index = index.copy()
            for place, one in enumerate(index):
                while int(index[place]) in self.bad:
                    index[place] = (index[place] + 1) % len(self.source)
                    if index[place] == one:
                        raise DataError("no image of the set can be decoded")
        return index

    def _count(self, bad: list[tuple[int, str]]) -> None:
        for index, reason in bad:
            if index not in self.bad:
                self.bad[index] = reason
                log.warning("%s: %s (%d bad so far)", self.source.name(index), reason, len(self.bad))
        refuse_many(len(self.bad), len(self.source))


def evaluation_batches(
    source: Source,
    *,
    batch: int,
    size: tuple[int, int],
    preprocess: Preprocess,
    rank: int = 0,
    world: int = 1,
    workers: int | None = 0,
    device: str | torch.device = "cpu",
) -> Generator[Batch]:
    """Every image of the source once over all processes, in order; the last batch may be smaller.

    workers: None chooses them; a single batch is made without, as one worker would make it alone.
    """
    index = np.arange(rank, len(source), world)
    work = Evaluate(source, index, batch, size, preprocess)
    if workers is None:
        workers = min(default_workers(), len(work)) if len(work) > 1 else 0
    made = in_order(work, 0, len(work), workers, pin=torch.device(device).type == "cuda")
    with contextlib.closing(made):
        for _, (images, labels, where, bad) in made:
            images, labels = (x.to(device, non_blocking=True) for x in (images, labels))
            yield Batch(images, labels, where.numpy(), bad)
