"""VTAB-1k: vtab."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from plainvit.verbs.words import UNSAID, show


def vtab(
    *,
    init: str,
    data_root: Path,
    tasks: Annotated[tuple[str, ...], UNSAID] = (),
    setting: Literal["paper", "light"] = "paper",
    steps: int = 0,
    seed: int = 0,
    device: str = "auto",
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Weights fine-tuned on each task of VTAB-1k, and their score: the mean of the 19, and of the three groups.

    Each task is one training run on its 1,000 images, tested on its whole test set; a run that is finished is not run
    again. A task whose images are not in the data root is listed as absent, and then there is no VTAB score. Exit code
    4 if a run diverged.

    Args:
        init: Weights to start from: a file, a run folder, hf:org/name or a published name.
        data_root: Where the tasks lie, each in a folder of its name; plainvit/data/vtab.py says in what form.
        tasks: Only these, such as svhn dmlab clevr-count; without, all 19.
        setting: paper: 2,500 steps of 512 images at 384 px; light: 500 steps of 64 at the model's own size.
        steps: Another number of steps.
        seed: Of the order of the images and their augmentation.
        device: cpu, cuda, cuda:1; auto: a GPU where there is one.
        out: Folder of the runs and of vtab.json; runs/vtab-SETTING-HASH where not given.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.studies import vtab as study

    if steps < 0:
        raise ValueError(f"--steps is at least 1, got {steps}")
    config = study.base_config(init, setting, steps=steps, seed=seed, device=device)
    report = study.run_tasks(config, data_root, out or study.default_folder(config, setting), tasks, quiet=json)
    show(report, None if json else study.table(report, beside=setting == "paper"))
    if any(row["state"] == "diverged" for row in report["tasks"].values()):
        sys.exit(4)
