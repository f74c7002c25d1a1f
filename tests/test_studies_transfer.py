"""Studies of transfer: rules on planted results, both ways; arms of every budget; weights of which a part is new."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs as runs
import torch
import verdicts
from sklearn.datasets import load_digits

import plainvit
from plainvit.config import Config, differences
from plainvit.data.sources import open_source
from plainvit.models import ViT, build
from plainvit.studies import transfer
from plainvit.studies.bases import DOWNSTREAM, base, finetune_config, pretrain_config, vit
from plainvit.studies.drawings import draw_arms
from plainvit.studies.runs import Workers, run_hash
from plainvit.studies.study import (
    BUDGETS,
    Arm,
    Budget,
    Results,
    Study,
    Verdict,
    hash_definition,
    order_stages,
    run_study,
)
from plainvit.train.run import fit

TRANSFER, RESOLUTION, HEAD = transfer.STUDIES
MANY, FEW = "digits:56789", "digits:56789, a tenth"


def planted(study: Study, means: dict[str, float], seeds: int = 3) -> Results:
    """Each arm's seeds around the given mean, every other arm's the other way round."""
    arms = {name: arm for name, arm in study.arms("cpu").items() if arm.counts}
    assert means.keys() == arms.keys()
    values: dict[str, list[dict[str, float]]] = {}
    for at, arm in enumerate(arms):
        noise = 0.001 * (-1) ** at * np.linspace(-1, 1, seeds)
        values[arm] = [{"top1": means[arm] + one} for one in noise.tolist()]
    return Results(arms, values)


check = partial(verdicts.check, planted)


# Rules ----------------------------------------------------------------------------------------------------------------


def results(many: float, few: float, scratch: tuple[float, float, float] = (0.5, 0.6, 0.4)) -> dict[str, float]:
    """Top-1 of the pre-trained on both; scratch at its three rates is the same on both."""
    rates = [f"scratch at {lr:.1e}" for lr in transfer.rates("cpu", MANY)]
    both = {f"{task}, {rate}": one for task in (MANY, FEW) for rate, one in zip(rates, scratch, strict=True)}
    return both | {f"{MANY}, pre-trained": many, f"{FEW}, pre-trained": few}


def test_transfer_is_compared_with_the_best_scratch_rate() -> None:
    verdict = check(TRANSFER, results(0.7, 0.8), "reproduced")
    assert "digits +10.00" in verdict.why
    for wrong in (results(0.55, 0.8), results(0.8, 0.7)):  # below scratch's best rate; less where there are few images
        assert TRANSFER.decide(planted(TRANSFER, wrong)).outcome == "not reproduced"
    assert TRANSFER.decide(planted(TRANSFER, results(0.7, 0.7))).outcome == "not decided"


def sizes(kept: tuple[float, float, float], new: tuple[float, float]) -> dict[str, float]:
    found = {f"resampled positions, {size} px": one for size, one in zip((8, 12, 16), kept, strict=True)}
    return found | {f"new positions, {size} px": one for size, one in zip((12, 16), new, strict=True)}


def test_resolution() -> None:
    assert "16 px less 8 px: +8.00" in check(RESOLUTION, sizes((0.7, 0.75, 0.78), (0.6, 0.7)), "reproduced").why
    check(RESOLUTION, sizes((0.7, 0.7, 0.78), (0.6, 0.7)), "reproduced")  # no step falls
    for wrong in (
        sizes((0.7, 0.65, 0.78), (0.6, 0.7)),  # one does
        sizes((0.78, 0.75, 0.7), (0.6, 0.6)),
        sizes((0.7, 0.75, 0.78), (0.6, 0.8)),  # new positions are better
    ):
        assert RESOLUTION.decide(planted(RESOLUTION, wrong)).outcome == "not reproduced"
    unsure = planted(RESOLUTION, sizes((0.7, 0.75, 0.78), (0.6, 0.7)))
    unsure.values["new positions, 16 px"] = [{"top1": one} for one in (0.6, 0.8, 0.85)]
    assert RESOLUTION.decide(unsure).outcome == "not decided"


def heads(zero: tuple[float, float, float], last: tuple[float, float, float]) -> dict[str, float]:
    rates = transfer.rates("cpu", MANY)
    both = {transfer.ZERO: zero, transfer.LAST: last}
    return {f"{name}, {lr:.1e}": one for name, row in both.items() for lr, one in zip(rates, row, strict=True)}


def test_heads() -> None:
    check(HEAD, heads((0.78, 0.8, 0.79), (0.7, 0.8, 0.75)), "reproduced")
    for wrong in (
        heads((0.77, 0.78, 0.77), (0.7, 0.9, 0.9)),  # steadier, but worse
        heads((0.7, 0.9, 0.8), (0.78, 0.8, 0.79)),  # as good, but less steady
    ):
        assert HEAD.decide(planted(HEAD, wrong)).outcome == "not reproduced"
    unsure = planted(HEAD, heads((0.8, 0.8, 0.8), (0.8, 0.8, 0.8)))
    assert HEAD.decide(unsure).outcome == "not decided"


# Arms -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("study", transfer.STUDIES, ids=lambda study: study.name)
def test_every_arm_is_a_run(study: Study, budget: Budget) -> None:
    """Valid configs whose models can be built; those that are compared are all after the same steps of a set."""
    arms = study.arms(budget)
    assert len(hash_definition(arms)) == 16
    assert order_stages(arms)[0][0] == transfer.BEFORE
    keys = {(run_hash(arm.config), arm.after, arm.edit) for arm in arms.values()}
    assert len(keys) == len(arms)
    before = arms[transfer.BEFORE].config
    for arm in arms.values():
        model = arm.config.model or vit(before).replace(image_size=arm.config.image_size or vit(before).image_size)
        with torch.device("meta"):
            assert build(model)
    compared = [arm.config for arm in arms.values() if arm.counts]
    for config in compared:
        assert config.holdout, "compared on held-out images"
        assert config.steps == finetune_config(budget, config.data).steps


@pytest.mark.parametrize("budget", BUDGETS)
def test_arms_differ_in_one_thing(budget: Budget) -> None:
    for task, config in transfer.tasks(budget).items():
        arms = {name: arm.config for name, arm in transfer.arms(budget).items() if arm.group == task}
        scratch = [one for name, one in arms.items() if "scratch" in name]
        assert differences(arms[f"{task}, pre-trained"], config) == {}
        for one in scratch:
            changed = differences(config, one).keys()
            assert {"model"} <= changed <= {"model", "optim.lr", "optim.grid"}
    for arm in transfer.resolution_arms(budget).values():
        if arm.counts:
            changed = differences(finetune_config(budget, DOWNSTREAM[budget][0]), arm.config).keys()
            assert changed <= {"image_size"}


def test_gpu_runs_are_shared() -> None:
    assert run_hash(pretrain_config("gpu")) == run_hash(base("gpu"))
    first, second = (
        {run_hash(arm.config) for arm in make("gpu").values()} for make in (transfer.arms, transfer.resolution_arms)
    )
    assert len(first & second) == 2, "the pre-training, and CIFAR-10 at its size"


@pytest.mark.parametrize("size", [64, 96, 128])
def test_crops_keep_their_share(size: int) -> None:
    """BiT's ratio of 448 to 384, at the size of pre-training as well."""
    arm = transfer.resolution_arms("gpu")[f"resampled positions, {size} px"]
    assert arm.config.augment.resized_side(size) == pytest.approx(size * 448 / 384, abs=0.5)


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on five of the digits, with the paper's hidden layer in its head."""
    folder = tmp_path_factory.mktemp("runs") / "before"
    fit(config(model=runs.MODEL.replace(representation=16), data="digits:01234"), folder, quiet=True, bare=True)
    return folder


