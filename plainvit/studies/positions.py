"""Claim 1: positions are needed, and which kind of them hardly matters (Table 8).

plainvit study positions --budget cpu
"""

from matplotlib.figure import Figure

from plainvit.studies.bases import base, vit
from plainvit.studies.drawings import draw_arms
from plainvit.studies.study import Arm, Budget, Found, Study, Verdict, gap, settle

KINDS = {"none": "none", "1-D": "1d", "2-D": "2d", "relative": "relative"}
PAPER = {"none": 61.382, "1-D": 64.206, "2-D": 64.001, "relative": 64.032}  # 5-shot ImageNet, at the stem


def arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    return {
        name: Arm(config.replace(model=vit(config).replace(posemb=kind)), x=at)
        for at, (name, kind) in enumerate(KINDS.items())
    }


def decide(found: Found) -> Verdict:
    """Every kind beats none, and they differ among each other by less than a third of the least of these gaps."""
    gaps = {name: gap(found.of("none"), found.of(name)) for name in KINDS if name != "none"}
    means = [found.mean(name) for name in gaps]
    spread, least = max(means) - min(means), min(one.mean for one in gaps.values())
    why = "; ".join(f"{name} - none {one}" for name, one in gaps.items())
    why += f"; the kinds lie within {100 * spread:.2f} points"
    verdict = settle([one.sign for one in gaps.values()], why)
    if verdict.outcome == "reproduced" and spread >= least / 3:
        return Verdict("not reproduced", f"{why}, a third of the least gap or more")
    return verdict


def draw(found: Found) -> Figure:
    return draw_arms(found, "kind of positions", {name: value / 100 for name, value in PAPER.items()}, "paper, 5-shot")


STUDY = Study(
    number=1,
    name="positions",
    claim="Positions are needed, and which kind of them hardly matters.",
    source="ViT, Table 8 (D.4)",
    paper="There, ViT-B/16 reaches 61.4 % of 5-shot ImageNet without, and 64.0 to 64.2 % with any kind.",
    rule="every kind of positions beats none by more than two standard errors, and the kinds differ among each other "
    "by less than a third of the least of these gaps",
    arms=arms,
    decide=decide,
    draw=draw,
)

STUDIES = (STUDY,)
