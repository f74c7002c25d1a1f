"""Whether a run folder can be resumed with a config: what changed, what is finished, what is damaged."""

from pathlib import Path

from plainvit.config import Config, differences, from_json
from plainvit.data.decode import DataError
from plainvit.data.splits import Splits
from plainvit.runtime.folder import Folder
from plainvit.train.transfer import hash_init
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
    check_inputs(config, splits, folder, force=force)
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
    if not changed:
        return
    shown = [f"{name} {before} -> {after}" for name, (before, after) in changed.items()]
    changes = ", ".join(shown[:SHOWN])
    if len(shown) > SHOWN:
        changes += f" and {len(shown) - SHOWN} more"
    if not force:
        raise ValueError(
            f"{folder.path} holds a run with another config ({changes}): use another --out, or --force to change it"
        )
    if is_finished:
        raise ValueError(f"{folder.path} is finished, with another config ({changes}): give another --out")


def check_inputs(config: Config, splits: Splits, folder: Folder, *, force: bool) -> None:
    """The weights that the run started from, and its images and classes."""
    data = folder.read("data.json")
    if force or not data:
        return
    if "init" in data and data["init"] != hash_init(config):
        raise ValueError(f"{config.init} changed since {folder.path} started from it: give --force to resume")
    if {key: data[key] for key in data if key not in ("init", "loading")} != splits.description:
        what = "classes" if data.get("classes") != list(splits.classes) else "images"
        raise DataError(f"the {what} of {config.data} changed since {folder.path} started: give --force to resume")
