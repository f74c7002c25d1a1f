"""Choose the best value of a grid, and warn if it is at the edge.

best = choose_best({0.1: 0.81, 1.0: 0.84, 10.0: 0.82})        1.0
warn_at_edge(best, (0.1, 1.0, 10.0), "the l2", "--linear-l2")
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

log = logging.getLogger("plainvit")


def choose_best(scores: Mapping[float, Any]) -> float:
    """The value with the highest score; of equal scores the middle one, preferably not at the edge of the grid.

    Scores may be tuples, such as (accuracy, -NLL).
    """
    highest = max(scores.values())
    best = sorted(value for value, score in scores.items() if score == highest)
    candidates = [value for value in best if not is_at_edge(value, scores)] or best
    return candidates[(len(candidates) - 1) // 2]


def is_at_edge(value: float, values: Collection[float]) -> bool:
    """Whether it is the largest or the smallest value; 0 cannot be extended and is no edge."""
    return len(values) > 1 and (value == max(values) or value == min(values) > 0)


def warn_at_edge(value: float, values: Collection[float], what: str, extend: str) -> bool:
    """Warns if the value is at the edge of the grid, with what to do, and returns whether it is."""
    if not is_at_edge(value, values):
        return False
    ends = f"{min(values):g} to {max(values):g}"
    log.warning("%s %g is at the edge of the grid %s, a better one may lie outside: %s", what, value, ends, extend)
    return True
