"""Choose the micro-batch, by what fits into the device's memory, and explain out-of-memory errors."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plainvit.config import largest_divisor
from plainvit.device import is_out_of_memory
from plainvit.train.state import uses_fsdp

if TYPE_CHECKING:
    from plainvit.train.state import Training


class DeviceMemoryError(ValueError):
    """The device has too little memory; the command ends with exit code 5."""

    exit_code, raised_by_all = 5, False


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
        run.optimizers.zero_grad()
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
