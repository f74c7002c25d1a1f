"""The process of one candidate of bench/sweep.py, which compiles, times and trains it.

trial = Trial(config, threads=2)
trial.send("compile")
trial.receive()                 then "time", and "train" with the number of steps and a folder
"""

import multiprocessing
import statistics
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from bench.measure import first_line
from bench.steps import open_steps
from plainvit.commands.flags import Settings
from plainvit.commands.settings import configure_run
from plainvit.config import Config
from plainvit.runtime.distributed import end_after
from plainvit.train.run import fit

WARM_UP_STEPS, TIMED_STEPS = 5, 40


def configure(recipe: str, settings: dict[str, Any], data_root: str, device: str) -> Config:
    """The recipe with the settings of a candidate, always compiled on a GPU."""
    config = configure_run("train", recipe, Settings(settings | {"data_root": data_root, "device": device}), quiet=True)
    return config.replace(compile="on") if device.startswith("cuda") else config


def time_steps(config: Config) -> Iterator[float]:
    """Yields 0 after compilation, then the mean seconds of a step, data loading included."""
    with open_steps(config.replace(steps=WARM_UP_STEPS + TIMED_STEPS)) as step:
        for _ in range(WARM_UP_STEPS):
            step()
        yield 0.0
        seconds = [step() for _ in range(TIMED_STEPS)]
    yield statistics.fmean(seconds)


def count_steps(seconds: float, step_seconds: float) -> int:
    return max(int(seconds / step_seconds), 1)


def train(config: Config, steps: int, out: Path, *, test: bool) -> dict[str, Any]:
    """Trains for a number of steps and returns the results. Only `test` reads the test images."""
    config = config.replace(steps=steps, epochs=0.0, keep=1, evaluations=config.evaluations if test else 1)
    return fit(config, out, quiet=True, bare=not test).metrics


def run_requests(connection: Connection, config: Config, threads: int) -> None:
    """Runs in the process of a candidate: answers each request with a result, or with an error as a string."""
    parent = multiprocessing.parent_process()
    assert parent
    end_after(lambda: wait([parent.sentinel]))
    torch.set_num_threads(threads)
    timer: Iterator[float] = iter(())
    while True:
        request = connection.recv()
        try:
            match request:
                case ("compile",):
                    timer = time_steps(config)
                    result: Any = next(timer)
                case ("time",):
                    result = next(timer)
                    next(timer, None)  # ends the generator, which frees the memory
                case ("train", steps, out):
                    results = train(config, steps, Path(out), test=False)
                    result = {name: results["val"][name] for name in ("top1", "nll", "images")}
        except Exception as error:  # the other candidates continue
            result = f"{type(error).__name__}: {first_line(error)}"
        connection.send(result)


class Trial:
    """A candidate and its process."""

    def __init__(self, config: Config, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child_connection = context.Pipe()
        self.process = context.Process(target=run_requests, args=(child_connection, config, threads))
        self.process.start()
        child_connection.close()

    def send(self, *request: Any) -> None:
        self.connection.send(request)

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            return f"its process ended with exit code {self.process.exitcode}"

    def end(self) -> None:
        self.process.terminate()
        self.process.join(10)
