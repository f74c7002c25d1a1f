"""Many runs, a few at a time, on one machine: each in a process of its own, the finished ones not run again.

    numbers = run_all({"seed 0": config, "seed 1": config.replace(seed=1)}, Path("runs/seeds"), at_once=4)
    numbers["seed 0"]["val"]["top1"]

Small models leave most of a large GPU free, so several runs side by side finish sooner than one after the other.
"""

import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from plainvit.config import Config, from_json, to_json
from plainvit.runtime.display import Display
from plainvit.train.fit import fit


class FailedRunsError(ValueError):
    """Some of many runs ended with an error; the others' results are kept, and the same call goes on."""

    exit_code = 4


def run_all(
    configs: Mapping[str, Config], folder: Path, *, at_once: int = 1, quiet: bool = False
) -> dict[str, dict[str, Any]]:
    """The numbers of each run by its name, in the order given: of held-out images, since test images are not read.

    An error comes once all others are done.
    """
    assert at_once > 0
    assert len({place(name) for name in configs}) == len(configs), "two runs would share a folder"
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with Display("runs", len(configs), quiet=quiet) as display:
        for name, future in _finished(configs, folder, at_once):
            error = future.exception()
            if error:
                failed[name] = (str(error).splitlines() or [type(error).__name__])[0]
                display.tell(f"{name}: {failed[name]}")
            else:
                found[name] = future.result()
            display.advance(len(found) + len(failed), name)
    if failed:
        first = next(iter(failed))
        raise FailedRunsError(
            f"{len(failed)} of {len(configs)} runs failed, the first of them {first}: {failed[first]}"
        )
    return {name: found[name] for name in configs}


def _finished(configs: Mapping[str, Config], folder: Path, at_once: int) -> Iterator[tuple[str, Future]]:
    """As they finish. A process that dies takes the others of its pool with it, so each run has a pool of its own."""
    rest, threads = list(configs), max((os.cpu_count() or 1) // at_once, 1)
    running: dict[Future, tuple[str, ProcessPoolExecutor]] = {}
    try:
        while rest or running:
            while rest and len(running) < at_once:
                name = rest.pop(0)
                pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
                running[pool.submit(_run, to_json(configs[name]), folder / place(name), threads)] = name, pool
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, pool = running.pop(future)
                pool.shutdown()
                yield name, future
    finally:
        for _, pool in running.values():
            pool.shutdown(cancel_futures=True)


def _run(config: dict[str, Any], out: Path, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    made = from_json(config, ("run",))
    assert isinstance(made, Config)
    return fit(made, out, quiet=True, test=False).numbers


def place(name: str) -> str:
    """A folder's name for a run's: letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9.=]+", "-", name).strip("-.") or "run"
