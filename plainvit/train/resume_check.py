"""Whether a run folder can be resumed with a config: what changed, what is finished, what is damaged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plainvit.config import Config, differences, from_json
from plainvit.data.decode import DataError
from plainvit.data.splits import Splits
from plainvit.runtime.folder import Folder
from plainvit.train.transfer import FREE, hash_init
from plainvit.weights.files import open_file

SHOWN = 3  # changed settings in an error


def check_resumable(config: Config, splits: Splits, folder: Folder, *, force: bool, bare: bool) -> bool:
    """Raises an error if the folder holds another run, unless forced. Returns whether its run is finished."""
    stored = folder.read("config.json")
    if not stored:
        return False
    old = from_json(stored, ("run",))
    is_finished = config.steps <= old.steps and has_results(folder, bare)
    check_config(config, old, folder, force=force, is_finished=is_finished)
    check_inputs(config, splits, folder, force=force, is_finished=is_finished)
    return is_finished


def has_results(folder: Folder, bare: bool) -> bool:
    """Whether the run ended and its final files exist; damaged weights are written again from a checkpoint."""
    files = ["results.json"] if bare else ["results.json", "report.html"]
    if folder.read("status.json").get("state") != "done" or not all((folder.path / name).is_file() for name in files):
        return False
    return has_valid_checksum(folder.path / "model.safetensors")


def has_valid_checksum(path: Path) -> bool:
    try:
        open_file(path).check()
        return True
    except (ValueError, OSError):
        return False


def check_config(config: Config, old: Config, folder: Folder, *, force: bool, is_finished: bool) -> None:
    changed = {name: both for name, both in differences(old, config).items() if name not in Config.OPERATIONAL}
    has_checkpoint = any((folder.path / "checkpoints").glob("step-*"))
    fixed = {name: both for name, both in changed.items() if has_checkpoint and changes_tensors(name, *both)}
    if not changed:
        return
    if is_finished:
        problem, fix = f"a finished run with another config ({describe(changed)})", "use another --out"
    elif any(name.startswith("model.") for name in fixed):
        problem, fix = f"a run of another model ({describe(fixed)})", "use another --out"
    elif fixed:
        problem, fix = f"a run that cannot continue with this config ({describe(fixed)})", "use another --out"
    elif not force:
        problem = f"a run with another config ({describe(changed)})"
        fix = "use another --out, or --force to resume it with the new config"
    else:
        return
    raise ValueError(f"{folder.path} holds {problem}: {fix}")


def changes_tensors(name: str, before: Any, after: Any) -> bool:
    """Whether a checkpoint from before the change has other tensors, or is of a model that computes something else."""
    if name.startswith("model."):
        return name.removeprefix("model.") not in FREE
    if name in ("ema", "ema_window"):  # 0: no averaged weights
        return bool(before) != bool(after)
    if name == "optim.name":  # AdamW and LAMB keep the same state
        return {before, after} != {"adamw", "lamb"}
    return name in ("objective", "optim.frozen", "masked.target", "masked.depth", "masked.width", "masked.heads")


def describe(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Such as "optim.lr 0.001 -> 0.01 and 2 more"."""
    shown = [f"{name} {before} -> {after}" for name, (before, after) in changed.items()]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more


def check_inputs(config: Config, splits: Splits, folder: Folder, *, force: bool, is_finished: bool) -> None:
    """The weights that the run started from, and its images and classes."""
    data = folder.read("data.json")
    if force or not data:
        return
    fix = "use another --out" if is_finished else "use another --out, or --force to resume"
    if "init" in data and data["init"] != hash_init(config):
        raise ValueError(f"{config.init} changed since {folder.path} started from it: {fix}")
    if {key: data[key] for key in data if key not in ("init", "loading")} != splits.description:
        what = "classes" if data.get("classes") != list(splits.classes) else "images"
        raise DataError(f"the {what} of {config.data} changed since {folder.path} started: {fix}")
