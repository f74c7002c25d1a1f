"""Edited or damaged run folders: used or reported in one line, never a traceback."""

import contextlib
import copy
import json
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import small_runs as runs
import torch
from torch import Tensor

from plainvit.analyse.run import read_run
from plainvit.cli import main
from plainvit.evaluate.predict import describe_accuracy_of_run
from plainvit.runtime.checkpoint import STATE, TENSORS, Checkpoints, _state_hash, file_hash
from plainvit.runtime.folder import read_results, run_seconds
from plainvit.train import loop

VALUES = (None, "x", -1, 10**9, 10**400, 1.5, math.nan, math.inf, True, [], {}, [[1]], {"a": {"b": None}}, ["\udce9"])
TEXTS = ("", '{"a": 1', "[1]", "null", "[" * 100_000, "\x00")
Change = Callable[[dict[str, Any]], object]
LAST, STEPS = 5, 6  # of the run that was stopped


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run in done/; in stopped/ one that SIGTERM ended after 5 steps of 6, as if it had been killed."""
    home = tmp_path_factory.mktemp("folders")
    recipe = runs.recipe_file(home, runs.config(steps=STEPS, save_every=2, evaluations=2))
    step, calls = loop.take_step, [0]

    def stop(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == LAST:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*given)

    with pytest.MonkeyPatch.context() as patch:
        runs.without_figures(patch)
        main(["train", recipe, "--out", str(home / "done")])
        patch.setattr(loop, "take_step", stop)
        with pytest.raises(SystemExit):
            main(["train", recipe, "--out", str(home / "stopped")])
    file = home / "stopped" / "environment.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps(known | {"running_since": 1e9}))
    return home


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


def texts(file: Path) -> list[str]:
    """Damaged contents of a file; the state of a checkpoint has a matching hash."""
    text = file.read_text()
    if file.suffix == ".jsonl":
        first, *rest = text.splitlines(keepends=True)
        return [line + "\n" + "".join(rest) for line in (*map(json.dumps, edits(json.loads(first))), *TEXTS)]
    values = list(edits(json.loads(text)))
    if file.name == STATE:
        for value in values:
            value["sha256"] = _state_hash({name: inner for name, inner in value.items() if name != "sha256"})
    return [*map(json.dumps, values), *TEXTS]


def copied(home: Path, name: str, out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(home / name, out)
    return out


def exit_code(*words: object) -> int:
    """Exit code of a command; an unexpected exception fails the test."""
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def resume(home: Path, out: Path) -> int:
    return exit_code("train", f"{home / 'mine.py'}:recipe", "--out", out)


@pytest.fixture
def no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the end of a run, which reads none of the files."""
    runs.without_figures(monkeypatch)
    monkeypatch.setattr("plainvit.train.run.finalize", lambda run, *_, **__: (run.objective.model, {}))


FILES = ("environment.json", "status.json", "metrics.jsonl", "data.json", f"checkpoints/step-{LAST:08d}/{STATE}")


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
def test_a_run_resumes_from_an_edited_folder_or_exits_cleanly(home: Path, tmp_path: Path, name: str, part: int) -> None:
    edited = texts(home / "stopped" / name)
    random.Random(0).shuffle(edited)
    for text in edited[8 * part : 8 * part + 8] if part < 7 else edited[56:]:
        out = copied(home, "stopped", tmp_path / "run")
        (out / name).write_text(text, encoding="utf-8")
        assert resume(home, out) in (0, 2, 3), text


@pytest.mark.parametrize("name", ["results.json", "card.json", "environment.json", "config.json", "status.json"])
def test_an_edited_finished_run_is_read_or_exits_cleanly(home: Path, tmp_path: Path, name: str) -> None:
    out, edited = copied(home, "done", tmp_path / "run"), texts(home / "done" / name)
    random.Random(0).shuffle(edited)
    readers: tuple[Callable[[Path], object], ...] = (read_results, run_seconds, describe_accuracy_of_run, read_run)
    for text in edited[:60]:
        (out / name).write_text(text, encoding="utf-8")
        for read in readers:
            with contextlib.suppress(ValueError):
                read(out)
        assert exit_code("compare", out, home / "done") in (0, 2, 3), text