def config(**changes: Any) -> Config:
    return runs.config(steps=3, evaluations=1, device="cpu", holdout=0.3, **changes)


def loaded(folder: Path) -> ViT:
    model = plainvit.load(folder)
    assert isinstance(model, ViT)
    return model


def test_new_positions_are_new_and_all_else_is_kept(before: Path) -> None:
    made = config(model=None, data="digits:56789", image_size=16, seed=1)
    old, new = loaded(before), transfer.redraw_positions(before, made)
    assert new.config.image_size == (16, 16)
    assert new.positions[0].table.shape == (17, 16)  # 16 patches and the class token
    assert float(new.positions[0].table.detach().std()) == pytest.approx(0.02, rel=0.15)
    resampled = plainvit.load(before, image_size=16).state_dict()
    same = [name for name, value in new.state_dict().items() if torch.equal(value, resampled[name])]
    assert set(resampled) - set(same) == {"positions.0.table"}
    assert torch.equal(old.embedding.weight, new.embedding.weight)
    again, other = (transfer.redraw_positions(before, made.replace(seed=seed)) for seed in (1, 2))
    assert torch.equal(again.positions[0].table, new.positions[0].table)
    assert not torch.equal(other.positions[0].table, new.positions[0].table)


def test_a_new_last_layer_keeps_the_hidden_one(before: Path) -> None:
    made = config(model=None, data="digits:56789", head="keep")
    old, new = loaded(before), transfer.redraw_last_layer(before, made)
    assert old.pre_logits is not None
    assert new.pre_logits is not None
    assert new.head is not None
    assert torch.equal(old.pre_logits.weight, new.pre_logits.weight)
    assert new.head.weight.shape == (5, 16)
    assert float(new.head.weight.detach().std()) == pytest.approx(16**-0.5, rel=0.25)
    assert not new.head.bias.any()


