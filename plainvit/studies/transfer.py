"""Claims 6, 7 and 8: pre-training beats scratch; higher resolutions help, with resampled positions; a head of zeros.

    plainvit study transfer --budget cpu
    plainvit study resolution --budget cpu
    plainvit study head --budget cpu

Every arm fine-tunes one pre-trained model for the same few steps (`bases.finetune_config`). Scratch has the same model
and steps, and the best of three learning rates, chosen on the compared images, which favours scratch. Images of
CIFAR-10 and digits are smaller than the model's, and enlarged, as in the paper.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from plainvit.analyse.figures import COLOURS, PANEL, new_figure, styled
from plainvit.config import About, Config, ViTConfig, pair
from plainvit.data.splits import open_splits
from plainvit.models import ViT, build
from plainvit.models.init import lecun_normal
from plainvit.studies.bases import DOWNSTREAM, finetune_config, pretrain_config, vit
from plainvit.studies.drawings import draw_curves, set_arm_ticks
from plainvit.studies.study import (
    Arm,
    Budget,
    Results,
    Study,
    Verdict,
    best_rate,
    check_non_inferior,
    decide_by_signs,
    paired_difference,
    warn_if_rate_at_edge,
)
from plainvit.weights import load

BEFORE = "pre-training"


def rates(budget: Budget, data: str) -> tuple[float, ...]:
    """The fine-tuning's own and one to either side."""
    lr = finetune_config(budget, data).optim.lr
    return lr / 3, lr, 3 * lr


def set_rate(config: Config, lr: float) -> Config:
    return config.replace(optim=config.optim.replace(lr=lr, grid=()))


# 6: pre-training against scratch --------------------------------------------------------------------------------------

FEW = ("oxford-pets", "flowers102", "digits:56789, a tenth")  # sets with few images of a class
TITLES = {"cifar10": "CIFAR-10", "oxford-pets": "Pets", "flowers102": "Flowers", "digits:56789": "digits"}
TITLES["digits:56789, a tenth"] = "a tenth of digits"


def tasks(budget: Budget) -> dict[str, Config]:
    """What is fine-tuned on, by name: sets with many and with few images of a class."""
    found = {data: finetune_config(budget, data) for data in DOWNSTREAM[budget]}
    if budget == "cpu":
        found |= {f"{data}, a tenth": config.replace(train_fraction=0.1) for data, config in found.items()}
    return found


def scratch_model(budget: Budget, config: Config) -> ViTConfig:
    """The pre-trained model at the size that it is fine-tuned at, with a linear head and new weights."""
    model = vit(pretrain_config(budget)).replace(classes=0, representation=0)
    return model.replace(image_size=(config.image_size, config.image_size)) if config.image_size else model


def arms(budget: Budget) -> dict[str, Arm]:
    found = {BEFORE: Arm(pretrain_config(budget), counts=False)}
    for at, (name, config) in enumerate(tasks(budget).items()):
        found[f"{name}, pre-trained"] = Arm(config, x=at, group=name, after=BEFORE)
        for lr in rates(budget, config.data):
            one = set_rate(config.replace(model=scratch_model(budget, config)), lr)
            found[f"{name}, scratch at {lr:.1e}"] = Arm(one, x=at, group=name)
    return found


def scratch_arms(found: Results, task: str) -> list[str]:
    """From scratch at each rate."""
    return [arm for arm in found.group(task) if arm != f"{task}, pre-trained"]


def best_scratch(found: Results, task: str) -> str:
    return best_rate(found, scratch_arms(found, task))


def gains(found: Results) -> dict[str, list[float]]:
    """Of each task, seed by seed: pre-trained less the best of scratch."""
    tasks = dict.fromkeys(arm.group for arm in found.arms.values())
    return {task: found.differences(best_scratch(found, task), f"{task}, pre-trained") for task in tasks}


def decide(found: Results) -> Verdict:
    """Pre-training gains everywhere, and more where a class has few images."""
    rows = gains(found)
    for task in rows:
        warn_if_rate_at_edge(found, best_scratch(found, task), scratch_arms(found, task))
    by_task = {task: paired_difference([0.0] * len(row), row) for task, row in rows.items()}
    few, many = (np.mean([row for task, row in rows.items() if (task in FEW) == wanted], axis=0) for wanted in (1, 0))
    more = paired_difference(many.tolist(), few.tolist())
    why = "pre-trained - scratch: " + "; ".join(f"{TITLES[task]} {one}" for task, one in by_task.items())
    why += f"; with few images a class it gains {more} more"
    return decide_by_signs([*(one.sign for one in by_task.values()), more.sign], why)


