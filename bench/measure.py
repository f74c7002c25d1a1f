"""What every benchmark shares: interleaved repeats, medians and spread, the machine, a table and a JSON file."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def interleaved(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each run once per round, so that a busy machine is busy for all of them."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats):
        for name, run in runs.items():
            found[name].append(run())
            print(f"  round {number + 1}/{repeats}  {name}: {found[name][-1]:,.1f}", file=sys.stderr)
    return found


def summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "repeats": len(values)}


def machine() -> dict[str, Any]:
    """What the numbers were made on, and from which commit."""
    import torch

    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "timm": version("timm"),
        "cores": os.cpu_count(),
        "processor": next(
            (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
        ),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def report(title: str, rows: list[dict[str, Any]], path: Path | None) -> None:
    """A table with one row a measurement: name, median, spread, and the ratios or limits that were asked for."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in ("what", "median", "spread", "unit", "remark"):
        table.add_column(name, justify="right" if name in ("median", "spread") else "left", overflow="fold")
    for row in rows:
        spread = f"{row['least']:,.2f}-{row['most']:,.2f}" if row.get("repeats", 1) > 1 else ""
        table.add_row(row["what"], f"{row['median']:,.2f}", spread, row["unit"], row.get("remark", ""))
    Console(width=120).print(table)
    if path:
        path.write_text(json.dumps({"title": title, "machine": machine(), "rows": rows}, indent=2) + "\n")
        print(f"written: {path}")
