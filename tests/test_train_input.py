"""What a user may get wrong: one line on standard error, the right exit code, nothing lost, nothing left behind."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_runs as runs
import torch
from PIL import Image
from shell import Capture, fail, run
from small_runs import status
from tiny import mostly_slow

from plainvit.cli import main
from plainvit.config import Config, Optim
from plainvit.data.splits import open_splits
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.runtime.folder import metrics
from plainvit.runtime.track import tracker
from plainvit.train import doctor, loop
from plainvit.train.run import fit
from plainvit.train.state import Training
from plainvit.weights import save


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, without a network, without figures."""
    runs.without_figures(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def made(**changes: Any) -> Config:
    """Four steps on digits."""
    return runs.config(**{"steps": 4, "evaluations": 1} | changes)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    runs.recipe_file(tmp_path, made())
    return "mine.py:recipe"


def refused(capsys: Capture, *words: object, code: int = 2) -> str:
    """The one line of a command that must fail."""
    return fail(capsys, *words, code=code)


def printed(capsys: Capture, *words: object) -> str:
    """Standard output of a command that must go well."""
    main([str(word) for word in words])
    return capsys.readouterr().out


def here() -> list[str]:
    """What the working directory holds besides what the test put there."""
    return sorted(path.name for path in Path.cwd().iterdir() if path.name not in ("mine.py", "__pycache__", "photos"))


# Words that cannot be a run -------------------------------------------------------------------------------------------

# flags after `plainvit train mine.py:recipe`, exit code, part of the message
WRONG: list[tuple[str, int, str]] = [
    ("--optim.lrr 1", 2, "nearest: --optim.lr"),
    ("--btach 3", 2, "nearest: --batch"),
    ("stray", 2, "'stray'"),
    ("--data nosuch", 2, "'nosuch'"),
    ("--data cifar10 --data-root /no/such", 3, "/no/such/cifar10"),
    ("--data shapes:size=4", 2, "shapes takes size"),
    ("--batch many", 2, "batch"),
    ("--batch 0", 2, "batch"),
    ("--optim.lr -1", 2, "lr must be above 0"),
    ("--optim.lr nan", 2, "lr must be a number"),
    ("--optim.betas 0.9 1", 2, "betas"),
    ("--loss mse", 2, "softmax"),
    ("--augment.crop random", 2, "resize"),
    ("--model.patch 3 3", 2, "patch size 3"),
    ("--micro-batch 5", 2, "nearest: 4"),
    ("--ema-window 0.1", 2, "ema"),
    ("--optim.warmup 40", 2, "--optim.warmup 40"),
    ("--steps 0", 2, "--epochs or --steps"),
    ("--steps 0 --epochs 0.001", 2, "less than one batch"),
    ("--model.classes 7", 3, "7 classes, but digits has 10"),
    ("--device cuda", 2, "no GPU"),
    ("--hours -1", 2, "hours"),
    ("--head zeros", 2, "'zero'"),
    ("--init no/such.npz", 2, "no/such.npz"),
    ("--init vit_b16_augreg_i21k_225", 2, "nearest: vit_b16_augreg_i21k_224"),
    ("--init ViT-B/16", 2, "names a model, not weights"),
    ("--search", 2, "--optim.grid"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the table has a line about machines without a GPU")
@pytest.mark.parametrize(("flags", "code", "part"), mostly_slow(WRONG, 3), ids=[flags for flags, _, _ in WRONG])
def test_wrong_flags_are_errors_before_anything_is_made(
    recipe: str, capsys: Capture, flags: str, code: int, part: str
) -> None:
    assert part in refused(capsys, "train", recipe, "--out", "run", *flags.split(), code=code)
    assert here() == []


@pytest.mark.parametrize(
    ("words", "part"),
    mostly_slow(
        [
            ("train", "plainvit train digits"),
            ("train digit", "nearest: digits"),
            ("train no.py:recipe", "no.py"),
            ("train mine.py:recip", "nearest: recipe"),
            ("train mine.py", "mine.py:FUNCTION"),
            ("train vit-b16-jft", "--data"),
            ("finetune --data digits", "--init"),
            ("finetune", "--data"),
            ("finetune --init vit_b16_augreg_i21k_224 --data digits", "hf download timm/vit_base_patch16_224"),
            ("finetune --init vit_b16_augreg_i21k_224 --data digits", "plainvit train photos --data"),
            ("train digits --data cifar10", "use recipe 'cifar10'"),
            ("doctor digitts", "nearest: digits"),
            ("doctor digits --batchh 3", "nearest: --batch"),
            ("replay", "RUN"),
            ("replay nowhere", "not a run folder"),
        ],
        2,
    ),
)
@pytest.mark.usefixtures("recipe")
def test_a_command_without_a_run_in_it_is_an_error(capsys: Capture, words: str, part: str) -> None:
    assert part in refused(capsys, *words.split())
    assert here() == []


# What only shows once the model is built ------------------------------------------------------------------------------

LATE: list[tuple[str, int, str]] = [
    ("--optim.frozen nope*", 2, "nope*"),
    ("--optim.frozen *", 2, "nothing to train"),
    ("--batch 15", 2, "even"),
    ("--batch 15 --augment.mixup 0 --augment.cutmix 1", 2, "even"),
    ("--teacher no/such.npz", 2, "no/such.npz"),
    ("--search", 2, "--optim.grid"),
]


@pytest.mark.parametrize(("flags", "code", "part"), mostly_slow(LATE, 2), ids=[flags for flags, _, _ in LATE])
def test_a_refused_run_does_not_stand_in_the_way_of_the_fixed_one(
    recipe: str, capsys: Capture, flags: str, code: int, part: str
) -> None:
    """Nothing was trained: the same folder takes the command with the mistake left out."""
    assert part in refused(capsys, "train", recipe, "--out", "run", *flags.split(), code=code)
    printed(capsys, "train", recipe, "--out", "run")
    assert status(Path("run"))["state"] == "done"


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_tracker_is_sent_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By the calls that TensorBoard's SummaryWriter and wandb's run take; neither is among the tests' dependencies."""
    sent: list[tuple[int, str, float]] = []
    scalar = lambda name, value, step: sent.append((step, name, value))  # noqa: E731
    log = lambda values, step: sent.extend((step, name, value) for name, value in values.items())  # noqa: E731
    board = SimpleNamespace(SummaryWriter=lambda folder: SimpleNamespace(add_scalar=scalar, folder=folder))
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(__import__("sys").modules, "wandb", SimpleNamespace(init=lambda **_: SimpleNamespace(log=log)))
    send = tracker((name,), tmp_path, Config())
    send({"step": 3, "loss": 0.5, "time": "noon"})
    send({"step": 3, "val": {"top1": 0.25, "images": 8, "names": []}})
    assert sent == [(3, "train/loss", 0.5), (3, "val/top1", 0.25), (3, "val/images", 8)]


def test_status_has_the_exit_code_of_the_command(recipe: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "take_step", raising(ValueError("a user's mistake, found late")))
    assert "found late" in refused(capsys, "train", recipe, "--out", "run")
    ended = status(Path("run"))
    assert (ended["state"], ended["exit_code"]) == ("failed", 2)


def raising(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_run_begun_from_weights_notices_that_they_were_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has no checkpoint yet."""
    weights = tmp_path / "first" / "model.safetensors"
    first = fit(made(), tmp_path / "first", quiet=True).model
    begun = made(init=str(weights), model=None, head="keep")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", raising(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            fit(begun, tmp_path / "run", quiet=True)
    assert first.head
    first.head.bias.data += 1
    save(first, weights)
    with pytest.raises(ValueError, match="--force"):
        fit(begun, tmp_path / "run", quiet=True)
    fit(begun, tmp_path / "run", quiet=True, force=True)


# Search ---------------------------------------------------------------------------------------------------------------


def test_a_search_without_images_to_judge_by_is_an_error(recipe: str, capsys: Capture) -> None:
    flags = ("--search", "--optim.grid", 0.01, 0.1, "--search-holdout", 0, "--holdout", 0)
    assert "--search-holdout" in refused(capsys, "train", recipe, "--out", "run", *flags)


def test_a_search_survives_a_rate_that_diverges_and_says_how_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The highest rates of a grid are there to find out where that begins."""
    step = loop.take_step

    def diverging(run: Training, *rest: Any) -> Any:
        if run.config.optim.lr == 0.5:
            raise loop.DivergedError("4 steps were not finite")
        return step(run, *rest)

    monkeypatch.setattr(loop, "take_step", diverging)
    fit(made(optim=Optim(grid=(0.5, 1e-6, 1e-7))), tmp_path / "run", search=True, quiet=True)
    taken = json.loads((tmp_path / "run" / "config.json").read_text())["optim"]["lr"]
    held = {lr: tmp_path / "run" / "search" / f"lr-{lr:g}" / "results.json" for lr in (1e-6, 1e-7)}
    found = {lr: json.loads(file.read_text())["val"] for lr, file in held.items()}
    assert found[1e-6]["top1"] == found[1e-7]["top1"], "rates that change no answer"
    assert taken == min(found, key=lambda lr: found[lr]["nll"])
    assert f"using lr {taken:g}, the lowest NLL" in caplog.text


# Another config in the same folder ------------------------------------------------------------------------------------


def begun(out: Path, **changes: Any) -> Path:
    """A run of the recipe that ended before its last step, with a checkpoint of step 3."""
    step = loop.take_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "take_step", lambda run, *rest: 1 / 0 if run.progress.step == 3 else step(run, *rest))
        with pytest.raises(ZeroDivisionError):
            fit(made(**{"recipe": "mine.py:recipe"} | changes), out, quiet=True)
    return out


def test_an_unfinished_run_says_where_it_stopped(tmp_path: Path, capsys: Capture) -> None:
    begun(tmp_path / "run")
    for words in (("inspect", "run"), ("predict", "run", "digits"), ("evaluate", "run", "--data", "digits")):
        said = refused(capsys, *words)
        assert "stopped at step 3 of 4 (failed), and has no weights yet: its `plainvit train` command" in said
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    (tmp_path / "run" / "status.json").write_text(json.dumps(status | {"state": "diverged"}))
    assert "(diverged), and has no weights yet: another --out with a lower --optim.lr" in refused(
        capsys, "inspect", "run"
    )


def test_a_run_made_longer_has_the_weights_from_before(
    recipe: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed(capsys, "train", recipe, "--out", "run", "--steps", 3)
    monkeypatch.setattr(loop, "take_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", recipe, "--out", "run", "--force"])
    capsys.readouterr()
    said = " ".join(printed(capsys, "inspect", "run").split())
    assert "stopped at step 3 of 4 (failed): these are the weights from before it was made longer" in said


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_changed_config_is_an_error_with_what_changed(tmp_path: Path, recipe: str, capsys: Capture) -> None:
    before = contents(begun(tmp_path / "run"))
    words = ("train", recipe, "--out", "run", "--optim.lr", 0.1, "--batch", 32, "--workers", 1)
    line = refused(capsys, *words)
    assert "optim.lr 0.003 -> 0.1" in line
    assert "batch 16 -> 32" in line
    assert "workers" not in line  # which changes nothing
    assert "--force" in line
    assert contents(tmp_path / "run") == before


def test_a_changed_config_is_resumed_when_forced(tmp_path: Path, recipe: str, capsys: Capture) -> None:
    begun(tmp_path / "run")
    printed(capsys, "train", recipe, "--out", "run", "--optim.lr", 0.1, "--force")
    lines = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[3]["lr"] > 0.003
    assert status(tmp_path / "run")["state"] == "done"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["optim"]["lr"] == 0.1


@pytest.mark.parametrize(
    ("flags", "first"),
    mostly_slow(
        [
            ("--model.depth 2", {}),
            ("--model.width 32", {}),
            ("", {"optim": Optim(name="sgd")}),
            ("", {"ema": 0.0}),
        ],
        2,
    ),
)
def test_what_a_checkpoint_cannot_become_is_an_error_even_when_forced(
    tmp_path: Path, recipe: str, capsys: Capture, flags: str, first: dict[str, Any]
) -> None:
    """A clear word, or a run that goes on: no traceback."""
    begun(tmp_path / "run", **first)
    saved = contents(tmp_path / "run" / "checkpoints")
    code, _, err = run(capsys, "train", recipe, "--out", "run", "--force", *flags.split())
    assert code in (0, 2)
    if code:
        assert err.splitlines()[-1].startswith("plainvit: ")
        assert contents(tmp_path / "run" / "checkpoints") == saved
    else:
        assert status(tmp_path / "run")["state"] == "done"


def test_a_finished_run_can_be_made_longer_by_force(tmp_path: Path, recipe: str, capsys: Capture) -> None:
    printed(capsys, "train", recipe, "--out", "run")
    printed(capsys, "train", recipe, "--out", "run", "--steps", 6, "--force")
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "text", mostly_slow(["", "{", "[]", '{"kind": "run", "colour": 3}', '{"kind": "vit"}', '{"kind": 3}'], 3)
)
def test_a_broken_config_file_is_reported(tmp_path: Path, recipe: str, capsys: Capture, text: str) -> None:
    (begun(tmp_path / "run") / "config.json").write_text(text)
    refused(capsys, "train", recipe, "--out", "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints", 1).steps() == [3]


def test_some_classes_of_a_set_are_data_of_its_recipe(tmp_path: Path, capsys: Capture) -> None:
    few = ("--steps", 1, "--optim.warmup", 0, "--evaluations", 1)
    printed(capsys, "train", "digits", "--data", "digits:01234", *few, "--out", tmp_path / "run")
    line = refused(capsys, "train", "digits", "--data", "shapes", *few, "--out", tmp_path / "shapes")
    assert "not for shapes" in line
    assert "--force" in line


# Data -----------------------------------------------------------------------------------------------------------------

PHOTOS = ("--data", "photos", "--model.image-size", "16", "16", "--batch", "4", "--save-every", "1")


def photos(names: tuple[str, ...] = ("cat", "dog", "fox"), count: int = 4) -> Path:
    """A folder of noise in classes."""
    shutil.rmtree("photos", ignore_errors=True)
    random = np.random.default_rng(0)
    for name in names:
        (Path("photos") / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path("photos") / name / f"{number}.png")
    return Path("photos")


@pytest.fixture
def begun_on_photos(recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> str:
    """The recipe of a run on photos that stopped after three steps."""
    photos()
    step = loop.take_step
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", lambda run, *rest: 1 / 0 if run.progress.step == 3 else step(run, *rest))
        with pytest.raises(ZeroDivisionError):
            main(["train", recipe, "--out", "run", *PHOTOS])
    capsys.readouterr()
    return recipe


@pytest.mark.parametrize("what", ["images", "classes"])
def test_changed_data_is_an_error_unless_forced(begun_on_photos: str, capsys: Capture, what: str) -> None:
    if what == "images":
        shutil.copy("photos/cat/0.png", "photos/cat/9.png")
    else:
        photos(("ape", "dog", "fox"))
    before = contents(Path("run"))
    line = refused(capsys, "train", begun_on_photos, "--out", "run", *PHOTOS, code=3)
    assert f"the {what} of photos changed" in line
    assert contents(Path("run")) == before
    printed(capsys, "train", begun_on_photos, "--out", "run", *PHOTOS, "--force")
    assert status(Path("run"))["state"] == "done"


def test_unchanged_data_in_another_place_is_the_same_data(begun_on_photos: str, capsys: Capture) -> None:
    """The modification times of a copy are new, its images are not."""
    Path("photos").rename("elsewhere")
    shutil.copytree("elsewhere", "photos")
    printed(capsys, "train", begun_on_photos, "--out", "run", *PHOTOS)
    assert status(Path("run"))["state"] == "done"


@pytest.mark.parametrize("broken", ["empty", "no classes", "unreadable", "no images"])
def test_data_that_cannot_be_trained_on_is_an_error(recipe: str, capsys: Capture, broken: str) -> None:
    folder = photos(count=3)
    if broken == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    if broken == "no classes":
        shutil.rmtree(folder)
        folder.mkdir()
        Image.new("RGB", (16, 16)).save(folder / "1.png")
    for path in folder.glob("*/*"):
        path.write_bytes(b"no image") if broken == "unreadable" else path.unlink() if broken == "no images" else None
    line = refused(capsys, "train", recipe, "--out", "run", *PHOTOS, code=3)
    assert "photos" in line
    assert status(Path("run"))["exit_code"] == 3 if Path("run").exists() else True


# Weights to start from ------------------------------------------------------------------------------------------------


@pytest.fixture
def first(tmp_path: Path) -> str:
    """A finished run on digits."""
    fit(made(), tmp_path / "first", quiet=True)
    return "first"


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
            ("--model.patch 2 2", 2, "patch (4, 4), not (2, 2)"),
            ("--image-size 13", 2, "nearest: 12 or 16"),
            ("--teacher first", 3, "10 classes"),
            ("--model ViT-Ti/16", 2, "not the model asked for"),
            ("--model BiT-R50x1", 2, "not the model asked for"),
        ],
        3,
    ),
)
@pytest.mark.usefixtures("first")
def test_weights_of_another_model_are_errors(capsys: Capture, flags: str, code: int, part: str) -> None:
    photos()
    assert part in refused(capsys, *FINETUNE, *flags.split(), code=code)
    printed(capsys, *FINETUNE)  # in the same folder
    assert status(Path("run"))["state"] == "done"


