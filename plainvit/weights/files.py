"""Reads named tensors from files, one at a time and only after checking the header.

A file's kind is detected from its first bytes, not from its suffix. Nothing in a file is executed: NumPy archives are
read without pickle, PyTorch files through `weights_only=True`. A header that claims more bytes than the file has is an
error.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import mimetypes
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plainvit.disk import read_json
from plainvit.errors import first_line

SAFE_INDEX, TORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"  # of shards
SAFE_NAMES = ("model.safetensors", "open_clip_model.safetensors")
TORCH_NAMES = ("pytorch_model.bin", "open_clip_pytorch_model.bin", "model.pth")
# Keys under which training scripts save a state dict; averaged weights first, since these are evaluated
WRAPPERS = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model", "student")
MAX_WRAPPERS = 4
UNPACK_MARGIN = 256 * 2**20  # an archive may unpack to twice its size plus this many bytes
CHECKSUM = "plainvit_sha256"  # metadata entry of the safetensors files that plainvit writes
# safetensors' names of dtypes; the ones that are no floats are rejected later, with the name of the weight
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
DTYPES |= {"U8": torch.uint8, "BOOL": torch.bool}


class DamagedError(ValueError):
    """A file is damaged; the command ends with exit code 3."""

    exit_code = 3


class UnsafePickleError(ValueError):
    """A PyTorch file holds Python objects, which are never loaded."""


class Tensors:
    """Named tensors of a file: shapes are known at once, values are read on request."""

    wrapper: str | None = None  # the key of a PyTorch file that the weights are under, "" if none; None: another kind

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.metadata: dict[str, str] = {}

    def read(self, name: str) -> Tensor:
        raise NotImplementedError

    def pop(self, name: str) -> Tensor:
        """Returns a tensor and forgets it, so that the caller may own its memory."""
        return self.read(name)

    def check(self) -> None:
        """Compares the content with the checksum in the file, if it has one."""


class Location(NamedTuple):
    """The bytes of a tensor in a safetensors file."""

    path: Path
    dtype: str
    start: int
    end: int


class SafetensorsFiles(Tensors):
    """One safetensors file, or the shards of one model."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths[0])
        self._locations: dict[str, Location] = {}
        for path in paths:
            try:
                opened = safe_open(path, framework="pt")
                self.metadata |= opened.metadata() or {}
                for name, location in _locate_tensors(path).items():
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                    self._locations[name] = location
            except (SafetensorError, OSError, ValueError, OverflowError) as error:
                raise DamagedError(f"{path} is damaged ({error}): download or copy it again") from error

    def read(self, name: str) -> Tensor:
        """Reads with file I/O instead of safetensors' mmap, which would keep a second copy in memory."""
        path, dtype_name, start, end = self._locations[name]
        if dtype_name not in DTYPES:
            raise ValueError(f"{name!r} has dtype {dtype_name}: weights must be floats")
        data = bytearray(end - start)
        with path.open("rb") as file:
            file.seek(start)
            if file.readinto(data) != len(data):
                raise ValueError(f"{path} became shorter while it was read")
        dtype, shape = DTYPES[dtype_name], self.shapes[name]
        return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)

    def check(self) -> None:
        stored = self.metadata.get(CHECKSUM)
        if stored is None:
            return
        names, locations = list(self._locations), list(self._locations.values())
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:  # hashing releases the GIL
            digests = pool.map(lambda location: hash_range(location.path, location.start, location.end), locations)
        entries = {
            name: (location.dtype, self.shapes[name], digest)
            for name, location, digest in zip(names, locations, digests, strict=True)
        }
        if hash_content(self.metadata, entries) != stored:
            raise DamagedError(
                f"{self.path} is damaged: its content does not match its checksum. Copy it "
                "again; for the weights of a run, repeat its `plainvit train` command. If you edited the file on "
                f"purpose, save it without the metadata entry {CHECKSUM!r}"
            )


