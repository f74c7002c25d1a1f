"""Small training runs for the tests: in this process, or in a child that is stopped where a test wants it stopped."""

import atexit
import contextlib
import hashlib
import json
import multiprocessing
import os
import pkgutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import shell
import torch
from safetensors import safe_open

from plainvit.cli import main
from plainvit.config import Augment, Config, Optim, ViTConfig
from plainvit.runtime.checkpoint import Checkpoints, hash_tensors
from plainvit.runtime.folder import read_metrics

CHILDREN = multiprocessing.get_context("forkserver")  # forks of one process that has loaded torch, and nothing else
CHILDREN.set_forkserver_preload(["plainvit.train.run", "plainvit.cli"])
MODEL = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=(4, 4), image_size=(8, 8), classes=0)
TIMING = ("seconds", "waiting", "time")  # the fields of metrics that no two runs share


def config(**changes: Any) -> Config:
    """Digits, 12 steps of 16 images, with much that is random. The images are resident: no data workers."""
    settings: dict[str, Any] = {
        "model": MODEL.replace(dropout=0.1, stochastic_depth=0.1),
        "data": "digits",
        "holdout": 0.05,
        "steps": 12,
        "batch": 16,
        "optim": Optim(lr=3e-3, warmup=0.1, weight_decay=0.1),
        "augment": Augment(crop="pad", pad=1, flip=0.0, mixup=0.2),
        "ema": 0.9,
        "evaluations": 3,
        "save_every": 3,
        "workers": 0,
    }
    return Config(**settings | changes)


def streamed(**changes: Any) -> Config:
    """The same by data workers, as RandAugment works image by image."""
    return config(augment=Augment(crop="pad", pad=1, flip=0.0, randaugment=(1, 5), mixup=0.2), **changes)


def recipe_file(folder: Path, run_config: Config, name: str = "mine") -> str:
    """FILE.py:FUNCTION of a recipe that returns this config, for the command line."""
    path = folder / f"{name}.py"
    path.write_text(f"from plainvit.config import *\n\n\ndef recipe():\n    return {run_config!r}\n")
    return f"{path}:recipe"


def quick_report(folder: Path, samples: object = (), state: str = "") -> Path:  # noqa: ARG001
    """In place of the real one, whose figures take longer than these runs: it says how the run ended."""
    path = folder / "report.html"
    path.write_text(state or status(folder)["state"])
    return path


def without_figures(patch: pytest.MonkeyPatch) -> None:
    for module in ("finalize", "run"):
        patch.setattr(f"plainvit.train.{module}.write_report", quick_report)


class StoppedError(RuntimeError):
    """Raised where a test wants a run to end."""


def before_step(patch: pytest.MonkeyPatch, number: int, act: Callable[[Any], object]) -> None:
    """Calls act(run) before the step `number`, counted from 1."""
    from plainvit.train import loop

    take_step = loop.take_step

    def act_and_take_step(run: Any, *rest: Any) -> Any:
        if run.progress.step + 1 == number:
            act(run)
        return take_step(run, *rest)

    patch.setattr(loop, "take_step", act_and_take_step)


def fail(error: BaseException | None = None) -> Callable[..., Any]:
    """A function that raises this error, by default a StoppedError."""

    def raise_error(*_: object, **__: object) -> None:
        raise error or StoppedError("stopped")

    return raise_error


def stopped_run(run_config: Config, out: Path, number: int, **options: Any) -> Path:
    """A run folder as an exception before that step leaves it."""
    from plainvit.train.run import fit

    with pytest.MonkeyPatch.context() as patch:
        without_figures(patch)
        before_step(patch, number, fail())
        with pytest.raises(StoppedError):
            fit(run_config, out, quiet=True, **options)
    return out


def complete_run(run_config: Config, out: Path) -> dict[str, Any]:
    """The outcome of a run that nothing disturbs."""
    from plainvit.train.run import fit

    with pytest.MonkeyPatch.context() as patch:
        without_figures(patch)
        fit(run_config, out, quiet=True)
    return outcome(out)


