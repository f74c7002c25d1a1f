"""`--hours`: a run that fits into a given time.

The length is planned before the first step from a few timed steps and one evaluation, and shortened again at each
checkpoint if the machine turns out slower. The schedule follows the new length.
"""

import contextlib
import logging
import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from plainvit.config import to_json
from plainvit.errors import NonFiniteError
from plainvit.train.graphs import WARM
from plainvit.train.guards import choose_micro_batch
from plainvit.train.step import launch

if TYPE_CHECKING:
    from plainvit.runtime.display import Display
    from plainvit.train.state import Training

MARGIN = 0.95  # of the time, for what is not measured: the first steps, checkpoints, the report
log = logging.getLogger("plainvit")


class TimeBudget:
    """The time that is left to a run. `spent` are the seconds of its earlier parts."""

    def __init__(self, run: "Training", spent: float) -> None:
        self.run, self.left = run, 3600 * run.config.hours - spent
        self.deadline = time.monotonic() + self.left
        self.last_look = (0, 0.0)  # (step, time)

    def plan(self) -> None:
        """Sets the number of steps before the first one, warm-up and cooldown in proportion."""
        run, config = self.run, self.run.config
        step, evaluation = self._average((time_step(run), time_evaluation(run)))
        steps = max(int((self.left * MARGIN - evaluation * config.evaluations) / step), 1)
        if steps >= run.steps:
            return
        if run.world.is_main:
            log.warning("--hours %g allows %d of %d steps, at %.3f s per step", config.hours, steps, run.steps, step)
        scale = steps / run.steps
        lengths = {name: getattr(config.optim, name) for name in ("warmup", "cooldown")}
        lengths = {name: value * scale if value >= 1 else value for name, value in lengths.items()}
        run.config = config.replace(steps=steps, optim=config.optim.replace(**lengths))
        if run.average:
            run.average.decay = run.config.decay(steps)
        run.folder.write("config.json", to_json(run.config))
        run.folder.write_status("running", run.progress.step, run.steps)

    def shorten(self, display: "Display") -> None:
        """Shortens the run if it would not end in time at the pace since the last call.

        It is called before a checkpoint is saved, which keeps the new length, so that a resumed run continues exactly.
        The first interval of a process is not used: it includes compilation.
        """
        run, (step, then), now = self.run, self.last_look, time.monotonic()
        self.last_look = run.progress.step, now
        if not then:
            return
        spent, left = self._average((now - then, self.deadline - now))
        steps = run.progress.step + max(int(left * (run.progress.step - step) / spent), 0)
        if steps < run.steps:
            display.tell(f"slower than planned: --hours {run.config.hours:g} allows {steps} of {run.steps} steps")
            run.progress.cut += run.steps - steps
            run.progress.cut_of = run.config.steps
            display.total = steps

    def _average(self, seconds: tuple[float, float]) -> tuple[float, float]:
        """Over all processes, so that they all decide the same."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self.run.world.device)
        first, second = (self.run.world.sum(times) / self.run.world.size).tolist()
        return first, second


def time_step(run: "Training") -> float:
    """Seconds per step with its data, without the first steps, which compile and warm up; 10 % more for the update.

    The median, so that a moment of other work on the machine does not cut the run.
    """
    times: list[float] = []
    run.objective.train()
    for batch in run.loader.batches(0, WARM + 6):
        tensors = run.objective.prepare(batch, 0)
        run.progress.micro_batch = run.progress.micro_batch or choose_micro_batch(run, tensors)
        launch(run, tensors).read()
        run.optimizers.zero()
        times.append(time.perf_counter())
    return 1.1 * statistics.median(after - before for before, after in pairwise(times[WARM:]))


def time_evaluation(run: "Training") -> float:
    started = time.perf_counter()
    if run.evaluate:
        with contextlib.suppress(NonFiniteError):  # reported at the first validation
            run.evaluate()
    return time.perf_counter() - started
