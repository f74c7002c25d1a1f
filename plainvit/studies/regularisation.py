"""Claims 9 and 31: regularisation helps from scratch; stochastic depth is as good as dropout.

    plainvit study regularisation --budget cpu
    plainvit study stochastic-depth --budget cpu

A grid of weight decays and dropouts, without anything else that regularises: no mixing of images, no stochastic depth.
On a GPU a run is 60 epochs long, which is long enough to overfit. Dropout and stochastic depth are at AugReg's rates.
"""

from functools import partial

from plainvit.config import Config
from plainvit.studies.bases import plain, set_epochs, vit
from plainvit.studies.drawings import draw_curves
from plainvit.studies.evidence import Part
from plainvit.studies.measures import halves
from plainvit.studies.study import Arm, Budget, Results, define

DECAYS, DROPOUTS = (0.0, 0.03, 0.1, 0.3), (0.0, 0.1)
NONE = "decay 0, dropout 0"
RATE = 0.1  # of dropout, and of stochastic depth in the last block


def long_run(budget: Budget) -> Config:
    return plain(budget).replace(steps=200) if budget == "cpu" else set_epochs(plain(budget), 60)


def regularise(budget: Budget, decay: float, dropout: float = 0.0, stochastic_depth: float = 0.0) -> Config:
    config = long_run(budget)
    model = vit(config).replace(dropout=dropout, stochastic_depth=stochastic_depth)
    return config.replace(model=model, optim=config.optim.replace(weight_decay=decay))


def arms(budget: Budget) -> dict[str, Arm]:
    return {
        f"decay {decay:g}, dropout {dropout:g}": Arm(
            regularise(budget, decay, dropout), x=decay, group=f"dropout {dropout:g}"
        )
        for dropout in DROPOUTS
        for decay in DECAYS
    }


def parts(found: Results) -> list[Part]:
    """The best cell, chosen on images that do not decide."""
    best = max((arm for arm in found.values if arm != NONE), key=lambda arm: found.mean(arm, "choice"))
    return [found.above(best, NONE)]


def depth_arms(budget: Budget) -> dict[str, Arm]:
    """The first two are cells of the grid."""
    return {
        "neither": Arm(regularise(budget, RATE)),
        "dropout": Arm(regularise(budget, RATE, dropout=RATE)),
        "stochastic depth": Arm(regularise(budget, RATE, stochastic_depth=RATE)),
    }


STUDIES = (
    define("regularisation", arms, parts, measure=halves, draw=partial(draw_curves, xlabel="weight decay", log=False)),
    define(
        "stochastic-depth",
        depth_arms,
        lambda found: [found.not_worse("stochastic depth", "dropout")],
        xlabel="left out at random, at a rate of 0.1",
    ),
)
