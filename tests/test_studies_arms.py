"""Arms of every study: they can be run, differ in one setting, share runs, and are matched in compute."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from verdicts import along, plant

from plainvit.config import Config, Model, ViTConfig, differences
from plainvit.models import build
from plainvit.models.masked import check_maskable
from plainvit.planning import cost
from plainvit.studies import compute, data_size, scaling, speed
from plainvit.studies.base_configs import complete_model
from plainvit.studies.claims import BUDGETS, Budget
from plainvit.studies.plans import Plan, first_seed
from plainvit.studies.registry import studies

ALL = studies()


@cache
def check_buildable(model: Model) -> None:
    with torch.device("meta"):
        build(model)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ALL)
def test_every_arm_can_be_run(name: str, budget: Budget) -> None:
    arms = ALL[name].arms(budget)
    assert len(Plan(ALL[name], arms, 1, Path()).jobs) == len(arms)
    assert len({first_seed(arms, arm) for arm in arms}) == len(arms), "no two arms are the same runs"
    for arm in arms.values():
        config = arm.config
        assert (config.model is None) == bool(arm.parent or config.init)
        assert config.optim.warmup < (config.steps or math.inf)
        if config.model:
            check_buildable(config.model)
        if config.objective != "classify":
            check_maskable(config.model, config.objective, config.masked)
        if arm.is_trained:
            assert config.steps or config.epochs
            assert config.holdout or config.data.startswith("shapes"), "compared on held-out images"


ONE_SETTING: list[tuple[str, str, str, set[str]]] = [
    ("positions", "none", "1-D", {"model.posemb"}),
    ("position-places", "1-D, stem", "1-D, shared", {"model.posemb_at"}),
    ("stochastic-depth", "neither", "dropout", {"model.dropout"}),
    ("stochastic-depth", "neither", "stochastic depth", {"model.stochastic_depth"}),
    ("activation", "ReLU", "GELU", {"model.activation"}),
    ("axial", "plain", "axial", {"model.axial"}),
    ("averaging", "last weights", "averaged", {"ema_window"}),
    ("masked", "masked, before", "supervised, before", {"objective"}),
    ("regularization", "decay 0, dropout 0", "decay 0.3, dropout 0.1", {"optim.weight_decay", "model.dropout"}),
]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("name", "one", "other", "changed"), ONE_SETTING)
def test_arms_differ_in_one_setting(name: str, one: str, other: str, changed: set[str], budget: Budget) -> None:
    arms = ALL[name].arms(budget)
    assert set(differences(arms[one].config, arms[other].config)) == changed


def test_fine_tunings_differ_only_in_their_start_and_rate() -> None:
    for name in ("masked", "masked-steps", "few-shot", "resnet-optimizer", "averaging"):
        tuned = [arm.config for arm in ALL[name].arms("gpu").values() if arm.parent]
        for config in tuned:
            assert set(differences(tuned[0], config)) <= {"optim.lr", "ema_window", "data"}, name


@pytest.mark.parametrize("budget", BUDGETS)
def test_kinds_are_matched_in_compute(budget: Budget) -> None:
    """Each size is about twice the one before, and the kinds cost the same at each size."""
    arms = ALL["compute"].arms(budget)
    for size in compute.SIZES:
        places = [arms[f"{kind} {size}"].x for kind in compute.KINDS]
        assert max(places) / min(places) < 1.12
    for kind in compute.KINDS:
        small, medium, large = (arms[f"{kind} {size}"].x for size in compute.SIZES)
        assert 1.5 < medium / small < 2.3
        assert 1.8 < large / medium < 2.1
    config = arms["ViT medium"].config
    macs = cost.macs(build(complete_model(config)).config)
    assert arms["ViT medium"].x == pytest.approx(6 * macs * config.steps * config.batch / 1e15)
    kinds = data_size.models_by_kind(budget)
    assert cost.macs(kinds["ResNet"]) == pytest.approx(cost.macs(kinds["ViT"]), rel=0.12)


def test_models_are_compared_at_equal_compute() -> None:
    """A point on the line between two ViTs is neither above nor below them."""
    study = ALL["hybrids"]
    arms = study.arms("cpu")
    results = plant(study, {name: math.log2(arm.x) / 100 + 1 for name, arm in arms.items()}, spread=0)
    weights = compute.lead_over_vit(results, "hybrid medium")
    assert sum(weight * results.mean(arm) for arm, weight in weights.items()) == pytest.approx(0, abs=1e-12)


def test_more_parameters_than_allowed_contradict() -> None:
    study = ALL["patch-size"]
    results = plant(study, along(study, {"base": (0.7, 0.6, 0.5)}))
    first, arm = next(iter(results.arms.items()))
    wide = arm.config.replace(model=arm.config.model.replace(mlp_dim=256))
    results.arms[first] = scaling.Arm(wide, x=arm.x, group=arm.group)
    assert study.decide(results).outcome == "contradicted"


# Speed ----------------------------------------------------------------------------------------------------------------


def test_the_largest_batch_is_extrapolated() -> None:
    assert speed.extrapolate_batch({2: 120.0, 6: 160.0}, 1000.0) == 90  # 100 and 10 an image
    assert speed.extrapolate_batch({2: 120.0, 6: 160.0}, 50.0) == 0


def test_speed_is_measured() -> None:
    model = ViTConfig(width=32, depth=1, heads=2, mlp_dim=32, patch=(8, 8), image_size=(16, 16), classes=5)
    found = speed.measure(Config(model=model, batch=4, device="cpu"), speed.Path())
    assert found["images_per_second"] > 0
    assert found["largest_batch"] > 1000
