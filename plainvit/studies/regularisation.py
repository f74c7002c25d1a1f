"""Claim 9: from scratch, regularisation matters (3 and 4.3: weight decay and dropout are tuned for each data set).

    plainvit study regularisation --budget cpu

A grid of weight decays and dropouts, without anything else that regularises: no mixing of images, no stochastic depth.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plainvit.analyse.figures import PANEL, new_figure, styled
from plainvit.config import Config
from plainvit.evaluate.grid import warn_at_edge
from plainvit.studies.bases import base, vit
from plainvit.studies.study import Arm, Budget, Results, Study, Verdict, decide_by_signs, paired_difference

DECAYS, DROPOUTS = (0.0, 0.03, 0.1, 0.3), (0.0, 0.1)
NONE = "decay 0, dropout 0"


def plain(budget: Budget) -> Config:
    """The base without its mixing of images and its stochastic depth."""
    config = base(budget)
    augment = config.augment.replace(mixup=0.0, cutmix=0.0)
    steps = 200 if budget == "cpu" else config.steps  # eight arms in two minutes
    return config.replace(model=vit(config).replace(stochastic_depth=0.0), augment=augment, steps=steps)


def arms(budget: Budget) -> dict[str, Arm]:
    config = plain(budget)
    return {
        f"decay {decay:g}, dropout {dropout:g}": Arm(
            config.replace(model=vit(config).replace(dropout=dropout), optim=config.optim.replace(weight_decay=decay)),
            x=decay,
            group=f"dropout {dropout:g}",
        )
        for dropout in DROPOUTS
        for decay in DECAYS
    }


def decide(found: Results) -> Verdict:
    """The best of the regularised against none."""
    best = max((arm for arm in found.values if arm != NONE), key=found.mean)
    difference = paired_difference(found.of(NONE), found.of(best))
    config = found.arms[best].config
    warn_at_edge(config.optim.weight_decay, DECAYS, "the best weight decay", "give the study more of them")
    warn_at_edge(vit(config).dropout, DROPOUTS, "the best dropout", "give the study more of them")
    return decide_by_signs([difference.sign], f"the best, {best}, is {difference} above none")


@styled()
def draw(found: Results) -> Figure:
    """The grid, each cell with its mean; what is above none in one colour, what is below in the other."""
    grid = np.array([[100 * found.mean(arm) for arm in found.group(f"dropout {one:g}")] for one in DROPOUTS])
    figure, axes = new_figure(1, 1, PANEL)
    panel: Axes = axes[0, 0]
    difference = grid - 100 * found.mean(NONE)
    most = max(float(abs(difference).max()), 0.1)
    panel.imshow(difference, cmap="PuOr_r", vmin=-1.6 * most, vmax=1.6 * most, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        words = f"{value:.1f}\n({difference[row, column]:+.1f})" if (row, column) != (0, 0) else f"{value:.1f}"
        panel.text(column, row, words, ha="center", va="center", fontsize=10)
    panel.set_xticks(range(len(DECAYS)), [f"{one:g}" for one in DECAYS])
    panel.set_yticks(range(len(DROPOUTS)), [f"{one:g}" for one in DROPOUTS])
    panel.grid(visible=False)
    panel.set(title="held-out top-1, % (against none, points)", xlabel="weight decay", ylabel="dropout")
    return figure


STUDY = Study(
    number=9,
    name="regularisation",
    claim="From scratch, a ViT gains from regularisation.",
    source="ViT, Table 3 and section 4.3",
    paper="There, weight decay 0.3 and dropout 0.1 were chosen for ImageNet, 0.1 and none for JFT-300M; the grid's "
    "accuracies are not printed.",
    rule="the best cell of weight decay (0, 0.03, 0.1, 0.3) by dropout (0, 0.1) beats the one without either by more "
    "than two standard errors",
    arms=arms,
    decide=decide,
    draw=draw,
)

STUDIES = (STUDY,)
