"""Google's NumPy archives: vit_jax (original, AugReg, SAM, hybrids), big_vision, and BiT's.

Names are flax's; kernels are transposed relative to PyTorch's, and q, k and v are separate and split by head.
big_vision numbers its modules differently, stores positions at the root without a row for the class token, may stack
all layers in one array, and puts everything under a prefix.
"""

import re
from collections.abc import Iterator

from plainvit.config import Model, ResNetConfig, ViTConfig
from plainvit.names import UNITS
from plainvit.weights.files import RenamedTensors, Tensors
from plainvit.weights.grids import Hints, count_layers, count_units, read_grid
from plainvit.weights.layout import (
    CONV1X1_HWIO,
    HWIO,
    LEADING_AXIS,
    PATCHES_HWIO,
    TRANSPOSE,
    Conversion,
    DetectedModel,
    Entry,
    Layout,
    entry,
    linear,
)
from plainvit.weights.limits import ANY, list_unlike

MAX_LAYERS = 1000
_CODE = "Google's code"
_BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/")
_STACKED = "Transformer/encoderblock/"


def _head_width(config: Model) -> int:
    assert isinstance(config, ViTConfig)
    return config.width // config.heads


# Attention by head: kernels [D, H, d] into the heads, [H, d, D] out of them, biases [H, d]
INTO_HEADS = Conversion(lambda t, c: t.mT.reshape(t.shape[1], -1, _head_width(c)), lambda t: t.flatten(1).mT)
HEAD_BIAS = Conversion(lambda t, c: t.reshape(-1, _head_width(c)), lambda t: t)
OUT_OF_HEADS = Conversion(lambda t, c: t.mT.reshape(-1, _head_width(c), t.shape[0]), lambda t: t.flatten(0, 1).mT)


def _dense(ours: str, name: str) -> dict[str, Entry]:
    return linear(ours, f"{name}/", conversion=TRANSPOSE, kernel="kernel")


def _norm(ours: str, name: str) -> dict[str, Entry]:
    return linear(ours, f"{name}/", kernel="scale")


def _attention(ours: dict[str, tuple[str, ...]], out: str, name: str) -> dict[str, Entry]:
    """Entries of an attention; `ours` maps each of our layers to the layers that it stacks, `out` is the projection."""
    layout = {
        f"{out}.weight": entry(f"{name}/out/kernel", conversion=OUT_OF_HEADS),
        f"{out}.bias": entry(f"{name}/out/bias"),
    }
    for layer, parts in ours.items():
        layout[f"{layer}.weight"] = entry(*(f"{name}/{part}/kernel" for part in parts), conversion=INTO_HEADS)
        layout[f"{layer}.bias"] = entry(*(f"{name}/{part}/bias" for part in parts), conversion=HEAD_BIAS)
    return layout


def vit_layout(prefix: str = "", *, big_vision: bool = False) -> Layout:
    """Names of a ViT or hybrid."""
    block = prefix + "Transformer/encoderblock_{i}"
    attention, mlp, norm2 = (0, 0, 1) if big_vision else (1, 3, 2)
    positions = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
    pool = prefix + "MAPHead_0"
    return {
        **linear("embedding", f"{prefix}embedding/", conversion=PATCHES_HWIO, kernel="kernel"),
        "class_token": entry(f"{prefix}cls", conversion=LEADING_AXIS),
        "positions.0.table": entry(prefix + positions, conversion=LEADING_AXIS),
        **_norm("blocks.{i}.norm1", f"{block}/LayerNorm_0"),
        **_attention(
            {"blocks.{i}.attention.qkv": ("query", "key", "value")},
            "blocks.{i}.attention.out",
            f"{block}/MultiHeadDotProductAttention_{attention}",
        ),
        **_norm("blocks.{i}.norm2", f"{block}/LayerNorm_{norm2}"),
        **_dense("blocks.{i}.mlp.fc1", f"{block}/MlpBlock_{mlp}/Dense_0"),
        **_dense("blocks.{i}.mlp.fc2", f"{block}/MlpBlock_{mlp}/Dense_1"),
        **_norm("norm", f"{prefix}Transformer/encoder_norm"),
        "pool.probe": entry(f"{pool}/probe"),
        **_attention(
            {"pool.q": ("query",), "pool.kv": ("key", "value")},
            "pool.out",
            f"{pool}/MultiHeadDotProductAttention_0",
        ),
        **_norm("pool.norm", f"{pool}/LayerNorm_0"),
        **_dense("pool.mlp.fc1", f"{pool}/MlpBlock_0/Dense_0"),
        **_dense("pool.mlp.fc2", f"{pool}/MlpBlock_0/Dense_1"),
        **_dense("pre_logits", f"{prefix}pre_logits"),
        **_dense("head", f"{prefix}head"),
        **_stem_layout(prefix),
    }


