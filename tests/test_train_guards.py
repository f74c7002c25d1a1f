"""What a run does when something goes wrong: non-finite values, signals, a second process, the disk, the memory."""

import errno
import math
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import small_runs as runs
import torch
from small_runs import (
    Child,
    before_step,
    error_of,
    hash_parts,
    litter,
    outcome,
    run_command,
    stalled,
    status,
    without_figures,
)
from tiny import mostly_slow
from torch import Tensor

from plainvit.config import Config, Optim
from plainvit.data.splits import Splits
from plainvit.models import build
from plainvit.runtime.checkpoint import Checkpoints, hash_tensors
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import read_metrics
from plainvit.train import loop, micro_batch
from plainvit.train import run as run_module
from plainvit.train.loop import validation_score
from plainvit.train.micro_batch import DeviceMemoryError
from plainvit.train.nonfinite import DivergedError
from plainvit.train.objectives import Classify
from plainvit.train.replay import replay
from plainvit.train.run import fit
from plainvit.train.search import search_rates
from plainvit.train.signals import TOGETHER
from plainvit.train.state import Training
from plainvit.weights import save

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """runs.config() as a recipe for the command line."""
    return runs.recipe_file(tmp_path, runs.config())


def finish(recipe: str, out: Path) -> dict[str, Any]:
    fit(runs.config(recipe=recipe), out, quiet=True)
    assert litter(out) == []
    return outcome(out)


def newest(out: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    checkpoint = Checkpoints(out / "checkpoints", 1).read_newest()
    assert checkpoint is not None
    return checkpoint


# Non-finite values ----------------------------------------------------------------------------------------------------

BAD = 5  # the step with a non-finite gradient, counted from 1
NAME = "model.blocks.0.mlp.fc2.weight"


def spoil_gradients(monkeypatch: pytest.MonkeyPatch, value: float, steps: set[int]) -> None:
    """One number of one gradient becomes `value` at these steps, on its way from the loss."""
    train = run_module.train

    def train_spoilt(run: Training, *rest: Any) -> None:
        def spoil(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            if run.progress.step + 1 in steps:
                gradient.view(-1)[3] = value
            return gradient

        dict(run.objective.named_parameters())[NAME].register_hook(spoil)
        train(run, *rest)

    monkeypatch.setattr(run_module, "train", train_spoilt)


def watch_states(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[dict[str, str], dict[str, str]]]:
    """step -> hashes of the weights, averages and optimizer state before and after it."""
    seen: dict[int, tuple[dict[str, str], dict[str, str]]] = {}
    step = loop.take_step

    def watched(run: Training, *rest: Any) -> Any:
        before, number = hash_parts(run.tensors()), run.progress.step + 1
        line = step(run, *rest)
        seen[number] = before, hash_parts(run.tensors())
        return line

    monkeypatch.setattr(loop, "take_step", watched)
    return seen


@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [
        ("adamw", float("nan"), {"clip": 0.0}),
        ("adamw", float("-inf"), {}),
        ("sgd", float("nan"), {}),
        ("lamb", float("inf"), {}),
        ("muon", 1e38, {}),
    ],
)
def test_a_non_finite_gradient_changes_nothing_and_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, value: float, changes: dict[str, Any]
) -> None:
    """The capture names that gradient alone, although clipping by a norm of NaN would spread it over all."""
    spoil_gradients(monkeypatch, value, {BAD})
    seen = watch_states(monkeypatch)
    optim = Optim(name=name, lr=1e-2, weight_decay=0.1, **changes)
    done = fit(runs.config(steps=8, micro_batch=4, optim=optim), tmp_path, quiet=True)
    for number, (before, after) in seen.items():
        assert (before == after) == (number == BAD), f"step {number}"
        assert number == BAD or all(before[part] != after[part] for part in before)
    lines = [line for line in read_metrics(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if line.get("skipped")] == [BAD]
    assert lines[BAD - 1]["norm"] is None
    assert done.metrics["skipped_steps"] == 1
    tensors, state = Checkpoints(tmp_path / "captures", 1).read(BAD)
    assert state["gradients"] == [NAME]
    assert len(state["images"]) == 16
    assert hash_tensors(tensors) == seen[BAD][0]["model."]


@pytest.mark.parametrize("nll", [math.nan, math.inf, None])  # None: of a finished run, from results.json
def test_non_finite_metrics_are_never_the_best(nll: float | None) -> None:
    assert validation_score({"top1": 0.9, "nll": nll}) == -math.inf < validation_score({"loss": 0.5}) == -0.5
    results = {1e-3: {"top1": 0.1, "nll": 2.0}, 1e-2: {"top1": 0.9, "nll": nll}}

    def train_with(_: Config, __: Splits, lr: float) -> dict[str, Any]:
        if lr not in results:
            raise DivergedError
        return results[lr]

    searched = search_rates(runs.config(optim=Optim(grid=(*results, 0.5))), train_with)
    assert searched.optim.lr == 1e-3


def test_a_run_with_skipped_steps_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_gradients(monkeypatch, float("nan"), {3, 8})
    runs.stopped_run(runs.config(), tmp_path / "run", 10)
    resumed = runs.complete_run(runs.config(), tmp_path / "run")
    assert resumed == runs.complete_run(runs.config(), tmp_path / "whole")
    assert resumed["results"]["skipped_steps"] == 2
    assert Checkpoints(tmp_path / "run" / "captures", 1).steps() == [3, 8]


@pytest.mark.parametrize(("max_skipped_steps", "last", "saved"), [(0, 5, 4), (2, 9, 8)])
def test_too_many_skipped_steps_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_skipped_steps: int, last: int, saved: int
) -> None:
    spoil_gradients(monkeypatch, float("nan"), {5, 6, 9})
    with pytest.raises(DivergedError, match=f"step {last}"):
        fit(runs.config(max_skipped_steps=max_skipped_steps), tmp_path, quiet=True)
    ended = status(tmp_path)
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("diverged", 4, last)
    tensors, state = newest(tmp_path)
    assert state["step"] == saved
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert len(Checkpoints(tmp_path / "captures", 1).steps()) == max_skipped_steps + 1
    assert not (tmp_path / "model.safetensors").exists()


