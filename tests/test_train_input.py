"""What a user may get wrong: one line on standard error, the right exit code, nothing lost, nothing left behind."""

import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_runs as runs
import torch
from pictures import plant_classes
from small_runs import before_step, error_of, run_command, status, stopped_run
from tiny import mostly_slow

from plainvit.config import Config, Optim
from plainvit.data.splits import open_splits
from plainvit.runtime.folder import read_metrics
from plainvit.runtime.track import Tracker
from plainvit.train import doctor
from plainvit.train.run import fit
from plainvit.weights import save

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("no_figures")
RECIPE = "mine.py:recipe"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a recipe of four steps on digits, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runs.recipe_file(tmp_path, short())


def short(**changes: Any) -> Config:
    return runs.config(**{"steps": 4, "evaluations": 1} | changes)


def train(*flags: object) -> None:
    """`plainvit train` of the recipe into run/, which must end well."""
    assert run_command("train", RECIPE, "--out", "run", *flags) == 0
    assert status(Path("run"))["state"] == "done"


def steps_of(out: Path) -> list[int]:
    return [line["step"] for line in read_metrics(out) if "loss" in line]


def assert_nothing_is_left() -> None:
    assert {path.name for path in Path.cwd().iterdir()} <= {"mine.py", "__pycache__", "photos", "first"}


# Invalid commands -----------------------------------------------------------------------------------------------------

# flags after `plainvit train mine.py:recipe`, exit code, part of the message
WRONG: list[tuple[str, int, str]] = [
    ("--optim.lrr 1", 2, "nearest: --optim.lr"),
    ("--lr 1", 2, "did you mean --optim.lr?"),
    ("stray", 2, "'stray'"),
    ("--data nosuch", 2, "'nosuch'"),
    ("--data cifar10 --data-root /no/such", 3, "/no/such/cifar10"),
    ("--batch 15", 2, "even"),
    ("--optim.lr nan", 2, "lr must be a number"),
    ("--optim.frozen nope*", 2, "nope*"),
    ("--optim.frozen *", 2, "nothing to train"),
    ("--optim.warmup 40", 2, "--optim.warmup 40"),
    ("--steps 0", 2, "--epochs or --steps"),
    ("--steps 0 --epochs 0.001", 2, "less than one batch"),
    ("--model.classes 7", 3, "7 classes, but digits has 10"),
    ("--init no/such.npz", 2, "no/such.npz"),
    ("--init ViT-B/16", 2, "is an architecture, not weights: give published weights, such as vit_b16_"),
    ("--teacher no/such.npz", 2, "no/such.npz"),
    ("--patience 2 --holdout 0", 2, "--holdout"),
    ("--search", 2, "--optim.grid"),
    ("--search --optim.grid 0.01 0.1 --search-holdout 0 --holdout 0", 2, "--search-holdout"),
]
WRONG += [("--device cuda", 2, "no GPU")] * (not torch.cuda.is_available())


@pytest.mark.parametrize(("flags", "code", "part"), mostly_slow(WRONG, 3), ids=[flags for flags, _, _ in WRONG])
def test_wrong_flags_are_errors_that_leave_nothing(capsys: Capture, flags: str, code: int, part: str) -> None:
    assert part in error_of(capsys, "train", RECIPE, "--out", "run", *flags.split(), code=code)
    assert_nothing_is_left()


@pytest.mark.parametrize(
    ("words", "part"),
    mostly_slow(
        [
            ("train", "plainvit train digits"),
            ("train digit", "nearest: digits"),
            ("train vit-b16-jft", "--data"),
            ("train digits --data cifar10", "not for cifar10"),
            ("finetune --data digits", "--init WEIGHTS (`plainvit weights` lists some), or --model NAME --epochs 20"),
            ("finetune", "--data"),
            ("finetune --init vit_b16_augreg_i21k_224 --data digits", "plainvit train photos --data digits"),
            ("doctor digits --batchh 3", "nearest: --batch"),
            ("replay", "RUN"),
        ],
        2,
    ),
)
def test_an_incomplete_command_is_an_error(capsys: Capture, words: str, part: str) -> None:
    assert part in error_of(capsys, *words.split())
    assert_nothing_is_left()


