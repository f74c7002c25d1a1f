"""Damaged and hostile files: a one-line ValueError, no code is run, no file is left behind, memory stays low.

Every fault is written by hand into a valid file. A file may load or raise ValueError; anything else (another exception,
a hang, a marker file, a stray file) is a failure.
"""

import contextlib
import json
import os
import pickle
import signal
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import test_weights_google as google
import tiny
import torch
from children import in_child
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peers import write
from pictures import plant_classes
from test_weights_save import small
from torch import Tensor, nn

import plainvit

SECONDS = 60  # of processor time, after which a test fails instead of hanging
Values = dict[str, Tensor]


class TooSlow(BaseException):
    """Not an Exception: no handler may take it for a fault of the file."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    except TooSlow:
        pytest.fail(f"more than {SECONDS} s for one file")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def load_or_error(path: Path, **hints: Any) -> Any:
    """The model, or the message of a one-line ValueError; anything else is a failure."""
    with in_time():
        try:
            return plainvit.load(path, **hints)
        except ValueError as error:
            text = str(error)
    assert text.strip(), "the message is empty"
    assert len(text.splitlines()) == 1, text
    return text


def expect_error(path: Path, **hints: Any) -> str:
    names = sorted(path.parent.rglob("*"))
    said = load_or_error(path, **hints)
    assert isinstance(said, str), "it loaded"
    assert sorted(path.parent.rglob("*")) == names, "something was left behind"
    return said


# Sound files, small enough that most of their bytes matter ------------------------------------------------------------

HINTS = {"heads": 2}


CLIP = {"norm_embedding": "tokens", "embedding_bias": False, "classes": 0, "projection": 12, "norm_eps": 1e-5}
DINO = {"rotary": "dinov3", "posemb": "none", "registers": 2, "layer_scale": 0.1, "classes": 0, "norm_eps": 1e-5}
EVA = {"rotary": "eva02", "gated": True, "activation": "silu", "norm_inner": "mlp", "block_bias": "no_k"}
TIMM = {"numerics": "timm"}
# kind: the file's name, its format, and the settings of the model
SAVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plainvit": ("m.safetensors", "plainvit", {}),
    "timm": ("m.safetensors", "timm", TIMM),
    "transformers": ("m", "transformers", TIMM),
    "torchvision": ("m.safetensors", "torchvision", TIMM),
    "CLIP": ("m", "transformers", TIMM | CLIP),
    "SigLIP": ("m", "transformers", TIMM | {"pool": "attention", "class_token": False, "classes": 0}),
    "DINOv3": ("m", "transformers", TIMM | DINO | {"block_bias": "no_k"}),
    "open_clip": ("m.safetensors", "open_clip", TIMM | CLIP),
    "EVA-02": ("m.safetensors", "timm", TIMM | EVA),
    "google": ("m.npz", "google", {}),
    "big_vision": ("m.npz", "google", {"pool": "attention", "class_token": False}),
}
ARCHIVES = ("google", "hybrid", "big_vision", "scanned", "BiT")
KINDS = (*SAVED, "timm BiT", "hybrid", "scanned", "BiT")


@cache
def valid_weights(kind: str) -> Values:
    """Weights of each layout under its own names, as plainvit writes them."""
    if kind == "scanned":
        flat = valid_weights("big_vision").items()
        stacked = {name: x[None] if "encoderblock_0" in name else x for name, x in flat}
        return {name.replace("encoderblock_0", "encoderblock"): x for name, x in stacked.items()}
    if kind in ("hybrid", "BiT"):
        is_bit, hybrid = kind == "BiT", {"stem": google.stem_shapes((1,)), "kernel": (1, 1, 256)}
        arrays = google.bit_arrays((1,)) if is_bit else google.original(cells=4, **hybrid)
        return {name: torch.from_numpy(x) for name, x in arrays.items()}
    name, format_, settings = SAVED.get(kind, ("m.safetensors", "timm", {}))
    model = tiny.bit(torch.float32, (1,), "timm") if kind == "timm BiT" else small(**settings)
    with tempfile.TemporaryDirectory() as folder:
        path = plainvit.save(model, Path(folder) / name, format=format_)
        if path.suffix == ".npz":
            with np.load(path) as archive:
                return {key: torch.from_numpy(archive[key]) for key in archive.files}
        return safetensors.torch.load_file(path / "model.safetensors" if path.is_dir() else path)


@cache
def description() -> str:
    """The description that plainvit writes for its small model."""
    with tempfile.TemporaryDirectory() as folder:
        path = plainvit.save(small(), Path(folder) / "m.safetensors")
        with safetensors.safe_open(path, "pt") as file:
            return file.metadata()["plainvit"]


def store(kind: str, values: Mapping[str, Tensor], folder: Path) -> Path:
    """Weights in the container that they come in."""
    if kind in ARCHIVES:
        path = folder / "m.npz"
        np.savez(path, **{name: x.numpy() for name, x in values.items()})
        return path
    path = folder / "m.safetensors"
    metadata = {"plainvit": description()} if kind == "plainvit" else None
    safetensors.torch.save_file({name: x.contiguous() for name, x in values.items()}, path, metadata)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_valid_files_load(tmp_path: Path, kind: str) -> None:
    assert isinstance(load_or_error(store(kind, valid_weights(kind), tmp_path), **HINTS), nn.Module)


# Weights that are wrong -----------------------------------------------------------------------------------------------

# timm's pos_embed="none", big_vision's fixed positions; projections, registers, and in one block the biases of q, k, v
MAY_BE_ABSENT = {"pos_embed", "params/pos_embedding", "visual_projection.weight", "visual.proj"}
MAY_BE_ABSENT |= {"embeddings.register_tokens", "blocks.0.attn.qkv.bias"}


@pytest.mark.parametrize("kind", tiny.mostly_slow(KINDS, 2))
def test_missing_weight_is_an_error(tmp_path: Path, kind: str) -> None:
    for name in valid_weights(kind).keys() - MAY_BE_ABSENT:
        values = {other: x for other, x in valid_weights(kind).items() if other != name}
        expect_error(store(kind, values, tmp_path), **HINTS)


@pytest.mark.parametrize("kind", KINDS)
def test_extra_weight_is_an_error(tmp_path: Path, kind: str) -> None:
    for name in ("evil", "evil\nname", "blocks.0.evil.weight", "head.evil"):
        prefix = {"big_vision": "params/", "scanned": "params/", "open_clip": "visual."}.get(kind, "")
        inside = prefix + name  # outside the prefix it is ignored
        assert "evil" in expect_error(store(kind, valid_weights(kind) | {inside: torch.ones(2)}, tmp_path), **HINTS)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda x: torch.cat((x, x[:1])) if x.ndim else x,
    "wider": lambda x: torch.cat((x, x[..., :1]), -1),
    "flat": lambda x: x.reshape(-1),
    "scalar": lambda x: x.flatten()[0],
    "twice": lambda x: torch.stack((x, x)),
    "swapped": lambda x: x.movedim(0, -1),
    "empty": lambda x: x[:0],
    "hollow": lambda x: x[..., :0],
    "without sides of 1": lambda x: x.squeeze(),
    "with sides of 1": lambda x: x[None, ..., None],
}


def telling_names(kind: str) -> list[str]:
    """Every weight of a ViT; where the same code has been tried under other names, one of each shape and leaf."""
    if kind not in ("hybrid", "BiT", "timm BiT", "scanned", "plainvit"):
        return list(valid_weights(kind))
    kinds = {
        (x.ndim, name.replace(".", "/").rsplit("/", 1)[-1], "head" in name): name
        for name, x in valid_weights(kind).items()
    }
    roots = [name for name in valid_weights(kind) if "root" in name or "stem" in name or "embedding" in name]
    return [*kinds.values(), *roots]


def has_same_sizes(one: Any, other: Any) -> bool:
    """False: another kernel is a model of another patch size, or of another projection."""
    return all(getattr(one.config, size, 0) == getattr(other.config, size, 0) for size in ("patch", "projection"))


@pytest.mark.parametrize("change", SHAPES)
@pytest.mark.parametrize("kind", tiny.mostly_slow(KINDS, 10))
def test_wrong_shape_is_an_error(tmp_path: Path, kind: str, change: str) -> None:
    """The same numbers with other sides of 1 may load, and must then be the same model."""
    right = plainvit.load(store(kind, valid_weights(kind), tmp_path), **HINTS)
    for name in telling_names(kind):
        x = valid_weights(kind)[name]
        wrong = SHAPES[change](x)
        if wrong.shape == x.shape:
            continue
        loaded = load_or_error(store(kind, valid_weights(kind) | {name: wrong}, tmp_path), **HINTS)
        if isinstance(loaded, str) or not has_same_sizes(loaded, right):
            continue
        assert [side for side in wrong.shape if side != 1] == [side for side in x.shape if side != 1], name
        assert all(torch.equal(loaded.state_dict()[ours], y) for ours, y in right.state_dict().items()), name


def some_names(kind: str) -> list[str]:
    names = list(valid_weights(kind))
    return [names[0], names[len(names) // 2], names[-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_values_are_errors(tmp_path: Path, kind: str) -> None:
    for name, value in zip(some_names(kind), (float("nan"), float("inf"), -float("inf")), strict=True):
        broken = valid_weights(kind)[name].clone()
        broken.view(-1)[-1] = value
        assert "finite" in expect_error(store(kind, valid_weights(kind) | {name: broken}, tmp_path), **HINTS)


NO_FLOATS = (torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", NO_FLOATS)
def test_dtypes_that_are_no_floats_are_errors(tmp_path: Path, dtype: torch.dtype) -> None:
    for name in some_names("timm"):
        wrong = valid_weights("timm")[name].to(dtype)
        assert "dtype" in expect_error(store("timm", valid_weights("timm") | {name: wrong}, tmp_path), **HINTS)


@pytest.mark.parametrize("dtype", ["i8", "i1", "?", "longdouble", "U4", "S4", "datetime64[s]", "c16", "V3", "u2,u1"])
def test_numpy_dtypes_are_errors(tmp_path: Path, dtype: str) -> None:
    arrays = {name: x.numpy() for name, x in valid_weights("google").items()}
    for name in ("cls", "head/bias", "embedding/kernel"):
        np.savez(tmp_path / "m.npz", **arrays | {name: np.zeros(arrays[name].shape, dtype)})
        expect_error(tmp_path / "m.npz")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_too_large_for_the_dtype_are_errors(tmp_path: Path, dtype: torch.dtype) -> None:
    """Finite in the file, infinite in the model."""
    values = {name: x.double() for name, x in valid_weights("timm").items()}
    values["norm.weight"][0] = 1e300
    path = store("timm", values, tmp_path)
    assert isinstance(load_or_error(path, dtype=None, **HINTS), nn.Module)
    assert "norm.weight" in expect_error(path, dtype=dtype, **HINTS)


def test_parts_of_several_dtypes_keep_every_value(tmp_path: Path) -> None:
    """Queries, keys and values are one matrix of ours, which must hold the largest of them."""
    start = "vit.encoder.layer.0.attention.attention."
    query, key, value = (valid_weights("transformers")[f"{start}{part}.weight"] for part in ("query", "key", "value"))
    mixed = {f"{start}query.weight": query.half(), f"{start}key.weight": key * 1e30}
    path = store("transformers", valid_weights("transformers") | mixed, tmp_path)
    loaded = plainvit.load(path, dtype=None, **HINTS).blocks[0].attention.qkv.weight
    assert torch.equal(loaded, torch.cat((query.half().float(), key * 1e30, value)))
    assert "key.weight" in expect_error(path, dtype=torch.float16, **HINTS)


def test_two_names_for_one_weight_are_an_error(tmp_path: Path) -> None:
    """Prefixes and numbers that are taken off must not make one weight hide another."""
    timm = valid_weights("timm") | {"module.norm.bias": torch.ones(16)}
    expect_error(store("timm", timm, tmp_path), **HINTS)
    kernel = "resnet/root_block/standardized_conv2d/kernel"
    bit = valid_weights("BiT") | {kernel.replace("conv2d/", "conv2d_7/"): valid_weights("BiT")[kernel] + 1}
    expect_error(store("BiT", bit, tmp_path))


@pytest.mark.parametrize("prefix", ["{evil}/", "{i}/", "}{/"])
def test_braces_in_a_prefix_are_plain_text(tmp_path: Path, prefix: str) -> None:
    values = {name.replace("params/", prefix): x for name, x in valid_weights("big_vision").items()}
    assert isinstance(load_or_error(store("big_vision", values, tmp_path)), nn.Module)


# Numbers in names that cost time --------------------------------------------------------------------------------------

MANY = 99_999_999
NUMBERED = {
    "timm": f"blocks.{MANY}.norm1.weight",
    "timm BiT": f"stages.0.blocks.{MANY}.norm1.weight",
    "transformers": f"vit.encoder.layer.{MANY}.layernorm_before.weight",
    "torchvision": f"encoder.layers.encoder_layer_{MANY}.ln_1.weight",
    "google": f"Transformer/encoderblock_{MANY}/LayerNorm_0/scale",
    "hybrid": f"block1/unit{MANY}/gn1/scale",
    "big_vision": f"params/Transformer/encoderblock_{MANY}/LayerNorm_0/scale",
    "BiT": f"resnet/block1/unit{MANY}/a/group_norm/gamma",
}


@pytest.mark.parametrize("digits", [str(MANY), "9" * 5000], ids=["8 digits", "5000 digits"])
@pytest.mark.parametrize("kind", NUMBERED)
def test_block_with_a_huge_number_is_an_error(tmp_path: Path, kind: str, digits: str) -> None:
    name = NUMBERED[kind].replace(str(MANY), digits)
    expect_error(store(kind, valid_weights(kind) | {name: torch.ones(16)}, tmp_path), **HINTS)


def test_billion_empty_layers_are_an_error(tmp_path: Path) -> None:
    """big_vision stacks layers on a leading axis; an array of 10^9 x 0 takes no room in the file."""
    arrays = {name: x.numpy() for name, x in valid_weights("scanned").items()}
    arrays["params/Transformer/encoderblock/evil"] = np.empty((10**9, 0), np.float32)
    np.savez(tmp_path / "m.npz", **arrays)
    expect_error(tmp_path / "m.npz")


def test_more_tokens_than_memory_can_hold_are_an_error(tmp_path: Path) -> None:
    """Rotary angles are in no file, and the index of BEiT's biases grows with the square of the tokens."""
    folder = plainvit.save(small(**TIMM | DINO), tmp_path / "DINOv3", format="transformers")
    write(valid_weights("DINOv3"), folder / "model.safetensors")  # without plainvit's own description
    config = json.loads((folder / "config.json").read_text())
    for size in (160_000, 8 * 10**9):
        (folder / "config.json").write_text(json.dumps(config | {"image_size": size}))
        assert "tokens" in expect_error(folder)
    beit = {"posemb": "bias", "pool": "average", "norm_pooled": True, "layer_scale": 0.1, "block_bias": "no_k"}
    path = plainvit.save(small(**TIMM | beit), tmp_path / "m.pth", format="timm")
    table = {"blocks.0.attn.relative_position_bias_table": torch.zeros(201 * 201 + 3, 2)}
    write(torch.load(path, weights_only=True) | table, tmp_path / "beit.pth")
    assert "tokens" in expect_error(tmp_path / "beit.pth")


