"""Reads a run folder for its report.

run = read_run(Path("runs/digits"))
run.results["test"], run.curves["loss"]
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

FILES = ("config", "data", "results", "environment", "status")


@dataclass(frozen=True)
class Run:
    """The contents of a run folder; files that do not exist yet are empty."""

    folder: Path
    config: dict[str, Any]
    data: dict[str, Any]
    results: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    curves: Table

    @property
    def split(self) -> str:
        """The split that the report shows: test if there is one."""
        return next((split for split in SPLIT if split in self.results), "")

    def result(self, split: str) -> dict[str, Any]:
        return self.results.get(split, {})

    def images(self, split: str) -> float:
        return number(self.data.get("splits", {}).get(split, {}).get("images"))

    @property
    def classes(self) -> list[str]:
        return list(map(printable, self.data.get("classes", [])))

    def confusion(self) -> np.ndarray | None:
        """Counts [true class, predicted class] of the split; None if there are none."""
        counts = self.result(self.split).get("confusion")
        return np.array(counts, float) if counts else None


def read_run(folder: Path) -> Run:
    parts = {name: read_json(folder / f"{name}.json") for name in FILES}
    return Run(folder, **parts, curves=tabulate(metrics(folder)))
