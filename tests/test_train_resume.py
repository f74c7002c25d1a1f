"""A run that was stopped, anywhere and in any way, ends as the run that was never stopped: bit for bit."""

import json
import logging
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import small_runs as runs
import tiny
import torch
from safetensors.torch import load_file
from small_runs import Child, StoppedError, before_step, complete_run, litter, outcome, stalled, status, stopped_run

from plainvit.analyse.curves import tabulate
from plainvit.config import Augment, Config, Optim
from plainvit.data.resident import ResidentMemoryError
from plainvit.runtime.checkpoint import STATE, TENSORS, Checkpoints, hash_tensors
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import read_metrics
from plainvit.train import finalize, loop
from plainvit.train.run import fit
from plainvit.train.signals import InterruptedRunError
from plainvit.train.state import Training
from plainvit.train.time_budget import TimeBudget
from plainvit.train.transfer import hash_init

pytestmark = pytest.mark.usefixtures("no_figures")


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Killed ---------------------------------------------------------------------------------------------------------------

# Each place between two writes at which a process can die; :2 is the second time that it comes there
EVERYWHERE = (
    "saving", "validating", "hashing", "recorded:3", "pruning", "recorded:2", "renaming", "delivering", "writing",
    "delivered", "reporting",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_killed_between_any_two_writes_ends_the_same(tmp_path: Path) -> None:
    """With another number of workers after each kill."""
    out = tmp_path / "run"
    for count, stall in enumerate((*EVERYWHERE, "")):
        child = Child(runs.train, runs.streamed(workers=count % 3), out, stall, log=tmp_path / "log")
        if stall:
            with stalled(child, out):
                pass
    assert child.wait() == 0, child.said
    assert outcome(out) == complete_run(runs.streamed(), tmp_path / "whole")
    assert status(out)["state"] == "done"
    assert litter(out) == []


def test_a_killed_command_repeated_ends_as_the_run_from_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], undisturbed: dict[str, Any]
) -> None:
    recipe, out = runs.recipe_file(tmp_path, runs.config()), tmp_path / "run"
    child = Child(runs.command, ("train", recipe), out, "recorded:8", log=tmp_path / "log")
    with stalled(child, out):
        child.wait_for((out / "checkpoints/step-00000006").exists)  # written by a thread
    _, state = Checkpoints(out / "checkpoints", 1).read(6)
    assert runs.run_command("train", recipe, "--out", out) == 0
    assert str(out / "report.html") in capsys.readouterr().out
    seconds = json.loads((out / "environment.json").read_text())["seconds"]
    assert seconds >= round(state["progress"]["seconds"], 1), "the time of the killed part counts"
    assert outcome(out) == undisturbed


# Stopped by an error --------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "micro-batches": {"micro_batch": 4},
    "streamed": {"augment": Augment(flip=0.5, cutmix=1.0, mixup=0.5, three_augment=True, color=0.3, erase=0.3)},
    "repeated": {"augment": Augment(crop="none", repeats=3, smoothing=0.1)},
    "frozen": {"optim": Optim(name="sgd", lr=1e-1, frozen=("embedding*", "positions*"))},
    "decay by layer": {"optim": Optim(name="lamb", lr=1e-2, layer_decay=0.7, weight_decay=0.02)},
    "muon": {"optim": Optim(name="muon", lr=1e-2, weight_decay=0.1, schedule="rsqrt", timescale=4.0, cooldown=0.2)},
    "no average": {"ema": 0.0, "class_weights": True, "loss": "sigmoid", "head_bias": -2.0},
    "average over a window": {"ema": 0.0, "ema_window": 0.3, "seed": 7, "holdout": 0.0},
    "early stop": {"steps": 30, "evaluations": 15, "patience": 3, "keep": 1},
}


@pytest.mark.parametrize("changes", tiny.mostly_slow(VARIANTS.values(), 4), ids=VARIANTS)
def test_a_run_stopped_by_an_error_resumes_in_the_same_process(tmp_path: Path, changes: dict[str, Any]) -> None:
    run_config, out = runs.config(**changes), tmp_path / "run"
    for number in (2, 8):
        stopped_run(run_config, out, number)
    ended = status(out)
    assert (ended["state"], ended["step"], ended["reason"]) == ("failed", 7, "StoppedError: stopped")
    assert complete_run(run_config, out) == complete_run(run_config, tmp_path / "whole")
    assert status(out)["state"] == "done"