def test_a_kept_head_needs_the_same_names(tmp_path: Path, capsys: Capture) -> None:
    model = runs.MODEL.replace(image_size=(16, 16))
    fit(made(model=model, data="shapes:size=16,count=32,classes=10", holdout=0.0), tmp_path / "shapes", quiet=True)
    words = ("finetune", "--init", "shapes", "--data", "digits", "--head", "keep", "--steps", 2, "--out", "run")
    line = refused(capsys, *words, code=3)
    assert "'circle'" in line
    assert "'0'" in line


# Doctor ---------------------------------------------------------------------------------------------------------------


def risks(capsys: Capture, *words: object) -> dict[str, str]:
    """risk -> its mending."""
    found = json.loads(printed(capsys, "doctor", *words, "--json"))["risks"]
    return {one["risk"]: one["fix"] for one in found}


def test_doctor_describes_the_machine(capsys: Capture) -> None:
    said = printed(capsys, "doctor")
    assert "cudnn off" in said  # whose gradients were not finite in places
    for word in ("cpu", "gpu", "attention", "torch", "safetensors", "plainvit", "GiB"):
        assert word in said
    report = json.loads(printed(capsys, "doctor", "--json"))
    assert report["versions"]["torch"] == torch.__version__.split("+")[0] or report["versions"]["torch"]
    assert report["risks"] == []
    assert report["attention"]["cudnn"] is False


