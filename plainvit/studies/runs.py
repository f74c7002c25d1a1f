"""Many runs, a few at a time, on one machine; each finished one is kept by the hash of its config and not run again.

    folders = run_all({"seed 0": config, "seed 1": config.replace(seed=1)}, Path("runs/seeds"), at_once=4)
    read_json(folders["seed 0"] / "results.json")["val"]["top1"]

Small models leave most of a large GPU free, so several runs side by side finish sooner than one after the other.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

import torch

from plainvit.config import Config, from_json, to_json
from plainvit.disk import read_json
from plainvit.runtime.display import Display
from plainvit.train.fit import fit

GRACE = 60.0  # seconds to save a run in, once nobody waits for it any more


class FailedRunsError(ValueError):
    """Some of many runs ended with an error; the others' results are kept, and the same call goes on."""

    exit_code = 4


def run_all(configs: Mapping[str, Config], folder: Path, *, at_once: int = 1, quiet: bool = False) -> dict[str, Path]:
    """The folder of each run by its name; equal configs are one run. Test images are not read.

    An error comes once all others are done.
    """
    assert at_once > 0
    found = {name: folder / run_hash(config) for name, config in configs.items()}
    names = {path: name for name, path in found.items() if not is_done(path)}  # of equal ones the last name stands
    total = len(set(found.values()))
    failed: dict[str, str] = {}
    with Display("runs", total, total - len(names), quiet=quiet) as display:
        for path, future in _finished({path: configs[name] for path, name in names.items()}, at_once):
            error = future.exception()
            if error:
                failed[names[path]] = (str(error).splitlines() or [type(error).__name__])[0]
                display.tell(f"{names[path]}: {failed[names[path]]}")
            display.advance(display.done + 1, names[path])
    if failed:
        first = next(iter(failed))
        raise FailedRunsError(
            f"{len(failed)} of {len(configs)} runs failed, the first of them {first}: {failed[first]}"
        )
    return found


def run_hash(config: Config) -> str:
    """Of all that decides a run's result; the run that it begins from counts by its own hash, wherever it lies."""
    plain = {key: value for key, value in to_json(config).items() if key not in Config.OPERATIONAL | {"recipe"}}
    plain["init"] = Path(config.init).name
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def is_done(path: Path) -> bool:
    return (path / "status.json").is_file() and read_json(path / "status.json").get("state") == "done"


def _finished(configs: Mapping[Path, Config], at_once: int) -> Iterator[tuple[Path, Future]]:
    """As they finish. A process that dies takes its pool with it, so each worker is a pool of its own."""
    rest, threads = list(configs), max((os.cpu_count() or 1) // at_once, 1)
    free = [_worker() for _ in range(min(at_once, len(rest)))]
    running: dict[Future, tuple[Path, ProcessPoolExecutor]] = {}
    others = multiprocessing.active_children()
    try:
        while rest or running:
            while rest and free:
                path, pool = rest.pop(0), free.pop()
                with _unheard():
                    running[pool.submit(_run, to_json(configs[path]), path, threads)] = path, pool
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                path, pool = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    pool.shutdown()
                    pool = _worker()
                free.append(pool)
                yield path, future
    except BaseException:  # ctrl-C: each run saves where it is, and the same call goes on from there
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()
        raise
    finally:
        for pool in [*free, *(pool for _, pool in running.values())]:
            pool.shutdown(cancel_futures=True)


def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent)


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
    """In a worker: a parent that is killed cannot stop it, and it would hold the device for ever."""
    parent = multiprocessing.parent_process()
    assert parent

    def end() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(143)

    threading.Thread(target=end, daemon=True).start()


def _run(config: dict[str, Any], out: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.compiler.reset()  # code of other shapes, from the run before
    made = from_json(config, ("run",))
    assert isinstance(made, Config)
    try:
        fit(made, out, quiet=True, bare=True)
    finally:
        parent = multiprocessing.parent_process()
        if parent and not parent.is_alive():  # nobody waits for an answer, nor gives other work
            os._exit(143)
