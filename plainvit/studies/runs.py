"""Many runs, a few at a time, on one machine; a finished one is not run again by the same code.

    with Workers(4) as workers:
        folders = run_all({"seed 0": config, "seed 1": config.replace(seed=1)}, Path("runs/seeds"), workers)
    read_json(folders["seed 0"] / "results.json")["val"]["top1"]

Small models leave most of a large GPU free, so several runs side by side finish sooner than one after the other. Most
of a short run is the start of a process and compilation: a worker is started once, and keeps what it compiled for runs
of one kind.
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
    """Some of many runs ended with an error; the others' results are kept, and the same call goes on."""

    exit_code = 4


def run_all(configs: Mapping[str, Config], folder: Path, workers: "Workers", *, quiet: bool = False) -> dict[str, Path]:
    """The folder of each run by its name; equal configs are one run. Test images are not read.

    An error comes once all others are done.
    """
    found = {name: folder / run_name(config) for name, config in configs.items()}
    names = {path: name for name, path in found.items() if not is_done(path)}  # of equal ones the last name stands
    if old := sum(any(map(is_done, folder.glob(f"{run_hash(configs[name])}*"))) for name in names.values()):
        log.warning("%d of these runs are in %s, made by other code: they are run again", old, folder)
    failed: dict[str, str] = {}
    with Pace(set(found.values()), set(names), len(workers.free), quiet=quiet) as display:
        for path, future in workers.finished({path: configs[name] for path, name in names.items()}):
            error = future.exception()
            if error:
                failed[names[path]] = (str(error).splitlines() or [type(error).__name__])[0]
                display.tell(f"{names[path]}: {failed[names[path]]}")
            display.finish(path, names[path])
    if failed:
        first = next(iter(failed))
        raise FailedRunsError(
            f"{len(failed)} of {len(configs)} runs failed, the first of them {first}: {failed[first]}"
        )
    return found


class Pace(Display):
    """Progress of many runs. Time is left by what finished ones took, not by the clock, which began with processes."""

    def __init__(self, paths: set[Path], due: set[Path], at_once: int, *, quiet: bool) -> None:
        super().__init__("runs", len(paths), len(paths) - len(due), quiet=quiet)
        self.at_once, self.took = at_once, [seconds for path in paths - due for seconds in _took(path)]

    def finish(self, path: Path, name: str) -> None:
        self.took += _took(path)
        self.advance(self.done + 1, name)

    def left(self) -> str:
        seconds = statistics.fmean(self.took) * (self.total - self.done) / self.at_once if self.took else 0
        return f"{readable(seconds)} left" if seconds else ""


def _took(path: Path) -> list[float]:
    """The seconds of a run that is done."""
    return [run_seconds(path)] if is_done(path) else []


def run_hash(config: Config) -> str:
    """Of all that decides a run's result; the run that it begins from counts by its own hash, wherever it lies."""
    plain = {key: value for key, value in to_json(config).items() if key not in Config.OPERATIONAL | {"recipe"}}
    plain["init"] = Path(config.init).name
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def run_name(config: Config) -> str:
    """The name of a run's folder: the same config run by other code is another run."""
    return f"{run_hash(config)}-{code_hash()}"


@functools.cache
def code_hash(package: Path = Path(__file__).parents[1]) -> str:
    """Of the source files that a run executes: not those of commands, pages, plans, recipes and studies."""
    files = [package / "config.py", package / "device.py"]
    for part in ("data", "evaluate", "models", "runtime", "train", "weights"):
        files += sorted((package / part).rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def is_done(path: Path) -> bool:
    return (path / "status.json").is_file() and read_json(path / "status.json").get("state") == "done"


def kind(config: Config) -> Config:
    """What compiled code depends on, and a little more; the model that a run begins from is not looked at."""
    return config.replace(seed=0, optim=Optim(), init="")


class Worker:
    """A process that makes one run after the other; it is started with the first."""

    def __init__(self, threads: int) -> None:
        self.threads, self.kind = threads, None
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent)

    def begin(self, config: Config, out: Path) -> Future:
        known, self.kind = self.kind == kind(config), kind(config)
        with _unheard():
            return self.pool.submit(_run, to_json(config), out, self.threads, known)


class Workers:
    """A few at a time. A process that dies takes its pool with it, so each worker is a pool of its own."""

    def __init__(self, at_once: int = 1) -> None:
        assert at_once > 0
        self.threads = max((os.cpu_count() or 1) // at_once, 1)
        self.free = [Worker(self.threads) for _ in range(at_once)]
        self.running: dict[Future, tuple[Path, Worker]] = {}
        self.others = multiprocessing.active_children()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """After ctrl-C each run saves where it is, and the same call goes on from there."""
        for child in multiprocessing.active_children() if error else ():
            if child not in self.others:
                child.terminate()
        for worker in (*self.free, *(worker for _, worker in self.running.values())):
            worker.pool.shutdown(cancel_futures=True)

    def finished(self, configs: Mapping[Path, Config]) -> Iterator[tuple[Path, Future]]:
        """Of each run, as they finish; a worker goes on with runs of its kind, or begins one that no other is at."""
        rest = {path: kind(config) for path, config in configs.items()}
        while rest or self.running:
            while rest and self.free:
                worker = self.free.pop()
                taken = [other.kind for _, other in self.running.values()]
                path = min(rest, key=lambda path: (rest[path] != worker.kind, rest[path] in taken))
                del rest[path]
                self.running[worker.begin(configs[path], path)] = path, worker
            for future in wait(self.running, return_when=FIRST_COMPLETED).done:
                path, worker = self.running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    worker.pool.shutdown()
                    worker = Worker(self.threads)
                self.free.append(worker)
                yield path, future


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Processes that are begun here do not hear ctrl-C: a terminal sends it to all, and one of them is to speak."""
    resource_tracker.ensure_running()  # or its own first start would undo the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """In a worker."""
    parent = multiprocessing.parent_process()
    assert parent
    end_after(lambda: connection.wait([parent.sentinel]))


def _run(config: dict[str, Any], out: Path, threads: int, known: bool) -> None:
    """In a worker. Code for other shapes, from the runs before, would come to a limit and end compilation."""
    torch.set_num_threads(threads)
    if not known:
        torch.compiler.reset()
    made = from_json(config, ("run",))
    assert isinstance(made, Config)
    try:
        fit(made, out, quiet=True, bare=True)
    finally:
        parent = multiprocessing.parent_process()
        if parent and not parent.is_alive():  # nobody waits for an answer, nor gives other work
            os._exit(143)