# Pickles --------------------------------------------------------------------------------------------------------------


class Payload:
    """What a pickle does when it is trusted."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def zipped(value: object, path: Path) -> Path:
    torch.save(value, path)
    return path


def legacy(value: object, path: Path) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


def pickled(value: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, protocol=0 if path.suffix == ".npz" else None))


PLACES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda evil: evil,
    "next to weights": lambda evil: {"model": valid_weights("timm"), "args": evil},
    "inside": lambda evil: valid_weights("timm") | {"evil": evil},
    "as a name": lambda evil: {"model": valid_weights("timm"), (evil,): 1},
}


@pytest.mark.parametrize("file", ["evil.pth", "evil.safetensors", "evil.npz", "pytorch_model.bin"])
@pytest.mark.parametrize("place", PLACES)
def test_pickle_with_code_is_not_run(tmp_path: Path, place: str, file: str) -> None:
    """Neither from the file, nor from its folder."""
    marker, folder = tmp_path / "marker", tmp_path / "folder"
    folder.mkdir()
    for write_evil in (zipped, legacy, pickled):
        write_evil(PLACES[place](Payload(marker)), folder / file)
        expect_error(folder / file, **HINTS)
        expect_error(folder, **HINTS)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists(), "the payload must work where a pickle is trusted"


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("structured", [False, True])
def test_object_arrays_are_not_unpickled(tmp_path: Path, compressed: bool, structured: bool) -> None:
    marker, path = tmp_path / "marker", tmp_path / "evil.npz"
    array = np.empty(3, dtype=[("a", "f4"), ("b", "O")] if structured else object)
    (array["b"] if structured else array)[:] = Payload(marker)
    arrays = {name: x.numpy() for name, x in valid_weights("google").items()} | {"head/bias": array}
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    assert "objects" in expect_error(path)
    assert not marker.exists()


def looped() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["model"] = loop
    return loop


NOT_A_STATE: dict[str, Callable[[], object]] = {
    "a word": lambda: "hello",
    "nothing": lambda: None,
    "a list of tensors": lambda: [torch.ones(3)],
    "empty dictionaries": lambda: {"model": {"state_dict": {}}},
    "a dictionary of words": lambda: {"model": "hello", "line\nfeed": "there"},
    "tensors too deep": lambda: {"a": {"b": {"c": torch.ones(3)}}},
    "itself": looped,
    "numbers for names": lambda: {1: torch.ones(3), 2: torch.ones(3)},
    "no known names": lambda: {"line\n\nfeed\r": torch.ones(3)},
    "a whole module": lambda: nn.Linear(2, 2),
    "a sparse tensor": lambda: valid_weights("timm") | {"norm.bias": torch.ones(16).to_sparse()},
    "a tensor on the meta device": lambda: valid_weights("timm") | {"norm.bias": torch.empty(16, device="meta")},
    "a stretched tensor": lambda: valid_weights("timm") | {"norm.bias": torch.ones(1).expand(10**12)},
}


@pytest.mark.parametrize("write", [zipped, legacy])
@pytest.mark.parametrize("name", NOT_A_STATE)
def test_pytorch_file_without_a_state_dict_is_an_error(
    tmp_path: Path, name: str, write: Callable[[object, Path], None]
) -> None:
    path = tmp_path / "m.pth"
    write(NOT_A_STATE[name](), path)
    expect_error(path, **HINTS)


SPELT_777 = b"M\x09\x03"  # 777 in a pickle


def overstated(path: Path) -> Path:
    """A PyTorch file of before 1.6 whose storage claims 2^31 numbers and has 777."""
    legacy({"norm.bias": torch.zeros(777)}, path)
    data = path.read_bytes()
    assert SPELT_777 in data
    path.write_bytes(data.replace(SPELT_777, b"J\xff\xff\xff\x7f"))
    return path


def test_storage_larger_than_the_file_is_an_error(tmp_path: Path) -> None:
    expect_error(overstated(tmp_path / "m.pth"), **HINTS)


# NumPy archives -------------------------------------------------------------------------------------------------------


def member(shape: object, data: bytes, descr: object = "<f4", fortran: object = False) -> bytes:
    """One .npy as it lies in the archive, with a header of our own."""
    text = repr({"descr": descr, "fortran_order": fortran, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n" + data


def archive(path: Path, replaced: Mapping[str, bytes], how: int = zipfile.ZIP_STORED) -> Path:
    """The sound archive with some members replaced byte for byte."""
    np.savez(path, **{name: x.numpy() for name, x in valid_weights("google").items()})
    with zipfile.ZipFile(path) as old:
        members = {name.removesuffix(".npy"): old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", how) as new:
        for name, data in (members | replaced).items():
            new.writestr(f"{name}.npy", data)
    return path


BIAS = bytes(12)  # head/bias: three floats

# NumPy's own reader finds other faults
HEADERS: dict[str, bytes] = {
    "claims more": member((4,), BIAS),
    "claims less": member((2,), BIAS),
    "claims 10^12 of no size": member((10**12, 0), b""),
    "claims more than a word can count": member((2**40, 2**40), BIAS),
    "no header": b"\x93NUMPY\x01\x00",
    "a header of 4 GB": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b" " * 100,
    "a header with code": b"\x93NUMPY\x01\x00" + struct.pack("<H", 24) + b"__import__('os').getpid()",
    "nothing": b"",
}


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize("name", HEADERS)
def test_false_npy_header_is_an_error(tmp_path: Path, name: str, how: int) -> None:
    expect_error(archive(tmp_path / "m.npz", {"head/bias": HEADERS[name]}, how))


def bomb(path: Path, size: int = 600 * 2**20) -> Path:
    """One honest member of `size` zeros, packed a thousandfold, written in pieces."""
    piece, count = bytes(2**20), size // 4
    if path.suffix == ".npz":
        others, name, start = {}, "embedding/kernel.npy", member((count,), b"")
    else:
        torch.save({"norm.bias": torch.zeros(777)}, path)
        with zipfile.ZipFile(path) as plain:
            others = {name: plain.read(name) for name in plain.namelist()}
        name, start = next(name for name in others if name.endswith("data/0")), b""
        others = {key: data.replace(SPELT_777, b"J" + struct.pack("<I", count)) for key, data in others.items()}
        del others[name]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for key, data in others.items():
            packed.writestr(key, data)
        with packed.open(name, "w", force_zip64=True) as stream:
            stream.write(start)
            for _ in range(size // 2**20):
                stream.write(piece)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".pth"])
def test_zip_bomb_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = bomb(tmp_path / f"m{suffix}")
    assert path.stat().st_size < 2**23
    assert "unpack" in expect_error(path)


def test_names_outside_the_folder_write_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    expect_error(archive(folder / "m.npz", {"../../evil": member((3,), BIAS)}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]


# safetensors ----------------------------------------------------------------------------------------------------------


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def assemble(path: Path, header: dict[str, Any] | bytes, body: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def lie(header: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return header | {"norm.bias": header["norm.bias"] | changes}


def doubled(header: dict[str, Any]) -> bytes:
    """One name twice, as JSON allows and no table can hold."""
    other = json.dumps(header["norm.bias"] | {"data_offsets": header["norm.weight"]["data_offsets"]})
    return (json.dumps(header)[:-1] + f', "norm.bias": {other}' + "}").encode()


SAFETENSORS: dict[str, Callable[[dict[str, Any], bytes], tuple[Any, ...]]] = {
    "offsets past the end": lambda h, b: (lie(h, data_offsets=[len(b), len(b) + 64]), b),
    "offsets of 10^12": lambda h, b: (lie(h, data_offsets=[0, 10**12], shape=[10**12 // 4]), b),
    "offsets of another": lambda h, b: (lie(h, data_offsets=[0, 64]), b),
    "a shape too large": lambda h, b: (lie(h, shape=[17]), b),
    "a shape past counting": lambda h, b: (lie(h, shape=[2**62, 2**62]), b),
    "one name twice": lambda h, b: (doubled(h), b),
    "a hole in the data": lambda h, b: (h, b + bytes(64)),
    "no data": lambda h, _: (h, b""),
    "a header of 100 MB": lambda h, b: (h, b, 100 * 2**20),
    "a header that is no JSON": lambda _, b: (b"{not JSON", b),
    "a header of brackets": lambda _, b: (b'{"a":' + b"[" * 100_000, b),
    "metadata that are no words": lambda h, b: (h | {"__metadata__": {"plainvit": 1}}, b),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_false_safetensors_header_is_an_error(tmp_path: Path, name: str) -> None:
    header, body = parts(store("timm", valid_weights("timm"), tmp_path))
    expect_error(assemble(tmp_path / "m.safetensors", *SAFETENSORS[name](header, body)), **HINTS)


# Cut short ------------------------------------------------------------------------------------------------------------


def save_archive(write_arrays: Callable[..., None], path: Path) -> Path:
    write_arrays(path, **{name: x.numpy() for name, x in valid_weights("google").items()})
    return path


# A sound file of each container
CONTAINERS: dict[str, Callable[[Path], Path]] = {
    "safetensors": lambda folder: store("timm", valid_weights("timm"), folder),
    "plainvit": lambda folder: store("plainvit", valid_weights("plainvit"), folder),
    "npz": lambda folder: save_archive(np.savez, folder / "m.npz"),
    "packed npz": lambda folder: save_archive(np.savez_compressed, folder / "m.npz"),
    "pth": lambda folder: zipped({"model": valid_weights("timm")}, folder / "m"),
    "legacy pth": lambda folder: legacy({"model": valid_weights("timm")}, folder / "m"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_truncated_file_is_an_error(tmp_path: Path, kind: str) -> None:
    path = CONTAINERS[kind](tmp_path)
    data = path.read_bytes()
    step = max(len(data) // 60, 1)
    for length in sorted({*range(0, len(data), step), *range(12), len(data) - 1, len(data) - 2, len(data) - 50}):
        path.write_bytes(data[:length])
        expect_error(path, **HINTS)


# Not weights at all ---------------------------------------------------------------------------------------------------

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 346284714\n"


NOT_WEIGHTS = {
    "empty": b"",
    "text": b"hello\nthere\n",
    "HTML": b"<!DOCTYPE html>\n<html><body>404</body></html>\n",
    "a Git LFS pointer": LFS,
    "JSON that looks like safetensors": b"        {\n}\n",
    "zeros": bytes(1000),
    "gzip": b"\x1f\x8b\x08" + bytes(50),
    "PK and no zip": b"PK\x03\x04" + bytes(50),
    "an empty zip": b"PK\x05\x06" + bytes(18),
    "a pickle's first byte": b"\x80",
}


@pytest.mark.parametrize("name", NOT_WEIGHTS)
def test_file_without_weights_is_an_error(tmp_path: Path, name: str) -> None:
    data = NOT_WEIGHTS[name]
    for suffix in ("", ".npz", ".pth", ".safetensors"):
        path = tmp_path / f"m{suffix}"
        path.write_bytes(data)
        assert ("git lfs pull" in expect_error(path)) == (data == LFS)


# Folders --------------------------------------------------------------------------------------------------------------


def test_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no weights" in expect_error(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "no weights" in expect_error(tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").mkdir()
    expect_error(tmp_path / "empty")


def test_a_folder_of_images_is_not_a_model(tmp_path: Path) -> None:
    plant_classes(tmp_path / "photos", {"ant": 1, "bee": 1})
    assert "plainvit predict MODEL" in expect_error(tmp_path / "photos")


SHARDS: tuple[Any, ...] = ("../m.safetensors", "/etc/passwd", "..", ".", "missing", "", "evil\nname", "a\0b", 1, ["m"])
MAPS: tuple[Any, ...] = (*({"a": shard} for shard in SHARDS), {"a": 1, "b": "c", "d": None}, ["m.safetensors"], {})
INDEXES = [*(json.dumps({"weight_map": names}) for names in MAPS), "{}", "weights"]


@pytest.mark.parametrize("index", INDEXES)
def test_invalid_index_is_an_error(tmp_path: Path, index: str) -> None:
    store("timm", valid_weights("timm"), tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(index)
    expect_error(folder, **HINTS)


def shards(folder: Path, suffix: str) -> list[Path]:
    """A sound model in two shards with an index."""
    names = sorted(valid_weights("timm"))
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    halves = {f"{stem}-0000{number}-of-00002.{suffix}": names[number - 1 :: 2] for number in (1, 2)}
    for file, part in halves.items():
        write({name: valid_weights("timm")[name] for name in part}, folder / file)
    index = {name: file for file, part in halves.items() for name in part}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
    return [folder / file for file in halves]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_damaged_shard_is_an_error(tmp_path: Path, suffix: str) -> None:
    """Each shard cut short anywhere, empty, without its weights, with code, or missing."""
    paths, marker = shards(tmp_path, suffix), tmp_path / "marker"
    loaded = load_or_error(tmp_path, **HINTS)
    assert torch.equal(loaded.norm.bias, valid_weights("timm")["norm.bias"])
    path, data = paths[1], paths[1].read_bytes()
    for length in (0, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        expect_error(tmp_path, **HINTS)
    write({"other": torch.ones(2)}, path)
    assert "download them again" in expect_error(tmp_path, **HINTS)
    torch.save({"norm.bias": Payload(marker)}, path)
    expect_error(tmp_path, **HINTS)
    path.unlink()
    assert path.name in expect_error(tmp_path, **HINTS)
    assert not marker.exists()


REMOVED = object()


def change(whole: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Sets or removes a field by its dotted path."""
    *outer, last = path.split(".")
    inner = whole
    for key in outer:
        inner = inner[key]
    inner.pop(last, None) if value is REMOVED else inner.update({last: value})
    return whole


