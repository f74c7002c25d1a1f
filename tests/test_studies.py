"""Every study: planted results are supported, contradicted and inconclusive where they should be."""

import math
from typing import Any

import numpy as np
import pytest
from verdicts import Planted, along, plant

from plainvit.planning import cost
from plainvit.studies import learned_structure, verdict
from plainvit.studies.base_configs import complete_model
from plainvit.studies.drawings import draw_study
from plainvit.studies.registry import studies
from plainvit.studies.study import Results

ALL = studies()
YES, NO, OPEN = "supported", "contradicted", "inconclusive"
DIGITS = "digits:56789"


# Rules ----------------------------------------------------------------------------------------------------------------

Case = tuple[Planted | dict[str, tuple[float, ...]], str] | tuple[Planted | dict[str, tuple[float, ...]], str, float]
GROWN = {"small": 0.5, "depth x2": 0.58, "depth x4": 0.62, "width": 0.55, "MLP": 0.56, "patch": 0.6, "all": 0.62}


def look(first: tuple[float, float], last: tuple[float, float]) -> dict[str, float]:
    """Of four layers of two heads."""
    return learned_structure.summarize_distances(np.linspace(first, last, 4))


def positions(nearness: float, contrast: float) -> dict[str, float]:
    return {"nearness": nearness, "contrast": contrast, "chance": 0.1}


def by_cost(count: Any, study: str = "predictor") -> dict[str, float]:
    """An accuracy that follows a cost of the model."""
    arms = ALL[study].arms("cpu")
    return {name: math.log(count(complete_model(arm.config))) / 100 for name, arm in arms.items()}


def upstream(few_shot: np.ndarray) -> dict[str, dict[str, float]]:
    names = [name for name, arm in ALL["few-shot"].arms("cpu").items() if arm.is_compared]
    top1 = np.linspace(0.5, 0.9, len(names))
    return {name: {"top1": a, "few_shot": b} for name, a, b in zip(names, top1, few_shot, strict=True)}


def speeds(vit: float, batch: float) -> dict[str, dict[str, float]]:
    """images/s fall by the power `vit` of the side; the ViT's largest batch is `batch` times the ResNet's."""
    found: dict[str, dict[str, float]] = {}
    for name, arm in ALL["speed"].arms("cpu").items():
        size = 1000.0 * (batch if arm.group == "ViT" else 1)
        found[name] = {"images_per_second": 1e9 * arm.x**-vit, "largest_batch": size}
    return found


