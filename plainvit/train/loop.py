"""The training loop, the only one: pre-training, fine-tuning and self-supervision differ in what is passed to it.

For each step: the next batch (prepared while the device worked on the last one), forward and backward pass (step.py),
the update, or none if the loss or the gradient is NaN or Inf (nonfinite.py), and every so often a validation and a
checkpoint (state.py). SIGINT and SIGTERM are read after each step (signals.py). Everything random in a step follows
from (seed, step), so a resumed run equals, bit for bit, the run that was never stopped.
"""

import contextlib
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plainvit.errors import NonFiniteError
from plainvit.runtime.display import Display
from plainvit.train.micro_batch import choose_micro_batch
from plainvit.train.nonfinite import DivergedError, describe_divergence, is_finite_step, skip_step
from plainvit.train.schedule import learning_rate
from plainvit.train.signals import InterruptedRunError, catch_signals
from plainvit.train.state import averaged_weights
from plainvit.train.step import Prefetcher, start_step

if TYPE_CHECKING:
    from plainvit.train.state import Training
    from plainvit.train.time_budget import TimeBudget


def train(run: "Training", budget: "TimeBudget | None" = None) -> None:
    """Trains from the current step to the end; `run.progress` then says how it went."""
    progress, config = run.progress, run.config
    run.objective.train()
    with (
        catch_signals() as run.signals,  # also while the others close: a signal must not replace the error of a run
        contextlib.closing(run.checkpoints),
        contextlib.closing(run.loader.batches(progress.step, config.steps)) as batches,
        Display(config.recipe or "training", run.steps, progress.step, quiet=run.quiet) as display,
    ):
        if progress.step:
            display.print_line(f"resumed from step {progress.step}")
        if run.is_compiled:
            display.print_line("compiling the model in the first step, which may take minutes")
        prefetcher = Prefetcher(run, batches)
        while progress.step < run.steps and not is_out_of_patience(run):
            line, stop_signal = take_step(run, prefetcher, display)
            progress.step += 1
            run.record(line)
            display.advance(progress.step, describe_step(line))
            if progress.skipped > config.max_skipped_steps:
                raise DivergedError(describe_divergence(run))
            is_due = progress.step % run.evaluation_interval == 0
            if budget and (is_due or budget.is_early()):
                budget.fit_length(display)
            is_due = is_due or progress.step >= run.steps
            if is_due and run.evaluate:
                validate(run, display)
            if is_due or stop_signal or (config.save_every and progress.step % config.save_every == 0):
                run.save()
                run.folder.write_status("running", progress.step, run.steps)
            if stop_signal and progress.step < run.steps:
                run.checkpoints.wait()
                raise InterruptedRunError(stop_signal, progress.step)
        run.checkpoints.wait()


def take_step(run: "Training", prefetcher: Prefetcher, display: Display) -> tuple[dict[str, Any], int]:
    """One update, or none where it would not be finite.

    Returns:
        The step's metrics, and a signal that any process received (0 if none).
    """
    config, number, started = run.config, run.progress.step, time.perf_counter()
    waited = prefetcher.fill()
    batch, tensors = prefetcher.next()
    lr = learning_rate(config.optim, number, run.steps, config.steps)
    run.optimizers.set_rate(lr)
    if not run.progress.micro_batch:
        run.progress.micro_batch = choose_micro_batch(run, tensors)
        if run.progress.micro_batch < len(tensors[0]):
            display.print_line(f"micro-batch {run.progress.micro_batch}: what fits into the device's memory")
    pending = start_step(run, tensors)
    fill_seconds = prefetcher.fill()  # while the device computes
    waited += fill_seconds if pending.is_done() else 0.0  # the device has waited for the batch if it is done already
    loss, correct, norm, stop_signal = pending.read()
    is_finite = is_finite_step(loss, norm)
    if is_finite:
        run.update()
        if run.average:
            run.average.update(number)
    else:
        skip_step(run, batch, loss, norm, display)
    run.optimizers.zero_grad()
    line = {"step": number + 1, "epoch": (number + 1) * config.batch / len(run.loader.source), "loss": loss}
    if not config.augment.mixup and not config.augment.cutmix and math.isfinite(correct):
        line["accuracy"] = correct / config.batch
    seconds = time.perf_counter() - started
    line |= {"lr": lr, "norm": norm, "seconds": seconds, "waiting": waited / seconds, "images": config.batch}
    return line if is_finite else line | {"skipped": True}, stop_signal


def validate(run: "Training", display: Display) -> None:
    """Evaluates held-out images, with the averaged weights where there are any: they are the final weights."""
    assert run.evaluate
    progress = run.progress
    title = f"step {progress.step:{len(str(display.total))}}  validation"  # aligned
    try:
        with averaged_weights(run.objective.model, run.average):
            metrics = run.evaluate(progress.step)
    except NonFiniteError as error:  # training continues, or diverges by its own guard
        progress.worse += 1
        run.record({"step": progress.step, "val": {"non_finite": error.images}})
        display.print_line(f"{title}  {error}")
        return
    score = validation_score(metrics)
    if score > progress.best:
        progress.best, progress.best_step, progress.worse = score, progress.step, 0
    else:
        progress.worse += 1
    run.record({"step": progress.step, "val": metrics})
    text = "  ".join(format_metric(name, value) for name, value in metrics.items())
    display.print_line(f"{title}  {text}{'' if progress.worse else '  best so far'}")


def validation_score(metrics: Mapping[str, Any]) -> float:
    """Higher is better: top-1, or the negative loss for runs without labels.

    -inf if the NLL is NaN or Inf (None in results.json), because top-1 is meaningless then.
    """
    if "top1" not in metrics:
        return -metrics["loss"]
    nll = metrics.get("nll", 0.0)
    return metrics["top1"] if nll is not None and math.isfinite(nll) else -math.inf


def is_out_of_patience(run: "Training") -> bool:
    return 0 < run.config.patience <= run.progress.worse


def describe_step(line: dict[str, Any]) -> str:
    accuracy = f"  accuracy {line['accuracy']:.1%}" if "accuracy" in line else ""
    speed = f"{line['images'] / line['seconds']:,.0f} images/s  waiting for data {line['waiting']:.0%}"
    return f"epoch {line['epoch']:.1f}  loss {line['loss']:.3f}{accuracy}  lr {line['lr']:.2g}  {speed}"


def format_metric(name: str, value: float) -> str:
    if name in ("top1", "top5", "accuracy"):
        return f"{name.replace('top', 'top-')} {100 * value:6.2f} %"
    return f"{name.replace('nll', 'NLL')} {value:.4f}"
