"""Whether a run folder can be resumed with a config: what changed, what is finished, what is damaged."""

import logging
from pathlib import Path

from plainvit.config import Config, differences, from_json
from plainvit.data.decode import DataError
from plainvit.data.splits import Splits
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.runtime.folder import Folder, run_seconds
from plainvit.train.transfer import hash_init
from plainvit.weights.files import open_file

log = logging.getLogger("plainvit")


def check_resumable(config: Config, splits: Splits, folder: Folder, *, force: bool, bare: bool) -> bool:
    """Raises an error if the folder holds another run, unless forced. Returns whether its run is finished."""
    stored = folder.read("config.json")
    if not stored:
        return False
    run_seconds(folder.path)  # an invalid file is an error now, not in the middle of the run
    old = from_json(stored, ("run",))
    is_longer = config.steps > old.steps
    is_done = has_results(folder, bare) and (is_longer or has_valid_weights(folder.path))
    check_config(config, old, folder, force=force, is_final=is_done and not is_longer)
    check_inputs(config, splits, folder, force=force)
    return is_done and not is_longer


def has_results(folder: Folder, bare: bool) -> bool:
    """Whether the run ended and all its final files exist."""
    files = ("model.safetensors", "results.json", *(() if bare else ("report.html",)))
    ended = folder.read("status.json").get("state") == "done"
    return ended and all((folder.path / name).is_file() for name in files)


def has_valid_checksum(path: Path) -> bool:
    try:
        open_file(path).check()
        return True
    except (ValueError, OSError):
        return False


def has_valid_weights(folder: Path) -> bool:
    """Whether the final weights match their checksum; if not, they are written again from a checkpoint."""
    path = folder / "model.safetensors"
    if has_valid_checksum(path):
        return True
    if Checkpoints(folder / "checkpoints", 1).newest() is None:
        words = f"{path} is damaged, and {folder} has no valid checkpoint to write it again from"
        raise DataError(f"{words}: copy the file again, or train again with another --out")
    log.warning("%s is damaged: writing it again from the newest checkpoint", path)
    return False


def check_config(config: Config, old: Config, folder: Folder, *, force: bool, is_final: bool) -> None:
    changed = {name: both for name, both in differences(old, config).items() if name not in Config.OPERATIONAL}
    if not changed:
        return
    words = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changed.items())
    if not force:
        raise ValueError(f"{folder.path} holds a run with another config ({words}): give another --out, or --force")
    if is_final:
        raise ValueError(f"{folder.path} is finished, with another config ({words}): give another --out")
    fixed = [name for name in changed if is_fixed(name, *changed[name])]
    if fixed and Checkpoints(folder.path / "checkpoints", 1).steps():
        raise ValueError(f"{', '.join(fixed)} cannot change in a resumed run ({words}): give another --out")


def check_inputs(config: Config, splits: Splits, folder: Folder, *, force: bool) -> None:
    """The weights that the run started from, and its images and classes."""
    data = folder.read("data.json")
    if force or not data:
        return
    if "init" in data and data["init"] != hash_init(config):
        raise ValueError(f"{config.init} changed since {folder.path} started from it: give --force to resume")
    if {key: data[key] for key in data if key not in ("init", "loading")} != splits.describe:
        what = "classes" if data.get("classes") != list(splits.classes) else "images"
        raise DataError(f"the {what} of {config.data} changed since {folder.path} started: give --force to resume")


def is_fixed(name: str, before: object, after: object) -> bool:
    """Whether a setting decides the tensors of a checkpoint, so that it cannot change in a resumed run."""
    is_free = name.rpartition(".")[2] in ("dropout", "stochastic_depth")
    decoder = tuple(f"masked.{part}" for part in ("target", "depth", "width", "heads"))
    shapes = name.startswith("model") or name in ("optim.name", *decoder)
    shapes = shapes or (name == "objective" and "mae" in (before, after))
    return (shapes and not is_free) or (name in ("ema", "ema_window") and not (before and after))