FALLING = np.linspace(0.9, 0.5, 12)
CASES: dict[str, list[Case]] = {
    "positions": [
        ({"none": 0.6, "1-D": 0.7, "2-D": 0.702, "relative": 0.704}, YES),
        ({"none": 0.6, "1-D": 0.7, "2-D": 0.65, "relative": 0.7}, NO),  # the kind matters
        ({"none": 0.6, "1-D": 0.5, "2-D": 0.5, "relative": 0.5}, NO),
        ({"none": 0.6, "1-D": 0.7, "2-D": 0.71, "relative": 0.705}, OPEN),  # 1-D and 2-D are a margin apart
    ],
    "position-places": [
        ({"": 0.9, "2-D, shared": 0.903}, YES),
        ({"": 0.9, "1-D, every": 0.92}, NO),
        ({"": 0.9}, OPEN, 0.05),
    ],
    "data-size": [
        ({"ViT": (0.3, 0.4, 0.5, 0.6), "ResNet": (0.4, 0.46, 0.53, 0.61)}, YES),
        ({"ViT": (0.3, 0.4, 0.5, 0.6), "ResNet": (0.4, 0.5, 0.7, 0.9)}, NO),  # the lead grows
        ({"ViT": (0.3, 0.4, 0.5, 0.6), "ResNet": (0.2, 0.2, 0.3, 0.4)}, NO),  # there is none
        ({"ViT": (0.3, 0.4, 0.5, 0.6), "ResNet": (0.4, 0.5, 0.6, 0.7)}, OPEN),
    ],
    "overfitting": [
        ({"ViT": 0.3, "ResNet": 0.2}, YES),
        ({"ViT": (0.3, 0.1, 0.3), "ResNet": (0.2, 0.2, 0.2)}, NO),
        ({"": 0.2}, OPEN),
    ],
    "model-size": [
        ({"ViT": (0.5, 0.6, 0.65, 0.7), "large ViT": (0.48, 0.6, 0.68, 0.76)}, YES),
        ({"ViT": (0.5, 0.6, 0.65, 0.7), "large ViT": (0.55, 0.7, 0.75, 0.8)}, NO),  # ahead at once
        ({"ViT": (0.5, 0.6, 0.65, 0.7), "large ViT": (0.5, 0.58, 0.62, 0.65)}, NO),  # falls behind
        ({"": 0.5}, OPEN),
    ],
    "transfer": [
        ({"": 0.6, f"{DIGITS}, pre": 0.7, f"{DIGITS}, a tenth, pre": 0.8}, YES),
        ({"": 0.6, f"{DIGITS}, pre": 0.55, f"{DIGITS}, a tenth, pre": 0.8}, NO),
        ({"": 0.6, f"{DIGITS}, pre": 0.8, f"{DIGITS}, a tenth, pre": 0.7}, NO),  # less where there are few images
        ({"": 0.6, f"{DIGITS}, pre": 0.7, f"{DIGITS}, a tenth, pre": 0.7}, OPEN),
    ],
    "resolution": [
        ({"resampled positions": (0.7, 0.7, 0.78), "new positions": (0.6, 0.7)}, YES),
        ({"resampled positions": (0.7, 0.65, 0.78), "new positions": (0.6, 0.7)}, NO),  # a step falls
        ({"resampled positions": (0.7, 0.75, 0.78), "new positions": (0.6, 0.8)}, NO),
        ({"resampled positions": (0.7, 0.75, 0.78), "new positions": (0.6, 0.78)}, OPEN),
    ],
    "head": [
        ({"head of zeros": (0.78, 0.8, 0.79), "new last layer": (0.7, 0.8, 0.75)}, YES),
        ({"head of zeros": (0.77, 0.78, 0.77), "new last layer": (0.7, 0.9, 0.9)}, NO),  # steadier, but worse
        ({"head of zeros": (0.7, 0.9, 0.8), "new last layer": (0.78, 0.8, 0.79)}, NO),
        ({"": 0.8}, OPEN),
    ],
    "regularization": [
        ({"": 0.5, "decay 0.1, dropout 0.1": 0.6}, YES),
        ({"": 0.5, "decay 0, dropout 0": 0.6, "decay 0, dropout 0.1": 0.5}, NO),
        ({"": 0.5}, OPEN),
    ],
    "compute": [
        ({"ViT": (0.5, 0.6, 0.7), "ResNet": (0.6, 0.64, 0.68), "hybrid": (0.5, 0.5, 0.5)}, YES),
        ({"ViT": (0.5, 0.52, 0.54), "ResNet": (0.5, 0.6, 0.7), "hybrid": (0.5, 0.5, 0.5)}, NO),
        ({"ViT": (0.5, 0.6, 0.7), "ResNet": (0.5, 0.6, 0.7), "hybrid": (0.5, 0.5, 0.5)}, OPEN, 0.05),
    ],
    "hybrids": [
        ({"ViT": (0.5, 0.6, 0.7), "hybrid": (0.6, 0.65, 0.7)}, YES),
        ({"ViT": (0.5, 0.6, 0.7), "hybrid": (0.45, 0.65, 0.7)}, NO),  # worse where small
        ({"ViT": (0.5, 0.6, 0.7), "hybrid": (0.52, 0.65, 0.8)}, NO),  # the lead grows
        ({"ViT": (0.5, 0.6, 0.7), "hybrid": (0.55, 0.65, 0.75)}, OPEN, 0.02),
    ],
    "saturation": [
        ({"ViT": (0.5, 0.6, 0.65)}, YES),
        ({"ViT": (0.5, 0.6, 0.55)}, NO),
        ({"ViT": (0.5, 0.6, 0.6)}, OPEN),
    ],
    "depth-and-width": [
        (GROWN, YES),
        (GROWN | {"width": 0.7, "all": 0.71}, NO),  # width brings more
        (GROWN | {"all": 0.58}, NO),
        (GROWN | {"all": 0.61}, OPEN),
    ],
    "patch-size": [
        ({"base": (0.7, 0.6, 0.5)}, YES),
        ({"base": (0.6, 0.7, 0.5)}, NO),
        ({"base": (0.6, 0.6, 0.5)}, OPEN),
    ],
    "predictor": [(by_cost(cost.macs), YES), (by_cost(cost.parameters), NO), ({"": 0.5}, OPEN)],
    "pooling": [
        ({"class token": (0.7, 0.8, 0.6), "average": (0.803, 0.7, 0.6)}, YES),
        ({"class token": (0.7, 0.8, 0.6), "average": (0.83, 0.7, 0.6)}, NO),
        ({"class token": (0.7, 0.8, 0.6), "average": (0.6, 0.7, 0.8)}, OPEN),  # a higher rate
    ],
    "resnet-optimizer": [
        ({"Adam": 0.6, "SGD": 0.6}, YES),
        ({"Adam": 0.5, "SGD": 0.6}, NO),
        ({"Adam": 0.59, "SGD": 0.6}, OPEN),
    ],
    "axial": [({"plain": 0.6, "axial": 0.7}, YES), ({"plain": 0.6, "axial": 0.5}, NO), ({"": 0.6}, OPEN)],
    "learned-positions": [
        ({"trained": positions(0.8, 0.3), "untrained": positions(0.0, 0.0)}, YES),
        ({"trained": positions(0.05, 0.3), "untrained": positions(0.0, 0.0)}, NO),  # as permuted positions
        ({"trained": positions(0.8, 0.3), "untrained": positions(0.9, 0.0)}, NO),  # nothing was learned
        ({"trained": positions(0.8, 0.0), "untrained": positions(0.0, 0.0)}, OPEN),
    ],
    "learned-filters": [
        ({"trained": {"rank": 8, "smooth": 0.8}, "untrained": {"rank": 20, "smooth": 0.25}}, YES),
        ({"trained": {"rank": 30, "smooth": 0.8}, "untrained": {"rank": 20, "smooth": 0.25}}, NO),
        ({"trained": {"rank": 8, "smooth": 0.25}, "untrained": {"rank": 20, "smooth": 0.25}}, OPEN),
    ],
    "attention-distance": [
        ({"trained": look((5, 28), (29, 30)), "untrained": look((25, 26), (25, 26))}, YES),
        ({"trained": look((20, 28), (29, 30)), "untrained": look((25, 26), (25, 26))}, NO),  # similar heads
        ({"trained": look((5, 28), (4, 20)), "untrained": look((25, 26), (25, 26))}, NO),  # late layers look near
        ({"trained": look((5, 28), (29, 30)), "untrained": look((5, 28), (25, 26))}, OPEN),  # as before training
    ],
    "hybrid-attention": [
        ({"ViT": look((5, 28), (29, 30)), "hybrid": look((15, 28), (29, 30))}, YES),
        ({"ViT": look((15, 28), (29, 30)), "hybrid": look((5, 28), (29, 30))}, NO),
        ({"": look((15, 28), (29, 30))}, OPEN),
    ],
    "rollout": [
        ({"trained": 1.2, "untrained": 1.0}, YES),
        ({"trained": 0.9, "untrained": 0.8}, NO),
        ({"trained": 1.2, "untrained": 1.2}, OPEN),
    ],
    "masked": [
        ({"scratch": 0.6, "masked": 0.7, "supervised": 0.8}, YES),
        ({"scratch": 0.6, "masked at 1.0e-03": 0.55, "masked": 0.5, "supervised": 0.8}, NO),
        ({"scratch": 0.6, "scratch at 3.0e-03": 0.75, "masked": 0.7, "supervised": 0.8}, NO),  # at its best rate
        ({"scratch": 0.6, "masked": 0.7, "supervised": 0.7}, OPEN),
    ],
    "masked-steps": [
        ({"masked": (0.5, 0.6, 0.65, 0.67)}, YES),
        ({"masked": (0.5, 0.52, 0.6, 0.75)}, NO),  # the last gains most
        ({"masked": (0.6, 0.55, 0.52, 0.5)}, NO),
        ({"masked": (0.5, 0.55, 0.6, 0.65)}, OPEN),
    ],
    "few-shot": [
        (upstream(np.linspace(0.2, 0.5, 12)), YES),
        (upstream(FALLING), NO),
        (upstream(np.array([0.3, 0.2, 0.4, 0.5, 0.3, 0.6, 0.7, 0.5, 0.8, 0.6, 0.9, 0.7])), OPEN),
    ],
    "averaging": [
        ({"last": {"top1": 0.8, "nll": 0.7}, "averaged": {"top1": 0.8, "nll": 0.7}}, YES),
        ({"last": {"top1": 0.8, "nll": 0.7}, "averaged": {"top1": 0.82, "nll": 0.8}}, NO),  # less certain
        ({"last": {"top1": 0.8, "nll": 0.7}, "averaged": {"top1": 0.8, "nll": 0.7}}, OPEN, 0.05),
    ],
    "speed": [(speeds(2.5, 1.0), YES), (speeds(2.5, 0.8), NO), (speeds(4.5, 1.0), NO), (speeds(4.0, 1.0), OPEN)],
    "norm-place": [
        ({"pre": 0.7, "post": 0.69, "pre, no warm-up": 0.69, "post, no warm-up": 0.4}, YES),
        ({"pre": 0.7, "post": 0.69, "pre, no warm-up": 0.4, "post, no warm-up": 0.69}, NO),
        ({"pre": 0.7, "post": 0.7, "pre, no warm-up": 0.6, "post, no warm-up": 0.6}, OPEN),
    ],
    "stochastic-depth": [
        ({"": 0.6}, YES),
        ({"": 0.6, "stochastic": 0.55}, NO),
        ({"": 0.6, "stochastic": 0.59}, OPEN),
    ],
    "activation": [({"": 0.6}, YES), ({"ReLU": 0.6, "GELU": 0.55}, NO), ({"": 0.6}, OPEN, 0.1)],
}


