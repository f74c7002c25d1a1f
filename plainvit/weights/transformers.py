"""transformers' ViT and DeiT: a folder with config.json and preprocessor_config.json, or the weights alone.

Version 5 renamed the modules but still writes the old names to disk: both are read, the old ones written. The weights
do not contain the number of heads; config.json does, with the activation, LayerNorm's epsilon and the image size.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from plainvit.config import About, Model, ResNetConfig, ViTConfig, nearest, pair
from plainvit.weights.files import Tensors
from plainvit.weights.grids import Hints, count_layers, read_grid, read_heads, unsupported_model
from plainvit.weights.layout import LEADING_AXIS, PATCHES, DetectedModel, Layout, entry, linear, list_assumptions
from plainvit.weights.timm import IMAGENET_MEAN, IMAGENET_STD

PATCH_KERNEL = "embeddings.patch_embeddings.projection.weight"
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "gelu_sigmoid", "relu": "relu"}
SPELLINGS = {**ACTIVATIONS, "gelu_new": "gelu_tanh", "gelu_python": "gelu"}
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Defaults of the image processors. `sides`: the meaning of a single number as `size`
SQUASH = {"resample": 2, "sides": ("height", "width"), "size": 224, "image_mean": (0.5,), "image_std": (0.5,)}
SQUASH_CROP = SQUASH | {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224}
SHORT_SIDE = SQUASH_CROP | {"sides": ("shortest_edge",), "size": 224, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
PROCESSORS = {"ViT": SQUASH, "DeiT": SQUASH_CROP, "CLIP": SHORT_SIDE, "Bit": SHORT_SIDE, "ViTHybrid": SHORT_SIDE}
UNSUPPORTED_NAMES = {
    "layer_scale1.": "transformers' DINOv2: load DINOv2's own file instead",
    "relative_position_bias": "transformers' BEiT",
    "rope_embeddings": "transformers' DINOv3",
}


def vit_layout(
    prefix: str = "vit.", *, new: bool = False, teacher: bool = False, token: str = "distillation_token"
) -> Layout:
    """Names of a ViT or DeiT; `token` is our name of DeiT's second token: a register if no head reads it."""
    block = prefix + ("layers.{i}." if new else "encoder.layer.{i}.")
    inner = f"{block}attention." if new else f"{block}attention.attention."
    parts = ("q_proj.", "k_proj.", "v_proj.") if new else ("query.", "key.", "value.")
    embeddings = f"{prefix}embeddings."
    return {
        **linear("embedding", f"{embeddings}patch_embeddings.projection.", conversion=PATCHES),
        "class_token": entry(f"{embeddings}cls_token", conversion=LEADING_AXIS),
        token: entry(f"{embeddings}distillation_token", conversion=LEADING_AXIS),
        "positions.0.table": entry(f"{embeddings}position_embeddings", conversion=LEADING_AXIS),
        **linear("blocks.{i}.norm1", f"{block}layernorm_before."),
        **linear("blocks.{i}.attention.qkv", *(inner + part for part in parts)),
        **linear("blocks.{i}.attention.out", f"{block}attention.{'o_proj' if new else 'output.dense'}."),
        **linear("blocks.{i}.norm2", f"{block}layernorm_after."),
        **linear("blocks.{i}.mlp.fc1", f"{block}{'mlp.fc1' if new else 'intermediate.dense'}."),
        **linear("blocks.{i}.mlp.fc2", f"{block}{'mlp.fc2' if new else 'output.dense'}."),
        **linear("norm", f"{prefix}layernorm."),
        **linear("pre_logits", f"{prefix}pooler.dense."),
        **linear("head", "cls_classifier." if teacher else "classifier."),
        **linear("head_distillation", "distillation_classifier."),
    }


def matches(tensors: Tensors) -> bool:
    return any(name == PATCH_KERNEL or name.endswith(f".{PATCH_KERNEL}") for name in tensors.shapes)


