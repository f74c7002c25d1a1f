"""The state of a run on disk: whole or absent, hashed, the newest valid one taken.

    checkpoints/step-00000500/tensors.safetensors      weights, averaged weights, optimiser
    checkpoints/step-00000500/state.json               step, hashes, what the loop must remember

Saving copies the tensors and returns; a thread writes them beside, syncs them and renames the folder. A folder with
a name is therefore complete, and the hashes tell whether it still is. Where each of n processes saves its own rows
there are n files, tensors-00000-of-0000n.safetensors, and state.json says which rows each has: they are read as
whole tensors again, by any number of processes.
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
from plainvit.runtime.sharding import part, whole

log = logging.getLogger("plainvit")
PATIENCE = 600.0  # seconds that the first process waits for the others' parts
TENSORS, STATE = "tensors.safetensors", "state.json"


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the best."""

    def __init__(self, folder: Path, keep: int, world: World | None = None, *, sharded: bool = False) -> None:
        self.folder, self.keep, self.world, self.sharded = folder, keep, world or World(), sharded
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], best: int | None = None) -> None:
        """Copies now, writes in the background; waits only for the save before it. An earlier failure is raised.

        `best` is a step whose checkpoint is kept although it is old. All processes must call this.
        """
        self.wait()
        copies: dict[str, Tensor] = {}
        rows: dict[str, int] = {}
        for name, tensor in tensors.items():
            mine, start = part(tensor.detach()) if self.sharded else (whole(tensor.detach()), 0)
            if self.world.first or (self.sharded and start):  # what every process has, the first one saves
                copies[name], rows[name] = mine.to("cpu", copy=True).contiguous(), start
        if not self.world.first and not self.sharded:
            return
        arguments = (step, copies, rows, {"step": step, **state}, best)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until what was saved is on disk."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failure:
            failure, self._failure = self._failure, None
            raise failure

    def settle(self) -> None:
        """Until the thread has ended, however it ended: nothing is written after a run has let go of its folder."""
        if self._thread:
            self._thread.join()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.settle()

    def set_aside(self, step: int) -> None:
        """What is newer than the checkpoint that was taken is damaged: it must not crowd out those to come."""
        for newer in self.steps():
            if newer > step:
                target = self.folder / f"damaged-{newer:08d}"
                shutil.rmtree(target, ignore_errors=True)
                (self.folder / f"step-{newer:08d}").rename(target)

    def _write(
        self, step: int, tensors: dict[str, Tensor], rows: dict[str, int], state: dict[str, Any], best: int | None
    ) -> None:
        beside = self.folder / f".tmp-{step:08d}-{self.world.launch or 'alone'}"
        try:
            self.folder.mkdir(exist_ok=True)
            beside.mkdir(exist_ok=True)
            name = TENSORS
            if self.sharded:
                name = f"tensors-{self.world.rank:05d}-of-{self.world.size:05d}.safetensors"
            write_synced(beside / name, lambda path: safetensors.torch.save_file(tensors, path))
            said = {"file": name, "sha256": file_hash(beside / name), "rows": rows}
            if not self.world.first:
                write_text(beside / f"{name}.json", json.dumps(said))
                return
            everyone = [said, *self._others(beside)]
            state |= {"files": {one["file"]: one["sha256"] for one in everyone}, "tensors": sorted(tensors)}
            if self.sharded:
                state["rows"] = {one["file"]: one["rows"] for one in everyone}
            text = json.dumps(state | {"sha256": _state_hash(state)})
            write_synced(beside / STATE, lambda path: path.write_text(text))
            self._put(beside, self.folder / f"step-{step:08d}")
            self._prune(best)
        except Exception as error:  # raised in the main thread, by the next save
            shutil.rmtree(beside, ignore_errors=True)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._failure = DiskError(f"cannot save the checkpoint of step {step} in {self.folder}: {reason}")

    def _others(self, beside: Path) -> list[dict[str, Any]]:
        """What the other processes say of their files, once all have said it."""
        found: list[dict[str, Any]] = []
        for rank in range(1, self.world.size if self.sharded else 1):
            note = beside / f"tensors-{rank:05d}-of-{self.world.size:05d}.safetensors.json"
            deadline = time.monotonic() + PATIENCE
            while not note.is_file():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not write its part in {PATIENCE:.0f} s")
                time.sleep(0.05)
            found.append(read_json(note))
            note.unlink()
        return found

    def _put(self, beside: Path, target: Path) -> None:
        """Under its name, at once; an older one of the same step, which would be damaged, makes room for it."""
        sync_folder(beside)
        old = _rename_to_delete(target)
        beside.rename(target)
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _prune(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(_rename_to_delete(self.folder / f"step-{step:08d}"), ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        names = (path.name for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{8,})", name)))

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and state of the newest valid checkpoint; damaged ones are told of and passed over."""
        if self.world.first:
            self.sweep()
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except ValueError as error:
                log.warning("%s: passed over", error)
        return None

    def read(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One checkpoint, checked against its hashes; tensors are whole, however many processes saved them."""
        folder = self.folder / f"step-{step:08d}"
        try:
            state = read_json(folder / STATE)
            if state.pop("sha256", "") != _state_hash(state) or state.get("step") != step:
                raise ValueError("its state is not what was written")
            _check_state(state)
            for name, digest in state["files"].items():
                if file_hash(folder / name) != digest:
                    raise ValueError(f"{name} is not what was written")
            return _joined(folder, state), state
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error

    def sweep(self) -> None:
        """What a killed process left half-written."""
        with contextlib.suppress(OSError):
            for left in self.folder.glob(".tmp-*"):
                shutil.rmtree(left, ignore_errors=True)


def _rename_to_delete(folder: Path) -> Path:
    """Under a name that `sweep` removes: a kill while its files are deleted leaves no part of a checkpoint behind."""
    old = folder.with_name(f".tmp-old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    return old


def _check_state(state: dict[str, Any]) -> None:
    """Files by their plain names with hashes, rows as whole numbers, tensors as a list of names."""
    files, rows = state.get("files"), state.get("rows", {})
    if not isinstance(files, dict) or not files:
        raise ValueError("its state names no files")
    for name, digest in files.items():
        if Path(name).name != name or not isinstance(digest, str):
            raise ValueError(f"its state says nothing sound of the file {name!r}")
    parts = rows.values() if isinstance(rows, dict) else [rows]
    if not all(isinstance(one, dict) and all(type(start) is int for start in one.values()) for one in parts):
        raise ValueError("its state says nothing sound of rows")
    names = state.get("tensors", [])  # which older versions did not note
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its state says nothing sound of tensors")


def _joined(folder: Path, state: dict[str, Any]) -> dict[str, Tensor]:
    """Whole tensors from the rows in each file."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for name in state["files"]:
        starts = state.get("rows", {}).get(name, {})
        for key, tensor in safetensors.torch.load_file(folder / name).items():
            pieces.setdefault(key, []).append((starts.get(key, 0), tensor))
    for key, found in pieces.items():
        if len(found) > 1 and len({(rows.dtype, rows.ndim, rows.shape[1:]) for _, rows in found}) > 1:
            raise ValueError(f"the rows of {key} do not fit each other")
    if "tensors" in state and (other := pieces.keys() ^ set(state["tensors"])):
        raise ValueError(f"it does not hold the tensors that were written: {sorted(other)[0]} is missing or new")
    return {
        key: found[0][1] if len(found) == 1 else torch.cat([rows for _, rows in sorted(found, key=lambda one: one[0])])
        for key, found in pieces.items()
    }


def _state_hash(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and bits: equal only for equal states."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
