"""Edited or damaged run folders: used or reported in one line, never a traceback."""

import contextlib
import copy
import json
import math
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import small_runs as runs
import torch
from small_runs import run_command
from torch import Tensor

from plainvit.analyse.report import read_run
from plainvit.evaluate.predict import describe_accuracy_of_run
from plainvit.runtime.checkpoint import STATE, TENSORS, Checkpoints, _hash_state, hash_file
from plainvit.runtime.folder import read_commit, read_results, read_run_seconds

VALUES = (None, "x", -1, 10**9, 10**400, 1.5, math.nan, math.inf, True, [], {}, [[1]], {"a": {"b": None}}, ["\udce9"])
TEXTS = ("", '{"a": 1', "[1]", "null", "[" * 100_000, "\x00")
LAST = 4  # step of the newest checkpoint of the run that was stopped


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in done/; in stopped/ one that ended before step 6 of 6."""
    home = tmp_path_factory.mktemp("folders")
    run_config = runs.config(steps=6, save_every=2, evaluations=2)
    run_config = run_config.replace(recipe=runs.recipe_file(home, run_config))
    runs.complete_run(run_config, home / "done")
    runs.stopped_run(run_config, home / "stopped", 6)
    return home


@pytest.fixture
def no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the end of a run, which reads none of the files."""
    runs.without_figures(monkeypatch)
    monkeypatch.setattr("plainvit.train.run.finalize", lambda run, *_, **__: (run.objective.model, {}))


