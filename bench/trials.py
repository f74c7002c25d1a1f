"""The process of one candidate of bench/sweep.py, which compiles, times and trains it.

trial = Trial([config], threads=2)
trial.send("compile")
trial.receive()                 then "time", and "train" with the steps of each stage and a folder
"""

import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from bench.measure import first_line
from bench.steps import open_steps
from plainvit.commands.settings import configure_run
from plainvit.config import Config
from plainvit.runtime.distributed import end_after
from plainvit.train.run import fit

WARM_UP_STEPS, TIMED_STEPS = 5, 40
# Each stage has flags of `plainvit train`, "share" (its fraction of the time) and "image_size" (a factor), and starts
# from the weights of the one before
Stages = list[dict[str, Any]]


def configure(recipe: str, stage: dict[str, Any], data_root: str, device: str) -> Config:
    """The recipe with the settings of a stage, always compiled on a GPU."""
    flags: dict[str, Any] = {name: value for name, value in stage.items() if name not in ("share", "image_size")}
    config = configure_run("train", recipe, flags | {"data_root": data_root, "device": device}, quiet=True)
    assert config.model
    sides = tuple(round(stage.get("image_size", 1) * side) for side in config.model.image_size)
    compile_ = "on" if device.startswith("cuda") else config.compile
    return config.replace(model=config.model.replace(image_size=sides), compile=compile_)


def time_steps(config: Config) -> Iterator[float]:
    """Yields 0 after compilation, then the mean seconds of a step, data loading included."""
    with open_steps(config.replace(steps=WARM_UP_STEPS + TIMED_STEPS)) as step:
        for _ in range(WARM_UP_STEPS):
            step()
        yield 0.0
        seconds = [step() for _ in range(TIMED_STEPS)]
    yield statistics.fmean(seconds)


def train_stages(stages: Sequence[Config], steps: Sequence[int], out: Path, *, test: bool) -> dict[str, Any]:
    """Trains one stage after the other; returns the results of the last one. Only `test` reads the test images."""
    results: dict[str, Any] = {}
    if len(stages) > 1:
        torch.compiler.reset()  # code compiled for other shapes counts towards the recompilation limit
    for number, (config, count) in enumerate(zip(stages, steps, strict=True), 1):
        is_last = number == len(stages)
        config = config.replace(steps=count, epochs=0.0, keep=1, evaluations=config.evaluations if test else 1)
        if number > 1:
            config = config.replace(init=str(out / f"stage-{number - 1}"), head="keep")
        results = fit(config, out / f"stage-{number}", quiet=True, bare=not (test and is_last)).numbers
    return results


def count_steps(seconds: float, stages: Stages, step_seconds: Sequence[float]) -> list[int]:
    """Steps of each stage that fit into its share of the time."""
    pairs = zip(stages, step_seconds, strict=True)
    return [max(int(seconds * stage.get("share", 1.0) / per_step), 1) for stage, per_step in pairs]


def run_requests(connection: Connection, stages: Sequence[Config], threads: int) -> None:
    """Runs in the process of a candidate: answers each request with a result, or with an error as a string."""
    parent = multiprocessing.parent_process()
    assert parent
    end_after(lambda: wait([parent.sentinel]))
    torch.set_num_threads(threads)
    timers: list[Iterator[float]] = []
    while True:
        request = connection.recv()
        try:
            match request:
                case ("compile",):
                    timers = [time_steps(config) for config in stages]
                    result: Any = [next(timer) for timer in timers]
                case ("time",):
                    result = [next(timer) for timer in timers]
                    for timer in timers:  # ends the generators, which frees the memory
                        next(timer, None)
                case ("train", steps, out):
                    results = train_stages(stages, steps, Path(out), test=False)
                    result = {name: results["val"][name] for name in ("top1", "nll", "images")}
        except Exception as error:  # the other candidates continue
            result = f"{type(error).__name__}: {first_line(error)}"
        connection.send(result)


class Trial:
    """A candidate and its process."""

    def __init__(self, stages: Sequence[Config], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child_connection = context.Pipe()
        self.process = context.Process(target=run_requests, args=(child_connection, list(stages), threads))
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
