"""Checkpoints of a run: complete or absent, with hashes; the newest valid one is loaded.

    checkpoints/step-00000500/tensors.safetensors      weights, averaged weights, optimizer state
    checkpoints/step-00000500/state.json               step, hashes, progress of the training loop

Saving copies the tensors and returns; a thread writes them to a temporary folder, syncs and renames it. A folder named
step-N is therefore complete, and its hashes detect later damage. Tensors are full, gathered from the shards of FSDP,
so that any number of processes reads them. This is storage alone: train/state.py chooses what is saved
(`Training.tensors`) and puts it back (`Training.restore`, `resume`).
"""

import contextlib
import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from plainvit.disk import DiskError, read_json, sync_folder, write_synced
from plainvit.errors import first_line
from plainvit.runtime.distributed import World
from plainvit.runtime.parallel import full_tensor

log = logging.getLogger("plainvit")
TENSORS, STATE = "tensors.safetensors", "state.json"


class Checkpoints:
    """The checkpoints of one run. Keeps the newest `keep` and the best."""

    def __init__(self, folder: Path, keep: int, world: World | None = None) -> None:
        self.folder, self.keep, self.world = folder, keep, world or World()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], best: int | None = None) -> None:
        """Copies the tensors, then writes them in the background. All processes must call this.

        Waits for the previous save and raises its error, if any. The checkpoint of the step `best` is never pruned.
        """
        self.wait()
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            full = full_tensor(tensor.detach())
            if self.world.is_main:
                copies[name] = full.to("cpu", copy=True).contiguous()
        if self.world.is_main:
            arguments = (step, copies, {"step": step, **state}, best)
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

    def close(self) -> None:
        """Waits for the writing thread without raising its error: no file is written after the folder is unlocked."""
        if self._thread:
            self._thread.join()

    def set_aside(self, step: int) -> None:
        """Renames checkpoints newer than `step`, which are damaged, so that they do not count as kept."""
        for newer in self.steps():
            if newer > step:
                target = self.folder / f"damaged-{newer:08d}"
                shutil.rmtree(target, ignore_errors=True)
                (self.folder / f"step-{newer:08d}").rename(target)

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], best: int | None) -> None:
        temporary = self.folder / f".tmp-{step:08d}"
        try:
            self.folder.mkdir(exist_ok=True)
            temporary.mkdir(exist_ok=True)
            write_synced(temporary / TENSORS, lambda path: safetensors.torch.save_file(tensors, path))
            state |= {"files": {TENSORS: hash_file(temporary / TENSORS)}}
            text = json.dumps(state | {"sha256": _hash_state(state)})
            write_synced(temporary / STATE, lambda path: path.write_text(text))
            self._publish(temporary, self.folder / f"step-{step:08d}")
            self._prune(best)
        except Exception as error:  # raised in the main thread by the next save
            shutil.rmtree(temporary, ignore_errors=True)
            message = f"cannot save the checkpoint of step {step} in {self.folder}: {first_line(error)}"
            self._failure = DiskError(message)

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
        matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def read_newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
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
            if state.pop("sha256", "") != _hash_state(state) or state.get("step") != step:
                raise ValueError(f"{STATE} does not match its hash")
            if state.get("files") != {TENSORS: hash_file(folder / TENSORS)}:
                raise ValueError(f"{TENSORS} does not match its hash")
            return safetensors.torch.load_file(folder / TENSORS), state
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


def _hash_state(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Hash of names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
