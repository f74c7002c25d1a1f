"""Planted results of studies."""

from collections.abc import Mapping

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
