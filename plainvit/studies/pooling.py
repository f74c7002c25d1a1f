"""Claim 16: a class token and average pooling are equally good, each at its own learning rate (D.3, Figure 9).

plainvit study pooling --budget cpu
"""

from matplotlib.figure import Figure

from plainvit.studies.bases import base, vit
from plainvit.studies.drawings import draw_curves, set_arm_ticks
from plainvit.studies.study import (
    FEWEST,
    Arm,
    Budget,
    Results,
    Study,
    Verdict,
    best_rate,
    check_equivalent,
    decide_by_signs,
    paired_difference,
    warn_if_rate_at_edge,
)

TOKEN, AVERAGE = "class token", "average"


def rates(budget: Budget) -> tuple[float, ...]:
    """The base's own and one to either side; on digits, where 300 steps want a higher one, two above."""
    lr = base(budget).optim.lr
    return {"cpu": (lr, 3 * lr, 9 * lr), "gpu": (lr / 3, lr, 3 * lr)}[budget]


def arms(budget: Budget) -> dict[str, Arm]:
    """Average pooling has patches alone and a linear head."""
    config = base(budget)
    models = {
        TOKEN: vit(config).replace(pool="token", class_token=True),
        AVERAGE: vit(config).replace(pool="average", class_token=False, representation=0),
    }
    return {
        f"{name}, {lr:.1e}": Arm(config.replace(model=model, optim=config.optim.replace(lr=lr)), x=lr, group=name)
        for name, model in models.items()
        for lr in rates(budget)
    }


def decide(found: Results) -> Verdict:
    """The best of each against the other, and where on the grid the two lie."""
    token, average = (best_rate(found, found.group(name)) for name in (TOKEN, AVERAGE))
    difference = paired_difference(found.of(token), found.of(average))
    lower = found.arms[average].x <= found.arms[token].x
    why = f"at their best rates ({average}; {token}) average pooling is {difference} above the class token"
    why += "" if lower else "; average pooling wants the higher rate"
    if any(
        [
            warn_if_rate_at_edge(found, token, found.group(TOKEN)),
            warn_if_rate_at_edge(found, average, found.group(AVERAGE)),
        ]
    ):
        why += "; a best rate is at an end of the grid, so a better one may lie beyond it"
    return decide_by_signs(
        [check_equivalent(difference), (1 if lower else -1) if difference.seeds >= FEWEST else 0], why
    )


def draw(found: Results) -> Figure:
    return set_arm_ticks(draw_curves(found, "learning rate", "held-out top-1, %", {}, ""), found, "{:.1e}")


STUDY = Study(
    number=16,
    name="pooling",
    claim="A class token and average pooling are equally good, and average pooling wants no higher a learning rate.",
    source="ViT, Figure 9 (D.3)",
    paper="There, average pooling at 8e-4, the class token's rate, is far below it, and equal to it at 3e-4; the "
    "accuracies are not printed. The same group later found average pooling better for ViT-S/16 on ImageNet, 76.5 "
    "against 75.0 % (arXiv 2205.01580).",
    rule="at the best rate of each, no difference above 1 point is left open by two standard errors, and the best rate "
    "of average pooling is no higher; not reproduced where it is higher, or where they are a point and more than two "
    "standard errors apart",
    arms=arms,
    decide=decide,
    draw=draw,
)

STUDIES = (STUDY,)
