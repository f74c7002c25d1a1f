"""Batches in an order that is a function of (seed, step) alone, by one of two ways to the device.

    loader = Loader(source, batch=512, size=(64, 64), augment=Augment(), seed=0, device="cuda")
    for batch in loader.batches(start=step):            # goes on exactly where another process stopped

Streamed: worker processes read, decode, crop and flip to uint8; the device does the rest. Resident: a set that fits is
decoded once into device memory as uint8, and everything happens there, batched. Boxes, flips, operations and colours
come from the same numbers either way. A worker that dies is replaced, and its batch made again.
"""

import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from plainvit.config import Augment, Preprocess
from plainvit.data.decode import DataError, ImageError, decode
from plainvit.data.decode import size as extent_of
from plainvit.data.order import Order, uniforms
from plainvit.data.policy import Policy, to_device
from plainvit.data.sources import Source
from plainvit.data.transforms import DRAWS, TRIES, crop_boxes, cut, finish, prepare

BAD_SHARE = 0.01  # training goes on below this share of images that cannot be decoded
MADE_AT_ONCE = 2**25  # pixels of a resident set that are augmented together: some hundred megabytes
RESIDENT_SHARE = 0.3  # of the free device memory that a resident set may take
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
    ) -> None:
        if batch % world:
            raise ValueError(f"a batch of {batch} cannot be shared equally by {world} processes")
        self.source, self.size, self.augment, self.seed = source, size, augment, seed
        self.batch, self.rank, self.share = batch, rank, batch // world
        self.device = torch.device(device)
        self.workers = min(os.cpu_count() or 1, 8) if workers is None else workers
        self.order = Order(len(source), seed, repeats=augment.repeats)
        self.bad: dict[int, str] = {}
        wanted = augment.randaugment[0] or augment.three_augment
        self.policy = Policy(augment, size, self.device) if wanted else None
        self._draws = DRAWS + (self.policy.draws if self.policy else 0)
        self._before = augment.replace(colour=0.0, erase=0.0) if self.policy else augment  # in resident memory
        self._after = augment.replace(flip=0.0)  # the workers have flipped, or what comes before a policy has
        extents = _extents_that_fit(source, self.device) if mode == "auto" else None
        held = mode == "resident" or extents is not None
        self.resident = Resident(source, self.device, self.bad, extents) if held else None
        for index, reason in self.bad.items():
            log.warning("%s: %s", source.name(index), reason)

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
        made = _in_order(_Train(self), start, stop, self.workers, pin=self.device.type == "cuda")
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
        _refuse_many(len(self.bad), len(self.source))


def ahead(make: Callable[[int], list[Batch]], items: Iterable[int]) -> Generator[list[Batch]]:
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


def _refuse_many(bad: int, count: int) -> None:
    if bad > max(BAD_SHARE * count, 1):
        raise DataError(f"{bad} of {count} images cannot be decoded, over {BAD_SHARE:.0%}: check them")


def evaluation_batches(
    source: Source,
    *,
    batch: int,
    size: tuple[int, int],
    preprocess: Preprocess,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    device: str | torch.device = "cpu",
) -> Generator[Batch]:
    """Every image of the source once over all processes, in order; the last batch may be smaller."""
    index = np.arange(rank, len(source), world)
    work = Evaluate(source, index, batch, size, preprocess)
    made = _in_order(work, 0, len(work), workers, pin=torch.device(device).type == "cuda")
    with contextlib.closing(made):
        for _, (images, labels, where, bad) in made:
            images, labels = (x.to(device, non_blocking=True) for x in (images, labels))
            yield Batch(images, labels, where.numpy(), bad)


Made = tuple[Tensor, Tensor, Tensor, list[tuple[int, str]]]


