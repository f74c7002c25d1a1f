"""Checkpoints of a run: complete or absent, with hashes; the newest valid one is loaded.

    checkpoints/step-00000500/tensors.safetensors      weights, averaged weights, optimizer state
    checkpoints/step-00000500/state.json               step, hashes, progress of the training loop

Saving copies the tensors and returns; a thread writes them to a temporary folder, syncs and renames it. A folder named
step-N is therefore complete, and its hashes detect later damage. With --sharded each of n processes writes its rows
to tensors-00000-of-0000n.safetensors, and state.json records the first row of each tensor in each file. They are read
as full tensors, by any number of processes.
"""

import contextlib
import hashlib
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from plainvit.disk import DiskError, read_json, sync_folder, write_synced, write_text
from plainvit.runtime.distributed import World
from plainvit.runtime.sharding import full_tensor, local_shard

log = logging.getLogger("plainvit")
SHARD_TIMEOUT = 600.0  # seconds that rank 0 waits for the files of the other ranks
TENSORS, STATE = "tensors.safetensors", "state.json"


class Checkpoints:
    """The checkpoints of one run. Keeps the newest `keep` and the best."""

    def __init__(self, folder: Path, keep: int, world: World | None = None, *, sharded: bool = False) -> None:
        self.folder, self.keep, self.world, self.sharded = folder, keep, world or World(), sharded
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], best: int | None = None) -> None:
        """Copies the tensors, then writes them in the background. All processes must call this.

        Waits for the previous save and raises its error, if any. The checkpoint of the step `best` is never pruned.
        """
        self.wait()
        copies: dict[str, Tensor] = {}
        rows: dict[str, int] = {}
        for name, tensor in tensors.items():
            local, start = local_shard(tensor.detach()) if self.sharded else (full_tensor(tensor.detach()), 0)
            if self.world.is_main or (self.sharded and start):  # rank 0 saves the tensors that every process has
                copies[name], rows[name] = local.to("cpu", copy=True).contiguous(), start
        if not self.world.is_main and not self.sharded:
            return
        arguments = (step, copies, rows, {"step": step, **state}, best)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last save is on disk, and raises its error, if any."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failure:
            failure, self._failure = self._failure, None
            raise failure

    def settle(self) -> None:
        """Waits for the writing thread without raising its error: no file is written after the folder is unlocked."""
        if self._thread:
            self._thread.join()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.settle()

    def set_aside(self, step: int) -> None:
        """Renames checkpoints newer than `step`, which are damaged, so that they do not count as kept."""
        for newer in self.steps():
            if newer > step:
                target = self.folder / f"damaged-{newer:08d}"
                shutil.rmtree(target, ignore_errors=True)
                (self.folder / f"step-{newer:08d}").rename(target)

    def _write(
        self, step: int, tensors: dict[str, Tensor], rows: dict[str, int], state: dict[str, Any], best: int | None
    ) -> None:
        temporary = self.folder / f".tmp-{step:08d}-{self.world.launch or 'alone'}"
        try:
            self.folder.mkdir(exist_ok=True)
            temporary.mkdir(exist_ok=True)
            name = self._shard_name(self.world.rank) if self.sharded else TENSORS
            write_synced(temporary / name, lambda path: safetensors.torch.save_file(tensors, path))
            entry = {"file": name, "sha256": file_hash(temporary / name), "rows": rows}
            if not self.world.is_main:
                write_text(temporary / f"{name}.json", json.dumps(entry))
                return
            entries = [entry, *self._collect_entries(temporary)]
            state |= {"files": {one["file"]: one["sha256"] for one in entries}, "tensors": sorted(tensors)}
            if self.sharded:
                state["rows"] = {one["file"]: one["rows"] for one in entries}
            text = json.dumps(state | {"sha256": _state_hash(state)})
            write_synced(temporary / STATE, lambda path: path.write_text(text))
            self._publish(temporary, self.folder / f"step-{step:08d}")
            self._prune(best)
        except Exception as error:  # raised in the main thread by the next save
            shutil.rmtree(temporary, ignore_errors=True)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._failure = DiskError(f"cannot save the checkpoint of step {step} in {self.folder}: {reason}")

    def _shard_name(self, rank: int) -> str:
        return f"tensors-{rank:05d}-of-{self.world.size:05d}.safetensors"

    def _collect_entries(self, temporary: Path) -> list[dict[str, Any]]:
        """Waits for the other ranks' files and returns their entries for state.json."""
        entries: list[dict[str, Any]] = []
        for rank in range(1, self.world.size if self.sharded else 1):
            note = temporary / f"{self._shard_name(rank)}.json"
            deadline = time.monotonic() + SHARD_TIMEOUT
            while not note.is_file():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not write its file within {SHARD_TIMEOUT:.0f} s")
                time.sleep(0.05)
            entries.append(read_json(note))
            note.unlink()
        return entries

    def _publish(self, temporary: Path, target: Path) -> None:
        """Renames the complete folder, and deletes an older checkpoint of the same step, which was damaged."""
        sync_folder(temporary)
        old = _rename_to_delete(target)
        temporary.rename(target)
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _prune(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(_rename_to_delete(self.folder / f"step-{step:08d}"), ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in ascending order."""
        if not self.folder.is_dir():
            return []
        names = (path.name for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8,})", name)))

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and state of the newest valid checkpoint. Skips damaged ones with a warning."""
        if self.world.is_main:
            self.sweep()
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except ValueError as error:
                log.warning("%s: trying an older one", error)
        return None

    def read(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One checkpoint, checked against its hashes, as full tensors. Raises ValueError if it is damaged."""
        folder = self.folder / f"step-{step:08d}"
        try:
            state = read_json(folder / STATE)
            if state.pop("sha256", "") != _state_hash(state) or state.get("step") != step:
                raise ValueError(f"{STATE} does not match its hash")
            _check_state(state)
            for name, digest in state["files"].items():
                if file_hash(folder / name) != digest:
                    raise ValueError(f"{name} does not match its hash")
            return _load_tensors(folder, state), state
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error

    def sweep(self) -> None:
        """Deletes the temporary folders of killed processes."""
        with contextlib.suppress(OSError):
            for temporary in self.folder.glob(".tmp-*"):
                shutil.rmtree(temporary, ignore_errors=True)


def _rename_to_delete(folder: Path) -> Path:
    """Renames to a name that `sweep` deletes, so that a kill during deletion leaves no partial checkpoint."""
    old = folder.with_name(f".tmp-old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    return old


def _check_state(state: dict[str, Any]) -> None:
    """Checks types: files {name: hash}, rows {file: {tensor: int}}, tensors [name]."""
    files, rows, names = state.get("files"), state.get("rows", {}), state.get("tensors", [])
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{STATE} lists no files")
    for name, digest in files.items():
        if Path(name).name != name or not isinstance(digest, str):
            raise ValueError(f"{STATE} has an invalid entry for the file {name!r}")
    entries = rows.values() if isinstance(rows, dict) else [rows]
    if not all(isinstance(one, dict) and all(type(start) is int for start in one.values()) for one in entries):
        raise ValueError(f"{STATE} has invalid rows")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{STATE} has invalid tensor names")


def _load_tensors(folder: Path, state: dict[str, Any]) -> dict[str, Tensor]:
    """Full tensors: the rows of all files, concatenated in order."""
    shards: dict[str, list[tuple[int, Tensor]]] = {}
    for name in state["files"]:
        starts = state.get("rows", {}).get(name, {})
        for key, tensor in safetensors.torch.load_file(folder / name).items():
            shards.setdefault(key, []).append((starts.get(key, 0), tensor))
    if "tensors" in state and (differing := shards.keys() ^ set(state["tensors"])):
        raise ValueError(f"the tensor {min(differing)} is missing or unexpected")
    tensors: dict[str, Tensor] = {}
    for key, parts in shards.items():
        if len({(rows.dtype, rows.ndim, rows.shape[1:]) for _, rows in parts}) > 1:
            raise ValueError(f"the shards of {key} have different shapes or types")
        ordered = [rows for _, rows in sorted(parts, key=lambda local_shard: local_shard[0])]
        tensors[key] = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
    return tensors


def _state_hash(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """Hash of names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
