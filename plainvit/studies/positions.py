"""Claims 1 and 2: positions are needed; neither their kind nor where they are added matters much (Table 8).

plainvit study positions --budget cpu
plainvit study position-places --budget cpu
"""

from itertools import combinations

from plainvit.evaluate.paper import table
from plainvit.studies.bases import base, vit
from plainvit.studies.drawings import Curve, draw_arms, draw_curves, with_paper
from plainvit.studies.evidence import Part
from plainvit.studies.study import Arm, Budget, Results, define

PLACES = {"stem": "stem", "every layer": "every", "shared": "shared"}  # as Table 8 has its columns
KINDS = {"none": "none", "1-D": "1d", "2-D": "2d", "relative": "relative"}
TABLES = ("1-D", "2-D")  # kinds that are added somewhere


def paper() -> dict[str, dict[str, float]]:
    """5-shot ImageNet of Table 8 in percent: kind -> place -> value."""
    places = dict(zip(PLACES, table(8).columns, strict=True))
    rows = {name: {place: table(8).value(name, title) for place, title in places.items()} for name, _ in table(8).rows}
    return {name: {place: 100 * value for place, value in row.items() if value} for name, row in rows.items()}


def paper_stem() -> dict[str, float]:
    return {kind: row["stem"] for kind, row in paper().items()}


def paper_places() -> dict[str, Curve]:
    return {kind: list(enumerate(paper()[kind].values())) for kind in TABLES}


def arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    return {name: Arm(config.replace(model=vit(config).replace(posemb=kind))) for name, kind in KINDS.items()}


def parts(found: Results) -> list[Part]:
    kinds = [name for name in KINDS if name != "none"]
    needed = [found.above(kind, "none") for kind in kinds]
    return needed + [found.equal(b, a) for a, b in combinations(kinds, 2)]


def place_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    return {
        f"{kind}, {place}": Arm(
            config.replace(model=vit(config).replace(posemb=KINDS[kind], posemb_at=where)), x=at, group=kind
        )
        for kind in TABLES
        for at, (place, where) in enumerate(PLACES.items())
    }


def place_parts(found: Results) -> list[Part]:
    return [found.equal(f"{kind}, {place}", f"{kind}, stem") for kind in TABLES for place in PLACES if place != "stem"]


STUDIES = (
    define(
        "positions",
        arms,
        parts,
        draw=with_paper(draw_arms, "kind of positions", paper_stem, "paper, 5-shot, %"),
        runs=8,
    ),
    define(
        "position-places",
        place_arms,
        place_parts,
        draw=with_paper(
            lambda *given, **named: draw_curves(*given, log=False, **named),
            "stem, every layer, shared by every layer",
            paper_places,
            "paper, 5-shot, %",
        ),
        runs=8,
    ),
)
