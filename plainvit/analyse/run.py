"""What a run folder says about its run, read with care: any of its files may be missing, cut short or foreign.

run = read_run(Path("runs/digits"))
run.result("test"), run.curves["loss"], run.faults
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.analyse.curves import Table, read_metrics, tabulate, thin_table
from plainvit.analyse.figures import number, printable
from plainvit.analyse.page import SPLIT, Html, element, join
from plainvit.disk import read_json

FILES = {
    "config.json": "the settings",
    "data.json": "the names of the classes and the number of images",
    "metrics.jsonl": "the learning curves",
    "results.json": "the evaluation of the finished weights",
    "environment.json": "the machine, the versions and the command",
    "status.json": "how the run ended",
}


@dataclass(frozen=True)
class Run:
    """What a run folder says about its run; a part that is absent is empty."""

    folder: Path
    config: dict[str, Any]
    data: dict[str, Any]
    results: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    curves: Table  # thinned out
    skipped: int  # steps that did not move the weights
    faults: tuple[Html, ...]  # what is missing or cannot be read

    @property
    def judged(self) -> str:
        """The split whose confusions are shown: test where there is one."""
        return next((split for split in SPLIT if mapping(self.results.get(split))), "")

    @property
    def chosen_on_val(self) -> bool:
        return bool(self.results.get("chosen_on_val") or mapping(self.results.get("val")).get("chosen_on_val"))

    def result(self, split: str) -> dict[str, Any]:
        return mapping(self.results.get(split))

    def images(self, split: str) -> float:
        return number(mapping(mapping(self.data.get("splits")).get(split)).get("images"))

    def confusion(self) -> np.ndarray | None:
        """Counts [truth, guess] of the judged split, where they are whole and square."""
        try:
            matrix = np.array(self.result(self.judged).get("confusion"), float)
        except (TypeError, ValueError):
            return None
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            return None
        matrix = np.nan_to_num(matrix, nan=0, posinf=0, neginf=0).clip(0)
        return matrix if matrix.any() else None

    def classes(self, count: int) -> list[str]:
        """So many names; a number where there is no name."""
        names = self.data.get("classes")
        names = [printable(name) for name in names] if isinstance(names, list) else []
        return names[:count] + [f"class {index}" for index in range(len(names), count)]


def mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a run")
    found: dict[str, Any] = {}
    faults: list[Html] = []
    for name, meaning in FILES.items():
        read = read_metrics if name == "metrics.jsonl" else read_json
        try:
            found[name.partition(".")[0]] = read(folder / name)
            fault = "" if (folder / name).is_file() else f" ({meaning})"
        except (OSError, ValueError) as error:
            fault = f" ({meaning}) cannot be read: {error}"
        if fault:
            faults.append(join([element("code", name), fault]))
    metrics = found.pop("metrics", tabulate([]))
    skipped = int((metrics["skipped"] > 0).sum())
    parts = {key: found.get(key, {}) for key in ("config", "data", "results", "environment", "status")}
    return Run(folder=folder, curves=thin_table(metrics), skipped=skipped, faults=tuple(faults), **parts)
