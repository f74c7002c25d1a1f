"""Claims and rules of the studies as text, from claims.toml; verdict.py decides them. Loads no torch."""

import functools
import tomllib
from pathlib import Path
from typing import Any

CLAIMS = Path(__file__).with_name("claims.toml")
PERCENT = {  # metrics in percent, with their table headings
    "top1": "held-out top-1, %",
    "few_shot": "5-shot top-1, %",
    "overfitting": "training - held-out top-1, points",
}


@functools.cache
def read_claims() -> dict[str, dict[str, Any]]:
    """number, claim, source, paper and rule of each study by name, sorted by number."""
    with CLAIMS.open("rb") as file:
        return tomllib.load(file)
