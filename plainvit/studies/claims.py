"""Claims and rules of the studies as text, from claims.toml; verdict.py decides them. Loads no torch."""

import functools
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

Budget = Literal["cpu", "gpu"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)  # from the smallest
CLAIMS = Path(__file__).with_name("claims.toml")
PERCENT = ("top1", "few_shot", "overfitting")  # metrics that are shown in percent
METRIC_TITLES = {
    "top1": "held-out top-1, %",
    "few_shot": "5-shot top-1, %",
    "overfitting": "training - held-out top-1, points",
    "rank": "effective rank",
    "nearest": "distance of the most local head, px",
    "ratio": "attention on object / area",
}


@functools.cache
def read_claims() -> dict[str, dict[str, Any]]:
    """All claims by study name, in order of their number."""
    with CLAIMS.open("rb") as file:
        return tomllib.load(file)
