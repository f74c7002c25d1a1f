"""What stands between a run and harm: numbers that are not finite, too little memory, signals."""

import contextlib
import math
import os
import signal
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plainvit.device import is_out_of_memory
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.runtime.folder import shorten_repr

if TYPE_CHECKING:
    from plainvit.data.loader import Batch
    from plainvit.train.state import Training


class DivergedError(ValueError):
    """Too many steps were not finite; the command ends with exit code 4."""

    exit_code, agreed = 4, True  # all processes of a run raise it


class MemoryShortError(ValueError):
    """The device has too little memory; the command ends with exit code 5."""

    exit_code, agreed = 5, False


class InterruptedRunError(ValueError):
    """A signal ended the run, its state saved; the exit code is 128 + the signal."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: saved at step {step}; the same command goes on from there")
        self.exit_code, self.agreed = 128 + number, True


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM; the loop looks after each step. A second one ends the process at once."""
    got: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if got:
            os._exit(128 + number)  # the checkpoint on disk is whole: nothing can be torn by this
        got.append(number)

    try:
        old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: somebody else minds the signals
        yield got
        return
    try:
        yield got
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class Terminated(SystemExit):
    """SIGTERM outside of the loop; like ctrl-C it is none of the errors that others may catch on its way."""

    def __init__(self, exit_code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return "SIGTERM: the same command goes on from the last checkpoint"


@contextlib.contextmanager
def raise_on_termination() -> Iterator[None]:
    """SIGTERM ends what is inside by an exception, so that its end can be told of."""

    def handle(*_: object) -> None:
        raise Terminated

    try:
        old = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not in the main thread: somebody else minds the signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def choose_micro_batch(run: "Training", tensors: tuple[Tensor, ...]) -> int:
    """What was asked for; otherwise the whole batch on a CPU, on GPUs what fits each of them.

    With FSDP it is computed, not tried: a trial that fails in one process leaves the others waiting in its collectives.
    """
    if run.config.micro_batch or tensors[0].device.type == "cpu":  # Linux hands out memory that it does not have
        return min(run.config.micro_batch or len(tensors[0]), len(tensors[0]))
    if run.fsdp:
        from plainvit.planning.plan import estimate_micro_batch

        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        size = estimate_micro_batch(run.config, run.world.size, torch.cuda.mem_get_info()[0] + unused)
    else:
        size = largest_micro_batch(run, tensors, len(tensors[0]))
    size = int(run.world.gather_rows(torch.tensor([size], device=run.world.device)).min())
    if not size:
        error = MemoryShortError("not even one image at a time fits into the device's memory")
        error.agreed = True  # all processes raise it
        raise error
    return size


def largest_micro_batch(run: "Training", tensors: tuple[Tensor, ...], most: int) -> int:
    """`most` images, or about half as many, or a quarter ...: what goes forward and backward without complaint.

    Tried uncompiled, which needs the more memory, and without a compilation for each size. 0 where nothing fits.
    The objective is called without DDP around it, so no gradients are exchanged: processes may fail one by one.
    """
    total = len(tensors[0])
    size = largest_divisor(total, most)
    while size:
        try:
            with run.cast():
                loss, _ = run.objective(*(tensor[:size] for tensor in tensors))
            loss.backward()
            return size
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            size = largest_divisor(total, size // 2)
        finally:
            run.optimizers.zero()
            torch.cuda.empty_cache()
    return 0


def largest_divisor(total: int, most: int) -> int:
    """Of `total`, up to `most`; 0 where `most` is below 1."""
    return max((n for n in range(1, most + 1) if total % n == 0), default=0)


def out_of_memory_error(run: "Training", tensors: tuple[Tensor, ...] | None, size: int) -> MemoryShortError:
    """What to say of it: with the micro-batch that fits, where it was the images that did not."""
    run.checkpoints.settle()
    saved = f"; the checkpoint of step {run.checkpoints.steps()[-1]} is intact" if run.checkpoints.steps() else ""
    if tensors is None:
        return MemoryShortError(f"out of memory at step {run.progress.step + 1}{saved}")
    if run.world.size > 1:  # the others are in the middle of a step: nothing can be tried without them
        fits, says = largest_divisor(len(tensors[0]), size // 2), "needs less"
    else:
        fits, says = largest_micro_batch(run, tensors, size // 2), "fits"
    way = f"--micro-batch {fits}{' --force' if saved else ''} {says}" if fits else "not even one image at a time fits"
    words = f"out of memory at step {run.progress.step + 1} with {size} images at once"
    return MemoryShortError(f"{words}: {way}{saved}")


def check_checkpoint(run: "Training", tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that a run of this config does not write: edited, or of another version of plainvit."""
    own = {f"model.{name}": tensor for name, tensor in run.objective.state_dict().items()}
    own |= {f"average.{name}": tensor for name, tensor in (run.average.weights if run.average else {}).items()}
    given = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    moments = {name.removeprefix("optimizer."): tensors[name] for name in tensors.keys() - given.keys()}
    progress: Any = state.get("progress")
    fault = (
        _progress_fault(run, progress, state["step"])
        or tensor_fault(own, given)
        or run.optimizers.find_fault(moments, updates=state["step"] - progress.get("skipped", 0))
    )
    if fault:
        place = run.checkpoints.folder / f"step-{state['step']:08d}"
        raise ValueError(f"the checkpoint {place} does not fit this run: {fault}; delete it, or give another --out")


def _progress_fault(run: "Training", progress: Any, step: int) -> str:
    if not isinstance(progress, dict):
        return "progress is no object"
    # step is that of the checkpoint; best may be -inf, best_step null
    most = {"skipped": step, "best_step": step, "worse": step, "micro_batch": run.config.batch}
    most["cut"] = most["cut_of"] = 2**53
    for name, value in progress.items():
        if not hasattr(run.progress, name):
            return f"progress.{name} is not known to this version of plainvit"
        if name == "best":
            sound = isinstance(value, float) and value < math.inf
        elif name == "step":
            sound = value == step <= run.config.steps and type(value) is int
        else:
            sound = (type(value) is int and 0 <= value <= most[name]) or (value is None and name == "best_step")
        if not sound:
            return f"progress.{name} is {shorten_repr(value)}"
    return "" if "step" in progress else "progress.step is missing"


def tensor_fault(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """The first tensor that is missing, unknown, or of another shape or type than the run's own."""
    for name in sorted(own.keys() | given.keys()):
        if name not in given or name not in own:
            return f"{name} is {'missing' if name in own else 'not known'}"
        if given[name].shape != own[name].shape or given[name].dtype != own[name].dtype:
            kinds = [f"{tuple(one.shape)} of {one.dtype}" for one in (given[name], own[name])]
            return f"{name} is {kinds[0]}, not {kinds[1]}"
    return ""


def capture(run: "Training", batch: "Batch", loss: float, norm: float) -> None:
    """Keeps what is needed to make the step again: weights, and what was seen of it."""
    bad = [
        name
        for name, p in run.objective.named_parameters()
        if p.grad is not None and not bool(torch.isfinite(p.grad).all())
    ]
    captures = Checkpoints(run.folder.path / "captures", run.config.max_skipped_steps + 1, run.world)
    weights = {name: tensor for name, tensor in run.tensors().items() if name.startswith("model.")}
    what = {"loss": repr(loss), "norm": repr(norm), "gradients": bad, "images": batch.index.tolist()}
    captures.save(run.progress.step + 1, weights, what | {"micro_batch": run.progress.micro_batch})
    captures.wait()
