"""Studies of choices inside a block: rules on planted results, each way; arms that differ in one thing."""

import numpy as np
import pytest
import torch

from plainvit.config import differences
from plainvit.models import build
from plainvit.studies import choices, compute
from plainvit.studies.bases import base
from plainvit.studies.study import BUDGETS, Budget, Results, Study, hash_definition

every_study = pytest.mark.parametrize("study", choices.STUDIES, ids=lambda study: study.name)


def planted(study: Study, means: dict[str, float], spread: float = 0.001, seeds: int = 3) -> Results:
    angles = 2 * np.pi * np.arange(seeds) / seeds + np.arange(len(means))[:, None]
    noise = spread * np.cos(angles)  # of mean 0 over the seeds, as are all differences: equal means decide nothing
    values = {arm: [{"top1": mean + one} for one in row] for (arm, mean), row in zip(means.items(), noise, strict=True)}
    return Results({arm: study.arms("cpu")[arm] for arm in means}, values)


@pytest.mark.parametrize("budget", BUDGETS)
@every_study
def test_every_arm_can_be_run(study: Study, budget: Budget) -> None:
    arms = study.arms(budget)
    assert hash_definition(arms) == hash_definition(study.arms(budget))
    for arm in arms.values():
        assert arm.config.model
        assert arm.config.holdout
        with torch.device("meta"):
            build(arm.config.model)


@every_study
def test_the_base_is_among_the_arms(study: Study) -> None:
    """So that its run is shared; of the norm's place, the ViT of `compute` with which it is compared."""
    shared = compute.arms("gpu")["ViT medium"].config if study is choices.NORM_PLACE else base("gpu")
    assert shared in [arm.config for arm in study.arms("gpu").values()]


@pytest.mark.parametrize(
    ("study", "first", "second", "wanted"),
    [
        (choices.NORM_PLACE, "pre", "post", {"model.norm"}),
        (choices.NORM_PLACE, "pre", "pre, no warm-up", {"optim.warmup", "max_skipped_steps"}),
        (choices.NORM_PLACE, "pre, no warm-up", "post, no warm-up", {"model.norm"}),
        (choices.STOCHASTIC_DEPTH, "neither", "dropout", {"model.dropout"}),
        (choices.STOCHASTIC_DEPTH, "neither", "stochastic depth", {"model.stochastic_depth"}),
        (choices.ACTIVATION, "ReLU", "GELU", {"model.activation"}),
    ],
)
@pytest.mark.parametrize("budget", BUDGETS)
def test_arms_differ_in_one_thing(study: Study, first: str, second: str, wanted: set[str], budget: Budget) -> None:
    arms = study.arms(budget)
    assert set(differences(arms[first].config, arms[second].config)) == wanted


@pytest.mark.parametrize(
    ("means", "outcome"),
    [
        ((0.70, 0.69, 0.69, 0.40), "reproduced"),
        ((0.70, 0.69, 0.40, 0.69), "not reproduced"),  # post-norm is the one that needs none
        ((0.70, 0.50, 0.60, 0.55), "not reproduced"),  # better without warm-up, but it is pre-norm that misses it
        ((0.70, 0.70, 0.60, 0.60), "not decided"),
    ],
)
def test_the_norms_place_is_decided_by_its_rule(means: tuple[float, ...], outcome: str) -> None:
    names = ("pre", "post", "pre, no warm-up", "post, no warm-up")
    found = planted(choices.NORM_PLACE, dict(zip(names, means, strict=True)), 0.002)
    assert choices.NORM_PLACE.decide(found).outcome == outcome
    assert choices.NORM_PLACE.draw(found)


@pytest.mark.parametrize(
    ("study", "old", "new", "rest"),
    [
        (choices.STOCHASTIC_DEPTH, "dropout", "stochastic depth", {"neither": 0.6}),
        (choices.ACTIVATION, "ReLU", "GELU", {}),
    ],
)
def test_no_worse_than_the_other(study: Study, old: str, new: str, rest: dict[str, float]) -> None:
    for value, outcome, words in (
        (0.65, "reproduced", f"{new} is better"),
        (0.60, "reproduced", "neither is better for certain"),
        (0.55, "not reproduced", f"{old} is better"),
    ):
        found = planted(study, rest | {old: 0.6, new: value})
        verdict = study.decide(found)
        assert verdict.outcome == outcome
        assert words in verdict.why
        assert study.draw(found)
    assert study.decide(planted(study, rest | {old: 0.6, new: 0.6}, 0.1)).outcome == "not decided"
    assert study.decide(planted(study, rest | {old: 0.6, new: 0.7}, seeds=2)).outcome == "not decided"