CASES["resolution-published"] = CASES["resolution"]
CASES["transfer-published"] = [
    ({"": 0.6, "cifar10, pre": 0.7, "oxford-pets, pre": 0.8, "flowers102, pre": 0.8}, YES),
    ({"": 0.6, "cifar10, pre": 0.8, "oxford-pets, pre": 0.55, "flowers102, pre": 0.7}, NO),
    ({"": 0.6, "cifar10, pre": 0.7, "oxford-pets, pre": 0.7, "flowers102, pre": 0.7}, OPEN),
]


def test_every_study_has_planted_results_of_each_outcome() -> None:
    assert CASES.keys() == ALL.keys()
    for name, cases in CASES.items():
        assert {case[1] for case in cases} == {YES, NO, OPEN}, name


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(name, case, id=f"{name}-{case[1]}") for name in CASES for case in CASES[name]]
)
def test_planted_results_are_decided(name: str, case: Case) -> None:
    study, means = ALL[name], case[0]
    if isinstance(next(iter(means.values())), tuple):
        means = along(study, means)
    spread = case[2] if len(case) == 3 else 0.001
    results = plant(study, means, spread)
    verdict = study.decide(results)
    assert verdict.outcome == case[1], verdict.why
    assert study.decide(plant(study, means, spread, runs=2)).outcome == OPEN
    assert draw_study(study, results).axes