def test_arms_start_from_edited_weights(before: Path, tmp_path: Path) -> None:
    """Fine-tuning at a rate of next to nothing delivers them; what is edited counts in the run's hash."""
    still = config(model=None).optim.replace(lr=1e-12, weight_decay=0.0)
    made = config(model=None, data="digits:56789", head="keep", optim=still, ema=0.0)
    made = made.replace(init=str(before.with_name("edited")))
    model = transfer.redraw_last_layer(before, made)
    before.with_name("edited").mkdir(exist_ok=True)
    plainvit.save(model, before.with_name("edited") / "model.safetensors")
    done = fit(made, tmp_path / "after", quiet=True, bare=True)
    assert done.model.config.classes == 5
    for name, value in done.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-9)
    assert run_hash(made) != run_hash(made.replace(init=str(before)))


@pytest.mark.slow
def test_a_study_with_edited_weights(tmp_path: Path) -> None:
    first = config(model=runs.MODEL, data="digits:01234")
    after = config(model=None, data="digits:56789", image_size=16)
    study = Study(
        name="edited",
        claim="c",
        source="s",
        rule="r",
        arms=lambda _: {
            "before": Arm(first, counts=False),
            "kept": Arm(after, after="before"),
            "new": Arm(after, after="before", edit=transfer.redraw_positions),
        },
        decide=lambda found: Verdict("not decided", str(sorted(found.values))),
        draw=lambda found: draw_arms(found, "", {}, ""),
    )
    assert run_study(study, "cpu", tmp_path, Workers(2), seeds=1, quiet=True).why == "['kept', 'new']"
    folders = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert len(folders) == 4
    assert sum("redraw_positions" in path.name for path in folders) == 1
    assert hash_definition(study.arms("cpu")) != hash_definition(
        {**study.arms("cpu"), "new": Arm(after, after="before")}
    )
    run_study(study, "cpu", tmp_path, Workers(), seeds=1, quiet=True)
    assert len([path for path in (tmp_path / "runs").iterdir() if path.is_dir()]) == 4, "nothing is made again"


# Some of the digits ---------------------------------------------------------------------------------------------------


def test_some_classes_of_digits() -> None:
    """Against scikit-learn's copy: the images of these digits alone, labelled by their place."""
    reference = load_digits()
    for split in ("train", "test"):
        part = open_source("digits:7905", split)
        assert part.classes == ("7", "9", "0", "5")
        numbers = [int(part.name(index).rpartition("-")[2]) for index in range(len(part))]
        assert [int(part.classes[label]) for label in part.labels] == reference.target[numbers].tolist()
        wanted = [n for n in range(1797) if (n % 5 == 0) == (split == "test") and reference.target[n] in (7, 9, 0, 5)]
        assert numbers == wanted
        pixels = (reference.images[numbers] * (255 / 16)).round()
        assert np.array_equal(np.stack([part.read(index)[..., 1] for index in range(len(part))]), pixels)
    one, other = (set(open_source(f"digits:{which}", "train").labels) for which in ("01234", "56789"))
    assert one == other == set(range(5))
    for bad in ("digits:0a", "digits:00"):
        with pytest.raises(ValueError, match="digits has the classes 0 to 9, each named once: digits:01234"):
            open_source(bad, "train")
