"""The image tower of OpenAI's and open_clip's CLIP checkpoints, with its projection.

A tower that open_clip takes from timm is stored under `visual.trunk.`, with timm's names, and read as such. Heads are
64 wide in OpenAI's and most of open_clip's models. The weights do not show the activation: OpenAI's is the sigmoid GELU
("quick GELU"), open_clip's own models have the exact one. open_clip_config.json, as on the hub, has both.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from plainvit.config import Preprocess, ViTConfig
from plainvit.weights.files import Tensors
from plainvit.weights.layout import DetectedModel, Layout, make_layout
from plainvit.weights.pixels import CLIP, HALF
from plainvit.weights.shapes import Hints, check_names, read_vit, unsupported_model
from plainvit.weights.supported import ANY, list_unlike

CONFIG = "open_clip_config.json"
# What the original checkpoints of OpenAI store next to the weights
OPENAI = ("input_resolution", "context_length", "vocab_size")
TEXT = ("text.", "token_embedding.", "text_projection", "logit_scale", "ln_final.")


def _find_prefix(tensors: Tensors) -> str | None:
    kernels = (name for name in tensors.shapes if re.search(r"(^|\.)conv1\.weight$", name))
    prefixes = [name.removesuffix("conv1.weight") for name in kernels]
    return next((prefix for prefix in prefixes if f"{prefix}class_embedding" in tensors.shapes), None)


def matches(tensors: Tensors) -> bool:
    return _find_prefix(tensors) is not None


def detect(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any]) -> DetectedModel:
    """`sidecar` is open_clip_config.json, or {}."""
    prefix, shapes = _find_prefix(tensors), tensors.shapes
    assert prefix is not None
    check_names(shapes, {rf"^{re.escape(prefix)}attn_pool\.": "CoCa, with an attention pooling of its own"})
    if len(shapes.get(f"{prefix}positional_embedding", ())) != 2:
        raise ValueError(f"this open_clip file has no valid {prefix}positional_embedding: it is incomplete")
    layout = make_layout("open_clip", shapes, prefix)
    is_clipa = f"{prefix}ln_pre.weight" not in shapes  # CLIPA pools the patches, then normalizes
    vision = sidecar["model_cfg"]["vision_cfg"] if sidecar else {}
    _check_config(vision, is_clipa)
    hints = replace(hints, stated_size=vision.get("image_size"))
    if sidecar and not hints.heads:
        width = shapes[f"{prefix}positional_embedding"][1]
        hints = replace(hints, stated_heads=(width // vision.get("head_width", 64), CONFIG))
    settings, sources = read_vit(
        layout,
        shapes,
        "open_clip",
        hints,
        optional=("layer_scale", "embedding_bias", "norm_embedding", "projection"),
    )
    settings |= {"pool": "average" if is_clipa else "token", "norm_pooled": is_clipa, "norm_eps": 1e-5}
    activation, sources["activation"] = _find_activation(shapes, sidecar)
    preprocess, colors = _read_pixels(sidecar)
    pixels = CONFIG if sidecar else "open_clip's transforms"
    sources |= {"norm_eps": "open_clip's code: 1e-5", "mean": pixels, "preprocess": pixels}
    return DetectedModel(
        family="open_clip",
        config=ViTConfig(**settings, activation=activation, **(colors if settings["channels"] == 3 else HALF)),
        layout=layout,
        sources=sources,
        preprocess=preprocess,
        ignore=lambda name: not name.startswith(prefix) if prefix else name.startswith(TEXT),
    )


def _check_config(vision: Mapping[str, Any], is_clipa: bool) -> None:
    """Rejects what open_clip computes differently without another weight."""
    if not vision:
        return
    usual: dict[str, Any] = {"no_ln_pre": is_clipa, "final_ln_after_pool": is_clipa}
    usual |= {"pool_type": "avg" if is_clipa else "tok", "norm_kwargs": {}, "act_kwargs": {}, "attentional_pool": False}
    stated = {"pool_type": "tok"} | dict(vision)
    for name, value in usual.items():
        if (stated.get(name) or None) != (value or None):  # None, False and {} are all the default
            raise unsupported_model(f"an open_clip tower with {name} {stated.get(name)!r}", CONFIG)


def _find_activation(names: Iterable[str], sidecar: Mapping[str, Any]) -> tuple[Any, str]:
    """(activation, source)."""
    if sidecar:
        return "gelu_sigmoid" if sidecar["model_cfg"].get("quick_gelu") else "gelu", CONFIG
    if any(name in OPENAI for name in names):
        return "gelu_sigmoid", "OpenAI's code: sigmoid GELU"
    return "gelu", "assumed: exact GELU; OpenAI, MetaCLIP and DFN have the sigmoid one"


def _read_pixels(sidecar: Mapping[str, Any]) -> tuple[Preprocess, dict[str, Any]]:
    """(preprocess, mean and std) as open_clip's transforms have it."""
    stated = sidecar.get("preprocess_cfg") or {}
    resize = "squash" if stated.get("resize_mode") == "squash" else "crop"
    preprocess = Preprocess(resize=resize, interpolation=stated.get("interpolation") or "bicubic")
    return preprocess, {name: tuple(stated.get(name) or CLIP[name]) for name in CLIP}


def make_timm_sidecar(sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """open_clip_config.json of a tower that is timm's, as timm's config.json."""
    vision = (sidecar.get("model_cfg") or {}).get("vision_cfg") or {}
    if not vision.get("timm_model_name"):
        return {}
    preprocess, colors = _read_pixels(sidecar)
    mode = "squash" if preprocess.resize == "squash" else "center"
    published = {**colors, "crop_pct": 1.0, "crop_mode": mode, "interpolation": preprocess.interpolation}
    described = {"architecture": vision["timm_model_name"], "pretrained_cfg": published}
    return described | {"global_pool": vision.get("timm_pool")}


def layout_for(_: ViTConfig) -> Layout:
    return make_layout("open_clip", prefix="visual.")


def list_unsupported(config: ViTConfig) -> Iterator[tuple[str, str]]:
    """(part, reason) for what open_clip's image tower does not have."""
    has: dict[str, Any] = {"projection": ANY, "layer_scale": ANY, "embedding_bias": (False,), "norm_eps": (1e-5,)}
    has |= {"norm_embedding": ("tokens",)} if not config.norm_pooled else {"norm_pooled": ANY, "pool": ("average",)}
    yield from list_unlike(config, "open_clip's image tower", activation=("gelu", "gelu_sigmoid"), **has)
    if config.classes:
        yield "head", "open_clip has no classifier: load with classes=0"