@styled()
def draw(found: Results) -> Figure:
    """Both bars of each task, a dot for each seed."""
    figure, axes = new_figure(1, 1, PANEL)
    panel: Axes = axes[0, 0]
    names = list(dict.fromkeys(arm.group for arm in found.arms.values()))
    for at, task in enumerate(names):
        both = {"pre-trained": f"{task}, pre-trained", "scratch, its best rate": best_scratch(found, task)}
        for shift, colour, (label, arm) in zip((-0.16, 0.16), ("blue", "orange"), both.items(), strict=True):
            values = 100 * np.array(found.of(arm))
            panel.bar(at + shift, values.mean(), 0.28, color=COLOURS[colour], alpha=0.75, label=None if at else label)
            panel.scatter(np.full(len(values), at + shift), values, s=14, color=COLOURS["ink"], linewidths=0, zorder=3)
    panel.set_xticks(range(len(names)), [TITLES[name] for name in names])
    panel.set(title="held-out top-1 after the same steps, %", xlim=(-0.6, len(names) - 0.4), ylim=(0, 119))
    panel.set_yticks(range(0, 101, 25))
    panel.legend(loc="upper right", ncols=2)
    return figure


# 7: resolution --------------------------------------------------------------------------------------------------------

SIZES: dict[Budget, tuple[int, ...]] = {"cpu": (8, 12, 16), "gpu": (64, 96, 128)}
RESAMPLED, REDRAWN = "resampled positions", "new positions"


def resolution_arms(budget: Budget) -> dict[str, Arm]:
    found = {BEFORE: Arm(pretrain_config(budget), counts=False)}
    sizes = SIZES[budget]
    for size in sizes:
        pretrained_size = size == sizes[0]
        config = finetune_config(budget, DOWNSTREAM[budget][0]).replace(image_size=0 if pretrained_size else size)
        found[f"{RESAMPLED}, {size} px"] = Arm(config, x=size, group=RESAMPLED, after=BEFORE)
        if size > sizes[0]:
            found[f"{REDRAWN}, {size} px"] = Arm(config, x=size, group=REDRAWN, after=BEFORE, edit=redraw_positions)
    return found


def redraw_positions(before: Path, config: Config) -> ViT:
    """The weights before it at the config's size, with positions as they are before training."""
    old = load(before)
    assert isinstance(old, ViT)
    model = build(old.config.replace(image_size=pair(config.image_size)))
    assert isinstance(model, ViT)
    model.initialise(torch.Generator().manual_seed(config.seed))
    kept = {name: value for name, value in old.state_dict().items() if not name.startswith("positions.")}
    model.load_state_dict(model.state_dict() | kept)
    model.about = old.about
    return model


def decide_resolution(found: Results) -> Verdict:
    """Accuracy rises from the first size to the last without a fall between, and resampled positions beat new ones."""
    kept, new = found.group(RESAMPLED), found.group(REDRAWN)
    rises = paired_difference(found.of(kept[0]), found.of(kept[-1]))
    steps = [paired_difference(found.of(a), found.of(b)) for a, b in pairwise(kept)]
    better = {found.arms[b].x: paired_difference(found.of(a), found.of(b)) for a, b in zip(new, kept[1:], strict=True)}
    why = f"{found.arms[kept[-1]].x:.0f} px less {found.arms[kept[0]].x:.0f} px: {rises}, by steps of "
    why += ", ".join(f"{100 * one.mean:+.2f}" for one in steps)
    why += "; resampled less new positions: " + "; ".join(f"{size:.0f} px {one}" for size, one in better.items())
    if any(one.sign < 0 for one in steps):
        return Verdict("not reproduced", why)
    return decide_by_signs([rises.sign, *(one.sign for one in better.values())], why)


def draw_resolution(found: Results) -> Figure:
    figure = draw_curves(found, "side of the image, pixels", "held-out top-1, %", {}, "", log=False)
    return set_arm_ticks(figure, found)


# 8: the new head ------------------------------------------------------------------------------------------------------

ZERO, LAST = "head of zeros", "last layer anew"
WORSE = 0.002  # what still counts as at least as good


