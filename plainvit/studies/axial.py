"""Claim 18: axial attention is better than full attention, and costs more.

    plainvit study axial --budget cpu

ViT (arXiv 2010.11929), D.6 and Figure 13; claim 18. Each block becomes one that attends along rows and one that attends
along columns, each with an MLP of its own; all else is the base's, which pools by the average as axial blocks need it.
"""

from matplotlib.figure import Figure

from plainvit.analyse.figures import new_figure, styled
from plainvit.config import Config
from plainvit.planning import cost
from plainvit.studies.bases import base, vit
from plainvit.studies.compute import complete_model
from plainvit.studies.drawings import SERIES, draw_line, set_log_ticks
from plainvit.studies.study import Arm, Budget, Results, Study, Verdict, decide_by_signs, paired_difference

KINDS = {"plain": False, "axial": True}


def arms(budget: Budget) -> dict[str, Arm]:
    """x is millions of multiply-adds."""
    config = base(budget)
    pooled = vit(config).replace(pool="average", class_token=False)
    made = {name: config.replace(model=pooled.replace(axial=axial)) for name, axial in KINDS.items()}
    return {name: Arm(one, x=_millions(one), group=name) for name, one in made.items()}


def _millions(config: Config) -> float:
    return cost.macs(complete_model(config)) / 1e6


def decide(found: Results) -> Verdict:
    """Axial is better, and takes more compute."""
    difference = paired_difference(found.of("plain"), found.of("axial"))
    times = found.arms["axial"].x / found.arms["plain"].x
    return decide_by_signs(
        [difference.sign, 1 if times > 1 else -1],
        f"axial - plain {difference}, for {times:.2f} times the multiply-adds",
    )


@styled()
def draw(found: Results) -> Figure:
    figure, [[axes]] = new_figure()
    for name, colour in zip(KINDS, SERIES, strict=False):
        draw_line(axes, found, [name], colour, "")
        axes.plot(
            found.arms[name].x, 100 * found.mean(name), marker="_", markersize=22, markeredgewidth=2.4, color=colour
        )
        axes.annotate(
            name,
            (found.arms[name].x, 100 * found.mean(name)),
            xytext=(14, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )
    axes.set(title="held-out top-1, %", xlabel="multiply-adds per image, millions", xmargin=0.3)
    set_log_ticks(axes, [arm.x for arm in found.arms.values()])
    return figure


STUDY = Study(
    number=18,
    name="axial",
    claim="Axial attention is better than full attention in as many layers, and costs more compute.",
    source="ViT, D.6 and Figure 13",
    paper="There, Axial-ViT-B/32 and B/16 beat their plain twins in 5-shot ImageNet, at more compute; no table.",
    rule="the axial model beats the plain one by more than two standard errors, and has more multiply-adds",
    arms=arms,
    decide=decide,
    draw=draw,
)

STUDIES = (STUDY,)
