"""ResNets pre-trained by Adam, as ViTs are, or by SGD, as is usual for them.

    plainvit study resnet-optimiser --budget cpu

ViT (arXiv 2010.11929), D.1 and Table 7; claim 17. The paper compares its ResNets in their better form, and finds that
to be Adam's. Both are fine-tuned by SGD, as there. The ResNet is that of `compute`, so that its run serves both.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plainvit.analyse.figures import PANEL, new_figure, styled
from plainvit.config import Config, Optim
from plainvit.evaluate import paper
from plainvit.studies.bases import DOWNSTREAM, finetune_config, pretrain_config
from plainvit.studies.compute import models, short_run
from plainvit.studies.drawings import SERIES, draw_mean
from plainvit.studies.study import (
    Arm,
    Budget,
    Results,
    Study,
    Verdict,
    check_no_worse,
    decide_by_signs,
    paired_difference,
)

KINDS = ("Adam", "SGD")
TITLES = {"cifar10": "CIFAR-10", "oxford-pets": "Pets", "flowers102": "Flowers", "imagenet": "ImageNet"}


def upstream(budget: Budget) -> dict[str, Config]:
    """The pre-training by each optimiser."""
    config = pretrain_config(budget) if budget == "cpu" else short_run(budget)
    config = config.replace(model=models(budget)["ResNet"][1])
    return {"Adam": config, "SGD": config.replace(optim=bit(config))}


def bit(config: Config) -> Optim:
    """BiT's SGD with a rate proportional to the batch; warm-up and schedule of the other arm."""
    optim, rate = config.optim, 0.03 * config.batch / 256
    return Optim(name="sgd", lr=rate, weight_decay=1e-4, warmup=optim.warmup, schedule=optim.schedule, clip=0.0)


def tuned(budget: Budget, data: str) -> Config:
    """The fine-tuning of all studies, but with SGD at the highest rate of Table 4 for small datasets."""
    return finetune_config(budget, data).replace(optim=Optim(name="sgd", lr=0.03, warmup=0.1))


def arms(budget: Budget) -> dict[str, Arm]:
    found: dict[str, Arm] = {}
    for kind, config in upstream(budget).items():
        found[f"{kind}, pre-trained"] = Arm(config, counts=False)
        for data in DOWNSTREAM[budget]:
            found[f"{kind}, {data}"] = Arm(tuned(budget, data), group=kind, after=f"{kind}, pre-trained")
    return found


def averages(found: Results, kind: str) -> list[float]:
    """Mean over all downstream datasets for each seed."""
    return np.mean([found.of(arm) for arm in found.group(kind)], axis=0).tolist()


def decide(found: Results) -> Verdict:
    """Adam's average is no worse."""
    difference = paired_difference(averages(found, "SGD"), averages(found, "Adam"))
    means = " and ".join(f"{kind} {100 * np.mean(averages(found, kind)):.2f} %" for kind in KINDS)
    return decide_by_signs(
        [check_no_worse(difference)], f"after fine-tuning, on average {means}; Adam - SGD {difference}"
    )


@styled()
def draw(found: Results) -> Figure:
    figure, axes = new_figure(1, 2, PANEL)
    sets = list(dict.fromkeys(arm.split(", ")[-1] for arm in found.arms))
    ours = {
        kind: [[100 * x for arm in _arms_on(found, kind, data) for x in found.of(arm)] for data in sets]
        for kind in KINDS
    }
    theirs = {kind: [[_paper(kind, title)] for title in TITLES.values()] for kind in KINDS}
    _draw_bars(axes[0, 0], ours, [TITLES.get(data, data) for data in sets], "plainvit, held-out top-1, %")
    _draw_bars(axes[0, 1], theirs, list(TITLES.values()), "paper, R50x1 after JFT-300M, %")
    return figure


def _arms_on(found: Results, kind: str, data: str) -> list[str]:
    return [arm for arm in found.group(kind) if arm.endswith(f", {data}")]


def _paper(kind: str, column: str) -> float:
    value = paper.table(7).value(f"BiT-R50x1, {kind}", column)
    assert value is not None
    return value


def _draw_bars(axes: Axes, values: dict[str, list[list[float]]], names: list[str], title: str) -> None:
    """For each set, the two optimisers side by side: a bar at the mean, a dot for each seed."""
    for side, colour, kind in zip((-0.18, 0.18), SERIES, KINDS, strict=False):
        for at, row in enumerate(values[kind]):
            label = kind if at == 0 else None
            draw_mean(axes, at + side, row, colour, label, half=0.13)
    axes.set(title=title, xlim=(-0.6, len(names) - 0.4))
    axes.set_xticks(range(len(names)), names)
    axes.legend()


STUDY = Study(
    number=17,
    name="resnet-optimiser",
    claim="Pre-training ResNets with Adam is no worse than with SGD.",
    source="ViT, D.1 and Table 7",
    paper="There, the mean of five sets is 89.3 % with Adam and 88.8 % with SGD for R50x1, 94.0 and 93.7 % for R152x2.",
    rule="averaged over the sets that are fine-tuned on, Adam is not worse than SGD by more than two standard errors, "
    "and no loss above a point is left open",
    arms=arms,
    decide=decide,
    draw=draw,
)

STUDIES = (STUDY,)