BRACES = '{"a":' * 100_000
TEXTS: list[str | bytes] = ["not JSON", "", "[1, 2]", "null", "[" * 100_000, BRACES]
TEXTS += ['{"hidden_size": ' + "9" * 10_000 + "}", '{"a": "' + "b" * (17 * 2**20) + '"}', b'{"hidden_act": "\xff\xfe"}']
NAN, INFINITE = float("nan"), float("inf")


@cache
def sound_folders() -> dict[str, dict[str, bytes]]:
    """{format: {file: content}} of a sound folder of each library."""
    folders: dict[str, dict[str, bytes]] = {}
    with tempfile.TemporaryDirectory() as name:
        for format_ in ("transformers", "timm"):
            folder = plainvit.save(small(numerics="timm"), Path(name) / format_, format=format_)
            write(valid_weights(format_), folder / "model.safetensors")  # without plainvit's own description
            folders[format_] = {path.name: path.read_bytes() for path in folder.iterdir()}
        weights = store("open_clip", valid_weights("open_clip"), Path(name)).read_bytes()
        described = store("plainvit", valid_weights("plainvit"), Path(name)).read_bytes()
    config = {"model_cfg": {"vision_cfg": {"head_width": 8, "image_size": 16}}, "preprocess_cfg": {}}
    folders["open_clip"] = {"m.safetensors": weights, "open_clip_config.json": json.dumps(config).encode()}
    folders["plainvit"] = {"model.safetensors": described, "plainvit": description().encode()}
    return folders