def run_command(*words: object) -> int:
    """Exit code of a command; an unexpected exception fails the test."""
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def error_of(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    """The one line of error of a command that must end with this exit code."""
    capsys.readouterr()
    return shell.fail(capsys, *words, code=code)


# The outcome of a run -------------------------------------------------------------------------------------------------


def outcome(out: Path) -> dict[str, Any]:
    """All that an interruption must not change: the last state, bit for bit, the weights, the metrics, the results."""
    kept = Checkpoints(out / "checkpoints", 1)
    tensors, state = kept.read(kept.steps()[-1])
    results = json.loads((out / "results.json").read_text())
    results.get("first", {}).pop("seconds", None)
    rest = {"step": state["step"], "lines": timeless(out), "results": results, "weights": weights(out)}
    return hash_parts(tensors) | rest


def hash_parts(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A hash each of the weights, the averages and the optimizer's state."""
    return {
        part: hash_tensors({name: tensor for name, tensor in tensors.items() if name.startswith(part)})
        for part in ("model.", "average.", "optimizer.")
    }


def weights(out: Path) -> str:
    """A hash of the final tensors and of the metadata of their file."""
    with safe_open(out / "model.safetensors", "pt") as file:
        described = hashlib.sha256(json.dumps(file.metadata(), sort_keys=True).encode()).hexdigest()
        return described + hash_tensors({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def timeless(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics without what a clock measured."""
    return [{name: value for name, value in line.items() if name not in TIMING} for line in read_metrics(out)]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out) if "loss" in line]


def status(out: Path) -> dict[str, Any]:
    return json.loads((out / "status.json").read_text())


def litter(out: Path) -> list[str]:
    """Temporary files that were left."""
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if "tmp" in path.name)


# Children -------------------------------------------------------------------------------------------------------------


class Child:
    """A process of its own group; what it prints is kept."""

    def __init__(self, job: Callable[..., None], *arguments: Any, log: Path) -> None:
        self.log = log
        self.process: BaseProcess = CHILDREN.Process(target=_begin, args=(job, arguments, log))
        self.process.start()
        atexit.register(self.process.kill)  # or a stalled child of a failed test would be waited for

    def wait(self, seconds: float = 60) -> int:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s:\n{self.said}"
        return self.process.exitcode

    def wait_for(self, happened: Callable[[], object], seconds: float = 60) -> None:
        """Until it happened, or the child ended."""
        end = time.monotonic() + seconds
        while not happened() and self.process.is_alive():
            assert time.monotonic() < end, f"nothing happened in {seconds} s:\n{self.said}"
            time.sleep(0.005)

    def send(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def kill(self, *, alone: bool = False) -> None:
        """SIGKILL, to its data workers too unless alone."""
        assert self.process.pid
        with contextlib.suppress(ProcessLookupError):
            (os.kill if alone else os.killpg)(self.process.pid, signal.SIGKILL)
        self.process.join()

    @property
    def said(self) -> str:
        return self.log.read_text()


def _begin(job: Callable[..., None], arguments: tuple[Any, ...], log: Path) -> None:
    os.setpgid(0, 0)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    job(*arguments)


def train(run_config: Config, out: Path, point: str = "") -> None:
    """In a child: a run that stops for ever at the point."""
    from plainvit.train.run import fit

    prepare_child(out, point)
    fit(run_config, out)


def command(words: tuple[str, ...], out: Path, point: str = "", number: int = 0) -> None:
    """In a child: `plainvit WORDS --out OUT`, which stops for ever at the point, or sends itself a signal there."""
    prepare_child(out, point, number)
    main([*words, "--out", str(out)])


def prepare_child(out: Path, point: str = "", number: int = 0) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
    without_figures(pytest.MonkeyPatch())
    if point:
        act_at(point, lambda: interrupt(out, number) if number else stall(out))


def marker(out: Path) -> Path:
    return out.with_name(f"{out.name}.stalled")


def stall(out: Path) -> None:
    marker(out).touch()
    time.sleep(600)


def interrupt(out: Path, number: int) -> None:
    """Twice: a scheduler signals all processes of a job, and torchrun passes the signal on to them."""
    assert status(out)["state"] == "running"
    for _ in range(2):
        signal.raise_signal(number)


# point -> the object, the function of it, and whether the action comes before or after the call
POINTS: dict[str, tuple[str, str, str]] = {
    "saving": ("safetensors.torch", "save_file", "before"),
    "hashing": ("plainvit.runtime.checkpoint", "hash_file", "before"),  # tensors are written, state.json is not
    "renaming": ("plainvit.runtime.checkpoint", "sync_folder", "after"),  # all is written under a temporary name
    "pruning": ("plainvit.runtime.checkpoint.Checkpoints", "_prune", "before"),
    "stepping": ("plainvit.train.loop", "take_step", "before"),
    "recorded": ("plainvit.train.state.Training", "record", "after"),
    "validating": ("plainvit.train.loop", "validate", "before"),
    "validated": ("plainvit.train.loop", "validate", "after"),
    "delivering": ("plainvit.train.finalize", "save", "before"),
    "writing": ("plainvit.weights.writing", "write_safetensors", "after"),  # the file still has its temporary name
    "delivered": ("plainvit.train.finalize", "save", "after"),
    "reporting": ("plainvit.train.finalize", "write_report", "before"),
}


def act_at(point: str, act: Callable[[], object]) -> None:
    """At `point`, or at `point:3` for its third time."""
    point, _, count = point.partition(":")
    place, name, when = POINTS[point]
    holder: Any = pkgutil.resolve_name(place)
    original, left = getattr(holder, name), [int(count or 1)]

    def call_and_act(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if not left[0] and when == "before":
            act()
        result = original(*arguments, **named)
        if not left[0] and when == "after":
            act()
        return result

    setattr(holder, name, call_and_act)


@contextlib.contextmanager
def stalled(child: Child, out: Path) -> Iterator[None]:
    """While the child stands at its point; then it is no more."""
    child.wait_for(marker(out).exists)
    assert marker(out).exists(), f"the child ended before it came to the point:\n{child.said}"
    try:
        yield
    finally:
        child.kill()
        marker(out).unlink()