def _stem_layout(prefix: str) -> dict[str, Entry]:
    unit, ours = prefix + "block{s1}/unit{u1}", "stem.stages.{s}.{u}"
    layout = {"stem.root.weight": entry(f"{prefix}conv_root/kernel", conversion=HWIO)}
    layout |= _norm("stem.root_norm", f"{prefix}gn_root")
    for number in "123":
        layout[f"{ours}.conv{number}.weight"] = entry(f"{unit}/conv{number}/kernel", conversion=HWIO)
        layout |= _norm(f"{ours}.norm{number}", f"{unit}/gn{number}")
    layout[f"{ours}.projection.weight"] = entry(f"{unit}/conv_proj/kernel", conversion=HWIO)
    return layout | _norm(f"{ours}.norm_projection", f"{unit}/gn_proj")


def bit_layout() -> Layout:
    """Names of BiT: a, b, c are the three convolutions of a unit, each after its norm."""
    unit, ours = "resnet/block{s1}/unit{u1:02d}", "body.stages.{s}.{u}"
    layout = {"body.root.weight": entry("resnet/root_block/standardized_conv2d/kernel", conversion=HWIO)}
    for number, letter in zip("123", "abc", strict=True):
        layout[f"{ours}.conv{number}.weight"] = entry(f"{unit}/{letter}/standardized_conv2d/kernel", conversion=HWIO)
        layout |= linear(f"{ours}.norm{number}", f"{unit}/{letter}/group_norm/", kernel="gamma", bias="beta")
    layout[f"{ours}.projection.weight"] = entry(f"{unit}/a/proj/standardized_conv2d/kernel", conversion=HWIO)
    layout |= linear("body.norm", "resnet/group_norm/", kernel="gamma", bias="beta")
    return layout | linear("head", "resnet/head/conv2d/", conversion=CONV1X1_HWIO, kernel="kernel")


def matches(tensors: Tensors) -> bool:
    return any(name == "embedding/kernel" or name.endswith("/embedding/kernel") for name in tensors.shapes) or any(
        name.startswith("resnet/root_block/") for name in tensors.shapes
    )


def detect(tensors: Tensors, hints: Hints) -> tuple[DetectedModel, Tensors]:
    """The model of an archive, and the archive under the names of its layout."""
    if any(name.startswith("resnet/root_block/") for name in tensors.shapes):
        return _detect_bit(tensors)
    kernel = min((name for name in tensors.shapes if name.endswith("embedding/kernel")), key=len)
    prefix = kernel.removesuffix("embedding/kernel")
    tensors = _unstack(tensors, prefix)
    return _detect_vit(tensors, prefix, hints), tensors


