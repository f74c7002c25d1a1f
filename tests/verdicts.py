"""Planted results of studies."""

from collections.abc import Mapping, Sequence

import numpy as np

from plainvit.studies.study import Budget, Results, Study

Planted = Mapping[str, float | Mapping[str, float]]


def plant(study: Study, means: Planted, spread: float = 0.001, runs: int = 0, budget: Budget = "cpu") -> Results:
    """The arms with these means; the longest name that an arm starts with counts.

    A number is the mean of all metrics. The noise has mean 0, so that planted means are observed (nearly) exactly.
    """
    runs = runs or study.runs
    arms = {name: arm for name, arm in study.arms(budget).items() if arm.is_compared}
    values: dict[str, list[dict[str, float]]] = {}
    for at, arm in enumerate(arms):
        mean = means[max((name for name in means if arm.startswith(name)), key=len)]
        if not isinstance(mean, Mapping):
            mean = dict.fromkeys((study.metric, "top1", "choice", "few_shot"), mean)
        noise = spread * np.cos(2 * np.pi * np.arange(runs) / runs + at)
        values[arm] = [{name: value + one for name, value in mean.items()} for one in noise.tolist()]
    return Results(arms, values, study.metric)


def along(study: Study, curves: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """Arm by arm, the values of each group from its first place on the x axis to its last."""
    results = Results(study.arms("cpu"), {})
    return {arm: value for group, row in curves.items() for arm, value in zip(results.group(group), row, strict=True)}


def rate_verdicts(p_for: Sequence[np.ndarray], p_against: Sequence[np.ndarray]) -> tuple[float, float]:
    """Rates of supported and contradicted over many studies [parts][studies], by the rule of `decide`."""
    support, oppose = np.stack(p_for, 1), np.stack(p_against, 1)  # [studies, parts]
    p = np.minimum(support, oppose)
    order = p.argsort(1)
    steps = np.take_along_axis(p, order, 1) * (p.shape[1] - np.arange(p.shape[1]))
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(steps, 1), 1)
    signs = np.where(adjusted > 0.05, 0, np.where(support < oppose, 1, -1))
    return float((signs > 0).all(1).mean()), float((signs < 0).any(1).mean())
