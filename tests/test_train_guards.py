"""What a run does when something goes wrong: numbers, signals, a second process, the disk, the memory."""

import errno
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_runs as runs
import torch
from small_runs import Child, litter, outcome, stalled, status
from tiny import mostly_slow
from torch import Tensor

from plainvit.cli import main
from plainvit.config import Config, Optim
from plainvit.models import build
from plainvit.runtime.checkpoint import Checkpoints, tensor_hash
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import metrics
from plainvit.train import loop
from plainvit.train import run as run_module
from plainvit.train.guards import (
    DeviceMemoryError,
    DivergedError,
    choose_micro_batch,
    largest_micro_batch,
    out_of_memory_error,
)
from plainvit.train.loop import score
from plainvit.train.objectives import Classify
from plainvit.train.optim import Optimizers
from plainvit.train.replay import replay
from plainvit.train.run import fit
from plainvit.train.state import Progress, Training
from plainvit.weights import save

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.without_figures(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of runs.config() when nothing goes wrong."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        runs.without_figures(patch)
        fit(runs.config(), out, quiet=True)
    return outcome(out)


def failed(*words: object, code: int, capsys: Capture) -> str:
    """The last line on standard error of a command that must end with this exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    errors = capsys.readouterr().err
    assert caught.value.code == code, errors
    assert "Traceback" not in errors
    last = errors.splitlines()[-1]
    assert last.startswith("plainvit: ")
    assert errors.count("plainvit: ") == 1
    return last


def newest(out: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    found = Checkpoints(out / "checkpoints", 1).newest()
    assert found is not None
    return found


# Numbers that are not finite ------------------------------------------------------------------------------------------

BAD = 5  # the step that goes wrong, counted from 1
NAME = "model.blocks.0.mlp.fc2.weight"


def spoil_gradients(monkeypatch: pytest.MonkeyPatch, value: float, at: set[int], name: str = NAME) -> None:
    """One number of one gradient becomes `value` at some steps, on its way from the loss."""
    train = run_module.train

    def train_spoilt(run: Training, *rest: Any) -> None:
        def spoil(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            if run.progress.step + 1 in at:
                gradient.view(-1)[3] = value
            return gradient

        dict(run.objective.named_parameters())[name].register_hook(spoil)
        train(run, *rest)

    monkeypatch.setattr(run_module, "train", train_spoilt)


def watch_states(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[dict[str, str], dict[str, str]]]:
    """step -> hashes of the weights, averages and optimiser before and after it."""
    seen: dict[int, tuple[dict[str, str], dict[str, str]]] = {}
    step = loop.take_step

    def watched(run: Training, *rest: Any) -> Any:
        before, number = hashes(run), run.progress.step + 1
        line = step(run, *rest)
        seen[number] = before, hashes(run)
        return line

    monkeypatch.setattr(loop, "take_step", watched)
    return seen


def hashes(run: Training) -> dict[str, str]:
    tensors = run.tensors()
    return {
        part: tensor_hash({name: tensor for name, tensor in tensors.items() if name.startswith(part)})
        for part in ("model.", "average.", "optimizer.")
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("adamw", float("nan")), ("adamw", float("-inf")), ("sgd", float("nan")), ("lamb", float("inf")), ("muon", 1e38)],
)
def test_a_bad_gradient_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, value: float
) -> None:
    spoil_gradients(monkeypatch, value, {BAD})
    seen = watch_states(monkeypatch)
    fit(runs.config(steps=8, optim=Optim(name=name, lr=1e-2, weight_decay=0.1)), tmp_path, quiet=True)
    for number, (before, after) in seen.items():
        assert (before == after) == (number == BAD), f"step {number}"
        assert number == BAD or all(before[part] != after[part] for part in before)
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if line.get("skipped")] == [BAD]
    assert lines[BAD - 1]["norm"] is None
    assert json.loads((tmp_path / "results.json").read_text())["skipped_steps"] == 1


def test_what_is_not_finite_is_never_the_best_validation() -> None:
    assert score({"top1": 0.1, "nll": 2.0}) == 0.1
    assert score({"top1": 0.1, "nll": float("nan")}) == score({"top1": 0.9, "nll": float("inf")}) == float("-inf")
    assert score({"loss": 0.5}) == -0.5


def test_a_bad_micro_batch_spoils_its_whole_step_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_gradients(monkeypatch, float("nan"), {BAD})
    seen = watch_states(monkeypatch)
    fit(runs.config(micro_batch=4), tmp_path, quiet=True)
    assert [number for number, (before, after) in seen.items() if before == after] == [BAD]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_capture_names_what_was_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    """That gradient alone, although clipping by a norm of NaN spreads it over all."""
    spoil_gradients(monkeypatch, float("nan"), {BAD})
    seen = watch_states(monkeypatch)
    fit(runs.config(optim=Optim(lr=1e-2, clip=clip)), tmp_path, quiet=True)
    tensors, state = Checkpoints(tmp_path / "captures", 1).read(BAD)
    assert state["gradients"] == [NAME]
    assert state["norm"] == "nan"
    assert len(state["images"]) == 16
    assert tensor_hash(tensors) == seen[BAD][0]["model."]


def test_a_run_with_a_bad_step_resumes_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_gradients(monkeypatch, float("nan"), {3, 8})
    fit(runs.config(), tmp_path / "whole", quiet=True)
    step = loop.take_step
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", lambda run, *rest: 1 / 0 if run.progress.step == 9 else step(run, *rest))
        with pytest.raises(ZeroDivisionError):
            fit(runs.config(), tmp_path / "run", quiet=True)
    fit(runs.config(), tmp_path / "run", quiet=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert outcome(tmp_path / "run")["results"]["skipped_steps"] == 2
    assert Checkpoints(tmp_path / "run" / "captures", 1).steps() == [3, 8]


@pytest.mark.parametrize("max_skipped_steps", [0, 2])
def test_too_many_bad_steps_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_skipped_steps: int
) -> None:
    spoil_gradients(monkeypatch, float("nan"), {5, 6, 9})
    last = 5 if max_skipped_steps == 0 else 9
    with pytest.raises(DivergedError, match=f"step {last}"):
        fit(runs.config(max_skipped_steps=max_skipped_steps), tmp_path, quiet=True)
    said = status(tmp_path)
    assert (said["state"], said["exit_code"], said["step"]) == ("diverged", 4, last)
    tensors, state = newest(tmp_path)
    assert state["step"] == {5: 4, 9: 8}[last]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert len(Checkpoints(tmp_path / "captures", 1).steps()) == max_skipped_steps + 1
    assert not (tmp_path / "model.safetensors").exists()


# A weight of 3e38 is finite, and its products are not
def explosive(folder: Path) -> Path:
    """Weights whose first layer of the MLP overflows."""
    model = build(runs.MODEL.replace(classes=10))
    model.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0] = 3e38
    save(model, folder / "explosive.safetensors")
    return folder / "explosive.safetensors"


@pytest.fixture
def diverged(tmp_path: Path, capsys: Capture) -> tuple[Path, str]:
    """The folder of a run whose every step overflows, and the last words of its command."""
    made = runs.config(model=None, init=str(explosive(tmp_path)), head="keep", max_skipped_steps=2)
    recipe = runs.recipe_file(tmp_path, made)
    return tmp_path / "run", failed("train", recipe, "--out", tmp_path / "run", code=4, capsys=capsys)


def test_replay_finds_the_first_module_that_overflows(diverged: tuple[Path, str]) -> None:
    out, _ = diverged
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    found = replay(out)
    assert found["step"] == 3
    assert found["modules_not_finite"][0] == "blocks.0.mlp.fc1"
    assert "blocks.0.attention.qkv" not in found["modules_not_finite"]
    assert "model.head.bias" in found["gradients_not_finite"]
    assert found["loss"] != found["loss"]
    assert len(found["images"]) == 16
    assert found["images"][0].startswith("digits-")
    assert replay(out, step=1)["modules_not_finite"][0] == "blocks.0.mlp.fc1"
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("changes", mostly_slow([{"micro_batch": 4}, {}, {"class_weights": True}], 2))
def test_replay_repeats_a_sound_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The step after a checkpoint, with the loss and the norm that the metrics have of it, bit for bit."""
    out = tmp_path / "run"
    fit(runs.config(keep=9, **changes), out, quiet=True)
    lines = {line["step"]: line for line in metrics(out) if "loss" in line}
    for step in (4, 5, 7, 10):
        found = replay(out, step=step)
        assert (found["loss"], found["norm"]) == (lines[step]["loss"], lines[step]["norm"])
        assert found["modules_not_finite"] == found["gradients_not_finite"] == []


def test_replay_of_missing_steps_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    fit(runs.config(), tmp_path / "run", quiet=True)
    assert "captured" in failed("replay", tmp_path / "run", code=2, capsys=capsys)
    line = failed("replay", tmp_path / "run", "--step", 2, code=2, capsys=capsys)
    assert "--step 2" in line
    assert "13" in line
    assert "not a run folder" in failed("replay", tmp_path / "absent", code=2, capsys=capsys)
    assert not (tmp_path / "absent").exists()


# Signals --------------------------------------------------------------------------------------------------------------

SIGNALS = ((signal.SIGTERM, 143), (signal.SIGINT, 130))
signals = pytest.mark.parametrize(("number", "code"), SIGNALS)


def command(tmp_path: Path, made: Config, *words: str, stall: str = "", pace: float = 0.0) -> Child:
    """`plainvit train` of this config, in a child."""
    recipe = runs.recipe_file(tmp_path, made)
    return Child(runs.command, ("train", recipe, *words), tmp_path / "run", stall, pace, log=tmp_path / "log")


def stopped_in_its_course(child: Child, out: Path, send: Callable[[int], None], number: int) -> int:
    """The exit code after a signal in the middle of the run."""
    child.wait_for(lambda: sum("loss" in line for line in metrics(out)) >= 5)
    send(number)
    return child.wait(30)


@signals
def test_a_signal_saves_and_stops_and_the_run_resumes(
    tmp_path: Path, whole: dict[str, Any], number: int, code: int
) -> None:
    out = tmp_path / "run"
    child = command(tmp_path, runs.config(save_every=0, evaluations=1), pace=0.15)
    assert stopped_in_its_course(child, out, child.send, number) == code, child.said
    said = status(out)
    assert (said["state"], said["exit_code"]) == ("interrupted", code)
    assert 5 <= said["step"] < 12
    assert newest(out)[1]["step"] == said["step"]
    last = child.said.splitlines()[-1]
    assert last.startswith(f"plainvit: {signal.Signals(number).name}: saved at step {said['step']}")
    made = runs.config(save_every=0, evaluations=1, recipe=f"{tmp_path / 'mine.py'}:recipe")
    fit(made, out, quiet=True)
    for part in ("model.", "average.", "optimizer."):
        assert outcome(out)[part] == whole[part]
    assert [line["step"] for line in metrics(out) if "loss" in line] == list(range(1, 13))


@pytest.mark.parametrize(("number", "code"), mostly_slow(SIGNALS, 2))
def test_a_second_signal_ends_at_once(tmp_path: Path, whole: dict[str, Any], number: int, code: int) -> None:
    """In the middle of a step that never ends: nothing more is saved, and what was saved is whole."""
    out = tmp_path / "run"
    child = Child(runs.train, runs.config(), out, "recorded:8", log=tmp_path / "log")
    with stalled(child, out):
        child.send(number)
        child.process.join(0.3)
        assert child.process.is_alive()
        child.send(number)
        assert child.wait(60) == code
    assert newest(out)[1]["step"] == 6
    fit(runs.config(), out, quiet=True)
    assert outcome(out) == whole


@pytest.mark.parametrize(
    ("stall", "number", "code"),
    mostly_slow(
        [("delivering", signal.SIGTERM, 143), ("reporting", signal.SIGTERM, 143), ("reporting", signal.SIGINT, 130)], 2
    ),
)
def test_a_signal_after_the_last_step_is_called_one(
    tmp_path: Path, whole: dict[str, Any], stall: str, number: int, code: int
) -> None:
    """A run is done when its report is there, and not before."""
    out = tmp_path / "run"
    child = command(tmp_path, runs.config(), stall=stall)
    with stalled(child, out):
        assert status(out)["state"] == "running"
        child.send(number)
        assert child.wait(60) == code
    assert "Traceback" not in child.said
    said = status(out)
    assert (said["state"], said["exit_code"]) == ("interrupted", code)
    fit(runs.config(recipe=f"{tmp_path / 'mine.py'}:recipe"), out, quiet=True)
    assert outcome(out) == whole


# Nobody listens -------------------------------------------------------------------------------------------------------


def unheard(out: Path, terminal: bool) -> None:
    """In a child: a run whose standard error is closed by its reader before step 3."""
    runs._prepare(out, "")
    mine, theirs = os.openpty() if terminal else os.pipe()
    os.dup2(theirs, 2)
    os.close(theirs)
    step = loop.take_step

    def closing(run: Training, *rest: Any) -> Any:
        if run.progress.step == 2:
            os.close(mine)
        return step(run, *rest)

    loop.take_step = closing
    fit(runs.config(evaluations=6), out)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_continues_when_nobody_reads_its_output(tmp_path: Path, terminal: bool) -> None:
    child = Child(unheard, tmp_path / "run", terminal, log=tmp_path / "log")
    assert child.wait() == 0, child.said
    assert status(tmp_path / "run")["state"] == "done"


# Two processes --------------------------------------------------------------------------------------------------------


def test_a_second_run_in_the_same_folder_is_an_error(tmp_path: Path, whole: dict[str, Any], capsys: Capture) -> None:
    out = tmp_path / "run"
    child = command(tmp_path, runs.config(), pace=0.05)
    child.wait_for(lambda: any(metrics(out)))
    child.send(signal.SIGSTOP)  # or it might be done before it is asked of
    line = failed("train", runs.recipe_file(tmp_path, runs.config()), "--out", out, code=2, capsys=capsys)
    assert f"process {child.process.pid} on {platform.node()} is training in {out}" in line
    assert child.process.is_alive()
    child.send(signal.SIGCONT)
    assert child.wait() == 0, child.said
    assert outcome(out) == whole


# The disk -------------------------------------------------------------------------------------------------------------


def limit_files(bytes_: int, step: int) -> None:
    """From that step on no file of this process may grow larger."""
    original = loop.take_step

    def limited(run: Training, *rest: Any) -> Any:
        if run.progress.step + 1 == step:
            run.checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return original(run, *rest)

    loop.take_step = limited


def limited_command(words: tuple[str, ...], out: Path, bytes_: int, step: int) -> None:
    limit_files(bytes_, step)
    runs.command(words, out)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_5(tmp_path: Path, whole: dict[str, Any]) -> None:
    out, recipe = tmp_path / "run", runs.recipe_file(tmp_path, runs.config())
    child = Child(limited_command, ("train", recipe), out, 30_000, 7, log=tmp_path / "log")
    assert child.wait() == 5, child.said
    last = child.said.splitlines()[-1]
    assert last.startswith("plainvit: cannot save the checkpoint of step 8")
    assert str(out) in last
    assert "Traceback" not in child.said
    assert (status(out)["state"], status(out)["exit_code"]) == ("failed", 5)
    assert newest(out)[1]["step"] == 6
    fit(runs.config(recipe=recipe), out, quiet=True)
    assert outcome(out) == whole
    assert litter(out) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB, where the test may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Takes all that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return filler


@pytest.mark.parametrize("step", mostly_slow([1, 5, 12, 7], 2))
def test_a_full_disk_ends_the_run_with_5_and_it_resumes_later(
    small_disk: Path, tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, step: int, capsys: Capture
) -> None:
    out, recipe = small_disk / "run", runs.recipe_file(tmp_path, runs.config())
    original = loop.take_step

    def filling(run: Training, *rest: Any) -> Any:
        if run.progress.step + 1 == step:
            run.checkpoints.wait()
            fill(small_disk)
        return original(run, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", filling)
        line = failed("train", recipe, "--out", out, code=5, capsys=capsys)
    assert str(out) in line
    assert "No space left" in line
    (small_disk / "filler").unlink()
    assert step == 1 or newest(out)[1]["step"] == max(saved for saved in (0, 3, 4, 6, 8, 9) if saved < step)
    fit(runs.config(recipe=recipe), out, quiet=True)
    assert outcome(out) == whole
    assert litter(out) == []


def test_a_disk_that_is_read_only(small_disk: Path, capsys: Capture) -> None:
    (small_disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for out in (small_disk / "run", small_disk / "new"):
        line = failed("train", "digits", "--steps", 2, "--out", out, code=5, capsys=capsys)
        assert "Read-only" in line
        assert str(out) in line


# The memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 7, 12])
def test_a_run_folder_that_is_deleted_ends_the_run_with_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, at: int
) -> None:
    """At the first step, between two checkpoints, and at the last step."""
    out, step = tmp_path / "run", loop.take_step

    def delete(run: Training, *rest: Any) -> Any:
        if run.progress.step == at - 1:
            run.checkpoints.settle()
            shutil.rmtree(out)
        return step(run, *rest)

    monkeypatch.setattr(loop, "take_step", delete)
    line = failed("train", runs.recipe_file(tmp_path, runs.config()), "--out", out, code=5, capsys=capsys)
    assert str(out) in line


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE])
def test_a_disk_that_fails_ends_with_5_as_status_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "somewhere")

    monkeypatch.setattr(loop, "take_step", fail)
    failed("train", runs.recipe_file(tmp_path, runs.config()), "--out", tmp_path / "run", code=5, capsys=capsys)
    assert status(tmp_path / "run")["exit_code"] == 5


