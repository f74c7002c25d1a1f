"""config.json and preprocessor_config.json of transformers, read and written."""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plainvit.config import About, Preprocess, ResNetConfig, ViTConfig, pair
from plainvit.weights.pixels import CLIP, HALF, IMAGENET
from plainvit.weights.supported import ANY

ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "gelu_sigmoid", "relu": "relu"}
ACTIVATIONS |= {"silu": "silu"}
SPELLINGS: dict[str, Any] = {**ACTIVATIONS, "gelu_new": "gelu_tanh", "gelu_python": "gelu", "swish": "silu"}
RESAMPLING: dict[int, Any] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
HALF_PIXELS, PIXELS, CLIP_PIXELS = (
    {f"image_{name}": value for name, value in colors.items()} for colors in (HALF, IMAGENET, CLIP)
)
# Defaults of the image processors. `sides`: the meaning of a single number as `size`
SQUASH = {"resample": 2, "sides": ("height", "width"), "size": 224} | HALF_PIXELS
SQUASH_CROP = SQUASH | {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224}
SHORT_SIDE = SQUASH_CROP | {"sides": ("shortest_edge",), "size": 224} | CLIP_PIXELS
PROCESSORS = {
    "ViT": SQUASH,
    "DeiT": SQUASH_CROP,
    "CLIP": SHORT_SIDE,
    "Bit": SHORT_SIDE,
    "ViTHybrid": SHORT_SIDE,
    "Siglip": SQUASH | {"resample": 3},
    "DINOv3ViT": SQUASH | PIXELS,
    "Beit": SQUASH | {"resample": 3},
}


# What published weights of each class come with, where it is not SQUASH
USUAL = {
    "ViTHybrid": SHORT_SIDE | HALF_PIXELS,
    "DeiT": SQUASH_CROP | PIXELS,
    "CLIP": SHORT_SIDE,
    "SigLIP": PROCESSORS["Siglip"],
    "DINOv2": SHORT_SIDE | PIXELS | {"size": 256},
    "DINOv2 with registers": SHORT_SIDE | PIXELS | {"size": 256},
    "DINOv3": PROCESSORS["DINOv3ViT"],
    "BEiT": PROCESSORS["Beit"],
    "AIMv2": SHORT_SIDE,
}
# Settings of all models of a class
FIXED: dict[str, dict[str, Any]] = {
    "CLIP": {"norm_embedding": "tokens", "embedding_bias": False},
    "DINOv3": {"rotary": "dinov3"},
    "AIMv2": {"norm_kind": "rms", "norm_embedding": "patches", "block_bias": "none"},
}
# What the models of a class may have besides the paper's parts, as `list_unlike` has it
_VIT = {"posemb_prefix": ("class", "all"), "representation": ANY}
_DINO: dict[str, Any] = {"gated": ANY, "layer_scale": (True,)}
_DINOV2 = _DINO | {"pool": ("token", "token+average")}
_BEIT = {"posemb": ("bias",), "pool": ("average", "token"), "norm_pooled": ANY, "layer_scale": (True,)}
SUPPORTED: dict[str, dict[str, Any]] = {
    "ViT": _VIT,
    "ViTHybrid": _VIT | {"stem": ANY},
    "DeiT": _VIT | {"distillation": ANY, "registers": ANY},
    "CLIP": {"projection": ANY},
    "SigLIP": {"pool": ("attention",)},
    "DINOv2": _DINOV2,
    "DINOv2 with registers": _DINOV2 | {"registers": ANY},
    "DINOv3": _DINO | {"posemb": ("none",), "registers": ANY, "block_bias": ("all", "no_k", "no_qkv")},
    "I-JEPA": {"pool": ("average",)},
    "BEiT": _BEIT | {"block_bias": ("no_k",)},
    "AIMv2": {"pool": ("average",), "gated": (True,)},
}


@dataclass(frozen=True)
class Kind:
    """A model class: its names, and the defaults of its code."""

    name: str
    model_type: str
    headless: str  # the class without a head
    headed: str
    section: str  # of parameter_names/transformers.ini
    prefix: str  # of the names, in classes with a head
    eps: str
    activation: str
    heads: str


_rows = csv.DictReader(Path(__file__).with_name("transformers_classes.csv").read_text(encoding="utf-8").splitlines())
KINDS = {row["name"]: Kind(**row) for row in _rows}


