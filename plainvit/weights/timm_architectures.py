"""timm's config.json, read and written: the name of an architecture implies settings that the weights do not show.

A test compares the table of names with the installed timm.
"""

import csv
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plainvit.config import About, Model, Preprocess, ResNetConfig, ViTConfig
from plainvit.weights.shapes import unsupported_model
from plainvit.weights.supported import ANY

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "gelu_sigmoid", "relu": "relu", "silu": "silu"}


@functools.cache
def load_architectures() -> dict[str, dict[str, Any]]:
    """{name: settings that the weights do not show} of the timm models that plainvit computes."""
    with Path(__file__).with_name("timm_architectures.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = {"heads": int, "norm_eps": float, "rotary_grid": int}
    return {row.pop("name"): {key: numbers.get(key, str)(value) for key, value in row.items()} for row in rows}


# Parts of names whose weights may look like a plain ViT's
UNSUPPORTED = {
    "test_vit3": "a ViT with attention pooling over all tokens",
    "pe_core": "a ViT with attention pooling over all tokens",
    "rope_mixed": "a ViT with learned rotary frequencies",
    "sapiens2": "a ViT with grouped attention",
    "enormous": "a ViT with norms after each branch",
    "_rpn_": "a ViT with norms after each branch",
}
# Names to write, by (units of each stage, width) and by (units of each stage, widening)
HYBRIDS: dict[tuple[tuple[int, ...], int], str] = {
    ((), 192): "vit_tiny_r_s16_p8_224",
    ((2, 2, 2, 2), 384): "vit_small_r26_s32_224",
    ((3, 4, 9), 768): "vit_base_r50_s16_224",
    ((3, 4, 6, 3), 1024): "vit_large_r50_s32_224",
}
RESNETS: dict[tuple[tuple[int, ...], int], str] = {
    ((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
    ((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
    ((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
    ((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
    ((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
    ((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}


# A name for each kind of model, whose class and epsilon are the model's; `_make_arguments` adds the rest
WRITTEN: dict[str, str | None] = {
    "BEiT": "beit_base_patch16_224",
    "EVA-02": "eva02_base_patch14_224",
    "DINOv3": "vit_base_patch16_dinov3_qkvb",
    "RoPE-ViT": "vit_base_patch16_rope_224",
    "PE": None,
    "EVA": "eva_giant_patch14_224",
    "DeiT": "deit_base_distilled_patch16_224",
    "AIMv2": "aimv2_large_patch14_224",
    "BEiT-3": "beit3_base_patch16_224",
    "CLIP": "vit_base_patch16_clip_224",
    "DINOv2": "vit_giant_patch14_dinov2",
    "ViT": "vit_base_patch16_224",
}
# What each kind has besides the paper's parts, as `list_unlike` has it
_VIT = dict.fromkeys(("layer_scale", "posemb_prefix", "norm_pooled", "registers", "qk_norm", "norm_final"), ANY)
_VIT |= {"pool": ("token", "average", "attention"), "posemb": ("none", "1d"), "block_bias": ("all", "no_qkv")}
_EVA = dict.fromkeys(("layer_scale", "posemb_prefix", "norm_pooled", "registers", "qk_norm", "rotary"), ANY)
_EVA |= {"pool": ("token", "average"), "posemb": ("none", "1d"), "block_bias": ("no_k",)}
SUPPORTED: dict[str, dict[str, Any]] = {
    "BEiT": _EVA | {"posemb": ("bias",), "registers": (False,), "rotary": ("none",)},
    "EVA-02": _EVA | {"rotary_grid": (16,), "gated": ANY, "norm_inner": ANY},
    "DINOv3": _EVA | {"gated": ANY, "block_bias": ("no_k", "no_qkv"), "posemb": ("none",)},
    "RoPE-ViT": _EVA | {"block_bias": ("all",)},
    "PE": _EVA | {"pool": _VIT["pool"], "block_bias": ("all",), "norm_embedding": ("tokens",), "norm_final": ANY},
    "EVA": _EVA,
    "DeiT": {"distillation": ANY, "posemb_prefix": ("class", "all"), "layer_scale": ANY},
    "AIMv2": _VIT | {"norm_kind": ("rms",), "norm_embedding": ("patches",), "block_bias": ("none",), "gated": (True,)},
    "BEiT-3": _VIT | {"norm_inner": ANY, "block_bias": ("all",)},
    "CLIP": _VIT | {"norm_embedding": ("tokens",)},
    "DINOv2": _VIT | {"gated": ANY, "pool": ("token", "average")},
    "ViT": _VIT | {"stem": ANY},
}


def choose_kind(config: ViTConfig) -> str:
    """The kind of model that a ViT is written as: the first whose condition holds."""
    rotary = {"eva02": "EVA-02", "dinov3": "DINOv3", "axial": "RoPE-ViT", "pe": "PE"}.get(config.rotary, "")
    conditions = {
        "BEiT": config.posemb == "bias",
        rotary: config.rotary != "none",
        "EVA": config.block_bias == "no_k",
        "DeiT": config.distillation,
        "AIMv2": config.norm_kind == "rms",
        "BEiT-3": config.norm_inner != "none",
        "CLIP": config.norm_embedding == "tokens",
        "DINOv2": config.gated,
    }
    return next((kind for kind, holds in conditions.items() if holds), "ViT")


def uses_eva(config: ViTConfig) -> bool:
    """Whether timm's Eva or Beit computes the model, rather than its VisionTransformer."""
    return config.rotary != "none" or config.block_bias == "no_k" or config.posemb == "bias"


def list_in_sidecar(config: Model) -> tuple[str, ...]:
    """Parts that timm reads from config.json, so that a folder supports any."""
    return () if isinstance(config, ResNetConfig) or uses_eva(config) else ("activation",)


def _has_split_qkv(config: ViTConfig) -> bool:
    return config.rotary == "eva02" and config.norm_inner != "none"


def choose_name_parts(config: ViTConfig) -> tuple[str, ...]:
    """The names, of the alternatives in parameter_names/timm.ini, in the class of timm that computes the model."""
    is_split = _has_split_qkv(config)
    is_written = {
        "gamma_": uses_eva(config),
        "fc_norm": config.norm_pooled,
        "_proj": is_split,
        "q_bias": config.block_bias == "no_k" and not is_split,
        "fc1_g": config.gated and (is_split or config.rotary == "dinov3" or config.norm_kind == "rms"),
        "backbone.conv": config.stem is not None and not config.stem.blocks,
        "backbone.norm": config.stem is not None and not config.stem.blocks,
    }
    return tuple(part for part, holds in is_written.items() if holds)


def check_architecture(name: str) -> None:
    """Rejects names whose heads, activation and positions are unknown; "" is allowed."""
    if not name or name in load_architectures() or name in RESNETS.values():
        return
    what = next((what for part, what in UNSUPPORTED.items() if part in name), f"timm's {name}")
    raise unsupported_model(what, f"architecture {name!r} in config.json")


def read_preprocess(sidecar: Mapping[str, Any], crop: float) -> Preprocess:
    """Preprocessing from config.json; `crop` is used if it does not say."""
    published = sidecar.get("pretrained_cfg") or {}
    crop = published.get("crop_pct") or crop
    resize = "crop"
    if published.get("crop_mode") == "squash":
        resize = "squash" if crop == 1 else "squash-crop"
    return Preprocess(resize=resize, crop=crop, interpolation=published.get("interpolation") or "bicubic")


def read_class_names(sidecar: Mapping[str, Any]) -> tuple[str, ...]:
    published = sidecar.get("pretrained_cfg") or {}
    return tuple(map(str, published.get("label_names") or sidecar.get("label_names") or ()))


def make_sidecar(config: Model, about: About) -> dict[str, Any]:
    """config.json as timm.create_model("local-dir:FOLDER") reads it: what the bare weights cannot say."""
    published: dict[str, Any] = {
        "input_size": [config.channels, *config.image_size],
        "mean": list(config.mean),
        "std": list(config.std),
        "num_classes": config.classes,
        "interpolation": about.preprocess.interpolation,
        "crop_pct": 1.0 if about.preprocess.resize == "squash" else about.preprocess.crop,  # timm crops either way
        "crop_mode": "center" if about.preprocess.resize == "crop" else "squash",
        "label_names": list(about.class_names) or None,
    }
    if isinstance(config, ResNetConfig):
        architecture, arguments = RESNETS.get((config.blocks, config.widen)), {"in_chans": config.channels}
    else:
        architecture = HYBRIDS.get((config.stem.blocks, config.width)) if config.stem else WRITTEN[choose_kind(config)]
        arguments = _make_arguments(config)
    if architecture is None:
        raise ValueError("timm has no model of this shape to name in config.json: write a .safetensors file instead")
    described = {"architecture": architecture, "num_classes": config.classes, "model_args": arguments}
    return described | {"pretrained_cfg": {key: value for key, value in published.items() if value is not None}}


def _make_arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's class; with these one architecture's name stands for every size."""
    is_eva = uses_eva(config)
    counts_gate = config.gated and not is_eva and config.norm_kind != "rms"
    hidden = 2 * config.mlp_dim if counts_gate else config.mlp_dim
    ratio = hidden / config.width
    if int(config.width * ratio) != hidden:  # timm's formula, one too few if the ratio was rounded down
        ratio = math.nextafter(ratio, math.inf)
    arguments: dict[str, Any] = {
        "img_size": list(config.image_size),
        "patch_size": config.patch[0] if config.patch[0] == config.patch[1] else list(config.patch),
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio,
        "init_values": config.layer_scale,
    }
    if config.block_bias != "all" or is_eva:
        arguments["qkv_bias"] = config.block_bias in ("all", "no_k")
    pool = {"token": "token", "average": "avg", "attention": "map"}.get(config.pool)
    if is_eva:
        arguments["global_pool"] = pool
        return arguments if config.posemb == "bias" else arguments | _make_eva_arguments(config)
    arguments["act_layer"] = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
    return arguments if config.distillation else arguments | _make_vit_arguments(config, pool)


def _make_vit_arguments(config: ViTConfig, pool: str | None) -> dict[str, Any]:
    """Those of timm's VisionTransformer alone."""
    arguments: dict[str, Any] = {
        "class_token": config.class_token,
        "global_pool": pool,
        "fc_norm": config.norm_pooled,
        "reg_tokens": config.registers,
        "no_embed_class": config.posemb_prefix == "none" or not config.prefix,
        "pos_embed": "learn" if config.posemb == "1d" else "none",
    }
    if config.norm_inner == "mlp":
        arguments["scale_attn_norm"] = False
    if not config.norm_final:
        arguments["final_norm"] = False
    if config.qk_norm:
        arguments["qk_norm"] = True
    return arguments


def _make_eva_arguments(config: ViTConfig) -> dict[str, Any]:
    return {
        "qkv_fused": not _has_split_qkv(config),
        "attn_type": "rope" if config.block_bias == "all" else "eva",
        "swiglu_mlp": config.gated,
        "swiglu_align_to": 1 if config.rotary == "dinov3" and config.gated else 0,
        "scale_mlp": config.norm_inner != "none",
        "scale_attn_inner": config.norm_inner == "both",
        "qk_norm": config.qk_norm,
        "class_token": config.class_token,
        "num_reg_tokens": config.registers,
        "use_rot_pos_emb": config.rotary != "none",
        "use_abs_pos_emb": config.posemb == "1d",
        "no_embed_class": config.posemb_prefix == "none" or not config.prefix,
        "use_fc_norm": config.norm_pooled,
        "use_post_transformer_norm": config.norm_final and not config.norm_pooled,
    }
