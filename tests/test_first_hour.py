"""Fine-tuning in the first hour: a linear head first, a run that fits --hours, one line for bad input."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_runs as runs
import torch
from pictures import encode, noise, plant, plant_classes
from sklearn.linear_model import LogisticRegression
from small_runs import complete_run, error_of, stopped_run

import plainvit
from plainvit.config import Augment, Config, Optim, ResNetConfig, ViTConfig
from plainvit.data.decode import DataError
from plainvit.data.sources import open_source
from plainvit.data.splits import open_splits
from plainvit.evaluate.card import read_card, read_run_settings
from plainvit.evaluate.predictor import Predictor
from plainvit.models import build
from plainvit.runtime.folder import read_metrics
from plainvit.train import finalize, linear_head, time_budget
from plainvit.train.run import describe_plan, fit
from plainvit.train.schedule import learning_rate
from plainvit.train.state import Progress, Training
from plainvit.train.time_budget import TimeBudget
from plainvit.train.transfer import CPU_BATCH, CPU_HOURS, complete_config

pytestmark = pytest.mark.usefixtures("no_figures")
SHAPES = "shapes:size=16,count=90,classes=3"
VIT = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=(4, 4), image_size=(16, 16), classes=5)
L2 = 1e-2


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_weights(VIT, tmp_path_factory.mktemp("weights"))


def save_weights(model: Any, folder: Path) -> str:
    path = folder / "weights.safetensors"
    plainvit.save(build(model).initialize(torch.Generator().manual_seed(0)), path)
    return str(path)


def config(weights: str, **changes: Any) -> Config:
    settings: dict[str, Any] = {"init": weights, "data": SHAPES, "head": "linear", "batch": 12, "steps": 6}
    settings |= {"augment": Augment(crop="none"), "optim": Optim(lr=1e-3), "evaluations": 2, "save_every": 2}
    return Config(workers=0, **settings | changes)


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


# The first result -----------------------------------------------------------------------------------------------------


def test_the_first_model_is_scikit_learns_logistic_regression(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_head, "L2", (L2,))
    stopped_run(config(weights), tmp_path, 1)
    body, model = Predictor(plainvit.load(weights, classes=0)), Predictor(tmp_path / "first")
    train, val = (open_source(SHAPES, split) for split in ("train", "val"))
    x, z = (body.features(body.stack([one.image(i) for i in range(len(one))])).double().numpy() for one in (train, val))
    mean, std = x.mean(0), x.std(0) + 1e-5
    reference = LogisticRegression(C=1 / (L2 * len(x)), tol=1e-8, max_iter=10_000)
    expected = reference.fit((x - mean) / std, train.labels).predict_proba((z - mean) / std)
    logits = model.logits(model.stack([val.image(i) for i in range(len(val))]))
    np.testing.assert_allclose(logits.softmax(-1).numpy(), expected, atol=1e-4)
    accuracy = float((expected.argmax(1) == val.labels).mean())
    assert read(tmp_path, "first.json")["top1"] == pytest.approx(accuracy)


KINDS = {
    "average": VIT.replace(pool="average", class_token=False),
    "distillation": VIT.replace(distillation=True),
    "representation": VIT.replace(representation=8),
    "map": VIT.replace(pool="attention", class_token=False),
    "resnet": ResNetConfig(blocks=(1, 1), image_size=(32, 32), classes=5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_gets_a_linear_head(kind: str, tmp_path: Path) -> None:
    """Its logits on a held-out batch are the head's weights times the features."""
    data = SHAPES.replace("16", "32") if kind == "resnet" else SHAPES
    out = stopped_run(config(save_weights(KINDS[kind], tmp_path), data=data), tmp_path / "run", 1)
    model = plainvit.load(out / "first")
    images = torch.randint(0, 256, (4, 3, *model.config.image_size), dtype=torch.uint8)
    assert model.head is not None
    assert model.head.weight.any()
    with torch.no_grad():
        torch.testing.assert_close(model(images), model.head(model.features(images)), rtol=1e-4, atol=1e-4)


def test_an_unfinished_run_has_the_first_model_to_predict_with(weights: str, tmp_path: Path) -> None:
    stopped_run(config(weights), tmp_path, 2)
    model, first = plainvit.load(tmp_path), plainvit.load(tmp_path / "first")
    assert model.about.class_names == open_source(SHAPES, "train").classes
    for name, tensor in first.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert next(line for line in read_metrics(tmp_path) if "val" in line)["step"] == 0