def little_memory(monkeypatch: pytest.MonkeyPatch, most: int, since: int = 1) -> None:
    """More than `most` images at once are too many, from a step on."""
    forward, calls = Classify.forward, [0]

    def short(self: Classify, images: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        if len(images) > most and calls[0] >= since:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore\nlines")
        return forward(self, images, *rest)

    monkeypatch.setattr(Classify, "forward", short)


def offered(line: str) -> int:
    """The micro-batch that an error proposes."""
    words = line.split()
    return int(words[words.index("--micro-batch") + 1])


@pytest.mark.parametrize(("micro_batch", "most"), mostly_slow([(8, 4), (16, 8), (8, 2), (16, 1)], 3))
def test_too_large_a_micro_batch_is_an_error_with_one_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, micro_batch: int, most: int
) -> None:
    little_memory(monkeypatch, most)
    words = ("train", runs.recipe_file(tmp_path, runs.config()), "--out", tmp_path / "run", "--micro-batch")
    line = failed(*words, micro_batch, code=5, capsys=capsys)
    assert f"{micro_batch} images" in line
    main([*map(str, words), str(offered(line)), "--force"])  # what is said to fit does
    assert status(tmp_path / "run")["state"] == "done"


def test_memory_that_runs_out_later_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any], capsys: Capture
) -> None:
    recipe = runs.recipe_file(tmp_path, runs.config())
    with monkeypatch.context() as patch:
        little_memory(patch, 8, since=8)
        line = failed("train", recipe, "--out", tmp_path / "run", code=5, capsys=capsys)
    assert "step 8" in line
    assert "checkpoint of step 6 is intact" in line
    assert newest(tmp_path / "run")[1]["step"] == 6
    fit(runs.config(recipe=recipe), tmp_path / "run", quiet=True)
    assert outcome(tmp_path / "run") == whole


