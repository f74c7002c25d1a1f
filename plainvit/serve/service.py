"""One served model: bytes of photos -> predictions, features or explanations, within limits.

    service = Service("photos", Predictor("runs/photos"), Limits())
    await service.run("logits", [photo], time.monotonic() + 10)

Every limit is checked before memory is allocated for what it limits. A photo that cannot be decoded, or that the model
fails on, is an exception in its place; the others of the request are answered.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from plainvit.data.decode import ImageError
from plainvit.evaluate.predictor import Predictor
from plainvit.serve.backends import Backend
from plainvit.serve.batcher import Batcher, DeadlineError, Result
from plainvit.serve.explain import Explainer
from plainvit.serve.metrics import Metrics
from plainvit.serve.requests import Limits, check_photo

NICE = 5  # of the threads that compute: a third of the event loop's weight


def lower_priority() -> None:
    """Lets the event loop respond while the model computes: on Linux, threads that a thread starts inherit it."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class OverloadError(Exception):
    """The queue is full: the client should try again."""

    def __init__(self) -> None:
        super().__init__("the server is busy: too many images are waiting")


class Service:
    """A model with its decoders and its batchers."""

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        limits: Limits,
        backend: Backend | None = None,
        metrics: Metrics | None = None,
        explainer: Explainer | None = None,
    ) -> None:
        self.name, self.predictor, self.limits = name, predictor, limits
        self.explainer = explainer  # None: explanations are turned off
        self.metrics = metrics or Metrics()
        self.waiting = 0  # images that were admitted and not answered yet
        self.metrics.waiting.labels(name).set_function(lambda: self.waiting)
        self.rate = 0.0  # images per second of recent batches; 0 before the first
        compute = backend or predictor
        options = limits.max_batch, ThreadPoolExecutor(1, "model", lower_priority), self._observe
        self.batchers = {
            "logits": Batcher(compute.logits, *options),
            "features": Batcher(compute.features, *options),
        }
        threads = os.cpu_count() or 1
        self.slots = asyncio.Semaphore(threads)
        # More threads than slots, because some may be held by slow images
        self.decoders = ThreadPoolExecutor(2 * threads, "decode", lower_priority)

    def _observe(self, images: int, seconds: float) -> None:
        rate = images / max(seconds, 1e-6)
        self.rate = 0.8 * self.rate + 0.2 * rate if self.rate else rate
        self.metrics.batch_images.labels(self.name).observe(images)
        self.metrics.batch_seconds.labels(self.name).observe(seconds)

    def estimate_capacity(self) -> int:
        """Images that may wait: as many as the model computes in half of the deadline, as its speed may vary."""
        if not self.rate:
            return self.limits.max_queue
        in_time = int(0.5 * self.limits.deadline * self.rate)
        return min(self.limits.max_queue, max(in_time, self.limits.max_batch))

    def admit(self, images: int = 1) -> None:
        """Raises OverloadError if there is no room for so many more images. An idle server accepts any request."""
        if self.waiting and self.waiting + images > self.estimate_capacity():
            raise OverloadError

    async def run(self, output: str, photos: Sequence[bytes], deadline: float) -> list[Result]:
        """The rows of `logits` or `features` of encoded photos, or the exception of each that failed."""
        self.admit(len(photos))
        self.waiting += len(photos)
        try:
            decoded = await asyncio.gather(*(self.decode(photo, deadline) for photo in photos), return_exceptions=True)
            images = [image for image in decoded if isinstance(image, Tensor)]
            rows = iter(await self.batchers[output].submit(images, deadline))
            return [next(rows) if isinstance(image, Tensor) else image for image in decoded]
        finally:
            self.waiting -= len(photos)

    async def decode(self, photo: bytes, deadline: float) -> Tensor:
        """uint8 [3, H, W]. The time in the queue does not count as decoding."""
        async with self.slots:
            if time.monotonic() > deadline:
                raise DeadlineError
            loop, limit = asyncio.get_running_loop(), self.limits.decode_seconds
            try:
                return await asyncio.wait_for(loop.run_in_executor(self.decoders, self._decode, photo), limit)
            except TimeoutError as error:
                raise ImageError(f"the image takes longer than {limit:g} s to decode") from error

    def _decode(self, photo: bytes) -> Tensor:
        check_photo(photo, int(self.limits.max_megapixels * 1e6))
        return self.predictor.load_image(photo)
