"""Statistics of verdicts against SciPy, and the rate of wrong verdicts by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from plainvit.studies import verdict
from plainvit.studies.verdict import (
    Criterion,
    Estimate,
    contrast,
    decide,
    fact,
    holm,
    require_above,
    require_within,
    welch,
)


def draw_samples(*sizes: int) -> list[list[float]]:
    random = np.random.default_rng(sum(sizes))
    return [random.normal(0.1 * at, 1 + at, size).tolist() for at, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [(3, 3), (5, 8), (2, 20)])
def test_welch_is_scipys(sizes: tuple[int, int]) -> None:
    first, second = draw_samples(*sizes)
    found, expected = welch(first, second), stats.ttest_ind(second, first, equal_var=False)
    assert 2 * min(found.tail(0), (-found).tail(0)) == pytest.approx(expected.pvalue)
    assert found.df == pytest.approx(expected.df)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_a_limit_is_the_one_sample_test() -> None:
    (values,) = draw_samples(6)
    expected = stats.ttest_1samp(values, 0.3, alternative="greater")
    assert contrast([(1.0, values)]).tail(0.3) == pytest.approx(expected.pvalue)


def test_contrast_is_that_of_the_regression_slope() -> None:
    """With one observation of each mean, the weights give the slope of linregress."""
    x, y = [1.0, 2.0, 4.0, 7.0], [0.3, 0.4, 0.9, 1.1]
    found = contrast([(weight, [value] * 2) for weight, value in zip(verdict.slope_weights(x), y, strict=True)])
    assert found.effect == pytest.approx(stats.linregress(x, y).slope)


@pytest.mark.parametrize("df", [1.0, 1.7, 4.0, 9.3, 500.0])
def test_student_is_scipys(df: float) -> None:
    for t in (-6.0, -0.5, 0.0, 1.2, 12.0):
        assert verdict.student_tail(t, df) == pytest.approx(stats.t.sf(t, df), abs=1e-12)
    assert verdict.student_quantile(df) == pytest.approx(stats.t.isf(0.025, df), rel=1e-8)


def test_equivalence_is_two_one_sided_tests() -> None:
    first, second = draw_samples(5, 6)
    part = require_within("", welch(first, second), 1.5)
    sides = [
        stats.ttest_ind(np.array(second) + shift, first, equal_var=False, alternative=side).pvalue
        for shift, side in ((1.5, "greater"), (-1.5, "less"))
    ]
    assert part.p_for == pytest.approx(2 * max(sides))


def test_holm_by_hand() -> None:
    """Of 0.01, 0.04, 0.03 and 0.005: 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 no less than that before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_rank_correlation_is_scipys() -> None:
    random = np.random.default_rng(0)
    a, b = random.integers(0, 5, (2, 7, 9)).astype(float)  # with ties
    ranked, linear = verdict.rank_correlations(a, b), verdict.correlations(a, b)
    for at, (x, y) in enumerate(zip(a, b, strict=True)):
        assert ranked[at] == pytest.approx(stats.spearmanr(x, y).statistic)
        assert linear[at] == pytest.approx(stats.pearsonr(x, y).statistic)
    assert verdict.correlations(np.ones((1, 4)), a[:1, :4])[0] == 0


# Verdicts -------------------------------------------------------------------------------------------------------------


def estimate(effect: float) -> Estimate:
    return Estimate(effect, 0.1, 8.0, 10, 5)


@pytest.mark.parametrize(
    ("effects", "outcome"),
    [
        ((1.0, 1.0), "supported"),
        ((1.0, 0.1), "inconclusive"),
        ((1.0, -1.0), "contradicted"),
        ((0.26,), "supported"),  # p = 0.03
        ((0.26, 0.26, 0.26), "inconclusive"),  # of three parts, Holm's first needs 0.017
    ],
)
def test_all_parts_must_hold(effects: tuple[float, ...], outcome: str) -> None:
    assert decide([require_above("", estimate(effect)) for effect in effects]).outcome == outcome


@pytest.mark.parametrize(
    ("part", "outcome"),
    [
        (require_within("", estimate(0.0), 1.0), "supported"),
        (require_within("", estimate(1.0), 1.0), "inconclusive"),
        (require_within("", estimate(2.0), 1.0), "contradicted"),
        (require_within("", estimate(-2.0), 1.0), "contradicted"),
        (fact("", 2.0, "> 1", True), "supported"),
        (fact("", 0.5, "> 1", False), "contradicted"),
        (fact("", 0.5, "> 1", False, against=False), "inconclusive"),
        (require_above("", welch([0.0, 0.1, 0.0], [1.0, math.nan, 1.0])), "inconclusive"),
    ],
)
def test_a_part_decides_next_to_one_that_holds(part: Criterion, outcome: str) -> None:
    assert decide([require_above("", estimate(1.0)), part]).outcome == outcome


def test_fewer_than_three_runs_decide_nothing() -> None:
    assert decide([require_above("", welch([0.0, 0.0], [1.0, 1.0]))], fewest=2).outcome == "inconclusive"
    with pytest.raises(ValueError, match="`criteria`"):
        decide([])
    one = welch([0.0], [1.0])
    assert math.isinf(one.interval[1])
    assert one.tail(0) == 1


def test_a_part_is_stored_with_effect_interval_and_runs() -> None:
    verdict = decide([require_above("b - a", welch([0.5, 0.6, 0.7], [0.8, 0.9, 1.0]), unit="points")])
    (part,) = verdict.criteria
    assert part["effect"] == pytest.approx(0.3)
    assert part["low"] < 0.3 < part["high"]
    assert (part["runs"], part["holds"]) == (6, "yes")
    assert verdict.why.startswith("b - a +30.00 points [+7.33, ")


# Rates of wrong verdicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arms", [11, 12])
def test_bootstrap_over_arms_is_wrong_in_at_most_5_percent(arms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracy follows two costs equally well."""
    monkeypatch.setattr(verdict, "RESAMPLES", 500)
    random = np.random.default_rng(0)
    outcomes = []
    for _ in range(300):
        a, b = random.normal(size=(2, arms))
        top1 = a + b + random.normal(size=arms)

        def difference(picks: np.ndarray, a=a, b=b, top1=top1) -> np.ndarray:
            return verdict.correlations(a[picks], top1[picks]) - verdict.correlations(b[picks], top1[picks])

        outcomes.append(decide([verdict.bootstrap("", difference, arms, 0.0, 5 * arms)]).outcome)
    assert outcomes.count("supported") / 300 <= 0.05
    assert outcomes.count("contradicted") / 300 <= 0.05
