"""Small files read with a limit, all files written whole or not at all. A leaf: it imports nothing of plainvit."""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

JSON_LIMIT = 16 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no such file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > JSON_LIMIT:
        raise ValueError(f"{path} is larger than any description of a model ({JSON_LIMIT >> 20} MiB)")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def run_folder(place: str | Path) -> Path:
    """Of a run, by itself or by a file in it: its weights and its card stand for the run."""
    path = Path(place)
    return path.parent if path.is_file() else path


def run_settings(place: str | Path) -> dict[str, Any]:
    """The config.json of such a run; {} where it is none, as beside another library's weights."""
    stored = read_json(run_folder(place) / "config.json")
    return stored if stored.get("kind") == "run" else {}


class DiskError(OSError, ValueError):
    """A file that could not be written; the command ends with exit code 5."""

    exit_code = 5


# A full, read-only or failing disk, or too many open files: no other path would do, so these are no wrong usage
RESOURCES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def exit_code_of(error: Exception) -> int:
    """Of a command that ends with this error of a user or of the system: its own, 5 for resources, else 2."""
    short = isinstance(error, OSError) and error.errno in RESOURCES
    return getattr(error, "exit_code", 5 if short else 2)


def make_folder(path: Path) -> None:
    """A folder for output, with its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"cannot write into {path}: {error.strerror}") from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes beside the path, syncs, renames: a reader sees the old file or the whole new one."""
    write_together({path: write})


def write_text(path: Path, text: str) -> None:
    """UTF-8, whole or not at all."""
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_together(writers: Mapping[Path, Callable[[Path], object]]) -> None:
    """Several files of one folder: all are written beside first, and only then renamed, in the order given."""
    beside = {path: path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in writers}
    path = next(iter(writers))
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    try:
        for path, write in writers.items():
            write_synced(beside[path], write)
        for path in writers:
            beside[path].replace(path)
        sync_folder(path.parent)
    except DiskError:
        raise
    except Exception as error:  # each writer has its own kind: OSError, SafetensorError, RuntimeError
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DiskError(f"cannot write {path}: {reason}") from error
    finally:
        for one in beside.values():
            with contextlib.suppress(OSError):
                one.unlink(missing_ok=True)


def write_synced(path: Path, write: Callable[[Path], object]) -> None:
    """On the disk, and open to others as any new file here is: safetensors would leave 0600."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # after the umask, which cannot be read without changing it for a moment
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