def hash_content(metadata: Mapping[str, str], entries: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """SHA-256 of the metadata and of {name: (dtype, shape, SHA-256 of the bytes)}.

    It does not depend on the order of entries, so a file rewritten by another tool without a change stays valid.
    """
    hashed = {key: value for key, value in metadata.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps([hashed, entries], sort_keys=True).encode()).hexdigest()


def hash_range(path: Path, start: int, end: int) -> str:
    """SHA-256 of bytes start to end of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for at in range(start, end, 2**22):
            digest.update(file.read(min(2**22, end - at)))
    return digest.hexdigest()


def _locate_tensors(path: Path) -> dict[str, Location]:
    """{name: where it is} in a safetensors file, whose header safe_open has checked before."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    locations: dict[str, Location] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]  # counted from the end of the header
        locations[name] = Location(path, entry["dtype"], 8 + length + start, 8 + length + end)
    return locations


class NpzFile(Tensors):
    """A NumPy archive whose members are read one by one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._members: dict[str, zipfile.ZipInfo] = {}
        with _report_damage(path, "NumPy archive"), zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(".npy"):
                    self._add(archive, member)
        self._last: tuple[str, np.ndarray] | None = None

    def _add(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
        with archive.open(member) as stream:
            version = npy.read_magic(stream)
            header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = header(stream)
            start = stream.tell()
        name = member.filename.removesuffix(".npy")
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which are never loaded")
        if math.prod(shape) * dtype.itemsize != member.file_size - start:
            raise ValueError(f"the header of {name} claims shape {shape}, but it has {member.file_size - start} bytes")
        self.shapes[name], self._members[name] = shape, member

    def read(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            with (
                _report_damage(self.path, "NumPy archive"),
                zipfile.ZipFile(self.path) as archive,
                archive.open(self._members[name]) as stream,
            ):
                self._last = name, npy.read_array(stream, allow_pickle=False)
        return self._to_tensor(self._last[1])

    def pop(self, name: str) -> Tensor:
        tensor, self._last = self.read(name), None
        return tensor

    @staticmethod
    def _to_tensor(array: np.ndarray) -> Tensor:
        if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # bfloat16, which NumPy does not know
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
            raise ValueError(f"dtype {array.dtype} is not supported: weights must be floats")
        return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)))


class TorchFiles(Tensors):
    """One PyTorch file with a state dict, possibly nested in a training checkpoint, or the shards of one model."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths[0])
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            self.wrapper, tensors = _read_state_dict(path)
            self._tensors |= tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def pop(self, name: str) -> Tensor:
        return self._tensors.pop(name)


class RenamedTensors(Tensors):
    """A file under other names: {new: (old, None)}, or (old, layer) if old stacks all layers."""

    def __init__(self, tensors: Tensors, names: Mapping[str, tuple[str, int | None]]) -> None:
        super().__init__(tensors.path)
        self._tensors, self._names, self.metadata = tensors, names, tensors.metadata
        self.wrapper = tensors.wrapper
        self.shapes = {
            new: tensors.shapes[old] if layer is None else tensors.shapes[old][1:]
            for new, (old, layer) in names.items()
        }

    def read(self, name: str) -> Tensor:
        old, layer = self._names[name]
        tensor = self._tensors.read(old)
        return tensor if layer is None else tensor[layer]

    def pop(self, name: str) -> Tensor:
        old, layer = self._names[name]
        return self._tensors.pop(old) if layer is None else self._tensors.read(old)[layer].clone()

    def check(self) -> None:
        self._tensors.check()


def _read_state_dict(path: Path) -> tuple[str, dict[str, Tensor]]:
    """(wrapper, dense tensors) of a PyTorch file."""
    with _report_damage(path, "PyTorch file"):
        loaded = _load_torch(path)
    wrapper, state = _unwrap(loaded)
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        entries = ", ".join(repr(key) for key in list(state)[:5]) or f"a {type(loaded).__name__}"
        raise ValueError(f"{path} has no state dict: it holds {entries}")
    for tensor in tensors.values():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise ValueError(f"{path} has sparse, quantized or meta tensors: save it with dense ones")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > 2 * path.stat().st_size:
        raise ValueError(f"{path} claims {size:,} bytes of weights, more than the file has: do not trust it")
    return wrapper, tensors


def _unwrap(loaded: object) -> tuple[str, Mapping[Any, Any]]:
    """(key, state dict) of a training checkpoint; the key is "" if the state dict is not inside another."""
    key, state = "", loaded if isinstance(loaded, Mapping) else {}
    for _ in range(MAX_WRAPPERS):
        keys = [wrapper for wrapper in WRAPPERS if isinstance(state.get(wrapper), Mapping)]
        if not keys:
            break
        key, state = keys[0], state[keys[0]]
    return key, state


def _load_torch(path: Path) -> object:
    """Loads tensors and plain containers, and argparse.Namespace, in which training scripts store their flags."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            if type(error).__name__ != "UnpicklingError":
                raise
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            if not named:
                raise ValueError("it is damaged, or has more than tensors") from error
            load = f"torch.load({str(path)!r}, weights_only=False)['state_dict']"
            raise UnsafePickleError(
                f"{path} has {named[1]} objects, which plainvit never loads. If you trust the file, save its weights "
                f"alone, which runs its code: torch.save({load}, 'weights.pth')"
            ) from error


@contextlib.contextmanager
def _report_damage(path: Path, kind: str) -> Iterator[None]:
    """Turns any exception of a reader into a DamagedError of one line."""
    try:
        yield
    except UnsafePickleError:
        raise
    except Exception as error:  # hostile bytes raise anything: struct, zip, Unicode, recursion, memory errors
        raise DamagedError(f"{path} is not a valid {kind}: {first_line(error)}") from error


def open_file(path: Path) -> Tensors:
    """Opens a weights file of any kind."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` or download the file")
    if start.startswith(b"PK"):
        with _report_damage(path, "archive"), zipfile.ZipFile(path) as archive:
            names, total = archive.namelist(), sum(member.file_size for member in archive.infolist())
            if total > 2 * path.stat().st_size + UNPACK_MARGIN:
                raise ValueError(f"it would unpack to {total:,} bytes, far more than its size")
        return NpzFile(path) if any(name.endswith(".npy") for name in names) else TorchFiles([path])
    if len(start) > 8 and start[8:9] == b"{":
        return SafetensorsFiles([path])
    if start[:1] == b"\x80":  # a pickle: PyTorch's format before 1.6
        return TorchFiles([path])
    if not start:
        raise ValueError(f"{path} is empty")
    raise ValueError(f"{path} is neither safetensors nor .npz nor a PyTorch file: it starts with {start[:12]!r}")