def _unstack(tensors: Tensors, prefix: str) -> Tensors:
    """Gives each layer of big_vision's stacked arrays its own name."""
    stacked = prefix + _STACKED
    if not any(name.startswith(stacked) for name in tensors.shapes):
        return tensors
    names: dict[str, tuple[str, int | None]] = {}
    for name, shape in tensors.shapes.items():
        if name.startswith(stacked) and shape:
            if not 0 < shape[0] <= MAX_LAYERS:
                raise ValueError(f"this big_vision file stacks {shape[0]:,} layers: it is damaged")
            names |= {name.replace(_STACKED, f"Transformer/encoderblock_{i}/"): (name, i) for i in range(shape[0])}
        else:
            names[name] = name, None
    return RenamedTensors(tensors, names)


def _detect_vit(tensors: Tensors, prefix: str, hints: Hints) -> DetectedModel:
    shapes = {name.removeprefix(prefix): shape for name, shape in tensors.shapes.items() if name.startswith(prefix)}
    big_vision = any("MultiHeadDotProductAttention_0" in name for name in shapes if _BLOCK.match(name))
    layout = vit_layout(prefix, big_vision=big_vision)
    attention = f"Transformer/encoderblock_0/MultiHeadDotProductAttention_{0 if big_vision else 1}/query/kernel"
    mlp = f"Transformer/encoderblock_0/MlpBlock_{0 if big_vision else 3}/Dense_0/kernel"
    for name in ("embedding/kernel", attention, mlp):
        if len(shapes.get(name, ())) != {"embedding/kernel": 4, attention: 3, mlp: 2}[name]:
            raise ValueError(
                f"this Google file has no valid tensor {prefix}{name!r}: download it again, or check that it is a ViT"
            )
    *patch, channels, width = shapes["embedding/kernel"]
    class_token, pooled = "cls" in shapes, any(name.startswith("MAPHead_0/") for name in shapes)
    table = shapes.get("pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding")
    if table is None and not big_vision:
        raise ValueError(
            "this Google file has no tensor 'Transformer/posembed_input/pos_embedding': download it again, or check "
            "that it is a ViT"
        )
    stem = _find_stem(shapes)
    cell = (patch[0] * (stem.stride if stem else 1), patch[1] * (stem.stride if stem else 1))
    prefix_rows = 0 if big_vision else int(class_token)
    size = read_grid(table[1] if table else None, cell, (prefix_rows,), hints)
    config = ViTConfig(
        width=width,
        depth=count_layers(shapes, r"Transformer/encoderblock_(\d+)/"),
        heads=shapes[attention][1],
        mlp_dim=shapes[mlp][1],
        patch=(patch[0], patch[1]),
        image_size=size.image_size,
        channels=stem.channels if stem else channels,
        classes=shapes.get("head/kernel", (0, 0))[1],
        representation=shapes.get("pre_logits/kernel", (0, 0))[1],
        class_token=class_token,
        pool="attention" if pooled else "token" if class_token else "average",
        posemb="1d" if table else "sincos2d",
        posemb_prefix="none" if big_vision else "class",
        stem=stem,
        activation="gelu_tanh",
        norm_eps=1e-6,
    )
    sources = {"activation": f"{_CODE} (flax's gelu is the tanh form)", "norm_eps": f"{_CODE} (flax's default)"}
    sources |= {"mean": f"{_CODE}: pixels in [-1, 1]", "preprocess": f"{_CODE}: square resize, no antialias"}
    sources |= {"image_size": size.source, "heads": "shape of the query kernel"}
    if stem:
        sources |= {"stem": f"{_CODE}: SAME padding, (w - mean) / (std + 1e-5), GroupNorm 1e-6"}
    if not table:
        sources |= {"posemb": "no table in the file: big_vision's fixed sin-cos positions"}
    return DetectedModel(
        family="big_vision" if big_vision else "Google",
        config=config,
        layout=layout,
        sources=sources,
        about={"preprocess": {"resize": "squash", "interpolation": "bilinear", "antialias": False}},
        # outside the prefix: optimizer state, counters, the text tower
        ignore=lambda name: bool(prefix) and not name.startswith(prefix),
        notes=[f"image size {size.source}"] if size.source.startswith("assumed") else [],
    )


