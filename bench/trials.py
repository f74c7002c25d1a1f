"""A candidate of a sweep: its stages as configs, the seconds of its steps, its training, and the process it has.

    trial = Trial("wide", [config], threads=2)
    trial.ask("compile"), trial.answer()        then "time", and "train" with the steps of each stage and a folder

Candidates are compiled at once, timed one by one while the others wait, and trained (bench/sweep.py).
"""

import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from bench.measure import first_line
from bench.steps import steps_on_data
from plainvit.commands.settings import configure_run
from plainvit.config import Config
from plainvit.runtime.distributed import end_after
from plainvit.train.run import fit

WARM_STEPS, TIMED_STEPS = 5, 40
Settings = dict[str, Any]  # flags of `plainvit train` and their values
# A list of stages, each of which starts from the weights of the one before and takes its "share" of the time
Stages = list[Settings]


def configure(recipe: str, settings: Settings, data_root: str, device: str) -> Config:
    """The recipe with these settings, compiled on a GPU even if it is short; image_size is a factor."""
    changes = {name: value for name, value in settings.items() if name not in ("share", "image_size")}
    config = configure_run("train", recipe, changes | {"data_root": data_root, "device": device}, quiet=True)
    assert config.model
    sides = tuple(round(settings.get("image_size", 1) * side) for side in config.model.image_size)
    compile_ = "on" if device.startswith("cuda") else config.compile
    return config.replace(model=config.model.replace(image_size=sides), compile=compile_)


def time_steps(config: Config) -> Iterator[float]:
    """Yields 0 when the steps are compiled, and then the mean seconds of a step with its data."""
    with steps_on_data(config.replace(steps=WARM_STEPS + TIMED_STEPS)) as step:
        for _ in range(WARM_STEPS):
            step()
        yield 0.0
        seconds = [step() for _ in range(TIMED_STEPS)]
    yield statistics.fmean(seconds)


def train_stages(stages: Sequence[Config], steps: Sequence[int], out: Path, *, test: bool) -> dict[str, Any]:
    """Trains each stage from the weights of the one before; the results of the last one, the only one to read test."""
    results: dict[str, Any] = {}
    if len(stages) > 1:
        torch.compiler.reset()  # compiled code for other shapes counts towards the recompilation limit
    for number, (config, count) in enumerate(zip(stages, steps, strict=True), 1):
        is_last = number == len(stages)
        config = config.replace(steps=count, epochs=0.0, keep=1, evaluations=config.evaluations if test else 1)
        if number > 1:
            config = config.replace(init=str(out / f"stage-{number - 1}"), head="keep")
        results = fit(config, out / f"stage-{number}", quiet=True, bare=not (test and is_last)).numbers
    return results


def count_steps(seconds: float, stages: Stages, step_seconds: Sequence[float]) -> list[int]:
    """Steps of each stage that take so many seconds in all."""
    return [
        max(int(seconds * stage.get("share", 1.0) / one), 1) for stage, one in zip(stages, step_seconds, strict=True)
    ]


def serve(connection: Connection, stages: Sequence[Config], threads: int) -> None:
    """Runs in the process of a candidate: compiles, times and trains when told to, and answers with the result."""
    parent = multiprocessing.parent_process()
    assert parent
    end_after(lambda: wait([parent.sentinel]))
    torch.set_num_threads(threads)
    timers: list[Iterator[float]] = []
    while (order := connection.recv()) is not None:
        try:
            match order:
                case ("compile",):
                    timers = [time_steps(config) for config in stages]
                    answer: Any = [next(timer) for timer in timers]
                case ("time",):
                    answer = [next(timer) for timer in timers]
                    for timer in timers:  # frees the memory
                        next(timer, None)
                case ("train", steps, out):
                    results = train_stages(stages, steps, Path(out), test=False)
                    answer = {name: results["val"][name] for name in ("top1", "nll", "images")}
        except Exception as error:  # this candidate is out, the others continue
            answer = f"{type(error).__name__}: {first_line(error)}"
        connection.send(answer)


class Trial:
    """A candidate and its process."""

    def __init__(self, name: str, stages: Sequence[Config], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, (self.connection, other) = name, context.Pipe()
        self.process = context.Process(target=serve, args=(other, list(stages), threads))
        self.process.start()
        other.close()

    def ask(self, *order: Any) -> None:
        self.connection.send(order)

    def answer(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            return f"its process ended with exit code {self.process.exitcode}"

    def end(self) -> None:
        self.process.terminate()
        self.process.join(10)
