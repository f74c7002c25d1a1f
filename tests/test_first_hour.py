"""Fine-tuning in the first hour: a linear head first, an honest plan of the time, one line for bad input."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_runs as runs
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from small_runs import outcome

import plainvit
from plainvit.cli import main
from plainvit.config import Augment, Config, Optim, ResNetConfig, ViTConfig
from plainvit.data.decode import DataError
from plainvit.data.sources import open_source
from plainvit.data.splits import open_splits
from plainvit.evaluate.card import read_card, settings_of
from plainvit.evaluate.predictor import Predictor
from plainvit.models import build
from plainvit.runtime import display
from plainvit.runtime.folder import metrics
from plainvit.train import finalize, linear_head, loop, time_budget
from plainvit.train.run import describe_plan, fit
from plainvit.train.schedule import learning_rate
from plainvit.train.state import Progress, Training
from plainvit.train.time_budget import TimeBudget
from plainvit.train.transfer import CPU_BATCH, CPU_HOURS, resolve

SHAPES = "shapes:size=16,count=90,classes=3"
VIT = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=(4, 4), image_size=(16, 16), classes=5)
L2 = 1e-2


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.without_figures(monkeypatch)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_weights(VIT, tmp_path_factory.mktemp("weights"))


def save_weights(model: Any, folder: Path) -> str:
    path = folder / "weights.safetensors"
    plainvit.save(build(model).initialise(torch.Generator().manual_seed(0)), path)
    return str(path)


def config(weights: str, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "init": weights,
        "data": SHAPES,
        "head": "linear",
        "batch": 12,
        "steps": 6,
        "workers": 0,
    }
    settings |= {"augment": Augment(crop="none"), "optim": Optim(lr=1e-3), "evaluations": 2, "save_every": 2}
    return Config(**settings | changes)


class StoppedError(RuntimeError):
    """Raised where a test ends a run."""


def stop_before(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    step = loop.take_step

    def stopping(run: Training, *rest: Any) -> Any:
        if run.progress.step + 1 == number:
            raise StoppedError
        return step(run, *rest)

    monkeypatch.setattr(loop, "take_step", stopping)


def results(folder: Path, name: str = "results.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


# The first result -----------------------------------------------------------------------------------------------------


def test_the_first_model_is_scikit_learns_logistic_regression(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_head, "L2", (L2,))
    stop_before(monkeypatch, 1)
    with pytest.raises(StoppedError):
        fit(config(weights), tmp_path, quiet=True)
    body, model = Predictor(plainvit.load(weights, classes=0)), Predictor(tmp_path / "first")
    train, val = (open_source(SHAPES, split) for split in ("train", "val"))
    x, z = (body.features(body.stack([one.image(i) for i in range(len(one))])).double().numpy() for one in (train, val))
    mean, std = x.mean(0), x.std(0) + 1e-5
    reference = LogisticRegression(C=1 / (L2 * len(x)), tol=1e-8, max_iter=10_000)
    expected = reference.fit((x - mean) / std, train.labels).predict_proba((z - mean) / std)
    logits = model.logits(model.stack([val.image(i) for i in range(len(val))]))
    np.testing.assert_allclose(logits.softmax(-1).numpy(), expected, atol=1e-4)
    accuracy = float((expected.argmax(1) == val.labels).mean())
    assert results(tmp_path, "first.json")["top1"] == pytest.approx(accuracy)


RESNET = ResNetConfig(blocks=(1, 1), image_size=(32, 32), classes=5)
KINDS = {
    "average": VIT.replace(pool="average", class_token=False),
    "distillation": VIT.replace(distillation=True),
    "representation": VIT.replace(representation=8),
    "map": VIT.replace(pool="attention", class_token=False),
    "resnet": RESNET,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_gets_a_linear_head(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits on a held-out batch are the head's weights times the features."""
    stop_before(monkeypatch, 1)
    data = SHAPES.replace("16", "32") if kind == "resnet" else SHAPES
    with pytest.raises(StoppedError):
        fit(config(save_weights(KINDS[kind], tmp_path), data=data), tmp_path / "run", quiet=True)
    model = plainvit.load(tmp_path / "run" / "first")
    images = torch.randint(0, 256, (4, 3, *model.config.image_size), dtype=torch.uint8)
    assert model.head is not None
    assert model.head.weight.any()
    with torch.no_grad():
        torch.testing.assert_close(model(images), model.head(model.features(images)), rtol=1e-4, atol=1e-4)