class _Train(Dataset[Made]):
    """One item is one step's batch, made whole by one worker."""

    def __init__(self, loader: Loader) -> None:
        self.source, self.order, self.augment, self.size = loader.source, loader.order, loader.augment, loader.size
        self.seed, self.positions = loader.seed, loader.positions

    def __getitem__(self, step: int) -> Made:
        position = self.positions(step)
        index = self.order.sample(position)
        epoch = torch.from_numpy(self.order.epoch(position))
        inside = torch.from_numpy(position % self.order.count)
        u = uniforms(self.seed, epoch, inside, DRAWS)
        read = [_readable(self.source, int(one)) for one in index]
        index = np.array([one for one, _, _, _ in read])
        extents = torch.tensor([extent for _, _, extent, _ in read])
        boxes = crop_boxes(u, extents, self.augment, self.size)
        images = torch.empty((len(index), 3, *self.size), dtype=torch.uint8)
        bad = [flaw for *_, flaws in read for flaw in flaws]
        for place, (one, data, extent, _) in enumerate(read):
            try:
                images[place] = self._flipped(cut(data, boxes[place], self.size, extent), u[place])
            except ImageError as error:  # its header was sound, its pixels are not: another stands in
                bad.append((one, str(error)))
                images[place], index[place] = self._stand_in(one, u[place])
        return images, torch.from_numpy(self.source.labels[index]).long(), torch.from_numpy(index), bad

    def _flipped(self, image: Tensor, u: Tensor) -> Tensor:
        """By the worker: 7 us an image, where a CPU needs 270 us for its part of a batch of torch.where."""
        return image.flip(-1) if u[4 * TRIES] < self.augment.flip else image

    def _stand_in(self, index: int, u: Tensor) -> tuple[Tensor, int]:
        for step in range(1, len(self.source)):
            other, data, extent, _ = _readable(self.source, (index + step) % len(self.source))
            try:
                box = crop_boxes(u.unsqueeze(0), torch.tensor([extent]), self.augment, self.size)[0]
                return self._flipped(cut(data, box, self.size, extent), u), other
            except ImageError:
                continue
        raise DataError("no image of the set can be decoded")


class Evaluate(Dataset[Made]):
    """One item is one step's batch of an evaluation, each image as its model sees it."""

    def __init__(
        self, source: Source, index: np.ndarray, batch: int, size: tuple[int, int], preprocess: Preprocess
    ) -> None:
        self.source, self.index, self.batch, self.size, self.preprocess = source, index, batch, size, preprocess

    def __len__(self) -> int:
        return -(-len(self.index) // self.batch)

    def __getitem__(self, step: int) -> Made:
        index = self.index[step * self.batch : (step + 1) * self.batch]
        images = torch.zeros((len(index), 3, *self.size), dtype=torch.uint8)
        bad: list[tuple[int, str]] = []
        for place, one in enumerate(index):
            try:
                images[place] = prepare(self.source.read(int(one)), self.preprocess, self.size)
            except (ImageError, OSError) as error:
                bad.append((int(one), str(error)))
        return images, torch.from_numpy(self.source.labels[index]).long(), torch.from_numpy(index.copy()), bad


Readable = tuple[int, bytes | np.ndarray, tuple[int, int], list[tuple[int, str]]]


def _readable(source: Source, index: int) -> Readable:
    """(index, data, extent, what was wrong with those before it): the next image whose header can be read."""
    flaws: list[tuple[int, str]] = []
    for step in range(len(source)):
        one = (index + step) % len(source)
        try:
            data = source.read(one)
            return one, data, extent_of(data), flaws
        except (ImageError, OSError) as error:
            flaws.append((one, str(error)))
    raise DataError(f"no image of {source.spec or 'the set'} can be read")


def _in_order(
    work: Dataset[Made], start: int, stop: int | None, workers: int, *, pin: bool
) -> Generator[tuple[int, Made]]:
    """(step, item) from `start` on. A killed worker costs a restart of the pool from the step that is due."""
    step, failures = start, 0
    while stop is None or step < stop:
        items = _pool(work, step, stop, workers, pin=pin)
        try:
            while stop is None or step < stop:
                item = next(items)
                if isinstance(item, Exception):
                    raise item
                failures = 0
                yield step, item
                step += 1
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not workers or ("DataLoader worker" not in str(error) and isinstance(error, RuntimeError)):
                raise
            failures += 1
            if failures == 3:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise DataError(f"data workers died three times at step {step}: {reason}") from error
            log.warning("a data worker died at step %d; the batch is made again", step)
        finally:
            if workers:
                items._shutdown_workers()


def _pool(work: Dataset[Made], start: int, stop: int | None, workers: int, *, pin: bool) -> Any:
    """An iterator over steps, made by worker processes. It draws nothing from torch's global generator."""
    steps = range(start, stop if stop is not None else start + 2**40)
    pool = DataLoader(
        _Caught(work),
        sampler=steps,  # pyright: ignore[reportArgumentType]
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        multiprocessing_context=multiprocessing.get_context("fork") if workers and os.name == "posix" else None,
        generator=torch.Generator(),
    )
    items = iter(pool)
    if workers and threading.current_thread() is threading.main_thread():
        # torch's handler raises a worker's death in whatever code the main thread runs; next() notices it as well
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal_handling._SIGCHLD_handler_set = False
    return items


class _Caught(Dataset[Any]):
    """An error travels back as it is, with its own words, instead of a worker's traceback."""

    def __init__(self, work: Dataset[Made]) -> None:
        self.work = work

    def __getitem__(self, step: int) -> Made | Exception:
        try:
            return self.work[step]
        except Exception as error:
            return error.with_traceback(None)


def _extents_that_fit(source: Source, device: torch.device) -> np.ndarray | None:
    """Sizes [N, 2] of all images if they fit, padded to the largest: judged by a sample of them, then by all."""
    if len(source) > 2_000_000:
        return None
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] * RESIDENT_SHARE
    else:
        free = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") * RESIDENT_SHARE, 4e9)
    extents = np.empty((0, 2), int)
    few = np.unique(np.linspace(0, len(source) - 1, min(len(source), 64)).astype(int))
    for chosen in (few, np.arange(len(source))):
        extents = _extents(source, chosen)
        height, width = (int(side) for side in extents.max(0))
        if height * width > 160 * 160 or len(source) * height * width * 3 > free:
            return None
    return extents


