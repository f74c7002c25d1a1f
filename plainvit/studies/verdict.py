"""The statistics of a verdict: Welch's intervals, equivalence by two one-sided tests, Holm's correction.

    welch([0.71, 0.72, 0.70], [0.66, 0.68, 0.65])         second - first is estimated, with its standard error
    require_above("b - a", estimate, limit=-0.01)         b is at most 0.01 worse than a
    decide([criterion, ...])                              supported, contradicted or inconclusive

A claim has criteria, and all of them must hold. Each criterion is a linear contrast of the means of arms whose runs
are independent: Welch (Biometrika 34, 1947) for two arms, Welch-Satterthwaite degrees of freedom for more. Holm's
method (Scand. J. Statist. 6, 1979) keeps the probability of any wrong decision about a criterion at 5 %.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from plainvit.evaluate.statistics import mean_ranks, student_quantile, student_tail

Outcome = Literal["supported", "contradicted", "inconclusive"]
LEVEL = 0.05
MIN_RUNS = 3  # runs of an arm needed for a decision
RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """An effect with its standard error and degrees of freedom."""

    effect: float
    error: float
    df: float
    runs: int  # in all arms
    fewest: int  # runs of the smallest arm

    def tail(self, limit: float) -> float:
        """One-sided p-value of effect > limit."""
        if self.fewest < 2:
            return 1.0
        error = max(self.error, sys.float_info.min)  # runs without any spread are certain
        return float(student_tail((self.effect - limit) / error, self.df))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval."""
        half = student_quantile(self.df) * self.error if self.fewest > 1 else math.inf
        return self.effect - half, self.effect + half

    def __neg__(self) -> "Estimate":
        return replace(self, effect=-self.effect)


def contrast(samples: Sequence[tuple[float, Sequence[float]]]) -> Estimate:
    """The sum of weight * mean over (weight, values of independent runs)."""
    counts = [len(runs) for _, runs in samples]
    effect = sum(weight * statistics.fmean(runs) for weight, runs in samples)
    if min(counts) < 2:
        return Estimate(effect, math.inf, 1.0, sum(counts), min(counts))
    variances = [weight**2 * float(np.var(runs, ddof=1)) / len(runs) for weight, runs in samples]
    denominator = sum(variance**2 / (count - 1) for variance, count in zip(variances, counts, strict=True))
    df = sum(variances) ** 2 / denominator if denominator > 0 else 1.0
    return Estimate(effect, math.sqrt(sum(variances)), df, sum(counts), min(counts))