def write_folder(format_: str, folder: Path, file: str, text: str | bytes) -> Path:
    """The sound folder with another text in one file; our own description is inside the weights."""
    folder.mkdir(exist_ok=True)
    data = text if isinstance(text, bytes) else text.encode()
    if format_ == "plainvit":
        safetensors.torch.save_file(valid_weights("plainvit"), folder / "m.safetensors", {"plainvit": data.decode()})
        return folder
    for name, content in (sound_folders()[format_] | {file: data}).items():
        (folder / name).write_bytes(content)
    return folder


CONFIGS = [("transformers", "config.json"), ("transformers", "preprocessor_config.json")]
CONFIGS += [("timm", "config.json"), ("open_clip", "open_clip_config.json"), ("plainvit", "plainvit")]


@pytest.mark.parametrize(("format_", "file"), [CONFIGS[0], CONFIGS[1], CONFIGS[4]])
def test_config_that_is_no_json_object_is_an_error(tmp_path: Path, format_: str, file: str) -> None:
    for text in TEXTS:
        if not (format_ == "plainvit" and isinstance(text, bytes)):
            expect_error(write_folder(format_, tmp_path / "folder", file, text))


# A hybrid whose stem would take hours to build
HUGE_STEM = {"kind": "vit", "width": 16, "depth": 1, "heads": 2, "mlp_dim": 8, "patch": [8, 8], "image_size": [32, 32]}
HUGE_STEM |= {"stem": {"kind": "resnet", "blocks": [10**8], "preactivation": False}}
# Values that a field of a library's file cannot have
NONSENSE: dict[tuple[str, str, str], tuple[Any, ...]] = {
    (*CONFIGS[0], "num_attention_heads"): (0, -2, 3, "x", [2], {}, 1.5, 10**30),
    (*CONFIGS[0], "image_size"): ("big", 0, -16, [16], [16, 16, 16], {}, 3.5, [[16], 16]),
    (*CONFIGS[0], "hidden_act"): ("mish", "", 3, None, ["gelu"], {}),
    (*CONFIGS[0], "layer_norm_eps"): ("tiny", None, [], -1, INFINITE, NAN),
    (*CONFIGS[1], "image_mean"): ("abc", 3, [1, 2], ["a", "b", "c"], [[]] * 3, [None, 0.5, 0.5], [NAN, 0.5, 0.5]),
    (*CONFIGS[1], "image_std"): ([0, 0, 0], [-1, 1, 1], "abc", {"a": 1}),
    (*CONFIGS[2], "pretrained_cfg"): ("abc", [1], 3),
    (*CONFIGS[2], "model_args"): ("abc", [1], 3),
    (*CONFIGS[2], "model_args.act_layer"): ("swish", "", 3, ["gelu"], {}),
    (*CONFIGS[2], "pretrained_cfg.mean"): ("abc", 3, [0.5, 0.5], [None] * 3, [NAN] * 3),
    (*CONFIGS[2], "pretrained_cfg.std"): ("abc", 3, [0, 0, 0], {"a": 1}),
    (*CONFIGS[2], "pretrained_cfg.crop_pct"): ("abc", [1], 3, -1, NAN),
    (*CONFIGS[2], "pretrained_cfg.interpolation"): ("sharp", 3, ["bicubic"]),
    (*CONFIGS[2], "pretrained_cfg.label_names"): (3, 1.5),
    (*CONFIGS[3], "model_cfg"): (REMOVED, 3, "abc", []),
    (*CONFIGS[3], "model_cfg.vision_cfg"): (REMOVED, 3, None),
    (*CONFIGS[3], "model_cfg.vision_cfg.head_width"): (0, -8, "x", [8], 1.5, 5),
    (*CONFIGS[3], "model_cfg.vision_cfg.image_size"): ("big", -16, [16], [16, 16, 16], 32),
    (*CONFIGS[3], "model_cfg.vision_cfg.pool_type"): ("avg", 3),
    (*CONFIGS[3], "preprocess_cfg"): (3, "abc"),
    (*CONFIGS[3], "preprocess_cfg.mean"): ("abc", 3, [0.5, 0.5], [None] * 3, [NAN] * 3),
    (*CONFIGS[3], "preprocess_cfg.interpolation"): ("sharp", 3),
    (*CONFIGS[4], "schema"): (REMOVED, "one", INFINITE, None, 10**6),
    (*CONFIGS[4], "format"): (REMOVED, "pickle", ["plainvit"], "timm"),
    (*CONFIGS[4], "about"): (REMOVED, []),
    (*CONFIGS[4], "about.preprocess.evil"): (1,),
    (*CONFIGS[4], "about.class_names"): (3,),
    (*CONFIGS[4], "config"): (REMOVED, [], HUGE_STEM),
    (*CONFIGS[4], "config.kind"): (REMOVED, "cnn", [], "resnet"),
    (*CONFIGS[4], "config.width"): ("wide", 10**12, 7 * 10**12),
    (*CONFIGS[4], "config.depth"): (10**8,),
    (*CONFIGS[4], "config.classes"): (10**15,),
    (*CONFIGS[4], "config.registers"): (10**15,),
    (*CONFIGS[4], "config.image_size"): ([8 * 10**9, 8 * 10**9],),
    (*CONFIGS[4], "config.patch"): ([0, 0],),
    (*CONFIGS[4], "config.stem"): ([1], {"kind": "vit"}),
    (*CONFIGS[4], "config.representation"): (4,),  # whose layer is not there
}


