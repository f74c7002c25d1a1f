"""Evaluation restores the mode of the model, also after an exception, and reports NaN and Inf outputs as errors."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import small_runs as runs
import tiny
import torch
from pictures import encode, plant
from small_runs import StoppedError, read_metrics, status
from torch import Tensor, nn

from plainvit.analyse import attention, explorer
from plainvit.config import Augment, Masked, Preprocess
from plainvit.data.sources import open_source
from plainvit.data.splits import open_splits
from plainvit.evaluate import probe
from plainvit.evaluate.classify import EvaluationSet, classify
from plainvit.evaluate.features import extract
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT
from plainvit.models.inference import NonFiniteError
from plainvit.runtime.folder import Folder
from plainvit.train import setup
from plainvit.train.finalize import make_trained_model
from plainvit.train.masked_objective import PredictPatches, evaluate_masked
from plainvit.train.nonfinite import DivergedError
from plainvit.train.run import fit
from plainvit.train.setup import build_training
from plainvit.train.state import averaged_weights
from plainvit.train.transfer import complete_config

SIZE = (24, 40)
IMAGES = 6


def pixels(index: int, bad: tuple[int, ...]) -> np.ndarray:
    """White for the images whose outputs will not be finite."""
    if index in bad:
        return np.full((*SIZE, 3), 255, np.uint8)
    return np.random.default_rng(index).integers(0, 200, (*SIZE, 3), dtype=np.uint8)


def plant_images(folder: Path, bad: tuple[int, ...]) -> Path:
    files = {f"test/{'ab'[index % 2]}/{index}.png": encode(pixels(index, bad)) for index in range(IMAGES)}
    return plant(folder, files)


def stack_images(bad: tuple[int, ...] = ()) -> Tensor:
    return torch.stack([torch.from_numpy(pixels(index, bad)).permute(2, 0, 1) for index in range(IMAGES)])


def make_model(value: float = float("nan")) -> ViT:
    """A model whose tokens are `value` for a white image."""
    model = tiny.vit(torch.float32, depth=2, classes=2)

    def spoil(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        white = inputs[0].flatten(1).amin(1) > 0.99
        return torch.where(white.view(-1, *[1] * (out.ndim - 1)), value, out)

    model.embedding.register_forward_hook(spoil)
    return model


def score_folder(model: ViT, folder: Path) -> object:
    source = open_source(str(folder), "test")
    return classify(Predictor(model, device="cpu"), EvaluationSet(source, SIZE, Preprocess(), batch=4))


def call_predictor(model: ViT, folder: Path) -> object:
    files = [folder / f"test/{'ab'[index % 2]}/{index}.png" for index in range(IMAGES)]
    return Predictor(model, device="cpu")(files, k=2)


def extract_features(model: ViT, folder: Path) -> object:
    return extract(Predictor(model, device="cpu", batch=4), open_source(str(folder), "test"), quiet=True)


NAMED: dict[str, Callable[[ViT, Path], object]] = {
    "classify": score_folder,
    "Predictor": call_predictor,
    "extract": extract_features,
}
ALL = tuple(range(IMAGES))


# Values that are not finite -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "bad"),
    [
        ("classify", math.nan, (4,)),
        ("classify", math.inf, ALL),
        ("Predictor", math.inf, (4,)),
        ("extract", math.nan, ALL),
    ],
)
def test_non_finite_outputs_are_counted_and_named(
    name: str, value: float, bad: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteError) as caught:
        NAMED[name](make_model(value), plant_images(tmp_path, bad))
    assert caught.value.images == len(bad)
    assert f"{len(bad)} of {IMAGES} " in str(caught.value)
    assert f"{'ab'[bad[0] % 2]}/{bad[0]}.png" in str(caught.value)


@pytest.mark.parametrize(("precision", "advice"), [("fp32", "; use other"), ("bf16", "; use --precision fp32")])
def test_fp32_is_advised_where_the_outputs_are_of_bf16(precision: Any, advice: str, tmp_path: Path) -> None:
    predictor = Predictor(make_model(math.inf), device="cpu", precision=precision)
    with pytest.raises(NonFiniteError, match=advice):
        predictor(sorted(plant_images(tmp_path, (4,)).rglob("*.png")))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_probes_fail_on_non_finite_features(value: float) -> None:
    good, labels = torch.randn(20, 4), torch.arange(20) % 2
    bad = good.clone()
    bad[7, 1] = value
    fits: list[Callable[[Tensor, Tensor], object]] = [
        lambda a, b: probe.least_squares(a, labels, 2).predict(b),
        lambda a, b: probe.neighbors(a, labels, 2, b, ks=(1,)),
        lambda a, b: probe.logistic(a, labels, 2, l2=0.1).predict(b),
    ]
    for use in fits:
        use(good, good)
        for pair in ((bad, good), (good, bad)):
            with pytest.raises(NonFiniteError) as caught:
                use(*pair)
            assert caught.value.images == 1


# In training ----------------------------------------------------------------------------------------------------------


def fail_validations(monkeypatch: pytest.MonkeyPatch, which: set[int]) -> None:
    """These calls of classify, counted from 1, raise NonFiniteError."""
    calls = 0

    def sometimes(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in which:
            raise NonFiniteError("the model's logits are NaN or Inf for 3 of 36 images", 3)
        return classify(*arguments)

    monkeypatch.setattr(setup, "classify", sometimes)


def test_a_non_finite_validation_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.without_figures(monkeypatch)
    fail_validations(monkeypatch, {1, 3})
    fit(runs.config(steps=12, evaluations=4), tmp_path, quiet=False)
    validations = {line["step"]: line["val"] for line in read_metrics(tmp_path) if "val" in line}
    assert {step: val.get("non_finite") for step, val in validations.items()} == {3: 3, 6: None, 9: 3, 12: None}
    assert all(("top1" in val) != ("non_finite" in val) for val in validations.values())
    said = [line for line in capsys.readouterr().err.splitlines() if "validation" in line]
    assert ["best so far" in line for line in said[:2]] == [False, True]
    assert status(tmp_path)["state"] == "done"


def test_patience_never_takes_the_weights_of_a_non_finite_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.without_figures(monkeypatch)
    fail_validations(monkeypatch, {2, 3})
    done = fit(runs.config(steps=12, evaluations=4, patience=2), tmp_path, quiet=True)
    assert [line["step"] for line in read_metrics(tmp_path) if "val" in line] == [3, 6, 9]  # two that are no better
    assert done.metrics["val"]["top1"] == metrics_at(tmp_path, 3)["top1"]


def metrics_at(folder: Path, step: int) -> dict[str, float]:
    return next(line["val"] for line in read_metrics(folder) if line["step"] == step and "val" in line)


def test_final_weights_with_non_finite_outputs_are_a_diverged_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.without_figures(monkeypatch)

    def explode(run: Any) -> Any:
        model = make_trained_model(run)
        for name, parameter in model.named_parameters():
            if name.startswith("head"):
                parameter.data.fill_(3e38)
        return model

    monkeypatch.setattr("plainvit.train.finalize.make_trained_model", explode)
    with pytest.raises(DivergedError):
        fit(runs.config(steps=2), tmp_path, quiet=True)
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("diverged", 4)
    assert not (tmp_path / "results.json").exists()


def test_a_non_finite_loss_of_hidden_patches_is_an_error(tmp_path: Path) -> None:
    masked = {"objective": "mae", "ema": 0.0, "masked": Masked(depth=1, width=16, heads=2)}
    config = runs.config(augment=Augment(crop="none"), **masked)
    splits = open_splits(config)
    with Folder(tmp_path / "run") as folder:
        run = build_training(complete_config(config, splits), splits, folder, quiet=True)
    run.objective.model.norm.bias.data.fill_(float("nan"))
    assert isinstance(run.objective, PredictPatches)
    assert run.validation
    with pytest.raises(NonFiniteError):
        evaluate_masked(run.objective, run.validation)


# The mode of the caller's model ---------------------------------------------------------------------------------------

EVALUATED: dict[str, Callable[[ViT, Tensor], object]] = {
    "classify": lambda model, _: classify(
        Predictor(model, device="cpu"),
        EvaluationSet(open_source("shapes:count=2,classes=2", "test"), SIZE, Preprocess()),
    ),
    "logits": lambda model, images: Predictor(model, device="cpu").logits(images),
    "features": lambda model, images: Predictor(model, device="cpu").features(images),
    "distance": attention.attention_distance,
    "rollout": attention.rollout,
    "maps": attention.attention_maps,
    "relevance": attention.relevance,
    "views": lambda model, images: explorer.compute_views(model, images[0], explorer.plan_explorer(model, 1)),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_restores_the_mode_of_every_module(name: str, fails: bool) -> None:
    """Also if it raises; parts of a model may be in different modes."""
    model, seen = tiny.vit(torch.float32, depth=2, classes=2).train(), []
    model.embedding.eval()

    def look(module: nn.Module, _: object) -> None:
        seen.append(module.training)
        if fails:
            raise StoppedError

    model.blocks[1].register_forward_pre_hook(look)
    before = [module.training for module in model.modules()]
    with pytest.raises(StoppedError) if fails else nullcontext():
        EVALUATED[name](model, stack_images())
    assert [module.training for module in model.modules()] == before
    assert set(seen) == {False}


# Other state of the process or of the model ---------------------------------------------------------------------------


def test_averaged_weights_that_do_not_fit_leave_the_models_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrong = {name: torch.zeros(3) if name == "1.bias" else tensor + 1 for name, tensor in own.items()}
    with pytest.raises(RuntimeError), averaged_weights(model, cast(Any, SimpleNamespace(weights=wrong))):
        pass
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())
