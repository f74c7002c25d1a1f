"""The training loop, the only one: pre-training, fine-tuning and self-supervision differ in what is passed to it.

Everything random in a step follows from (seed, step): the batch, its augmentation (data/order.py), dropout. So a run
that goes on from a checkpoint is, bit for bit, the run that was never stopped, and any step can be made again.

    step        the next batch from `Supply`, made while the device was at work on the last one
      launch      seeds dropout, then run.gradients, the function below or a CUDA graph of it:
        gradients   for each micro-batch: loss = objective(*tensors), loss.backward(); then clip
      read        loss and norm come back to the host: the one place where it waits for the device
      update      the optimisers' step, where both are finite; then the averaged weights (EMA)
"""

import contextlib
import hashlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plainvit.config import Config, ViTConfig
from plainvit.data.loader import Batch, Loader
from plainvit.device import choose_precision, is_out_of_memory
from plainvit.models.inference import NonFiniteError
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.runtime.display import Display
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import Folder
from plainvit.runtime.sharding import like, replicate, whole
from plainvit.runtime.watchdog import Watchdog
from plainvit.train.graphs import Graph, GraphedGradients, graphs_fit
from plainvit.train.guards import (
    DivergedError,
    InterruptedRunError,
    capture,
    check_checkpoint,
    choose_micro_batch,
    interruptions,
    short_of_memory,
)
from plainvit.train.masked import PredictPatches
from plainvit.train.objectives import Classify, score
from plainvit.train.optim import Average, Optimizers, rate

if TYPE_CHECKING:
    from plainvit.evaluate.classify import Prepared

NARROW = 1024  # numbers in a row: three stages of four such rows fit into the shared memory of any GPU


@dataclass
class Progress:
    """What the loop remembers from step to step; saved with every checkpoint."""

    step: int = 0  # finished steps
    skipped: int = 0  # of which not finite
    best: float = -math.inf  # validation's score: top-1, or the loss turned round
    best_step: int | None = None
    worse: int = 0  # evaluations since the best
    micro_batch: int = 0
    cut: int = 0  # steps that --hours had no time for after all
    cut_of: int = 0  # the length that they were cut of


