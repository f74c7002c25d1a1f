"""A study: a published claim, the runs (arms) that test it, and its criteria, which are written before the runs.

    criteria = lambda results: [results.above("b", "a")]
    STUDY = Study(name="rate", claim=..., source=..., rule=..., arms=..., criteria=criteria)

The arms differ in one setting. Each has several independent runs, compared on held-out training images; test images are
not used. `plainvit/studies/execute.py` runs a study, `plainvit/studies/verdict.py` decides it.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from plainvit.config import Config
from plainvit.evaluate.grid import choose_best, is_at_edge
from plainvit.models import ResNet, ViT
from plainvit.runtime.folder import read_results
from plainvit.studies.claims import PERCENT, Budget, read_claims
from plainvit.studies.verdict import Criterion, Estimate, Verdict, contrast, decide, require_above, require_within

Criteria = Callable[["Results"], Sequence[Criterion]]
CHOOSING = 3  # runs of each arm of a family that choose its best arm; the others decide
MARGIN = 0.01  # of equivalence and non-inferiority in accuracy, unless a study says otherwise


def held_out(config: Config, folder: Path) -> dict[str, float]:  # noqa: ARG001
    """Final metrics on held-out training images."""
    val = read_results(folder).get("val", {})
    return {name: val[name] for name in ("top1", "nll", "loss") if name in val}


@dataclass(frozen=True)
class Arm:
    """One kind of run. `x` is its position on the x axis of the figure, `group` its curve."""

    config: Config
    x: float = math.nan
    group: str = ""
    family: str = ""  # arms of which only the best is compared, such as those of different learning rates
    parent: str = ""  # the arm whose weights it starts from
    is_compared: bool = True  # False: only a start for other arms, not compared
    is_trained: bool = True  # False: measured from its config, without a run
    # Makes the initial weights from the folder of `after` and the config, such as with new positions
    edit: Callable[[Path, Config], ViT | ResNet] | None = None


@dataclass(frozen=True)
class Study:
    """A claim and its test."""

    name: str
    claim: str  # one sentence
    source: str  # paper, section, table
    rule: str  # the criteria in words
    arms: Callable[[Budget], dict[str, Arm]]
    criteria: "Criteria"  # all must hold
    draw: Callable[["Results"], Figure] | None = None  # default: curves of groups of arms, or the arms
    bars: bool = False  # the arms, although they have groups
    # Metrics of a run from its config and folder
    measure: Callable[[Config, Path], dict[str, float]] = held_out
    number: int = 0  # of the claim in the report of all studies
    paper: str = ""  # the paper's numbers
    paper_figure: Mapping[str, Any] | None = None  # the same as a figure: title and bars, or curves and xlabel
    limits: str = ""  # what a verdict does not say
    metric: str = "top1"  # shown in the table
    xlabel: str = ""  # of the default figure
    runs: int = 5  # of each arm, with independent seeds
    spec: str = ""  # FILE.py:STUDY of a user's own study

    def decide(self, results: "Results") -> Verdict:
        fewest = min(len(results.samples(arm)) for arm in results.values)
        edges = ", ".join(families_at_edge(results))
        note = f"A better rate may lie outside the grid of {edges}" if edges else ""
        return decide(self.criteria(results), fewest, note)


def define(name: str, arms: Callable[[Budget], dict[str, Arm]], criteria: "Criteria", **fields: Any) -> Study:
    """One of the project's own studies, whose claim and rule are in claims.toml."""
    return Study(name=name, arms=arms, criteria=criteria, **read_claims()[name], **fields)


@dataclass(frozen=True)
class Results:
    """The results of a study: metrics of each arm and run."""

    arms: Mapping[str, Arm]
    values: Mapping[str, list[dict[str, float]]]
    metric: str = "top1"

    def samples(self, arm: str, metric: str = "") -> list[float]:
        """The metric of each run of an arm; in a family, `choice` of the runs that choose, others of the rest."""
        if arm not in self.values:
            raise ValueError(f"no compared arm is called {arm!r}: the study has {', '.join(self.values)}")
        rows, metric = self.values[arm], metric or self.metric
        if metric not in rows[0]:
            raise ValueError(f"the study's measure must return {metric!r}: it returns {', '.join(rows[0])}")
        if self.arms[arm].family and len(rows) > 1:
            choosing = min(CHOOSING, len(rows) // 2)
            rows = rows[:choosing] if metric == "choice" else rows[choosing:]
        return [row[metric] for row in rows]

    def mean(self, arm: str, metric: str = "") -> float:
        return statistics.fmean(self.samples(arm, metric))

    def group(self, name: str) -> list[str]:
        """The arms of a curve, sorted by x."""
        return sorted((key for key, arm in self.arms.items() if arm.group == name), key=lambda key: self.arms[key].x)

    def groups(self) -> list[str]:
        return list(dict.fromkeys(arm.group for arm in self.arms.values()))

    def families(self) -> dict[str, list[str]]:
        """The arms of each family, by learning rate."""
        families: dict[str, list[str]] = {}
        for name, arm in sorted(self.arms.items(), key=lambda item: item[1].config.optim.lr):
            if arm.family:
                families.setdefault(arm.family, []).append(name)
        return families

    def best(self, family: str) -> str:
        """The best arm of a family, chosen by other runs and on other images than those that decide."""
        arms = dict(enumerate(self.families()[family], 1))
        return arms[int(choose_best({number: self.mean(name, "choice") for number, name in arms.items()}))]

    # Criteria of a claim

    def estimate(self, weights: Mapping[str, float], metric: str = "") -> Estimate:
        """The sum of weight * mean over arms."""
        return contrast([(weight, self.samples(arm, metric)) for arm, weight in weights.items()])

    def unit(self, metric: str = "") -> str:
        return "points" if (metric or self.metric) in PERCENT else ""

    def contrast(self, name: str, weights: Mapping[str, float], *, limit: float = 0.0, metric: str = "") -> Criterion:
        """A weighted sum of arms is above the limit."""
        return require_above(name, self.estimate(weights, metric), limit, self.unit(metric))

    def above(self, high: str, low: str, *, metric: str = "") -> Criterion:
        return self.contrast(f"{high} - {low}", {high: 1.0, low: -1.0}, metric=metric)

    def not_worse(self, first: str, second: str, margin: float = MARGIN) -> Criterion:
        """`first` is above `second` - margin."""
        return self.contrast(f"{first} - {second}", {first: 1.0, second: -1.0}, limit=-margin)

    def equal(self, first: str, second: str, margin: float = MARGIN) -> Criterion:
        """The two differ by less than the margin."""
        return require_within(f"{first} - {second}", self.estimate({first: 1.0, second: -1.0}), margin, self.unit())


def rate_arms(name: str, config: Config, rates: Sequence[float], /, **fields: Any) -> dict[str, Arm]:
    """An arm for each learning rate, of one family unless `fields` say otherwise."""
    made = {lr: config.replace(optim=config.optim.replace(lr=lr, grid=())) for lr in rates}
    return {rate_name(name, lr): Arm(changed, **{"x": lr, "family": name, **fields}) for lr, changed in made.items()}


def rate_name(family: str, lr: float) -> str:
    return f"{family} at {lr:.1e}"


def families_at_edge(results: Results) -> dict[str, str]:
    """The best arm of each family whose best learning rate is the lowest or highest one."""
    edges: dict[str, str] = {}
    for family, names in results.families().items():
        rates, best = {results.arms[name].config.optim.lr for name in names}, results.best(family)
        if len(rates) > 1 and is_at_edge(results.arms[best].config.optim.lr, rates):
            edges[family] = best
    return edges
