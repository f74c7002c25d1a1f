"""One training step: the next batch, its gradients, and its loss back on the host.

loop.py then updates the weights, or skips the update if the loss or the gradient is NaN or Inf (nonfinite.py).
Everything random in a step follows from (seed, step), so any step can be run again: `plainvit replay`.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plainvit.runtime.parallel import full_tensor
from plainvit.train.signals import decode_signal, encode_signal

if TYPE_CHECKING:
    from plainvit.data.loader import Batch
    from plainvit.train.state import Training


class Prefetcher:
    """Prepares the next batch while the device works on the current one."""

    def __init__(self, run: "Training", batches: "Iterator[Batch]") -> None:
        self.run, self.batches, self.step = run, batches, run.progress.step
        self.ready: tuple[Batch, tuple[Tensor, ...]] | None = None

    def fill(self) -> float:
        """Prepares the next batch, unless it is ready or the run ends before it; returns the seconds it took."""
        started = time.perf_counter()
        if self.ready is None and self.step < self.run.steps:
            batch = next(self.batches)
            self.ready = batch, self.run.objective.make_inputs(batch, self.step)
            self.step += 1
        return time.perf_counter() - started

    def next(self) -> "tuple[Batch, tuple[Tensor, ...]]":
        assert self.ready
        ready, self.ready = self.ready, None
        return ready


class PendingStep:
    """Loss, correct images, gradient norm and signals of a step that the device may still be computing."""

    def __init__(self, run: "Training", values: Tensor) -> None:
        self.size = size = run.world.size
        values = torch.cat((values, values.new_full((1,), encode_signal(run.signals, size))))
        if size > 1:  # loss and norm are averaged over the processes, correct images and signals are summed
            values = run.world.sum(values / values.new_tensor((size, 1, size, 1)))
        self.values = values.to("cpu", non_blocking=True)
        self.event = torch.cuda.Event() if values.is_cuda else None
        if self.event:
            self.event.record()

    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def read(self) -> tuple[float, float, float, int]:
        """(loss, correct images, gradient norm before clipping, signal). The one place where a step waits."""
        if self.event:
            self.event.synchronize()
        loss, correct, norm, signals = self.values.tolist()
        return loss, correct, norm, decode_signal(signals, self.size)


def start_step(run: "Training", tensors: tuple[Tensor, ...]) -> PendingStep:
    """Starts the forward and backward pass of the current step."""
    # In eval mode there is no dropout or stochastic depth, and a CUDA graph of such a step would be replayed to the end
    assert all(module.training for module in run.objective.modules()), "a training step needs training mode"
    torch.manual_seed(step_seed(run.config.seed, run.world.rank, run.progress.step))  # of dropout and stochastic depth
    size = run.progress.micro_batch or len(tensors[0])
    return PendingStep(run, run.gradients(*tensors, micro_batch=size))


@dataclass
class Gradients:
    """Forward and backward pass over all micro-batches, then clipping; the gradients stay on the parameters."""

    forward: Callable[..., Any]  # the objective, perhaps in DDP and compiled
    parameters: list[nn.Parameter]
    cast: Callable[[], AbstractContextManager]
    clip: float
    synchronize: Callable[[bool], AbstractContextManager]  # of the last micro-batch, or of an earlier one

    def __call__(self, *tensors: Tensor, micro_batch: int) -> Tensor:
        """Returns [loss, correct images, gradient norm before clipping]; the norm is that of the global batch."""
        total = len(tensors[0])
        loss = correct = torch.zeros((), device=tensors[0].device)
        parts = list(zip(*(tensor.split(micro_batch) for tensor in tensors), strict=True))
        for number, part in enumerate(parts, 1):
            with self.synchronize(number == len(parts)):
                with self.cast():
                    part_loss, part_correct = self.forward(*part)
                part_loss = part_loss * (len(part[0]) / total)
                part_loss.backward()
            loss, correct = loss + part_loss.detach(), correct + part_correct
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.clip:
            # A non-finite norm counts as 0, which clips nothing: divided by it, all gradients would become NaN or 0,
            # and nobody could tell in which parameters it began
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm.nan_to_num(0.0, 0.0, 0.0))
        return torch.stack((loss.float(), correct.float(), full_tensor(norm).float()))


def step_seed(seed: int, rank: int, step: int) -> int:
    """63 bits that follow from all three."""
    digest = hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1