def test_a_smaller_micro_batch_counts_for_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """On a machine with less memory: what was found to fit the old one is not held on to."""
    recipe, out = runs.recipe_file(tmp_path, runs.config()), tmp_path / "run"
    little_memory(monkeypatch, 4, since=8)
    line = failed("train", recipe, "--out", out, code=5, capsys=capsys)
    assert "--micro-batch" in line  # how to go on
    main(["train", recipe, "--out", str(out), "--micro-batch", "4", "--force"])
    assert status(out)["state"] == "done"


def raise_out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore\nlines")


def test_memory_that_runs_out_in_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Adam's two moments are made at the first update."""
    monkeypatch.setattr(Optimizers, "step", raise_out_of_memory)
    recipe = runs.recipe_file(tmp_path, runs.config())
    assert "memory" in failed("train", recipe, "--out", tmp_path / "run", code=5, capsys=capsys)


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Classify, "forward", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        fit(runs.config(), tmp_path / "run", quiet=True)


class OnDevice:
    """What stands for a batch on a GPU."""

    def __init__(self, size: int) -> None:
        self.size, self.device = size, torch.device("cuda")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> "OnDevice":
        return OnDevice(min(part.stop, self.size))


def device_run(most: int, tried: list[int], world: World | None = None, *, fsdp: bool = False) -> Any:
    """A run on a device that takes `most` images at once."""

    def objective(images: OnDevice) -> tuple[Any, None]:
        tried.append(len(images))
        if len(images) > most:
            raise torch.OutOfMemoryError("out of memory")
        return SimpleNamespace(backward=lambda: None), None

    nothing = SimpleNamespace(zero=lambda: None)
    checkpoints = SimpleNamespace(steps=list, settle=lambda: None)
    progress = Progress()
    return SimpleNamespace(
        cast=nullcontext,
        objective=objective,
        optimizers=nothing,
        checkpoints=checkpoints,
        progress=progress,
        world=world or World(),
        config=runs.config(batch=128, model=runs.MODEL.replace(classes=10)),
        fsdp=fsdp,
    )


