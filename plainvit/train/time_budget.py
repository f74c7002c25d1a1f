"""`--hours`: a run that fits into a given time.

A run begins with the length that was asked for. After a few steps and at each evaluation its length is fitted to the
time that is left, at the pace of its steps and evaluations so far. The learning rate schedule follows the length.
"""

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from plainvit.runtime.display import Display
    from plainvit.train.state import Training

EARLY_STEPS = (2, 4, 8, 16)  # since the start, at which the length is fitted too; the first only starts the clock
MIN_CHANGE = 0.1  # a run is lengthened by at least this fraction; a smaller first change is not printed
MIN_PRINTED_CHANGE = 0.2  # the fraction by which a length differs from the printed one before it is printed again
USEFUL_STEPS = 50  # fewer hardly change a model: the run says so


class TimeBudget:
    """The time that is left to a run."""

    def __init__(self, run: "Training") -> None:
        self.run, self.first = run, run.progress.step
        self.deadline = time.monotonic() + 3600 * run.config.hours - run.seconds
        self.last_look: tuple[int, float] | None = None  # (step, time); None: compilation would count as steps
        self.pace: float | None = None  # seconds per step with its part of the evaluations
        self.printed: int | None = None  # the length that was printed last
        self.has_warned = False

    def is_early(self) -> bool:
        return self.run.progress.step - self.first in EARLY_STEPS

    def fit_length(self, display: "Display") -> None:
        """Shortens or lengthens the run to end in time at its pace, up to the length that was asked for.

        From the first evaluation on, the pace is half that since the last call and half what it was before, so that a
        moment of other work on the machine does not change the length much. This is called before a checkpoint is
        saved, which keeps the new length, so that a resumed run continues exactly.
        """
        run, now = self.run, time.monotonic()
        step, last_look = run.progress.step, self.last_look
        self.last_look = step, now
        if last_look is None or step >= run.steps:  # at the end the learning rate is 0: no way back
            return
        last_step, last_time = last_look
        seconds, left = average_over_processes(run, (now - last_time, self.deadline - now))
        pace = seconds / (step - last_step)
        self.pace = pace if self.pace is None or self.is_early() else (self.pace + pace) / 2
        steps = min(step + max(int(left / self.pace), 0), run.config.steps)
        change = steps / run.steps - 1
        if change == 0 or (0 < change < MIN_CHANGE and steps < run.config.steps):
            return
        message = self.describe_change(steps)
        if message:
            display.print_line(message)
        run.set_length(steps)
        display.total = steps

    def describe_change(self, steps: int) -> str:
        """The line for a new length; "" if it is close to the printed one, or if the run has only begun to be timed."""
        run, name = self.run, f"--hours {self.run.config.hours:g}"
        if self.printed is None:
            is_large = abs(steps / run.steps - 1) >= MIN_CHANGE
            message = f"{name} allows {steps:,} steps instead of {run.steps:,}, {self.pace:.2g} s each"
        else:
            is_timed = run.progress.step - self.first >= EARLY_STEPS[-1]
            is_large = is_timed and abs(steps / self.printed - 1) > MIN_PRINTED_CHANGE
            message = f"{name}: now {steps:,} steps, {self.pace:.2g} s each"
        if not is_large:
            return ""
        self.printed = steps
        # With a linear head the first model is usable already
        if steps < min(USEFUL_STEPS, run.config.steps) and run.config.head != "linear" and not self.has_warned:
            self.has_warned = True
            message += ", too few to learn much"
        return message


def average_over_processes(run: "Training", seconds: tuple[float, ...]) -> list[float]:
    """So that all processes decide the same."""
    times = torch.tensor(seconds, dtype=torch.float64, device=run.world.device)
    return (run.world.sum(times) / run.world.size).tolist()
