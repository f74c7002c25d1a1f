"""The dynamic batcher: images of many requests -> batches of one model.

    batcher = Batcher(predictor.logits, 32, ThreadPoolExecutor(1), observe)
    logits = await batcher.submit(images, deadline)       # uint8 [n, 3, H, W] -> n rows, each a Tensor or an exception

While the model computes, images queue up; when it is free, it takes the oldest, up to max_batch. So batches grow with
the load and a lone request does not wait. It takes every image: `Service.admit` rejects requests when the queue is
full. If the model is free, the images of one request form one batch: the outputs are those of the same batch offline,
bit for bit.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from plainvit.models.inference import check_finite

Compute = Callable[[Tensor], Tensor]
Result = Tensor | BaseException  # of one image


class DeadlineError(Exception):
    """The request could not be answered before its deadline."""

    def __init__(self) -> None:
        super().__init__("the request could not be answered before its deadline")


@dataclass(eq=False)
class Item:
    """One image that waits for its row of the output."""

    image: Tensor  # [3, H, W]
    result: asyncio.Future[Result]
    deadline: float  # time.monotonic()


class Batcher:
    """Queues images and runs them in batches, one batch at a time, in the thread of `executor`.

    That thread takes the next batch itself: the model never waits for a busy event loop. `observe` is called with the
    number of images and the seconds of each batch.
    """

    def __init__(self, compute: Compute, max_batch: int, executor: Executor, observe: Callable[[int, float], None]):
        self.compute, self.max_batch, self.executor, self.observe = compute, max_batch, executor, observe
        self.queue: deque[Item] = deque()
        self.lock, self.is_scheduled = threading.Lock(), False

    async def submit(self, images: Sequence[Tensor], deadline: float) -> list[Result]:
        """One row or one exception per image: an image that fails does not affect the others."""
        if not images:
            return []
        loop = asyncio.get_running_loop()
        items = [Item(image, loop.create_future(), deadline) for image in images]
        self.queue.extend(items)
        self._schedule()
        results = [item.result for item in items]
        try:
            await asyncio.wait(results, timeout=max(deadline - time.monotonic(), 0.0))
        finally:
            for result in results:
                result.cancel()  # the model is too slow, or the client has gone
        return [DeadlineError() if result.cancelled() else result.result() for result in results]

    def _schedule(self) -> None:
        """Queue the next batch in the model's thread, where other batchers may be first."""
        with self.lock:
            if self.queue and not self.is_scheduled:
                self.is_scheduled = True
                self.executor.submit(self._run_batch)

    def _run_batch(self) -> None:
        """Runs in the model's thread."""
        batch = self._take()
        if batch:
            start = time.monotonic()
            outputs = self._compute([item.image for item in batch])
            self.observe(len(batch), time.monotonic() - start)
            batch[0].result.get_loop().call_soon_threadsafe(_set_results, batch, outputs)
        self.is_scheduled = False
        self._schedule()

    def _take(self) -> list[Item]:
        """The oldest images; those that nobody waits for any more are dropped without computing them."""
        batch: list[Item] = []
        now = time.monotonic()
        while self.queue and len(batch) < self.max_batch:
            item = self.queue.popleft()
            if item.deadline > now and not item.result.cancelled():
                batch.append(item)
        return batch

    def _compute(self, images: list[Tensor]) -> list[Result]:
        """Outputs of a batch. If the model fails, each half is tried alone, so that only the images at fault fail."""
        try:
            outputs = self.compute(torch.stack(images)).cpu()
            check_finite(outputs, lambda _: "this image")
            return list(outputs.unbind())
        except BaseException as error:  # also SystemExit: nobody may wait for a row that never comes
            if len(images) == 1:
                return [error]
            half = len(images) // 2
            return [*self._compute(images[:half]), *self._compute(images[half:])]


def _set_results(batch: Sequence[Item], outputs: Sequence[Result]) -> None:
    """Runs in the event loop."""
    for item, output in zip(batch, outputs, strict=True):
        if not item.result.cancelled():
            item.result.set_result(output)
