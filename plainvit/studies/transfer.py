"""Claims 6, 7 and 8: pre-training beats scratch; higher resolutions help, with resampled positions; a head of zeros.

    plainvit study transfer --budget cpu          also resolution, head
    plainvit study transfer-published --data-root DIR          also resolution-published

Every arm fine-tunes one pre-trained model for the same few steps (`base_configs.finetune_config`). Scratch has the same
model and steps, and the best of its learning rates. Images of CIFAR-10 and digits are enlarged, as in the paper.

6 and 7 are also tested from published weights, ViT-Ti/16 (AugReg): DATA_ROOT/weights/vit_ti16_augreg.safetensors. On a
CPU transfer is then tested at 64 pixels and resolution on Pets with 20 steps, so that a run takes about a minute on one
core.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from plainvit.analyse.attention import require_vit
from plainvit.config import About, Config, ViTConfig, pair
from plainvit.data.splits import open_splits
from plainvit.models import ViT, build
from plainvit.models.init import lecun_normal
from plainvit.names import configure
from plainvit.studies.base_configs import DOWNSTREAM, finetune_config, finetune_rates, pretrain_config, vit
from plainvit.studies.measures import halves
from plainvit.studies.study import Arm, Budget, Results, define, rate_arms
from plainvit.studies.verdict import Criterion, require_above, welch
from plainvit.weights import load

PRETRAINING = "pre-training"


# 6: pre-training against scratch --------------------------------------------------------------------------------------

FEW = ("oxford-pets", "flowers102", "digits:56789, a tenth")  # sets with few images of a class


def tasks(budget: Budget) -> dict[str, Config]:
    """Sets with many and with few images of a class, by name."""
    configs = {data: finetune_config(budget, data) for data in DOWNSTREAM[budget]}
    if budget == "cpu":
        configs |= {f"{data}, a tenth": config.replace(train_fraction=0.1) for data, config in configs.items()}
    return configs


def arms(budget: Budget) -> dict[str, Arm]:
    """A group for each task."""
    made = {PRETRAINING: Arm(pretrain_config(budget), is_compared=False)}
    for task, config in tasks(budget).items():
        scratch = config.replace(model=vit(pretrain_config(budget)).replace(classes=0, representation=0))
        made[f"{task}, pre-trained"] = Arm(config, group=task, parent=PRETRAINING)
        made |= rate_arms(f"{task}, scratch", scratch, finetune_rates(budget), group=task)
    return made


def criteria(results: Results) -> list[Criterion]:
    """Pre-training gains in every task, and more where a class has few images."""
    tasks = results.groups()
    gains = {task: {f"{task}, pre-trained": 1.0, results.best(f"{task}, scratch"): -1.0} for task in tasks}
    few = [task for task in tasks if task in FEW]
    factors = {task: 1 / len(few) if task in few else -1 / (len(tasks) - len(few)) for task in tasks}
    more = {arm: factors[task] * weight for task in tasks for arm, weight in gains[task].items()}
    return [
        *(results.contrast(f"{task}, pre-trained - scratch", weights) for task, weights in gains.items()),
        results.contrast("gain with few images a class - with many", more),
    ]


# 7: resolution --------------------------------------------------------------------------------------------------------

SIZES: dict[Budget, tuple[int, ...]] = {"cpu": (8, 12, 16), "gpu": (32, 48, 64)}
RESAMPLED, REDRAWN = "resampled positions", "new positions"


def resolution_arms(budget: Budget) -> dict[str, Arm]:
    pretraining = Arm(pretrain_config(budget), is_compared=False)
    return {PRETRAINING: pretraining} | size_arms(finetune_config(budget), SIZES[budget], PRETRAINING)


def size_arms(config: Config, sizes: tuple[int, ...], parent: str = "") -> dict[str, Arm]:
    """The first size is that of pre-training."""
    arms: dict[str, Arm] = {}
    for size in sizes:
        changed = config.replace(image_size=0 if size == sizes[0] else size)
        arms[f"{RESAMPLED}, {size} px"] = Arm(changed, x=size, group=RESAMPLED, parent=parent)
        if size > sizes[0]:
            arms[f"{REDRAWN}, {size} px"] = Arm(changed, x=size, group=REDRAWN, parent=parent, edit=redraw_positions)
    return arms


def redraw_positions(checkpoint: Path, config: Config) -> ViT:
    """The weights of a checkpoint at the config's size, with positions as they are before training."""
    old = require_vit(load(checkpoint))
    model = require_vit(build(old.config.replace(image_size=pair(config.image_size))))
    model.initialize(torch.Generator().manual_seed(config.seed))
    kept = {name: value for name, value in old.state_dict().items() if not name.startswith("positions.")}
    model.load_state_dict(model.state_dict() | kept)
    model.about = old.about
    return model


