"""Studies of compute, scaling, optimisers, axial attention and speed: rules on planted results, counts by hand."""

import functools
import math

import numpy as np
import pytest
import torch
from scipy.stats import linregress, spearmanr

from plainvit.config import Config, Model, ResNetConfig, ViTConfig
from plainvit.evaluate import paper
from plainvit.models import build
from plainvit.planning import cost
from plainvit.planning.devices import H200
from plainvit.planning.memory import Step, memory
from plainvit.studies import axial, compute, optimisers, scaling, speed
from plainvit.studies.bases import DOWNSTREAM, base
from plainvit.studies.runs import run_hash
from plainvit.studies.study import (
    BUDGETS,
    Budget,
    Results,
    Study,
    check_equivalent,
    check_no_worse,
    hash_definition,
    order_stages,
    paired_difference,
    table,
)

STUDIES = [
    study for file in (compute, scaling, optimisers, axial, speed) for study in file.STUDIES
]  # those of choices.py have a test file of their own
every_study = pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)


def planted(study: Study, means: dict[str, float], spread: float = 0.001, seeds: int = 3) -> Results:
    """Measured arms of the cpu budget with these means and a little noise."""
    angles = 2 * np.pi * np.arange(seeds) / seeds + np.arange(len(means))[:, None]
    noise = spread * np.cos(angles)  # of mean 0 over the seeds, as are all differences: equal means decide nothing
    values = {
        arm: [{study.metric: mean + one} for one in row] for (arm, mean), row in zip(means.items(), noise, strict=True)
    }
    known = study.arms("cpu")
    return Results({arm: known[arm] for arm in means}, values, study.metric)


def along(study: Study, curves: dict[str, tuple[float, ...]]) -> dict[str, float]:
    """Arm by arm, the values of each group from its first place on the axis to its last."""
    found = Results(study.arms("cpu"), {})
    return {arm: value for kind, row in curves.items() for arm, value in zip(found.group(kind), row, strict=True)}


@functools.cache
def buildable(model: Model) -> None:
    with torch.device("meta"):
        build(model)


@pytest.mark.parametrize("budget", BUDGETS)
@every_study
def test_every_arm_can_be_run(study: Study, budget: Budget) -> None:
    arms = study.arms(budget)
    assert hash_definition(arms) == hash_definition(study.arms(budget))
    assert [arm for stage in order_stages(arms) for arm in stage]
    assert len({run_hash(arm.config) + arm.after for arm in arms.values()}) == len(arms), "two arms are one run"
    for arm in arms.values():
        assert (arm.config.model is None) == bool(arm.after), "a model of its own, or that of the arm before it"
        if arm.config.model and not (study is speed.STUDY and arm.x != 128):  # other sides are the same modules
            buildable(arm.config.model)
        if arm.trained:
            assert arm.config.holdout, "arms are compared on held-out images"
    if budget == "gpu" and study is not speed.STUDY:
        assert len(arms) <= 11


@every_study
def test_two_seeds_decide_nothing(study: Study) -> None:
    arms = [name for name, arm in study.arms("cpu").items() if arm.counts]
    values = {"top1": 0.5, "images_per_second": 5.0, "largest_batch": 9.0}
    rising = {arm: {name: value * (1 + at / 10) for name, value in values.items()} for at, arm in enumerate(arms)}
    found = Results(
        {arm: study.arms("cpu")[arm] for arm in arms}, {arm: [one] * 2 for arm, one in rising.items()}, study.metric
    )
    assert study.decide(found).outcome != "reproduced"


def test_no_worse_rules_out_a_loss_above_the_margin() -> None:
    assert check_no_worse(paired_difference([0.5, 0.5, 0.5], [0.6, 0.61, 0.62])) == 1
    assert check_no_worse(paired_difference([0.5, 0.5, 0.5], [0.499, 0.501, 0.5])) == 1
    assert check_no_worse(paired_difference([0.5, 0.5, 0.5], [0.45, 0.54, 0.5])) == 0, "too noisy to say"
    assert check_no_worse(paired_difference([0.5, 0.5, 0.5], [0.48, 0.481, 0.482])) == -1
    assert check_no_worse(paired_difference([0.5, 0.5], [0.6, 0.6])) == 0


