"""Claims 1, 2, 9, 16, 18, 30, 31 and 32: choices inside a ViT, each compared with its alternatives.

    plainvit study positions --budget cpu          also position-places, regularization, stochastic-depth, pooling,
                                                   axial, norm-place, activation

In the grid of regularization nothing else regularizes: no mixing of images, no stochastic depth. On a GPU its runs
are 60 epochs of a tenth of CIFAR-10, long enough to overfit. Axial attention (D.6): each block becomes one that
attends along rows and one along columns, each with its own MLP.
"""

from itertools import combinations

from plainvit.config import Config
from plainvit.planning import cost
from plainvit.studies.base_configs import base, by_adamw, complete_model, plain, vit
from plainvit.studies.measures import halves
from plainvit.studies.study import Arm, Budget, Results, define, rate_arms
from plainvit.studies.verdict import Criterion, fact

# 1 and 2: positions ---------------------------------------------------------------------------------------------------

PLACES = {"stem": "stem", "every layer": "every", "shared": "shared"}  # as Table 8 has its columns
KINDS = {"none": "none", "1-D": "1d", "2-D": "2d", "relative": "relative"}
TABLES = ("1-D", "2-D")  # kinds that are added somewhere


def position_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    return {name: Arm(config.replace(model=vit(config).replace(posemb=kind))) for name, kind in KINDS.items()}


def position_criteria(results: Results) -> list[Criterion]:
    kinds = [name for name in KINDS if name != "none"]
    needed = [results.above(kind, "none") for kind in kinds]
    return needed + [results.equal(b, a) for a, b in combinations(kinds, 2)]


def place_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    return {
        f"{kind}, {place}": Arm(
            config.replace(model=vit(config).replace(posemb=KINDS[kind], posemb_at=where)), x=at, group=kind
        )
        for kind in TABLES
        for at, (place, where) in enumerate(PLACES.items())
    }


def place_criteria(results: Results) -> list[Criterion]:
    return [
        results.equal(f"{kind}, {place}", f"{kind}, stem") for kind in TABLES for place in PLACES if place != "stem"
    ]


# 9 and 31: regularization ---------------------------------------------------------------------------------------------

DECAYS, DROPOUTS = (0.0, 0.03, 0.1, 0.3), (0.0, 0.1)
NONE = "decay 0, dropout 0"
RATE = 0.1  # of dropout, and of stochastic depth in the last block


def long_run(budget: Budget) -> Config:
    if budget == "cpu":
        return plain(budget).replace(steps=200)
    return plain(budget).replace(train_fraction=0.1, steps=0, epochs=60)


def regularize(budget: Budget, decay: float, dropout: float = 0.0, stochastic_depth: float = 0.0) -> Config:
    config = long_run(budget)
    model = vit(config).replace(dropout=dropout, stochastic_depth=stochastic_depth)
    return config.replace(model=model, optim=config.optim.replace(weight_decay=decay))


def grid_arms(budget: Budget) -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    for dropout in DROPOUTS:
        for decay in DECAYS:
            name, group = f"decay {decay:g}, dropout {dropout:g}", f"dropout {dropout:g}"
            family = "" if name == NONE else "regularized"
            arms[name] = Arm(regularize(budget, decay, dropout), x=decay, group=group, family=family)
    return arms


def grid_criteria(results: Results) -> list[Criterion]:
    return [results.above(results.best("regularized"), NONE)]


def depth_arms(budget: Budget) -> dict[str, Arm]:
    """The first two are cells of the grid."""
    return {
        "neither": Arm(regularize(budget, RATE)),
        "dropout": Arm(regularize(budget, RATE, dropout=RATE)),
        "stochastic depth": Arm(regularize(budget, RATE, stochastic_depth=RATE)),
    }


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
    arms: dict[str, Arm] = {}
    for name, model in models.items():
        arms |= rate_arms(name, config.replace(model=model), pooling_rates(budget), group=name)
    return arms