def welch(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """mean(second) - mean(first)."""
    return contrast([(1.0, second), (-1.0, first)])


# Criteria -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Criterion:
    """One statement that a claim needs, with the evidence for and against it."""

    name: str
    need: str  # such as "> 0"
    effect: float
    low: float  # 95 % interval
    high: float
    runs: int  # 0: known without uncertainty
    p_for: float  # that it does not hold, if the evidence says that it does
    p_against: float
    unit: str = ""

    def to_json(self, adjusted: float, fewest: int) -> dict[str, Any]:
        """With the adjusted p-value, and whether it holds: yes, no or open."""
        shown = {name: getattr(self, name) for name in ("name", "need", "effect", "low", "high", "runs", "unit")}
        holds = "open"
        if adjusted <= LEVEL and fewest >= MIN_RUNS:
            holds = "yes" if self.p_for < self.p_against else "no"
        return shown | {"p": adjusted, "holds": holds}


def describe_effect(criterion: Mapping[str, Any]) -> str:
    """Effect and 95 % interval of a criterion as stored; non-finite numbers may be null."""
    if not criterion["runs"]:
        return "?" if criterion["effect"] is None else f"{criterion['effect']:.3g}"
    scale, digits = (100, 2) if criterion["unit"] == "points" else (1, 3)
    values = [criterion[name] for name in ("effect", "low", "high")]
    effect, low, high = ("?" if value is None else f"{scale * value:+.{digits}f}" for value in values)
    return f"{effect} {criterion['unit']} [{low}, {high}]".replace("  ", " ")


def require_above(name: str, estimate: Estimate, limit: float = 0.0, unit: str = "") -> Criterion:
    """The effect is above the limit; a negative limit is the margin of a test of non-inferiority."""
    p_for, p_against = 2 * estimate.tail(limit), 2 * (-estimate).tail(-limit)
    need = f"> {_with_unit(limit, unit)}"
    return Criterion(name, need, estimate.effect, *estimate.interval, estimate.runs, p_for, p_against, unit)


def require_within(name: str, estimate: Estimate, margin: float, unit: str = "") -> Criterion:
    """The effect is between -margin and margin: two one-sided tests at 2.5 %, so that the 95 % interval decides."""
    p_for = 2 * max(estimate.tail(-margin), (-estimate).tail(-margin))
    p_against = 2 * min(estimate.tail(margin), (-estimate).tail(margin))
    need = f"within ±{_with_unit(margin, unit)}"
    return Criterion(name, need, estimate.effect, *estimate.interval, estimate.runs, p_for, p_against, unit)


def fact(name: str, value: float, need: str, holds: bool, *, against: bool = True) -> Criterion:
    """A statement without uncertainty; `against`: the claim is contradicted if it does not hold."""
    return Criterion(name, need, value, math.nan, math.nan, 0, 0.0 if holds else 1.0, float(holds or not against))


def bootstrap(
    name: str, statistic: Callable[[np.ndarray], np.ndarray], arms: int, limit: float, runs: int
) -> Criterion:
    """A statistic over arms is above the limit, by resampling the arms.

    statistic: indices of arms [resamples, arms] -> values [resamples].
    """
    picks = np.random.default_rng(0).integers(arms, size=(RESAMPLES, arms))
    effect = float(statistic(np.arange(arms)[None])[0])
    values = statistic(picks)
    low, high = np.quantile(values, (LEVEL / 2, 1 - LEVEL / 2))
    p_for, p_against = (2 * (1 + np.sum(wrong)) / (RESAMPLES + 1) for wrong in (values <= limit, values >= limit))
    return Criterion(name, f"> {limit:g}", effect, float(low), float(high), runs, float(p_for), float(p_against))


def _with_unit(value: float, unit: str) -> str:
    return f"{100 * value:g} points" if value and unit == "points" else f"{value:g}"


# Verdict --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    why: str  # with numbers
    criteria: tuple[Mapping[str, Any], ...] = ()


def holm(values: Sequence[float]) -> list[float]:
    """Adjusted p-values."""
    order = np.argsort(values, kind="stable")
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate((len(values) - np.arange(len(values))) * np.asarray(values)[order])
    return np.minimum(adjusted, 1.0).tolist()


def decide(criteria: Sequence[Criterion], fewest: int = MIN_RUNS, note: str = "") -> Verdict:
    """Supported if every criterion holds, contradicted if one is ruled out, otherwise inconclusive.

    fewest: runs of the smallest arm; with less than three nothing is decided.
    """
    if not criteria:
        raise ValueError("the study has no criteria: its `criteria` must return at least one")
    p_values = [min(criterion.p_for, criterion.p_against) for criterion in criteria]
    p_values = np.nan_to_num(p_values, nan=1.0).tolist()  # NaN decides nothing
    tested = [number for number, criterion in enumerate(criteria) if criterion.runs]
    for number, adjusted in zip(tested, holm([p_values[number] for number in tested]), strict=True):
        p_values[number] = adjusted
    records = tuple(criterion.to_json(p, fewest) for criterion, p in zip(criteria, p_values, strict=True))
    held = {record["holds"] for record in records}
    outcome: Outcome = "inconclusive"
    if "no" in held:
        outcome = "contradicted"
    elif held == {"yes"}:
        outcome = "supported"
    why = "; ".join(f"{record['name']} {describe_effect(record)}" for record in records)
    return Verdict(outcome, f"{why}. {note}" if note else why, records)


def slope_weights(positions: Sequence[float]) -> list[float]:
    """The weights of a least-squares slope: sum(weight * value) is the gain per unit of position."""
    centered = np.asarray(positions, float) - np.mean(positions)
    return (centered / (centered @ centered)).tolist()


def correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Pearson's correlation of each row of a and b [rows, n]; 0 for a constant row."""
    x, y = (values - values.mean(1, keepdims=True) for values in (a, b))
    spread = np.sqrt((x**2).sum(1) * (y**2).sum(1))
    return np.divide((x * y).sum(1), spread, out=np.zeros(len(x)), where=spread > 1e-12)


def rank_correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's correlation of each row of a and b [rows, n]; ties have their mean rank."""
    return correlations(np.apply_along_axis(mean_ranks, 1, a), np.apply_along_axis(mean_ranks, 1, b))