@pytest.mark.usefixtures("no_evaluation")
def test_invalid_results_of_a_finished_run_are_an_error(home: Path, tmp_path: Path) -> None:
    out, file = copied(home, "done", tmp_path / "run"), tmp_path / "run" / "results.json"
    sound = json.loads(file.read_text())
    for change in ({"top1": None}, {"top1": "x"}, {"top1": 1.5}, {"images": 0}, {"images": 10**400}, {"nll": -1}):
        file.write_text(json.dumps(sound | {"test": sound["test"] | change}))
        assert resume(home, out) == 2, change
    file.write_text(json.dumps(sound | {"val": 3}))
    assert resume(home, out) == 2
    file.write_text(json.dumps(sound))
    assert resume(home, out) == 0


# Checkpoints ----------------------------------------------------------------------------------------------------------


def write_again(out: Path, tensors: dict[str, Tensor], change: Change = lambda _: None) -> None:
    """Replaces the newest checkpoint, with matching hashes."""
    folder = out / "checkpoints" / f"step-{LAST:08d}"
    safetensors.torch.save_file(tensors, folder / TENSORS)
    state = json.loads((folder / STATE).read_text())
    state |= {"files": {TENSORS: file_hash(folder / TENSORS)}, "tensors": sorted(tensors)}
    change(state)
    state.pop("sha256")
    (folder / STATE).write_text(json.dumps(state | {"sha256": _state_hash(state)}))


def without(tensors: dict[str, Tensor], *words: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not any(word in name for word in words)}


DAMAGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "no optimiser": lambda t: without(t, "optimizer."),
    "no first moments": lambda t: without(t, ":exp_avg_sq"),
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
    "something else": lambda t: t | {"other": torch.zeros(1)},
}


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_with_wrong_tensors_is_an_error(home: Path, tmp_path: Path, damage: str) -> None:
    out = copied(home, "stopped", tmp_path / "run")
    tensors, _ = Checkpoints(out / "checkpoints", 9).read(LAST)
    changed = DAMAGES[damage](tensors)
    assert changed.keys() != tensors.keys() or any(changed[name] is not tensors[name] for name in tensors)
    write_again(out, changed)
    assert resume(home, out) == 2
    assert runs.status(out)["exit_code"] == 2
    write_again(out, tensors)
    assert resume(home, out) == 0


def test_a_checkpoint_with_missing_tensors_is_skipped(home: Path, tmp_path: Path) -> None:
    """All optimizer tensors of one weight: only the list in the state shows that they are missing."""
    out = copied(home, "stopped", tmp_path / "run")
    kept = Checkpoints(out / "checkpoints", 9)
    tensors, state = kept.read(LAST)
    names = state["tensors"]
    write_again(out, without(tensors, "optimizer.head.weight:"), lambda state: state.update(tensors=names))
    found = kept.newest()
    assert found
    assert found[1]["step"] < LAST


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize(
    "change",
    [
        {"step": 10**9},
        {"step": LAST + 1},
        {"step": None},
        {"skipped": 10**9},
        {"worse": -1},
        {"micro_batch": 10**9},
        {"micro_batch": True},
        {"best": "high"},
        {"best": math.nan},
        {"best_step": 10**9},
        {"cut": 1.5},
        {"of_a_later_version": 1},
    ],
)
def test_a_checkpoint_with_invalid_progress_is_an_error(home: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    out = copied(home, "stopped", tmp_path / "run")
    tensors, _ = Checkpoints(out / "checkpoints", 9).read(LAST)
    write_again(out, tensors, lambda state: state["progress"].update(change))
    assert resume(home, out) == 2
    assert exit_code("replay", out, "--step", LAST + 1) == (2 if "micro_batch" in change else 0)


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("change", [{"seconds": "x"}, {"seconds": -1}, {"seconds": math.nan}, {"running_since": [1]}])
def test_invalid_times_are_an_error_before_the_run_starts(home: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    out = copied(home, "stopped", tmp_path / "run")
    file = out / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    before = runs.status(out)
    assert resume(home, out) == 2
    assert runs.status(out) == before
    file.unlink()
    assert resume(home, out) == 0
