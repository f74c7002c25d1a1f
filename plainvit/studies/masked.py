"""Claims 24, 25 and 26: masked patch prediction, its returns, and few-shot accuracy as a stand-in for fine-tuning.

    plainvit study masked --budget cpu          also masked-steps, few-shot

The same model is pre-trained on the same images with the same augmentation for the same steps, with labels or by masked
prediction, and then fine-tuned on another dataset with the same settings. Few-shot accuracy (26) is that of the
pre-trained weights on the downstream dataset, over upstream runs with labels that differ in one setting each.
"""

import numpy as np
from matplotlib.figure import Figure

from plainvit.analyse.figures import COLORS, PANEL, new_axes, styled
from plainvit.config import Config, Masked
from plainvit.studies.base_configs import finetune_config, finetune_rates, plain, pretrain_config, vit
from plainvit.studies.measures import halves, with_few_shot
from plainvit.studies.study import Arm, Budget, Results, define, rate_arms
from plainvit.studies.verdict import Criterion, bootstrap, rank_correlations

STEP_DIVISORS = (64, 16, 4, 1)  # of the pre-training steps
LIMIT = 0.7  # of the rank correlation


# Arms -----------------------------------------------------------------------------------------------------------------


def supervised_config(budget: Budget) -> Config:
    """Pre-training with labels, without mixing of images: masked prediction has no labels to mix."""
    return plain(budget).replace(data=pretrain_config(budget).data)


def masked_config(budget: Budget, step_divisor: int = 1) -> Config:
    """Masked patch prediction instead of labels; all else is the same."""
    config = supervised_config(budget).replace(objective="masked", masked=Masked(ratio=0.5))
    return config.replace(steps=config.steps // step_divisor)


def arms(budget: Budget) -> dict[str, Arm]:
    tuned = finetune_config(budget)
    scratch = tuned.replace(model=vit(supervised_config(budget)).replace(classes=0, representation=0))
    made = rate_arms("scratch", scratch, finetune_rates(budget), group="scratch")
    for name, config in {"masked": masked_config(budget), "supervised": supervised_config(budget)}.items():
        made[f"{name}, before"] = Arm(config, is_compared=False)
        made |= rate_arms(name, tuned, finetune_rates(budget), group=name, parent=f"{name}, before")
    return made


def criteria(results: Results) -> list[Criterion]:
    scratch, masked, supervised = (results.best(start) for start in ("scratch", "masked", "supervised"))
    return [results.above(masked, scratch), results.above(supervised, masked)]


def step_arms(budget: Budget) -> dict[str, Arm]:
    """x is the number of pre-training steps."""
    arms: dict[str, Arm] = {}
    for divisor in STEP_DIVISORS:
        config = masked_config(budget, divisor)
        name = f"{config.steps:,} steps"
        arms[f"{name}, before"] = Arm(config, is_compared=False)
        arms[name] = Arm(finetune_config(budget), x=config.steps, group="masked", parent=f"{name}, before")
    return arms


def step_criteria(results: Results) -> list[Criterion]:
    first, second, third, last = results.group("masked")
    fall = {second: 1.0, first: -1.0, last: -1.0, third: 1.0}
    return [results.above(last, first), results.contrast("gain of the first fourfold - of the last", fall)]


def upstream(budget: Budget) -> dict[str, Config]:
    """Pre-trainings with labels, each with one setting changed."""
    config, cpu = pretrain_config(budget), budget == "cpu"
    model, optim = vit(config), config.optim
    shapes = {
        "half width": {"width": model.width // 2, "mlp_dim": model.mlp_dim // 2, "heads": 1},
        "half depth": {"depth": model.depth // 2},
        "large patches": {"patch": (4, 4) if cpu else (8, 8)},
        "small patches": {"patch": (1, 1) if cpu else (2, 2)},
        "no positions": {"posemb": "none"},
    }
    configs = {
        "base": config,
        "1/4 of the steps": config.replace(steps=config.steps // 4),
        "1/16 of the steps": config.replace(steps=config.steps // 16),
        "10 % of the images": config.replace(train_fraction=0.1),
        "1 % of the images": config.replace(train_fraction=0.05 if cpu else 0.01),
        "a tenth of the rate": config.replace(optim=optim.replace(lr=optim.lr / 10)),
        "no mixing": supervised_config(budget),
    }
    return configs | {name: config.replace(model=model.replace(**changes)) for name, changes in shapes.items()}


def few_shot_arms(budget: Budget) -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    for name, config in upstream(budget).items():
        arms[f"{name}, before"] = Arm(config, is_compared=False)
        arms[name] = Arm(finetune_config(budget), parent=f"{name}, before")
    return arms


def few_shot_criteria(results: Results) -> list[Criterion]:
    few, top1 = (np.array([results.mean(arm, metric) for arm in results.values]) for metric in ("few_shot", "top1"))
    runs = sum(map(len, results.values.values()))
    return [
        bootstrap(
            "rank correlation of 5-shot with fine-tuned accuracy",
            lambda picks: rank_correlations(few[picks], top1[picks]),
            len(few),
            LIMIT,
            runs,
        )
    ]


@styled()
def draw_few_shot(results: Results) -> Figure:
    """A dot for each upstream run."""
    figure, panel = new_axes((PANEL[0], 3.1))
    few, top1 = (
        100 * np.array([results.samples(arm, metric) for arm in results.values]) for metric in ("few_shot", "top1")
    )
    panel.scatter(few, top1, s=24, color=COLORS["blue"], alpha=0.7, linewidths=0)
    panel.set(xlabel="5-shot, before fine-tuning, %", title="fine-tuned, held-out top-1, %")
    return figure


STUDIES = (
    define("masked", arms, criteria, measure=halves, bars=True, runs=8),
    define("masked-steps", step_arms, step_criteria, xlabel="pre-training steps"),
    define("few-shot", few_shot_arms, few_shot_criteria, measure=with_few_shot, draw=draw_few_shot),
)
