"""The dynamic batcher: images of many requests -> batches of one model.

    batcher = Batcher(predictor.logits, max_batch=32)
    logits = await batcher.submit(images, deadline)       # uint8 [n, 3, H, W] -> n rows, each a Tensor or an exception

While the model computes, images queue up; when it is free, it takes the oldest, up to max_batch. So batches grow with
the load and a lone request does not wait. It takes every image: `Service.admit` rejects requests when the queue is
full. If the model is free, the images of one request form one batch: the outputs
are those of the same batch offline, bit for bit.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plainvit.models.inference import check_finite

Compute = Callable[[Tensor], Tensor]
GROUP = 8  # results that are set without a pause; a response takes about 0.5 ms of the event loop


class DeadlineError(Exception):
    """The request could not be answered before its deadline."""


@dataclass(eq=False)
class Item:
    """One image that waits for its row of the output."""

    image: Tensor  # [3, H, W]
    result: "asyncio.Future[Tensor]"
    deadline: float  # time.monotonic()


@dataclass
class Batcher:
    """Queues images and runs them in batches, one batch at a time, in the thread of `executor`.

    That thread takes the next batch itself: the model never waits for a busy event loop.
    """

    compute: Compute
    max_batch: int = 32
    executor: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "model"))
    observe: Callable[[int, float], None] | None = None  # called with the images and seconds of each batch

    def __post_init__(self) -> None:
        self.queue: deque[Item] = deque()
        self.lock, self.is_scheduled = threading.Lock(), False

    async def submit(self, images: Sequence[Tensor], deadline: float) -> list[Tensor | BaseException]:
        """One row or one exception per image: an image that fails does not affect the others."""
        loop = asyncio.get_running_loop()
        results = [loop.create_future() for _ in images]
        self.queue.extend(Item(*pair, deadline) for pair in zip(images, results, strict=True))
        self._schedule()
        try:
            if results:
                await asyncio.wait(results, timeout=max(deadline - time.monotonic(), 0.0))
        finally:
            for result in results:
                result.cancel()  # the model is too slow, or the client has gone
        late = DeadlineError("the request could not be answered before its deadline")
        return [late if row.cancelled() else row.exception() or row.result() for row in results]

    def _schedule(self) -> None:
        """Queue the next batch in the model's thread, where other batchers may be first."""
        with self.lock:
            if self.queue and not self.is_scheduled:
                self.is_scheduled = True
                self.executor.submit(self._run_batch)

    def _run_batch(self) -> None:
        """Runs in the model's thread."""
        if batch := self._take():
            start = time.monotonic()
            outputs = self._compute([item.image for item in batch])
            if self.observe:
                self.observe(len(batch), time.monotonic() - start)
            asyncio.run_coroutine_threadsafe(_set_results(batch, outputs), batch[0].result.get_loop())
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

    def _compute(self, images: list[Tensor]) -> list[Tensor | BaseException]:
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


async def _set_results(batch: Sequence[Item], outputs: Sequence[Tensor | BaseException]) -> None:
    """Sets the results in groups, so that new requests are accepted or rejected in between."""
    for number, (item, output) in enumerate(zip(batch, outputs, strict=True)):
        if number % GROUP == GROUP - 1:
            await asyncio.sleep(0)
        if item.result.cancelled():
            continue
        if isinstance(output, Tensor):
            item.result.set_result(output)
        else:
            item.result.set_exception(output)