def head_arms(budget: Budget) -> dict[str, Arm]:
    """A pre-training with the paper's hidden layer in its head, and fine-tunings without it and with it."""
    before = pretrain_config(budget)
    before = before.replace(model=vit(before).replace(representation=vit(before).width))
    config = finetune_config(budget, DOWNSTREAM[budget][0])
    found = {BEFORE: Arm(before, counts=False)}
    for lr in rates(budget, config.data):
        one = set_rate(config, lr)
        found[f"{ZERO}, {lr:.1e}"] = Arm(one, x=lr, group=ZERO, after=BEFORE)
        kept = one.replace(head="keep")
        found[f"{LAST}, {lr:.1e}"] = Arm(kept, x=lr, group=LAST, after=BEFORE, edit=redraw_last_layer)
    return found


def redraw_last_layer(before: Path, config: Config) -> ViT:
    """The weights before it, hidden layer and all, with a last layer for the config's classes.

    The paper does not say how it was drawn: here as its other layers that follow no non-linearity, by LeCun's rule.
    """
    model = load(before)
    assert isinstance(model, ViT)
    classes = len(open_splits(config).classes)
    model.config = model.config.replace(classes=classes)
    model.head = nn.Linear(model.config.representation or model.config.width, classes)
    with torch.no_grad():
        lecun_normal(model.head.weight, torch.Generator().manual_seed(config.seed))
        nn.init.zeros_(model.head.bias)
    model.about = About(preprocess=model.about.preprocess)  # whose class names are those before
    return model


def decide_head(found: Results) -> Verdict:
    """Over the rates, zeros are as good on average and vary less."""
    zero, last = (np.array([found.of(arm) for arm in found.group(name)]) for name in (ZERO, LAST))  # [rates, seeds]
    difference = paired_difference(last.mean(0).tolist(), zero.mean(0).tolist())
    steadier = paired_difference(np.ptp(zero, axis=0).tolist(), np.ptp(last, axis=0).tolist())
    why = f"averaged over the rates, {ZERO} less {LAST}: {difference}; its spread over them is smaller by {steadier}"
    return decide_by_signs([check_non_inferior(difference, WORSE), steadier.sign], why)


def draw_heads(found: Results) -> Figure:
    figure = draw_curves(found, "learning rate of fine-tuning", "held-out top-1, %", {}, "")
    return set_arm_ticks(figure, found, "{:.1e}")


STUDIES = (
    Study(
        number=6,
        name="transfer",
        claim="Pre-training and then fine-tuning is better than training from scratch, the more so with few images.",
        source="ViT, sections 3.2 and 4.2, Table 5",
        paper="There, ViT-B/16 from ImageNet-21k reaches 98.95 % of CIFAR-10, 94.43 % of Pets and 99.38 % of Flowers; "
        "from scratch is not reported.",
        rule="after the same steps, pre-trained beats scratch at its best of three rates by more than two standard "
        "errors on every set, and by more than two the gain is larger where a class has few images (Pets and Flowers; "
        "a tenth of the digits) than where it has many (CIFAR-10; all of the digits)",
        arms=arms,
        decide=decide,
        draw=draw,
    ),
    Study(
        number=7,
        name="resolution",
        claim="Fine-tuning at a higher resolution helps, with positions that are resampled from the pre-trained ones.",
        source="ViT, section 3.2",
        paper="There, models pre-trained at 224 px are fine-tuned at 384, and at 512 or 518 for the best results; the "
        "differences are not printed.",
        rule="the highest of three resolutions beats that of pre-training by more than two standard errors, neither "
        "step between them falls by as much, and at both higher ones resampled positions beat new ones by as much",
        arms=resolution_arms,
        decide=decide_resolution,
        draw=draw_resolution,
    ),
    Study(
        number=8,
        name="head",
        claim="A single new head of zeros is at least as good as the old head with its last layer drawn anew.",
        source="ViT, B.1.1",
        paper="There, a head of zeros in place of both layers is called a little more robust; no numbers.",
        rule="averaged over three rates, no loss above 0.2 points by the head of zeros is left open by two standard "
        "errors, and its spread over the rates is smaller by more than two; not reproduced where it is further below "
        "or its spread is larger, by more than two",
        arms=head_arms,
        decide=decide_head,
        draw=draw_heads,
    ),
)
