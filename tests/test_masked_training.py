"""Whole runs of masked prediction, small ones: exact resume, validation, the report, fine-tuning after it."""

import math
from pathlib import Path
from typing import Any

import pytest
import small_runs as runs
import torch
from small_runs import complete_run, losses, stopped_run
from tiny import mostly_slow

import plainvit
from plainvit.config import Augment, Config, Masked, Optim, ViTConfig
from plainvit.data.splits import open_splits
from plainvit.models import ViT
from plainvit.runtime.folder import Folder, read_metrics
from plainvit.train.replay import replay
from plainvit.train.run import fit
from plainvit.train.setup import build_training
from plainvit.train.transfer import complete_config

MODEL = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=(4, 4), image_size=(16, 16), classes=0)
SHAPES = "shapes:size=16,count=60,classes=3"
MAE = Masked(ratio=0.75, target="pixels", normalize=True, depth=1, width=16, heads=2)
KINDS: dict[str, tuple[Any, Masked]] = {
    "color": ("masked", Masked()),
    "colors16": ("masked", Masked(target="colors16")),
    "pixels": ("masked", Masked(target="pixels")),
    "mae": ("mae", MAE),
}
quick = pytest.mark.usefixtures("no_figures")  # but figures of masked prediction are drawn


def config(kind: str = "mae", **changes: Any) -> Config:
    name, masked = KINDS[kind]
    settings: dict[str, Any] = {"model": MODEL, "data": SHAPES, "objective": name, "masked": masked, "ema": 0.0}
    return runs.config(**settings | {"augment": Augment(crop="pad", pad=1), "holdout": 0.2} | changes)


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", mostly_slow(["mae", "color"], 2))
def test_a_run_that_was_stopped_ends_as_one_that_was_not(kind: str, tmp_path: Path) -> None:
    """And a step that follows a checkpoint can be repeated."""
    run_config, out = config(kind, keep=5), tmp_path / "run"
    stopped_run(run_config, out, 8)
    assert complete_run(run_config, out) == complete_run(run_config, tmp_path / "whole")
    assert replay(out, step=10)["loss"] == pytest.approx(losses(out)[9], rel=1e-6)


@pytest.mark.parametrize("kind", mostly_slow(["color", "colors16", "mae", "pixels"], 2))
@quick
def test_validation_is_the_loss_on_the_same_masks(kind: str, tmp_path: Path) -> None:
    done = fit(config(kind), tmp_path / "run", quiet=True)
    lines = list(read_metrics(tmp_path / "run"))
    validations = [line["val"] for line in lines if "val" in line]
    colors = kind.startswith("color")
    assert len(validations) == 3
    assert all(set(one) == ({"loss", "accuracy"} if colors else {"loss"}) for one in validations)
    assert all(("accuracy" in line) == colors for line in lines if "lr" in line)
    result = done.metrics["val"]
    assert result["loss"] == pytest.approx(validations[-1]["loss"], rel=1e-6)
    assert "test" not in done.metrics
    assert sorted(path.name for path in (tmp_path / "run/figures").iterdir()) == [
        f"masked-{step:07d}.png" for step in (4, 8, 12)
    ]


@pytest.mark.parametrize(("kind", "most"), mostly_slow([("color", 0.9 * math.log(512)), ("mae", 0.95)], 2))
@quick
def test_masked_prediction_learns(kind: str, most: float, tmp_path: Path) -> None:
    """Flat patches of a known color are easily predicted from their neighbors; a constant has log(512), or 1."""
    done = fit(config(kind, steps=60, evaluations=2, optim=Optim(lr=1e-2, warmup=0.1)), tmp_path, quiet=True)
    first = next(line["val"]["loss"] for line in read_metrics(tmp_path) if "val" in line)
    assert done.metrics["val"]["loss"] < min(first, most)


@quick
def test_the_result_is_a_plain_vit_to_fine_tune(tmp_path: Path) -> None:
    """Nothing special: --init takes the run folder, for the model of the weights or a recipe's own."""
    fit(config("mae"), tmp_path / "masked", quiet=True)
    encoder = plainvit.load(tmp_path / "masked/model.safetensors")
    assert isinstance(encoder, ViT)
    assert (encoder.config, encoder.about.class_names) == (MODEL, ())
    assert encoder.head is None
    for model in (None, MODEL.replace(stochastic_depth=0.1)):
        tuned = runs.config(init=str(tmp_path / "masked"), model=model, data=SHAPES, steps=4)
        splits = open_splits(tuned)
        with Folder(tmp_path / "look", writes=False) as folder:
            run = build_training(complete_config(tuned, splits), splits, folder, quiet=True)
        for name, weight in encoder.state_dict().items():
            assert torch.equal(run.objective.model.state_dict()[name], weight), name
        done = fit(tuned, tmp_path / f"tuned{model is None}", quiet=True)
        assert done.model.config.classes == 3
        assert "top1" in done.metrics["val"]


# The report -----------------------------------------------------------------------------------------------------------


def test_the_report_shows_what_was_hidden_and_predicted(tmp_path: Path) -> None:
    fit(config("mae"), tmp_path / "run", quiet=True)
    page = (tmp_path / "run/report.html").read_text()
    assert "Masked prediction" in page
    assert page.count("Images, masked images and predictions at step") == 3
    assert "as a masked autoencoder" in page
    assert "validation loss" in page
    assert "top-1" not in page
