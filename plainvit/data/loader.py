"""Batches in an order that is a function of (seed, step) alone, by one of two ways to the device.

    loader = Loader(source, batch=512, size=(64, 64), augment=Augment(), seed=0, device="cuda")
    for batch in loader.batches(start=step):            # goes on exactly where another process stopped

Streamed: worker processes read, decode, crop and flip to uint8; the device colours, erases and mixes. Resident: a
set that fits is decoded once into device memory as uint8, and everything happens there, batched. Boxes, flips and
colours come from the same numbers either way. A worker that dies is replaced, and its batch made again.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator
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
from plainvit.data.decode import size as encoded_size
from plainvit.data.order import Order, uniforms
from plainvit.data.sources import Source
from plainvit.data.transforms import DRAWS, TRIES, crop_boxes, cut, finish, prepare

BAD_SHARE = 0.01  # training goes on below this share of images that cannot be decoded
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
        per_image = bool(augment.randaugment[0] or augment.three_augment)  # torchvision's, one image at a time
        if mode == "resident" and per_image:
            raise ValueError(
                "a resident set has no randaugment or three_augment, which work image by image: use mode 'streamed'"
            )
        fits = not per_image and _fits(source, self.device)
        self.resident = (
            Resident(source, self.device, self.bad) if mode == "resident" or (mode == "auto" and fits) else None
        )
        for index, reason in self.bad.items():
            log.warning("%s: %s", source.name(index), reason)

    def positions(self, step: int) -> np.ndarray:
        """Global positions of this process's part of a step's batch."""
        start = step * self.batch + self.rank * self.share
        return np.arange(start, start + self.share)

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
                rest = self.augment.replace(flip=0.0)  # the workers have flipped
                images = finish(images, self._uniforms(step), rest) if rest.colour or rest.erase else images
                yield Batch(images, labels, index.numpy(), bad)

    def _resident(self, start: int, stop: int | None) -> Generator[Batch]:
        assert self.resident is not None
        step = start
        while stop is None or step < stop:
            index = self._good(self.order.sample(self.positions(step)))
            where = torch.from_numpy(index).to(self.device, non_blocking=True)
            images, labels = self.resident.batch(where, self._uniforms(step), self.augment, self.size)
            yield Batch(images, labels, index)
            step += 1

    def _uniforms(self, step: int) -> Tensor:
        start = step * self.batch + self.rank * self.share
        position = torch.arange(start, start + self.share, device=self.device)
        return uniforms(self.seed, position // len(self.source), position % len(self.source), DRAWS)

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
        if len(self.bad) > max(BAD_SHARE * len(self.source), 1):
            raise DataError(
                f"{len(self.bad)} of {len(self.source)} images cannot be decoded, over {BAD_SHARE:.0%}: check them"
            )


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
    work = _Evaluate(source, index, batch, size, preprocess)
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
        self.seed, self.positions, self.chain = loader.seed, loader.positions, _chain(loader.augment)

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
            images[place] = self._augmented(images[place], u[place])
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

    def _augmented(self, image: Tensor, u: Tensor) -> Tensor:
        """torchvision's own augmentations, seeded by the sample: they draw from torch's global generator."""
        if not self.chain:
            return image
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int((u[4 * TRIES :].double() * 2**24).long().sum()) + int(u[0].double() * 2**53))
            for transform in self.chain:
                image = transform(image)
        return image


def _chain(augment: Augment) -> list[Any]:
    if not augment.randaugment[0] and not augment.three_augment:
        return []
    from torchvision.transforms import v2

    chain: list[Any] = []
    if augment.randaugment[0]:
        chain.append(v2.RandAugment(augment.randaugment[0], augment.randaugment[1], fill=[128, 128, 128]))
    if augment.three_augment:
        chain.append(v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(128, p=1), v2.GaussianBlur(9, (0.1, 2.0))]))
    return chain


class _Evaluate(Dataset[Made]):
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
            extent = data.shape[:2] if isinstance(data, np.ndarray) else encoded_size(data)
            return one, data, (int(extent[0]), int(extent[1])), flaws
        except (ImageError, OSError) as error:
            flaws.append((one, str(error)))
    raise DataError("no image of the set can be read")


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


def _fits(source: Source, device: torch.device) -> bool:
    """Whether all images, padded to the largest, fit: judged by a sample of their headers, then by all of them."""
    if len(source) > 2_000_000:
        return False
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] * RESIDENT_SHARE
    else:
        free = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") * RESIDENT_SHARE, 4e9)
    few = np.unique(np.linspace(0, len(source) - 1, min(len(source), 64)).astype(int))
    for chosen in (few, range(len(source))):
        extents = (_readable(source, int(index))[2] for index in chosen)
        height, width = (max(sides) for sides in zip(*extents, strict=True))
        if height * width > 160 * 160 or len(source) * height * width * 3 > free:
            return False
    return True


class Resident:
    """A whole set as uint8 on the device, each image in the corner of a canvas as large as the largest."""

    def __init__(self, source: Source, device: torch.device, bad: dict[int, str]) -> None:
        images, sizes = decode_all(source, bad)
        self.images, self.sizes = images.to(device), sizes.to(device)  # [N, 3, H, W], [N, 2]
        self.labels = torch.from_numpy(source.labels).long().to(device)
        # On a GPU some hundred small kernels would wait for Python: compiled they are a handful. (The uniforms stay
        # outside: Inductor's CPU code for their 64-bit arithmetic wrote out of bounds under torch 2.15.)
        self.batch = torch.compile(self._batch, dynamic=False) if device.type == "cuda" else self._batch

    def _batch(self, where: Tensor, u: Tensor, augment: Augment, out: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Images and labels of the samples `where`, augmented as their uniforms say."""
        return finish(self.cut(where, u, augment, out), u, augment), self.labels[where]

    def cut(self, index: Tensor, u: Tensor, augment: Augment, out: tuple[int, int]) -> Tensor:
        """The boxes of a batch, resized: floats in [0, 1], or uint8 where nothing is resampled."""
        images, sizes = self.images[index], self.sizes[index]
        boxes = crop_boxes(u, sizes, augment, out)
        if augment.crop == "none" and tuple(images.shape[2:]) == out:
            return images
        return sample_boxes(images, boxes, out, zeros=augment.crop == "pad")


