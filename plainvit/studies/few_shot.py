"""Claim 26: few-shot accuracy of frozen features foretells accuracy after fine-tuning (4.1).

plainvit study few-shot --budget cpu

The upstream runs are those of claims 24 and 25, with labels and without, long and short, and two shorter ones with
labels; all are fine-tuned in the same way.
"""

import statistics

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plainvit.analyse.figures import COLOURS, PANEL, new_figure, styled
from plainvit.config import Config
from plainvit.evaluate.statistics import rank_correlation
from plainvit.studies.bases import pretrain_config
from plainvit.studies.learned import difference_from
from plainvit.studies.masked import SHORTER, count_steps, divide_steps, fine_tunings, masked_config, measure
from plainvit.studies.study import Arm, Budget, Results, Study, Verdict, decide_by_signs


def upstream(budget: Budget) -> dict[str, Config]:
    labelled = {
        f"labels, 1/{by}" if by > 1 else "labels": divide_steps(pretrain_config(budget), by) for by in (16, 4, 1)
    }
    masked = {f"masked, {count_steps(budget, by):,} steps": masked_config(budget, shorter=by) for by in SHORTER}
    other = {"pixels": masked_config(budget, target="pixels"), "masked, 15 %": masked_config(budget, ratio=0.15)}
    return labelled | masked | other


def arms(budget: Budget) -> dict[str, Arm]:
    return fine_tunings(budget, upstream(budget))


def correlations(found: Results) -> list[float]:
    """Of each seed, over its upstream runs."""
    few, full = ([found.of(arm, metric) for arm in found.values] for metric in ("few_shot", "top1"))
    return [rank_correlation(a, b) for a, b in zip(zip(*few, strict=True), zip(*full, strict=True), strict=True)]


def decide(found: Results) -> Verdict:
    each = correlations(found)
    over = difference_from(0.7, each)
    words = ", ".join(f"{one:.2f}" for one in each)
    why = f"rank correlation over {len(found.values)} upstream runs {over.describe(limit=0.7)} ({words})"
    return decide_by_signs([over.sign], why)


@styled()
def draw(found: Results) -> Figure:
    """A dot for each upstream run of each seed."""
    figure, axes = new_figure(1, 1, (PANEL[0], 3.1))
    panel: Axes = axes[0, 0]
    kinds = {"labels": COLOURS["blue"], "masked": COLOURS["orange"], "pixels": COLOURS["green"]}
    for kind, colour in kinds.items():
        arms = [arm for arm in found.values if arm.startswith(kind)]
        few, full = (100 * np.array([found.of(arm, metric) for arm in arms]) for metric in ("few_shot", "top1"))
        panel.scatter(few, full, s=24, color=colour, alpha=0.7, linewidths=0, label=kind)
    mean = statistics.fmean(correlations(found))
    panel.set(
        xlabel="5-shot, before fine-tuning, %", title=f"fine-tuned, held-out top-1, %: rank correlation {mean:.2f}"
    )
    panel.legend(loc="best")
    return figure


STUDY = Study(
    number=26,
    name="few-shot",
    claim="Few-shot accuracy of frozen features tracks accuracy after fine-tuning.",
    source="ViT, 4.1",
    paper="There, few-shot accuracies stand in for fine-tuning where that would cost too much; no number is given.",
    rule="over all upstream runs, the rank correlation of 5-shot accuracy with accuracy after fine-tuning is above 0.7 "
    "by more than two standard errors over seeds; not reproduced where it is below by as much",
    arms=arms,
    measure=measure,
    decide=decide,
    draw=draw,
)

STUDIES = (STUDY,)