def test_replay_finds_the_first_module_that_overflows(tmp_path: Path, capsys: Capture) -> None:
    """A weight of 3e38 is finite, and its matmuls are not; the run folder does not change."""
    model = build(runs.MODEL.replace(classes=10)).initialize(torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0] = 3e38
    save(model, tmp_path / "w.safetensors")
    init = {"model": None, "init": str(tmp_path / "w.safetensors"), "head": "keep"}
    recipe, out = runs.recipe_file(tmp_path, runs.config(max_skipped_steps=2, **init)), tmp_path / "run"
    error_of(capsys, "train", recipe, "--out", out, code=4)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    report = replay(out)
    assert report["step"] == 3
    assert report["modules_not_finite"][0] == "blocks.0.mlp.fc1"
    assert "blocks.0.attention.qkv" not in report["modules_not_finite"]
    assert report["gradients_not_finite"][-1] == "model.head.bias"
    assert all(math.isfinite(norm) for norm in report["largest_gradients"].values())
    assert report["loss"] != report["loss"]
    assert len(report["images"]) == 16
    assert report["images"][0].startswith("digits-")
    assert replay(out, step=1)["modules_not_finite"][0] == "blocks.0.mlp.fc1"
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("changes", mostly_slow([{"micro_batch": 4}, {"class_weights": True}], 2))
def test_replay_repeats_a_step_exactly(tmp_path: Path, capsys: Capture, changes: dict[str, Any]) -> None:
    """The steps after checkpoints, with the loss and the norm of the metrics, bit for bit; others are errors."""
    out = tmp_path / "run"
    fit(runs.config(keep=9, **changes), out, quiet=True)
    lines = {line["step"]: line for line in read_metrics(out) if "loss" in line}
    for step in (4, 10):
        report = replay(out, step=step)
        assert (report["loss"], report["norm"]) == (lines[step]["loss"], lines[step]["norm"])
        assert report["modules_not_finite"] == report["gradients_not_finite"] == []
    assert "--step N" in error_of(capsys, "replay", out)
    assert "13" in error_of(capsys, "replay", out, "--step", 2)
    error_of(capsys, "replay", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


# Signals --------------------------------------------------------------------------------------------------------------

SIGNALS = ((signal.SIGTERM, 143), (signal.SIGINT, 130))


def interrupted(recipe: str, out: Path, point: str, number: int) -> int:
    """The exit code of a run, in a process of its own, that receives a signal at this point."""
    return Child(runs.command, ("train", recipe), out, point, number, log=out.with_name("log")).wait()


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_saves_and_stops_and_the_run_resumes(
    tmp_path: Path, undisturbed: dict[str, Any], number: int, code: int
) -> None:
    """Also if it arrives twice."""
    out, run_config = tmp_path / "run", runs.config(save_every=0, evaluations=1)
    recipe = runs.recipe_file(tmp_path, run_config)
    assert interrupted(recipe, out, "stepping:6", number) == code
    ended = status(out)
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("interrupted", code, 6)
    assert newest(out)[1]["step"] == 6
    fit(run_config.replace(recipe=recipe), out, quiet=True)
    for part in ("model.", "average.", "optimizer."):
        assert outcome(out)[part] == undisturbed[part]
    assert [line["step"] for line in read_metrics(out) if "loss" in line] == list(range(1, 13))


@pytest.mark.parametrize(("number", "code"), mostly_slow(SIGNALS, 2))
def test_a_second_signal_ends_at_once(tmp_path: Path, undisturbed: dict[str, Any], number: int, code: int) -> None:
    """In the middle of a step that never ends: nothing more is saved, and what was saved is complete."""
    out = tmp_path / "run"
    child = Child(runs.train, runs.config(), out, "recorded:8", log=tmp_path / "log")
    with stalled(child, out):
        child.wait_for((out / "checkpoints/step-00000006").exists)  # written by a thread
        child.send(number)
        child.process.join(TOGETHER + 0.3)
        assert child.process.is_alive()
        child.send(number)
        assert child.wait(60) == code
    assert newest(out)[1]["step"] == 6
    fit(runs.config(), out, quiet=True)
    assert outcome(out) == undisturbed


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize("point", ["validated:3", "delivering", "reporting"])
def test_a_signal_after_the_last_step_ends_a_run_that_is_not_done(
    tmp_path: Path, undisturbed: dict[str, Any], recipe: str, point: str, number: int, code: int
) -> None:
    """A run is done when its report is there, and not before. Also in the last validation, after the last check."""
    out = tmp_path / "run"
    assert interrupted(recipe, out, point, number) == code
    assert (status(out)["state"], status(out)["exit_code"]) == ("interrupted", code)
    assert finish(recipe, out) == undisturbed


def stop_with_signal(out: Path) -> None:
    """Runs in a child: an error ends the run, and SIGTERM arrives while it closes."""
    close = Checkpoints.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "close", lambda self: (signal.raise_signal(signal.SIGTERM), close(self)))
        runs.stopped_run(runs.config(), out, 8)


