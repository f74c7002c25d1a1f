"""Confidence intervals and tests for accuracies: of one model, of two, and of two on the same images.

wilson(970, 1000)                    95 % interval of a proportion (Wilson 1927)
mcnemar(30, 12)                      exact p-value of McNemar's test
paired_bootstrap(30, 12, 1000)       95 % interval of the difference of two accuracies on the same images
student_interval([0.8, 1.1, 0.2])    95 % interval of the mean of a few values, such as differences over seeds
rank_correlation(a, b)               Spearman's

The tests compare them with SciPy and with resampled images.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
RESAMPLES = 10_000  # of the bootstrap
NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)
FEW_CLASSES = 9  # up to so many, top-5 is nearly always right and not reported


def wilson(correct: float, images: int) -> tuple[float, float]:
    """95 % interval of a proportion."""
    p = correct / images
    center, half = p + Z * Z / (2 * images), Z * math.sqrt(p * (1 - p) / images + Z * Z / (4 * images * images))
    low, high = (center - half) / (1 + Z * Z / images), (center + half) / (1 + Z * Z / images)
    return max(low, 0.0), min(high, 1.0)  # rounding may exceed them


def describe_accuracy(correct: int, images: int, majority_accuracy: float | None = None) -> list[str]:
    """Accuracy with its interval and that of the most frequent class; a second line if it is no better than that."""
    low, high = wilson(correct, images)
    digits = 0 if images < 1000 else 1
    interval = f"{100 * low:.{digits}f}-{100 * high:.{digits}f} %"
    summary = f"{correct:,} of {images:,} correct, {100 * correct / images:.2f} % (95 % interval {interval})"
    if majority_accuracy is None:
        return [summary]
    lines = [f"{summary}; always predicting the most frequent class: {100 * majority_accuracy:.3g} %"]
    if low <= majority_accuracy:
        lines.append(f"this is not significantly better than always predicting that class, for {images:,} images")
    return lines


def describe_confidence(confidence: float, correct: int, images: int) -> str:
    """Compares mean confidence with accuracy, and says whether one is significantly larger."""
    low, high = wilson(correct, images)
    values = f"mean confidence {100 * confidence:.0f} %, accuracy {100 * correct / images:.0f} %"
    if low <= confidence <= high:
        return f"{values}: no significant difference for {images:,} images"
    return f"{values}: overconfident" if confidence > high else f"{values}: underconfident"


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value from the images that only one of the two models gets right."""
    count, least = only_a + only_b, min(only_a, only_b)
    logs = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(least + 1)]
    return min(1.0, 2 * math.fsum(math.exp(term - count * math.log(2)) for term in logs))


def paired_bootstrap(only_a: int, only_b: int, images: int) -> tuple[float, float]:
    """95 % bootstrap interval of the difference b - a of two accuracies on the same images.

    The difference of an image is -1, 0 or 1, so resampling images is a multinomial draw of three counts.
    """
    fractions = np.array([only_a, only_b, images - only_a - only_b]) / images
    drawn = np.random.default_rng(0).multinomial(images, fractions, RESAMPLES)
    low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / images, (0.025, 0.975))
    return float(low), float(high)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of a mean: 1.96 standard errors to either side."""
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return mean - Z * error, mean + Z * error


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean of few values, by Student's t."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = student_quantile(len(values) - 1) * error
    return mean - half, mean + half


def student_tail(t: Any, df: Any) -> Any:
    """P(T > t) of Student's t, for arrays too: t = sqrt(df) tan(angle) makes the density a power of the cosine."""
    t, df = np.asarray(t, float), np.asarray(df, float)
    angle = np.arctan(np.abs(t) / np.sqrt(df))
    nodes = angle[..., None] * (NODES + 1) / 2
    area = (np.cos(nodes) ** (df[..., None] - 1)) @ WEIGHTS * angle / 2
    log_scale = [math.lgamma((value + 1) / 2) - math.lgamma(value / 2) for value in df.ravel()]
    within = area * np.exp(np.reshape(log_scale, df.shape)) / math.sqrt(math.pi)
    return np.clip(0.5 - np.sign(t) * within, 0.0, 1.0)[()]  # a number for numbers


def student_quantile(df: float) -> float:
    """The t with P(T > t) = 2.5 %, by bisection."""
    low, high = 0.0, 1e3
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, df) > 0.025 else (low, middle)
    return low


def rank_correlation(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Spearman's, with ties at their mean rank; 0 for fewer than three values or a constant side."""
    if len(a) < 3:
        return 0.0
    x, y = (ranks - ranks.mean() for ranks in (mean_ranks(np.asarray(a, float)), mean_ranks(np.asarray(b, float))))
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread else 0.0


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 for the lowest value; ties share their mean rank."""
    values = values.round(9)  # values that differ only in the last bits are ties
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse.reshape(-1)]