@pytest.mark.parametrize(("format_", "file", "field"), NONSENSE)
def test_invalid_config_is_an_error(tmp_path: Path, format_: str, file: str, field: str) -> None:
    text = sound_folders()[format_][file].decode()
    hints = HINTS if format_ == "timm" else {}
    assert isinstance(load_or_error(write_folder(format_, tmp_path / "folder", file, text), **hints), nn.Module)
    for value in NONSENSE[format_, file, field]:
        changed = json.dumps(change(json.loads(text), field, value))
        expect_error(write_folder(format_, tmp_path / "folder", file, changed), **hints)


# plainvit's own description -------------------------------------------------------------------------------------------


def test_stems_in_stems_are_an_error(tmp_path: Path) -> None:
    for depth in (900, 100_000):  # deeper than Python itself would write
        nested = '"stem": ' + '{"kind": "vit", "stem": ' * depth + "null" + "}" * depth
        expect_error(write_folder("plainvit", tmp_path, "", description().replace('"stem": null', nested)))


@pytest.mark.parametrize(
    ("format_", "setting"),
    [("timm", {"representation": 4}), ("torchvision", {"registers": 2}), ("transformers", {"layer_scale": 1.0})],
)
def test_description_that_its_format_does_not_support_is_an_error(
    tmp_path: Path, format_: str, setting: dict[str, Any]
) -> None:
    whole = json.loads(description())
    whole["format"], whole["config"] = format_, whole["config"] | setting
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(valid_weights(format_), path, {"plainvit": json.dumps(whole)})
    expect_error(path)