def test_a_killed_run_leaves_the_first_model_to_predict_with(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_before(monkeypatch, 2)
    with pytest.raises(StoppedError):
        fit(config(weights), tmp_path, quiet=True)
    model, kept = plainvit.load(tmp_path), plainvit.load(tmp_path / "first")
    assert model.about.class_names == open_source(SHAPES, "train").classes
    for name, tensor in kept.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert next(line for line in metrics(tmp_path) if "val" in line)["step"] == 0


@pytest.mark.parametrize(("step", "ema"), [(1, 0.0), (2, 0.9), (4, 0.9)])
def test_resume_is_bit_exact_with_a_linear_head(weights: str, tmp_path: Path, step: int, ema: float) -> None:
    """Stopped before its first step, before and after its first checkpoint."""
    made = config(weights, ema=ema)
    fit(made, tmp_path / "whole", quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, step)
        with pytest.raises(StoppedError):
            fit(made, tmp_path / "run", quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_head, "fit_head", lambda *_: pytest.fail("the saved head is used"))
        fit(made, tmp_path / "run", quiet=True)
    found, expected = outcome(tmp_path / "run"), outcome(tmp_path / "whole")
    for numbers in (found, expected):
        numbers["results"]["first"].pop("seconds")
    assert found == expected


@pytest.mark.parametrize(("first_top1", "final"), [(0.0, "trained"), (None, "first"), (1.0, "first")])
def test_the_better_model_on_held_out_images_is_final(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_top1: float | None, final: str
) -> None:
    """The first if they are equally good (None)."""
    choose = finalize.choose_model

    def with_score(run: Training, made: finalize.First | None) -> Any:
        assert made
        trained = finalize.classify(
            finalize.make_predictor(run.config, finalize.copy_model(run), "cpu", tmp_path), run.validation
        ).top1
        made.results["top1"] = trained if first_top1 is None else first_top1
        return choose(run, made)

    monkeypatch.setattr(finalize, "choose_model", with_score)
    done = fit(config(weights, optim=Optim(lr=1e-2)), tmp_path, quiet=True)
    assert done.numbers["final"] == final
    assert done.numbers["chosen_on_val"] is True
    kept, model = plainvit.load(tmp_path / "first").state_dict(), plainvit.load(tmp_path).state_dict()
    assert all(torch.equal(kept[name], model[name]) for name in kept) == (final == "first")
    assert len(list(finalize.describe_choice(done.numbers))) == 1


def test_without_held_out_images_the_trained_model_is_final(tmp_path: Path) -> None:
    data = "digits:01"
    model = save_weights(VIT.replace(image_size=(8, 8)), tmp_path)
    done = fit(config(model, data=data, holdout=0.0), tmp_path / "run", quiet=True)
    assert "final" not in done.numbers
    assert "top1" not in results(tmp_path / "run", "first.json")


def test_a_class_with_one_image_has_a_linear_head(tmp_path: Path) -> None:
    plant(tmp_path / "photos", {"cat": 1, "dog": 1})
    made = config(save_weights(VIT, tmp_path), data=str(tmp_path / "photos"), holdout=0.0, batch=2, steps=1)
    assert fit(made, tmp_path / "run", quiet=True).numbers["steps"] == 1


@pytest.mark.parametrize("changes", [{"objective": "masked"}, {"init": "", "model": VIT.replace(classes=0)}])
def test_runs_without_a_pretrained_classifier_have_no_linear_head(weights: str, changes: dict[str, Any]) -> None:
    made = config(weights, **changes)
    assert resolve(made, open_splits(made)).head == "zero"


# Time -----------------------------------------------------------------------------------------------------------------


class StubRun(SimpleNamespace):
    steps, set_length = Training.steps, Training.set_length


def budget(
    monkeypatch: pytest.MonkeyPatch, *, asked: int, hours: float, step: float, head: str = "zero"
) -> tuple[TimeBudget, list[float]]:
    """A time budget on a clock that the test sets, where a step takes `step` seconds."""
    clock = [0.0]
    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(time_budget, "time_step", lambda _: step)
    monkeypatch.setattr(time_budget, "time_evaluation", lambda _: 0.0)
    run: Any = StubRun(
        config=Config(steps=asked, hours=hours, batch=8, evaluations=1, head=head),  # pyright: ignore
        progress=Progress(),
        quiet=True,
        world=SimpleNamespace(sum=lambda tensor: tensor, size=1, device="cpu"),
        folder=SimpleNamespace(write_status=lambda *_: None),
        is_compiled=False,
    )
    run.average = None
    return TimeBudget(run, 0.0), clock


class Said(SimpleNamespace):
    def tell(self, words: str) -> None:
        self.words = words


def test_a_plan_fits_the_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = budget(monkeypatch, asked=1000, hours=0.1, step=0.9)
    watch.plan()
    assert watch.run.progress.length == 380  # 95 % of 360 s
    watch, _ = budget(monkeypatch, asked=100, hours=0.1, step=0.9)
    watch.plan()
    assert watch.run.progress.length is None


@pytest.mark.parametrize(("head", "steps"), [("zero", 1), ("linear", 0)])
def test_without_time_a_linear_head_needs_no_step(monkeypatch: pytest.MonkeyPatch, head: str, steps: int) -> None:
    watch, _ = budget(monkeypatch, asked=100, hours=0.001, step=60.0, head=head)
    watch.plan()
    assert watch.run.progress.length == steps


def test_a_run_is_shortened_and_lengthened_up_to_the_length_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, clock = budget(monkeypatch, asked=500, hours=0.1, step=0.9)
    watch.plan()
    progress, said = watch.run.progress, Said()
    lengths = []
    for step, seconds in ((10, 10.0), (20, 50.0), (30, 55.0), (40, 55.2), (progress.length, 60.0)):
        progress.step, clock[0] = step, seconds
        watch.replan(said)  # pyright: ignore
        lengths.append(progress.length)
    # 350 more fit at 1 s per step, 124 at 2.5 s (the mean of 1 and 4), 203 at 1.5 s, ...; 500 were asked for
    assert lengths == [360, 144, 233, 441, 500]
    assert said.total == 500


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_a_short_run_does_not_begin_at_rate_zero(steps: int) -> None:
    assert learning_rate(Optim(lr=1.0, warmup=0.1), 0, steps) == 1.0
    assert learning_rate(Optim(lr=1.0, warmup=100), 0, steps, asked=1000) == 1.0


def test_warm_up_in_steps_shrinks_with_the_run() -> None:
    optim = Optim(lr=1.0, warmup=100, cooldown=50, schedule="constant")
    short = [learning_rate(optim, step, 100, asked=1000) for step in range(100)]
    assert short == [min(1, step / 10, (100 - step) / 5) for step in range(100)]


def test_the_results_and_the_card_have_the_steps_that_were_taken(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_budget, "time_step", lambda _: 3600 / 4.2)
    monkeypatch.setattr(time_budget, "time_evaluation", lambda _: 0.0)
    done = fit(config(weights, hours=1.0, head="zero"), tmp_path, quiet=True)
    assert (done.numbers["steps"], done.numbers["steps_asked"]) == (3, 6)
    assert results(tmp_path, "status.json")["steps"] == 3
    assert settings_of(tmp_path, read_card(tmp_path))["steps"] == 3  # what `plainvit compare` shows


# The plan -------------------------------------------------------------------------------------------------------------


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
    made = plainvit.recipe("finetune").replace(recipe="finetune", init=weights, data=SHAPES, **changes)
    found = resolve(made, open_splits(made))
    assert (found.hours, found.batch) == (hours, batch)


def test_the_plan_is_said_in_one_line(weights: str) -> None:
    made = config(weights, model=VIT.replace(width=192, depth=12, heads=3, mlp_dim=768, classes=3), hours=0.5, init="")
    splits = open_splits(made)
    assert splits.val
    said = describe_plan(resolve(made, splits), splits)
    assert f"{len(splits.train)} training images in 3 classes, {len(splits.val)} held out" in said
    assert "ViT-Ti/4 at 16 px; 6 steps of 12, at most 30m00s" in said


def test_long_work_says_what_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    timers: list[Any] = []

    def timer(_: float, call: Any) -> SimpleNamespace:
        timers.append(SimpleNamespace(start=call, cancel=lambda: None))
        return timers[-1]

    monkeypatch.setattr(display.threading, "Timer", timer)
    with display.show_activity("counting stars"):
        pass
    with display.show_activity("counting sheep", quiet=True):
        pass
    assert capsys.readouterr().err == "counting stars ...\n"


# Bad input ------------------------------------------------------------------------------------------------------------


def plant(folder: Path, counts: dict[str, int]) -> None:
    random = np.random.default_rng(0)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / name / f"{number}.png")


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
    plant(tmp_path / "photos", counts)
    words = ["finetune", "--init", weights, "--data", str(tmp_path / "photos"), "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as caught:
        main(words)
    errors = capsys.readouterr().err
    assert caught.value.code == 3
    assert errors.startswith("plainvit: ")
    assert errors.count("\n") == 1
    assert part in errors
    assert not (tmp_path / "run").exists()


def test_fewer_images_than_classes_are_an_error(weights: str, tmp_path: Path) -> None:
    plant(tmp_path / "photos", {"ape": 2, "bee": 2, "cat": 0, "dog": 0, "elk": 0, "fox": 0})
    made = config(weights, data=str(tmp_path / "photos"), holdout=0.0, batch=2, steps=1)
    with pytest.raises(DataError, match="4 training images for 6 classes"):
        fit(made, tmp_path / "run")
