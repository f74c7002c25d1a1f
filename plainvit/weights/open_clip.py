"""The image tower of OpenAI's and open_clip's CLIP checkpoints, with its projection.

A tower that open_clip takes from timm is stored under `visual.trunk.`, with timm's names, and read as such. Heads are
64 wide in OpenAI's and most of open_clip's models. The weights do not show the activation: OpenAI's is the sigmoid GELU
("quick GELU"), open_clip's own models have the exact one. open_clip_config.json, as on the hub, has both.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from plainvit.config import ViTConfig, pair
from plainvit.weights.files import Tensors
from plainvit.weights.grids import Hints, count_layers, read_grid, read_heads, unsupported_model
from plainvit.weights.layout import (
    FIRST_ROW,
    PATCHES,
    TRANSPOSE,
    DetectedModel,
    Layout,
    entry,
    linear,
    list_assumptions,
)
from plainvit.weights.limits import ANY, list_unlike
from plainvit.weights.timm import CLIP_MEAN, CLIP_STD

CONFIG = "open_clip_config.json"
BLOCK = "transformer.resblocks.{i}."
# What the original checkpoints of OpenAI store next to the weights
OPENAI = ("input_resolution", "context_length", "vocab_size")


def vit_layout(prefix: str = "visual.") -> Layout:
    block = prefix + BLOCK
    return {
        **linear("embedding", f"{prefix}conv1.", conversion=PATCHES),
        "class_token": entry(f"{prefix}class_embedding", conversion=FIRST_ROW),
        "positions.0.table": entry(f"{prefix}positional_embedding"),
        **linear("norm_tokens", f"{prefix}ln_pre."),
        **linear("blocks.{i}.norm1", f"{block}ln_1."),
        **linear("blocks.{i}.attention.qkv", f"{block}attn.", kernel="in_proj_weight", bias="in_proj_bias"),
        **linear("blocks.{i}.attention.out", f"{block}attn.out_proj."),
        "blocks.{i}.residual1.scale": entry(f"{block}ls_1.gamma"),
        **linear("blocks.{i}.norm2", f"{block}ln_2."),
        **linear("blocks.{i}.mlp.fc1", f"{block}mlp.c_fc."),
        **linear("blocks.{i}.mlp.fc2", f"{block}mlp.c_proj."),
        "blocks.{i}.residual2.scale": entry(f"{block}ls_2.gamma"),
        **linear("norm", f"{prefix}ln_post."),
        "projection.weight": entry(f"{prefix}proj", conversion=TRANSPOSE),
    }


def _find_prefix(tensors: Tensors) -> str | None:
    kernels = (name for name in tensors.shapes if re.search(r"(^|\.)conv1\.weight$", name))
    prefixes = [name.removesuffix("conv1.weight") for name in kernels]
    return next((prefix for prefix in prefixes if f"{prefix}class_embedding" in tensors.shapes), None)


def matches(tensors: Tensors) -> bool:
    return _find_prefix(tensors) is not None


def detect(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any]) -> DetectedModel:
    """`sidecar` is open_clip_config.json, or {}."""
    prefix = _find_prefix(tensors)
    assert prefix is not None
    shapes = {name.removeprefix(prefix): shape for name, shape in tensors.shapes.items() if name.startswith(prefix)}
    culprit = next((name for name in shapes if name.startswith("attn_pool.")), None)
    if culprit:
        raise unsupported_model("CoCa, with an attention pooling of its own", culprit)
    first = BLOCK.format(i=0)
    names = (f"{first}mlp.c_fc.weight", "conv1.weight", "positional_embedding")
    fc1, patches, table = (shapes.get(name, ()) for name in names)
    if len(patches) != 4 or len(fc1) != 2 or len(table) != 2:
        raise ValueError("this open_clip file has no valid conv1, positions or first layer: it is incomplete")
    width, channels, *patch = patches
    stated = sidecar["model_cfg"]["vision_cfg"].get("image_size") if sidecar else None
    if stated and not hints.grid:
        height, wide = pair(stated)
        hints = Hints(heads=hints.heads, grid=(height // patch[0], wide // patch[1]))
    size = read_grid(table[0], (patch[0], patch[1]), (1,), hints)
    is_clipa = "ln_pre.weight" not in shapes  # CLIPA pools the patches, then normalises
    numerics, sources = _read_numerics(tensors.shapes, width, is_clipa, hints, sidecar)
    preprocess, (mean, std) = _read_pixels(sidecar)
    config = ViTConfig(
        width=width,
        depth=count_layers(shapes, r"transformer\.resblocks\.(\d+)\."),
        mlp_dim=fc1[0],
        patch=(patch[0], patch[1]),
        image_size=size.image_size,
        channels=channels,
        classes=0,
        pool="average" if is_clipa else "token",
        norm_pooled=is_clipa,
        norm_eps=1e-5,
        layer_scale=1e-5 if f"{first}ls_1.gamma" in shapes else None,
        norm_embedding="none" if is_clipa else "tokens",
        embedding_bias="conv1.bias" in shapes,
        projection=shapes.get("proj", (0, 0))[1],
        mean=mean if channels == 3 else (0.5,),
        std=std if channels == 3 else (0.5,),
        **numerics,
    )
    pixels = CONFIG if sidecar else "open_clip's transforms"
    sources |= {"norm_eps": "open_clip's code: 1e-5", "image_size": size.source, "mean": pixels, "preprocess": pixels}
    return DetectedModel(
        family="open_clip",
        config=config,
        layout=vit_layout(prefix),
        sources=sources,
        about={"preprocess": preprocess},
        ignore=lambda name: not name.startswith(prefix) if prefix else _is_text(name),
        notes=list_assumptions(sources),
    )


def _read_numerics(
    names: Iterable[str], width: int, is_clipa: bool, hints: Hints, sidecar: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """(heads and activation, their sources)."""
    if not sidecar:
        heads, heads_source = read_heads(width, hints, "open_clip")
        is_openai = any(name in OPENAI for name in names)
        other = "assumed: exact GELU; OpenAI, MetaCLIP and DFN have the sigmoid one"
        sources = {"heads": heads_source, "activation": "OpenAI's code: sigmoid GELU" if is_openai else other}
        return {"heads": heads, "activation": "gelu_sigmoid" if is_openai else "gelu"}, sources
    model = sidecar["model_cfg"]
    vision = model["vision_cfg"]
    usual = {"no_ln_pre": is_clipa, "final_ln_after_pool": is_clipa, "pool_type": "avg" if is_clipa else "tok"}
    usual |= {"norm_kwargs": None, "act_kwargs": None, "attentional_pool": False}
    default = {"no_ln_pre": False, "final_ln_after_pool": False, "pool_type": "tok"}
    for name, value in usual.items():
        if (vision.get(name, default.get(name)) or None) != (value or None):
            raise unsupported_model(f"an open_clip tower with {name} {vision.get(name)!r}", CONFIG)
    heads = hints.heads or width // vision.get("head_width", 64)
    activation = "gelu_sigmoid" if model.get("quick_gelu") else "gelu"
    sources = {"heads": "given by the caller" if hints.heads else CONFIG, "activation": CONFIG}
    return {"heads": heads, "activation": activation}, sources


def _read_pixels(sidecar: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """(preprocess, (mean, std)) as open_clip's transforms have it."""
    stated = sidecar.get("preprocess_cfg") or {}
    resize = "squash" if stated.get("resize_mode") == "squash" else "crop"
    preprocess = {"resize": resize, "crop": 1.0, "interpolation": stated.get("interpolation") or "bicubic"}
    return preprocess, (tuple(stated.get("mean") or CLIP_MEAN), tuple(stated.get("std") or CLIP_STD))


def _is_text(name: str) -> bool:
    return name.startswith(("text.", "token_embedding.", "text_projection", "logit_scale", "ln_final."))


def layout_for(_: ViTConfig) -> Layout:
    return vit_layout()


def list_unsupported(config: ViTConfig) -> Iterator[tuple[str, str]]:
    """(part, reason) for what open_clip's image tower does not have."""
    has: dict[str, Any] = {"projection": ANY, "layer_scale": ANY, "embedding_bias": (False,), "norm_eps": (1e-5,)}
    has |= {"norm_embedding": ("tokens",)} if not config.norm_pooled else {"norm_pooled": ANY, "pool": ("average",)}
    yield from list_unlike(config, "open_clip's image tower", activation=("gelu", "gelu_sigmoid"), **has)
    if config.classes:
        yield "head", "open_clip has no classifier: load with classes=0"