def _extents(source: Source, index: np.ndarray) -> np.ndarray:
    return np.array([_readable(source, int(one))[2] for one in index])


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
        return sample_boxes(images, boxes, out, zeros=augment.crop == "pad")


def shifted(images: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """Windows of the images' own size at (top, left) [B, 2], up to `pad` beyond them, where there are zeros."""
    _, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    rows = offsets[:, :1] + pad + torch.arange(height, device=images.device)  # [B, H]
    columns = offsets[:, 1:] + pad + torch.arange(width, device=images.device)  # [B, W]
    places = rows.unsqueeze(2) * padded.shape[3] + columns.unsqueeze(1)  # [B, H, W]
    return padded.flatten(2).gather(2, places.flatten(1).unsqueeze(1).expand(-1, 3, -1)).view_as(images)


def sample_boxes(images: Tensor, boxes: Tensor, out: tuple[int, int], *, zeros: bool = False) -> Tensor:
    """Bilinear samples of a box of each image [B, 3, *out]; where it shrinks, several samples a pixel are averaged."""
    shrink = max(images.shape[2] / out[0], images.shape[3] / out[1])
    over = 1 if shrink <= 1 else 2 if shrink <= 2 else 4
    fine = (out[0] * over, out[1] * over)
    top, left, height, width = (boxes[:, i : i + 1] for i in range(4))
    y = top - 0.5 + (torch.arange(fine[0], device=boxes.device) + 0.5) * (height / fine[0])  # [B, H'] pixel centres
    x = left - 0.5 + (torch.arange(fine[1], device=boxes.device) + 0.5) * (width / fine[1])
    y = torch.minimum(torch.maximum(y, top), top + height - 1)  # as resizing the cut-out would: its border pixels go on
    x = torch.minimum(torch.maximum(x, left), left + width - 1)
    size_h, size_w = images.shape[2], images.shape[3]
    grid = torch.stack(
        (
            ((2 * x + 1) / size_w - 1).unsqueeze(1).expand(-1, fine[0], -1),
            ((2 * y + 1) / size_h - 1).unsqueeze(2).expand(-1, -1, fine[1]),
        ),
        3,
    )  # [B, H', W', 2]
    padding = "zeros" if zeros else "border"
    found = F.grid_sample(images.float() / 255, grid, "bilinear", padding, align_corners=False)
    return found if over == 1 else F.avg_pool2d(found, over)


def decode_all(
    source: Source, bad: dict[int, str], threads: int | None = None, extents: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """Every image as uint8 [N, 3, H, W] with its size [N, 2]; threads, since the decoder lets go of the interpreter."""
    count, threads = len(source), threads or os.cpu_count() or 1
    extents = _extents(source, np.arange(count)) if extents is None else extents
    height, width = (int(side) for side in extents.max(0))
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
        list(pool.map(fill, range(0, count, 256)))
    _refuse_many(len(bad), count)
    return images, torch.from_numpy(extents)