@dataclass
class Training:
    """Everything that one run needs."""

    config: Config
    objective: Classify | PredictPatches
    optimizers: Optimizers
    average: Average | None  # of the weights, exponentially (EMA)
    loader: Loader
    folder: Folder
    track: Callable[[dict[str, Any]], None] = lambda _: None
    validation: "Prepared | None" = None  # held-out images, prepared once for all evaluations
    evaluate: Callable[[], dict[str, float]] | None = None  # of the objective's model as it is
    quiet: bool = False
    world: World = field(default_factory=World)
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.signals: list[int] = []
        self.ends = math.inf  # when --hours are over, by time.monotonic
        self.quiet = self.quiet or not self.world.first
        config, device = self.config, self.loader.device.type
        self.fsdp = self.world.size > 1 and config.parallel == "fsdp"
        sharded = self.fsdp and config.sharded
        self.checkpoints = Checkpoints(self.folder.path / "checkpoints", config.keep, self.world, sharded=sharded)
        self.dtype = choose_precision(config.precision, device)
        low = self.dtype is not torch.float32
        self.cast: Callable[[], AbstractContextManager] = partial(torch.autocast, device, self.dtype, enabled=low)
        self.ddp = replicate(self.objective, self.world) if self.world.size > 1 and not self.fsdp else None
        self.forward: Callable = self.ddp or self.objective
        if config.compile == "on" or (config.compile == "auto" and device == "cuda"):
            options = compiler_options(config) if device == "cuda" else None
            self.forward = torch.compile(self.forward, dynamic=False, options=options)
        self.gradients: Callable[..., Tensor] = lambda *tensors: gradients(self, tensors, self.forward)
        self.update: Callable[[], None] = self.optimizers.step
        if graphs_fit(config, self.world):
            self.gradients = GraphedGradients(self.gradients, self.optimizers)
            self.update = Graph(self.update)

    @property
    def steps(self) -> int:
        return self.config.steps - self.progress.cut

    def exchange(self, last: bool) -> AbstractContextManager:
        """Gradients go to the other processes with the last of the micro-batches only."""
        if self.fsdp:
            self.objective.model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
        return contextlib.nullcontext() if last or not self.ddp else self.ddp.no_sync()  # pyright: ignore

    def record(self, line: dict[str, Any]) -> None:
        self.folder.record(line)
        self.track(line)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state that training changes."""
        average = self.average.weights if self.average else {}
        return {
            **{f"model.{name}": tensor for name, tensor in self.objective.state_dict().items()},
            **{f"average.{name}": tensor for name, tensor in average.items()},
            **{f"optimizer.{name}": tensor for name, tensor in self.optimizers.state().items()},
        }

    def save(self) -> None:
        progress = self.progress
        self.checkpoints.save(progress.step, self.tensors(), {"progress": asdict(progress)}, progress.best_step)

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        check_checkpoint(self, tensors, state)
        part = {
            kind: {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)}
            for kind in ("model.", "average.", "optimizer.")
        }
        own = self.objective.state_dict()
        self.objective.load_state_dict({name: like(tensor, own[name]) for name, tensor in part["model."].items()})
        self.optimizers.load(part["optimizer."])
        if self.average:
            for name, tensor in self.average.weights.items():
                tensor.copy_(like(part["average."][name], tensor))
        self.progress = Progress(**state["progress"])


def compiler_options(config: Config) -> dict[str, Any] | None:
    """On a GPU a LayerNorm's gradients load their next rows while they sum up these.

    0.16 ms in place of 0.21 for S/16 at batch 1024 on an H200.
    """
    fits = isinstance(config.model, ViTConfig) and config.model.width <= NARROW and config.shortcuts == "auto"
    return {"triton.mix_order_reduction_allow_multi_stages": True} if fits else None


def train(run: Training) -> None:
    """From wherever the run stands to its end: its `progress` then says how it went."""
    _resume(run)
    progress, config = run.progress, run.config
    every = math.ceil(config.steps / config.evaluations)
    run.objective.train()
    with (
        run.checkpoints.settled(),
        contextlib.closing(run.loader.batches(progress.step, run.steps)) as batches,
        Display(config.recipe or "training", run.steps, progress.step, quiet=run.quiet) as display,
        interruptions() as run.signals,
        Watchdog(run.world, config.timeout, run.folder.path) as watchdog,
    ):
        if progress.step:
            display.tell(f"going on from step {progress.step}")
        supply, watch = Supply(run, batches), Stopwatch(run)
        while progress.step < run.steps and not _patience_is_out(run):
            watchdog.at(progress.step)
            line, stop = step(run, supply, display)
            progress.step += 1
            run.record(line)
            display.advance(progress.step, _words(line))
            if progress.skipped > config.bad_steps:
                raise DivergedError(_diverged(run))
            due = progress.step % every == 0 or progress.step == run.steps
            if due and run.evaluate:
                with watchdog.paused():
                    _validate(run, display)
            if due:
                watch.shorten(display)
            if due or stop or (config.save_every and progress.step % config.save_every == 0):
                run.save()
                run.folder.say("running", progress.step, run.steps)
            if stop and progress.step < run.steps:
                run.checkpoints.wait()
                raise InterruptedRunError(stop, progress.step)
        run.checkpoints.wait()


class Stopwatch:
    """Shortens a run that would not end within --hours at the pace since the last look.

    It looks where a checkpoint follows, which keeps the new length: so a run that goes on goes on exactly. The first
    interval of each process is not judged by, as it has the compiling in it.
    """

    def __init__(self, run: Training) -> None:
        self.run, self.last = run, (0, 0.0)

    def shorten(self, display: Display) -> None:
        run, (step, then), now = self.run, self.last, time.monotonic()
        self.last = run.progress.step, now
        if run.ends == math.inf or not then:
            return
        times = torch.tensor([now - then, run.ends - now], dtype=torch.float64, device=run.loader.device)
        spent, left = (run.world.sum(times) / run.world.size).tolist()  # the same in all processes
        steps = run.progress.step + max(int(left * (run.progress.step - step) / spent), 0)
        if steps < run.steps:
            display.tell(f"slower than at the start: {run.config.hours:g} hours allow {steps} of {run.steps} steps")
            run.progress.cut += run.steps - steps
            run.progress.cut_of = run.config.steps
            display.total = steps


def _resume(run: Training) -> None:
    """From the newest checkpoint that is sound, the same one in all processes; what is newer is set aside."""
    run.world.barrier()  # nobody reads while another still writes or sweeps
    found = run.checkpoints.newest()
    run.world.agree(lambda: found or ({}, {}), lambda one: str(one[1].get("step")))
    if found:
        run.world.agree(lambda: run.restore(*found) or True)
    if run.progress.cut_of not in (0, run.config.steps):  # another length was asked for since
        run.progress.cut = run.progress.cut_of = 0
    if run.config.micro_batch:
        run.progress.micro_batch = run.config.micro_batch
    if run.world.first:
        run.checkpoints.set_aside(run.progress.step)
    run.folder.rewind(run.progress.step)
    if found:
        run.folder.record({"event": "resumed", "step": run.progress.step, "processes": run.world.size})


class Supply:
    """Batches with the objective's tensors, each made while the device is at work on the one before it."""

    def __init__(self, run: Training, batches: Iterator[Batch]) -> None:
        self.run, self.batches, self.step = run, batches, run.progress.step
        self.made: tuple[Batch, tuple[Tensor, ...]] | None = None
        self.failure: Exception | None = None

    def make(self) -> float:
        """The next one, unless it is there or the run ends before it: seconds that it took.

        A failure is kept until its step has come: the one before may still end the run in its own way.
        """
        started = time.perf_counter()
        if self.made is None and self.step < self.run.steps:
            try:
                batch = next(self.batches)
                self.made = batch, self.run.objective.prepare(batch, self.step)
            except Exception as error:
                self.failure = error
            self.step += 1
        return time.perf_counter() - started

    def take(self) -> tuple[Batch, tuple[Tensor, ...]]:
        if self.failure:
            raise self.failure
        assert self.made
        made, self.made = self.made, None
        return made


