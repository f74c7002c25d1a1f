"""Google's archives, written here by hand and computed here in NumPy float64, compared with `plainvit.load`.

The reference reads Google's own keys: einsums over heads as flax has them, kernels height x width x in x out. Only the
sums of a convolution come from reference.py. What plainvit loads must agree to 1e-12 of the output's scale; what it
writes back must have the same keys and the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch

import plainvit

EXACT = 1e-12
D, H, M, DEPTH, P, CLASSES = 48, 4, 96, 2, 8, 7
Array = np.ndarray
Arrays = dict[str, Array]
Shapes = dict[str, tuple[int, ...]]


# Writing the archives -------------------------------------------------------------------------------------------------


def draw(shapes: Shapes, seed: int = 0) -> Arrays:
    """Random arrays of the scale that a trained layer has; fp32, as Google's files are."""
    generator, arrays = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        part, leaf = f"/{name}".split("/")[-2:]
        noise = generator.standard_normal(shape)
        match leaf:
            case "kernel":
                fan_in = shape[0] if part in ("query", "key", "value") else np.prod(shape[:-1])
                arrays[name] = 1.5 * fan_in**-0.5 * noise
            case "bias" | "beta":
                arrays[name] = 0.3 * noise
            case "scale" | "gamma":
                arrays[name] = 1 + 0.3 * noise
            case _:  # tokens and positions
                arrays[name] = 0.5 * noise
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def norm_shapes(name: str, shape: tuple[int, ...] = (D,)) -> Shapes:
    return {f"{name}/scale": shape, f"{name}/bias": shape}


def layer_shapes(name: str, *kernel: int) -> Shapes:
    return {f"{name}/kernel": kernel, f"{name}/bias": kernel[-1:]}


