"""VTAB-1k: fine-tunes weights on each of 19 small tasks with the same settings; the score is the mean of the 19.

    plainvit vtab --init WEIGHTS --data-root DIR --setting paper
    plainvit vtab --init WEIGHTS --data-root DIR --tasks svhn dmlab --setting light

Source: the ViT paper, section 4.1, B.1.1 and Table 9; arXiv 1910.04867. Each run trains on all 1,000 images of its task
and is evaluated once on the full test set. `plainvit/data/vtab.py` describes the data folders. Finished runs are not
repeated. If a task is missing or diverges, there is no VTAB score, only the mean of the available tasks.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from plainvit.config import Config, nearest
from plainvit.data.decode import DataError
from plainvit.data.splits import open_splits
from plainvit.data.vtab import GROUPS, TASKS, MissingTaskError, augment_for
from plainvit.disk import write_text
from plainvit.recipes import recipe
from plainvit.runtime.folder import replace_non_finite
from plainvit.train.nonfinite import DivergedError
from plainvit.train.run import fit
from plainvit.train.transfer import read_starting_model

Setting = Literal["paper", "light"]


def base_config(init: str, setting: Setting, *, steps: int = 0, seed: int = 0, device: str = "auto") -> Config:
    """The settings of all tasks. light: the model's image size, and a fortieth of the training images."""
    config = recipe("ft-vtab").replace(init=init, seed=seed, device=device, evaluations=2)
    if setting == "light":
        config = config.replace(image_size=0, steps=500, batch=64, optim=config.optim.replace(warmup=0.1))
    if steps:  # a shorter run has a shorter warm-up
        warmup = config.optim.warmup
        fraction = warmup / config.steps if warmup >= 1 else warmup
        config = config.replace(steps=steps, optim=config.optim.replace(warmup=fraction))
    return config


def task_config(config: Config, task: str, data_root: str | Path) -> Config:
    """The config of one task, without augmentations that would change its labels."""
    return config.replace(data=f"vtab1000/{task}", data_root=str(data_root), augment=augment_for(task, config.augment))


def run_tasks(
    config: Config, data_root: str | Path, out: Path, tasks: Sequence[str] = (), *, quiet: bool = False
) -> dict[str, Any]:
    """Fine-tunes on each task in OUT/TASK; returns the report, which is also written to OUT/vtab.json."""
    tasks = tuple(tasks) or tuple(TASKS)
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"unknown VTAB task {task!r}; {nearest(task, TASKS)}")
    read_starting_model(config)  # fails now if the weights cannot be read
    configs = {task: task_config(config, task, data_root) for task in tasks if _has_images(config, task, data_root)}
    if not configs:
        raise DataError(f"{data_root} has images of none of these tasks: {', '.join(tasks)}")
    rows: dict[str, dict[str, Any]] = {}
    console = Console(stderr=True, quiet=quiet, highlight=False)
    for number, task in enumerate(tasks, 1):
        console.print(f"{task}, {number} of {len(tasks)}{'' if task in configs else ': no images'}", markup=False)
        row = _run_task(configs[task], out / task, quiet) if task in configs else {"state": "absent"}
        rows[task] = {"group": TASKS[task].group, **row}
    report = _make_report(config, rows)
    write_text(out / "vtab.json", json.dumps(replace_non_finite(report), indent=1) + "\n")
    return report


def _has_images(config: Config, task: str, data_root: str | Path) -> bool:
    """Checked before the first run, so that damaged data fails now."""
    try:
        splits = open_splits(task_config(config, task, data_root))
    except MissingTaskError:
        return False
    if splits.test is None:
        raise DataError(f"{task} has no test images in {data_root}")
    return True


def _run_task(config: Config, folder: Path, quiet: bool) -> dict[str, Any]:
    try:
        done = fit(config, folder, quiet=quiet)
    except DivergedError as error:
        return {"state": "diverged", "folder": str(folder), "reason": str(error).splitlines()[0]}
    test = done.metrics["test"]
    numbers = {name: test[name] for name in ("top1", "interval", "unreadable")}
    return {"state": "done", "folder": str(done.folder), **numbers, "n": test["images"]}


def _make_report(config: Config, rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    scores = {task: row["top1"] for task, row in rows.items() if row["state"] == "done"}
    settings = {"steps": config.steps, "batch": config.batch, "lr": config.optim.lr, "seed": config.seed}
    setting = {"init": config.init, "image_size": config.image_size or "the model's own", **settings}
    return {"kind": "vtab", "setting": setting, "tasks": dict(rows), "means": average_by_group(scores)}


def average_by_group(scores: Mapping[str, float]) -> dict[str, Any]:
    """Means of the available tasks by group; "vtab" only if all 19 are available."""
    means: dict[str, Any] = {}
    for group, names in GROUPS.items():
        available = [scores[name] for name in names if name in scores]
        if available:
            means[group] = {"mean": statistics.fmean(available), "tasks": len(available), "of": len(names)}
    if len(scores) == len(TASKS):
        means["vtab"] = statistics.fmean(scores.values())
    elif scores:
        means["mean_of_available"] = statistics.fmean(scores.values())
    return means


# Terminal -------------------------------------------------------------------------------------------------------------


def render_report(report: Mapping[str, Any]) -> Group:
    """A row for each task, the mean of each group, and the score or why there is none."""
    setting, means = report["setting"], report["means"]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("task", style="cyan", no_wrap=True)
    shown.add_column("group", no_wrap=True)
    for title in ("top-1", "95 %", "test images"):
        shown.add_column(title, justify="right", no_wrap=True)
    for task, row in report["tasks"].items():
        cells = [row["state"], "", ""]
        if row["state"] == "done":
            low, high = (f"{100 * value:.1f}" for value in row["interval"])
            cells = [f"{100 * row['top1']:.2f}", f"{low}-{high}", f"{row['n']:,}"]
        shown.add_row(task, row["group"], *cells, style="" if row["state"] == "done" else "dim")
    how = f"{setting['steps']:,} steps of {setting['batch']}, lr {setting['lr']:g}, size {setting['image_size']}"
    lines = []
    for group, mean in means.items():
        if group in GROUPS:
            rest = f"  ({mean['tasks']} of {mean['of']} tasks only)" if mean["tasks"] < mean["of"] else ""
            lines.append(f"{group:12} {100 * mean['mean']:6.2f}{rest}")
    done = sum(row["state"] == "done" for row in report["tasks"].values())
    if "mean_of_available" in means:
        lines.append(f"mean of the {done} available tasks: {100 * means['mean_of_available']:.2f}")
    if "vtab" in means:
        lines.append(f"VTAB-1k      {100 * means['vtab']:6.2f}")
    else:
        lines.append(f"no VTAB score: {len(TASKS) - done} of the {len(TASKS)} tasks are missing")
    return Group(Text(f"{setting['init']}: {how}\n"), shown, "", *lines)
