"""Claim 27: averaged weights (Polyak) are at least as good as the last ones of a fine-tuning (4.1, Table 2).

plainvit study averaging --budget cpu

The paper's decay of 0.9999 is that of 10,000 of its 20,000 steps, and so of half of the run here. As in TensorFlow the
window grows with the run, and so comes to a ninth of it at most.
"""

from matplotlib.figure import Figure

from plainvit.studies.bases import DOWNSTREAM, finetune_config, pretrain_config
from plainvit.studies.drawings import draw_arms
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

HALF = 0.5


def arms(budget: Budget) -> dict[str, Arm]:
    config = finetune_config(budget, DOWNSTREAM[budget][0])
    return {
        "before": Arm(pretrain_config(budget), counts=False),
        "last weights": Arm(config, after="before"),
        "averaged": Arm(config.replace(ema_window=HALF), after="before"),
    }


def decide(found: Results) -> Verdict:
    more = paired_difference(found.of("last weights"), found.of("averaged"))
    why = f"averaged - last weights {more}"
    if found.of("last weights") == found.of("averaged"):
        return Verdict("not decided", f"{why}: no answer differs in number")
    return decide_by_signs([check_no_worse(more)], why)


def draw(found: Results) -> Figure:
    return draw_arms(found, "what is evaluated", {}, "")


STUDY = Study(
    number=27,
    name="averaging",
    claim="Averaged weights are at least as good as the last ones of a fine-tuning.",
    source="ViT, 4.1 and Table 2",
    paper="There, the best results on ImageNet, such as 88.55 % of ViT-H/14, take averaged weights at a higher "
    "resolution; what the average alone gives is not said.",
    rule="averaged weights are not worse than the last ones by more than two standard errors, and no loss above a "
    "point is left open; not decided where no run's accuracy differs",
    arms=arms,
    decide=decide,
    draw=draw,
)

STUDIES = (STUDY,)
