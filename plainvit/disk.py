"""Small files read with a limit, all files written whole or not at all. A leaf: it imports nothing of plainvit."""

import json
import os
import secrets
from collections.abc import Callable
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


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes beside the path, syncs, renames: a reader sees the old file or the whole new one."""
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(beside)
        beside.chmod(0o666 & ~_umask())  # safetensors leaves 0600
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