def test_equivalence_rules_out_a_difference_above_the_margin() -> None:
    assert check_equivalent(paired_difference([0.5, 0.5, 0.5], [0.504, 0.505, 0.506])) == 1, "half a point, for certain"
    assert check_equivalent(paired_difference([0.5, 0.5, 0.5], [0.49, 0.515, 0.5])) == 0, (
        "near each other, but too noisy to say"
    )
    assert check_equivalent(paired_difference([0.5, 0.5, 0.5], [0.508, 0.512, 0.513])) == -1
    assert check_equivalent(paired_difference([0.5, 0.5, 0.5], [0.488, 0.491, 0.487])) == -1
    assert check_equivalent(paired_difference([0.5, 0.5], [0.5, 0.5])) == 0


# Compute --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["cpu", "gpu"])
def test_kinds_are_matched_in_compute(budget: Budget) -> None:
    """Each size is about twice the one before, and the kinds cost the same in each place."""
    arms = compute.COMPUTE.arms(budget)
    assert len(arms) == 9
    for size in ("small", "medium", "large"):
        places = [arms[f"{kind} {size}"].x for kind in compute.KINDS]
        assert max(places) / min(places) < 1.12
    for kind in compute.KINDS:
        small, medium, large = (arms[f"{kind} {size}"].x for size in ("small", "medium", "large"))
        assert 1.5 < medium / small < 2.3
        assert 1.8 < large / medium < 2.1
    config = arms["ViT medium"].config
    model = build(base(budget).model.replace(classes=10 if budget == "cpu" else 200))
    images = config.steps * config.batch
    assert cost.parameters(compute.complete_model(config)) == sum(p.numel() for p in model.parameters())
    assert arms["ViT medium"].x == pytest.approx(6 * cost.macs(model.config) * images / 1e18)


@pytest.mark.parametrize(
    ("vit", "resnet", "outcome"),
    [
        ((0.50, 0.60, 0.70), (0.60, 0.64, 0.68), "reproduced"),
        ((0.50, 0.52, 0.54), (0.50, 0.60, 0.70), "not reproduced"),
        ((0.50, 0.60, 0.70), (0.60, 0.70, 0.8005), "not decided"),
    ],
)
def test_slopes_decide(vit: tuple[float, ...], resnet: tuple[float, ...], outcome: str) -> None:
    found = planted(compute.COMPUTE, along(compute.COMPUTE, {"ViT": vit, "ResNet": resnet, "hybrid": vit}), 0.004)
    assert compute.COMPUTE.decide(found).outcome == outcome
    places, rows = compute.curves(found, "ViT")
    assert compute.slopes(found, "ViT") == pytest.approx([linregress(places, row).slope for row in rows])  # pyright: ignore[reportAttributeAccessIssue]
    assert compute.COMPUTE.draw(found)


@pytest.mark.parametrize(
    ("vit", "hybrid", "outcome"),
    [
        ((0.50, 0.60, 0.70), (0.60, 0.65, 0.70), "reproduced"),
        ((0.50, 0.60, 0.70), (0.45, 0.65, 0.70), "not reproduced"),  # worse where small
        ((0.50, 0.60, 0.70), (0.52, 0.65, 0.80), "not reproduced"),  # the lead grows
        ((0.50, 0.60, 0.70), (0.55, 0.65, 0.755), "not decided"),
    ],
)
def test_hybrids_are_decided_by_their_rule(vit: tuple[float, ...], hybrid: tuple[float, ...], outcome: str) -> None:
    found = planted(compute.HYBRIDS, along(compute.HYBRIDS, {"ViT": vit, "hybrid": hybrid}), 0.005)
    verdict = compute.HYBRIDS.decide(found)
    assert verdict.outcome == outcome
    assert compute.HYBRIDS.draw(found)
    assert f"**{outcome}**" in table(compute.HYBRIDS, found, verdict)


def test_models_are_compared_at_equal_compute() -> None:
    """A point on the line between two ViTs is neither above nor below them."""
    arms = compute.HYBRIDS.arms("cpu")
    found = Results(arms, {name: [{"top1": math.log2(arm.x) / 100 + 1}] * 2 for name, arm in arms.items()})
    inside = compute.lead_over_vit(found, "hybrid")[:, 1]
    assert inside == pytest.approx([0, 0], abs=1e-12)


