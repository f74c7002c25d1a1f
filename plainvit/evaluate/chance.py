"""How much of a number is chance: intervals for one proportion, for two, and for two models on the same images.

wilson(970, 1000)                    95 % of a proportion (Wilson 1927)
in_words(970, 1000, 0.1)             the same for someone who has never heard of it
sureness(0.7, 390, 1000)             how sure a model is, beside how often it is right
newcombe(970, 1000, 955, 1000)       95 % of the difference of two (Newcombe 1998, method 10)
mcnemar(30, 12)                      how often a difference as large arises between two equal models, exactly
student([0.8, 1.1, 0.2])             95 % of the mean of a few differences, such as those of seeds
rank_correlation(a, b)               Spearman's

The tests hold them against SciPy, against Newcombe's own example and against drawing images anew.
"""

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054  # 95 % of the normal distribution lies within so many deviations
DRAWS = 10_000
FEW = 9  # classes up to which one of five guesses is nearly always right, so that top-5 says nothing


def wilson(right: float, images: int) -> tuple[float, float]:
    """95 % interval of a proportion."""
    p = right / images
    centre, half = p + Z * Z / (2 * images), Z * math.sqrt(p * (1 - p) / images + Z * Z / (4 * images * images))
    low, high = (centre - half) / (1 + Z * Z / images), (centre + half) / (1 + Z * Z / images)
    return max(low, 0.0), min(high, 1.0)  # rounding may lead beyond


def in_words(right: int, images: int, guessing: float | None = None) -> list[str]:
    """An accuracy for people, beside what naming one class always gets; a second line where that is as good."""
    low, high = wilson(right, images)
    ends = (f"{100 * end:.{0 if images < 1000 else 1}f}" for end in (low, high))
    said = f"{right:,} of {images:,} right, {100 * right / images:.2f} % (95 % interval {'-'.join(ends)} %)"
    if guessing is None:
        return [said]
    lines = [f"{said}; guessing would get {100 * guessing:.3g} %"]
    if low <= guessing:
        lines.append(f"this is no better than guessing, as far as {images:,} images can tell")
    return lines


def sureness(said: float, right: int, images: int) -> str:
    """The mean probability of a model's guesses beside how often they are right, and which is larger beyond chance."""
    low, high = wilson(right, images)
    words = f"on average it says {100 * said:.0f} % and is right in {100 * right / images:.0f} %"
    if low <= said <= high:
        return f"{words}: no further apart than chance allows with {images:,} images"
    return f"{words}: {'too sure' if said > high else 'less sure than it could be'}"


def newcombe(right_a: int, images_a: int, right_b: int, images_b: int) -> tuple[float, float]:
    """95 % interval of the difference b - a of two proportions on different images, from their Wilson intervals."""
    a, b = right_a / images_a, right_b / images_b
    (low_a, high_a), (low_b, high_b) = wilson(right_a, images_a), wilson(right_b, images_b)
    return (b - a - math.hypot(b - low_b, high_a - a), b - a + math.hypot(high_b - b, a - low_a))


def two_proportions(right_a: int, images_a: int, right_b: int, images_b: int) -> float:
    """Two-sided p-value of the z-test with the pooled proportion."""
    pooled = (right_a + right_b) / (images_a + images_b)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / images_a + 1 / images_b))
    return math.erfc(abs(right_a / images_a - right_b / images_b) / spread / math.sqrt(2)) if spread else 1.0


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value: of the images that one model alone gets right, each was as likely the other's."""
    count, least = only_a + only_b, min(only_a, only_b)
    logs = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(least + 1)]
    return min(1.0, 2 * math.fsum(math.exp(one - count * math.log(2)) for one in logs))


def paired(only_a: int, only_b: int, images: int) -> tuple[float, float]:
    """95 % bootstrap interval of the difference b - a of two models' proportions on the same images.

    An image's difference is -1, 0 or 1, so that drawing images anew is drawing three counts.
    """
    shares = np.array([only_a, only_b, images - only_a - only_b]) / images
    drawn = np.random.default_rng(0).multinomial(images, shares, DRAWS)
    low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / images, (0.025, 0.975))
    return float(low), float(high)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95 % of a mean: 1.96 standard errors to either side."""
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return mean - Z * error, mean + Z * error


def student(values: Sequence[float]) -> tuple[float, float]:
    """95 % of a mean of few values, by Student's t."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = t_quantile(len(values) - 1) * error
    return mean - half, mean + half


def t_quantile(freedom: int) -> float:
    """Within so many standard errors lies 95 % of Student's t."""
    low, high = 0.0, 13.0  # 12.7 at one degree of freedom, and less from there
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < 0.95 else (low, middle)
    return low


def t_within(t: float, freedom: int) -> float:
    """How much of Student's t lies within -t and t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(odd + 2, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def rank_correlation(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Spearman's, with ties at their mean rank; 0 for fewer than three values, or where one side does not vary."""
    if len(a) < 3:
        return 0.0
    x, y = (ranks - ranks.mean() for ranks in (_ranks(np.asarray(a, float)), _ranks(np.asarray(b, float))))
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    values = values.round(9)  # values that differ in the last bits alone are ties
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse.reshape(-1)]
