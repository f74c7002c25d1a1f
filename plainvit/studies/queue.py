"""Runs several studies at once: all share the worker processes, so that none is idle while a study ends.

    with Workers(8) as workers:
        for plan, error in Queue(plans, ledger, workers).run():
            ...

Several small models share a large GPU. Most of a short run is process start and compilation, so worker processes stay
alive.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, resource_tracker
from typing import Self

import torch

from plainvit.errors import first_line
from plainvit.runtime.display import Display
from plainvit.runtime.distributed import end_after
from plainvit.studies.plans import Plan, order_plans
from plainvit.studies.runs import Job, Ledger, execute

RECOMPILE_LIMIT = 256  # of a function in a worker: one version for each shape that its runs have


class FailedRunsError(ValueError):
    """Some runs failed. The results of the others are kept; the same call repeats only the failed ones."""

    exit_code = 4


class Queue:
    """Runs all plans, those that cost least first, until they are done."""

    def __init__(
        self,
        plans: Sequence[Plan],
        ledger: Ledger,
        workers: "Workers",
        *,
        at_once: int = 0,  # default: as many as there are workers
        can_train: bool = True,
        quiet: bool = False,
    ) -> None:
        self.ledger, self.workers = ledger, workers
        self.at_once, self.can_train, self.quiet = at_once or workers.count, can_train, quiet
        self.plans = order_plans(plans, ledger)
        self.missing = {job.key: job for plan in self.plans for job in plan.missing(ledger)}
        self.failed: dict[str, str] = {}  # reason by run

    def run(self) -> Iterator[tuple[Plan, Exception | None]]:
        """Yields each plan when all of its runs are done, or with an error when some failed."""
        rest = list(self.plans)
        with Display("runs", max(len(self.missing), 1), quiet=self.quiet) as self.display:
            while rest:
                self.start_jobs()
                ended = [plan for plan in rest if not self.is_open(plan)]
                for plan in ended:
                    error = self.find_error(plan)
                    try:
                        if not error and self.extend(plan):
                            continue
                    except ValueError as invalid:  # such as a measure without the metric that chooses a rate
                        error = invalid
                    rest.remove(plan)
                    yield plan, error
                if not ended:
                    for job, future in self.workers.wait():
                        self.finish(job, future)

    def is_open(self, plan: Plan) -> bool:
        """Whether numbers of the plan are missing."""
        return any(job.measure and job.key in self.missing for job in plan.all_jobs())

    def extend(self, plan: Plan) -> bool:
        """Extend the plan's grids; the new jobs come first, so that it does not wait for all other studies."""
        is_extended = plan.extend(self.ledger, can_train=self.can_train)
        if is_extended:
            self.missing = {job.key: job for job in plan.missing(self.ledger)} | self.missing
        return is_extended

    def find_error(self, plan: Plan) -> Exception | None:
        jobs = list(plan.all_jobs())
        failed = [job for job in jobs if job.run in self.failed]
        if not failed:
            return None
        reason = f"{failed[0].label}: {self.failed[failed[0].run]}"
        return FailedRunsError(f"{len(failed)} of {len(jobs)} runs failed; the first one: {reason}")

    def start_jobs(self) -> None:
        """Start as many jobs as there are free workers, each after the run that it starts from."""
        running = {job.run for job, _ in self.workers.running.values()}
        waiting = {job.run for job in self.missing.values()}
        for key, job in list(self.missing.items()):  # a copy: `fail` deletes jobs
            if not self.workers.free or len(running) >= self.at_once:
                return
            if job.run in running or job.parent in waiting or key not in self.missing:
                continue
            try:
                job.edit_weights()
            except Exception as error:
                self.fail(job, error)
                continue
            self.workers.start(job)
            running.add(job.run)

    def finish(self, job: Job, future: Future) -> None:
        """Record a run, or that it failed."""
        try:
            record = future.result()
            if job.measure and job.is_measured_here:
                record["values"] = {job.measurement: job.measure(job.config, job.folder)}
        except Exception as error:
            self.fail(job, error)
        else:
            self.ledger.add(record)
            self.missing.pop(job.key, None)
        self.display.total = self.display.done + 1 + len(self.missing)
        self.display.advance(self.display.done + 1, job.label)

    def fail(self, job: Job, error: Exception) -> None:
        """Note the failure of a run, and of those that start from it."""
        reason = first_line(error)
        self.display.print_line(f"{job.label}: {reason}")
        self.failed[job.run] = reason
        for key, other in list(self.missing.items()):  # in order: a run comes after the one that it starts from
            if other.run == job.run or other.parent in self.failed:
                self.failed[other.run] = reason
                del self.missing[key]


class Workers:
    """Worker processes, each in its own pool: a process that dies breaks its pool."""

    def __init__(self, count: int = 1) -> None:
        assert count > 0
        self.count = count
        self.free = [self._make_worker() for _ in range(count)]
        self.running: dict[Future, tuple[Job, ProcessPoolExecutor]] = {}
        self._earlier_children = multiprocessing.active_children()

    def _make_worker(self) -> ProcessPoolExecutor:
        """A process that executes jobs one after the other; started with the first."""
        threads = max((os.cpu_count() or 1) // self.count, 1)
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare_worker, (threads,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """After an error such as Ctrl-C each run saves a checkpoint, and the same call resumes it."""
        if error:
            for child in multiprocessing.active_children():
                if child not in self._earlier_children:
                    child.terminate()
        for worker in (*self.free, *(worker for _, worker in self.running.values())):
            worker.shutdown(cancel_futures=True)

    def start(self, job: Job) -> None:
        """Start a job in a free worker."""
        worker = self.free.pop()
        with _block_sigint():
            self.running[worker.submit(execute, job.for_worker())] = job, worker

    def wait(self) -> list[tuple[Job, Future]]:
        """The jobs that have ended, at least one."""
        ended: list[tuple[Job, Future]] = []
        for future in wait(self.running, return_when=FIRST_COMPLETED).done:
            job, worker = self.running.pop(future)
            if isinstance(future.exception(), BrokenProcessPool):
                worker.shutdown()
                worker = self._make_worker()
            self.free.append(worker)
            ended.append((job, future))
        return ended


@contextlib.contextmanager
def _block_sigint() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which a terminal sends to all of them: the parent handles it."""
    resource_tracker.ensure_running()  # its first start would reset the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker(threads: int) -> None:
    """Runs first in a worker, which ends with its parent."""
    parent = multiprocessing.parent_process()
    assert parent
    end_after(lambda: connection.wait([parent.sentinel]))
    torch.set_num_threads(threads)
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