@pytest.mark.parametrize(("last", "outcome"), [(0.65, "reproduced"), (0.55, "not reproduced"), (0.6, "not decided")])
def test_saturation_is_decided_by_its_rule(last: float, outcome: str) -> None:
    names = compute.SATURATION.arms("cpu")
    rows = dict(zip(names, ((0.5, 0.5, 0.5), (0.59, 0.60, 0.61), (last + 0.011, last, last - 0.01)), strict=True))
    found = Results(names, {arm: [{"top1": one} for one in row] for arm, row in rows.items()})
    assert compute.SATURATION.decide(found).outcome == outcome
    assert compute.SATURATION.draw(found)


def test_table6_gives_the_papers_curves() -> None:
    assert [len(compute.table6(kind)) for kind in compute.KINDS] == [6, 7, 5]
    assert compute.table6("ViT")[0] == pytest.approx((55, 92.50))
    assert compute.table6("ResNet")[-1] == pytest.approx((3306, 95.09))
    assert compute.flops_unit(1567)[1] == "exaFLOPs"
    assert compute.flops_unit(0.0015) == (1, "petaFLOPs")
    assert compute.flops_unit(7.8e-8) == (3, "gigaFLOPs")


# Scaling --------------------------------------------------------------------------------------------------------------

GROWN = {"small": 0.50, "depth x2": 0.58, "depth x4": 0.62, "width x2": 0.53, "width x4": 0.55, "MLP x4": 0.56}
GROWN |= {"patch x4": 0.60, "all x4": 0.62}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "reproduced"),
        ({"width x4": 0.70, "all x4": 0.71}, "not reproduced"),  # width brings more
        ({"depth x2": 0.53}, "not reproduced"),  # depth brings more and more
        ({"all x4": 0.58}, "not reproduced"),  # all together fall short
        ({"depth x2": 0.56}, "not decided"),  # as much as before
    ],
)
def test_axes_are_decided_by_their_rule(changes: dict[str, float], outcome: str) -> None:
    found = planted(scaling.DEPTH_AND_WIDTH, GROWN | changes)
    verdict = scaling.DEPTH_AND_WIDTH.decide(found)
    assert verdict.outcome == outcome, verdict.why
    assert scaling.DEPTH_AND_WIDTH.draw(found)


@pytest.mark.parametrize("budget", BUDGETS)
def test_axes_are_scaled_alike(budget: Budget) -> None:
    arms = scaling.arms(budget)
    for name, arm in arms.items():
        wanted = 1 if name == "small" else int(name[-1])
        assert arm.x == pytest.approx(wanted, rel=0.35)
        assert name == "small" or sum(a != b for a, b in zip(_shape(arms["small"]), _shape(arm), strict=True)) <= 3


def _shape(arm: compute.Arm) -> tuple[object, ...]:
    model = arm.config.model
    assert isinstance(model, ViTConfig)
    return model.depth, model.width, model.mlp_dim, model.patch, model.heads


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [((0.5, 0.6, 0.7), "reproduced"), ((0.5, 0.7, 0.6), "not reproduced"), ((0.5, 0.6, 0.6), "not decided")],
)
def test_patches_are_decided_by_their_rule(rows: tuple[float, ...], outcome: str) -> None:
    found = planted(scaling.PATCH_SIZE, dict(zip(scaling.patch_arms("cpu"), rows, strict=True)), 0.004)
    assert scaling.PATCH_SIZE.decide(found).outcome == outcome
    assert scaling.PATCH_SIZE.draw(found)


@pytest.mark.parametrize("budget", BUDGETS)
def test_patches_change_few_parameters(budget: Budget) -> None:
    """Counted on the built models."""
    counts = []
    for arm in scaling.patch_arms(budget).values():
        with torch.device("meta"):
            counts.append(sum(p.numel() for p in build(compute.complete_model(arm.config)).parameters()))
    assert max(counts) / min(counts) < 1.03


def test_the_base_is_one_of_the_patches() -> None:
    """So that its run is shared."""
    assert scaling.patch_arms("gpu")["patch 8"].config == base("gpu")


