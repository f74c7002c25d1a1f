"""Runs several studies at once: all share the worker processes, so that none is idle while a study ends."""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from plainvit.disk import make_folder
from plainvit.errors import first_line
from plainvit.runtime.display import Display, readable
from plainvit.studies.ledger import Ledger
from plainvit.studies.plans import Job, Plan, order_plans
from plainvit.studies.runs import Measure, Task, Workers
from plainvit.weights import save as save_weights

SLACK = 1.2  # a run is started if so many times its expected time are left


class FailedRunsError(ValueError):
    """Some runs failed. The results of the others are kept; the same call repeats only the failed ones."""

    exit_code = 4


class Queue:
    """Runs all plans, those that cost least first, until they are done or the time is up."""

    def __init__(
        self,
        plans: Sequence[Plan],
        ledger: Ledger,
        workers: Workers,
        deadline: float = math.inf,
        *,
        can_train: bool = True,
        quiet: bool = False,
    ) -> None:
        self.folder = plans[0].folder if plans else Path()
        self.ledger, self.workers, self.deadline = ledger, workers, deadline
        self.can_train, self.quiet = can_train, quiet
        self.missing: dict[str, Job] = {}
        self.measures: dict[str, dict[str, Measure]] = {}
        self.failed: dict[str, str] = {}
        self.estimated, self.measured = 0.0, 0.0  # seconds of the finished runs
        self.plans = order_plans(plans, ledger)
        for plan in self.plans:
            self.add(plan)

    def add(self, plan: Plan, *, first: bool = False) -> None:
        """Add the missing runs of a plan, behind the others or first."""
        new = plan.missing(self.ledger)
        self.missing = new | self.missing if first else self.missing | new
        for run, job in new.items():
            if job.is_missing(self.ledger):
                assert job.measure
                self.measures.setdefault(run, {})[job.measure.__name__] = job.measure

    def run(self) -> Iterator[tuple[Plan, Exception | None]]:
        """Yields each plan when all of its runs are done, or with an error when some failed."""
        rest = list(self.plans)
        with RunsDisplay(self, quiet=self.quiet) as self.display:
            while True:
                self.start()
                ended_plans = [plan for plan in rest if not self.is_open(plan)]
                for plan in ended_plans:
                    error = self.find_error(plan)
                    try:
                        if not error and plan.extend(self.ledger, can_train=self.can_train):
                            self.add(plan, first=True)  # so that a nearly finished study does not wait for all others
                            continue
                    except ValueError as invalid:  # such as a measure without the metric that chooses a rate
                        error = invalid
                    rest.remove(plan)
                    yield plan, error
                if ended_plans:
                    continue
                if not self.workers.running:
                    return
                ended = self.workers.wait(self.time_left())
                for task, future in ended:
                    self.finish(task, future)
                if not ended:  # the time is up
                    self.workers.terminate()
                    return

    def time_left(self) -> float | None:
        return None if math.isinf(self.deadline) else max(self.deadline - time.monotonic(), 0.0)

    def is_open(self, plan: Plan) -> bool:
        return any(job.is_missing(self.ledger) and job.run in self.missing for job in plan.all_jobs())

    def find_error(self, plan: Plan) -> Exception | None:
        jobs = list(plan.all_jobs())
        failed = [job for job in jobs if job.run in self.failed]
        if not failed:
            return None
        reason = f"{failed[0].label}: {self.failed[failed[0].run]}"
        return FailedRunsError(f"{len(failed)} of {len(jobs)} runs failed; the first one: {reason}")

    def start(self) -> None:
        """Start as many runs as there are free workers."""
        running = {task.folder.name for task, _ in self.workers.running.values()}
        while self.workers.free:
            run = next((run for run in self.missing if run not in running and self.is_ready(run)), None)
            if run is None:
                return
            job = self.missing[run]
            measures = tuple(measure for measure in self.measures.get(run, {}).values() if not is_own(measure))
            try:
                edit_weights(job)
            except Exception as error:
                self.fail(run, error)
                continue
            self.workers.start(Task(job.config, self.folder / run, measures, job.is_trained))
            running.add(run)

    def is_ready(self, run: str) -> bool:
        job, left = self.missing[run], self.time_left()
        return job.parent not in self.missing and (left is None or SLACK * self.expect_time(job.seconds) < left)

    def expect_time(self, seconds: float) -> float:
        """The time that so many estimated seconds take here, from finished runs; 0 while none is finished."""
        return seconds * self.measured / self.estimated if self.estimated else 0.0

    def finish(self, task: Task, future: Future) -> None:
        """Record a run, or that it failed, and with it those that start from it."""
        run = task.folder.name
        job, measures = self.missing[run], self.measures.get(run, {})
        try:
            record = future.result()
            own = {name: measure for name, measure in measures.items() if is_own(measure)}
            record["values"] |= {name: measure(task.config, task.folder) for name, measure in own.items()}
        except Exception as error:
            self.fail(run, error)
        else:
            self.ledger.add(record)
            self.estimated, self.measured = self.estimated + job.seconds, self.measured + record["seconds"]
            if all(self.ledger.find(run, name) is not None for name in measures):  # none was asked for meanwhile
                del self.missing[run]
        self.display.finish(job.label)

    def fail(self, run: str, error: Exception) -> None:
        """Note the failure of a run, and of those that start from it."""
        reason = first_line(error)
        self.display.print_line(f"{self.missing[run].label}: {reason}")
        failed = {run}
        for name, job in self.missing.items():  # in order: a run comes after the one that it starts from
            if job.parent in failed:
                failed.add(name)
        for name in failed:
            self.failed[name] = reason
            del self.missing[name]


class RunsDisplay(Display):
    """Progress of the runs. The remaining time is estimated from the times of finished runs."""

    def __init__(self, queue: Queue, *, quiet: bool) -> None:
        super().__init__("runs", max(len(queue.missing), 1), quiet=quiet)
        self.queue, self.finished = queue, 0

    def finish(self, label: str) -> None:
        self.finished += 1
        self.total = self.finished + len(self.queue.missing)
        self.advance(self.finished, label)

    def left(self) -> str:
        estimated = sum(job.seconds for job in self.queue.missing.values())
        seconds = self.queue.expect_time(estimated) / self.queue.workers.count
        return f"{readable(seconds)} left" if seconds else ""


def is_own(measure: Measure) -> bool:
    """Whether it is measured in this process: functions of a user's file are unknown to the workers."""
    return not measure.__module__.startswith("plainvit.")


def edit_weights(job: Job) -> None:
    """Makes the edited initial weights of a run, once."""
    folder = Path(job.config.init)
    if job.edit and not (folder / "model.safetensors").is_file():
        make_folder(folder)
        save_weights(job.edit(job.source, job.config), folder / "model.safetensors")