@pytest.mark.parametrize("name", ALL)
def test_the_arms_of_a_gpu_are_decided_and_drawn(name: str) -> None:
    metrics = ("top1", "choice", "few_shot", "overfitting", "nll", "rank", "smooth", "nearness", "contrast", "chance")
    means = dict.fromkeys((*metrics, "ratio", "images_per_second", "largest_batch"), 0.5)
    results = plant(ALL[name], {"": means | learned_structure.summarize_distances(np.eye(6, 12))}, budget="gpu")
    assert ALL[name].decide(results).criteria
    assert draw_study(ALL[name], results).axes


def test_a_best_rate_at_the_edge_is_noted() -> None:
    study = ALL["pooling"]
    inside = plant(study, along(study, {"class token": (0.7, 0.8, 0.6), "average": (0.7, 0.8, 0.6)}))
    edge = plant(study, along(study, {"class token": (0.7, 0.8, 0.6), "average": (0.8, 0.7, 0.6)}))
    assert "grid" not in study.decide(inside).why
    assert "grid of average" in study.decide(edge).why


def test_rates_are_chosen_on_other_images_than_those_that_decide() -> None:
    study = ALL["pooling"]
    arms = [name for name in study.arms("cpu") if name.startswith("average")]
    means = {"": 0.6} | {arms[0]: {"top1": 0.5, "choice": 0.9}, arms[1]: {"top1": 0.9, "choice": 0.5}}
    results = plant(study, means)
    assert results.best("average") == arms[0]
    assert (len(results.samples(arms[0], "choice")), len(results.samples(arms[0]))) == (3, 5), "other runs, too"


# Rates of wrong verdicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["regularization", "masked", "transfer"])
def test_choosing_the_best_arm_does_not_bias_the_verdict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arms are equal, and a run that is better on one half of the images is better on the other."""
    monkeypatch.setattr(verdict, "student_quantile", lambda _: 2.0)
    study, random, outcomes = ALL[name], np.random.default_rng(0), []
    arms = {name: arm for name, arm in study.arms("cpu").items() if arm.is_compared}
    for _ in range(400):
        rows = random.normal(0.5, 0.01, (len(arms), study.runs)).tolist()
        values = {arm: [{"top1": one, "choice": one} for one in row] for arm, row in zip(arms, rows, strict=True)}
        outcomes.append(study.decide(Results(arms, values)).outcome)
    assert outcomes.count(YES) / 400 <= 0.05
    assert outcomes.count(NO) / 400 <= 0.05
