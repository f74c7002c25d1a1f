"""Reads a run folder; files may be missing, truncated or invalid.

run = read_run(Path("runs/digits"))
run.results["test"], run.curves["loss"], run.problems
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.analyse.curves import Table, tabulate
from plainvit.analyse.figures import number, printable
from plainvit.analyse.page import SPLIT
from plainvit.disk import read_json
from plainvit.runtime.folder import metrics

FILES = ("config.json", "data.json", "metrics.jsonl", "results.json", "environment.json", "status.json")


@dataclass(frozen=True)
class Run:
    """The contents of a run folder; missing parts are empty."""

    folder: Path
    config: dict[str, Any]
    data: dict[str, Any]
    results: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    curves: Table
    problems: list[str]  # files that are missing or cannot be read

    @property
    def split(self) -> str:
        """The split that the report shows: test if there is one."""
        return next((split for split in SPLIT if self.result(split)), "")

    def result(self, split: str) -> dict[str, Any]:
        return as_dict(self.results.get(split))

    def images(self, split: str) -> float:
        return number(as_dict(as_dict(self.data.get("splits")).get(split)).get("images"))

    def confusion(self) -> np.ndarray | None:
        """Counts [true class, predicted class] of the split; None if missing or malformed."""
        try:
            matrix = np.array(self.result(self.split).get("confusion"), float)
        except (TypeError, ValueError):
            return None
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            return None
        matrix = np.nan_to_num(matrix, nan=0, posinf=0, neginf=0).clip(0)
        return matrix if matrix.any() else None

    def classes(self, count: int) -> list[str]:
        """Class names, with a number for each missing name."""
        names = self.data.get("classes")
        names = [printable(name) for name in names] if isinstance(names, list) else []
        return names[:count] + [f"class {index}" for index in range(len(names), count)]


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: expected a run folder, such as runs/NAME")
    values: dict[str, Any] = {}
    problems = [f"{name} is missing" for name in FILES if not (folder / name).is_file()]
    for name in FILES:
        is_metrics = name == "metrics.jsonl"
        key = "curves" if is_metrics else name.removesuffix(".json")
        try:
            values[key] = tabulate(metrics(folder)) if is_metrics else read_json(folder / name)
        except (OSError, ValueError) as error:
            values[key] = tabulate([]) if is_metrics else {}
            problems.append(f"{name} cannot be read: {error}")
    return Run(folder=folder, problems=problems, **values)