def _find_stem(shapes: dict[str, tuple[int, ...]]) -> ResNetConfig | None:
    if "conv_root/kernel" not in shapes:
        return None
    *_, channels, width = shapes["conv_root/kernel"]
    return ResNetConfig(
        blocks=count_units(shapes, r"block(\d+)/unit(\d+)/", 1),
        widen=max(width // 64, 1),
        channels=channels,
        classes=0,
        preactivation=False,
        padding="same",
        standardise="std+1e-5",
        norm_eps=1e-6,
    )


def _detect_bit(tensors: Tensors) -> tuple[DetectedModel, Tensors]:
    """BiT; some files number the convolutions (standardized_conv2d_12), and the numbers have no meaning."""
    names = {re.sub(r"(conv2d|group_norm)_\d+/", r"\1/", name): (name, None) for name in tensors.shapes}
    if len(names) < len(tensors.shapes):
        raise ValueError("this BiT file has one weight under two names")
    tensors = RenamedTensors(tensors, dict(names))
    root = tensors.shapes.get("resnet/root_block/standardized_conv2d/kernel", ())
    if len(root) != 4:
        raise ValueError("this BiT file has no valid root convolution: it is incomplete, or of another model")
    head = tensors.shapes.get("resnet/head/conv2d/kernel")
    config = ResNetConfig(
        blocks=count_units(tensors.shapes, r"resnet/block(\d+)/unit(\d+)/", 1),
        widen=max(root[3] // 64, 1),
        channels=root[2],
        classes=head[-1] if head else 0,
    )
    sources = {
        "standardise": f"{_CODE}: w / sqrt(var + 1e-10)",
        "norm_eps": f"{_CODE}: 1e-5",
        "padding": f"{_CODE}: symmetric, zeros before the root's pooling",
        "mean": f"{_CODE}: pixels in [-1, 1]",
        "preprocess": "BiT's evaluation: square resize",
        "image_size": "convolutions take any size; 224 is the paper's pre-training",
    }
    return DetectedModel("BiT", config, bit_layout(), sources, {"preprocess": {"resize": "squash"}}), tensors


def layout_for(config: Model) -> Layout:
    """The layout of vit_jax, or big_vision's for models that only big_vision has."""
    if isinstance(config, ResNetConfig):
        return bit_layout()
    big_vision = not config.class_token or config.posemb_prefix == "none" or config.pool == "attention"
    return vit_layout("params/" if big_vision else "", big_vision=big_vision)


def list_unsupported(config: Model) -> Iterator[tuple[str, str]]:
    """(part, reason) for what Google's code computes differently or does not have."""
    half = (0.5,) * config.channels
    if config.mean != half or config.std != half:
        yield "normalisation", "Google's code takes pixels in [-1, 1]"
    if isinstance(config, ResNetConfig):
        if (config.standardise, config.norm_eps, config.padding) != ("var+1e-10", 1e-5, "symmetric"):
            yield "standardise", "BiT computes w / sqrt(var + 1e-10), GroupNorm 1e-5, symmetric padding"
        if config.blocks not in UNITS.values():
            yield "blocks", "BiT has no ResNet of this depth"
        return
    stem = config.stem
    if stem and (stem.standardise, stem.norm_eps, stem.padding) != ("std+1e-5", 1e-6, "same"):
        yield "standardise", "Google's hybrids compute (w - mean) / (std + 1e-5), GroupNorm 1e-6, SAME padding"
    has = {"stem": ANY, "representation": ANY, "posemb_prefix": ANY, "posemb": ("1d", "sincos2d")}
    has |= {"pool": ("token", "average", "attention"), "activation": ("gelu_tanh",), "norm_eps": (1e-6,)}
    yield from list_unlike(config, "Google's code", **has)
    if config.pool != "token" and config.class_token:
        yield "pool", "Google's average and attention pooling have no class token"
    if config.posemb == "sincos2d" and config.class_token:
        yield "posemb", "big_vision has a class token only with learned positions"