def test_some_classes_of_a_set_are_data_of_its_recipe(tmp_path: Path, capsys: Capture) -> None:
    few = ("--steps", 1, "--optim.warmup", 0, "--evaluations", 1)
    assert run_command("train", "digits", "--data", "digits:01234", *few, "--out", tmp_path / "run") == 0
    assert "--force" in error_of(capsys, "train", "digits", "--data", "shapes", *few, "--out", tmp_path / "shapes")


class Recorder:
    """By the calls that TensorBoard's SummaryWriter and wandb's run take; neither is among the tests' dependencies."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.sent: list[tuple[int, str, float]] = []
        self.closed = 0
        self.close = self.finish = lambda: setattr(self, "closed", self.closed + 1)

    def open(self, *_: object, **options: Any) -> "Recorder":
        assert self.closed == len(self.opened), "one run at a time"
        self.opened.append(options)
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.sent.append((step, name, value))

    def log(self, values: dict[str, float], step: int) -> None:
        self.sent.extend((step, name, value) for name, value in values.items())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    for name, opener in (("torch.utils.tensorboard", "SummaryWriter"), ("wandb", "init")):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{opener: made.open}))
    return made


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_tracker_is_sent_every_number(tmp_path: Path, recorder: Recorder, name: str) -> None:
    tracker = Tracker((name,), tmp_path, Config())
    tracker.send({"step": 3, "loss": 0.5, "time": "noon"})
    tracker.send({"step": 3, "val": {"top1": 0.25, "images": 8, "names": []}})
    assert recorder.sent == [(3, "train/loss", 0.5), (3, "val/top1", 0.25), (3, "val/images", 8)]


def test_each_run_of_a_search_is_one_in_wandb(tmp_path: Path, recorder: Recorder) -> None:
    """Also if it ends early; a resumed run goes on in its own."""
    config = short(track=("wandb",), optim=Optim(grid=(1e-3, 1e-2)))
    stopped_run(config, tmp_path / "run", 3, search=True)
    fit(config, tmp_path / "run", search=True, quiet=True)
    names = [options["name"] for options in recorder.opened]
    assert names == ["lr-0.001", "lr-0.001", "lr-0.01", "run"]
    assert len({options["id"] for options in recorder.opened}) == 3
    assert recorder.closed == 4


# Another config in the same folder ------------------------------------------------------------------------------------


def stopped(**changes: Any) -> Path:
    """A run of the recipe that ended before its last step, with a checkpoint of step 3."""
    return stopped_run(short(**{"recipe": RECIPE} | changes), Path("run"), 4)


def test_an_unfinished_run_says_where_it_stopped(capsys: Capture) -> None:
    out = stopped()
    for words in (("inspect", "run"), ("predict", "run", "digits"), ("evaluate", "run", "--data", "digits")):
        line = error_of(capsys, *words)
        assert "stopped at step 3 of 4 (failed), and has no weights yet: its `plainvit train` command" in line
    (out / "status.json").write_text(json.dumps(status(out) | {"state": "diverged"}))
    assert "another --out with a lower --optim.lr" in error_of(capsys, "inspect", "run")


def test_a_finished_run_can_be_made_longer_by_force(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it ends, its folder has the weights from before."""
    train("--steps", 3)
    with monkeypatch.context() as patch:
        before_step(patch, 4, runs.fail())
        with pytest.raises(runs.StoppedError):
            run_command("train", RECIPE, "--out", "run", "--force")
    capsys.readouterr()
    assert run_command("inspect", "run") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "stopped at step 3 of 4 (failed): these are the weights from before it was made longer" in words
    train("--force")
    assert steps_of(Path("run")) == [1, 2, 3, 4]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_changed_config_is_an_error_unless_forced(capsys: Capture) -> None:
    out = stopped()
    before = contents(out)
    line = error_of(capsys, "train", RECIPE, "--out", "run", "--optim.lr", 0.1, "--batch", 32, "--workers", 1)
    assert "optim.lr 0.003 -> 0.1" in line
    assert "batch 16 -> 32" in line
    assert "workers" not in line  # which changes nothing
    assert "--force" in line
    assert contents(out) == before
    train("--optim.lr", 0.1, "--force")
    assert steps_of(out) == [1, 2, 3, 4]
    assert [line["lr"] for line in read_metrics(out) if "loss" in line][3] > 0.003
    assert json.loads((out / "config.json").read_text())["optim"]["lr"] == 0.1


# Data -----------------------------------------------------------------------------------------------------------------

