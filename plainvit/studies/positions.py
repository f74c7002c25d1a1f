"""Claims 1 and 2: positions are needed, which kind of them hardly matters, and nor does where they are added (Table 8).

plainvit study positions --budget cpu
plainvit study position-places --budget cpu
"""

from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plainvit.analyse.figures import PANEL, new_figure, styled
from plainvit.evaluate.paper import table
from plainvit.studies.bases import base, vit
from plainvit.studies.drawings import SERIES, draw_arms, draw_line
from plainvit.studies.study import (
    Arm,
    Budget,
    Results,
    Study,
    Verdict,
    check_equivalent,
    decide_by_signs,
    paired_difference,
)

PLACES = {"stem": "stem", "every layer": "every", "shared": "shared"}  # as Table 8 has its columns
KINDS = {"none": "none", "1-D": "1d", "2-D": "2d", "relative": "relative"}


def paper() -> dict[str, dict[str, float]]:
    """5-shot ImageNet of Table 8, as shares: kind -> place -> value."""
    places = dict(zip(PLACES, table(8).columns, strict=True))
    rows = {name: {place: table(8).value(name, title) for place, title in places.items()} for name, _ in table(8).rows}
    return {name: {place: value for place, value in row.items() if value} for name, row in rows.items()}


def arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    return {
        name: Arm(config.replace(model=vit(config).replace(posemb=kind)), x=at)
        for at, (name, kind) in enumerate(KINDS.items())
    }


def decide(found: Results) -> Verdict:
    """Every kind beats none, and no two of them differ by a third of the least of these gaps."""
    gaps = {name: paired_difference(found.of("none"), found.of(name)) for name in KINDS if name != "none"}
    third = min(one.mean for one in gaps.values()) / 3
    means = [found.mean(name) for name in gaps]
    why = "; ".join(f"{name} - none {one}" for name, one in gaps.items())
    why += f"; the kinds lie within {100 * (max(means) - min(means)):.2f} points, a third of the least gap is "
    needed = [one.sign for one in gaps.values()]
    among = [check_equivalent(paired_difference(found.of(a), found.of(b)), third) for a, b in combinations(gaps, 2)]
    return decide_by_signs(needed + among * all(sign > 0 for sign in needed), f"{why}{100 * third:.2f}")


def draw(found: Results) -> Figure:
    return draw_arms(found, "kind of positions", {kind: row["stem"] for kind, row in paper().items()}, "paper, 5-shot")


STUDY = Study(
    number=1,
    name="positions",
    claim="Positions are needed, and which kind of them hardly matters.",
    source="ViT, Table 8 (D.4)",
    paper="There, ViT-B/16 reaches 61.4 % of 5-shot ImageNet without, and 64.0 to 64.2 % with any kind.",
    rule="every kind of positions beats none by more than two standard errors, and between no two kinds a difference "
    "above a third of the least of these gaps is left open by two standard errors; not reproduced where there is one, "
    "and by more than two",
    arms=arms,
    decide=decide,
    draw=draw,
)


# 2: where they are added ----------------------------------------------------------------------------------------------

TABLES = ("1-D", "2-D")  # kinds that are added somewhere


def place_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    return {
        f"{kind}, {place}": Arm(
            config.replace(model=vit(config).replace(posemb=KINDS[kind], posemb_at=where)), x=at, group=kind
        )
        for kind in TABLES
        for at, (place, where) in enumerate(PLACES.items())
    }


def decide_places(found: Results) -> Verdict:
    """Neither other place is a point away from the stem; one that may be leaves it open."""
    gaps = {
        f"{kind}, {place}": paired_difference(found.of(f"{kind}, stem"), found.of(f"{kind}, {place}"))
        for kind in TABLES
        for place in PLACES
        if place != "stem"
    }
    why = "against the stem: " + "; ".join(f"{name} {one}" for name, one in gaps.items())
    return decide_by_signs([check_equivalent(one) for one in gaps.values()], why)


@styled()
def draw_places(found: Results) -> Figure:
    """A curve for each kind over the places, ours and the paper's."""
    figure, axes = new_figure(1, 2, PANEL)
    ours, theirs = axes[0]
    for kind, colour in zip(TABLES, SERIES, strict=False):
        draw_line(ours, found, found.group(kind), colour, kind)
        printed = [100 * value for value in paper()[kind].values()]
        theirs.plot(range(len(PLACES)), printed, marker="o", color=colour, label=kind)
    panel: Axes
    for panel, title in ((ours, "plainvit, held-out top-1, %"), (theirs, "paper, 5-shot, %")):
        panel.set_xticks(range(len(PLACES)), list(PLACES))
        panel.set(title=title, xlabel="where positions are added", xlim=(-0.3, len(PLACES) - 0.7))
        panel.legend()
    theirs.set_ylim(62, 66)
    low, high = ours.get_ylim()
    spare = max(4 - (high - low), 0) / 2  # at least the range of the paper's panel
    ours.set_ylim(low - spare, high + spare)
    return figure


PLACES_STUDY = Study(
    number=2,
    name="position-places",
    claim="Where positions are added hardly matters: once, at every layer, or the same ones at every layer.",
    source="ViT, Table 8 (D.4)",
    paper="There, 1-D and 2-D positions reach 63.96 to 64.29 % of 5-shot ImageNet in all three places.",
    rule="for 1-D and for 2-D positions, no difference above 1 point of either other place from the stem is left open "
    "by two standard errors; not reproduced where one is further away, and by more than two",
    arms=place_arms,
    decide=decide_places,
    draw=draw_places,
)

STUDIES = (STUDY, PLACES_STUDY)