# Chance ---------------------------------------------------------------------------------------------------------------

FUZZ = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])


@cache
def bytes_of(kind: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return CONTAINERS[kind](Path(folder)).read_bytes()


def try_bytes(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "m"
        path.write_bytes(data)
        load_or_error(path, **HINTS)
        assert [p.name for p in Path(name).iterdir()] == ["m"]


@pytest.mark.parametrize("kind", CONTAINERS)
@FUZZ
@given(data=st.data())
def test_damaged_bytes_load_or_are_an_error(kind: str, data: st.DataObject) -> None:
    """A piece taken out and another put in its place, or a few bits flipped, half of them at the ends of the file."""
    whole = bytearray(bytes_of(kind))
    last = len(whole) - 1
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, last))
        end = data.draw(st.integers(start, min(last + 1, start + 300)))
        try_bytes(bytes(whole[:start] + data.draw(st.binary(max_size=40)) + whole[end:]))
        return
    ends = st.integers(0, min(1500, last)) | st.integers(max(0, last - 1500), last)
    places = st.tuples(ends | st.integers(0, last), st.integers(0, 7))
    for at, bit in data.draw(st.lists(places, min_size=1, max_size=4)):
        whole[at] ^= 1 << bit
    try_bytes(bytes(whole))


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("config", CONFIGS)
@FUZZ
@given(data=st.data())
def test_any_value_in_a_config_loads_or_is_an_error(config: tuple[str, str], data: st.DataObject) -> None:
    whole = inner = json.loads(sound_folders()[config[0]][config[1]])
    if data.draw(st.booleans()) and (nested := sorted(k for k, v in whole.items() if isinstance(v, dict) and v)):
        inner = whole[data.draw(st.sampled_from(nested))]
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(ANY_JSON)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_or_error(write_folder(config[0], Path(folder), config[1], json.dumps(whole)), **HINTS)
    if isinstance(loaded, nn.Module):  # what is taken for sound must run
        with torch.inference_mode():
            loaded(tiny.images(size=loaded.config.image_size, channels=loaded.config.channels, dtype=torch.float32))


