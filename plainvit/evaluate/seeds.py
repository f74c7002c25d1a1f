"""Groups of runs that differ only in the seed: mean, standard deviation, and the difference of two groups.

    plainvit compare runs/token-0 runs/token-1 runs/token-2 runs/average-0 runs/average-1 runs/average-2

Differences are paired by seed, as runs of one seed share their order of images, with Student's 95 % interval over the
common seeds. A comparison of two cards measures two trained models; this one measures two ways to train.
"""

import json
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from plainvit.evaluate import statistics

METRICS = {"top1": ("top-1, %", 100, 2), "top5": ("top-5, %", 100, 2), "nll": ("NLL", 1, 4)}  # title, scale, digits


@dataclass(frozen=True)
class Run:
    """A run with its settings, named as the flags are, and its metrics."""

    name: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, float]

    @property
    def seed(self) -> Any:
        return self.settings.get("seed", 0)

    @property
    def kind(self) -> str:
        """All settings but the seed, as JSON."""
        return json.dumps({key: value for key, value in self.settings.items() if key != "seed"}, sort_keys=True)


def groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The groups, with the difference of each from the first; [] if no two runs differ only in the seed.

    Of two runs with the same seed the first counts.
    """
    found: dict[str, dict[Any, Run]] = {}
    for run in runs:
        found.setdefault(run.kind, {}).setdefault(run.seed, run)
    if all(len(group) < 2 for group in found.values()):
        return []
    first, *others = found.values()
    rows = [_summarise(group) for group in found.values()]
    for row, group in zip(rows[1:], others, strict=True):
        row["difference"] = difference(first, group)
    return rows


def _summarise(group: Mapping[Any, Run]) -> dict[str, Any]:
    names = [run.name for run in group.values()]
    values = {metric: [run.metrics[metric] for run in group.values()] for metric in METRICS}
    return {
        "name": _name_group(names),
        "seeds": list(group),
        "runs": names,
        "mean": {metric: float(np.mean(found)) for metric, found in values.items()},
        "std": {metric: float(np.std(found, ddof=1)) if len(found) > 1 else None for metric, found in values.items()},
    }


def _name_group(names: Sequence[str]) -> str:
    """The common prefix without a separator or seed: token-seed0, token-seed1 -> token."""
    prefix = re.sub(r"[-_.,/ ]+(seed)?[-_.,/ ]*\d*$", "", os.path.commonprefix(names))  # noqa: RUF071 - letters
    return prefix if prefix and len(names) > 1 else names[0]


def difference(a: Mapping[Any, Run], b: Mapping[Any, Run]) -> dict[str, Any] | None:
    """b - a of each metric over the common seeds; None if there are fewer than two."""
    both = [seed for seed in a if seed in b]
    if len(both) < 2:
        return None
    unpaired = [group[seed].name for group in (a, b) for seed in group if seed not in both]
    found: dict[str, Any] = {"seeds": both, "left_out": unpaired}
    for metric in METRICS:
        differences = [b[seed].metrics[metric] - a[seed].metrics[metric] for seed in both]
        interval = list(statistics.student_interval(differences))
        found[metric] = {"difference": float(np.mean(differences)), "interval": interval}
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row per group: mean and standard deviation over its seeds."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("mean ± sd over seeds", overflow="fold")
    for title in (*(title for title, _, _ in METRICS.values()), "seeds"):
        shown.add_column(title, justify="right")
    for row in rows:
        cells = []
        for metric, (_, scale, digits) in METRICS.items():
            spread = row["std"][metric]
            deviation = "" if spread is None else f" ± {scale * spread:.{digits}f}"
            cells.append(f"{scale * row['mean'][metric]:.{digits}f}{deviation}")
        shown.add_row(Text(row["name"]), *cells, str(len(row["seeds"])))
    return shown


def describe(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The difference of each group from the first, in one line each."""
    return [f"{row['name']} - {rows[0]['name']}: {_describe_difference(row['difference'])}" for row in rows[1:]]


def _describe_difference(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no interval: the groups have fewer than two seeds in common"
    low, high = (f"{100 * end:+.2f}" for end in found["top1"]["interval"])
    left_out = f" (no matching seed: {', '.join(found['left_out'])})" if found["left_out"] else ""
    change, count = f"{100 * found['top1']['difference']:+.2f}", len(found["seeds"])
    return f"{change} points of top-1, 95 % {low} to {high} over {count} seeds{left_out}"