class Launched:
    """What became of a step: numbers that the device may still be at work on. They are those of all processes."""

    def __init__(self, run: Training, values: Tensor) -> None:
        self.size = size = run.world.size
        weight = 0 if not run.signals else 1 if run.signals[0] == signal.SIGINT else size + 1
        signal_ = values.new_full((1,), weight)  # so that the sum over all tells whether any of them is a SIGTERM
        # Loss, images right, norm, signal. The norm is that of all processes already, the loss is a mean: each process
        # brings its share of them
        shares = torch.cat((values, signal_)) / values.new_tensor((size, 1, size, 1)) if size > 1 else None
        self.values = torch.cat((values, signal_)) if shares is None else run.world.sum(shares)
        self.values = self.values.to("cpu", non_blocking=True)
        self.event = torch.cuda.Event() if values.is_cuda else None
        if self.event:
            self.event.record()

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def read(self) -> tuple[float, float, float, int]:
        """(loss, images right, norm of the gradient before it is clipped, signal): the one place where a step waits."""
        if self.event:
            self.event.synchronize()
        loss, correct, norm, weight = self.values.tolist()
        return loss, correct, norm, 0 if not weight else signal.SIGINT if weight <= self.size else signal.SIGTERM


def step(run: Training, supply: Supply, display: Display) -> tuple[dict[str, Any], int]:
    """One update, or none where it would not be finite: its line of metrics, and a signal that came to any process."""
    config, number, started = run.config, run.progress.step, time.perf_counter()
    waited = supply.make()
    batch, tensors = supply.take()
    lr = rate(config.optim, number, run.steps)
    run.optimizers.set_rate(lr)
    if not run.progress.micro_batch:
        run.progress.micro_batch = choose_micro_batch(run, tensors)
        if run.progress.micro_batch < len(tensors[0]):
            display.tell(f"{run.progress.micro_batch} images at once fit into the device's memory")
    launched = launch(run, tensors)
    made = supply.make()  # meanwhile
    waited += made if launched.done() else 0.0  # if the device is done already, it has waited for this
    loss, correct, norm, stop = launched.read()
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        run.update()
        if run.average:
            run.average.update(number)
    else:  # no weight changes
        run.progress.skipped += 1
        capture(run, batch, loss, norm)
        display.tell(f"step {number + 1} is skipped: loss {loss:.4g}, gradient norm {norm:.4g}; {_look(run)}")
    run.optimizers.zero()
    line = {"step": number + 1, "epoch": (number + 1) * config.batch / len(run.loader.source), "loss": loss}
    if not config.augment.mixup and not config.augment.cutmix and math.isfinite(correct):
        line["accuracy"] = correct / config.batch
    seconds = time.perf_counter() - started
    line |= {"lr": lr, "norm": norm, "seconds": seconds, "waiting": waited / seconds, "images": config.batch}
    return line if finite else line | {"skipped": True}, stop


