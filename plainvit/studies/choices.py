"""Claims 16, 18, 30 and 32: choices inside a ViT, each compared with its usual alternative.

    plainvit study pooling --budget cpu
    plainvit study axial --budget cpu
    plainvit study norm-place --budget cpu
    plainvit study activation --budget cpu

Axial attention (D.6): each block becomes one that attends along rows and one along columns, each with its own MLP. The
claims on norms and activations are of later papers about the same models.
"""

from plainvit.config import Config
from plainvit.planning import cost
from plainvit.studies.bases import base, by_adamw, complete_model, vit
from plainvit.studies.evidence import Part, fact
from plainvit.studies.measures import halves
from plainvit.studies.study import Arm, Budget, Results, define, rate_arms

# 16: pooling ----------------------------------------------------------------------------------------------------------

TOKEN, AVERAGE = "class token", "average"


def pooling_rates(budget: Budget) -> tuple[float, ...]:
    """On digits 300 steps want a higher rate than the base's; on a GPU one to the lower side and two above."""
    lr = base(budget).optim.lr
    return {"cpu": (lr, 3 * lr, 9 * lr), "gpu": (lr / 3, lr, 3 * lr, 9 * lr)}[budget]


def pooling_arms(budget: Budget) -> dict[str, Arm]:
    """Average pooling has patches alone and a linear head."""
    config = base(budget)
    models = {
        TOKEN: vit(config).replace(pool="token", class_token=True),
        AVERAGE: vit(config).replace(pool="average", class_token=False, representation=0),
    }
    found: dict[str, Arm] = {}
    for name, model in models.items():
        found |= rate_arms(name, config.replace(model=model), pooling_rates(budget), group=name)
    return found


def pooling_parts(found: Results) -> list[Part]:
    token, average = (found.best(family) for family in (TOKEN, AVERAGE))
    ratio = found.arms[average].x / found.arms[token].x
    rates = fact("best rate of average / best rate of token", ratio, "<= 1", ratio <= 1, against=False)
    return [found.equal(average, token), rates]


# 18: axial attention --------------------------------------------------------------------------------------------------


def axial_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    pooled = vit(config).replace(pool="average", class_token=False)  # axial blocks need it
    return {
        name: Arm(config.replace(model=pooled.replace(axial=axial)))
        for name, axial in {"plain": False, "axial": True}.items()
    }


def axial_parts(found: Results) -> list[Part]:
    macs = {name: cost.macs(complete_model(arm.config)) for name, arm in found.arms.items()}
    times = macs["axial"] / macs["plain"]
    return [found.above("axial", "plain"), fact("multiply-adds, axial / plain", times, "> 1", times > 1)]


# 30: the place of the norm --------------------------------------------------------------------------------------------

COLD = "no warm-up"
RATES: dict[Budget, tuple[float, ...]] = {"cpu": (1e-3, 4e-3), "gpu": (1e-3, 3e-3, 1e-2)}


def norm_arms(budget: Budget) -> dict[str, Arm]:
    """Deep models and high rates, where post-norm is said to be hard to train; runs go on after skipped steps."""
    config = by_adamw(budget).replace(steps=120 if budget == "cpu" else 2000, max_skipped_steps=1000)
    model = vit(config).replace(depth=6 if budget == "cpu" else 12)
    found: dict[str, Arm] = {}
    for norm in ("pre", "post"):
        for name, warmup in ((norm, config.optim.warmup), (f"{norm}, {COLD}", 0.0)):
            one = config.replace(model=model.replace(norm=norm), optim=config.optim.replace(warmup=warmup))
            for lr in RATES[budget]:
                found[f"{name}, {lr:g}"] = Arm(_set_rate(one, lr), x=lr, group=name)
    return found


def _set_rate(config: Config, lr: float) -> Config:
    return config.replace(optim=config.optim.replace(lr=lr))


def norm_parts(found: Results) -> list[Part]:
    """Averages over the rates."""
    signs = {"pre": -1, "post": 1, f"pre, {COLD}": 1, f"post, {COLD}": -1}
    weights = {group: {arm: 1 / len(found.group(group)) for arm in found.group(group)} for group in signs}
    cost_of_cold = {arm: signs[group] * weight for group in signs for arm, weight in weights[group].items()}
    cold = {arm: weight for arm, weight in cost_of_cold.items() if COLD in arm}
    return [
        found.contrast(f"pre - post, {COLD}", cold),
        found.contrast("cost of no warm-up, post - pre", cost_of_cold),
    ]


# 32: activation -------------------------------------------------------------------------------------------------------


def activation_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    kinds = {"ReLU": "relu", "GELU": vit(config).activation}
    return {name: Arm(config.replace(model=vit(config).replace(activation=kind))) for name, kind in kinds.items()}


STUDIES = (
    define("pooling", pooling_arms, pooling_parts, measure=halves, xlabel="learning rate"),
    define("axial", axial_arms, axial_parts, xlabel="attention", runs=8),
    define("norm-place", norm_arms, norm_parts, xlabel="learning rate"),
    define(
        "activation",
        activation_arms,
        lambda found: [found.not_worse("GELU", "ReLU")],
        xlabel="activation of the MLP",
        runs=8,
    ),
)