@pytest.mark.parametrize(("batch", "most", "found"), [(64, 64, 64), (64, 63, 32), (64, 5, 4), (64, 1, 1), (1, 1, 1)])
def test_the_largest_micro_batch_is_found_by_halving(batch: int, most: int, found: int) -> None:
    tried: list[int] = []
    assert largest_micro_batch(device_run(most, tried), (OnDevice(batch),), batch) == found  # pyright: ignore
    assert tried[0] == batch
    assert tried == sorted(tried, reverse=True)


def test_a_device_too_small_for_one_image_is_reported() -> None:
    assert largest_micro_batch(device_run(0, []), (OnDevice(8),), 8) == 0  # pyright: ignore
    error = out_of_memory_error(device_run(0, []), (OnDevice(8),), 8)  # pyright: ignore
    assert "not even one image" in str(error)


def choose_as_one_of_two(rank: int, store: Path, most: int, fsdp: bool) -> None:
    """In a child: prints the micro-batch that rank chooses, and the sizes that it tried. FSDP asks for free memory."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name in ("memory_reserved", "memory_allocated"):
        setattr(torch.cuda, name, lambda: 0)
    torch.cuda.mem_get_info = lambda: (most * 25_000, 10**9)
    tried: list[int] = []
    run = device_run(most, tried, World(rank, 2, "cpu"), fsdp=fsdp)
    try:
        chosen = choose_micro_batch(run, (OnDevice(64),))  # pyright: ignore
    except DeviceMemoryError as error:
        chosen = 0 if error.raised_by_all else None
    print(json.dumps([chosen, tried]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("most", "fsdp", "expected"), [((64, 9), False, 8), ((64, 0), False, 0), ((64, 4), True, 8), ((64, 0), True, 0)]
)
def test_processes_choose_one_micro_batch(tmp_path: Path, most: tuple[int, int], fsdp: bool, expected: int) -> None:
    """Memory is short in one of two processes only. With FSDP a trial would leave the other waiting: none is made."""
    children = [
        Child(choose_as_one_of_two, rank, tmp_path / "store", most[rank], fsdp, log=tmp_path / f"{rank}.log")
        for rank in (0, 1)
    ]
    assert [child.wait() for child in children] == [0, 0]
    (first, first_tried), (second, second_tried) = (json.loads(child.said.splitlines()[-1]) for child in children)
    assert (first, second) == (expected, expected)
    assert bool(first_tried or second_tried) != fsdp


def test_memory_that_runs_out_in_one_of_several_processes_is_not_tried_again() -> None:
    """The others stand in the middle of a step, and would not take part in the collectives of a trial."""
    tried: list[int] = []
    error = out_of_memory_error(device_run(4, tried, World(1, 2, "cpu")), (OnDevice(64),), 64)  # pyright: ignore
    assert (tried, error.exit_code, offered(str(error))) == ([], 5, 32)
