"""timm's config.json, read and written: the name of an architecture implies settings that the weights do not show.

A test compares the table of names with the installed timm.
"""

import math
from collections.abc import Mapping
from typing import Any

from plainvit.config import About, Model, ResNetConfig, ViTConfig
from plainvit.weights.grids import unsupported_model

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "gelu_sigmoid", "relu": "relu"}
IN_SIDECAR = ("activation",)  # settings that timm reads from config.json, so that a folder supports any

# (activation, heads): timm's ViTs, DeiTs and hybrids that plainvit reads; all have LayerNorm 1e-6
_BY_SETTINGS = {
    ("gelu", 2): """
        test_vit test_vit2
    """,
    ("gelu", 3): """
        vit_tiny_patch16_224 vit_tiny_patch16_384 deit_tiny_distilled_patch16_224 deit_tiny_patch16_224
        vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384
    """,
    ("gelu", 4): """
        vit_wee_patch16_reg1_gap_256
    """,
    ("gelu", 5): """
        vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256
    """,
    ("gelu", 6): """
        flexivit_small vit_small_patch8_224 vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2
        vit_small_patch16_36x1_224 vit_small_patch16_224 vit_small_patch16_384 vit_small_patch32_224
        vit_small_patch32_384 deit3_small_patch16_224 deit3_small_patch16_384
        deit_small_distilled_patch16_224 deit_small_patch16_224 vit_small_r26_s32_224 vit_small_r26_s32_384
    """,
    ("gelu", 8): """
        vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_256
        vit_mediumd_patch16_reg4_gap_384 deit3_medium_patch16_224
    """,
    ("gelu", 10): """
        vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256 vit_betwixt_patch16_reg4_gap_384
    """,
    ("gelu", 12): """
        flexivit_base vit_base_patch8_224 vit_base_patch14_dinov2 vit_base_patch14_reg1_tipsv2
        vit_base_patch14_reg4_dinov2 vit_base_patch16_224 vit_base_patch16_384 vit_base_patch16_reg4_gap_256
        vit_base_patch16_siglip_224 vit_base_patch16_siglip_256 vit_base_patch16_siglip_384
        vit_base_patch16_siglip_512 vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256
        vit_base_patch16_siglip_gap_384 vit_base_patch16_siglip_gap_512 vit_base_patch32_224
        vit_base_patch32_384 deit3_base_patch16_224 deit3_base_patch16_384 deit_base_distilled_patch16_224
        deit_base_distilled_patch16_384 deit_base_patch16_224 deit_base_patch16_384 vit_base_r26_s32_224
        vit_base_r50_s16_224 vit_base_r50_s16_384
    """,
    ("gelu", 14): """
        vit_base_patch16_plus_240 vit_base_patch32_plus_256 vit_so150m_patch16_reg4_gap_256
        vit_so150m_patch16_reg4_gap_384 vit_so150m_patch16_reg4_map_256
    """,
    ("gelu", 16): """
        eva_large_patch14_196 eva_large_patch14_336 flexivit_large vit_large_patch14_224
        vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2 vit_large_patch14_reg4_dinov2
        vit_large_patch16_224 vit_large_patch16_384 vit_large_patch16_siglip_256
        vit_large_patch16_siglip_384 vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384
        vit_large_patch32_224 vit_large_patch32_384 deit3_large_patch16_224 deit3_large_patch16_384
        vit_large_r50_s32_224 vit_large_r50_s32_384 vit_so400m_patch14_reg1_tipsv2
        vit_so400m_patch14_siglip_224 vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384
        vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378
        vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448
        vit_so400m_patch14_siglip_gap_896 vit_huge_patch14_224 vit_huge_patch14_gap_224
        vit_huge_patch16_gap_448 deit3_huge_patch14_224 vit_giant_patch14_224 vit_giant_patch16_gap_224
        vit_gigantic_patch14_224 vit_base_patch16_gap_224
    """,
    ("gelu_tanh", 12): """
        vit_base_patch32_siglip_256 vit_base_patch32_siglip_gap_256
    """,
    ("gelu_tanh", 16): """
        vit_large_patch16_siglip_512 vit_large_patch16_siglip_gap_512 vit_so400m_patch16_siglip_256
        vit_so400m_patch16_siglip_384 vit_so400m_patch16_siglip_512 vit_so400m_patch16_siglip_gap_256
        vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512 vit_giantopt_patch16_siglip_256
        vit_giantopt_patch16_siglip_384 vit_giantopt_patch16_siglip_gap_256
        vit_giantopt_patch16_siglip_gap_384
    """,
}
ARCHITECTURES: dict[str, tuple[str, int]] = {
    name: settings for settings, names in _BY_SETTINGS.items() for name in names.split()
}
# Parts of names whose weights may look like a plain ViT's
UNSUPPORTED = {
    "test_vit3": "a ViT with attention pooling over all tokens",
    "rope": "a ViT with rotary positions",
    "dinov3": "a ViT with rotary positions",
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


def check_architecture(name: str) -> None:
    """Rejects names whose heads, activation and positions are unknown; "" is allowed."""
    if not name or name in ARCHITECTURES or name in RESNETS.values():
        return
    what = next((what for part, what in UNSUPPORTED.items() if part in name), f"timm's {name}")
    raise unsupported_model(what, f"architecture {name!r} in config.json")


def read_about(sidecar: Mapping[str, Any], crop: float) -> dict[str, Any]:
    """Preprocessing and class names from config.json; `crop` is used if it does not say."""
    published = sidecar.get("pretrained_cfg") or {}
    crop = published.get("crop_pct") or crop
    squash = "squash" if crop == 1 else "squash-crop"
    preprocess = {
        "resize": squash if published.get("crop_mode") == "squash" else "crop",
        "crop": crop,
        "interpolation": published.get("interpolation") or "bicubic",
    }
    names = tuple(published.get("label_names") or sidecar.get("label_names") or ())
    return {"preprocess": preprocess, "class_names": names}


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
        architecture = "deit_base_distilled_patch16_224" if config.distillation else "vit_base_patch16_224"
        architecture = HYBRIDS.get((config.stem.blocks, config.width)) if config.stem else architecture
        arguments = _make_arguments(config)
    if architecture is None:
        raise ValueError("timm has no model of this shape to name in config.json: write a .safetensors file instead")
    described = {"architecture": architecture, "num_classes": config.classes, "model_args": arguments}
    return described | {"pretrained_cfg": {key: value for key, value in published.items() if value is not None}}


def _make_arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer; with these one architecture's name stands for every size."""
    ratio = config.mlp_dim / config.width
    if int(config.width * ratio) != config.mlp_dim:  # timm's formula, one too few if the ratio was rounded down
        ratio = math.nextafter(ratio, math.inf)
    arguments: dict[str, Any] = {
        "img_size": list(config.image_size),
        "patch_size": config.patch[0] if config.patch[0] == config.patch[1] else list(config.patch),
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio,
        "act_layer": next(name for name, ours in ACTIVATIONS.items() if ours == config.activation),
    }
    if config.distillation:
        return arguments
    arguments |= {
        "class_token": config.class_token,
        "global_pool": {"token": "token", "average": "avg", "attention": "map"}[config.pool],
        "fc_norm": config.norm_pooled,
        "reg_tokens": config.registers,
        "no_embed_class": config.posemb_prefix == "none" or not config.prefix,
        "pos_embed": "learn" if config.posemb == "1d" else "none",
    }
    return arguments | ({} if config.layer_scale is None else {"init_values": config.layer_scale})
