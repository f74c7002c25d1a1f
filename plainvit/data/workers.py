"""Worker processes that read, decode and crop images, are restarted if they die, and skip damaged images."""

import functools
import logging
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
from plainvit.data.cores_and_memory import count_cores, count_local_processes
from plainvit.data.decode import DataError, ImageError
from plainvit.data.order import uniforms
from plainvit.data.sources import Source
from plainvit.data.transforms import NUM_UNIFORMS, TRIES, crop_and_resize, crop_boxes, preprocess_image
from plainvit.errors import first_line

if TYPE_CHECKING:
    from plainvit.data.loader import Loader

FEW_IMAGES = 64
BAD_FRACTION = 0.01  # of the images may be undecodable; more stop the training
log = logging.getLogger("plainvit")
Item = tuple[Tensor, Tensor, Tensor, list[tuple[int, str]]]


def default_workers() -> int:
    """Data workers per process: its part of the machine's cores, less one for the process itself."""
    return max(count_cores() // count_local_processes() - 1, 1)


def inference_workers(images: int, device: str | torch.device) -> int:
    """Data workers of a process that does not train: none for few images, which are read sooner than workers start.

    A model on a CPU keeps half of the cores.
    """
    if images < FEW_IMAGES:
        return 0
    cores = count_cores() // count_local_processes()
    return min(default_workers(), 16) if torch.device(device).type == "cuda" else max(min(cores // 2, 8), 1)


class TrainingBatches(Dataset[Item]):
    """One item is the batch of one step."""

    def __init__(self, loader: "Loader") -> None:
        self.source = loader.source if loader.cache is None else loader.cache
        self.order, self.augment, self.size = loader.order, loader.augment, loader.size
        self.seed, self.positions = loader.seed, loader.positions

    def __getitem__(self, step: int) -> Item:
        position = np.asarray(self.positions(step))
        index = self.order.sample(position)
        epoch = torch.from_numpy(self.order.epoch(position))
        inside = torch.from_numpy(position % self.order.count)
        u = uniforms(self.seed, epoch, inside, NUM_UNIFORMS)
        read = [read_next(self.source, int(i)) for i in index]
        index = np.array([i for i, _, _, _ in read])
        extents = torch.tensor([extent for _, _, extent, _ in read])
        boxes = crop_boxes(u, extents, self.augment, self.size)
        images = torch.empty((len(index), 3, *self.size), dtype=torch.uint8)
        bad = [error for *_, errors in read for error in errors]
        for row, (i, data, extent, _) in enumerate(read):
            try:
                images[row] = self._flip(crop_and_resize(data, boxes[row], self.size, extent), u[row])
            except ImageError as error:  # the header is intact but the pixels are damaged
                bad.append((i, str(error)))
                images[row], index[row] = self._replace(i, u[row])
        return images, torch.from_numpy(self.source.labels[index]).long(), torch.from_numpy(index), bad

    def _flip(self, image: Tensor, u: Tensor) -> Tensor:
        """Flip in the worker: 7 us per image, compared with 270 us for torch.where on the batch on a CPU."""
        return image.flip(-1) if u[4 * TRIES] < self.augment.flip else image

    def _replace(self, index: int, u: Tensor) -> tuple[Tensor, int]:
        """The next image that can be decoded, and its index."""
        for step in range(1, len(self.source)):
            other, data, extent, _ = read_next(self.source, (index + step) % len(self.source))
            try:
                box = crop_boxes(u.unsqueeze(0), torch.tensor([extent]), self.augment, self.size)[0]
                return self._flip(crop_and_resize(data, box, self.size, extent), u), other
            except ImageError:
                continue
        raise DataError("no image of the set can be decoded")


class EvaluationBatches(Dataset[Item]):
    """One item is one evaluation batch, each image preprocessed for the model."""

    def __init__(
        self, source: Source, index: np.ndarray, batch: int, size: tuple[int, int], preprocess: Preprocess
    ) -> None:
        self.source, self.index, self.batch, self.size, self.preprocess = source, index, batch, size, preprocess

    def __len__(self) -> int:
        return -(-len(self.index) // self.batch)

    def __getitem__(self, step: int) -> Item:
        index = self.index[step * self.batch : (step + 1) * self.batch]
        images = torch.zeros((len(index), 3, *self.size), dtype=torch.uint8)
        bad: list[tuple[int, str]] = []
        for row, i in enumerate(index):
            try:
                images[row] = preprocess_image(self.source.read(int(i)), self.preprocess, self.size)
            except (ImageError, OSError) as error:
                bad.append((int(i), str(error)))
        return images, torch.from_numpy(self.source.labels[index]).long(), torch.from_numpy(index.copy()), bad


def read_next(source: Source, index: int) -> tuple[int, bytes | np.ndarray, tuple[int, int], list[tuple[int, str]]]:
    """(index, data, size, errors of skipped images) of the first image from `index` on whose header can be read."""
    errors: list[tuple[int, str]] = []
    for step in range(len(source)):
        i = (index + step) % len(source)
        try:
            return i, *source.read_with_extent(i), errors
        except (ImageError, OSError) as error:
            errors.append((i, str(error)))
    raise DataError(f"no image of {source.spec or 'the set'} can be read")


def run_workers(
    work: Dataset[Item], start: int, stop: int | None, workers: int, *, pin: bool
) -> Generator[tuple[int, Item]]:
    """Yield (step, item) in order from `start` on. If a worker dies, the pool is restarted at the current step."""
    step, failures = start, 0
    while stop is None or step < stop:
        items = _start_pool(work, step, stop, workers, pin=pin)
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
                problem = f"data workers died three times at step {step} ({first_line(error)})"
                raise DataError(f"{problem}: use fewer --workers, or free memory") from error
            log.warning("a data worker died at step %d; restarting the workers", step)
        finally:
            if workers:
                items._shutdown_workers()


def _start_pool(work: Dataset[Item], start: int, stop: int | None, workers: int, *, pin: bool) -> Any:
    """An iterator over the items of all steps. It does not use torch's global random generator."""
    steps = range(start, stop if stop is not None else start + 2**40)
    pool = DataLoader(
        _ReturnErrors(work),
        sampler=steps,  # pyright: ignore[reportArgumentType]
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=max(min(4, 32 // workers), 1) if workers else None,  # at most 32 batches, unless more workers
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator(),
        worker_init_fn=functools.partial(_exit_with_parent, os.getpid()),
    )
    items = iter(pool)
    if workers and threading.current_thread() is threading.main_thread():
        # torch's handler would raise a worker's death at any point of the main thread; next() raises it too
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal_handling._SIGCHLD_handler_set = False
    return items


def _exit_with_parent(parent: int, _: int) -> None:
    """Exit a worker whose parent is gone; torch checks that only between items."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="exit with parent", daemon=True).start()


class _ReturnErrors(Dataset[Any]):
    """Returns errors as items, so that they are raised unchanged and not as a worker's traceback."""

    def __init__(self, work: Dataset[Item]) -> None:
        self.work = work

    def __getitem__(self, step: int) -> Item | Exception:
        try:
            return self.work[step]
        except Exception as error:
            return error.with_traceback(None)


def check_bad_count(bad: int, count: int) -> None:
    if bad > max(BAD_FRACTION * count, 1):
        limit = f"over the limit of {BAD_FRACTION:.0%}"
        raise DataError(f"{bad} of {count} images cannot be decoded, {limit}: run `plainvit data check` to list them")