def resolution_criteria(results: Results) -> list[Criterion]:
    """Accuracy rises from the first size to the last, no step falls by a point, and resampled positions are better."""
    resampled, new = results.group(RESAMPLED), results.group(REDRAWN)
    return [
        results.above(resampled[-1], resampled[0]),
        *(results.not_worse(high, low) for low, high in pairwise(resampled)),
        *(results.above(kept, redrawn) for kept, redrawn in zip(resampled[1:], new, strict=True)),
    ]


# 8: the new head ------------------------------------------------------------------------------------------------------

ZERO, LAST = "head of zeros", "new last layer"
HEAD_MARGIN = 0.005


def head_arms(budget: Budget) -> dict[str, Arm]:
    """A pre-training with the paper's hidden layer in its head, and fine-tunings without it and with it."""
    pretraining = pretrain_config(budget)
    model = vit(pretraining).replace(representation=vit(pretraining).width)
    config = finetune_config(budget)
    made = {PRETRAINING: Arm(pretraining.replace(model=model), is_compared=False)}
    made |= rate_arms(ZERO, config, finetune_rates(budget), group=ZERO, family="", parent=PRETRAINING)
    kept = config.replace(head="keep")
    return made | rate_arms(
        LAST, kept, finetune_rates(budget), group=LAST, family="", parent=PRETRAINING, edit=redraw_last_layer
    )


def redraw_last_layer(checkpoint: Path, config: Config) -> ViT:
    """The weights of a checkpoint, hidden layer and all, with a last layer for the config's classes.

    The paper does not say how it was drawn: here as its other layers that follow no non-linearity, by LeCun's rule.
    """
    model = require_vit(load(checkpoint))
    classes = len(open_splits(config).classes)
    model.config = model.config.replace(classes=classes)
    model.head = nn.Linear(model.config.representation or model.config.width, classes)
    with torch.no_grad():
        lecun_normal(model.head.weight, torch.Generator().manual_seed(config.seed))
        nn.init.zeros_(model.head.bias)
    model.about = About(preprocess=model.about.preprocess)  # the class names are other ones
    return model


def head_criteria(results: Results) -> list[Criterion]:
    """The mean over the rates, and the spread over the rates of runs with the same number."""
    rates = len(results.group(ZERO))
    weights = {arm: sign / rates for group, sign in ((ZERO, 1), (LAST, -1)) for arm in results.group(group)}
    spreads = [
        np.ptp([results.samples(arm) for arm in results.group(group)], axis=0).tolist() for group in (ZERO, LAST)
    ]
    return [
        results.contrast(f"{ZERO} - {LAST}, mean over the rates", weights, limit=-HEAD_MARGIN),
        require_above(f"spread over the rates, {LAST} - {ZERO}", welch(*spreads), unit="points"),
    ]


# 6 and 7 from published weights ---------------------------------------------------------------------------------------

SETS = ("cifar10", "oxford-pets", "flowers102")
WEIGHTS = "weights/vit_ti16_augreg.safetensors"
# The first size is that of pre-training
PUBLISHED_SIZES: dict[Budget, tuple[int, ...]] = {"cpu": (224, 256, 288), "gpu": (224, 288, 384)}
HOLDOUT = {"cifar10": 0.02, "oxford-pets": 0.2, "flowers102": 0.2}  # on a CPU: 1,000, 736 and 204 images


def published_model() -> ViTConfig:
    model = configure("ViT-Ti/16")
    assert isinstance(model, ViTConfig)
    return model.replace(classes=0, representation=0, image_size=pair(PUBLISHED_SIZES["gpu"][0]))


def published_arms(budget: Budget) -> dict[str, Arm]:
    """A group for each set. On a CPU the settings for a GPU are shortened: the CPU's own are for digits."""
    arms: dict[str, Arm] = {}
    for data in SETS:
        config, model = finetune_config("gpu", data), published_model()
        if budget == "cpu":
            config = config.replace(steps=60, batch=64, holdout=HOLDOUT[data], image_size=64)
            model = model.replace(image_size=pair(64))
        arms[f"{data}, pre-trained"] = Arm(config.replace(init=WEIGHTS), group=data)
        scratch = config.replace(model=model, image_size=0)
        arms |= rate_arms(f"{data}, scratch", scratch, finetune_rates("gpu"), group=data)
    return arms


def published_resolution_arms(budget: Budget) -> dict[str, Arm]:
    config: Config = finetune_config("gpu", SETS[0])
    if budget == "cpu":
        config = finetune_config("gpu", "oxford-pets").replace(steps=20, batch=32)
    return size_arms(config.replace(init=WEIGHTS), PUBLISHED_SIZES[budget])


STUDIES = (
    define("transfer", arms, criteria, measure=halves, bars=True, runs=8),
    define("transfer-published", published_arms, criteria, measure=halves, bars=True, runs=8),
    define("resolution", resolution_arms, resolution_criteria, xlabel="image side, pixels"),
    define("resolution-published", published_resolution_arms, resolution_criteria, xlabel="image side, pixels"),
    define("head", head_arms, head_criteria, xlabel="learning rate of fine-tuning", runs=8),
)