@pytest.mark.parametrize(("step", "ema"), [(1, 0.0), (2, 0.9), (4, 0.9)])
def test_resume_is_bit_exact_with_a_linear_head(weights: str, tmp_path: Path, step: int, ema: float) -> None:
    """Stopped before its first step, before and after its first checkpoint; the saved head is used."""
    run_config = config(weights, ema=ema)
    out = stopped_run(run_config, tmp_path / "run", step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_head, "fit_head", runs.fail())
        resumed = complete_run(run_config, out)
    assert resumed == complete_run(run_config, tmp_path / "whole")


@pytest.mark.parametrize(("first_top1", "final"), [(0.0, "trained"), (None, "first"), (1.0, "first")])
def test_the_better_model_on_held_out_images_is_final(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_top1: float | None, final: str
) -> None:
    """The first if they are equally good (None)."""
    choose = finalize.choose_model

    def choose_planted(run: Training, first: dict[str, Any]) -> Any:
        predictor = finalize.make_predictor(run.config, finalize.copy_model(run), "cpu", tmp_path)
        trained = finalize.classify(predictor, run.validation).top1
        first["top1"] = trained if first_top1 is None else first_top1
        return choose(run, first)

    monkeypatch.setattr(finalize, "choose_model", choose_planted)
    done = fit(config(weights, optim=Optim(lr=1e-2)), tmp_path, quiet=True)
    assert done.metrics["final"] == final
    assert done.metrics["chosen_on_val"] is True
    first, model = plainvit.load(tmp_path / "first").state_dict(), plainvit.load(tmp_path).state_dict()
    assert all(torch.equal(first[name], model[name]) for name in first) == (final == "first")
    assert len(list(finalize.describe_choice(done.metrics))) == 1


def test_without_held_out_images_the_trained_model_is_final(tmp_path: Path) -> None:
    weights = save_weights(VIT.replace(image_size=(8, 8)), tmp_path)
    done = fit(config(weights, data="digits:01", holdout=0.0), tmp_path / "run", quiet=True)
    assert "final" not in done.metrics
    assert "top1" not in read(tmp_path / "run", "first.json")


def test_a_class_with_one_image_has_a_linear_head(weights: str, tmp_path: Path) -> None:
    photos = str(plant_classes(tmp_path / "photos", {"cat": 1, "dog": 1}))
    done = fit(config(weights, data=photos, holdout=0.0, batch=2, steps=1), tmp_path / "run", quiet=True)
    assert done.metrics["steps"] == 1


@pytest.mark.parametrize("changes", [{"objective": "masked"}, {"init": "", "model": VIT.replace(classes=0)}])
def test_runs_without_a_pretrained_classifier_have_no_linear_head(weights: str, changes: dict[str, Any]) -> None:
    run_config = config(weights, **changes)
    assert complete_config(run_config, open_splits(run_config)).head == "zero"


# Time -----------------------------------------------------------------------------------------------------------------


class StubRun(SimpleNamespace):
    steps, set_length = Training.steps, Training.set_length


