"""Training runs: train, finetune, plan and doctor, whose flags are the settings of a recipe; recipes and replay."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plainvit.commands.flags import Settings
from plainvit.commands.parsing import Device, Json, Processes, print_result
from plainvit.commands.settings import configure_run
from plainvit.config import Config

if TYPE_CHECKING:
    from rich.console import Group

_COMMON = ("recipe", "data", "init", "model", "image_size", "batch")
_TRAIN = (*_COMMON, "epochs", "hours", "optim.lr", "out", "device")
# Flags in the short --help of the commands that take every setting of a run
COMMON_FLAGS = {
    "train": _TRAIN,
    "finetune": _TRAIN,
    "plan": (*_COMMON, "on", "devices", "images", "measure", "json"),
    "doctor": (*_COMMON, "devices", "device", "json"),
}


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags of train and finetune that are not settings of the run."""

    out: Path | None = None  # Run folder; default: runs/RECIPE-HASH
    search: bool = False  # Try the learning rates of --optim.grid on held-out training images first
    force: bool = False  # Resume even if the config or the data changed; use a recipe on other data
    devices: int = 1  # Number of processes on this machine, one per device (several machines: torchrun)
    restarts: int = 0  # How often to restart the processes of --devices when one of them dies
    json: bool = False  # Print the results as JSON


def train(recipe: str = "", /, *, settings: Settings, flags: RunFlags) -> Processes | None:
    """Train a model with a recipe, or resume an unfinished run.

    Every setting of the recipe is a flag, for example --optim.lr 1e-3 or --model ViT-S/16. The same command resumes an
    interrupted run. The run folder holds the weights, the metrics and a report.

    Args:
        recipe: Name from `plainvit recipes`, or FILE.py:FUNCTION for your own; default: one that suits --data
    """
    return _train("train", recipe, settings, flags)


def finetune(recipe: str = "finetune", /, *, settings: Settings, flags: RunFlags) -> Processes | None:
    """Fine-tune pretrained weights on your images.

    For example: plainvit finetune --init WEIGHTS --data photos/. First fits a linear head on
    frozen features, which gives a usable model in about a minute; then trains all layers and keeps the better model.
    The paper's recipes (ft-cifar10, ft-pets and others) start with a zero-initialized head.

    Args:
        recipe: Name from `plainvit recipes 'ft-*'`, such as ft-pets; default: the recipe finetune
    """
    return _train("finetune", recipe, settings, flags)


def _train(command: str, recipe: str, settings: Settings, flags: RunFlags) -> Processes | None:
    for name, least in (("devices", 1), ("restarts", 0)):
        if getattr(flags, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(flags, name)}")
    config = configure_run(command, recipe, settings, quiet=flags.json)
    if flags.devices > 1 and "RANK" not in os.environ:
        return Processes(flags.devices, flags.restarts, config.device)
    from plainvit.train.finalize import describe_choice
    from plainvit.train.run import fit

    run = fit(config, flags.out, force=flags.force, search=flags.search, quiet=flags.json)
    if os.environ.get("RANK", "0") != "0":  # only the main process prints
        return None
    if flags.json:
        for scores in run.metrics.values():
            if isinstance(scores, dict):
                scores.pop("confusion", None)  # a row for each pair of classes; it is in results.json
        print_result({"folder": str(run.folder), **run.metrics}, None)
        return None
    for line in (*describe_choice(run.metrics), *describe_results(run.metrics)):
        print(line)
    print(f"report: {run.folder / 'report.html'}")
    return None


def describe_results(results: dict[str, Any]) -> Iterator[str]:
    """Lines with the accuracy or loss on validation and test images."""
    from plainvit.evaluate.statistics import describe_accuracy

    for split, name in (("val", "validation"), ("test", "test")):
        scores = results.get(split, {})
        if "top1" in scores:
            correct = round(scores["top1"] * scores["images"])
            accuracy, *warning = describe_accuracy(correct, scores["images"], scores.get("majority_accuracy"))
            yield from (f"{name}: {accuracy}", *warning)
            better = results.get("better_before")
            if split == "val" and better:
                step = f"step {better['step']:,} had {100 * better['top1']:.2f} %"
                yield f"the final weights are the last step's; {step}: use --patience N to keep the best"
        elif scores.get("loss") is not None:
            yield f"{name} loss {scores['loss']:.4f}"