def pooling_criteria(results: Results) -> list[Criterion]:
    token, average = (results.best(family) for family in (TOKEN, AVERAGE))
    ratio = results.arms[average].x / results.arms[token].x
    rates = fact("best rate of average / best rate of token", ratio, "<= 1", ratio <= 1, against=False)
    return [results.equal(average, token), rates]


# 18: axial attention --------------------------------------------------------------------------------------------------


def axial_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    pooled = vit(config).replace(pool="average", class_token=False)  # axial blocks need it
    return {
        name: Arm(config.replace(model=pooled.replace(axial=axial)))
        for name, axial in {"plain": False, "axial": True}.items()
    }


def axial_criteria(results: Results) -> list[Criterion]:
    macs = {name: cost.macs(complete_model(arm.config)) for name, arm in results.arms.items()}
    times = macs["axial"] / macs["plain"]
    return [results.above("axial", "plain"), fact("multiply-adds, axial / plain", times, "> 1", times > 1)]


# 30: the place of the norm --------------------------------------------------------------------------------------------

COLD = "no warm-up"
RATES: dict[Budget, tuple[float, ...]] = {"cpu": (1e-3, 4e-3), "gpu": (1e-3, 3e-3, 1e-2)}


def norm_arms(budget: Budget) -> dict[str, Arm]:
    """Deep models and high rates, where post-norm is said to be hard to train; runs continue after skipped steps."""
    config = by_adamw(budget).replace(steps=120 if budget == "cpu" else 600, max_skipped_steps=1000)
    model = vit(config).replace(depth=6 if budget == "cpu" else 12)
    arms: dict[str, Arm] = {}
    for norm in ("pre", "post"):
        for name, warmup in ((norm, config.optim.warmup), (f"{norm}, {COLD}", 0.0)):
            changed = config.replace(model=model.replace(norm=norm), optim=config.optim.replace(warmup=warmup))
            for lr in RATES[budget]:
                arms[f"{name}, {lr:g}"] = Arm(changed.replace(optim=changed.optim.replace(lr=lr)), x=lr, group=name)
    return arms


def norm_criteria(results: Results) -> list[Criterion]:
    """Averages over the rates."""
    signs = {"pre": -1, "post": 1, f"pre, {COLD}": 1, f"post, {COLD}": -1}
    weights = {group: {arm: 1 / len(results.group(group)) for arm in results.group(group)} for group in signs}
    cost_of_cold = {arm: signs[group] * weight for group in signs for arm, weight in weights[group].items()}
    cold = {arm: weight for arm, weight in cost_of_cold.items() if COLD in arm}
    return [
        results.contrast(f"pre - post, {COLD}", cold),
        results.contrast("cost of no warm-up, post - pre", cost_of_cold),
    ]


# 32: activation -------------------------------------------------------------------------------------------------------


def activation_arms(budget: Budget) -> dict[str, Arm]:
    config = base(budget)
    kinds = {"ReLU": "relu", "GELU": vit(config).activation}
    return {name: Arm(config.replace(model=vit(config).replace(activation=kind))) for name, kind in kinds.items()}


STUDIES = (
    define("positions", position_arms, position_criteria, runs=8),
    define("position-places", place_arms, place_criteria, xlabel=", ".join(PLACES), runs=8),
    define("regularization", grid_arms, grid_criteria, measure=halves, xlabel="weight decay", runs=8),
    define("stochastic-depth", depth_arms, lambda results: [results.not_worse("stochastic depth", "dropout")]),
    define("pooling", pooling_arms, pooling_criteria, measure=halves, xlabel="learning rate", runs=8),
    define("axial", axial_arms, axial_criteria, runs=8),
    define("norm-place", norm_arms, norm_criteria, xlabel="learning rate"),
    define("activation", activation_arms, lambda results: [results.not_worse("GELU", "ReLU")], runs=8),
)
