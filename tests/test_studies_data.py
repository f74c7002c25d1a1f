"""Studies of positions' places, data and model size, regularisation and pooling: rules both ways, arms, measures."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import small_runs as runs
import torch
import verdicts
from sklearn.datasets import load_digits

import plainvit
from plainvit.config import differences
from plainvit.data.splits import open_splits
from plainvit.models import build
from plainvit.planning.cost import macs
from plainvit.studies import data_size, pooling, positions, regularisation
from plainvit.studies.bases import base
from plainvit.studies.runs import run_hash
from plainvit.studies.study import BUDGETS, Budget, Results, Study, hash_definition, order_stages
from plainvit.train.run import fit

DATA_SIZE, OVERFITTING, MODEL_SIZE = data_size.STUDIES
ALL = [*positions.STUDIES, *data_size.STUDIES, *regularisation.STUDIES, *pooling.STUDIES]


def planted(study: Study, means: dict[str, float], seeds: int = 3) -> Results:
    """Each arm's seeds around the given mean, every other arm's the other way round; what is not named has ''."""
    arms = {name: arm for name, arm in study.arms("cpu").items() if arm.counts}
    cost = {"million_macs": 1.0, "million_parameters": 1.0}
    values: dict[str, list[dict[str, float]]] = {}
    for at, arm in enumerate(arms):
        mean, noise = means.get(arm, means.get("", 0.0)), 0.001 * (-1) ** at * np.linspace(-1, 1, seeds)
        values[arm] = [{study.metric: mean + one} | cost for one in noise.tolist()]
    return Results(arms, values, study.metric)


check = partial(verdicts.check, planted)


# Rules ----------------------------------------------------------------------------------------------------------------


def test_places_of_positions() -> None:
    study = positions.PLACES_STUDY
    check(study, {"": 0.9}, "reproduced")
    check(study, {"": 0.9, "2-D, shared": 0.893}, "reproduced")  # seven tenths of a point
    check(study, {"": 0.9, "1-D, every layer": 0.88}, "not reproduced")
    check(study, {"": 0.9, "2-D, every layer": 0.92}, "not reproduced")  # better is not the same either
    noisy = planted(study, {"": 0.9})
    noisy.values["2-D, every layer"] = [{"top1": one} for one in (0.80, 0.95, 0.80)]
    assert study.decide(noisy).outcome == "not decided"  # five points away, or none


def shares(gaps: tuple[float, ...]) -> dict[str, float]:
    """The ViT rises; the ResNet is ahead by the gaps."""
    names = ("5 %", "10 %", "25 %", "100 %")
    vit = {f"ViT, {name}": 0.3 + 0.1 * at for at, name in enumerate(names)}
    return vit | {f"ResNet, {name}": vit[f"ViT, {name}"] + one for name, one in zip(names, gaps, strict=True)}


def test_data_size() -> None:
    assert "5 %: +10.00" in check(DATA_SIZE, shares((0.1, 0.07, 0.03, 0.01)), "reproduced").why
    check(DATA_SIZE, shares((0.1, 0.03, 0.07, -0.05)), "reproduced")  # a rank correlation of -0.8
    assert DATA_SIZE.decide(planted(DATA_SIZE, shares((0.1, 0.12, 0.03, 0.2)))).outcome == "not reproduced"
    assert DATA_SIZE.decide(planted(DATA_SIZE, shares((-0.1, -0.2, -0.3, -0.4)))).outcome == "not reproduced"
    assert DATA_SIZE.decide(planted(DATA_SIZE, shares((0.0, -0.1, -0.2, -0.3)))).outcome == "not decided"


def test_overfitting() -> None:
    vit = {f"ViT, {name}": 0.3 for name in ("5 %", "10 %", "25 %")}
    check(OVERFITTING, vit | {"": 0.2}, "reproduced")
    assert OVERFITTING.decide(planted(OVERFITTING, vit | {"": 0.2, "ViT, 10 %": 0.1})).outcome == "not reproduced"
    assert OVERFITTING.decide(planted(OVERFITTING, {"": 0.2})).outcome == "not decided"


def test_model_size() -> None:
    check(
        MODEL_SIZE, {"small, 10 %": 0.5, "large, 10 %": 0.48, "small, 100 %": 0.7, "large, 100 %": 0.75}, "reproduced"
    )
    check(MODEL_SIZE, {"small, 10 %": 0.5, "large, 10 %": 0.5, "small, 100 %": 0.7, "large, 100 %": 0.75}, "reproduced")
    for wrong in (
        {"small, 10 %": 0.5, "large, 10 %": 0.55, "small, 100 %": 0.7, "large, 100 %": 0.8},  # ahead at once
        {"small, 10 %": 0.5, "large, 10 %": 0.48, "small, 100 %": 0.7, "large, 100 %": 0.65},  # and further behind
    ):
        assert MODEL_SIZE.decide(planted(MODEL_SIZE, wrong)).outcome == "not reproduced"
    assert MODEL_SIZE.decide(planted(MODEL_SIZE, {"": 0.5})).outcome == "not decided"


def test_regularisation() -> None:
    study = regularisation.STUDY
    assert "decay 0.1, dropout 0.1" in check(study, {"": 0.5, "decay 0.1, dropout 0.1": 0.6}, "reproduced").why
    assert study.decide(planted(study, {"": 0.5, regularisation.NONE: 0.6})).outcome == "not reproduced"
    wild = planted(study, {"": 0.5})
    wild.values[regularisation.NONE] = [{"top1": one} for one in (0.4, 0.55, 0.62)]
    assert study.decide(wild).outcome == "not decided"


def pooled(token: tuple[float, ...], average: tuple[float, ...]) -> dict[str, float]:
    rates = pooling.rates("cpu")
    both = {"class token": token, "average": average}
    return {f"{name}, {lr:.1e}": one for name, row in both.items() for lr, one in zip(rates, row, strict=True)}


def test_pooling() -> None:
    study = pooling.STUDY
    check(study, pooled((0.7, 0.8, 0.6), (0.803, 0.7, 0.6)), "reproduced")
    check(study, pooled((0.7, 0.8, 0.6), (0.7, 0.803, 0.6)), "reproduced")
    assert "+3.00" in study.decide(planted(study, pooled((0.7, 0.8, 0.6), (0.83, 0.7, 0.6)))).why
    for wrong in (((0.7, 0.8, 0.6), (0.83, 0.7, 0.6)), ((0.7, 0.8, 0.6), (0.6, 0.7, 0.8))):  # better; a higher rate
        assert study.decide(planted(study, pooled(*wrong))).outcome == "not reproduced"
    unsure = planted(study, pooled((0.7, 0.8, 0.6), (0.8, 0.7, 0.6)))
    unsure.values[f"average, {pooling.rates('cpu')[0]:.1e}"] = [{"top1": one} for one in (0.95, 0.80, 0.75)]
    assert study.decide(unsure).outcome == "not decided"
    near = planted(study, pooled((0.7, 0.8, 0.6), (0.8, 0.7, 0.6)))
    near.values[f"average, {pooling.rates('cpu')[0]:.1e}"] = [{"top1": one} for one in (0.815, 0.80, 0.785)]
    assert study.decide(near).outcome == "not decided"  # the means are equal, and 1.7 points are left open


# Arms -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("study", ALL, ids=lambda study: study.name)
def test_every_arm_is_a_run(study: Study, budget: Budget) -> None:
    """Each config is a valid one, no two are the same run, and their models can be built."""
    arms = study.arms(budget)
    assert len(hash_definition(arms)) == 16
    assert sum(map(len, order_stages(arms))) == len(arms)
    assert len({(run_hash(arm.config), arm.after) for arm in arms.values()}) == len(arms)
    for arm in arms.values():
        assert arm.after or arm.config.model
        assert arm.config.steps or arm.config.epochs
        assert not arm.counts or arm.config.holdout, "compared on held-out images"
        if arm.config.model:
            with torch.device("meta"):
                assert build(arm.config.model)
    if budget == "gpu":
        assert len(arms) <= 8


@pytest.mark.parametrize("budget", BUDGETS)
def test_arms_differ_in_one_thing(budget: Budget) -> None:
    sizes = data_size.arms(budget)
    for name, arm in sizes.items():
        whole = sizes[f"{arm.group}, 100 %"].config
        assert differences(whole, arm.config).keys() <= {"train_fraction"}, name
        assert differences(sizes["ViT, 100 %"].config, arm.config).keys() <= {"train_fraction", "model.kind"}, name
    small = data_size.small_arms(budget)
    assert {name: run_hash(arm.config) for name, arm in small.items()}.items() <= {
        name: run_hash(arm.config) for name, arm in sizes.items()
    }.items()
    grid = regularisation.arms(budget)
    for arm in grid.values():
        changed = differences(grid[regularisation.NONE].config, arm.config)
        assert changed.keys() <= {"model.dropout", "optim.weight_decay"}
    places = positions.place_arms(budget)
    assert differences(places["1-D, stem"].config, places["1-D, shared"].config).keys() == {"model.posemb_at"}


@pytest.mark.parametrize("budget", ["cpu", "gpu"])
def test_runs_are_shared(budget: Budget) -> None:
    """The base is an arm of several studies, and the ViTs of data-size of model-size."""
    one = run_hash(base(budget))
    for study in (positions.STUDY, positions.PLACES_STUDY, pooling.STUDY):
        assert one in {run_hash(arm.config) for arm in study.arms(budget).values()}, study.name
    both = [{run_hash(arm.config) for arm in make(budget).values()} for make in (data_size.arms, data_size.size_arms)]
    assert len(both[0] & both[1]) == 2


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_resnet_costs_what_the_vit_does(budget: Budget) -> None:
    arms = data_size.arms(budget)
    vit, resnet = (arms[f"{name}, 100 %"].config.model for name in ("ViT", "ResNet"))
    assert vit is not None
    assert resnet is not None
    assert macs(resnet) == pytest.approx(macs(vit), rel=0.1)


# Measurements ---------------------------------------------------------------------------------------------------------


def test_overfitting_is_measured_on_the_images_that_were_trained_on(tmp_path: Path) -> None:
    """Against scikit-learn's copy of the digits and a plain forward pass; of half of the training images."""
    made = runs.config(steps=40, batch=32, train_fraction=0.5, evaluations=1, device="cpu")
    fit(made, tmp_path / "run", quiet=True, bare=True)
    found = data_size.measure_overfitting(made, tmp_path / "run")
    train = open_splits(made).train
    numbers = [int(train.name(index).removeprefix("digits-")) for index in range(len(train))]
    assert len(numbers) == pytest.approx(0.5 * 0.95 * 1437, abs=10)
    digits = load_digits()
    pixels = (digits.images[numbers] * (255 / 16)).round().astype(np.uint8)
    images = torch.from_numpy(pixels)[:, None].repeat(1, 3, 1, 1)
    with torch.no_grad():
        guesses = plainvit.load(tmp_path / "run").eval()(images).argmax(1).numpy()
    right = float((guesses == digits.target[numbers]).mean())
    assert found["train"] == pytest.approx(right, abs=2 / len(numbers))
    assert found["overfitting"] == pytest.approx(found["train"] - found["top1"])
    assert found["top1"] == data_size.held_out(made, tmp_path / "run")["top1"]


def test_few_shot_is_on_other_classes(tmp_path: Path) -> None:
    arm = data_size.arms("cpu")["ViT, 25 %"]
    made = arm.config.replace(steps=4, evaluations=1, device="cpu")
    fit(made, tmp_path / "run", quiet=True, bare=True)
    found = data_size.measure(made, tmp_path / "run")
    assert data_size.transfer_config(made).data == "digits:56789"
    assert 0.2 < found["few_shot"] <= 1, "above chance: even features of hardly trained weights tell digits difference"
    assert found["million_macs"] == pytest.approx(1.68, abs=0.01)
    assert data_size.transfer_config(data_size.arms("gpu")["ViT, 25 %"].config).data == "cifar10"