def test_more_parameters_than_allowed_are_noticed() -> None:
    found = planted(scaling.PATCH_SIZE, dict(zip(scaling.patch_arms("cpu"), (0.5, 0.6, 0.7), strict=True)))
    first, arm = next(iter(found.arms.items()))
    assert isinstance(arm.config.model, ViTConfig)
    wide = arm.config.replace(model=arm.config.model.replace(mlp_dim=256))
    found.arms[first] = compute.Arm(wide, x=arm.x, group=arm.group)
    assert scaling.PATCH_SIZE.decide(found).outcome == "not reproduced"


def test_predictor_is_decided_by_its_rule() -> None:
    arms = scaling.all_arms("cpu")
    macs = {name: math.log(cost.macs(compute.complete_model(arm.config))) / 100 for name, arm in arms.items()}
    counts = {name: math.log(cost.parameters(compute.complete_model(arm.config))) / 100 for name, arm in arms.items()}
    assert scaling.PREDICTOR.decide(planted(scaling.PREDICTOR, macs)).outcome == "reproduced"
    assert scaling.PREDICTOR.decide(planted(scaling.PREDICTOR, counts)).outcome == "not reproduced"
    noise = dict(zip(arms, np.random.default_rng(1).uniform(0.4, 0.6, len(arms)), strict=True))
    assert scaling.PREDICTOR.decide(planted(scaling.PREDICTOR, noise, 0.1)).outcome == "not decided"
    found = planted(scaling.PREDICTOR, counts, 0.003)
    expected = spearmanr(
        [cost.macs(compute.complete_model(arm.config)) for arm in arms.values()],
        [v[0]["top1"] for v in found.values.values()],
    )
    assert scaling.correlations(found)["multiply-adds"][0] == pytest.approx(expected.statistic)  # pyright: ignore[reportAttributeAccessIssue]
    assert scaling.PREDICTOR.draw(found)


def test_the_papers_patches_are_of_its_table() -> None:
    assert scaling.table6() == {"ViT-B": [80.73, 84.15], "ViT-L": [84.37, 86.30]}


# Optimisers, axial attention ------------------------------------------------------------------------------------------


SET = DOWNSTREAM["cpu"][0]


@pytest.mark.parametrize(("adam", "outcome"), [(0.7, "reproduced"), (0.601, "reproduced"), (0.5, "not reproduced")])
def test_optimisers_are_decided_by_their_rule(adam: float, outcome: str) -> None:
    found = planted(optimisers.STUDY, {f"Adam, {SET}": adam, f"SGD, {SET}": 0.6})
    assert optimisers.STUDY.decide(found).outcome == outcome
    assert optimisers.STUDY.draw(found)
    noisy = planted(optimisers.STUDY, {f"Adam, {SET}": 0.6, f"SGD, {SET}": 0.6}, 0.1)
    assert optimisers.STUDY.decide(noisy).outcome == "not decided"


def test_sets_are_averaged() -> None:
    arms = {name: arm for name, arm in optimisers.arms("gpu").items() if arm.counts}
    values = {name: [{"top1": 0.1 * at}] * 3 for at, name in enumerate(arms)}
    found = Results(arms, values)
    assert optimisers.averages(found, "Adam") == pytest.approx([0.1] * 3)  # of 0, 0.1 and 0.2
    assert optimisers.averages(found, "SGD") == pytest.approx([0.4] * 3)
    assert "Adam - SGD -30.00" in optimisers.STUDY.decide(found).why
    assert optimisers.STUDY.draw(found)


def test_sgd_is_bits() -> None:
    """0.03 for a batch of 256, momentum 0.9, weight decay 1e-4 (BiT)."""
    sgd = optimisers.arms("gpu")["SGD, pre-trained"].config
    assert (sgd.optim.name, sgd.optim.lr, sgd.optim.momentum, sgd.optim.weight_decay) == ("sgd", 0.03, 0.9, 1e-4)
    assert optimisers.arms("gpu")["Adam, pre-trained"].config == compute.arms("gpu")["ResNet medium"].config
    assert paper.table(7).value("BiT-R50x1, SGD", "ImageNet") == 78.24


