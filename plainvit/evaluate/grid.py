"""The best value of a grid, and a warning where a better one may lie beyond its end.

best = choose_best({0.1: 0.81, 1.0: 0.84, 10.0: 0.82})        1.0
warn_at_edge(best, (0.1, 1.0, 10.0), "the l2", "--linear-l2")
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

log = logging.getLogger("plainvit")


def choose_best(scores: Mapping[float, Any]) -> float:
    """The value with the highest score. Of equal ones the middle: it is furthest from where they end.

    One at the edge of the grid is taken only where none inside is as good. Scores may be tuples, such as accuracy and
    then the NLL turned round.
    """
    highest = max(scores.values())
    equal = sorted(value for value, score in scores.items() if score == highest)
    inside = [value for value in equal if not is_at_edge(value, scores)]
    chosen = inside or equal
    return chosen[(len(chosen) - 1) // 2]


def is_at_edge(value: float, values: Collection[float]) -> bool:
    """Whether a larger or a smaller value than all of the grid might be better; nothing lies below 0."""
    return len(values) > 1 and (value == max(values) or value == min(values) > 0)


def warn_at_edge(value: float, values: Collection[float], what: str, extend: str) -> bool:
    """Whether it is; one line says so, with what to do."""
    if not is_at_edge(value, values):
        return False
    ends = f"{min(values):g} to {max(values):g}"
    log.warning("%s %g is the best of %s and at the edge: a better one may lie beyond; %s", what, value, ends, extend)
    return True