def test_doctor_finds_nothing_wrong_with_digits(capsys: Capture) -> None:
    assert risks(capsys, "digits") == {}
    assert "no problem found" in printed(capsys, "doctor", "digits")


def alternatives(fix: str) -> list[list[str]]:
    """The flags that a mending offers, one list for each way."""
    flag = r"--[a-z._-]+(?: (?:-?\d[\d.e+-]*|adamw|pre|none)(?![\w.]))+"
    return [found.split() for found in re.findall(rf"{flag}(?: {flag})*", fix)]


# a planted risk, and words of it
PLANTED: list[tuple[str, str]] = [
    ("--model.patch 8 8", "8-pixel patches on 8-pixel images"),
    ("--model.image-size 32 32 --model.patch 16 16", "16-pixel patches on 32-pixel images"),
    ("--model.image-size 16 32 --model.patch 8 16", "only 4 tokens"),
    ("--optim.warmup 0", "without warm-up"),
    ("--optim.name sgd --optim.lr 0.01", "L2 in the gradient"),
    ("--optim.weight-decay 1e-4", "has little effect"),
    ("--optim.clip 0", "not clipped"),
    ("--augment.flip 0.5", "mirrored"),
    ("--batch 4096", "more than the 1371"),
    ("--devices 3", "not divisible by the 3 processes"),
    ("--holdout 0", "no images are held out"),
]