def launch(run: Training, tensors: tuple[Tensor, ...]) -> Launched:
    """The gradients of the step that is due, on the parameters once the device is done."""
    torch.manual_seed(step_seed(run.config.seed, run.world.rank, run.progress.step))  # dropout and the like
    try:
        return Launched(run, run.gradients(*tensors))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        run.optimizers.zero()
        raise short_of_memory(run, tensors, run.progress.micro_batch or len(tensors[0])) from error


def gradients(run: Training, tensors: tuple[Tensor, ...], forward: Callable) -> Tensor:
    """[loss, images right, norm of the gradient before it is clipped]; the gradients stay on the parameters.

    The norm is that of the whole batch; the others are those of this process's images.
    """
    # In eval mode there is no dropout or stochastic depth, and a CUDA graph of such a step is replayed to the end
    assert all(module.training for module in run.objective.modules()), "a training step needs training mode"
    total, size = len(tensors[0]), run.progress.micro_batch or len(tensors[0])
    loss = correct = torch.zeros((), device=tensors[0].device)
    parts = list(zip(*(tensor.split(size) for tensor in tensors), strict=True))
    for number, part in enumerate(parts, 1):
        with run.exchange(last=number == len(parts)):
            with run.cast():
                part_loss, part_correct = forward(*part)
            part_loss = part_loss * (len(part[0]) / total)
            part_loss.backward()
        loss, correct = loss + part_loss.detach(), correct + part_correct
    norm = torch.nn.utils.get_total_norm([p.grad for p in run.optimizers.parameters if p.grad is not None])
    if run.config.optim.clip:
        # A norm that is not finite is taken as 0, by which nothing is clipped: divided by it, all gradients would be
        # NaN or 0, and nobody could tell any more in which parameters it began
        finite = norm.nan_to_num(0.0, 0.0, 0.0)
        torch.nn.utils.clip_grads_with_norm_(run.optimizers.parameters, run.config.optim.clip, finite)
    return torch.stack((loss.float(), correct.float(), whole(norm).float()))


def step_seed(seed: int, rank: int, step: int) -> int:
    """63 bits that follow from all three."""
    digest = hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def _look(run: Training) -> str:
    return f"plainvit replay {run.folder.path} --step {run.progress.step + 1} looks into it"


def _diverged(run: Training) -> str:
    count, last = run.progress.skipped, run.progress.step
    words = f"{count} steps were not finite, the last of them step {last}; no weight was harmed"
    return f"{words}: lower --optim.lr, or look with `plainvit replay {run.folder.path}`"


def _validate(run: Training, display: Display) -> None:
    """Of the averaged weights, where there are any: they are what is delivered."""
    assert run.evaluate
    progress = run.progress
    step = f"{progress.step:{len(str(display.total))}}"  # one below the other
    try:
        with averaged(run.objective.model, run.average):
            numbers = run.evaluate()
    except NonFiniteError as error:  # the run goes on, or diverges by its own guard
        progress.worse += 1
        run.record({"step": progress.step, "val": {"non_finite": error.images}})
        display.tell(f"step {step}  validation  {error}")
        return
    if score(numbers) > progress.best:
        progress.best, progress.best_step, progress.worse = score(numbers), progress.step, 0
    else:
        progress.worse += 1
    run.record({"step": progress.step, "val": numbers})
    words = "  ".join(_number(name, value) for name, value in numbers.items())
    display.tell(f"step {step}  validation  {words}{'' if progress.worse else '  best so far'}")


def _number(name: str, value: float) -> str:
    if name in ("top1", "top5", "accuracy"):
        return f"{name.replace('top', 'top-')} {100 * value:6.2f} %"
    return f"{name.replace('nll', 'NLL')} {value:.4f}"


def _patience_is_out(run: Training) -> bool:
    return 0 < run.config.patience <= run.progress.worse


@contextlib.contextmanager
def averaged(model: nn.Module, average: Average | None) -> Iterator[None]:
    """The model with the averaged weights in its own tensors, for as long as this lasts."""
    if average is None:
        yield
        return
    own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(average.weights)  # in place: compiled code and shards hold on to the tensors
        yield
    finally:
        model.load_state_dict(own)


def _words(line: dict[str, Any]) -> str:
    accuracy = f"  accuracy {line['accuracy']:.1%}" if "accuracy" in line else ""
    speed = f"{line['images'] / line['seconds']:,.0f} images/s  waiting for data {line['waiting']:.0%}"
    return f"epoch {line['epoch']:.1f}  loss {line['loss']:.3f}{accuracy}  lr {line['lr']:.2g}  {speed}"