PHOTOS = ("--data", "photos", "--model.image-size", "16", "16", "--batch", "4", "--save-every", "1")


def plant_photos(*names: str) -> Path:
    """A folder of noise in classes."""
    shutil.rmtree("photos", ignore_errors=True)
    return plant_classes(Path("photos"), dict.fromkeys(names or ("cat", "dog", "fox"), 4))


@pytest.fixture
def stopped_on_photos(monkeypatch: pytest.MonkeyPatch) -> None:
    """run/ is a run on photos that stopped after three steps."""
    plant_photos()
    with monkeypatch.context() as patch:
        before_step(patch, 4, runs.fail())
        with pytest.raises(runs.StoppedError):
            run_command("train", RECIPE, "--out", "run", *PHOTOS)


@pytest.mark.parametrize("change", ["images", "classes"])
@pytest.mark.usefixtures("stopped_on_photos")
def test_changed_data_is_an_error_unless_forced(capsys: Capture, change: str) -> None:
    if change == "images":
        image = next(Path("photos/cat").iterdir())
        shutil.copy(image, image.with_name("copy.png"))
    else:
        plant_photos("ape", "dog", "fox")
    before = contents(Path("run"))
    line = error_of(capsys, "train", RECIPE, "--out", "run", *PHOTOS, code=3)
    assert f"the {change} of photos changed" in line
    assert contents(Path("run")) == before
    train(*PHOTOS, "--force")


@pytest.mark.usefixtures("stopped_on_photos")
def test_a_copy_of_the_data_is_the_same_data() -> None:
    """The modification times of a copy are new, its images are not."""
    Path("photos").rename("elsewhere")
    shutil.copytree("elsewhere", "photos")
    train(*PHOTOS)


@pytest.mark.parametrize("broken", mostly_slow(["unreadable", "empty", "no classes", "no images"], 2))
def test_data_without_images_of_classes_is_an_error(capsys: Capture, broken: str) -> None:
    photos = plant_photos()
    for path in photos.glob("*/*"):
        if broken == "no classes":
            path.rename(photos / f"{path.parent.name}-{path.name}")
        elif broken == "unreadable":
            path.write_bytes(b"no image")
        else:
            path.unlink()
    for path in [path for path in photos.iterdir() if path.is_dir() and broken in ("empty", "no classes")]:
        path.rmdir()
    assert "photos" in error_of(capsys, "train", RECIPE, "--out", "run", *PHOTOS, code=3)
    assert not Path("run").exists() or status(Path("run"))["exit_code"] == 3


# Weights to start from ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on digits."""
    out = tmp_path_factory.mktemp("finished") / "run"
    runs.complete_run(short(), out)
    return out


@pytest.fixture
def first(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "first"))


FINETUNE = (
    *("finetune", "--init", "first", "--data", "photos", "--holdout", "0"),
    *("--steps", "2", "--batch", "4", "--workers", "0", "--out", "run"),
)


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    mostly_slow(
        [
            ("--head keep", 3, "--head zero"),
            ("--model.depth 2", 2, "depth 1, not 2"),
            ("--model.mean 0.1", 2, "mean"),
            ("--model BiT-R50x1", 2, "not the model asked for"),
            ("--image-size 13", 2, "use image size 12 or 16"),
            ("--teacher first", 3, "10 classes"),
        ],
        3,
    ),
)
@pytest.mark.usefixtures("first")
def test_weights_of_another_model_are_errors(capsys: Capture, flags: str, code: int, part: str) -> None:
    plant_photos()
    capsys.readouterr()
    assert run_command(*FINETUNE, *flags.split()) == code
    assert part in capsys.readouterr().err.splitlines()[-1]
    assert_nothing_is_left()


def test_a_kept_head_needs_the_same_names(tmp_path: Path, capsys: Capture) -> None:
    model = runs.MODEL.replace(image_size=(16, 16))
    fit(short(model=model, data="shapes:size=16,count=32,classes=10", holdout=0.0), tmp_path / "shapes", quiet=True)
    words = ("finetune", "--init", "shapes", "--data", "digits", "--head", "keep", "--steps", 2, "--out", "run")
    assert "'circle'" in error_of(capsys, *words, code=3)


