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
from typing import Any, NoReturn

import pytest
import safetensors.torch
import small_runs as runs
import tiny
import torch
from safetensors.torch import load_file
from small_runs import Child, litter, outcome, stalled, status

from plainvit.analyse.curves import read_metrics
from plainvit.config import Augment, Config, Optim
from plainvit.data.decode import DataError
from plainvit.data.resident import ResidentMemoryError
from plainvit.runtime.checkpoint import STATE, TENSORS, Checkpoints, tensor_hash
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import metrics
from plainvit.train import finalize, loop
from plainvit.train.run import fit
from plainvit.train.state import Training
from plainvit.train.time_budget import TimeBudget


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.without_figures(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of runs.config() when nobody disturbs it."""
    return undisturbed(runs.config(), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def whole_streamed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(runs.streamed(), tmp_path_factory.mktemp("streamed") / "run")


def undisturbed(made: Config, out: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        runs.without_figures(patch)
        fit(made, out, quiet=True)
    return outcome(out)


class StoppedError(RuntimeError):
    """Raised where a test wants a run to end."""


def stop_before(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The run ends with an exception before its step `number`, counted from 1."""
    step = loop.take_step

    def stopping(run: Training, *rest: Any) -> Any:
        if run.progress.step + 1 == number:
            raise StoppedError("stopped")
        return step(run, *rest)

    monkeypatch.setattr(loop, "take_step", stopping)


def stopped_run(made: Config, out: Path, number: int) -> None:
    """A run folder as an exception before that step leaves it."""
    with pytest.MonkeyPatch.context() as patch:
        runs.without_figures(patch)
        stop_before(patch, number)
        with pytest.raises(StoppedError):
            fit(made, out, quiet=True)


# Killed ---------------------------------------------------------------------------------------------------------------

# Each place between two writes at which a process can die; :2 is the second time that it comes there
EVERYWHERE = (
    "saving", "validating", "hashing", "recorded:3", "pruning", "recorded:2", "renaming", "delivering", "writing",
    "delivered", "reporting",
)  # fmt: skip


def kill_at(stalls: tuple[str, ...], made: Config, out: Path) -> None:
    """Killed at each of the points in turn, with another number of workers each time; then left to end."""
    for count, stall in enumerate(stalls):
        child = Child(runs.train, made.replace(workers=count % 3), out, stall, log=out.with_suffix(".log"))
        with stalled(child, out):
            pass
    child = Child(runs.train, made.replace(workers=len(stalls) % 3), out, log=out.with_suffix(".log"))
    assert child.wait() == 0, child.said


def kill_at_random(kills: int, made: Config, out: Path, seed: int) -> None:
    """Killed some steps on and some milliseconds later, over and over, then left to end."""
    chance = random.Random(seed)
    for count in range(kills):
        begin, more, delay = steps_so_far(out), chance.randint(0, 2), chance.uniform(0, 0.03)
        changed = made.replace(workers=chance.randrange(3))
        child = Child(runs.train, changed, out, "", 0.005, log=out.with_suffix(".log"))
        child.wait_for(lambda begin=begin, more=more: steps_so_far(out) > begin + more, 30)
        child.process.join(delay)
        child.kill()
        assert child.process.exitcode == -signal.SIGKILL, f"kill {count} came too late: {child.said}"
    child = Child(runs.train, made, out, log=out.with_suffix(".log"))
    assert child.wait() == 0, child.said


def steps_so_far(out: Path) -> int:
    return max((line["step"] for line in metrics(out)), default=0)


@pytest.mark.slow
def test_a_run_killed_between_any_two_writes_ends_the_same(tmp_path: Path, whole_streamed: dict[str, Any]) -> None:
    out = tmp_path / "run"
    kill_at(EVERYWHERE, runs.streamed(), out)
    assert outcome(out) == whole_streamed
    assert status(out)["state"] == "done"
    assert litter(out) == []


@pytest.mark.slow
def test_a_run_killed_at_random_ends_the_same(tmp_path: Path) -> None:
    made = runs.streamed(steps=60, evaluations=4)
    kill_at_random(8, made, tmp_path / "run", seed=1)
    assert outcome(tmp_path / "run") == undisturbed(made, tmp_path / "whole")


def test_the_run_by_the_command_line_ends_as_the_one_from_python(tmp_path: Path) -> None:
    recipe, out = runs.recipe_file(tmp_path, runs.streamed()), tmp_path / "run"
    child = Child(runs.command, ("train", recipe), out, "recorded:8", 0.2, log=tmp_path / "log")
    with stalled(child, out):
        times = [line["time"] for line in metrics(out)]
    child = Child(runs.command, ("train", recipe, "--workers", "1"), out, log=tmp_path / "log")
    assert child.wait() == 0, child.said
    assert str(out / "report.html") in child.said
    second = [line["time"] for line in metrics(out) if line["step"] > 6]
    seconds = json.loads((out / "environment.json").read_text())["seconds"]
    assert seconds > times[-1] - times[0] + second[-1] - second[0], "the time of the killed part counts"
    fit(runs.streamed(recipe=recipe), tmp_path / "whole", quiet=True)
    assert outcome(out) == outcome(tmp_path / "whole")


def test_the_hours_of_a_killed_part_are_over(tmp_path: Path) -> None:
    """As if an hour had passed from its beginning to its last line of metrics: the rest is cut, and the sum is told."""
    made = runs.config(steps=40, evaluations=20, hours=1.0)
    stopped_run(made, tmp_path, 8)
    known, lines = json.loads((tmp_path / "environment.json").read_text()), list(metrics(tmp_path))
    killed = known | {"seconds": 10.0, "running_since": lines[-1]["time"] - 3600}
    (tmp_path / "environment.json").write_text(json.dumps(killed))
    fit(made, tmp_path, quiet=True)
    assert status(tmp_path)["step"] == status(tmp_path)["steps"] == 10  # the second look after step 6
    known = json.loads((tmp_path / "environment.json").read_text())
    assert 3610 <= known["seconds"] < 3670
    assert "running_since" not in known


# Stopped by an error --------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "micro-batches": {"micro_batch": 4},
    "streamed": {"augment": Augment(flip=0.5, cutmix=1.0, mixup=0.5, three_augment=True, colour=0.3, erase=0.3)},
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
    made = runs.config(**changes)
    fit(made, tmp_path / "whole", quiet=True)
    stopped_run(made, tmp_path / "run", 2)
    stopped_run(made, tmp_path / "run", 8)
    said = status(tmp_path / "run")
    assert (said["state"], said["step"], said["reason"]) == ("failed", 7, "StoppedError: stopped")
    fit(made, tmp_path / "run", quiet=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert status(tmp_path / "run")["state"] == "done"


def test_what_does_not_decide_the_result_may_change_on_the_way(tmp_path: Path, whole: dict[str, Any]) -> None:
    out = tmp_path / "run"
    stopped_run(runs.config(keep=1, save_every=5), out, 8)
    stopped_run(runs.config(keep=3, save_every=2, device="cpu"), out, 11)
    fit(runs.config(compile="off", track=()), out, quiet=True)
    assert outcome(out) == whole


def test_a_run_shortened_by_hours_keeps_its_length_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--hours allowed 10 steps of 40; the run is not planned again after its first checkpoint."""
    made = runs.config(steps=40, hours=1.0)
    monkeypatch.setattr("plainvit.train.time_budget.time_step", lambda _: 3600 * 0.95 / 10.5)
    monkeypatch.setattr(TimeBudget, "replan", lambda *_: None)
    monkeypatch.setattr("plainvit.train.time_budget.time_evaluation", lambda _: 0.0)
    fit(made, tmp_path / "whole", quiet=True)
    stopped_run(made, tmp_path / "run", 8)
    monkeypatch.setattr("plainvit.train.time_budget.time_step", lambda _: 3600.0)
    fit(made, tmp_path / "run", quiet=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert outcome(tmp_path / "run")["step"] == 10


def test_a_run_that_was_shortened_on_the_way_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 6 a look at the clock leaves 8 steps of 12; what looks no more, or is stopped before, ends the same."""

    def replan(budget: TimeBudget, _: object) -> None:
        if budget.run.progress.step == 6:
            budget.run.set_length(8)

    monkeypatch.setattr(TimeBudget, "replan", replan)
    made = runs.config(evaluations=6, save_every=1, hours=1.0)
    fit(made, tmp_path / "whole", quiet=True)
    for step in (5, 7):
        stopped_run(made, tmp_path / f"run-{step}", step)
        if step > 6:
            monkeypatch.setattr(TimeBudget, "replan", lambda *_: None)
        fit(made, tmp_path / f"run-{step}", quiet=True)
        assert outcome(tmp_path / f"run-{step}") == outcome(tmp_path / "whole")
    assert outcome(tmp_path / "whole")["step"] == 8


def test_a_run_that_was_shortened_and_is_made_longer_has_the_length_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 6 a second per step leaves 8 of 12 steps; without --hours the run then has the 16 that are asked for."""
    replan = TimeBudget.replan

    def at_six(budget: TimeBudget, display: Any) -> None:
        if budget.run.progress.step == 6:
            budget.last_look, budget.deadline = (4, time.monotonic() - 2.0), time.monotonic() + 2.5
            replan(budget, display)

    monkeypatch.setattr(TimeBudget, "replan", at_six)
    fit(runs.config(evaluations=6, hours=1.0), tmp_path, quiet=True)
    assert outcome(tmp_path)["step"] == 8
    fit(runs.config(evaluations=6, steps=16), tmp_path, force=True, quiet=True)
    assert outcome(tmp_path)["step"] == 16


def test_a_search_resumes(tmp_path: Path) -> None:
    made = runs.config(steps=6, evaluations=2, optim=Optim(grid=(1e-4, 1e-2)))
    fit(made, tmp_path / "whole", search=True, quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(StoppedError):
            fit(made, tmp_path / "run", search=True, quiet=True)
    fit(made, tmp_path / "run", search=True, quiet=True)
    for inner in ("search/lr-0.0001", "search/lr-0.01", "."):
        assert outcome(tmp_path / "run" / inner) == outcome(tmp_path / "whole" / inner)


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = fit(runs.config(), out, quiet=True)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("checkpoints/*/*")}
    kept = {name: (out / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors", "results.json")}
    again = fit(runs.config(), out, quiet=True)
    assert again.numbers == first.numbers
    assert tensor_hash(again.model.state_dict()) == tensor_hash(first.model.state_dict())
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("checkpoints/*/*")}
    assert kept == {name: (out / name).read_bytes() for name in kept}


@pytest.mark.parametrize("lost", [("report.html", "model.safetensors"), ("model.safetensors",), ("results.json",)])
def test_a_finished_run_writes_lost_files_again(tmp_path: Path, whole: dict[str, Any], lost: tuple[str, ...]) -> None:
    fit(runs.config(), tmp_path, quiet=True)
    for name in lost:
        (tmp_path / name).unlink()
    fit(runs.config(), tmp_path, quiet=True)
    assert all((tmp_path / name).is_file() for name in lost)
    assert outcome(tmp_path) == whole


@pytest.mark.parametrize("checkpoints", ["sound", "damaged"])
def test_a_finished_run_writes_damaged_weights_again(tmp_path: Path, whole: dict[str, Any], checkpoints: str) -> None:
    """From its newest sound checkpoint; without one it is an error of the data, and the file stays as it is."""
    fit(runs.config(), tmp_path, quiet=True)
    weights = tmp_path / "model.safetensors"
    sound = weights.read_bytes()
    damaged = sound[: len(sound) // 2] + bytes(256) + sound[len(sound) // 2 + 256 :]
    weights.write_bytes(damaged)
    if checkpoints == "sound":
        fit(runs.config(), tmp_path, quiet=True)
        assert outcome(tmp_path) == whole
        assert weights.read_bytes() == sound
        return
    for tensors in tmp_path.glob("checkpoints/*/*.safetensors"):
        tensors.write_bytes(tensors.read_bytes()[:-64] + bytes(64))
    with pytest.raises(DataError):
        fit(runs.config(), tmp_path, quiet=True)
    assert weights.read_bytes() == damaged


def test_the_report_of_an_interruption_does_not_pass_for_that_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any]
) -> None:
    """Interrupted, gone on with, and killed before the last report was written: that one is still due."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        step = loop.take_step
        stop = loop.InterruptedRunError(signal.SIGTERM, 7)
        patch.setattr(
            loop, "take_step", lambda run, *rest: raise_(stop) if run.progress.step == 7 else step(run, *rest)
        )
        with pytest.raises(loop.InterruptedRunError):
            fit(runs.config(), out, quiet=True)
    child = Child(runs.train, runs.config(), out, "reporting", log=tmp_path / "log")
    with stalled(child, out):
        assert status(out)["state"] == "running", "done is what has its report"
    fit(runs.config(), out, quiet=True)
    assert (out / "report.html").read_text() == "done"
    assert outcome(out) == whole


def raise_(error: Exception) -> NoReturn:
    raise error


def test_no_checkpoint_is_still_being_written_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is free again once the call is over: nobody may write into it, or prune, from then on."""
    save_file = safetensors.torch.save_file

    def slowly(*arguments: Any, **named: Any) -> None:
        time.sleep(0.3)
        save_file(*arguments, **named)

    monkeypatch.setattr(safetensors.torch, "save_file", slowly)
    stopped_run(runs.config(), tmp_path / "run", 4)  # which the checkpoint of step 3 precedes
    assert not any(thread.name == "checkpoint" for thread in threading.enumerate())
    assert kept_steps(tmp_path / "run") == {3}


# Metrics --------------------------------------------------------------------------------------------------------------


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
def test_what_follows_the_checkpoint_in_the_metrics_is_dropped(tmp_path: Path, whole: dict[str, Any], end: str) -> None:
    stopped_run(runs.config(), tmp_path / "run", 11)  # the newest checkpoint is that of step 9
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(end)
    fit(runs.config(), tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 16  # 12 steps, 3 validations, and that the run went on
    assert outcome(tmp_path / "run") == whole


def test_metrics_have_times_and_tell_when_a_run_went_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, began = tmp_path / "run", time.time()
    stopped_run(runs.config(), out, 8)
    fit(runs.config(), out)
    assert "resumed from step 6" in capsys.readouterr().err.splitlines()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    assert began - 1 < times[0] < times[-1] < time.time() + 1
    (event,) = [line for line in lines if "event" in line]
    assert {name: event[name] for name in event if name != "time"} == {"event": "resumed", "step": 6, "processes": 1}
    assert lines[lines.index(event) + 1]["step"] == 7
    assert not any("event" in line for line in metrics(out))
    assert read_metrics(out / "metrics.jsonl")["step"].tolist() == list(range(1, 13))


@pytest.mark.parametrize(
    ("name", "value"), tiny.mostly_slow([("torch", "1.13"), ("device", "abacus, 3 threads"), ("processes", 8)], 3)
)
def test_another_machine_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any) -> None:
    out = tmp_path / "run"
    stopped_run(runs.config(), out, 8)
    known = json.loads((out / "environment.json").read_text())
    (out / "environment.json").write_text(json.dumps(known | {name: value}))
    fit(runs.config(), out)
    (said,) = [line for line in caplog.messages if "bits" in line]
    assert f"{name} {value} -> {known[name]}" in said
    assert json.loads((out / "environment.json").read_text())[name] == value, "of the beginning"


# Damaged checkpoints --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of runs.config() that ended before step 11, with checkpoints of steps 8 and 9."""
    out = tmp_path_factory.mktemp("interrupted") / "run"
    stopped_run(runs.config(), out, 11)
    return out


@pytest.fixture
def copy(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "copy"))


def newest_folder(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*"))


def flip(data: bytes, low: int, high: int, chance: random.Random) -> bytes:
    """One bit of the bytes from low to high."""
    place = chance.randrange(low, high)
    return data[:place] + bytes((data[place] ^ 1 << chance.randrange(8),)) + data[place + 1 :]


def swap(data: bytes, low: int, high: int, chance: random.Random) -> bytes:
    """A few bytes from low to high become others."""
    place = chance.randrange(low, high)
    count = min(chance.randint(1, 64), high - place)
    return data[:place] + chance.randbytes(count) + data[place + count :]


def cut_off(data: bytes, low: int, high: int, chance: random.Random) -> bytes:
    return data[: chance.randrange(low, high)]


def lengthen(data: bytes, _low: int, _high: int, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.randint(1, 5000))


EDITS: tuple[Callable[[bytes, int, int, random.Random], bytes], ...] = (flip, swap, cut_off, lengthen)


def check_edits(out: Path, count: int, seed: int) -> None:
    """Every edit of the newest checkpoint is noticed, and the one before it is read whole."""
    newest, chance = newest_folder(out), random.Random(seed)
    step = int(newest.name.removeprefix("step-"))
    expected = tensor_hash(Checkpoints(out / "checkpoints", 2).read(8)[0])
    for number in range(count):
        path = newest / (STATE if number % 3 == 2 else TENSORS)
        sound = path.read_bytes()
        header = 8 + int.from_bytes(sound[:8], "little")
        low, high = {0: (0, header), 1: (header, len(sound)), 2: (0, len(sound))}[number % 3]
        edited = chance.choice(EDITS)(sound, low, high, chance)
        path.write_bytes(edited)
        found = Checkpoints(out / "checkpoints", 2).newest()
        assert found
        if edited == sound or (number % 3 == 2 and means(edited) == json.loads(sound)):
            assert found[1]["step"] == step  # another spelling of the same numbers
        else:
            assert (found[1]["step"], tensor_hash(found[0])) == (8, expected), f"edit {number}"
        path.write_bytes(sound)
    assert Checkpoints(out / "checkpoints", 2).newest()[1]["step"] == step


def means(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_an_edited_checkpoint_is_skipped(copy: Path) -> None:
    assert kept_steps(copy) >= {8, 9}
    check_edits(copy, 30, seed=0)


def absent(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def one_bit(path: Path) -> None:
    path.write_bytes(flip(path.read_bytes(), 0, path.stat().st_size, random.Random(3)))


def of_another_step(path: Path) -> None:
    """Sound by itself, in the wrong place."""
    shutil.copy(path.parent.with_name("step-00000008") / path.name, path)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize("name", [TENSORS, STATE])
@pytest.mark.parametrize(
    "damage", tiny.mostly_slow([absent, empty, folder_instead, one_bit, of_another_step, dangling], 3)
)
def test_with_a_damaged_checkpoint_the_one_before_is_taken(
    copy: Path, whole: dict[str, Any], damage: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(newest_folder(copy) / name)
    with caplog.at_level(logging.WARNING):
        fit(runs.config(), copy, quiet=True)
    assert outcome(copy) == whole
    told = [record.getMessage() for record in caplog.records if "step-00000009" in record.getMessage()]
    assert len(told) == 1
    assert "damaged" in told[0]


def damage_all(out: Path) -> None:
    for path in (out / "checkpoints").glob(f"*/{TENSORS}"):
        one_bit(path)


def test_with_all_checkpoints_damaged_the_run_starts_over(copy: Path, whole: dict[str, Any]) -> None:
    damage_all(copy)
    fit(runs.config(), copy, quiet=True)
    assert outcome(copy) == whole


def test_damaged_checkpoints_do_not_crowd_out_sound_ones(tmp_path: Path) -> None:
    """Those of steps 8 and 9 are broken, so the run begins anew; what it saves at steps 3 and 4 must be kept."""
    made = runs.config(holdout=0.0)  # there is no best to keep besides
    fit(made, tmp_path / "whole", quiet=True)
    stopped_run(made, tmp_path / "run", 11)
    damage_all(tmp_path / "run")
    stopped_run(made, tmp_path / "run", 6)
    found = Checkpoints(tmp_path / "run" / "checkpoints", 2).newest()
    assert found is not None
    assert found[1]["step"] == 4
    fit(made, tmp_path / "run", quiet=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


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
    assert again.steps() == [2, 3]
    for step in again.steps():
        assert again.read(step)[1]["step"] == step
    assert again.newest()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


def test_what_is_no_checkpoint_is_skipped(copy: Path, whole: dict[str, Any]) -> None:
    for name in ("step-00000999", "step-0000001x", "step-11", ".tmp-00000011", "backup"):
        (copy / "checkpoints" / name).mkdir()
    (copy / "checkpoints" / "step-00000777").write_text("a file")
    fit(runs.config(), copy, quiet=True)
    assert outcome_at(copy, 12) == whole


def outcome_at(out: Path, step: int) -> dict[str, Any]:
    """As if there were no checkpoints beyond that step."""
    for path in (out / "checkpoints").iterdir():
        if path.name != f"step-{step:08d}":
            path.unlink() if path.is_file() else shutil.rmtree(path)
    return outcome(out)


# What is kept ---------------------------------------------------------------------------------------------------------


def test_leftovers_of_killed_processes_are_deleted(copy: Path) -> None:
    for name in ("checkpoints/.tmp-00000007", "checkpoints/.tmp-00000010", "captures/.tmp-00000003"):
        (copy / name).mkdir(parents=True)
        (copy / name / TENSORS).write_bytes(b"half")
    for name in (".model.safetensors.0a1b2c3d.tmp", ".metrics.jsonl.deadbeef.tmp", ".config.json.01234567.tmp"):
        (copy / name).write_bytes(b"half")
    fit(runs.config(), copy, quiet=True)
    assert litter(copy) == []


def kept_steps(out: Path) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir()}


def forced_accuracies(monkeypatch: pytest.MonkeyPatch, *accuracies: float) -> None:
    """Of the validations, in turn."""
    left = list(accuracies)
    validate = loop.validate

    def scripted(run: Training, display: Any) -> None:
        run.evaluate = lambda _: {"top1": left.pop(0), "top5": 1.0, "nll": 1.0}
        validate(run, display)

    monkeypatch.setattr(loop, "validate", scripted)


@pytest.mark.parametrize(("keep", "kept"), [(1, {4, 12}), (2, {4, 10, 12}), (3, {4, 9, 10, 12})])
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, kept: set[int]
) -> None:
    forced_accuracies(monkeypatch, 0.1, 0.9, 0.2, 0.3, 0.4, 0.5)  # validated at 2, 4, 6, 8, 10, 12; saved at 3, 9 too
    fit(runs.config(evaluations=6, keep=keep), tmp_path / "run", quiet=True)
    assert kept_steps(tmp_path / "run") == kept


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_with_patience_the_best_weights_are_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ema: float) -> None:
    """Of step 4, three evaluations before the run gave up; averaged where it averages."""
    forced_accuracies(monkeypatch, 0.1, 0.9, 0.2, 0.3, 0.4, 0.5)
    made = runs.config(evaluations=6, keep=1, patience=3, ema=ema)
    result = fit(made, tmp_path / "run", quiet=True)
    assert status(tmp_path / "run")["step"] == 10
    tensors, _ = Checkpoints(tmp_path / "run" / "checkpoints", 1).read(4)
    part = "average." if ema else "model.model."
    best = {name.removeprefix(part): tensor for name, tensor in tensors.items() if name.startswith(part)}
    delivered = load_file(tmp_path / "run" / "model.safetensors")
    assert delivered
    for name, tensor in delivered.items():
        assert torch.equal(tensor, best[name])
    assert result.numbers["chosen_on_val"] is True


def test_patience_that_ran_out_before_a_kill_is_not_forgotten(tmp_path: Path) -> None:
    """Stopped while it delivered the best of a run that had given up."""
    made = runs.config(steps=60, evaluations=30, patience=2, optim=Optim(lr=1e-9))
    fit(made, tmp_path / "whole", quiet=True)
    ended = status(tmp_path / "whole")["step"]
    assert ended < 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finalize, "save", lambda *_: (_ for _ in ()).throw(StoppedError("stopped")))
        with pytest.raises(StoppedError):
            fit(made, tmp_path / "run", quiet=True)
    fit(made, tmp_path / "run", quiet=True)
    assert status(tmp_path / "run")["step"] == ended
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


# A step's randomness --------------------------------------------------------------------------------------------------


# Images in memory or from disk ----------------------------------------------------------------------------------------

PLENTY, LITTLE = 10**12, 500_000  # bytes that are free: the digits take 276 KB, and a set may take 0.3 of what is free


def set_free_memory(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr("plainvit.data.resident.available_bytes", lambda _: count)


def cropped() -> Config:
    """Crops are resized, which resident and streamed images are in different ways."""
    return runs.config(augment=Augment(crop="inception", area=(0.3, 1.0), flip=0.0))


def stop_at(patch: pytest.MonkeyPatch, number: int) -> None:
    step = loop.take_step

    def stopping(run: Training, *rest: Any) -> Any:
        if run.progress.step == number:
            raise RuntimeError("stopped")
        return step(run, *rest)

    patch.setattr(loop, "take_step", stopping)


def loading_of(out: Path) -> str:
    return json.loads((out / "data.json").read_text())["loading"]


def test_a_resumed_run_keeps_its_images_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory other processes hold by then."""
    outcomes = []
    for mode, before, after in (("resident", PLENTY, LITTLE), ("streamed", LITTLE, PLENTY)):
        set_free_memory(monkeypatch, before)
        fit(cropped(), tmp_path / mode, quiet=True)
        with monkeypatch.context() as patch:
            stop_at(patch, 7)
            with pytest.raises(RuntimeError, match="stopped"):
                fit(cropped(), tmp_path / f"{mode}-cut", quiet=True)
        set_free_memory(monkeypatch, after)
        fit(cropped(), tmp_path / f"{mode}-cut", quiet=True)
        outcomes += [runs.outcome(tmp_path / mode), runs.outcome(tmp_path / f"{mode}-cut")]
        assert loading_of(tmp_path / mode) == loading_of(tmp_path / f"{mode}-cut") == mode
    assert outcomes[0] == outcomes[1]
    assert outcomes[2] == outcomes[3]
    assert outcomes[0]["weights"] != outcomes[2]["weights"]  # or there would be nothing to keep


def test_images_that_no_longer_fit_into_memory_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(RuntimeError, match="stopped"):
            fit(cropped(), tmp_path, quiet=True)
    set_free_memory(monkeypatch, 1000)
    with pytest.raises(ResidentMemoryError) as caught:
        fit(cropped(), tmp_path, quiet=True)
    assert caught.value.exit_code == 5
    assert loading_of(tmp_path) == "resident"
    fit(cropped(), tmp_path, quiet=True, force=True)
    assert loading_of(tmp_path) == "streamed"
    assert runs.status(tmp_path)["state"] == "done"


def test_processes_agree_on_where_images_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        World, "gather_strings", lambda _, words: [words, "streamed"] if words == "resident" else [words]
    )
    fit(cropped(), tmp_path, quiet=True)
    assert loading_of(tmp_path) == "streamed"