def test_settings_that_do_not_decide_the_result_may_change(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    stopped_run(runs.config(keep=1, save_every=5), tmp_path, 8)
    stopped_run(runs.config(keep=3, save_every=2, device="cpu"), tmp_path, 11)
    assert complete_run(runs.config(compile="off", track=()), tmp_path) == undisturbed


def test_a_run_shortened_by_hours_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 6 its length becomes 8 of 12 steps; resumed from there, it keeps this length. Without --hours it is
    lengthened to the steps that are asked for.
    """

    def fit_length(budget: TimeBudget, _: object) -> None:
        if budget.run.progress.step == 6:
            budget.run.set_length(8)

    monkeypatch.setattr(TimeBudget, "fit_length", fit_length)
    run_config = runs.config(evaluations=6, save_every=1, hours=1.0)
    expected = complete_run(run_config, tmp_path / "whole")
    assert expected["step"] == 8
    for number in (5, 7):
        out = stopped_run(run_config, tmp_path / f"run-{number}", number)
        assert complete_run(run_config, out) == expected
    fit(run_config.replace(hours=0.0, steps=16), tmp_path / "whole", force=True, quiet=True)
    assert outcome(tmp_path / "whole")["step"] == 16


CHANGES: dict[str, tuple[dict[str, Any], bool]] = {  # whether --force can resume with this
    "rate": ({"optim": Optim(lr=1e-2)}, True),
    "optimizer with the same state": ({"optim": Optim(name="lamb")}, True),
    "optimizer": ({"optim": Optim(name="sgd")}, False),
    "model": ({"model": runs.MODEL.replace(depth=2)}, False),
    "dropout": ({"model": runs.MODEL.replace(dropout=0.2)}, True),
    "no average": ({"ema": 0.0}, False),
}


@pytest.mark.parametrize(("changes", "can_force"), CHANGES.values(), ids=CHANGES)
def test_force_is_offered_where_it_works(tmp_path: Path, changes: dict[str, Any], can_force: bool) -> None:
    run_config = runs.config(steps=8, evaluations=4, ema=0.9)
    stopped_run(run_config, tmp_path, 5)
    changed = run_config.replace(**changes)
    with pytest.raises(ValueError, match="another --out") as error:
        fit(changed, tmp_path, quiet=True)
    assert ("--force" in str(error.value)) is can_force
    if not can_force:
        with pytest.raises(ValueError, match="another --out") as error:
            fit(changed, tmp_path, force=True, quiet=True)
        assert "--force" not in str(error.value)
        return
    fit(changed, tmp_path, force=True, quiet=True)
    for force in (False, True):
        with pytest.raises(ValueError, match=r"finished.*another --out") as error:
            fit(run_config, tmp_path, force=force, quiet=True)
        assert "--force" not in str(error.value)


def test_a_run_without_a_checkpoint_can_be_forced_to_another_model(tmp_path: Path) -> None:
    run_config = runs.config(steps=8, evaluations=1)
    stopped_run(run_config, tmp_path, 2)
    fit(run_config.replace(model=runs.MODEL.replace(depth=2)), tmp_path, force=True, quiet=True)
    assert outcome(tmp_path)["step"] == 8


def test_a_search_resumes(tmp_path: Path) -> None:
    run_config = runs.config(steps=6, evaluations=2, optim=Optim(grid=(1e-4, 1e-2)))
    fit(run_config, tmp_path / "whole", search=True, quiet=True)
    stopped_run(run_config, tmp_path / "run", 4, search=True)
    fit(run_config, tmp_path / "run", search=True, quiet=True)
    for inner in ("search/lr-0.0001", "search/lr-0.01", "."):
        assert outcome(tmp_path / "run" / inner) == outcome(tmp_path / "whole" / inner)


def test_force_resumes_a_search_with_other_settings(tmp_path: Path) -> None:
    run_config = runs.config(steps=6, evaluations=2, optim=Optim(grid=(1e-4, 1e-2)))
    stopped_run(run_config, tmp_path, 4, search=True)
    changed = run_config.replace(patience=5)
    with pytest.raises(ValueError, match="--force"):
        fit(changed, tmp_path, search=True, quiet=True)
    assert fit(changed, tmp_path, search=True, force=True, quiet=True).metrics["steps"] == 6


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_changed_initial_weights_are_noticed(tmp_path: Path, name: str) -> None:
    """Of a folder in each format that `load` reads."""
    (tmp_path / name).write_bytes(b"one")
    first = hash_init(Config(init=str(tmp_path)))
    (tmp_path / name).write_bytes(b"two")
    assert hash_init(Config(init=str(tmp_path))) != first


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    first = fit(runs.config(), tmp_path, quiet=True)
    files = [*tmp_path.glob("checkpoints/*/*"), *(tmp_path / name for name in ("metrics.jsonl", "results.json"))]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    again = fit(runs.config(), tmp_path, quiet=True)
    assert again.metrics == first.metrics
    assert hash_tensors(again.model.state_dict()) == hash_tensors(first.model.state_dict())
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    complete_run(runs.config(), out)
    return out


@pytest.mark.parametrize("lost", ["report.html", "results.json", "model.safetensors"])
def test_a_finished_run_writes_lost_or_damaged_files_again(
    finished: Path, tmp_path: Path, undisturbed: dict[str, Any], lost: str
) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    if lost == "model.safetensors":
        flip_one_bit(out / lost)
    else:
        (out / lost).unlink()
    assert complete_run(runs.config(), out) == undisturbed
    assert (out / lost).is_file()


def test_the_report_of_an_interruption_is_replaced_by_the_final_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, Any]
) -> None:
    """Also after a run that ended before it wrote the final report: that one is still due."""
    with monkeypatch.context() as patch:
        before_step(patch, 8, runs.fail(InterruptedRunError(signal.SIGTERM, 7)))
        with pytest.raises(InterruptedRunError):
            fit(runs.config(), tmp_path, quiet=True)
    assert (tmp_path / "report.html").read_text() == "interrupted"
    with monkeypatch.context() as patch:
        patch.setattr(finalize, "write_report", runs.fail())
        with pytest.raises(StoppedError):
            fit(runs.config(), tmp_path, quiet=True)
    assert status(tmp_path)["state"] == "failed"
    assert complete_run(runs.config(), tmp_path) == undisturbed
    assert (tmp_path / "report.html").read_text() == "done"


def test_no_checkpoint_is_still_being_written_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is unlocked when the call ends: nothing may be written or pruned from then on."""
    save_file = safetensors.torch.save_file

    def save_slowly(*arguments: Any, **named: Any) -> None:
        time.sleep(0.3)
        save_file(*arguments, **named)

    monkeypatch.setattr(safetensors.torch, "save_file", save_slowly)
    stopped_run(runs.config(), tmp_path, 4)  # the checkpoint of step 3 precedes it
    assert not any(thread.name == "checkpoint" for thread in threading.enumerate())
    assert kept_steps(tmp_path) == {3}


# Metrics --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of runs.config() that ended before step 11, with checkpoints of steps 8 and 9."""
    return stopped_run(runs.config(), tmp_path_factory.mktemp("interrupted") / "run", 11)


@pytest.fixture
def copy(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "copy"))