def open_folder(folder: Path, *, safe_only: bool = False) -> Tensors:
    """Opens a folder as on the hub: one file, or shards with an index. `safe_only` accepts safetensors alone.

    A folder with both is read from the file, as transformers does: it leaves the index of older shards behind.
    """
    if (folder / SAFE_INDEX).is_file() and not (folder / "model.safetensors").is_file():
        return _open_shards(folder / SAFE_INDEX)
    known = [folder / name for name in (SAFE_NAMES if safe_only else SAFE_NAMES + TORCH_NAMES)]
    candidates = [path for path in known if path.is_file()][:1]
    candidates = candidates or [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    if len(candidates) > 1:
        names = ", ".join(path.name for path in candidates[:3])
        raise ValueError(
            f"{folder} has {len(candidates)} weights files ({names}): rename the one to load to {SAFE_NAMES[0]}"
        )
    if candidates:
        return open_file(candidates[0])
    if (folder / TORCH_INDEX).is_file() and not safe_only:
        return _open_shards(folder / TORCH_INDEX)
    _check_checkpoints(folder)
    first_files = itertools.islice(folder.glob("**/*"), 1000)  # of a folder that may be a whole disk
    if any((mimetypes.guess_type(path.name)[0] or "").startswith("image/") for path in first_files):
        raise ValueError(
            f"{folder} has images and no weights: give the model first, as in `plainvit predict MODEL {folder}`, "
            f"or a folder with {SAFE_NAMES[0]}"
        )
    raise ValueError(f"{folder} has no weights: expected {', '.join(path.name for path in known)} or *.safetensors")


def _check_checkpoints(folder: Path) -> None:
    """An error that names the newest if a folder has checkpoints of transformers' Trainer or Lightning."""
    numbered = [path for path in folder.glob("checkpoint-*") if path.is_dir() and path.name[11:].isdecimal()]
    numbered.sort(key=lambda path: -int(path.name[11:]))
    checkpoints = [*numbered, *sorted(folder.glob("*.ckpt")), *sorted(folder.glob("checkpoints/*.ckpt"))]
    if checkpoints:
        newest = ", ".join(str(path.relative_to(folder)) for path in checkpoints[:3])
        more = f" and {len(checkpoints) - 3} more" if len(checkpoints) > 3 else ""
        raise ValueError(f"{folder} has checkpoints of a training run ({newest}{more}): use {checkpoints[0]}")


def _open_shards(index: Path) -> Tensors:
    """Opens the shards that an index lists, which must have every weight that it lists."""
    files = read_json(index).get("weight_map")
    files = files if isinstance(files, dict) else {}
    shards = list(files.values())
    if not shards or any(not isinstance(name, str) or Path(name).name != name for name in shards):
        raise ValueError(f"{index} is not a list of shards")
    for name in shards:
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent} lacks the shard {name!r}")
    paths = [index.parent / name for name in sorted(set(shards))]
    tensors = SafetensorsFiles(paths) if index.name == SAFE_INDEX else TorchFiles(paths)
    for name in files:
        if name not in tensors.shapes:
            raise DamagedError(f"the shards of {index} lack {name!r}, which it lists: download them again")
    return tensors
