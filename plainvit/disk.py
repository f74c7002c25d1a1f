"""Atomic file writes and size-limited JSON reads. Imports nothing else of plainvit."""

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

JSON_LIMIT = 16 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file does not exist."""
    if not path.is_file():
        return {}
    if path.stat().st_size > JSON_LIMIT:
        raise ValueError(
            f"{path} has {path.stat().st_size >> 20} MiB; the limit for a JSON file is {JSON_LIMIT >> 20} MiB"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): restore or delete it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object: restore or delete it")
    return value


def run_folder(run: str | Path) -> Path:
    """The folder of a run, given as the folder or as a file in it (its weights or its card)."""
    path = Path(run)
    return path.parent if path.is_file() else path


def run_settings(run: str | Path) -> dict[str, Any]:
    """The config.json of a run; {} if there is none, or if it belongs to another library's weights."""
    stored = read_json(run_folder(run) / "config.json")
    return stored if stored.get("kind") == "run" else {}


class DiskError(OSError, ValueError):
    """A file that could not be written; the command ends with exit code 5."""

    exit_code = 5


def make_folder(path: Path) -> None:
    """Create a folder for output, with its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"cannot write into {path}: {error.strerror}") from error


def write_atomically(path: Path, write: Callable[[Path], object], *, overwrite: bool = True) -> None:
    """Write a temporary file next to the path, sync it, rename it: readers see the old file or the complete new one.

    Without overwrite, raises FileExistsError if the file exists by then.
    """
    write_together({path: write}, overwrite=overwrite)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_together(writers: Mapping[Path, Callable[[Path], object]], *, overwrite: bool = True) -> None:
    """Write several files of one folder: all temporary files first, then the renames, in the order given."""
    temporary = {path: path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in writers}
    path = next(iter(writers))
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    try:
        for path, write in writers.items():
            write_synced(temporary[path], write)
        for path in writers:
            if overwrite:
                temporary[path].replace(path)
            else:
                link_new(temporary[path], path)
        sync_folder(path.parent)
    except (DiskError, FileExistsError):
        raise
    except Exception as error:  # each writer raises its own type: OSError, SafetensorError, RuntimeError
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DiskError(f"cannot write {path}: {reason}") from error
    finally:
        for leftover in temporary.values():
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)


def link_new(temporary: Path, path: Path) -> None:
    """Give a finished file its name; raises FileExistsError if there is such a file, which a rename would replace."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # exFAT and some network drives have no hard links
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists") from None
        temporary.rename(path)


def write_synced(path: Path, write: Callable[[Path], object]) -> None:
    """Write and sync a file with the default permissions: safetensors alone would leave 0600."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # with the umask applied, which cannot be read without changing it
    write(path)
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
