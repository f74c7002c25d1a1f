"""Claims and rules of the studies, from claims.toml; loads no torch."""

import functools
import tomllib
from pathlib import Path
from typing import Any


@functools.cache
def read_claims() -> dict[str, dict[str, Any]]:
    """number, claim, source, paper and rule of each study by name, sorted by number."""
    with Path(__file__).with_name("claims.toml").open("rb") as file:
        return tomllib.load(file)