@pytest.mark.parametrize("planted", mostly_slow(range(len(PLANTED)), 3), ids=[flags for flags, _ in PLANTED])
def test_doctor_finds_a_planted_problem_and_its_fix_removes_it(capsys: Capture, planted: int) -> None:
    flags, part = PLANTED[planted]
    found = risks(capsys, "digits", *flags.split())
    (risk,) = [risk for risk in found if part in risk]
    ways = alternatives(found[risk])
    assert ways, found[risk]
    for way in ways:
        after = risks(capsys, "digits", *flags.split(), *way)
        assert not any(part in risk for risk in after), f"{way}: {after}"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--data no/such", "no/such"),
        ("--optim.warmup 99999", "optim.warmup"),
        ("--model.classes 7", "7 classes"),
        ("--steps 0 --epochs 0", "no length"),
        ("--optim.frozen nope*", "nope*"),
        ("--batch 63 --augment.mixup 0.2", "even"),
        ("--data ", "no data"),
    ],
)
def test_doctor_finds_what_train_would_refuse(capsys: Capture, flags: str, part: str) -> None:
    words = flags.split(" ") if flags.endswith(" ") else flags.split()
    assert any(part in risk for risk in risks(capsys, "digits", *words))


def test_doctor_counts_the_gpus_for_the_processes(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "describe_machine", dict)
    found = risks(capsys, "digits", "--device", "cuda", "--devices", 64)
    assert found["64 processes on this machine, but it has 2 GPUs: one process a GPU"].startswith("--devices 2")
    assert "at least 1" in refused(capsys, "doctor", "digits", "--devices", 0)