def test_replaced_initial_weights_are_an_error_unless_forced(first: Path) -> None:
    """Also in a run that has no checkpoint yet."""
    weights = first / "model.safetensors"
    run_config = short(init=str(weights), model=None, head="keep")
    stopped_run(run_config, Path("run"), 1)
    model = fit(short(), first, quiet=True).model
    assert model.head
    model.head.bias.data += 1
    save(model, weights)
    with pytest.raises(ValueError, match="--force"):
        fit(run_config, "run", quiet=True)
    fit(run_config, "run", quiet=True, force=True)


# Doctor ---------------------------------------------------------------------------------------------------------------


def find_risks(capsys: Capture, *words: object) -> dict[str, str]:
    """risk -> its fix."""
    capsys.readouterr()
    assert run_command("doctor", *words, "--json") == 0
    return {one["risk"]: one["fix"] for one in json.loads(capsys.readouterr().out)["risks"]}


def test_doctor_describes_the_machine(capsys: Capture) -> None:
    assert run_command("doctor", "digits") == 0
    printed = capsys.readouterr().out
    for word in ("cpu", "gpu", "torch", "plainvit", "GiB", "no problem found"):
        assert word in printed
    assert run_command("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert torch.__version__.startswith(report["versions"]["torch"])
    assert report["risks"] == []


def list_fixes(fix: str) -> list[list[str]]:
    """The flags that a fix offers, one list for each way."""
    flag = r"--[a-z._-]+(?: (?:-?\d[\d.e+-]*|adamw|pre|none)(?![\w.]))+"
    return [way.split() for way in re.findall(rf"{flag}(?: {flag})*", fix)]


# flags with a problem, and words of it
PLANTED: list[tuple[str, str]] = [
    ("--model.patch 8 8", "8-pixel patches on 8-pixel images"),
    ("--model.image-size 16 32 --model.patch 8 16", "only 4 tokens"),
    ("--optim.warmup 0", "without warm-up"),
    ("--optim.weight-decay 1e-4", "has little effect"),
    ("--batch 4096", "more than the 1371"),
    ("--devices 3", "not divisible by the 3 processes"),
    ("--holdout 0", "no images are held out"),
]


@pytest.mark.parametrize(("flags", "part"), mostly_slow(PLANTED, 3), ids=[flags for flags, _ in PLANTED])
def test_doctor_finds_a_planted_problem_and_its_fix_removes_it(capsys: Capture, flags: str, part: str) -> None:
    found = find_risks(capsys, "digits", *flags.split())
    (risk,) = [risk for risk in found if part in risk]
    ways = list_fixes(found[risk])
    assert ways, found[risk]
    for way in ways:
        after = find_risks(capsys, "digits", *flags.split(), *way)
        assert not any(part in risk for risk in after), f"{way}: {after}"


def test_doctor_counts_the_gpus_for_the_processes(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "describe_machine", dict)
    found = find_risks(capsys, "digits", "--device", "cuda", "--devices", 64)
    assert found["64 processes on this machine, but it has 2 GPUs: one process a GPU"] == "--devices 2"
    error_of(capsys, "doctor", "digits", "--devices", 0)


@pytest.mark.usefixtures("first")
def test_doctor_finds_the_wrong_normalization_for_weights(tmp_path: Path, capsys: Capture) -> None:
    wrong = runs.MODEL.replace(mean=(0.485, 0.456, 0.406), std=(0.2, 0.2, 0.2))
    for model, count in ((wrong, 1), (None, 0)):
        runs.recipe_file(tmp_path, short(init="first", model=model))
        assert sum("--model.mean" in risk for risk in find_risks(capsys, RECIPE)) == count


def test_fractions_of_the_images_are_nested_and_even() -> None:
    """Of each class the same fraction; a larger one contains a smaller one; validation and test images stay."""
    fractions = (0.05, 0.2, 0.5, 1.0)
    splits = [open_splits(Config(data="digits", holdout=0.1, train_fraction=fraction)) for fraction in fractions]
    names = [{part.train.name(index) for index in range(len(part.train))} for part in splits]
    for smaller, larger in pairwise(names):
        assert smaller < larger
    counts = np.bincount(splits[-1].train.labels)
    for fraction, part in zip(fractions, splits, strict=True):
        assert abs(np.bincount(part.train.labels) - fraction * counts).max() <= 0.5
    assert len({part.val.fingerprint() for part in splits if part.val}) == 1
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match="--train-fraction must be above 0"):
            Config(train_fraction=fraction)
