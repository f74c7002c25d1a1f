"""What may go wrong in a run: signals, too little memory, steps with NaN or Inf.

For a step that is not finite, loop.py calls `skip_step` in place of the update; after too many it raises DivergedError.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plainvit.config import largest_divisor
from plainvit.device import is_out_of_memory
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.train.state import uses_fsdp

if TYPE_CHECKING:
    from plainvit.data.loader import Batch
    from plainvit.runtime.display import Display
    from plainvit.train.state import Training

TOGETHER = 2.0  # seconds within which signals count as one


class DivergedError(ValueError):
    """Too many steps had non-finite values; the command ends with exit code 4."""

    exit_code, raised_by_all = 4, True  # all processes of a run raise it


class DeviceMemoryError(ValueError):
    """The device has too little memory; the command ends with exit code 5."""

    exit_code, raised_by_all = 5, False


class InterruptedRunError(ValueError):
    """A signal ended the run after its state was saved; the exit code is 128 + the signal."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: saved at step {step}; run the same command to resume")
        self.exit_code, self.raised_by_all = 128 + number, True


class Terminated(SystemExit):
    """SIGTERM outside of the loop. Like KeyboardInterrupt it is not an Exception, so nobody catches it by accident."""

    exit_code = 128 + signal.SIGTERM

    def __str__(self) -> str:
        return "SIGTERM: run the same command to resume from the last checkpoint"


@contextlib.contextmanager
def handle_signals(handler: Callable[..., None], *numbers: signal.Signals) -> Iterator[None]:
    """Installs a signal handler inside the block; only the main thread can, elsewhere nothing changes."""
    old: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):
        old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM for the loop, which checks after each step. A later one ends the process at once.

    A scheduler signals every process of a job, and torchrun passes the signal on to the same processes: signals that
    arrive together count as one.
    """
    received: list[int] = []
    first = 0.0

    def handle(number: int, _: object) -> None:
        nonlocal first
        if not received:
            received.append(number)
            first = time.monotonic()
        elif time.monotonic() - first > TOGETHER:
            os._exit(128 + number)  # safe: the checkpoint on disk is complete

    with handle_signals(handle, signal.SIGINT, signal.SIGTERM):
        yield received
    if received:  # after the last step that checks: as if it arrived now
        signal.raise_signal(received[0])


def raise_on_termination() -> contextlib.AbstractContextManager[None]:
    """Raises Terminated on SIGTERM inside the block, so that the end of the run is recorded."""

    def handle(*_: object) -> None:
        raise Terminated(Terminated.exit_code)

    return handle_signals(handle, signal.SIGTERM)


# Memory ---------------------------------------------------------------------------------------------------------------


def choose_micro_batch(run: "Training", tensors: tuple[Tensor, ...]) -> int:
    """--micro-batch if given; otherwise the whole batch on a CPU, and what fits every GPU.

    With FSDP it is estimated, not tried: a trial that fails in one process leaves the others waiting in collectives.
    """
    total = len(tensors[0])
    if run.config.micro_batch or tensors[0].device.type == "cpu":  # Linux overcommits: a trial would prove nothing
        return min(run.config.micro_batch or total, total)
    from plainvit.planning.plan import estimate_micro_batch, find_micro_batch

    if uses_fsdp(run.config, run.world):
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        size = estimate_micro_batch(run.config, run.world.size, torch.cuda.mem_get_info()[0] + unused)
    else:
        size = find_micro_batch(total, lambda size: can_compute(run, [tensor[:size] for tensor in tensors]))
    size = int(run.world.gather_rows(torch.tensor([size], device=run.world.device)).min())
    if not size:
        error = DeviceMemoryError("not even one image at a time fits into the device's memory: choose a smaller model")
        error.raised_by_all = True  # all processes raise it
        raise error
    return size


def can_compute(run: "Training", tensors: list[Tensor]) -> bool:
    """Whether a forward and backward pass of these images fits into the device's memory.

    Tried uncompiled, which needs more memory and avoids a compilation per size, and without DDP, so that a failure in
    one process does not stop the others.
    """
    try:
        with run.cast():
            loss, _ = run.objective(*tensors)
        loss.backward()
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        run.optimizers.zero()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def explain_out_of_memory(run: "Training") -> Iterator[None]:
    """Raises DeviceMemoryError, which proposes a smaller --micro-batch, where the device runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(describe_out_of_memory(run)) from error


def describe_out_of_memory(run: "Training") -> str:
    run.checkpoints.close()
    steps, total = run.checkpoints.steps(), run.config.batch // run.world.size
    saved = f"; the checkpoint of step {steps[-1]} is intact" if steps else ""
    smaller = largest_divisor(total, (run.progress.micro_batch or total) // 2)
    hint = f"use --micro-batch {smaller}{' --force' if steps else ''}" if smaller else "use a smaller --batch or model"
    return f"out of memory after step {run.progress.step}: {hint}{saved}"


# Non-finite values ----------------------------------------------------------------------------------------------------


def is_finite_step(loss: float, norm: float) -> bool:
    """Whether the weights may be updated: NaN or Inf in any gradient makes the norm NaN or Inf."""
    return math.isfinite(loss) and math.isfinite(norm)


def skip_step(run: "Training", batch: "Batch", loss: float, norm: float, display: "Display") -> None:
    """Counts and saves a step whose loss or gradient is NaN or Inf; the loop leaves the weights as they are."""
    run.progress.skipped += 1
    capture(run, batch, loss, norm)
    step = run.progress.step + 1
    hint = f"run `plainvit replay {run.folder.path} --step {step}` to find the layer"
    display.print_line(f"step {step} skipped: loss {loss:.4g}, gradient norm {norm:.4g} ({hint})")


def capture(run: "Training", batch: "Batch", loss: float, norm: float) -> None:
    """Saves what `plainvit replay` needs to repeat a step with non-finite values."""
    non_finite = [
        name
        for name, p in run.objective.named_parameters()
        if p.grad is not None and not bool(torch.isfinite(p.grad).all())
    ]
    captures = Checkpoints(run.folder.path / "captures", run.config.max_skipped_steps + 1, run.world)
    weights = {name: tensor for name, tensor in run.tensors().items() if name.startswith("model.")}
    state = {"loss": repr(loss), "norm": repr(norm), "gradients": non_finite, "images": batch.index.tolist()}
    captures.save(run.progress.step + 1, weights, state | {"micro_batch": run.progress.micro_batch})
    captures.wait()
