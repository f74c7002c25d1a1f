"""Executes runs in worker processes that share one machine, and measures each as it finishes.

    with Workers(8) as workers:
        workers.start(Task(config, folder, (held_out,)))
        [(task, future)] = workers.wait()
        future.result()["values"]["held_out"]["top1"]

Several small models share a large GPU. Most of a short run is process start and compilation, so worker processes stay
alive.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, Self

import torch

from plainvit.config import Checked, Config
from plainvit.device import choose_device
from plainvit.disk import read_json
from plainvit.runtime.distributed import end_after
from plainvit.runtime.folder import environment, run_seconds
from plainvit.train.run import fit

RESULTS_VERSION = 1  # raise it if code or a default changes the results of runs: finished runs are then repeated
RECOMPILE_LIMIT = 256  # of a function in a worker: one version for each shape that its runs have
Measure = Callable[[Config, Path], dict[str, float]]


@dataclass(frozen=True)
class Task:
    """A run and its measurements."""

    config: Config
    folder: Path
    measures: tuple[Measure, ...] = ()
    is_trained: bool = True


def run_name(config: Config) -> str:
    """The folder name of a run, and its name in the ledger."""
    return f"{run_hash(config)}-v{RESULTS_VERSION}"


def run_hash(config: Config) -> str:
    """A hash of all settings that affect the result; of `init`, only the name of the folder."""
    settings = list_changes(config) | {"init": Path(config.init).name}
    kept = {name: value for name, value in settings.items() if name not in Config.OPERATIONAL | {"recipe"}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


HASHED_NAMES = {"standardize": "standardise"}  # so that a renamed setting does not change the names of runs


def list_changes(config: Checked) -> dict[str, Any]:
    """The settings that differ from their defaults, so that a new option does not change the names of runs."""
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    return {"kind": type(config).__name__} | {
        HASHED_NAMES.get(name, name): list_changes(value) if isinstance(value, Checked) else value
        for name, (value, default) in values.items()
        if value != default
    }


def is_done(path: Path) -> bool:
    return read_json(path / "status.json").get("state") == "done"


class Workers:
    """Worker processes, each in its own pool: a process that dies breaks its pool."""

    def __init__(self, at_once: int = 1) -> None:
        assert at_once > 0
        self.count = at_once
        self.threads = max((os.cpu_count() or 1) // at_once, 1)
        self.free = [_make_worker() for _ in range(at_once)]
        self.running: dict[Future, tuple[Task, ProcessPoolExecutor]] = {}
        self.others = multiprocessing.active_children()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """After Ctrl-C each run saves a checkpoint, and the same call resumes it."""
        if error:
            self.terminate()
        for worker in (*self.free, *(worker for _, worker in self.running.values())):
            worker.shutdown(cancel_futures=True)

    def terminate(self) -> None:
        """Stop all runs; each saves a checkpoint first."""
        for child in multiprocessing.active_children():
            if child not in self.others:
                child.terminate()

    def start(self, task: Task) -> None:
        """Start a task in a free worker."""
        worker = self.free.pop()
        with _block_sigint():
            self.running[worker.submit(execute, task, self.threads)] = task, worker

    def wait(self, seconds: float | None = None) -> list[tuple[Task, Future]]:
        """The tasks that have ended, at least one unless the time is up."""
        ended: list[tuple[Task, Future]] = []
        for future in wait(self.running, seconds, return_when=FIRST_COMPLETED).done:
            task, worker = self.running.pop(future)
            if isinstance(future.exception(), BrokenProcessPool):
                worker.shutdown()
                worker = _make_worker()
            self.free.append(worker)
            ended.append((task, future))
        return ended


def _make_worker() -> ProcessPoolExecutor:
    """A process that executes tasks one after the other; started with the first."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _exit_with_parent)


@contextlib.contextmanager
def _block_sigint() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which a terminal sends to all of them: the parent handles it."""
    resource_tracker.ensure_running()  # its first start would reset the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_with_parent() -> None:
    """Runs in a worker."""
    parent = multiprocessing.parent_process()
    assert parent
    end_after(lambda: connection.wait([parent.sentinel]))


def execute(task: Task, threads: int = 0) -> dict[str, Any]:
    """Train unless the run is finished, and measure. Returns the record of the run for the ledger."""
    config, folder, is_trained, started = task.config, task.folder, task.is_trained, time.monotonic()
    if threads:  # in a worker
        torch.set_num_threads(threads)
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    try:
        if is_trained and not is_done(folder):
            fit(config, folder, quiet=True, bare=True)
        values = {measure.__name__: measure(config, folder) for measure in task.measures}
    finally:
        parent = multiprocessing.parent_process()
        if parent and not parent.is_alive():  # nobody is waiting for the result
            os._exit(143)
    machine = read_json(folder / "environment.json") if is_trained else environment(choose_device(config.device))
    seconds = run_seconds(folder) if is_trained else time.monotonic() - started
    commit = os.environ.get("PLAINVIT_COMMIT") or machine["commit"]  # set for a copy outside its repository
    about = {"seconds": round(seconds, 1), "commit": commit, "device": machine["device"]}
    return {"run": folder.name, "values": values, "is_trained": is_trained, **about}