def sample_boxes(images: Tensor, boxes: Tensor, out: tuple[int, int], *, zeros: bool = False) -> Tensor:
    """Bilinear samples of a box of each image [B, 3, *out]; where it shrinks, several samples a pixel are averaged."""
    shrink = max(images.shape[2] / out[0], images.shape[3] / out[1])
    over = 1 if shrink <= 1 else 2 if shrink <= 2 else 4
    fine = (out[0] * over, out[1] * over)
    top, left, height, width = (boxes[:, i : i + 1] for i in range(4))
    y = top - 0.5 + (torch.arange(fine[0], device=boxes.device) + 0.5) * (height / fine[0])  # [B, H'] pixel centres
    x = left - 0.5 + (torch.arange(fine[1], device=boxes.device) + 0.5) * (width / fine[1])
    if not zeros:  # as resizing the cut-out would: its border pixels go on
        y = torch.minimum(torch.maximum(y, top), top + height - 1)
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


def decode_all(source: Source, bad: dict[int, str], threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Every image as uint8 [N, 3, H, W] with its size [N, 2]; threads, since the decoder lets go of the interpreter."""
    from concurrent.futures import ThreadPoolExecutor

    count, threads = len(source), threads or os.cpu_count() or 1
    extents = np.array([_readable(source, i)[2] for i in range(count)])
    height, width = (int(side) for side in extents.max(0))
    images = torch.zeros((count, 3, height, width), dtype=torch.uint8)
    canvas = images.numpy()

    def fill(start: int) -> None:
        for index in range(start, min(start + 256, count)):
            try:
                data = source.read(index)
                pixels = data if isinstance(data, np.ndarray) else decode(data)
                canvas[index, :, : pixels.shape[0], : pixels.shape[1]] = pixels.transpose(2, 0, 1)
                extents[index] = pixels.shape[:2]
            except (ImageError, OSError) as error:
                bad[index] = str(error)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, range(0, count, 256)))
    if len(bad) > max(BAD_SHARE * count, 1):
        raise DataError(f"{len(bad)} of {count} images cannot be decoded, over {BAD_SHARE:.0%}: check them")
    return images, torch.from_numpy(extents)
