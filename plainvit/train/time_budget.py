"""`--hours`: a run that fits into a given time.

The length is planned before the first step from a few timed steps. At each evaluation it is planned again, shorter or
longer, up to the length that was asked for. The learning rate schedule follows the length.
"""

import contextlib
import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from plainvit.errors import NonFiniteError
from plainvit.runtime.display import readable, show_activity, tell
from plainvit.train.graphs import WARM
from plainvit.train.guards import choose_micro_batch
from plainvit.train.state import LEAST_INTERVAL
from plainvit.train.step import launch

if TYPE_CHECKING:
    from plainvit.runtime.display import Display
    from plainvit.train.state import Training

MARGIN = 0.95  # of the time, for what is not measured: the first steps, checkpoints, the report
USEFUL_STEPS = 50  # fewer hardly change a model: the run says so
TIMED_STEPS, TIMED_SECONDS = 6, 10.0  # steps to time, and when to stop early
LONGER = 1.1  # a run is lengthened by at least a tenth


class TimeBudget:
    """The time that is left to a run. `spent` are the seconds of its earlier parts."""

    def __init__(self, run: "Training", spent: float) -> None:
        self.run, self.deadline = run, time.monotonic() + 3600 * run.config.hours - spent
        self.last_look: tuple[int, float] | None = None  # (step, time)
        self.pace: float | None = None  # seconds per step with its part of the evaluations, smoothed

    def plan(self) -> None:
        """Sets the number of steps before the first one. Without any time left, a linear head needs no step."""
        run, config = self.run, self.run.config
        with show_activity("timing training steps", quiet=run.quiet):
            seconds = time_step(run), time_evaluation(run), self.deadline - time.monotonic()
        step, evaluation, left = average_over_processes(run, seconds)
        least = 0 if config.head == "linear" else 1
        seldom, often = left * MARGIN - evaluation * config.evaluations, left * MARGIN
        steps = max(int(seldom / step), int(often / (step + evaluation / LEAST_INTERVAL)), least)
        if not run.is_compiled:
            self.last_look = run.progress.step, time.monotonic()
        if steps >= config.steps:
            words = f"{config.steps} steps of {config.batch} take about {readable(config.steps * step)}"
            tell(f"{words}, within --hours {config.hours:g}", quiet=run.quiet)
            return
        run.set_length(steps)
        run.folder.write_status("running", run.progress.step, run.steps)
        words = f"--hours {config.hours:g} allows {steps} of {config.steps} steps of {config.batch}, {step:.2g} s each"
        if steps < min(USEFUL_STEPS, config.steps):
            needed = (config.steps * step - seldom) / MARGIN / 3600
            words += f", which is too few to learn much: all need --hours {config.hours + needed:.2g}"
        tell(words, quiet=run.quiet)

    def replan(self, display: "Display") -> None:
        """Shortens or lengthens the run to end in time at its pace.

        The pace is half that since the last call and half what it was before, so that a moment of other work on the
        machine does not change the length much. The first interval is not used if it includes compilation. This is
        called before a checkpoint is saved, which keeps the new length, so that a resumed run continues exactly.
        """
        run, now = self.run, time.monotonic()
        step, (last, self.last_look) = run.progress.step, (self.last_look, (run.progress.step, now))
        if last is None or step >= run.steps:  # at the end the learning rate is 0: no way back
            return
        seconds, left = average_over_processes(run, (now - last[1], self.deadline - now))
        pace = seconds / (step - last[0])
        self.pace = pace if self.pace is None else (self.pace + pace) / 2
        steps = min(step + max(int(left / self.pace), 0), run.config.steps)
        if run.steps <= steps < min(LONGER * run.steps, run.config.steps) or steps == run.steps:
            return
        speed = "slower" if steps < run.steps else "faster"
        display.tell(f"{speed} than planned: --hours {run.config.hours:g} allows {steps} steps instead of {run.steps}")
        run.set_length(steps)
        display.total = steps


def average_over_processes(run: "Training", seconds: tuple[float, ...]) -> list[float]:
    """So that all processes decide the same."""
    times = torch.tensor(seconds, dtype=torch.float64, device=run.world.device)
    return (run.world.sum(times) / run.world.size).tolist()


def time_step(run: "Training") -> float:
    """Seconds per step with its data, without the first steps, which compile and warm up; 10 % more for the update.

    The median, so that a moment of other work on the machine does not shorten the run.
    """
    warm = WARM if run.loader.device.type == "cuda" else 1
    times = [time.perf_counter()]
    run.objective.train()
    with contextlib.closing(run.loader.batches(0, warm + TIMED_STEPS)) as batches:
        for batch in batches:
            tensors = run.objective.prepare(batch, 0)
            run.progress.micro_batch = run.progress.micro_batch or choose_micro_batch(run, tensors)
            launch(run, tensors).read()
            run.optimizers.zero()
            times.append(time.perf_counter())
            compiles = len(times) <= warm and warm > 1
            if not compiles and average_over_processes(run, (times[-1] - times[0],))[0] > TIMED_SECONDS:
                break
    seconds = [after - before for before, after in pairwise(times)]
    return 1.1 * statistics.median(seconds[warm:] or seconds[-1:])


def time_evaluation(run: "Training") -> float:
    started = time.perf_counter()
    if run.evaluate:
        with contextlib.suppress(NonFiniteError):  # reported at the first validation
            run.evaluate(0)
    return time.perf_counter() - started
