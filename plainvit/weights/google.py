"""Google's NumPy archives: vit_jax (original, AugReg, SAM, hybrids), big_vision, and BiT's.

Names are flax's; kernels are transposed relative to PyTorch's, and q, k and v are separate and split by head.
big_vision numbers its modules differently, stores positions at the root without a row for the class token, may stack
all layers in one array, and puts everything under a prefix.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from plainvit.config import VIT_NUMERICS, Model, Preprocess, ResNetConfig, ViTConfig
from plainvit.names import UNITS
from plainvit.weights.files import RenamedTensors, Tensors
from plainvit.weights.layout import DetectedModel, Layout, Shapes, make_layout
from plainvit.weights.shapes import Hints, read_bit, read_vit
from plainvit.weights.supported import ANY, list_unlike, list_unlike_resnet

MAX_LAYERS = 1000
_CODE = "Google's code"
_STACKED = "Transformer/encoderblock/"


def matches(tensors: Tensors) -> bool:
    return any(f"/{name}".endswith("/embedding/kernel") for name in tensors.shapes) or _is_bit(tensors)


def _is_bit(tensors: Tensors) -> bool:
    return any(name.startswith("resnet/root_block/") for name in tensors.shapes)


def detect(tensors: Tensors, hints: Hints) -> tuple[DetectedModel, Tensors]:
    """The model of an archive, and the archive under the names of its layout."""
    if _is_bit(tensors):
        return _detect_bit(tensors)
    kernel = min((name for name in tensors.shapes if f"/{name}".endswith("/embedding/kernel")), key=len)
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
    shapes = tensors.shapes
    first_block = f"{prefix}Transformer/encoderblock_0/"
    is_big_vision = any(name.startswith(f"{first_block}MultiHeadDotProductAttention_0/") for name in shapes)
    section = "big_vision" if is_big_vision else "google"
    layout = make_layout(section, shapes, prefix)
    positions = layout["positions.0.table"].names[0]
    if section == "google" and f"{prefix}Transformer/posembed_input/pos_embedding" not in shapes:
        raise ValueError(f"this Google file has no tensor {positions!r}: download it again, or check that it is a ViT")
    attention = "MultiHeadDotProductAttention_0" if is_big_vision else "MultiHeadDotProductAttention_1"
    query = shapes.get(f"{first_block}{attention}/query/kernel", ())
    settings, sources = read_vit(
        layout,
        shapes,
        "Google",
        replace(hints, stated_heads=(query[1], "shape of the query kernel") if len(query) == 3 else None),
        rows="none" if section == "big_vision" else "class",
        stem="google",
    )
    if settings["posemb"] != "1d":
        settings["posemb"] = "sincos2d"
    sources |= {"activation": f"{_CODE} (flax's gelu is the tanh form)", "norm_eps": f"{_CODE} (flax's default)"}
    sources |= {"mean": f"{_CODE}: pixels in [-1, 1]", "preprocess": f"{_CODE}: square resize, no antialias"}
    if settings["stem"]:
        sources["stem"] = f"{_CODE}: SAME padding, (w - mean) / (std + 1e-5), GroupNorm 1e-6"
    if positions not in shapes:
        sources["posemb"] = "no table in the file: big_vision's fixed sin-cos positions"
    return DetectedModel(
        family="big_vision" if is_big_vision else "Google",
        config=ViTConfig(**settings | VIT_NUMERICS["google"], pool=_find_pool(shapes, prefix)),
        layout=layout,
        sources=sources,
        preprocess=Preprocess(resize="squash", interpolation="bilinear", antialias=False),
        # outside the prefix: optimizer state, counters, the text tower
        ignore=lambda name: bool(prefix) and not name.startswith(prefix),
    )


def _find_pool(shapes: Shapes, prefix: str) -> Literal["token", "average", "attention"]:
    if f"{prefix}cls" in shapes:
        return "token"
    has_attention = any(name.startswith(f"{prefix}MAPHead_0/") for name in shapes)
    return "attention" if has_attention else "average"


def _detect_bit(tensors: Tensors) -> tuple[DetectedModel, Tensors]:
    """BiT; some files number the convolutions (standardized_conv2d_12), and the numbers have no meaning."""
    names = {re.sub(r"(conv2d|group_norm)_\d+/", r"\1/", name): (name, None) for name in tensors.shapes}
    if len(names) < len(tensors.shapes):
        raise ValueError("this BiT file has one weight under two names")
    tensors = RenamedTensors(tensors, dict(names))
    layout = make_layout("google BiT", tensors.shapes)
    sources = {
        "standardize": f"{_CODE}: w / sqrt(var + 1e-10)",
        "norm_eps": f"{_CODE}: 1e-5",
        "padding": f"{_CODE}: symmetric, zeros before the root's pooling",
        "mean": f"{_CODE}: pixels in [-1, 1]",
        "preprocess": "BiT's evaluation: square resize",
        "image_size": "convolutions take any size; 224 is the paper's pre-training",
    }
    config = read_bit(layout, tensors.shapes, "google")
    return DetectedModel("BiT", config, layout, sources), tensors


def layout_for(config: Model) -> Layout:
    """The layout of vit_jax, or big_vision's for models that only big_vision has."""
    if isinstance(config, ResNetConfig):
        return make_layout("google BiT")
    if not config.class_token or config.posemb_prefix == "none" or config.pool == "attention":
        return make_layout("big_vision", prefix="params/")
    return make_layout("google")


def list_unsupported(config: Model) -> Iterator[tuple[str, str]]:
    """(part, reason) for what Google's code computes differently or does not have."""
    half = (0.5,) * config.channels
    if config.mean != half or config.std != half:
        yield "normalization", "Google's code takes pixels in [-1, 1]"
    yield from list_unlike_resnet(config, "google")
    if isinstance(config, ResNetConfig):
        if config.blocks not in UNITS.values():
            yield "blocks", "BiT has no ResNet of this depth"
        return
    has = {"stem": ANY, "representation": ANY, "posemb_prefix": ANY, "posemb": ("1d", "sincos2d")}
    has |= {"pool": ("token", "average", "attention"), "activation": ("gelu_tanh",), "norm_eps": (1e-6,)}
    yield from list_unlike(config, "Google's code", **has)
    if config.pool != "token" and config.class_token:
        yield "pool", "Google's average and attention pooling have no class token"
    if config.posemb == "sincos2d" and config.class_token:
        yield "posemb", "big_vision has a class token only with learned positions"