def find(tensors: Tensors, hints: Hints, config: Mapping[str, Any], processor: Mapping[str, Any]) -> DetectedModel:
    """`config` and `processor` are config.json and preprocessor_config.json, or {}."""
    for pattern, what in UNSUPPORTED_NAMES.items():
        culprit = next((name for name in tensors.shapes if pattern in name), None)
        if culprit:
            raise unsupported_model(what, culprit)
    prefix = next(name for name in tensors.shapes if name.endswith(PATCH_KERNEL)).removesuffix(PATCH_KERNEL)
    if prefix not in ("vit.", "deit.", ""):
        raise unsupported_model(f"a model with a ViT inside, under {prefix!r}", PATCH_KERNEL)
    shapes = {name.removeprefix(prefix): shape for name, shape in tensors.shapes.items()}
    new = any(name.startswith("layers.") for name in shapes)
    block, fc1 = ("layers.", "mlp.fc1") if new else ("encoder.layer.", "intermediate.dense")
    if len(shapes[PATCH_KERNEL]) != 4 or len(shapes.get(f"{block}0.{fc1}.weight", ())) != 2:
        raise ValueError("this transformers file has no valid patch projection or first layer: it is incomplete")
    if not config.get("qkv_bias", True):
        raise unsupported_model("a ViT without biases on q, k and v", "qkv_bias in config.json")
    hidden = shapes.get("pooler.dense.weight", (0,))[0]
    if hidden and config.get("pooler_act", "tanh") != "tanh":
        raise unsupported_model("a ViT whose pooler is not tanh", "pooler_act in config.json")
    width, channels, *patch = shapes[PATCH_KERNEL]
    second, teacher = "embeddings.distillation_token" in shapes, "distillation_classifier.weight" in shapes
    family = "transformers DeiT" if second or prefix == "deit." else "transformers ViT"
    decoder = any(name.startswith("decoder.") for name in shapes)  # ViTMAE: its encoder is a ViT
    rows = shapes["embeddings.position_embeddings"][1] if "embeddings.position_embeddings" in shapes else None
    size = read_grid(rows, (patch[0], patch[1]), (1 + second,), _add_config_grid(hints, config, (patch[0], patch[1])))
    if config.get("num_attention_heads"):
        heads, heads_source = config["num_attention_heads"], "config.json"
    else:
        heads, heads_source = read_heads(width, hints, family)
    head = shapes.get("cls_classifier.weight") or shapes.get("classifier.weight") or (0,)
    default = SQUASH_CROP if family == "transformers DeiT" else SQUASH
    if channels == 3 and (decoder or default is SQUASH_CROP):
        default = default | {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
    settings = _add_defaults(processor, default) if processor else default
    mean, std = _read_pixels(settings)
    preprocess, problem = _read_preprocess(settings)
    model = ViTConfig(
        width=width,
        depth=count_layers(shapes, re.escape(block) + r"(\d+)\."),
        heads=heads,
        mlp_dim=shapes[f"{block}0.{fc1}.weight"][0],
        patch=(patch[0], patch[1]),
        image_size=size.image_size,
        channels=channels,
        classes=head[0],
        representation=hidden,
        distillation=teacher,
        registers=int(second and not teacher),  # a token that no head reads
        posemb_prefix="all" if second and not teacher else "class",
        norm_eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=_read_activation(config),
        mean=mean,
        std=std,
    )
    source = "config.json" if config else f"{family}'s default"
    pixels = "preprocessor_config.json" if processor else f"assumed: {family}'s usual processor"
    sources = {"activation": source, "norm_eps": source, "heads": heads_source, "image_size": size.source}
    sources |= {"mean": pixels, "preprocess": f"assumed: a square resize, since {problem}" if problem else pixels}
    return DetectedModel(
        family=family,
        config=model,
        layout=vit_layout(prefix, new=new, teacher=teacher, token="distillation_token" if teacher else "registers"),
        sources=sources,
        about={"preprocess": preprocess, "class_names": _read_class_names(config, head[0])},
        ignore=lambda name: name.endswith("embeddings.mask_token") or name.startswith("decoder."),
        notes=list_assumptions(sources) + (["left out what is not the encoder: decoder"] if decoder else []),
    )


def _add_config_grid(hints: Hints, config: Mapping[str, Any], patch: tuple[int, int]) -> Hints:
    """Adds the grid of config.json's image size, square or not."""
    size = config.get("image_size")
    if hints.grid or size is None:
        return hints
    height, width = pair(size)
    return Hints(heads=hints.heads, grid=(height // patch[0], width // patch[1]))


def _read_activation(config: Mapping[str, Any]) -> Any:
    name = config.get("hidden_act", "gelu")
    if name not in SPELLINGS:
        raise ValueError(f"hidden_act {name!r} in config.json is not supported; {nearest(str(name), SPELLINGS)}")
    return SPELLINGS[name]


def _add_defaults(processor: Mapping[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Adds the defaults of the processor's class to its settings, or `default` if it names no class."""
    name = processor.get("image_processor_type") or processor.get("feature_extractor_type") or ""
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)\w*$", "", str(name))
    return PROCESSORS.get(kind, default) | {key: value for key, value in processor.items() if value is not None}


def _read_pixels(processor: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std for pixels in [0, 1]; the processor may state them for other ranges."""
    mean, std = tuple(processor["image_mean"]), tuple(processor["image_std"])
    if not processor.get("do_normalize", True):
        mean, std = (0.0,), (1.0,)
    scale = 255 * processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 255.0
    if math.isclose(scale, 1):
        return mean, std
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _read_preprocess(processor: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(our settings, problem): a square resize and the reason, if ours cannot describe what the processor does."""
    size, crop = processor["size"], processor.get("crop_size") if processor.get("do_center_crop") else None
    size: dict[str, Any] = size if isinstance(size, dict) else dict.fromkeys(processor["sides"], size)
    prepared = {"resize": "squash", "interpolation": RESAMPLING.get(processor["resample"], "bilinear")}
    if processor["resample"] not in RESAMPLING:
        return prepared, f"resample {processor['resample']} is not supported"
    if not processor.get("do_resize", True):
        return prepared, "the processor does not resize"
    squash = {"height", "width"} <= size.keys()
    if squash and crop is None:
        return prepared, ""
    if crop is not None and (squash or list(size) == ["shortest_edge"]):
        height, width = pair(crop if isinstance(crop, int) else (crop["height"], crop["width"]))
        tall, wide = (size["height"], size["width"]) if squash else (size["shortest_edge"],) * 2
        kept = height / tall
        if kept <= 1 and math.floor(width / kept + 1e-6) == wide:  # one fraction describes both sides
            resize = "crop" if not squash else "squash" if kept == 1 else "squash-crop"
            return prepared | {"resize": resize, "crop": kept}, ""
    return prepared, f"the processor resizes to {size} and crops {crop or 'nothing'}"


def _read_class_names(config: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """id2label, unless it is the library's default LABEL_0, LABEL_1 ..."""
    labels = config.get("id2label") or {}
    names = tuple(str(labels.get(str(number), "")) for number in range(classes))
    return () if not names or not all(names) or names[0] == "LABEL_0" else names


def layout_for(config: Model) -> Layout:
    assert isinstance(config, ViTConfig)
    second = config.distillation or config.registers == 1
    prefix = "" if not config.classes else "deit." if second else "vit."
    token = "distillation_token" if config.distillation else "registers"
    return vit_layout(prefix, teacher=config.distillation, token=token)


def list_unsupported(config: Model) -> Iterator[tuple[str, str]]:
    """(part, reason) for what transformers' ViT or DeiT does not have."""
    if isinstance(config, ResNetConfig):
        yield "resnet", "plainvit does not write transformers' BiT"
        return
    if config.stem:
        yield "stem", "transformers has no hybrid ViT"
    if config.pool != "token" or config.norm_pooled:
        yield "pool", "transformers' ViT reads the class token"
    if config.representation and config.classes:
        yield "pre_logits", "transformers' classifier has no hidden layer"
    if config.posemb != "1d" or config.posemb_prefix == "none":
        yield "posemb", "transformers' ViT has a learned 1-D table with a row for the class token"
    if config.registers > 1 or (config.registers and (config.posemb_prefix != "all" or config.distillation)):
        yield "registers", "transformers' ViT has none"
    if config.layer_scale is not None:
        yield "layer_scale", "transformers' ViT has none"


def _describe_crop(size: dict[str, int], crop: float, *, squash: bool) -> dict[str, Any]:
    """A centre crop by CLIP's processor, which resizes the short side, or by DeiT's, which ignores the aspect ratio.

    DeiT's also serves models of images that are not square: it is exact for photos of their aspect ratio.
    """
    larger = {side: math.floor(value / crop + 1e-6) for side, value in size.items()}
    cut = {"do_center_crop": True, "crop_size": size}
    if squash or size["height"] != size["width"]:
        return cut | {"image_processor_type": "DeiTImageProcessor", "size": larger}
    return cut | {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": larger["height"]}}


def make_sidecars(config: ViTConfig, about: About, dtype: str) -> dict[str, dict[str, Any]]:
    """config.json and preprocessor_config.json, as the library reads them."""
    deit = bool(config.distillation or config.registers)
    kind = "DeiT" if deit else "ViT"
    head = "Model" if not config.classes else "ForImageClassification" + ("WithTeacher" if config.distillation else "")
    names = list(about.class_names) or [f"LABEL_{number}" for number in range(config.classes)]
    square = config.image_size[0] == config.image_size[1], config.patch[0] == config.patch[1]
    described = {
        "architectures": [kind + head],
        "model_type": kind.lower(),
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == config.activation),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps,
        "image_size": config.image_size[0] if square[0] else list(config.image_size),
        "patch_size": config.patch[0] if square[1] else list(config.patch),
        "num_channels": config.channels,
        "qkv_bias": True,
        "dtype": dtype,
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    if config.representation:
        described |= {"pooler_output_size": config.representation, "pooler_act": "tanh"}
    prepared: dict[str, Any] = {
        "image_processor_type": f"{kind}ImageProcessor",
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
    return {"config.json": described, "preprocessor_config.json": prepared}
