"""Worker processes that read, decode and cut, and are replaced where they die; and what is done about bad images."""

import functools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from plainvit.config import Preprocess
from plainvit.data.decode import DataError, ImageError
from plainvit.data.decode import size as extent_of
from plainvit.data.order import uniforms
from plainvit.data.sources import Source
from plainvit.data.transforms import DRAWS, TRIES, crop_boxes, cut, prepare

if TYPE_CHECKING:
    from plainvit.data.loader import Loader

BAD_SHARE = 0.01  # training goes on below this share of images that cannot be decoded
log = logging.getLogger("plainvit")
Made = tuple[Tensor, Tensor, Tensor, list[tuple[int, str]]]


def default_workers() -> int:
    """Data workers for one process: its share of this machine's cores, at most 8."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    share = (os.cpu_count() or 1) // max(int(processes) if processes.isdecimal() else 1, 1)
    return max(min(share, 8), 1)


class Train(Dataset[Made]):
    """One item is one step's batch, made whole by one worker."""

    def __init__(self, loader: "Loader") -> None:
        self.source, self.order, self.augment, self.size = loader.source, loader.order, loader.augment, loader.size
        self.seed, self.positions = loader.seed, loader.positions

    def __getitem__(self, step: int) -> Made:
        position = self.positions(step)
        index = self.order.sample(position)
        epoch = torch.from_numpy(self.order.epoch(position))
        inside = torch.from_numpy(position % self.order.count)
        u = uniforms(self.seed, epoch, inside, DRAWS)
        read = [readable(self.source, int(one)) for one in index]
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
            other, data, extent, _ = readable(self.source, (index + step) % len(self.source))
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


def readable(source: Source, index: int) -> Readable:
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


def in_order(
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
        worker_init_fn=functools.partial(_end_with_parent, os.getpid()),
    )
    items = iter(pool)
    if workers and threading.current_thread() is threading.main_thread():
        # torch's handler raises a worker's death in whatever code the main thread runs; next() notices it as well
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal_handling._SIGCHLD_handler_set = False
    return items


def _end_with_parent(parent: int, _: int) -> None:
    """In a worker. torch's own look at the parent comes between items only: not while one is read, decoded or sent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="ends with its parent", daemon=True).start()


class _Caught(Dataset[Any]):
    """An error travels back as it is, with its own words, instead of a worker's traceback."""

    def __init__(self, work: Dataset[Made]) -> None:
        self.work = work

    def __getitem__(self, step: int) -> Made | Exception:
        try:
            return self.work[step]
        except Exception as error:
            return error.with_traceback(None)


def refuse_many(bad: int, count: int) -> None:
    if bad > max(BAD_SHARE * count, 1):
        raise DataError(f"{bad} of {count} images cannot be decoded, over {BAD_SHARE:.0%}: check them")