def test_a_signal_does_not_hide_the_error_of_a_run_that_closes(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to the other processes when one was lost, while they still write a checkpoint."""
    out = tmp_path / "run"
    assert Child(stop_with_signal, out, log=tmp_path / "log").wait() == 0
    assert (status(out)["state"], status(out)["reason"]) == ("failed", "StoppedError: stopped")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_continues_when_nobody_reads_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    reader, writer = os.openpty() if terminal else os.pipe()
    stderr = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", stderr)
    before_step(monkeypatch, 3, lambda _: os.close(reader))
    fit(runs.config(evaluations=6), tmp_path)
    assert status(tmp_path)["state"] == "done"
    with suppress(OSError):
        stderr.close()


def test_a_second_run_in_the_same_folder_is_an_error(tmp_path: Path, recipe: str, capsys: Capture) -> None:
    out = tmp_path / "run"
    child = Child(runs.command, ("train", recipe), out, "recorded:2", log=tmp_path / "log")
    with stalled(child, out):
        line = error_of(capsys, "train", recipe, "--out", out)
        assert f"process {child.process.pid} on {platform.node()} is training in {out}" in line
        assert child.process.is_alive()


# The disk -------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_5(
    tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, recipe: str, capsys: Capture
) -> None:
    out = tmp_path / "run"

    def fill_disk(run: Training) -> None:
        run.checkpoints.wait()
        monkeypatch.setattr(safetensors.torch, "save_file", runs.fail(OSError(errno.ENOSPC, "No space left")))

    with monkeypatch.context() as patch:
        before_step(patch, 7, fill_disk)
        line = error_of(capsys, "train", recipe, "--out", out, code=5)
    assert "step 8" in line
    assert str(out) in line
    assert (status(out)["state"], status(out)["exit_code"]) == ("failed", 5)
    assert newest(out)[1]["step"] == 6
    monkeypatch.undo()
    without_figures(monkeypatch)
    assert finish(recipe, out) == undisturbed


@pytest.mark.parametrize("step", mostly_slow([1, 7, 12], 3))
def test_a_deleted_run_folder_ends_the_run_with_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, capsys: Capture, step: int
) -> None:
    """At the first step, between two checkpoints, and at the last step."""
    out = tmp_path / "run"
    before_step(monkeypatch, step, lambda run: (run.checkpoints.close(), shutil.rmtree(out)))
    assert str(out) in error_of(capsys, "train", recipe, "--out", out, code=5)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere"), 5),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "somewhere"), 5),
        (ValueError("an error of the user, found late"), 2),
    ],
)
def test_status_has_the_exit_code_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, capsys: Capture, error: Exception, code: int
) -> None:
    before_step(monkeypatch, 1, runs.fail(error))
    error_of(capsys, "train", recipe, "--out", tmp_path / "run", code=code)
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["exit_code"]) == ("failed", code)


# The memory -----------------------------------------------------------------------------------------------------------

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore\nlines")


def limit_memory(monkeypatch: pytest.MonkeyPatch, most: int, since: int = 1) -> None:
    """More than `most` images at once are too many, from a call of the objective on."""
    forward, calls = Classify.forward, [0]

    def limited(self: Classify, images: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        if len(images) > most and calls[0] >= since:
            raise NO_MEMORY
        return forward(self, images, *rest)

    monkeypatch.setattr(Classify, "forward", limited)


def proposed(line: str) -> int:
    """The micro-batch that an error proposes."""
    words = line.split()
    return int(words[words.index("--micro-batch") + 1])


@pytest.mark.parametrize(("flags", "smaller", "since"), [((), 8, 1), (("--micro-batch", 8), 4, 1), ((), 8, 8)])
def test_too_large_a_micro_batch_is_an_error_that_proposes_a_smaller_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    capsys: Capture,
    flags: tuple[Any, ...],
    smaller: int,
    since: int,
) -> None:
    """At the first step; and after a checkpoint, which stays and whose run takes the smaller one."""
    limit_memory(monkeypatch, smaller, since)
    words = ("train", recipe, "--out", tmp_path / "run")
    line = error_of(capsys, *words, *flags, code=5)
    assert proposed(line) == smaller
    if since > 1:
        assert "step 7" in line
        assert newest(tmp_path / "run")[1]["step"] == 6
    assert run_command(*words, "--micro-batch", smaller, "--force") == 0
    assert status(tmp_path / "run")["state"] == "done"


@pytest.mark.parametrize("place", ["optim.Optimizers.step", "finalize.evaluate_splits"])
def test_out_of_memory_outside_of_the_gradients_ends_with_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, capsys: Capture, place: str
) -> None:
    """In the first update, which makes Adam's two moments, and in the evaluation of the final weights."""
    monkeypatch.setattr(f"plainvit.train.{place}", runs.fail(NO_MEMORY))
    assert proposed(error_of(capsys, "train", recipe, "--out", tmp_path / "run", code=5)) == 8
    assert status(tmp_path / "run")["exit_code"] == 5


def choose_on_device(
    monkeypatch: pytest.MonkeyPatch, images: int, most: int, world: Any = None, *, fsdp: bool = False
) -> tuple[int, list[int]]:
    """The micro-batch on a device that takes `most` images at once, and the sizes that were tried."""
    tried: list[int] = []

    def can_compute(_: object, tensors: list[Tensor]) -> bool:
        tried.append(len(tensors[0]))
        return tried[-1] <= most

    monkeypatch.setattr(micro_batch, "can_compute", can_compute)
    config = runs.config(batch=128, model=runs.MODEL.replace(classes=10), parallel="fsdp" if fsdp else "ddp")
    run: Any = SimpleNamespace(config=config, world=world or World())
    return micro_batch.choose_micro_batch(run, (torch.zeros(images, device="meta"),)), tried


@pytest.mark.parametrize(
    ("images", "most", "expected"), [(64, 64, 64), (64, 63, 32), (60, 16, 15), (64, 1, 1), (1, 1, 1)]
)
def test_the_micro_batch_is_found_by_halving(
    monkeypatch: pytest.MonkeyPatch, images: int, most: int, expected: int
) -> None:
    chosen, tried = choose_on_device(monkeypatch, images, most)
    assert chosen == expected == tried[-1]
    assert tried == sorted(tried, reverse=True)
    assert tried[0] == images


def test_only_too_little_memory_makes_a_micro_batch_smaller() -> None:
    run: Any = SimpleNamespace(cast=nullcontext, optimizers=SimpleNamespace(zero_grad=lambda: None))
    run.objective = runs.fail(NO_MEMORY)
    assert not micro_batch.can_compute(run, [])
    run.objective = runs.fail(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        micro_batch.can_compute(run, [])


@pytest.mark.parametrize(("mine", "other", "fsdp", "expected"), [(64, 9, False, 9), (9, 64, False, 8), (4, 0, True, 0)])
def test_processes_choose_one_micro_batch(
    monkeypatch: pytest.MonkeyPatch, mine: int, other: int, fsdp: bool, expected: int
) -> None:
    """The smallest of all. With FSDP it is estimated: a trial that fails would leave the other processes waiting."""
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (mine * 25_000, 10**9))
    gather: Callable[[Tensor], Tensor] = lambda rows: torch.cat([rows, torch.tensor([other])])  # noqa: E731
    world = SimpleNamespace(size=2, device="cpu", gather_rows=gather)
    with nullcontext() if expected else pytest.raises(DeviceMemoryError):
        chosen, tried = choose_on_device(monkeypatch, 64, mine, world, fsdp=fsdp)
        assert chosen == expected
        assert bool(tried) != fsdp
