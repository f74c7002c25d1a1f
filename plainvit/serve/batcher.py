"""The dynamic batcher: images of many requests -> batches of one model.

    batcher = Batcher(predictor.logits, max_batch=32)
    logits = await batcher.submit(images, deadline)       # uint8 [n, 3, H, W] -> n rows, each a Tensor or an exception

While the model computes, images queue up; when it is free, it takes the oldest, up to max_batch. So batches grow with
the load and a lone request does not wait. If the model is free, the images of one request form one batch: the outputs
are those of the same batch offline, bit for bit.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plainvit.models.inference import check_finite

Compute = Callable[[Tensor], Tensor]


class OverloadError(Exception):
    """The queue is full: the client should retry after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__("the server is busy: too many images are waiting")
        self.seconds = seconds


class DeadlineError(Exception):
    """The request could not be answered before its deadline."""


@dataclass(eq=False)
class Item:
    """One image that waits for its row of the output."""

    image: Tensor  # [3, H, W]
    deadline: float  # time.monotonic()
    result: "asyncio.Future[Tensor]"


@dataclass
class Batcher:
    """Queues images and runs them in batches, one batch at a time, in the thread of `executor`."""

    compute: Compute
    max_batch: int = 32
    executor: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "model"))
    observe: Callable[[int, float], None] | None = None  # called with the images and seconds of each batch

    def __post_init__(self) -> None:
        self.queue: deque[Item] = deque()
        self.running: asyncio.Task[None] | None = None

    async def submit(self, images: Sequence[Tensor], deadline: float) -> list[Tensor | BaseException]:
        """One row or one exception per image: an image that fails does not affect the others."""
        loop = asyncio.get_running_loop()
        items = [Item(image, deadline, loop.create_future()) for image in images]
        self.queue.extend(items)
        if self.running is None or self.running.done():
            self.running = loop.create_task(self._run())
        results = [item.result for item in items]
        try:
            if results:
                await asyncio.wait(results, timeout=max(deadline - time.monotonic(), 0.0))
        finally:
            for result in results:
                result.cancel()  # the model is too slow, or the client has gone
        late = DeadlineError("the request could not be answered before its deadline")
        return [late if one.cancelled() else one.exception() or one.result() for one in results]

    async def _run(self) -> None:
        """Runs batches until the queue is empty."""
        loop = asyncio.get_running_loop()
        while batch := self._take():
            start = time.monotonic()
            outputs = await loop.run_in_executor(self.executor, self._compute, [item.image for item in batch])
            if self.observe:
                self.observe(len(batch), time.monotonic() - start)
            for item, output in zip(batch, outputs, strict=True):
                if item.result.cancelled():
                    continue
                if isinstance(output, Tensor):
                    item.result.set_result(output)
                else:
                    item.result.set_exception(output)

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
            if not bool(outputs.isfinite().all()):
                check_finite(outputs, lambda _: "this image")
            return list(outputs.unbind())
        except BaseException as error:  # also SystemExit: nobody may wait for a row that never comes
            if len(images) == 1:
                return [error]
            half = len(images) // 2
            return [*self._compute(images[:half]), *self._compute(images[half:])]