@pytest.mark.parametrize(
    "end",
    tiny.mostly_slow(
        [
            '{"step": 10, "loss": 1.0}\n{"step": 11, "loss": 1.0}\n{"step": 12, "val": {"top1": 1.0}}\n',
            '{"step": 10, "loss": 2.3',
            "\n\n[1]\n7\nnull\n{}\n",
            '{"step": 13, "loss": 1.0}\n\0\0\0\n{"step": 14}',
            '{"step": 11, "loss\xff\xfe\x80',
        ],
        2,
    ),
)
def test_metrics_after_the_checkpoint_are_dropped(copy: Path, undisturbed: dict[str, Any], end: str) -> None:
    with (copy / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(end)
    assert complete_run(runs.config(), copy) == undisturbed
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 16  # 12 steps, 3 validations, and that the run was resumed


def test_metrics_have_times_and_the_resumption(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(runs.config(), copy)
    assert "resumed from step 9" in capsys.readouterr().err.splitlines()
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    (event,) = [line for line in lines if "event" in line]
    assert {name: event[name] for name in event if name != "time"} == {"event": "resumed", "step": 9, "processes": 1}
    assert lines[lines.index(event) + 1]["step"] == 10
    assert not any("event" in line for line in read_metrics(copy))
    assert tabulate(read_metrics(copy))["step"].tolist() == list(range(1, 13))


@pytest.mark.parametrize(
    ("name", "value"), tiny.mostly_slow([("torch", "1.13"), ("device", "abacus, 3 threads"), ("processes", 8)], 3)
)
def test_another_machine_is_reported(copy: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any) -> None:
    known = json.loads((copy / "environment.json").read_text())
    edit_json(copy / "environment.json", **{name: value})
    fit(runs.config(), copy)
    assert sum(f"{name} {value} -> {known[name]}" in message for message in caplog.messages) == 1
    assert json.loads((copy / "environment.json").read_text())[name] == value, "it describes the start of the run"


# Damaged checkpoints --------------------------------------------------------------------------------------------------


def flip_one_bit(path: Path, low: int = 0, high: int = 0, seed: int = 3) -> None:
    """A random bit of the bytes from low to high, by default of the whole file."""
    chance, data = random.Random(seed), bytearray(path.read_bytes())
    data[chance.randrange(low, high or len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def test_every_flipped_bit_of_a_checkpoint_is_noticed_and_the_one_before_is_read(copy: Path) -> None:
    """Of the header of the tensors, of the tensors, and of the state."""
    checkpoints = Checkpoints(copy / "checkpoints", 2)
    expected, newest = hash_tensors(checkpoints.read(8)[0]), copy / "checkpoints" / "step-00000009"
    header = 8 + int.from_bytes((newest / TENSORS).read_bytes()[:8], "little")
    for seed in range(10):
        for name, low, high in ((TENSORS, 0, header), (TENSORS, header, 0), (STATE, 0, 0)):
            valid = (newest / name).read_bytes()
            flip_one_bit(newest / name, low, high, seed)
            checkpoint = checkpoints.read_newest()
            assert checkpoint
            assert (checkpoint[1]["step"], hash_tensors(checkpoint[0])) == (8, expected), f"{name}, seed {seed}"
            (newest / name).write_bytes(valid)
    assert checkpoints.read_newest()[1]["step"] == 9


def damage_all(out: Path) -> None:
    for path in (out / "checkpoints").glob(f"*/{TENSORS}"):
        flip_one_bit(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "of another step": lambda path: shutil.copy(path.parent.with_name("step-00000008") / path.name, path),
    "empty": lambda path: path.write_bytes(b""),
    "a broken link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "one bit": flip_one_bit,
}


@pytest.mark.parametrize("name", [TENSORS, STATE])
@pytest.mark.parametrize("damage", tiny.mostly_slow(DAMAGES.values(), 3), ids=DAMAGES)
def test_with_a_damaged_checkpoint_the_one_before_is_taken(
    copy: Path,
    undisturbed: dict[str, Any],
    damage: Callable[[Path], object],
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(copy / "checkpoints" / "step-00000009" / name)
    with caplog.at_level(logging.WARNING):
        assert complete_run(runs.config(), copy) == undisturbed
    assert sum("step-00000009 is damaged" in message for message in caplog.messages) == 1


def test_damaged_checkpoints_do_not_displace_valid_ones(tmp_path: Path) -> None:
    """Those of steps 8 and 9 are damaged, so the run starts over; what it saves at steps 3 and 4 must be kept."""
    run_config, out = runs.config(holdout=0.0), tmp_path / "run"  # there is no best one to keep besides
    stopped_run(run_config, out, 11)
    damage_all(out)
    stopped_run(run_config, out, 6)
    newest = Checkpoints(out / "checkpoints", 2).read_newest()
    assert newest is not None
    assert newest[1]["step"] == 4
    assert complete_run(run_config, out) == complete_run(run_config, tmp_path / "whole")


class Killed(BaseException):
    """Ends a function where a kill would."""


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_a_kill_while_pruning_leaves_no_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: int
) -> None:
    kept = Checkpoints(tmp_path / "checkpoints", 9)
    for step in (1, 2, 3):
        kept.save(step, {"a": torch.ones(2) * step}, {})
    kept.wait()

    def delete_some(folder: Path, **_: object) -> None:
        if folder.is_dir():
            for path in sorted(folder.iterdir())[:deleted]:
                path.unlink()
            raise Killed

    kept.keep = 1
    with monkeypatch.context() as patch:
        patch.setattr("plainvit.runtime.checkpoint.shutil.rmtree", delete_some)
        with pytest.raises(Killed):
            kept._prune(None)
    again = Checkpoints(tmp_path / "checkpoints", 1)
    assert [again.read(step)[1]["step"] for step in again.steps()] == [2, 3]
    assert again.read_newest()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


def test_leftovers_are_deleted_and_other_folders_ignored(copy: Path, undisturbed: dict[str, Any]) -> None:
    for name in ("checkpoints/.tmp-00000010", "captures/.tmp-00000003"):
        (copy / name).mkdir(parents=True)
        (copy / name / TENSORS).write_bytes(b"half")
    for name in (".model.safetensors.0a1b2c3d.tmp", ".metrics.jsonl.deadbeef.tmp"):
        (copy / name).write_bytes(b"half")
    others = [copy / "checkpoints" / name for name in ("step-00000999", "step-0000001x", "step-11", "backup")]
    for folder in others:
        folder.mkdir()
    (copy / "checkpoints" / "step-00000777").write_text("a file")
    fit(runs.config(), copy, quiet=True)
    assert litter(copy) == []
    (copy / "checkpoints" / "step-00000777").unlink()
    for folder in (*others, *(copy / "checkpoints").glob("damaged-*")):
        shutil.rmtree(folder, ignore_errors=True)
    assert outcome(copy) == undisturbed


# What is kept ---------------------------------------------------------------------------------------------------------


def kept_steps(out: Path) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir()}


def plant_accuracies(monkeypatch: pytest.MonkeyPatch, *accuracies: float) -> None:
    """Of the validations, in turn."""
    left = list(accuracies)
    validate = loop.validate

    def validate_planted(run: Training, display: Any) -> None:
        run.evaluate = lambda _: {"top1": left.pop(0), "top5": 1.0, "nll": 1.0}
        validate(run, display)

    monkeypatch.setattr(loop, "validate", validate_planted)


@pytest.mark.parametrize(("keep", "kept"), [(1, {4, 12}), (3, {4, 9, 10, 12})])
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, kept: set[int]
) -> None:
    plant_accuracies(monkeypatch, 0.1, 0.9, 0.2, 0.3, 0.4, 0.5)  # validated at 2, 4, 6, 8, 10, 12; saved at 3, 9 too
    fit(runs.config(evaluations=6, keep=keep), tmp_path, quiet=True)
    assert kept_steps(tmp_path) == kept


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_with_patience_the_best_weights_are_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ema: float) -> None:
    """Of step 4, three evaluations before the run gave up; averaged with --ema."""
    plant_accuracies(monkeypatch, 0.1, 0.9, 0.2, 0.3, 0.4, 0.5)
    result = fit(runs.config(evaluations=6, keep=1, patience=3, ema=ema), tmp_path, quiet=True)
    assert status(tmp_path)["step"] == 10
    tensors, _ = Checkpoints(tmp_path / "checkpoints", 1).read(4)
    prefix = "average." if ema else "model.model."
    final = load_file(tmp_path / "model.safetensors")
    assert final
    for name, tensor in final.items():
        assert torch.equal(tensor, tensors[prefix + name])
    assert result.metrics["chosen_on_val"] is True


# Images in memory or from disk ----------------------------------------------------------------------------------------

PLENTY, LITTLE = 10**12, 500_000  # bytes that are free: the digits take 276 KB, and a set may take 0.3 of what is free
# Crops are resized, which images in memory and streamed ones are in different ways
CROPPED = runs.config(augment=Augment(crop="inception", area=(0.3, 1.0), flip=0.0))


def set_free_memory(patch: pytest.MonkeyPatch, count: int) -> None:
    for module in ("cores_and_memory", "resident"):
        patch.setattr(f"plainvit.data.{module}.available_memory", lambda: count)


def loading_of(out: Path) -> str:
    return json.loads((out / "data.json").read_text())["loading"]


def test_a_resumed_run_keeps_its_images_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory other processes use by then."""
    weights = set()
    for mode, before, after in (("resident", PLENTY, LITTLE), ("streamed", LITTLE, PLENTY)):
        set_free_memory(monkeypatch, before)
        expected = complete_run(CROPPED, tmp_path / mode)
        out = stopped_run(CROPPED, tmp_path / f"{mode}-stopped", 8)
        set_free_memory(monkeypatch, after)
        assert complete_run(CROPPED, out) == expected
        assert loading_of(tmp_path / mode) == loading_of(out) == mode
        weights.add(expected["weights"])
    assert len(weights) == 2  # or there would be nothing to keep


def test_images_that_no_longer_fit_into_memory_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_run(CROPPED, tmp_path, 8)
    set_free_memory(monkeypatch, 1000)
    with pytest.raises(ResidentMemoryError) as caught:
        fit(CROPPED, tmp_path, quiet=True)
    assert caught.value.exit_code == 5
    assert loading_of(tmp_path) == "resident"
    fit(CROPPED, tmp_path, quiet=True, force=True)
    assert loading_of(tmp_path) == "streamed"
    assert status(tmp_path)["state"] == "done"


def test_processes_agree_on_where_images_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(_: World, words: str) -> list[str]:
        return [words, "streamed"] if words == "resident" else [words]

    monkeypatch.setattr(World, "gather_strings", gather)
    fit(CROPPED, tmp_path, quiet=True)
    assert loading_of(tmp_path) == "streamed"