@pytest.mark.parametrize(("better", "outcome"), [(0.7, "reproduced"), (0.5, "not reproduced"), (0.6, "not decided")])
def test_axial_is_decided_by_its_rule(better: float, outcome: str) -> None:
    found = planted(axial.STUDY, {"plain": 0.6, "axial": better}, 0.003)
    assert axial.STUDY.decide(found).outcome == outcome
    assert axial.STUDY.draw(found)
    assert found.arms["plain"].config == base("cpu"), "the base itself, so that its run is shared"


# Speed ----------------------------------------------------------------------------------------------------------------


def measured(powers: dict[str, float], batches: dict[str, float], seeds: int = 3) -> Results:
    """Images a second that fall by a power of the side, and largest batches by its square."""
    arms = speed.arms("cpu")
    wobble = np.random.default_rng(0).normal(1, 0.02, (len(arms), seeds))
    values = {
        name: [
            {
                "images_per_second": 1e6 * factor * arm.x ** -powers[arm.group],
                "largest_batch": batches[arm.group] / arm.x**2,
            }
            for factor in row
        ]
        for (name, arm), row in zip(arms.items(), wobble, strict=True)
    }
    return Results(arms, values, speed.STUDY.metric)


@pytest.mark.parametrize(
    ("power", "batch", "outcome"),
    [
        (2.2, 2e9, "reproduced"),
        (4.6, 2e9, "not reproduced"),
        (2.2, 0.9e9, "not reproduced"),  # the ResNet's is larger
        (4.0, 2e9, "not decided"),
    ],
)
def test_speed_is_decided_by_its_rule(power: float, batch: float, outcome: str) -> None:
    found = measured({"ViT": power, "ResNet": 2.0}, {"ViT": batch, "ResNet": 1e9})
    assert speed.STUDY.decide(found).outcome == outcome
    assert np.mean(speed.exponents(found, "ViT")) == pytest.approx(power, abs=0.05)
    assert speed.STUDY.draw(found)


def test_models_are_compared_at_similar_macs() -> None:
    found = Results(speed.arms("gpu"), {})
    pairs = {name: speed.nearest_resnet(found, name) for name in speed.kinds(found)[0]}
    assert pairs == {"ViT-B/32": "BiT-R50x1", "ViT-B/16": "BiT-R50x2"}
    without = Results({name: arm for name, arm in found.arms.items() if arm.group != "BiT-R50x2"}, {})
    assert speed.nearest_resnet(without, "ViT-B/16") == "", "R50x1 has far fewer multiply-adds"
    assert speed.batch_size("gpu", 224) == 256


def test_speed_is_measured_on_the_model() -> None:
    """A model of four times the multiply-adds is slower; the clock agrees with the reported rate within its noise."""
    small = ViTConfig(width=64, depth=2, heads=2, mlp_dim=256, patch=(8, 8), image_size=(32, 32), classes=10)
    rates = []
    for model in (small, small.replace(image_size=(128, 128))):
        found = speed.measure(Config(model=model, batch=8, device="cpu"), speed.Path())
        assert set(found) == {"images_per_second", "largest_batch"}
        rates.append(found["images_per_second"])
    assert rates[0] > 2 * rates[1]


@pytest.mark.parametrize("model", [ViTConfig(), ResNetConfig(blocks=(3, 4, 6, 3))])
def test_the_largest_batch_fills_the_memory(model: ViTConfig | ResNetConfig) -> None:
    most = speed.estimate_batch(model)
    room = H200.usable_bytes
    steps = [Step(model=model, images=2 * n, micro_batch=n, element_bytes=4) for n in (most, most + 2)]
    sizes = [memory(step)["total"] for step in steps]
    pixels = 2 * 3 * 224 * 224  # of the whole batch, which lies on the device beside what is counted
    assert sizes[0] - pixels * most < room < sizes[1]


def test_batch_is_extrapolated_linearly() -> None:
    """5 GB stand beside 0.5 GB for each image: 70 images fit into 40 GB."""
    assert speed.extrapolate_batch(4, 7e9, 12, 11e9, 40e9) == 70
    assert speed.extrapolate_batch(4, 7e9, 12, 11e9, 1e9) == 0
