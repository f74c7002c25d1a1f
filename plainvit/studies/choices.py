"""Three choices inside a block that the paper makes without a comparison, each against what else is usual.

    plainvit study norm-place --budget cpu
    plainvit study stochastic-depth --budget cpu
    plainvit study activation --budget cpu

Numbers 30, 31 and 32. Each rule is two-sided: one of the two is better, or it is not decided; "reproduced" is what the
literature says of them: Xiong et al. (arXiv 2002.04745) on where the norm stands and warm-up; Huang et al. (1603.09382)
and AugReg (2106.10270) on stochastic depth, at AugReg's rates; Hendrycks and Gimpel (1606.08415) on the GELU.
"""

from matplotlib.figure import Figure

from plainvit.studies.bases import base, vit
from plainvit.studies.compute import short_run
from plainvit.studies.drawings import draw_arms
from plainvit.studies.study import (
    Arm,
    Budget,
    Difference,
    Results,
    Study,
    Verdict,
    check_no_worse,
    decide_by_signs,
    paired_difference,
)

NORMS = ("pre", "post")
COLD = "no warm-up"
RATE = 0.1  # of dropout, and of stochastic depth in the last block
NO_WORSE = "is not worse than {} by more than two standard errors, and no loss above a point is left open"


def better(difference: Difference, first: str, second: str) -> str:
    """Which of the two, in words; the difference is second - first."""
    if not difference.sign:
        return f"neither is better for certain ({second} - {first} {difference})"
    return f"{second if difference.sign > 0 else first} is better ({second} - {first} {difference})"


# Where the norm stands ------------------------------------------------------------------------------------------------


def norm_arms(budget: Budget) -> dict[str, Arm]:
    """By AdamW, of which the literature speaks. More steps than usual may be skipped for not being finite."""
    warm = short_run(budget)
    if budget == "cpu":  # it is deep models that post-norm is said to be hard to train in
        warm = warm.replace(model=vit(warm).replace(depth=6))
    cold = warm.replace(optim=warm.optim.replace(warmup=0.0), max_skipped_steps=100)
    return {
        f"{norm}{words}": Arm(config.replace(model=vit(config).replace(norm=norm)))
        for words, config in (("", warm), (f", {COLD}", cold))
        for norm in NORMS
    }


def decide_norm(found: Results) -> Verdict:
    """Without warm-up pre-norm is better, and leaving it out costs post-norm more."""
    cold, warm = (paired_difference(found.of(f"post{words}"), found.of(f"pre{words}")) for words in (f", {COLD}", ""))
    losses = {norm: found.differences(f"{norm}, {COLD}", norm) for norm in NORMS}
    dearer = paired_difference(losses["pre"], losses["post"])
    why = f"without warm-up {better(cold, 'post', 'pre')}; with it {better(warm, 'post', 'pre')}; "
    return decide_by_signs([cold.sign, dearer.sign], f"{why}to leave it out costs post more than pre by {dearer}")


# Dropout or stochastic depth ------------------------------------------------------------------------------------------


def depth_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    rates = {"neither": (0.0, 0.0), "dropout": (RATE, 0.0), "stochastic depth": (0.0, RATE)}
    return {
        name: Arm(config.replace(model=vit(config).replace(dropout=dropout, stochastic_depth=skipped)))
        for name, (dropout, skipped) in rates.items()
    }


def decide_depth(found: Results) -> Verdict:
    """Stochastic depth is no worse than dropout."""
    difference = paired_difference(found.of("dropout"), found.of("stochastic depth"))
    none = "; ".join(
        f"{name} - neither {paired_difference(found.of('neither'), found.of(name))}" for name in list(found.arms)[1:]
    )
    return decide_by_signs([check_no_worse(difference)], f"{better(difference, 'dropout', 'stochastic depth')}; {none}")


# GELU or ReLU ---------------------------------------------------------------------------------------------------------


def activation_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    kinds = {"ReLU": "relu", "GELU": vit(config).activation}
    return {name: Arm(config.replace(model=vit(config).replace(activation=kind))) for name, kind in kinds.items()}


def decide_activation(found: Results) -> Verdict:
    """The GELU is no worse than the ReLU."""
    difference = paired_difference(found.of("ReLU"), found.of("GELU"))
    return decide_by_signs([check_no_worse(difference)], better(difference, "ReLU", "GELU"))


def draw_norm(found: Results) -> Figure:
    figure = draw_arms(found, "where the norm stands", {}, "")
    figure.axes[0].set_xticks(range(len(found.arms)), [name.replace(", ", "\n") for name in found.arms])
    return figure


def draw_depth(found: Results) -> Figure:
    return draw_arms(found, f"what is left out at random, at a rate of {RATE}", {}, "")


def draw_activation(found: Results) -> Figure:
    return draw_arms(found, "activation of the MLP", {}, "")


NORM_PLACE = Study(
    number=30,
    name="norm-place",
    claim="With the norm before each part of a block a ViT learns without warm-up, with the norm after it less well.",
    source="Xiong et al., arXiv 2002.04745; ViT and BERT differ in this",
    paper="There, of translation and BERT: post-norm without warm-up falls far behind, pre-norm does not need it.",
    rule="without warm-up, pre-norm beats post-norm by more than two standard errors, and leaving warm-up out costs "
    "post-norm more than pre-norm, again by more than two",
    arms=norm_arms,
    decide=decide_norm,
    draw=draw_norm,
)

STOCHASTIC_DEPTH = Study(
    number=31,
    name="stochastic-depth",
    claim="Stochastic depth is at least as good as dropout in a ViT.",
    source="AugReg, arXiv 2106.10270; Huang et al., arXiv 1603.09382",
    paper="There, both at 0.1 are used together; later recipes (DeiT) keep stochastic depth and drop dropout.",
    rule=f"stochastic depth {NO_WORSE.format('dropout')}",
    arms=depth_arms,
    decide=decide_depth,
    draw=draw_depth,
)

ACTIVATION = Study(
    number=32,
    name="activation",
    claim="The GELU is at least as good as the ReLU in a ViT.",
    source="Hendrycks and Gimpel, arXiv 1606.08415",
    paper="There, of other networks than Transformers: better in every task of vision, language and speech.",
    rule=f"the GELU {NO_WORSE.format('the ReLU')}",
    arms=activation_arms,
    decide=decide_activation,
    draw=draw_activation,
)

STUDIES = (NORM_PLACE, STOCHASTIC_DEPTH, ACTIVATION)