def plan(
    recipe: str = "",
    /,
    *,
    settings: Settings,
    on: str = "",
    devices: int = 1,
    images: int | None = None,
    measure: bool = False,
    json: Json = False,
) -> None:
    """Estimate the FLOPs, memory, images per second and hours of a run.

    Step times come from steps measured on an H200, or with --measure from real steps on this machine. Every setting of
    the recipe is a flag.

    Args:
        recipe: Name from `plainvit recipes`, or FILE.py:FUNCTION for your own
        on: Device to plan for: h200, h100 or a100 (80 GB); without it, no times
        devices: Number of these devices
        images: Number of training images, if the data is not a known dataset
        measure: Train for 25 steps on this machine and use their median time; needs the data
    """
    from plainvit.planning import plan as planning

    if measure and (on or devices > 1 or images):
        raise ValueError("--measure uses one device and the data of this machine: remove --on, --devices, --images")
    config, measured = configure_run("plan", recipe, settings, quiet=json), None
    if measure:
        from plainvit.train.measure import measure_steps

        config, measured = measure_steps(config)
        images = measured["images"]
    elif images is None and config.data and Path(config.data).exists():
        config, images = _open_data(config)
    report = planning.plan(config, on=on, devices=devices, images=images, measured=measured)
    print_result(report, None if json else planning.table(report))


def _open_data(config: Config) -> tuple[Config, int]:
    """The config with the classes of its data, and the number of training images."""
    from plainvit.data.splits import open_splits
    from plainvit.train.transfer import complete_config

    splits = open_splits(config)
    return complete_config(config, splits), len(splits.train)


def doctor(recipe: str = "", /, *, settings: Settings, devices: int = 1, json: Json = False) -> None:
    """Check this machine, and the settings of a RECIPE if given, for known problems.

    Prints versions, devices and each problem with its fix.

    Args:
        recipe: Name from `plainvit recipes`, or FILE.py:FUNCTION for your own
        devices: Number of processes that will train on this machine
    """
    from plainvit.train import doctor as examination

    if devices < 1:
        raise ValueError(f"--devices must be at least 1, got {devices}")
    config = configure_run("doctor", recipe, settings, quiet=json)
    report = examination.examine(config if config.recipe else None, devices)
    print_result(report, None if json else examination.table(report))


def recipes(pattern: str = "", /, *, json: Json = False) -> None:
    """List the recipes: what each trains, the expected result and the cost.

    Without a PATTERN only the recipes to start with are listed; '*' lists all, those of published papers too.

    Args:
        pattern: Shell-style pattern of names, such as '*', 'ft-*' or '*i21k*'
        json: Print JSON instead of a table, with source, command and the full config
    """
    from plainvit.config import to_json
    from plainvit.recipes import list_recipes, read_docstring, recipe
    from plainvit.recipes.starters import RECIPES as STARTERS

    names = list_recipes(pattern) if pattern else list(STARTERS)
    if not names:
        raise ValueError(f"no recipe matches {pattern!r}; `plainvit recipes '*'` lists all")
    rows = [read_docstring(name) for name in names]
    if json:
        print_result([row | {"config": to_json(recipe(row["name"]))} for row in rows], None)
        return
    note = ""
    if not pattern:
        note = f"\n{len(list_recipes()) - len(names)} more follow published papers: plainvit recipes '*' lists all, "
        note += "'vit-*' those of the ViT paper, 'ft-*' its fine-tuning, 'deit*' DeiT's."
    print_result(None, _recipe_table(rows, note))


def _recipe_table(rows: list[dict[str, str]], note: str) -> "Group":
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(row["name"], f"{row['summary']}\nexpected: {row['expected']}\ncost: {row['cost']}")
    return Group(table, *([note] if note else []))


def replay(
    run: Path,
    /,
    *,
    step: int | None = None,
    data_root: str = "",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Rerun one step of a run to find where values become NaN or Inf.

    The run folder is not changed.

    Args:
        run: Run folder
        step: Step number as in the metrics: a captured step, or one right after a checkpoint; default: last captured
        data_root: Folder with the known datasets, if it has moved
    """
    from plainvit.runtime.folder import replace_non_finite
    from plainvit.train import replay as rerun

    report = rerun.replay(run, step, data_root, device)
    print_result(replace_non_finite(report), None if json else rerun.table(report))