def attention_shapes(name: str) -> Shapes:
    shapes = layer_shapes(f"{name}/out", H, D // H, D)
    for part in ("query", "key", "value"):
        shapes |= {f"{name}/{part}/kernel": (D, H, D // H), f"{name}/{part}/bias": (H, D // H)}
    return shapes


OLD, NEW = (1, 3, 2), (0, 0, 1)  # module numbers of vit_jax's files and of big_vision


def encoder_shapes(numbers: tuple[int, int, int]) -> Shapes:
    shapes = norm_shapes("Transformer/encoder_norm")
    for number in range(DEPTH):
        name = f"Transformer/encoderblock_{number}"
        shapes |= norm_shapes(f"{name}/LayerNorm_0") | attention_shapes(
            f"{name}/MultiHeadDotProductAttention_{numbers[0]}"
        )
        shapes |= norm_shapes(f"{name}/LayerNorm_{numbers[2]}")
        shapes |= layer_shapes(f"{name}/MlpBlock_{numbers[1]}/Dense_0", D, M)
        shapes |= layer_shapes(f"{name}/MlpBlock_{numbers[1]}/Dense_1", M, D)
    return shapes


def original(
    hidden: int = 0, cells: int = 16, stem: Shapes | None = None, kernel: tuple[int, int, int] = (P, P, 3)
) -> Arrays:
    """vit_jax: original, AugReg and SAM are alike but for pre_logits; a hybrid also has its ResNet."""
    shapes = layer_shapes("embedding", *kernel, D) | {"cls": (1, 1, D)} | encoder_shapes(OLD)
    shapes["Transformer/posembed_input/pos_embedding"] = (1, cells + 1, D)
    shapes |= layer_shapes("pre_logits", D, hidden) if hidden else {}
    return draw(shapes | layer_shapes("head", hidden or D, CLASSES) | (stem or {}))


def units(blocks: tuple[int, ...]) -> Iterator[tuple[int, int, int, int, int]]:
    """(stage, unit, channels before, inside and after) of every bottleneck; stages and units count from 1."""
    before = 64
    for stage, count in enumerate(blocks, 1):
        after = 128 * 2**stage
        for unit in range(1, count + 1):
            yield stage, unit, before, after // 4, after
            before = after


def stem_shapes(blocks: tuple[int, ...], old: bool = False) -> Shapes:
    """A hybrid's ResNet; old files keep GroupNorm's vectors as (1, 1, 1, c)."""
    lead = (1, 1, 1) if old else ()
    shapes = {"conv_root/kernel": (7, 7, 3, 64), **norm_shapes("gn_root", (*lead, 64))}
    for stage, unit, before, inner, after in units(blocks):
        name = f"block{stage}/unit{unit}"
        sizes = {"1": (1, 1, before, inner), "2": (3, 3, inner, inner), "3": (1, 1, inner, after)}
        sizes |= {"_proj": (1, 1, before, after)} if unit == 1 else {}
        for number, size in sizes.items():
            shapes |= {f"{name}/conv{number}/kernel": size, **norm_shapes(f"{name}/gn{number}", (*lead, size[3]))}
    return shapes


def big_vision(pool: str = "gap", hidden: int = 0, cells: int | None = 16, head: bool = True) -> Arrays:
    """Without a prefix: that is put on when the file is written. cells=None has fixed sin-cos positions."""
    shapes = layer_shapes("embedding", P, P, 3, D) | encoder_shapes(NEW)
    if cells:
        shapes["pos_embedding"] = (1, cells, D)
    if pool == "tok":
        shapes["cls"] = (1, 1, D)
    if pool == "map":
        shapes |= {"MAPHead_0/probe": (1, 1, D), **norm_shapes("MAPHead_0/LayerNorm_0")}
        shapes |= attention_shapes("MAPHead_0/MultiHeadDotProductAttention_0")
        shapes |= layer_shapes("MAPHead_0/MlpBlock_0/Dense_0", D, M) | layer_shapes(
            "MAPHead_0/MlpBlock_0/Dense_1", M, D
        )
    shapes |= layer_shapes("pre_logits", D, hidden) if hidden else {}
    return draw(shapes | (layer_shapes("head", hidden or D, CLASSES) if head else {}), seed=2)


def bit_arrays(blocks: tuple[int, ...], conv: str = "standardized_conv2d") -> Arrays:
    shapes = {f"resnet/root_block/{conv}/kernel": (7, 7, 3, 64)}
    for stage, unit, before, inner, after in units(blocks):
        name = f"resnet/block{stage}/unit{unit:02d}"
        sizes = {"a": (1, 1, before, inner), "b": (3, 3, inner, inner), "c": (1, 1, inner, after)}
        for letter, size in sizes.items():
            shapes |= {f"{name}/{letter}/{conv}/kernel": size, **bit_norm(f"{name}/{letter}/group_norm", size[2])}
        shapes |= {f"{name}/a/proj/{conv}/kernel": (1, 1, before, after)} if unit == 1 else {}
    last = 128 * 2 ** len(blocks)
    return draw(shapes | bit_norm("resnet/group_norm", last) | layer_shapes("resnet/head/conv2d", 1, 1, last, CLASSES))


def bit_norm(name: str, width: int) -> Shapes:
    return {f"{name}/gamma": (width,), f"{name}/beta": (width,)}


def prefixed(arrays: Arrays, prefix: str) -> Arrays:
    return {prefix + name: x for name, x in arrays.items()}


def stacked(arrays: Arrays) -> Arrays:
    """big_vision's scanned layers: one array with a leading axis for all blocks."""
    first = "Transformer/encoderblock_0/"
    out = {name: x for name, x in arrays.items() if "/encoderblock_" not in name}
    for name in arrays:
        if name.startswith(first):
            layers = [arrays[name.replace("encoderblock_0", f"encoderblock_{i}")] for i in range(DEPTH)]
            out[name.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    return out


def to_bf16(x: Array) -> Array:
    """As big_vision's files hold bfloat16: two raw bytes, the upper half of a float32."""
    return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16).view("V2")


def from_bf16(x: Array) -> Array:
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def save(arrays: Arrays, path: Path, write: Callable[..., None] = np.savez) -> Path:
    write(path, **arrays)
    return path


# The reference --------------------------------------------------------------------------------------------------------


def dense(x: Array, w: Mapping[str, Array], name: str) -> Array:
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def layer_norm(x: Array, w: Mapping[str, Array], name: str) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}/scale"] + w[f"{name}/bias"]


def attend(queries: Array, x: Array, w: Mapping[str, Array], name: str) -> Array:
    """flax: one einsum into the heads, one out of them."""
    q, k, v = (
        np.einsum("bnd,dhe->bnhe", source, w[f"{name}/{part}/kernel"]) + w[f"{name}/{part}/bias"]
        for part, source in (("query", queries), ("key", x), ("value", x))
    )
    weights = reference.softmax(np.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(D / H))
    mixed = np.einsum("bhqk,bkhe->bqhe", weights, v)
    return np.einsum("bqhe,hed->bqd", mixed, w[f"{name}/out/kernel"]) + w[f"{name}/out/bias"]


def mlp(x: Array, w: Mapping[str, Array], name: str) -> Array:
    return dense(reference.gelu_tanh(dense(x, w, f"{name}/Dense_0")), w, f"{name}/Dense_1")


def encode(x: Array, w: Mapping[str, Array], numbers: tuple[int, int, int]) -> Array:
    attention, hidden, norm2 = numbers
    for layer in range(DEPTH):
        at = f"Transformer/encoderblock_{layer}"
        y = layer_norm(x, w, f"{at}/LayerNorm_0")
        x = x + attend(y, y, w, f"{at}/MultiHeadDotProductAttention_{attention}")
        x = x + mlp(layer_norm(x, w, f"{at}/LayerNorm_{norm2}"), w, f"{at}/MlpBlock_{hidden}")
    return layer_norm(x, w, "Transformer/encoder_norm")


def embed(pixels: Array, w: Mapping[str, Array]) -> Array:
    """A convolution whose stride is its kernel: tokens in raster order."""
    kernel = w["embedding/kernel"]
    B, p = len(pixels), kernel.shape[0]
    seen = reference.convolve(pixels, kernel.transpose(3, 2, 0, 1), p, ((0, 0), (0, 0)))
    return seen.reshape(B, D, -1).transpose(0, 2, 1) + w["embedding/bias"]


def with_class(x: Array, w: Mapping[str, Array]) -> Array:
    return np.concatenate((np.broadcast_to(w["cls"], (len(x), 1, D)), x), 1)


def logits(x: Array, w: Mapping[str, Array]) -> Array:
    x = np.tanh(dense(x, w, "pre_logits")) if "pre_logits/kernel" in w else x
    return dense(x, w, "head") if "head/kernel" in w else x


def run_original(pixels: Array, w: Mapping[str, Array]) -> Array:
    """vit_jax: positions over all tokens, the class token read out."""
    x = with_class(embed(pixels, w), w) + w["Transformer/posembed_input/pos_embedding"]
    return logits(encode(x, w, OLD)[:, 0], w)


def run_big_vision(pixels: Array, w: Mapping[str, Array]) -> Array:
    """big_vision: positions on the patches before the class token joins; gap, tok or map."""
    grid = [side // P for side in pixels.shape[2:]]
    positions = w["pos_embedding"] if "pos_embedding" in w else reference.sincos2d(*grid, D)
    x = embed(pixels, w) + positions
    x = encode(with_class(x, w) if "cls" in w else x, w, NEW)
    if "cls" in w:
        return logits(x[:, 0], w)
    if "MAPHead_0/probe" not in w:
        return logits(x.mean(1), w)
    probe = np.broadcast_to(w["MAPHead_0/probe"], (len(x), 1, D))
    x = attend(probe, x, w, "MAPHead_0/MultiHeadDotProductAttention_0")
    return logits((x + mlp(layer_norm(x, w, "MAPHead_0/LayerNorm_0"), w, "MAPHead_0/MlpBlock_0"))[:, 0], w)


def group_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    weights = {"gn.weight": scale.reshape(-1), "gn.bias": bias.reshape(-1)}
    return reference.group_norm(x, weights, "gn", eps)


def run_stem(x: Array, w: Mapping[str, Array], blocks: tuple[int, ...]) -> Array:
    """Google's hybrid: v1 units, SAME padding, w / (std + 1e-5), GroupNorm 1e-6."""

    def conv(x: Array, name: str, stride: int = 1) -> Array:
        kernel = reference.standardize_hybrid(w[f"{name}/kernel"].transpose(3, 2, 0, 1))
        return reference.convolve(x, kernel, stride, reference.same_pads(x, kernel.shape[-1], stride))

    def norm(x: Array, name: str) -> Array:
        return group_norm(x, w[f"{name}/scale"], w[f"{name}/bias"], 1e-6)

    x = reference.relu(norm(conv(x, "conv_root", 2), "gn_root"))
    x = reference.max_pool(x, reference.same_pads(x, 3, 2), -np.inf)
    for stage, unit, *_ in units(blocks):
        at, stride = f"block{stage}/unit{unit}", 2 if stage > 1 and unit == 1 else 1
        shortcut = norm(conv(x, f"{at}/conv_proj", stride), f"{at}/gn_proj") if unit == 1 else x
        y = reference.relu(norm(conv(x, f"{at}/conv1"), f"{at}/gn1"))
        y = reference.relu(norm(conv(y, f"{at}/conv2", stride), f"{at}/gn2"))
        x = reference.relu(shortcut + norm(conv(y, f"{at}/conv3"), f"{at}/gn3"))
    return x


def run_bit(x: Array, w: Mapping[str, Array], blocks: tuple[int, ...], conv_name: str) -> Array:
    """big_transfer: v2 units, symmetric padding, w / sqrt(var + 1e-10), zeros around the root's pooling."""

    def conv(x: Array, name: str, stride: int = 1) -> Array:
        kernel = reference.standardize_bit(w[f"{name}/{conv_name}/kernel"].transpose(3, 2, 0, 1))
        return reference.convolve(x, kernel, stride, reference.symmetric_pads(x, kernel.shape[-1], stride))

    def norm(x: Array, name: str) -> Array:
        return reference.relu(group_norm(x, w[f"{name}/gamma"], w[f"{name}/beta"], 1e-5))

    x = reference.max_pool(conv(x, "resnet/root_block", 2), ((1, 1), (1, 1)), 0.0)
    for stage, unit, *_ in units(blocks):
        at, stride = f"resnet/block{stage}/unit{unit:02d}", 2 if stage > 1 and unit == 1 else 1
        y = norm(x, f"{at}/a/group_norm")
        shortcut = conv(y, f"{at}/a/proj", stride) if unit == 1 else x
        y = norm(conv(y, f"{at}/a"), f"{at}/b/group_norm")
        y = norm(conv(y, f"{at}/b", stride), f"{at}/c/group_norm")
        x = shortcut + conv(y, f"{at}/c")
    x = norm(x, "resnet/group_norm").mean((2, 3))
    return x @ w["resnet/head/conv2d/kernel"][0, 0] + w["resnet/head/conv2d/bias"]


def wide(arrays: Arrays) -> Arrays:
    return {name: (from_bf16(x) if x.dtype.kind == "V" else x).astype(np.float64) for name, x in arrays.items()}


def gap(path: Path, expected: Callable[[Array], Array], size: tuple[int, int] = (32, 32), **hints: Any) -> float:
    """Difference of plainvit's logits from the reference's, relative to the reference's scale."""
    model = plainvit.load(path, dtype=torch.float64, **hints)
    images = tiny.images(size=size)
    theirs = expected(images.numpy() * 2 - 1)  # Google: (x - 127.5) / 127.5
    with torch.inference_mode():
        return tiny.difference(model(images), torch.from_numpy(theirs)) / np.abs(theirs).max()


# The original layout --------------------------------------------------------------------------------------------------


# how arrays are stored, and the width of the hidden layer
STORED: dict[str, tuple[Callable[..., None], Callable[[Array], Array], int]] = {
    "as they are": (np.savez, lambda x: x, 0),
    "compressed": (np.savez_compressed, lambda x: x, D),
    "Fortran order": (np.savez, np.asfortranarray, 20),
    "Fortran order, compressed": (np.savez_compressed, np.asfortranarray, 0),
    "big-endian": (np.savez_compressed, lambda x: x.astype(">f4"), 20),
    "fp16": (np.savez, lambda x: x.astype(np.float16), D),
    "float64": (np.savez_compressed, lambda x: x.astype(np.float64), 0),
    "bf16 as raw bytes": (np.savez, to_bf16, 0),
    "bf16 as raw bytes, compressed": (np.savez_compressed, to_bf16, D),
}


@pytest.mark.parametrize(("write", "store", "hidden"), STORED.values(), ids=STORED)
def test_original_and_augreg(
    tmp_path: Path, write: Callable[..., None], store: Callable[[Array], Array], hidden: int
) -> None:
    """Whatever the suffix of the file, and however its arrays are stored."""
    arrays = {name: store(x) for name, x in original(hidden).items()}
    path = save(arrays, tmp_path / "a.npz", write).rename(tmp_path / "weights.safetensors")
    assert gap(path, lambda x: run_original(x, wide(arrays))) < EXACT
    prepared = plainvit.load(path).about.preprocess
    assert (prepared.resize, prepared.interpolation, prepared.antialias) == ("squash", "bilinear", False)


@pytest.mark.parametrize("hints", [{"grid": (3, 5)}, {"image_size": (24, 40)}])
def test_table_that_is_no_square_needs_a_hint(tmp_path: Path, hints: dict[str, Any]) -> None:
    arrays = original(cells=15)
    path = save(arrays, tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"16 positions.*grid=.*image_size="):
        plainvit.load(path)
    assert gap(path, lambda x: run_original(x, wide(arrays)), (24, 40), **hints) < EXACT


# Hybrids --------------------------------------------------------------------------------------------------------------


# blocks, patch, image size, and whether GroupNorm's vectors are (1, 1, 1, c)
HYBRIDS: dict[str, tuple[tuple[int, ...], int, tuple[int, int], bool]] = {
    "two stages": ((1, 2), 1, (32, 32), False),
    "two stages, old": ((1, 2), 1, (32, 32), True),
    "three stages": ((2, 1, 1), 1, (80, 48), False),
    "patches of two cells": ((1,), 2, (24, 40), False),
    "stem only, patches of one cell": ((), 1, (20, 36), False),
    "stem only: 32 pixels per token, despite the name R+Ti/16": ((), 8, (64, 64), False),
    "maps of odd sides, whose SAME padding is uneven": ((1, 1), 1, (24, 40), False),
}


@pytest.mark.parametrize(("blocks", "patch", "size", "old"), HYBRIDS.values(), ids=HYBRIDS)
def test_hybrid(tmp_path: Path, blocks: tuple[int, ...], patch: int, size: tuple[int, int], old: bool) -> None:
    stride = patch * 4 * 2 ** max(len(blocks) - 1, 0)
    grid = (size[0] // stride, size[1] // stride)
    kernel = (patch, patch, 128 * 2 ** len(blocks) if blocks else 64)
    arrays = original(cells=grid[0] * grid[1], stem=stem_shapes(blocks, old), kernel=kernel)
    path, w = save(arrays, tmp_path / "h.npz"), wide(arrays)
    assert gap(path, lambda x: run_original(run_stem(x, w, blocks), w), size, grid=grid) < EXACT
    if grid[0] == grid[1]:
        assert plainvit.load(path).config.image_size == size


# big_vision -----------------------------------------------------------------------------------------------------------

BIG_VISION: dict[str, tuple[dict[str, Any], str]] = {
    "gap": ({}, "params/"),
    "tok": ({"pool": "tok"}, "opt/target/"),
    "map": ({"pool": "map"}, "params/img/"),
    "gap, hidden layer": ({"hidden": 20}, "opt/target/"),
    "map, no head": ({"pool": "map", "head": False}, "params/img/"),
}


@pytest.mark.parametrize("scanned", [False, True], ids=["", "scanned"])
@pytest.mark.parametrize(("settings", "prefix"), BIG_VISION.values(), ids=BIG_VISION)
def test_big_vision(tmp_path: Path, settings: dict[str, Any], prefix: str, scanned: bool) -> None:
    arrays = big_vision(**settings)
    path = save(prefixed(stacked(arrays) if scanned else arrays, prefix), tmp_path / "b.npz")
    assert gap(path, lambda x: run_big_vision(x, wide(arrays))) < EXACT


def list_other_arrays(prefix: str, arrays: Arrays) -> Iterator[tuple[str, Array]]:
    """What a training run's file holds beyond the image tower: moments of the optimizer, counters, a text tower."""
    one = np.ones(1, np.float32)
    for name, x in arrays.items():
        yield f"opt/0/mu/{prefix.removeprefix('params/')}{name}", x
    yield "opt/0/count", np.array(7)
    yield "chrono/steps", np.array(7)
    if prefix == "params/img/":
        yield from (("params/t", one), ("params/b", one))
        yield "params/txt/Embed_0/embedding", np.ones((30, D), np.float32)
        yield "params/txt/pos_embedding", np.ones((1, 9, D), np.float32)
        for name in encoder_shapes(NEW):
            yield f"params/txt/Encoder_0/{name}", one


@pytest.mark.parametrize("scanned", [False, True], ids=["", "scanned"])
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("prefix", ["params/", "params/img/"])
def test_weights_outside_the_image_tower_are_ignored(tmp_path: Path, prefix: str, first: bool, scanned: bool) -> None:
    arrays = big_vision("map")
    kept = stacked(arrays) if scanned else arrays
    ours, other = prefixed(kept, prefix), dict(list_other_arrays(prefix, kept))
    path = save(other | ours if first else ours | other, tmp_path / "b.npz")
    assert gap(path, lambda x: run_big_vision(x, wide(arrays))) < EXACT


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_fixed_positions(tmp_path: Path, size: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    """No table in the file: sin-cos, on whatever grid the caller's image size has; without it the size is assumed."""
    arrays = big_vision(cells=None)
    path = save(prefixed(arrays, "params/"), tmp_path / "b.npz")
    assert gap(path, lambda x: run_big_vision(x, wide(arrays)), size, image_size=size) < EXACT
    assert plainvit.load(path).config.image_size == (224, 224)
    assert "image_size: assumed" in caplog.text


# BiT ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "conv", "size"),
    [
        ((2, 1), "standardized_conv2d", (32, 32)),
        ((2, 1, 1), "standardized_conv2d_7", (33, 47)),
        ((2, 1, 1), "standardized_conv2d", (50, 31)),
        ((2, 1, 1), "standardized_conv2d", (7, 9)),
        ((11,), "standardized_conv2d", (16, 16)),  # zero-padded numbers: unit02 comes before unit10
    ],
)
def test_bit(tmp_path: Path, blocks: tuple[int, ...], conv: str, size: tuple[int, int]) -> None:
    arrays = bit_arrays(blocks, conv)
    path = save(arrays, tmp_path / "bit.npz")
    assert gap(path, lambda x: run_bit(x, wide(arrays), blocks, conv), size) < EXACT


# There and back -------------------------------------------------------------------------------------------------------

ROUND: dict[str, tuple[Callable[[], Arrays], dict[str, Any]]] = {
    "original": (original, {}),
    "original, pre_logits": (lambda: original(D), {}),
    "original, fp16": (lambda: {name: x.astype(np.float16) for name, x in original().items()}, {}),
    "original, float64": (lambda: {name: x.astype(np.float64) for name, x in original().items()}, {}),
    "original, rectangle": (lambda: original(cells=15), {"grid": (3, 5)}),
    "hybrid, old": (lambda: original(stem=stem_shapes((1, 2), old=True), kernel=(1, 1, 512)), {}),
    "stem only": (lambda: original(cells=4, stem=stem_shapes(()), kernel=(8, 8, 64)), {}),
    "big_vision, gap": (lambda: prefixed(big_vision(), "params/"), {}),
    "big_vision, tok": (lambda: prefixed(big_vision("tok"), "params/"), {}),
    "big_vision, map": (lambda: prefixed(big_vision("map"), "params/"), {}),
    "big_vision, bf16": (lambda: {f"params/{name}": to_bf16(x) for name, x in big_vision("map").items()}, {}),
    "big_vision, bf16, stacked": (
        lambda: {f"params/{name}": to_bf16(x) for name, x in stacked(big_vision("map")).items()},
        {},
    ),
    "big_vision, fixed positions": (lambda: prefixed(big_vision(cells=None), "params/"), {"image_size": 32}),
    "BiT, numbered convolutions": (lambda: bit_arrays((2, 2, 2, 2), "standardized_conv2d_3"), {}),
}
# What is written in another form than it was read
REWRITTEN: dict[str, Callable[[], Arrays]] = {
    "big_vision, bf16, stacked": ROUND["big_vision, bf16"][0],
    "BiT, numbered convolutions": lambda: bit_arrays((2, 2, 2, 2)),
}


def same_bits(path: Path, expected: Arrays) -> None:
    """Names, dtypes and bytes; shapes too, but for the sides of 1 of an old GroupNorm."""
    with np.load(path, allow_pickle=False) as archive:
        assert set(archive.files) == set(expected)
        for name, x in expected.items():
            y = archive[name]
            assert (y.dtype, y.tobytes()) == (x.dtype, x.tobytes()), name
            shape = x.shape[-1:] if x.ndim == 4 and x.shape[:3] == (1, 1, 1) and "gn" in name else x.shape
            assert y.shape == shape, name


@pytest.mark.parametrize("name", ROUND)
def test_roundtrip_gives_the_same_file(tmp_path: Path, name: str) -> None:
    build, hints = ROUND[name]
    arrays = build()
    model = plainvit.load(save(arrays, tmp_path / "a.npz"), dtype=None, **hints)
    expected = REWRITTEN[name]() if name in REWRITTEN else arrays
    same_bits(plainvit.save(model, tmp_path / "b.npz", format="google"), expected)