def choose_kind(config: ViTConfig) -> Kind:
    """The class that a model is written as: the first whose condition holds."""
    registers = " with registers" if config.registers else ""
    is_dinov2 = config.layer_scale is not None and (not config.classes or config.pool == "token+average")
    conditions = {
        "ViTHybrid": config.stem is not None,
        "BEiT": config.posemb == "bias",
        "DINOv3": config.rotary != "none",
        "AIMv2": config.norm_kind == "rms",
        "CLIP": config.norm_embedding != "none",
        "SigLIP": config.pool == "attention",
        f"DINOv2{registers}": is_dinov2,
        "I-JEPA": not config.class_token,
        "DeiT": config.distillation or (config.registers == 1 and config.posemb_prefix == "all"),
    }
    return KINDS[next((name for name, holds in conditions.items() if holds), "ViT")]


def default_processor(kind: Kind, *, masked: bool, channels: int) -> dict[str, Any]:
    """The settings that published weights of a class come with; `masked`: ViTMAE."""
    default = SQUASH | PIXELS if masked else USUAL.get(kind.name, SQUASH)
    return default if channels == 3 else default | HALF_PIXELS


def add_defaults(processor: Mapping[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Adds the defaults of the processor's class to its settings, or `default` if it names no class."""
    name = processor.get("image_processor_type") or processor.get("feature_extractor_type") or ""
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)\w*$", "", str(name))
    return PROCESSORS.get(kind, default) | {key: value for key, value in processor.items() if value is not None}


def read_pixels(processor: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std for pixels in [0, 1]; the processor may state them for other ranges."""
    mean, std = tuple(processor["image_mean"]), tuple(processor["image_std"])
    if not processor.get("do_normalize", True):
        mean, std = (0.0,), (1.0,)
    scale = 255 * processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 255.0
    if math.isclose(scale, 1):
        return mean, std
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def read_preprocess(processor: Mapping[str, Any]) -> tuple[Preprocess, str]:
    """(our settings, problem): a square resize and the reason, if ours cannot describe what the processor does."""
    stated = processor["size"]
    size: dict[str, Any] = stated if isinstance(stated, dict) else dict.fromkeys(processor["sides"], stated)
    crop = processor.get("crop_size") if processor.get("do_center_crop") else None
    prepared = Preprocess(interpolation=RESAMPLING.get(processor["resample"], "bilinear"))
    if processor["resample"] not in RESAMPLING:
        return prepared, f"resample {processor['resample']} is not supported"
    if not processor.get("do_resize", True):
        return prepared, "the processor does not resize"
    squash = {"height", "width"} <= size.keys()
    if squash and crop is None:
        return prepared, ""
    if crop is not None and (squash or list(size) == ["shortest_edge"]):
        height, width = pair(crop if isinstance(crop, int) else (crop["height"], crop["width"]))
        tall = size["height"] if squash else size["shortest_edge"]
        wide = size["width"] if squash else size["shortest_edge"]
        kept = height / tall
        if kept <= 1 and math.floor(width / kept + 1e-6) == wide:  # one fraction describes both sides
            if squash:
                return prepared.replace(resize="squash" if kept == 1 else "squash-crop", crop=kept), ""
            return prepared.replace(resize="crop", crop=kept), ""
    return prepared, f"the processor resizes to {size} and crops {crop or 'nothing'}"


def read_class_names(config: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """id2label, unless it is the library's default LABEL_0, LABEL_1 ..."""
    labels = config.get("id2label") or {}
    names = tuple(str(labels.get(str(number), "")) for number in range(classes))
    return () if not names or not all(names) or names[0] == "LABEL_0" else names


def _describe_crop(size: dict[str, int], crop: float, *, squash: bool) -> dict[str, Any]:
    """A center crop by CLIP's processor, which resizes the short side, or by DeiT's, which ignores the aspect ratio.

    DeiT's also serves models of images that are not square: it is exact for photos of their aspect ratio.
    """
    larger = {side: math.floor(value / crop + 1e-6) for side, value in size.items()}
    cut = {"do_center_crop": True, "crop_size": size}
    if squash or size["height"] != size["width"]:
        return cut | {"image_processor_type": "DeiTImageProcessor", "size": larger}
    return cut | {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": larger["height"]}}


def make_sidecars(config: ViTConfig, about: About, dtype: str) -> dict[str, dict[str, Any]]:
    """config.json and preprocessor_config.json, as the library reads them."""
    return {
        "config.json": _make_config(config, about, dtype),
        "preprocessor_config.json": _make_processor(config, about),
    }


def _make_config(config: ViTConfig, about: About, dtype: str) -> dict[str, Any]:
    kind = choose_kind(config)
    names = list(about.class_names) or [f"LABEL_{number}" for number in range(config.classes)]
    architecture = kind.headed if config.classes or config.projection else kind.headless
    described = {
        "architectures": [architecture + ("WithTeacher" if config.distillation else "")],
        "model_type": kind.model_type,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == config.activation),
        "rms_norm_eps" if kind.name == "AIMv2" else "layer_norm_eps": config.norm_eps,
        "image_size": _one_or_both(config.image_size),
        "patch_size": _one_or_both(config.patch),
        "num_channels": config.channels,
        "dtype": dtype,
    }
    if kind.name in ("ViT", "ViTHybrid", "DeiT", "I-JEPA", "BEiT"):
        described |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "qkv_bias": True}
    if config.classes:
        described["id2label"] = {str(number): name for number, name in enumerate(names)}
        described["label2id"] = {name: number for number, name in enumerate(names)}
    if config.representation:
        described |= {"pooler_output_size": config.representation, "pooler_act": "tanh"}
    return described | _describe_parts(kind.name, config)


def _one_or_both(sides: tuple[int, int]) -> int | list[int]:
    return sides[0] if sides[0] == sides[1] else list(sides)


def _describe_parts(kind: str, config: ViTConfig) -> dict[str, Any]:
    """The settings that only one class has."""
    if config.stem:
        return _describe_stem(config.stem, config.image_size)
    if kind == "CLIP":
        return {"projection_dim": config.projection or 512}
    if kind.startswith("DINOv2"):
        registers = {"num_register_tokens": config.registers} if config.registers else {}
        return {"mlp_ratio": find_mlp_ratio(config), "use_swiglu_ffn": config.gated, "qkv_bias": True} | registers
    if kind == "DINOv3":
        biases = {"query_bias": config.block_bias != "no_qkv", "value_bias": config.block_bias != "no_qkv"}
        biases |= {"key_bias": config.block_bias == "all", "proj_bias": True, "mlp_bias": True}
        return biases | {"num_register_tokens": config.registers, "use_gated_mlp": config.gated, "rope_theta": 100.0}
    if kind == "BEiT":
        return {"use_relative_position_bias": True, "use_mean_pooling": config.norm_pooled}
    if kind == "AIMv2":
        return {"use_head": False, "qkv_bias": False, "mlp_bias": False, "is_native": False}
    return {}


def _describe_stem(stem: ResNetConfig, image_size: tuple[int, int]) -> dict[str, Any]:
    """The BiT backbone of a ViTHybrid."""
    stages = len(stem.blocks)
    backbone = {
        "model_type": "bit",
        "layer_type": "bottleneck",
        "depths": list(stem.blocks),
        "hidden_sizes": [256 * stem.widen * 2**stage for stage in range(stages)],
        "embedding_size": 64 * stem.widen,
        "global_padding": "same",
        "embedding_dynamic_padding": True,
        "out_features": [f"stage{stages}"],
    }
    feature_map = [1, stem.width, *(side // stem.stride for side in image_size)]
    return {"backbone_config": backbone, "backbone_featmap_shape": feature_map}


def find_mlp_ratio(config: ViTConfig) -> int | None:
    """DINOv2's mlp_ratio, a whole number; a gated MLP has two thirds of that width, up to a multiple of 8."""
    for ratio in range(1, 17):
        width = ratio * config.width
        if config.mlp_dim == ((int(width * 2 / 3) + 7) // 8 * 8 if config.gated else width):
            return ratio
    return None


def _make_processor(config: ViTConfig, about: About) -> dict[str, Any]:
    is_deit = config.distillation or config.registers > 0
    prepared: dict[str, Any] = {
        "image_processor_type": "DeiTImageProcessor" if is_deit else "ViTImageProcessor",
        "do_resize": True,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config.mean),
        "image_std": list(config.std),
        "resample": next(n for n, name in RESAMPLING.items() if name == about.preprocess.interpolation),
        "size": {"height": config.image_size[0], "width": config.image_size[1]},
    }
    if about.preprocess.resize != "squash":
        squash = about.preprocess.resize == "squash-crop"
        prepared |= _describe_crop(prepared["size"], about.preprocess.crop, squash=squash)
    return prepared
