"""Groups of runs that differ only in the seed: mean, standard deviation, and the difference of two groups.

    plainvit compare runs/token-0 runs/token-1 runs/token-2 runs/average-0 runs/average-1 runs/average-2

Differences are paired by seed, as runs of one seed share their order of images, with Student's 95 % interval over the
common seeds. A comparison of two cards measures two trained models; this one measures two ways to train.
"""

import json
import math
import os.path
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from plainvit.evaluate import statistics

METRICS = ("top1", "top5", "nll")


class Run(NamedTuple):
    """A run with its settings, named as the flags are, and its metrics."""

    name: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, float | None]

    def metric(self, name: str) -> float:
        value = self.metrics.get(name)
        return math.nan if value is None else value


def groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The groups, with the difference of each from the first; [] if no two runs differ only in the seed.

    Of two runs with the same seed the first counts.
    """
    by_settings: dict[str, dict[Any, Run]] = {}  # settings without the seed -> seed -> run
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "seed"}
        group = by_settings.setdefault(json.dumps(settings, sort_keys=True), {})
        group.setdefault(run.settings.get("seed", 0), run)
    if all(len(group) < 2 for group in by_settings.values()):
        return []
    first, *others = by_settings.values()
    return [_summarize(first), *(_summarize(group) | {"difference": compare_groups(first, group)} for group in others)]


def _summarize(group: Mapping[Any, Run]) -> dict[str, Any]:
    names = [run.name for run in group.values()]
    values = {name: [run.metric(name) for run in group.values()] for name in METRICS}
    prefix = re.sub(r"[-_.,/ ]+(seed)?[-_.,/ ]*\d*$", "", os.path.commonprefix(names))  # noqa: RUF071 - letters
    return {
        "name": prefix if prefix and len(names) > 1 else names[0],  # token-seed0, token-seed1 -> token
        "seeds": list(group),
        "runs": names,
        "mean": {name: float(np.mean(column)) for name, column in values.items()},
        "std": {name: float(np.std(column, ddof=1)) if len(names) > 1 else None for name, column in values.items()},
    }


def compare_groups(a: Mapping[Any, Run], b: Mapping[Any, Run]) -> dict[str, Any] | None:
    """b - a of each metric over the common seeds; None if there are fewer than two."""
    common = [seed for seed in a if seed in b]
    if len(common) < 2:
        return None
    unpaired = [group[seed].name for group in (a, b) for seed in group if seed not in common]
    result: dict[str, Any] = {"seeds": common, "left_out": unpaired}
    for name in METRICS:
        differences = [b[seed].metric(name) - a[seed].metric(name) for seed in common]
        interval = list(statistics.student_interval(differences))
        result[name] = {"difference": float(np.mean(differences)), "interval": interval}
    return result