# Memory ---------------------------------------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys
import plainvit, torch
from servers import read_memory, reset_peak_memory

torch.set_num_threads(1)
LIMIT = 16 * 2**30  # a runaway ends in an error, not in the machine's memory
resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))

def measure(path):
    before = reset_peak_memory()
    try:
        plainvit.load(path, heads=2)
        said = "loaded"
    except ValueError:
        said = "ValueError"
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
    return {"bytes": read_memory("VmHWM") - before, "said": said}

measure(sys.argv[1])
print(json.dumps({path: measure(path) for path in sys.argv[2:]}))
"""


def measure(*paths: Path) -> dict[str, Any]:
    """{path: what it cost to load}, in a process of its own that has loaded a sound file before."""
    return json.loads(in_child(MEASURE, *map(str, paths)))


def liars(folder: Path) -> Iterator[Path]:
    """Files of a few kB to MB that claim gigabytes."""
    yield archive(folder / "header.npz", {"embedding/kernel": member((8, 8, 3, 10**9), BIAS)})
    yield bomb(folder / "bomb.npz")
    yield bomb(folder / "bomb.pth")
    stretched = {"patch_embed.proj.weight": torch.ones(1).expand(10**7, 3, 8, 8)}
    torch.save(valid_weights("timm") | stretched, folder / "stretched.pth")
    yield folder / "stretched.pth"
    yield overstated(folder / "overstated.pth")
    header, body = parts(store("timm", valid_weights("timm"), folder))
    shape = [10**8, 3, 8, 8]
    lied = header | {"patch_embed.proj.weight": header["patch_embed.proj.weight"] | {"shape": shape}}
    yield assemble(folder / "header.safetensors", lied, body)
    yield assemble(folder / "length.safetensors", header, body, 99 * 2**20)
    # fixed positions are in no file: a grid of 20,000 x 20,000 would be 48 GB of sines
    fixed = {"posemb": "sincos2d", "class_token": False, "pool": "average", "image_size": [160_000, 160_000]}
    whole = json.loads(description())
    whole["config"] |= fixed
    gone = ("class_token", "positions.")
    values = {name: x for name, x in valid_weights("plainvit").items() if not name.startswith(gone)}
    safetensors.torch.save_file(values, folder / "sines.safetensors", {"plainvit": json.dumps(whole)})
    yield folder / "sines.safetensors"


@pytest.mark.slow
def test_hostile_file_takes_at_most_twice_its_size(tmp_path: Path) -> None:
    paths = list(liars(tmp_path))
    costs = measure(store("timm", valid_weights("timm"), tmp_path), *paths)
    for path in paths:
        cost = costs[str(path)]
        assert cost["said"] == "ValueError", (path.name, cost)
        assert cost["bytes"] < 2 * path.stat().st_size + 64 * 2**20, (path.name, cost)


# The largest model ----------------------------------------------------------------------------------------------------

LARGE = """
import sys, plainvit, torch
model = plainvit.create("ViT-H/14", numerics="timm", seed=0)
torch.nn.init.normal_(model.head.weight, std=0.02)
plainvit.save(model, sys.argv[1], format=sys.argv[2], drop=("activation",) if sys.argv[2] == "google" else ())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plainvit.safetensors", "timm.safetensors", "timm.pth", "google.npz"])
def test_largest_model_is_not_in_memory_twice(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Peak resident memory of a fresh process that loads H/14, beyond what it had before; the median of three.

    Mapped pages of the file count: they are memory that the process keeps from others.
    """
    sound_file = store("timm", valid_weights("timm"), tmp_path)
    with tempfile.TemporaryDirectory() as folder:  # 2.5 GB, removed at once, not kept as pytest keeps its folders
        path = Path(folder) / name
        in_child(LARGE, str(path), path.stem)
        runs = sorted((measure(sound_file, path)[str(path)] for _ in range(3)), key=lambda cost: cost["bytes"])
        size, cost = path.stat().st_size, runs[1]
    with capsys.disabled():
        print(f"\nH/14 {name}: {size / 2**20:.0f} MiB, peak beyond the baseline {cost['bytes'] / size:.2f} x the file")
    assert cost["said"] == "loaded"
    assert cost["bytes"] < 1.35 * size