def test_doctor_finds_a_recipe_without_data(capsys: Capture) -> None:
    assert any("data" in risk for risk in risks(capsys, "vit-b16-jft"))
    assert any("init" in fix or "model" in risk for risk, fix in risks(capsys, "finetune", "--data", "digits").items())


@pytest.mark.usefixtures("first")
def test_doctor_finds_the_wrong_normalisation_for_weights(tmp_path: Path, capsys: Capture) -> None:
    wrong = runs.MODEL.replace(mean=(0.485, 0.456, 0.406), std=(0.2, 0.2, 0.2))
    runs.recipe_file(tmp_path, made(init="first", model=wrong))
    (risk,) = [risk for risk in risks(capsys, "mine.py:recipe") if "--model.mean" in risk]
    assert "first" in risk
    runs.recipe_file(tmp_path, made(init="first", model=None))  # left out, as it says
    assert not any("--model.mean" in risk for risk in risks(capsys, "mine.py:recipe"))


def test_a_share_of_the_images_is_nested_and_even() -> None:
    """Of each class the same share; what a smaller share has, a larger one has; validation and test stay."""
    shares = (0.05, 0.2, 0.5, 1.0)
    splits = [open_splits(Config(data="digits", holdout=0.1, train_fraction=share)) for share in shares]
    names = [{one.train.name(index) for index in range(len(one.train))} for one in splits]
    for smaller, larger in pairwise(names):
        assert smaller < larger
    whole = np.bincount(splits[-1].train.labels)
    for share, one in zip(shares, splits, strict=True):
        assert abs(np.bincount(one.train.labels) - share * whole).max() <= 0.5
    assert len({one.val.fingerprint() for one in splits if one.val}) == 1
    for share in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="train_fraction must be above 0"):
            Config(train_fraction=share)
