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

METRICS = ("top1", "top5", "nll")


@dataclass(frozen=True)
class Run:
    """A run with its settings, named as the flags are, and its metrics."""

    name: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, float]

    @property
    def seed(self) -> int:
        seed = self.settings.get("seed", 0)
        if type(seed) is not int:
            raise ValueError(f"config.json of {self.name}: seed must be an integer, got {seed!r}"[:200])
        return seed

    @property
    def kind(self) -> str:
        """All settings but the seed, as JSON."""
        return json.dumps({key: value for key, value in self.settings.items() if key != "seed"}, sort_keys=True)


def groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The groups, with the difference of each from the first; [] if no two runs differ only in the seed.

    Of two runs with the same seed the first counts.
    """
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(run.kind, {}).setdefault(run.seed, run)
    several = list(found.values())
    if all(len(group) < 2 for group in several):
        return []
    rows = [_describe(name, group) for name, group in zip(_name_groups(several), several, strict=True)]
    for row, group in zip(rows[1:], several[1:], strict=True):
        row["difference"] = difference(several[0], group)
    return rows


def _describe(name: str, group: Mapping[int, Run]) -> dict[str, Any]:
    values = {metric: [run.metrics[metric] for run in group.values()] for metric in METRICS}
    return {
        "name": name,
        "seeds": list(group),
        "runs": [run.name for run in group.values()],
        "mean": {metric: float(np.mean(found)) for metric, found in values.items()},
        "std": {metric: float(np.std(found, ddof=1)) if len(found) > 1 else None for metric, found in values.items()},
    }


def _name_groups(several: Sequence[Mapping[int, Run]]) -> list[str]:
    """The common prefix of a group's names, if the prefixes are unique; else the name of its first run."""
    names = [[run.name for run in group.values()] for group in several]
    prefixes = [_find_prefix(group) for group in names]
    if all(prefixes) and len(set(prefixes)) == len(prefixes):
        return prefixes
    return [f"{first} and {len(rest)} more" if rest else first for first, *rest in names]


def _find_prefix(names: Sequence[str]) -> str:
    """token-0, token-1 -> token; token-seed0, token-seed1 -> token; a number without a separator stays."""
    if len(names) == 1:
        return names[0]
    return re.sub(r"[-_.,/ ]+(seed)?[-_.,/ ]*\d*$", "", os.path.commonprefix(names))  # noqa: RUF071 - letters


def difference(a: Mapping[int, Run], b: Mapping[int, Run]) -> dict[str, Any] | None:
    """b - a of each metric over the common seeds; None if there are fewer than two."""
    both = [seed for seed in a if seed in b]
    if len(both) < 2:
        return None
    alone = [group[seed].name for group in (a, b) for seed in group if seed not in both]
    found: dict[str, Any] = {"seeds": both, "left_out": alone}
    for metric in METRICS:
        differences = [b[seed].metrics[metric] - a[seed].metrics[metric] for seed in both]
        found[metric] = {
            "difference": float(np.mean(differences)),
            "interval": list(statistics.student_interval(differences)),
        }
    return found


# Printing -------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A column per group: mean and standard deviation over its seeds."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("mean ± standard deviation over seeds", style="dim", no_wrap=True)
    for row in rows:
        shown.add_column(Text(row["name"]), justify="right")
    for metric, title in (("top1", "top-1, %"), ("top5", "top-5, %"), ("nll", "NLL")):
        shown.add_row(title, *(_format(row, metric) for row in rows))
    shown.add_row("seeds", *(str(len(row["seeds"])) for row in rows))
    return shown


def _format(row: Mapping[str, Any], metric: str) -> str:
    scale, digits = (1, 4) if metric == "nll" else (100, 2)
    spread = row["std"][metric]
    deviation = f" ± {scale * spread:.{digits}f}" if spread is not None else ""
    return f"{scale * row['mean'][metric]:.{digits}f}{deviation}"


def words(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The difference of each group from the first, in one line each."""
    first = rows[0]["name"]
    return [f"{row['name']} - {first}: {_describe_difference(row['difference'])}" for row in rows[1:]]


def _describe_difference(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no interval: the groups have fewer than two seeds in common"
    low, high = (f"{100 * end:+.2f}" for end in found["top1"]["interval"])
    left_out = f" (no matching seed: {', '.join(found['left_out'])})" if found["left_out"] else ""
    difference, count = f"{100 * found['top1']['difference']:+.2f}", len(found["seeds"])
    return f"{difference} points of top-1, 95 % {low} to {high} over {count} seeds{left_out}"
