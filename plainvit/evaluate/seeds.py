"""Runs that differ in the seed alone, as one: their mean and spread, and the difference of two such groups.

    plainvit compare runs/token-0 runs/token-1 runs/token-2 runs/average-0 runs/average-1 runs/average-2

The difference is paired by seed, since runs of one seed share their order of images, with Student's 95 % interval over
the seeds that both have. Image by image a comparison says what chance did to two finished models; this says what it
did to two ways of training.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from plainvit.evaluate import chance

METRICS = ("top1", "top5", "nll")


@dataclass(frozen=True)
class Run:
    """A card of a run whose settings are known, by their flags' names."""

    name: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, float]

    @property
    def seed(self) -> int:
        seed = self.settings.get("seed", 0)
        if type(seed) is not int:
            raise ValueError(f"the config.json of {self.name} is not sound: seed is {seed!r}"[:200])
        return seed

    @property
    def kind(self) -> str:
        """All but the seed."""
        return json.dumps({key: value for key, value in self.settings.items() if key != "seed"}, sort_keys=True)


def groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The groups, and of each after the first its difference from it; none where no two runs differ in the seed alone.

    Of two runs with one seed the first counts: they are the same run.
    """
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(run.kind, {}).setdefault(run.seed, run)
    several = list(found.values())
    if all(len(group) < 2 for group in several):
        return []
    rows = [_row(name, group) for name, group in zip(_names(several), several, strict=True)]
    for row, group in zip(rows[1:], several[1:], strict=True):
        row["difference"] = difference(several[0], group)
    return rows


def _row(name: str, group: Mapping[int, Run]) -> dict[str, Any]:
    values = {metric: [run.metrics[metric] for run in group.values()] for metric in METRICS}
    return {
        "name": name,
        "seeds": list(group),
        "runs": [run.name for run in group.values()],
        "mean": {metric: float(np.mean(found)) for metric, found in values.items()},
        "std": {metric: float(np.std(found, ddof=1)) if len(found) > 1 else None for metric, found in values.items()},
    }


def _names(several: Sequence[Mapping[int, Run]]) -> list[str]:
    """What the names of a group's runs begin with, where that tells the groups apart; else its first run's name."""
    firsts = [next(iter(group.values())).name for group in several]
    stems = [_stem([run.name for run in group.values()]) for group in several]
    clear = all(stems) and len(set(stems)) == len(stems)
    return stems if clear else [_others(first, len(group)) for first, group in zip(firsts, several, strict=True)]


def _stem(names: Sequence[str]) -> str:
    """token of token-0 and token-1, and of token-seed0 and token-seed1; a number without a separator is of the name."""
    if len(names) == 1:
        return names[0]
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    begin = "".join(letters[0] for letters in alike)
    return re.sub(r"[-_.,/ ]+(seed)?[-_.,/ ]*\d*$", "", begin)


def _others(first: str, count: int) -> str:
    return f"{first} and {count - 1} more" if count > 1 else first


def difference(a: Mapping[int, Run], b: Mapping[int, Run]) -> dict[str, Any] | None:
    """b - a of each number over the seeds that both have; None where these are fewer than two."""
    both = [seed for seed in a if seed in b]
    if len(both) < 2:
        return None
    alone = [group[seed].name for group in (a, b) for seed in group if seed not in both]
    found: dict[str, Any] = {"seeds": both, "left_out": alone}
    for metric in METRICS:
        apart = [b[seed].metrics[metric] - a[seed].metrics[metric] for seed in both]
        found[metric] = {"difference": float(np.mean(apart)), "interval": list(chance.student(apart))}
    return found


# For people -----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each group: mean and standard deviation over its seeds."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("mean ± standard deviation over seeds", style="dim", no_wrap=True)
    for row in rows:
        shown.add_column(Text(row["name"]), justify="right")
    for metric, title in (("top1", "top-1, %"), ("top5", "top-5, %"), ("nll", "NLL")):
        shown.add_row(title, *(_cell(row, metric) for row in rows))
    shown.add_row("seeds", *(str(len(row["seeds"])) for row in rows))
    return shown


def _cell(row: Mapping[str, Any], metric: str) -> str:
    scale, digits = (1, 4) if metric == "nll" else (100, 2)
    spread = row["std"][metric]
    words = f" ± {scale * spread:.{digits}f}" if spread is not None else ""
    return f"{scale * row['mean'][metric]:.{digits}f}{words}"


def words(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each difference from the first group in one line."""
    first = rows[0]["name"]
    return [f"{row['name']} - {first}: {_said(row['difference'])}" for row in rows[1:]]


def _said(apart: Mapping[str, Any] | None) -> str:
    if apart is None:
        return "not told apart from chance, as they have fewer than two seeds in common"
    low, high = (f"{100 * end:+.2f}" for end in apart["top1"]["interval"])
    count = len(apart["seeds"])
    alone = f" (the other group lacks the seed of {', '.join(apart['left_out'])})" if apart["left_out"] else ""
    return f"{100 * apart['top1']['difference']:+.2f} points of top-1, 95 % {low} to {high} over {count} seeds{alone}"