def test_the_length_of_a_run_follows_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a planted clock: 360 s for at most 500 steps, compiled in the first."""
    clock = [0.0]
    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    run: Any = StubRun(
        config=Config(steps=500, hours=0.1),
        progress=Progress(),
        seconds=0.0,
        average=None,
        world=SimpleNamespace(sum=lambda tensor: tensor, size=1, device="cpu"),
    )
    budget = TimeBudget(run)
    told: list[str] = []
    display: Any = SimpleNamespace(print_line=told.append)
    lengths = []
    for step, seconds in ((2, 60.0), (4, 64.0), (8, 68.0), (30, 134.0), (50, 154.0), (60, 154.5), (500, 200.0)):
        run.progress.step, clock[0] = step, seconds
        budget.fit_length(display)
        lengths.append(run.steps)
    # left at each pace: - (compiled), 296 s / 2, 292 s / 1, 226 s / 2 (mean of 1 and 3), 206 s / 1.5, ...
    assert lengths == [500, 152, 300, 143, 187, 325, 325]
    assert [[number in line for number in ("500", "152", "187", "325")] for line in told] == [
        [True, True, False, False],  # the first estimate; 300 and 143 are early or close to it
        [False, False, True, False],
        [False, False, False, True],
    ]
    assert display.total == 325


@pytest.mark.parametrize(("head", "warnings"), [("zero", 1), ("linear", 0)])
def test_too_few_steps_are_reported_once_and_not_after_a_first_result(head: Any, warnings: int) -> None:
    run: Any = StubRun(config=Config(steps=500, hours=0.1, head=head), progress=Progress(step=30), seconds=0.0)
    budget, told = TimeBudget(run), []
    budget.first, budget.pace = 0, 1.0
    for steps in (40, 30, 20):
        told.append(budget.describe_change(steps))
        run.progress.length = steps
    assert all(told)
    assert sum("too few" in line for line in told) == warnings


def test_a_run_that_is_out_of_time_ends_at_once(weights: str, tmp_path: Path) -> None:
    """After the first steps that it times, with an evaluation and final weights."""
    done = fit(config(weights, hours=1e-6, steps=100), tmp_path, quiet=True)
    assert (done.metrics["steps"], done.metrics["steps_planned"]) == (4, 100)
    assert read(tmp_path, "status.json")["steps"] == 4
    assert read_run_settings(tmp_path, read_card(tmp_path))["steps"] == 4  # what `plainvit compare` shows
    assert [line["step"] for line in read_metrics(tmp_path) if "val" in line] == [0, 4]


@pytest.mark.parametrize("steps", [1, 9])
def test_a_short_run_does_not_start_at_rate_zero(steps: int) -> None:
    assert learning_rate(Optim(lr=1.0, warmup=0.1), 0, steps) == 1.0
    assert learning_rate(Optim(lr=1.0, warmup=100), 0, steps, planned=1000) == 1.0


def test_warm_up_in_steps_shrinks_with_the_run() -> None:
    optim = Optim(lr=1.0, warmup=100, cooldown=50, schedule="constant")
    short = [learning_rate(optim, step, 100, planned=1000) for step in range(100)]
    assert short == [min(1, step / 10, (100 - step) / 5) for step in range(100)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("changes", "hours", "batch"),
    [
        ({}, CPU_HOURS, CPU_BATCH),
        ({"hours": 1.0}, 1.0, CPU_BATCH),
        ({"batch": 32}, CPU_HOURS, 32),
        ({"steps": 100}, 0.0, 64),
        ({"head": "zero"}, 0.0, 64),
    ],
)
def test_fine_tuning_on_a_cpu_has_a_time_limit_and_small_batches(
    weights: str, changes: dict[str, Any], hours: float, batch: int
) -> None:
    run_config = plainvit.recipe("finetune").replace(recipe="finetune", init=weights, data=SHAPES, **changes)
    resolved = complete_config(run_config, open_splits(run_config))
    assert (resolved.hours, resolved.batch) == (hours, batch)


def test_the_plan_is_printed_in_one_line(weights: str) -> None:
    model = VIT.replace(width=192, depth=12, heads=3, mlp_dim=768, classes=3)
    run_config = config(weights, model=model, hours=0.5, init="")
    splits = open_splits(run_config)
    assert splits.val
    plan = describe_plan(complete_config(run_config, splits), splits)
    assert f"{len(splits.train)} training images in 3 classes, {len(splits.val)} held out" in plan
    assert "ViT-Ti/4 at 16 px; 6 steps of 12, at most 30m00s" in plan


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "part"),
    [
        ({"cat": 4}, "only the class 'cat'"),
        ({"cat": 4, "dog": 0}, "cat"),
        ({"cat": 1, "dog": 1}, "--holdout 0"),
    ],
)
def test_images_that_no_classifier_can_learn_from_are_one_line(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], counts: dict[str, int], part: str
) -> None:
    photos = plant_classes(tmp_path / "photos", counts)
    for name in counts:
        (photos / name).mkdir(exist_ok=True)
    words = ["finetune", "--init", weights, "--data", photos, "--out", tmp_path / "run"]
    assert part in error_of(capsys, *words, code=3)
    assert not (tmp_path / "run").exists()


def test_fewer_images_than_classes_are_an_error(weights: str, tmp_path: Path) -> None:
    photos = plant_classes(tmp_path / "photos", {"ape": 2, "bee": 2})
    for name in ("cat", "dog", "elk", "fox"):
        (photos / name).mkdir()
    with pytest.raises(DataError, match="4 training images for 6 classes"):
        fit(config(weights, data=str(photos), holdout=0.0, batch=2, steps=1), tmp_path / "run")


def test_training_is_skipped_if_it_cannot_be_better(weights: str, tmp_path: Path) -> None:
    """All held-out photos of the first model are correct, and the first model wins ties. The run is complete."""
    for name, level in (("dark", 0), ("light", 200)):
        plant(tmp_path / "photos", {f"{name}/{i}.png": encode(noise(16, 16, i) // 5 + level) for i in range(12)})
    photos = config(weights, data=str(tmp_path / "photos"), holdout=0.25)
    fitted = fit(photos, tmp_path / "run", quiet=True)
    assert (fitted.metrics["steps"], fitted.metrics["final"]) == (0, "first")
    assert fitted.metrics["val"]["top1"] == 1.0
    assert read(tmp_path / "run", "status.json")["state"] == "done"
    assert fit(photos, tmp_path / "run", quiet=True).metrics == fitted.metrics  # nothing to do