def copied(home: Path, name: str, out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    return Path(shutil.copytree(home / name, out))


def resume(home: Path, out: Path, *flags: object) -> int:
    return run_command("train", f"{home / 'mine.py'}:recipe", "--out", out, *flags)


# Edited files ---------------------------------------------------------------------------------------------------------


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key down to the third level, and the first entry of each list."""
    inner = list(value) if isinstance(value, dict) else [0] if isinstance(value, list) and value else []
    for key in inner if len(place) < 3 else ():
        yield (*place, key)
        yield from places(value[key], (*place, key))


def edits(value: Any) -> Iterator[Any]:
    """The value with each key deleted or replaced."""
    for *above, last in places(value):
        for new in (KeyError, *VALUES):
            edited = copy.deepcopy(value)
            inner = edited
            for key in above:
                inner = inner[key]
            if new is KeyError:
                del inner[last]
            else:
                inner[last] = new
            yield edited


def damaged_texts(file: Path) -> list[str]:
    """Damaged contents of a file, in random order."""
    first, *rest = file.read_text().splitlines(keepends=True) if file.suffix == ".jsonl" else [file.read_text()]
    texts = [f"{text}\n{''.join(rest)}" for text in (*map(json.dumps, edits(json.loads(first))), *TEXTS)]
    random.Random(0).shuffle(texts)
    return texts


FILES = ("config.json", "environment.json", "status.json", "metrics.jsonl", "data.json")
FILES += (f"checkpoints/step-{LAST:08d}/{STATE}",)


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumes_from_an_edited_folder_or_exits_cleanly(home: Path, tmp_path: Path, name: str, part: int) -> None:
    texts = damaged_texts(home / "stopped" / name)
    for text in texts[6:200] if part else texts[:6]:
        out = copied(home, "stopped", tmp_path / "run")
        (out / name).write_text(text, encoding="utf-8")
        assert resume(home, out) in (0, 2, 3), text


@pytest.mark.parametrize("name", ["results.json", "card.json", "environment.json", "config.json", "status.json"])
def test_an_edited_finished_run_is_read_or_exits_cleanly(home: Path, tmp_path: Path, name: str) -> None:
    out = copied(home, "done", tmp_path / "run")
    readers: tuple[Callable[[Path], object], ...] = (read_results, read_run_seconds, describe_accuracy_of_run, read_run)
    for number, text in enumerate(damaged_texts(home / "done" / name)[:60]):
        (out / name).write_text(text, encoding="utf-8")
        for read in readers:
            with contextlib.suppress(ValueError):
                read(out)
        assert number % 6 or run_command("compare", out, home / "done") in (0, 2, 3), text


@pytest.mark.usefixtures("no_evaluation")
def test_invalid_results_of_a_finished_run_are_an_error(home: Path, tmp_path: Path) -> None:
    out = copied(home, "done", tmp_path / "run")
    file = out / "results.json"
    valid = json.loads(file.read_text())
    for change in ({"top1": None}, {"top1": "x"}, {"top1": 1.5}, {"images": 0}, {"images": 10**400}, {"nll": -1}):
        file.write_text(json.dumps(valid | {"test": valid["test"] | change}))
        assert resume(home, out) == 2, change
    file.write_text(json.dumps(valid | {"val": 3}))
    assert resume(home, out) == 2
    file.write_text(json.dumps(valid))
    assert resume(home, out) == 0


# Checkpoints of another config or version -----------------------------------------------------------------------------


def write_checkpoint(out: Path, tensors: dict[str, Tensor], **progress: Any) -> None:
    """Replaces the newest checkpoint, with matching hashes."""
    folder = out / "checkpoints" / f"step-{LAST:08d}"
    safetensors.torch.save_file(tensors, folder / TENSORS)
    state = json.loads((folder / STATE).read_text())
    del state["sha256"]
    state |= {"files": {TENSORS: hash_file(folder / TENSORS)}, "progress": state["progress"] | progress}
    (folder / STATE).write_text(json.dumps(state | {"sha256": _hash_state(state)}))


def without(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


DAMAGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "no optimizer": lambda t: without(t, "optimizer."),
    "one moment less": lambda t: without(t, "optimizer.head.weight:exp_avg_sq"),
    "no counters": lambda t: without(t, ":step"),
    "an unknown moment": lambda t: t | {"optimizer.head.weight:momentum_buffer": torch.zeros(10, 16)},
    "a moment of no weight": lambda t: t | {"optimizer.tail.weight:step": torch.zeros(())},
    "a moment of another shape": lambda t: t | {"optimizer.head.weight:exp_avg": torch.zeros(3)},
    "a whole-number moment": lambda t: t | {"optimizer.head.bias:exp_avg": torch.zeros(10, dtype=torch.int64)},
    "one weight less": lambda t: without(t, "model.model.head.weight"),
    "one weight more": lambda t: t | {"model.model.tail": torch.zeros(1)},
    "a weight of another shape": lambda t: t | {"model.model.head.bias": torch.zeros(9)},
    "a weight of another type": lambda t: t | {"model.model.head.bias": torch.zeros(10, dtype=torch.float64)},
    "no averaged weights": lambda t: without(t, "average."),
}


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_of_other_tensors_is_an_error_even_if_forced(home: Path, tmp_path: Path, damage: str) -> None:
    """And nothing else in the folder changes: the run's own command still resumes it."""
    out = copied(home, "stopped", tmp_path / "run")
    tensors, _ = Checkpoints(out / "checkpoints", 9).read(LAST)
    changed = DAMAGES[damage](tensors)
    assert changed.keys() != tensors.keys() or any(changed[name] is not tensors[name] for name in tensors)
    write_checkpoint(out, changed)
    before = {file: file.read_bytes() for file in out.glob("*.json*")}
    assert resume(home, out) == resume(home, out, "--force", "--optim.name", "sgd") == 2
    assert before == {file: file.read_bytes() for file in out.glob("*.json*")}
    write_checkpoint(out, tensors)
    assert resume(home, out) == 0


@pytest.mark.usefixtures("no_evaluation")
def test_progress_of_a_later_version_is_an_error(home: Path, tmp_path: Path) -> None:
    out = copied(home, "stopped", tmp_path / "run")
    write_checkpoint(out, Checkpoints(out / "checkpoints", 9).read(LAST)[0], of_a_later_version=1)
    assert resume(home, out) == 2


# The commit -----------------------------------------------------------------------------------------------------------


def test_the_commit_is_that_of_the_package_and_not_of_a_repository_around_it(tmp_path: Path) -> None:
    package = tmp_path / "plainvit"
    (package / "train").mkdir(parents=True)
    for name in ("__init__.py", "train/loop.py"):
        (package / name).touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert read_commit(package) is None  # without a commit
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "one"], check=True)
    assert read_commit(package) is None  # installed inside a repository that does not track it
    subprocess.run([*git, "add", "plainvit"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "two"], check=True)
    commit = read_commit(package)
    assert commit is not None
    assert len(commit) == 12
    (package / "train" / "loop.py").write_text("changed")
    assert read_commit(package) == f"{commit}+"
