"""The state of one run: what training needs, what a checkpoint holds (`Training.tensors`), how it is restored."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plainvit.config import Config
from plainvit.device import choose_precision
from plainvit.runtime.parallel import shard_like

if TYPE_CHECKING:
    from plainvit.data.loader import Loader
    from plainvit.evaluate.classify import EvaluationSet
    from plainvit.runtime.checkpoint import Checkpoints
    from plainvit.runtime.distributed import World
    from plainvit.runtime.folder import Folder
    from plainvit.runtime.track import Tracker
    from plainvit.train.masked_objective import PredictPatches
    from plainvit.train.objectives import Classify
    from plainvit.train.optim import Average, Optimizers

MIN_INTERVAL = 5  # steps between evaluations in a run that --hours shortened


@dataclass
class Progress:
    """What the loop remembers from step to step; saved with every checkpoint."""

    step: int = 0  # finished steps
    skipped: int = 0  # steps with a non-finite loss or gradient
    best: float = -math.inf  # score of the best validation: top-1, or the negative loss
    best_step: int | None = None
    worse: int = 0  # validations since the best
    micro_batch: int = 0
    length: int | None = None  # steps that fit into --hours, at most config.steps; None: all of them
    seconds: float = 0.0  # time spent so far, over all starts of the run


@dataclass
class Training:
    """Everything that one run needs. `setup.py` builds it, `loop.py` runs it."""

    config: Config
    objective: "Classify | PredictPatches"  # the model with its loss
    optimizers: "Optimizers"
    average: "Average | None"  # exponential moving average of the weights (EMA)
    loader: "Loader"
    folder: "Folder"
    checkpoints: "Checkpoints"
    world: "World"
    gradients: Callable[..., Tensor]  # see step.Gradients
    update: Callable[[], None]  # the optimizers' step
    validation: "EvaluationSet | None"  # held-out images
    evaluate: Callable[[int], dict[str, float]] | None  # step -> metrics of the model on held-out images
    tracker: "Tracker"
    quiet: bool = False
    is_compiled: bool = False
    progress: Progress = field(default_factory=Progress)
    started: float = field(default_factory=time.monotonic)
    signals: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The length of the run."""
        return self.config.steps if self.progress.length is None else self.progress.length

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations, which should take little of a run that --hours shortened."""
        minimum = 1 if self.progress.length is None else MIN_INTERVAL
        return max(math.ceil(self.steps / self.config.evaluations), minimum)

    def cast(self) -> AbstractContextManager:
        return autocast(self.config, self.loader.device)

    def set_length(self, steps: int | None) -> None:
        """Changes the length of the run; the schedule and the window of the averaged weights follow it."""
        self.progress.length = steps
        if self.average:
            self.average.decay = self.config.decay(self.steps)

    def record(self, line: dict[str, Any]) -> None:
        self.folder.record(line)
        self.tracker.send(line)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that training changes."""
        average = self.average.weights if self.average else {}
        return {
            **{f"model.{name}": tensor for name, tensor in self.objective.state_dict().items()},
            **{f"average.{name}": tensor for name, tensor in average.items()},
            **{f"optimizer.{name}": tensor for name, tensor in self.optimizers.state().items()},
        }

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all starts of it."""
        return self.progress.seconds + time.monotonic() - self.started

    def save(self) -> None:
        progress = asdict(self.progress) | {"seconds": self.seconds}
        self.checkpoints.save(self.progress.step, self.tensors(), {"progress": progress}, self.progress.best_step)

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Continues from a checkpoint. Raises ValueError if it is of another config or version."""
        try:
            progress = Progress(**state["progress"])
            copy_tensors(select(tensors, "model."), self.objective.state_dict())
            copy_tensors(select(tensors, "average."), self.average.weights if self.average else {})
            self.optimizers.load(select(tensors, "optimizer."), updates=progress.step - progress.skipped)
        except (KeyError, TypeError, ValueError) as error:
            path = self.checkpoints.folder / f"step-{state['step']:08d}"
            problem = f"the checkpoint {path} does not match this run ({error})"
            raise ValueError(f"{problem}: delete it to resume from an earlier one, or use another --out") from error
        self.progress = progress


def resume(run: Training) -> None:
    """Restores the newest valid checkpoint, the same one in all processes, and sets newer, damaged ones aside."""
    run.world.barrier()  # nobody reads while another process still writes or deletes
    checkpoint = run.checkpoints.read_newest()
    run.world.run_on_all_ranks(lambda: checkpoint[1]["step"] if checkpoint else None, str)
    if checkpoint:
        run.world.run_on_all_ranks(lambda: run.restore(*checkpoint))
    run.set_length(run.progress.length if run.config.hours else None)
    if run.config.micro_batch:
        run.progress.micro_batch = run.config.micro_batch
    if run.world.is_main:
        run.checkpoints.set_aside(run.progress.step)
    run.folder.rewind(run.progress.step)
    if checkpoint:
        run.folder.record({"event": "resumed", "step": run.progress.step, "processes": run.world.size})


def select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@torch.no_grad()
def copy_tensors(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Copies full tensors into a run's own, which may be shards. Raises ValueError for one that does not match."""
    for name in sorted(own.keys() | stored.keys()):
        if name not in stored or name not in own:
            raise ValueError(f"{name} is {'missing' if name in own else 'unexpected'}")
        kinds = [f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (stored[name], own[name])]
        if kinds[0] != kinds[1]:
            raise ValueError(f"{name} is {kinds[0]}, not {kinds[1]}")
        own[name].copy_(shard_like(stored[name], own[name]))


def uses_fsdp(config: Config, world: "World") -> bool:
    return world.size > 1 and config.parallel == "fsdp"


def autocast(config: Config, device: torch.device) -> AbstractContextManager:
    """A context in the precision of the arithmetic; weights are fp32."""
    dtype = choose_precision(config.precision, device.type)
    return torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)


@contextlib.contextmanager
def averaged_weights(model: nn.Module, average: "Average | None") -> Iterator[None]:
    """The model with the averaged weights in its own tensors, inside the `with` block."""
    if average is None:
        yield
        return
    own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(average.weights)  # in place: compiled code and shards keep references to the tensors
        yield
    finally:
        model.load_state_dict(own)
