"""Runs many configs on one machine, a few in parallel; finished runs are not repeated.

    with Workers(4) as workers:
        folders = run_all({"seed 0": config, "seed 1": config.replace(seed=1)}, Path("runs/seeds"), workers)
    read_json(folders["seed 0"] / "results.json")["val"]["top1"]

Several small models share a large GPU. Most of a short run is process start and compilation, so worker processes stay
alive and prefer runs that can reuse their compiled code.
"""

import contextlib
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, Self

import torch

from plainvit.config import Config, Optim, from_json, to_json
from plainvit.disk import read_json
from plainvit.runtime.display import Display, readable
from plainvit.runtime.distributed import end_after
from plainvit.runtime.folder import run_seconds
from plainvit.train.run import fit

log = logging.getLogger("plainvit")


class FailedRunsError(ValueError):
    """Some runs failed. The results of the others are kept; the same call repeats only the failed ones."""

    exit_code = 4


def run_all(configs: Mapping[str, Config], folder: Path, workers: "Workers", *, quiet: bool = False) -> dict[str, Path]:
    """Returns the folder of each run by name; equal configs share a run. Raises only after all others are done."""
    folders = {name: folder / run_name(config) for name, config in configs.items()}
    names = {path: name for name, path in folders.items() if not is_done(path)}
    if old := sum(any(map(is_done, folder.glob(f"{run_hash(configs[name])}*"))) for name in names.values()):
        log.warning("%d of these runs in %s were made by other code and are run again", old, folder)
    failed: dict[str, str] = {}
    with RunsDisplay(set(folders.values()), set(names), len(workers.free), quiet=quiet) as display:
        for path, future in workers.finished({path: configs[name] for path, name in names.items()}):
            error = future.exception()
            if error:
                failed[names[path]] = (str(error).splitlines() or [type(error).__name__])[0]
                display.tell(f"{names[path]}: {failed[names[path]]}")
            display.finish(path, names[path])
    if failed:
        first = next(iter(failed))
        raise FailedRunsError(f"{len(failed)} of {len(configs)} runs failed; the first one: {first}: {failed[first]}")
    return folders


class RunsDisplay(Display):
    """Progress of many runs. The remaining time is estimated from the times of finished runs."""

    def __init__(self, paths: set[Path], pending: set[Path], at_once: int, *, quiet: bool) -> None:
        super().__init__("runs", len(paths), len(paths) - len(pending), quiet=quiet)
        self.at_once, self.times = at_once, [seconds for path in paths - pending for seconds in _run_times(path)]

    def finish(self, path: Path, name: str) -> None:
        self.times += _run_times(path)
        self.advance(self.done + 1, name)

    def left(self) -> str:
        seconds = statistics.fmean(self.times) * (self.total - self.done) / self.at_once if self.times else 0
        return f"{readable(seconds)} left" if seconds else ""


def _run_times(path: Path) -> list[float]:
    """The seconds of a run if it is done."""
    return [run_seconds(path)] if is_done(path) else []


def run_hash(config: Config) -> str:
    """A hash of all settings that affect the result; of `init`, only the name of the folder."""
    settings = {key: value for key, value in to_json(config).items() if key not in Config.OPERATIONAL | {"recipe"}}
    settings["init"] = Path(config.init).name
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def run_name(config: Config) -> str:
    """The folder name of a run; it changes with the code."""
    return f"{run_hash(config)}-{code_hash()}"


@functools.cache
def code_hash(package: Path = Path(__file__).parents[1]) -> str:
    """A hash of the source files that affect a run: not commands, reports, plans, recipes and studies."""
    files = [package / name for name in ("config.py", "model_config.py", "device.py")]
    for part in ("data", "evaluate", "models", "runtime", "train", "weights"):
        files += sorted((package / part).rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def is_done(path: Path) -> bool:
    return (path / "status.json").is_file() and read_json(path / "status.json").get("state") == "done"


def compile_key(config: Config) -> Config:
    """The settings that compiled code depends on."""
    return config.replace(seed=0, optim=Optim(), init="")


class Worker:
    """A process that executes runs one after the other; started with the first."""

    def __init__(self, threads: int) -> None:
        self.threads, self.compiled = threads, None
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _exit_with_parent)

    def submit(self, config: Config, out: Path) -> Future:
        known, self.compiled = self.compiled == compile_key(config), compile_key(config)
        with _block_sigint():
            return self.pool.submit(_run, to_json(config), out, self.threads, known)


class Workers:
    """Worker processes, each in its own pool: a process that dies breaks its pool."""

    def __init__(self, at_once: int = 1) -> None:
        assert at_once > 0
        self.threads = max((os.cpu_count() or 1) // at_once, 1)
        self.free = [Worker(self.threads) for _ in range(at_once)]
        self.running: dict[Future, tuple[Path, Worker]] = {}
        self.others = multiprocessing.active_children()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """After Ctrl-C each run saves a checkpoint, and the same call resumes it."""
        for child in multiprocessing.active_children() if error else ():
            if child not in self.others:
                child.terminate()
        for worker in (*self.free, *(worker for _, worker in self.running.values())):
            worker.pool.shutdown(cancel_futures=True)

    def finished(self, configs: Mapping[Path, Config]) -> Iterator[tuple[Path, Future]]:
        """(folder, future) of each run as it finishes; workers prefer runs that can reuse their compiled code."""
        rest = {path: compile_key(config) for path, config in configs.items()}
        while rest or self.running:
            while rest and self.free:
                worker = self.free.pop()
                taken = [other.compiled for _, other in self.running.values()]
                path = min(rest, key=lambda path: (rest[path] != worker.compiled, rest[path] in taken))
                del rest[path]
                self.running[worker.submit(configs[path], path)] = path, worker
            for future in wait(self.running, return_when=FIRST_COMPLETED).done:
                path, worker = self.running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    worker.pool.shutdown()
                    worker = Worker(self.threads)
                self.free.append(worker)
                yield path, future


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


def _run(config: dict[str, Any], out: Path, threads: int, known: bool) -> None:
    """Runs in a worker. Compiled code for other shapes is dropped: it counts towards the recompilation limit."""
    torch.set_num_threads(threads)
    if not known:
        torch.compiler.reset()
    made = from_json(config, ("run",))
    assert isinstance(made, Config)
    try:
        fit(made, out, quiet=True, bare=True)
    finally:
        parent = multiprocessing.parent_process()
        if parent and not parent.is_alive():  # nobody is waiting for the result
            os._exit(143)
