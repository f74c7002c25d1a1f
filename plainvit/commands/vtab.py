"""VTAB-1k: vtab."""

import sys
from pathlib import Path
from typing import Literal

from plainvit.commands.parsing import Device, Json, print_result


def vtab(
    *,
    init: str,
    data_root: Path,
    tasks: tuple[str, ...] = (),
    setting: Literal["paper", "light"] = "paper",
    steps: int = 0,
    seed: int = 0,
    device: Device = "auto",
    out: Path | None = None,
    json: Json = False,
) -> None:
    """Fine-tune weights on the 19 tasks of VTAB-1k and report the scores.

    Each task is one run on 1,000 training images, tested on the full test set; finished runs are not repeated. If a
    task is missing in --data-root, it is listed as absent and there is no VTAB score. Exit code 4 if a run diverged.

    Args:
        init: Weights to start from: file, run folder, hf:org/name or name from `plainvit weights`
        data_root: Folder with the tasks, each in a folder of its name (format: plainvit/data/vtab.py)
        tasks: Tasks to run, such as svhn dmlab clevr-count; default: all 19
        setting: paper: 2,500 steps, batch 512, 384 px; light: 500 steps, batch 64, the model's size
        steps: Number of steps, in place of the setting's
        seed: Seed of the image order and augmentation
        out: Folder of the runs and of vtab.json; default: runs/vtab-WEIGHTS-SETTING
    """
    from plainvit.studies import vtab as study

    if steps < 0:
        raise ValueError(f"--steps must be at least 1, got {steps}")
    config = study.base_config(init, setting, steps=steps, seed=seed, device=device)
    out = out or Path("runs") / f"vtab-{Path(init).stem}-{setting}"
    report = study.run_tasks(config, data_root, out, tasks, quiet=json)
    print_result(report, None if json else study.render_report(report))
    if any(row["state"] == "diverged" for row in report["tasks"].values()):
        sys.exit(4)
