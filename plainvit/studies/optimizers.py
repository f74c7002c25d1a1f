"""Claims 17 and 27: ResNets pre-trained with Adam or SGD; averaged weights after fine-tuning.

    plainvit study resnet-optimizer --budget cpu          also averaging

Claim 17 (D.1, Table 7): each optimizer pre-trains at three rates, and every run is fine-tuned by SGD on each set, as in
the paper. Claim 27 (4.1, Table 2): the paper's decay of 0.9999 is that of 10,000 of its 20,000 steps, and so of half of
the run here. As in TensorFlow the window grows with the run, and so comes to a ninth of it at most.
"""

from plainvit.config import Config, Optim
from plainvit.evaluate.grid import choose_best, is_at_edge
from plainvit.studies.base_configs import DOWNSTREAM, by_adamw, finetune_config, pretrain_config
from plainvit.studies.compute import models
from plainvit.studies.measures import halves
from plainvit.studies.study import MARGIN, Arm, Budget, Results, define
from plainvit.studies.verdict import Criterion, require_above

KINDS = ("Adam", "SGD")
FACTORS = (1 / 3, 1, 3)  # of the learning rate of pre-training
NLL_MARGIN = 0.02


def upstream(budget: Budget) -> dict[str, dict[float, Config]]:
    """The pre-trainings by optimizer and rate."""
    config = pretrain_config(budget) if budget == "cpu" else by_adamw(budget)
    config = config.replace(model=models(budget)["ResNet"][1])
    optims = {"Adam": config.optim, "SGD": bit(config)}
    return {
        kind: {factor * optim.lr: config.replace(optim=optim.replace(lr=factor * optim.lr)) for factor in FACTORS}
        for kind, optim in optims.items()
    }


def bit(config: Config) -> Optim:
    """BiT's SGD with a rate proportional to the batch; warm-up and schedule of the other arm."""
    optim, rate = config.optim, 0.03 * config.batch / 256
    return Optim(name="sgd", lr=rate, weight_decay=1e-4, warmup=optim.warmup, schedule=optim.schedule, clip=0.0)


def arms(budget: Budget) -> dict[str, Arm]:
    """x is the rate of pre-training. The fine-tuning has the highest rate of Table 4 for small datasets."""
    arms: dict[str, Arm] = {}
    for kind, rates in upstream(budget).items():
        for lr, config in rates.items():
            before = f"{kind} at {lr:.1e}"
            arms[before] = Arm(config, is_compared=False)
            for data in DOWNSTREAM[budget]:
                tuned = finetune_config(budget, data).replace(optim=Optim(name="sgd", lr=0.03, warmup=0.1))
                arms[f"{before}, {data}"] = Arm(tuned, x=lr, group=f"{kind}, {data}", family=kind, parent=before)
    return arms


def best_rate(results: Results, kind: str) -> tuple[float, bool]:
    """The rate of pre-training with the best mean over all sets; whether it is at the edge of the grid."""
    groups = [group for group in results.groups() if group.startswith(f"{kind}, ")]
    rates = [results.arms[arm].x for arm in results.group(groups[0])]
    means = {
        lr: sum(results.mean(results.group(group)[number], "choice") for group in groups)
        for number, lr in enumerate(rates)
    }
    best = choose_best(means)
    return best, is_at_edge(best, rates)


def criteria(results: Results) -> list[Criterion]:
    weights: dict[str, float] = {}
    edge = ""
    for kind, sign in (("Adam", 1), ("SGD", -1)):
        best, at_edge = best_rate(results, kind)
        names = [name for name, arm in results.arms.items() if arm.x == best and arm.group.startswith(f"{kind}, ")]
        weights |= {name: sign / len(names) for name in names}
        edge += f" ({kind}'s best rate {best:.1e} is at the edge of the grid)" if at_edge else ""
    return [results.contrast(f"Adam - SGD, mean over the sets{edge}", weights, limit=-MARGIN)]


def averaging_arms(budget: Budget) -> dict[str, Arm]:
    config = finetune_config(budget)
    return {
        "before": Arm(pretrain_config(budget), is_compared=False),
        "last weights": Arm(config, parent="before"),
        "averaged": Arm(config.replace(ema_window=0.5), parent="before"),
    }


def averaging_criteria(results: Results) -> list[Criterion]:
    nll = results.estimate({"last weights": 1.0, "averaged": -1.0}, "nll")
    return [
        results.not_worse("averaged", "last weights"),
        require_above("NLL, last weights - averaged", nll, -NLL_MARGIN),
    ]


STUDIES = (
    define("resnet-optimizer", arms, criteria, measure=halves, xlabel="learning rate of pre-training", runs=8),
    define("averaging", averaging_arms, averaging_criteria, runs=8),
)
