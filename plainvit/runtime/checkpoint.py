"""The state of a run on disk: whole or absent, hashed, the newest valid one taken.

    checkpoints/step-00000500/tensors.safetensors      weights, averaged weights, optimiser
    checkpoints/step-00000500/state.json               step, hash of the tensors, what the loop must remember

Saving copies the tensors and returns; a thread writes them beside, syncs them and renames the folder. A folder with
a name is therefore complete, and the hash tells whether it still is.
"""

import contextlib
import hashlib
import json
import logging
import os
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

from plainvit.disk import DiskError, read_json, sync_folder

log = logging.getLogger("plainvit")
TENSORS, STATE = "tensors.safetensors", "state.json"


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the best."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], best: int | None = None) -> None:
        """Copies now, writes in the background; waits only for the save before it. An earlier failure is raised.

        `best` is a step whose checkpoint is kept although it is old.
        """
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        state = {"step": step, **state}
        self._thread = threading.Thread(target=self._write, args=(step, copies, state, best), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until what was saved is on disk."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failure:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], best: int | None) -> None:
        beside = self.folder / f".tmp-{step:08d}"
        try:
            self.folder.mkdir(exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            safetensors.torch.save_file(tensors, beside / TENSORS)
            state["tensors"] = file_hash(beside / TENSORS)
            (beside / STATE).write_text(json.dumps(state | {"sha256": _state_hash(state)}, indent=1))
            for name in (TENSORS, STATE):
                with (beside / name).open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(beside)
            target = self.folder / f"step-{step:08d}"
            shutil.rmtree(target, ignore_errors=True)  # a damaged one of the same step
            beside.rename(target)
            sync_folder(self.folder)
            self._prune(best)
        except Exception as error:  # raised in the main thread, by the next save
            shutil.rmtree(beside, ignore_errors=True)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._failure = DiskError(f"cannot save the checkpoint of step {step} in {self.folder}: {reason}")

    def _prune(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self.folder / f"step-{step:08d}", ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        names = (path.name for path in self.folder.iterdir())
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{8,})", name)))

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and state of the newest valid checkpoint; damaged ones are told of and passed over."""
        self._sweep()
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except ValueError as error:
                log.warning("%s: passed over", error)
        return None

    def read(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One checkpoint, checked against its hash."""
        folder = self.folder / f"step-{step:08d}"
        state = read_json(folder / STATE)
        try:
            sound = state.pop("sha256", "") == _state_hash(state) and state["tensors"] == file_hash(folder / TENSORS)
            if not sound or state["step"] != step:
                raise ValueError(f"the checkpoint {folder} is damaged: its hash is not that of its contents")
            return safetensors.torch.load_file(folder / TENSORS), state
        except (OSError, SafetensorError) as error:
            raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error

    def _sweep(self) -> None:
        """What a killed process left half-written."""
        with contextlib.suppress(OSError):
            for left in self.folder.glob(".tmp-*"):
                shutil.rmtree(left, ignore_errors=True)


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
