"""Files with timm's names, which DeiT, DeiT III, MAE, DINO and DINOv2 share; parameter_names/timm.ini has the names.

Such a file does not contain its heads, nor the image size of a square grid; config.json next to it (as on the hub)
does. Models that share the names but compute something that plainvit does not are rejected by the part.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from plainvit.config import Model, Preprocess, ResNetConfig, ViTConfig, nearest
from plainvit.weights.files import Tensors
from plainvit.weights.layout import SAME, DetectedModel, Entry, Layout, Shapes, make_layout
from plainvit.weights.pixels import CLIP, HALF, IMAGENET
from plainvit.weights.shapes import BLOCK, Hints, check_names, read_bit, read_vit, unsupported_model
from plainvit.weights.supported import list_unlike, list_unlike_resnet
from plainvit.weights.timm_architectures import (
    ACTIVATIONS,
    SUPPORTED,
    check_architecture,
    choose_kind,
    choose_name_parts,
    load_architectures,
    read_class_names,
    read_preprocess,
    uses_eva,
)

# Names of weights that only models other than a plain ViT have
UNSUPPORTED_NAMES = {
    r"layers\.0\.blocks\.": "Swin",
    r"patch_embed\.backbone\.(?!stem\.|stages\.|conv\.|norm\.)": "a hybrid whose stem is not BiT's ResNet",
    r"^rel_pos_bias": "BEiT with one relative position bias for all layers",
    r"rel_pos\.": "a ViT with relative positions by an MLP or a table of its own",
    r"attn\.rel_pos_[hw]|neck\.0": "SAM, with windows and relative positions",
    r"rope\.freqs": "a ViT with learned rotary frequencies",
    r"blocks\.0\.0\.": "a DINOv2 training checkpoint with chunked blocks",
    r"blocks\.0\.(attn\.)?lambda_": "a ViT with differential attention",
    r"blocks\.0\.(attns\.|in_proj\.)": "a ViT with parallel blocks",
    r"blocks\.0\.attn\.(k_proj\.bias|gate\.)": "a ViT with gated or grouped attention",
}
# (fraction of the short side that the center crop keeps, mean and std of the pixels); of DeiT, MAE and the DINOs:
USUAL_PIXELS = (0.875, IMAGENET)
PIXELS: dict[str, tuple[float, dict[str, Any]]] = {
    "timm": (0.9, HALF),
    "DeiT III": (1.0, IMAGENET),
    "CLIP": (1.0, CLIP),
    "EVA": (0.9, CLIP),
    "BEiT": (0.9, HALF),
}
# (start of a name, family, reason), the first that a file has; before them, rotary positions show DINOv3 and EVA
SIGNS = (
    ("norm_pre.weight", "CLIP", "it has a norm before the blocks"),
    ("blocks.0.attn.relative_position_bias_table", "BEiT", "it has relative position biases"),
    ("blocks.0.attn.q_bias", "EVA", "its keys have no bias"),
    ("blocks.0.attn.q_proj", "EVA", "its keys have no bias"),
    ("blocks.0.gamma_1", "DeiT III", "its LayerScale is named gamma_1"),
    ("register_tokens", "DINOv2", "it has DINOv2's register tokens"),
    ("decoder_", "MAE", "it has a decoder"),
)
# Names of weights that are for the training of MAE, DINO or DINOv2, not for the encoder
TRAINING = ("decoder_", "head.mlp.", "head.last_layer.", "local_cls_norm.")
OPTIONAL = ("projection", "distillation", "registers", "layer_scale", "gated", "qk_norm", "block_bias")
OPTIONAL += ("norm_kind", "norm_embedding", "norm_inner", "norm_final")
MASKED_BIAS = ("blocks.{i}.attn.qkv.bias[0/3]", "blocks.{i}.attn.qkv.bias[2/3]")
# Names of values that follow from the shape of the model: BEiT's index, DINOv3's frequencies and mask
BUFFERS = ("relative_position_index", "attn.qkv.bias_mask", "rope_embed.periods", "rope.freqs_cis")


def matches(tensors: Tensors) -> bool:
    names = tensors.shapes.keys()
    is_hybrid = any(name.startswith("patch_embed.backbone.") for name in names)
    is_bit = {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names
    return is_hybrid or is_bit or "patch_embed.proj.weight" in names


def detect(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any]) -> DetectedModel:
    """The model of a file with these names; `sidecar` is config.json as timm writes it for the hub."""
    check_names(tensors.shapes, UNSUPPORTED_NAMES)
    if "stem.conv.weight" in tensors.shapes:
        return _detect_bit(tensors, sidecar)
    detected = _detect_vit(tensors, hints, sidecar, _find_family(tensors, sidecar))
    if detected.family == "DeiT III" and tensors.wrapper != "model":  # DeiT III's code saves "model"
        detected.sources["rotary"] = "assumed: none; some of timm's ViTs with rotary positions have the same names"
    return detected


def _detect_bit(tensors: Tensors, sidecar: Mapping[str, Any]) -> DetectedModel:
    published = sidecar.get("pretrained_cfg") or {}
    check_names(tensors.shapes, {r"running_mean$|^stem\.norm\.": "a ResNet that is not BiT"})
    if "stages.0.blocks.0.conv3.weight" not in tensors.shapes:
        raise unsupported_model("a ResNet that is not BiT", "no stages.0.blocks.0.conv3.weight")
    check_architecture(str(sidecar.get("architecture") or ""))
    layout = make_layout("timm BiT", tensors.shapes)
    size = published.get("input_size") or (3, 224, 224)
    colors = {name: tuple(published.get(name) or HALF[name]) for name in HALF}
    config = read_bit(layout, tensors.shapes, "timm").replace(image_size=(int(size[1]), int(size[2])), **colors)
    sources = {
        "standardize": "timm's code: w / sqrt(var + 1e-8)",
        "padding": "timm's code: symmetric, zeros before the root's pooling",
        "preprocess": "config.json" if published else "assumed: BiT's evaluation, a square resize",
        "norm_eps": "timm's code: 1e-5",
        "image_size": "config.json" if published.get("input_size") else "convolutions take any size",
        "mean": "config.json" if published.get("mean") else "timm's BiT: pixels in [-1, 1]",
    }
    preprocess = read_preprocess(sidecar, 1.0) if published else Preprocess()
    return DetectedModel("timm", config, layout, sources, preprocess, read_class_names(sidecar))


def _find_family(tensors: Tensors, sidecar: Mapping[str, Any]) -> tuple[str, str]:
    """(family, reason). The family decides the normalization of pixels, which the weights do not show."""
    names, rotary = tensors.shapes, _assume_rotary(tensors.shapes)
    if sidecar.get("pretrained_cfg"):
        return "timm", "config.json"
    if "dist_token" in names:
        return "DeiT", "it has a distillation token"
    if rotary == "dinov3":
        return "DINOv3", "it has register tokens and no positions"
    if "mask_token" in names and "blocks.0.ls1.gamma" in names:
        return "DINOv2", "it has DINOv2's mask token"
    if rotary == "eva02":
        return "EVA", "its gated MLP is EVA-02's"
    for start, family, reason in SIGNS:
        if any(name.startswith(start) for name in names):
            return family, reason
    if "mask_token" in names:
        return "MAE", "it has a mask token"
    if tensors.wrapper in ("teacher", "student"):
        return "DINO", f"its weights are under {tensors.wrapper!r}"
    if tensors.wrapper == "model":
        headless = "head.weight" not in names
        table = tensors.read("pos_embed") if "pos_embed" in names else None
        if "fc_norm.weight" in names or (headless and table is not None and not table[0, 0].any()):
            return "MAE", "its weights are under 'model', with fixed positions or an averaged head"
        return "DeiT", "its weights are under 'model', as in DeiT's files"
    if tensors.wrapper == "" and "head.weight" not in names:
        return "DINO", "assumed: a bare PyTorch file without a head"
    return "timm", "assumed: timm's names without config.json"


def _detect_vit(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any], family: tuple[str, str]) -> DetectedModel:
    shapes, (name, reason) = tensors.shapes, family
    arguments, published = sidecar.get("model_args") or {}, sidecar.get("pretrained_cfg") or {}
    _check_arguments(arguments)
    check_architecture(str(sidecar.get("architecture") or ""))
    layout = make_layout("timm", shapes)
    if "blocks.0.attn.qkv.bias_mask" in shapes:  # DINOv3's own files store a bias of k, and do not use it
        layout[f"{BLOCK}attention.qkv.bias"] = Entry(MASKED_BIAS, SAME)
    known = load_architectures().get(str(sidecar.get("architecture")), {})
    rotary = known.get("rotary") or _assume_rotary(shapes)
    hints = _add_stated(hints, sidecar, known.get("heads"))
    settings, sources = read_vit(layout, shapes, name, hints, optional=OPTIONAL, rows="any", rotary=rotary)
    settings |= {"rotary": rotary, "embedding_bias": "norm_pre.weight" not in shapes}
    numerics, numerics_sources = _read_numerics(settings, sidecar, name)
    settings |= numerics
    settings["pool"], pool_source = _find_pool(shapes, arguments.get("global_pool") or sidecar.get("global_pool"))
    settings["norm_pooled"] = "fc_norm.weight" in shapes and "norm.weight" not in shapes
    crop, colors = PIXELS.get(name, USUAL_PIXELS)
    colors = colors if settings["channels"] == 3 else HALF
    settings |= {key: tuple(published.get(key) or colors[key]) for key in colors}
    config = ViTConfig(**settings)
    sources |= numerics_sources | pool_source | _describe_sources(config, sidecar, f"{name} ({reason})")
    left_out = sorted({key.split(".")[0] for key in shapes if _is_training_only(key)})
    return DetectedModel(
        family=name,
        config=config,
        layout=layout,
        sources=sources,
        preprocess=read_preprocess(sidecar, 1.0 if name == "timm" and config.image_size[0] >= 384 else crop),
        class_names=read_class_names(sidecar),
        ignore=lambda key: _is_training_only(key) or key.endswith(BUFFERS),
        notes=[f"left out what is not the encoder: {', '.join(left_out)}"] if left_out else [],
    )


def _add_stated(hints: Hints, sidecar: Mapping[str, Any], heads: int | None) -> Hints:
    """Adds the image size and the heads of config.json; `heads` are the architecture's own."""
    arguments, published = sidecar.get("model_args") or {}, sidecar.get("pretrained_cfg") or {}
    size = arguments.get("img_size")
    if not size and published.get("input_size"):
        size = tuple(published["input_size"])[1:]  # after the channels
    heads = arguments.get("num_heads", heads)
    if hints.heads or heads is None:
        return replace(hints, stated_size=size)
    return replace(hints, stated_size=size, stated_heads=(heads, "config.json"))


def _describe_sources(config: ViTConfig, sidecar: Mapping[str, Any], family_and_reason: str) -> dict[str, str]:
    """The sources of pixels, and of what neither the weights nor timm's config.json show."""
    published = sidecar.get("pretrained_cfg") or {}
    sources = {"mean": "config.json" if published.get("mean") else family_and_reason}
    sources["preprocess"] = "config.json" if published else family_and_reason
    if published.get("crop_mode") not in (None, "center", "squash"):
        sources["preprocess"] = f"assumed: a center crop instead of timm's crop_mode {published['crop_mode']!r}"
    if config.posemb == "none" and config.rotary == "none":
        sources["posemb"] = "assumed: none, since the file has no pos_embed"
    if not sidecar and config.block_bias != "all" and not config.gated:  # the same names as in timm's post-norm blocks
        sources["norm"] = "assumed: before attention and MLP"
    if config.stem:
        sources["stem"] = "timm's code: SAME padding, w / sqrt(var + 1e-8), GroupNorm 1e-5"
    # timm drops the last pixels of images that patches do not fill; plainvit prepares smaller images
    stated = tuple(published.get("input_size") or ())[-2:]
    pairs = zip(stated, config.image_size, config.stride, strict=False)
    if any(0 < larger - side < step for larger, side, step in pairs):
        theirs, ours = (" x ".join(map(str, sides)) for sides in (stated, config.image_size))
        sources["image_size"] = f"assumed: {ours} images; timm prepares {theirs} and drops the last rows and columns"
    return sources


def _is_training_only(name: str) -> bool:
    return name == "mask_token" or name.startswith(TRAINING)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Rejects arguments that change what timm computes, but no weight's name or shape."""
    usual = {"norm_layer": (None, "layernorm"), "pool_include_prefix": (None, False)}
    for name, values in usual.items():
        if arguments.get(name) not in values:
            raise unsupported_model(f"a ViT with {name} {arguments[name]!r}", "model_args in config.json")


def _find_pool(shapes: Shapes, stated: object) -> tuple[Any, dict[str, str]]:
    """(pool, source) from the weights; where they allow both, config.json decides, and fc_norm implies the average."""
    if stated not in (None, "", "token", "avg", "map"):
        raise unsupported_model(f"a ViT pooled by {stated!r}", "global_pool in config.json")
    if "attn_pool.latent" in shapes:
        return "attention", {}
    fc_norm = "fc_norm.weight" in shapes and "norm.weight" not in shapes
    if stated == "avg" or (fc_norm and stated != "token") or "cls_token" not in shapes:
        return "average", {}
    return "token", {} if stated else {"pool": "assumed: the class token"}


def _assume_rotary(shapes: Shapes) -> str:
    """The rotary positions of a family whose weights look like this; the weights do not contain them."""
    if "rope_embed.periods" in shapes or "storage_tokens" in shapes:
        return "dinov3"
    if "norm_pre.weight" in shapes:
        is_clip = "norm.weight" in shapes and "attn_pool.latent" not in shapes
        return "none" if is_clip else "pe"
    has_positions = "pos_embed" in shapes or "blocks.0.attn.relative_position_bias_table" in shapes
    if "blocks.0.gamma_1" in shapes and not has_positions:
        if "cls_token" not in shapes:
            return "eva02"
        return "dinov3" if "reg_token" in shapes else "axial"
    return "eva02" if _is_eva02(shapes) else "none"


def _is_eva02(shapes: Shapes) -> bool:
    """Whether the MLPs have a gate, as a layer of its own or packed into fc1 next to keys without biases."""
    if "blocks.0.mlp.fc1_g.weight" in shapes or "blocks.0.mlp.w1.weight" in shapes:
        return True
    fc1, fc2 = (shapes.get(f"blocks.0.mlp.{name}.weight", ()) for name in ("fc1", "fc2"))
    return len(fc1) == len(fc2) == 2 and fc1[0] == 2 * fc2[1] and "blocks.0.attn.q_bias" in shapes


def _read_numerics(
    settings: Mapping[str, Any], sidecar: Mapping[str, Any], family: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """(numerics, sources) of what no weight shows: activation, epsilon, rotary positions."""
    name = str(sidecar.get("architecture") or "")
    known = load_architectures().get(name)
    if known:
        numerics = {key: value for key, value in known.items() if key != "heads"}
        if numerics["activation"] in ("gelu", "silu"):  # timm's gated MLPs have SiLU, those from model_args too
            numerics["activation"] = "silu" if settings["gated"] else "gelu"
        sources = dict.fromkeys(numerics, f"config.json: timm's {name}")
    else:
        numerics, sources = _assume_numerics(settings, family)
    activation = (sidecar.get("model_args") or {}).get("act_layer")
    if activation is not None:
        if activation not in ACTIVATIONS:
            known_names = nearest(str(activation), ACTIVATIONS)
            raise ValueError(f"act_layer {activation!r} in config.json is not supported; {known_names}")
        numerics["activation"], sources["activation"] = ACTIVATIONS[activation], "config.json"
    return numerics, sources


def _assume_numerics(settings: Mapping[str, Any], family: str) -> tuple[dict[str, Any], dict[str, str]]:
    rotary, coarse = settings["rotary"], has_coarse_norms(settings)
    if rotary == "pe":
        raise unsupported_model("a Perception Encoder without config.json, whose rotary grid is unknown", "norm_pre")
    activation, activation_name = ("silu", "SiLU") if settings["gated"] else ("gelu", "exact GELU")
    eps = 1e-5 if coarse else 1e-6
    code = "assumed: timm's default" if family in ("timm", "CLIP") or coarse else f"{family}'s code"
    numerics = {"activation": activation, "norm_eps": eps, "rotary_grid": 16}
    sources = {"activation": f"{code}, {activation_name}", "norm_eps": f"{code}, {eps:g}"}
    if rotary != "none":
        sources["rotary"] = f"assumed: {rotary}, by the names of the weights"
    return numerics, sources


def has_coarse_norms(settings: Mapping[str, Any]) -> bool:
    """Whether norms have an epsilon of 1e-5: CLIP, DINOv3, PE, AIMv2 and BEiT-3."""
    is_beit3 = settings["norm_inner"] == "both" and settings["block_bias"] == "all"
    is_clip, is_rms = settings["norm_embedding"] == "tokens", settings["norm_kind"] == "rms"
    return settings["rotary"] in ("dinov3", "pe") or is_clip or is_rms or is_beit3


def layout_for(config: Model) -> Layout:
    if isinstance(config, ResNetConfig):
        return make_layout("timm BiT")
    return make_layout("timm", name_parts=choose_name_parts(config))


def list_unsupported(config: Model) -> Iterator[tuple[str, str]]:
    """(part, reason) for what timm's model computes differently or does not have."""
    yield from list_unlike_resnet(config, "timm")
    if isinstance(config, ResNetConfig):
        return
    if config.activation != ("silu" if config.gated else "gelu"):
        yield "activation", "timm uses the exact GELU (SiLU if gated) for a bare file"
    eps, kind = 1e-5 if has_coarse_norms(vars(config)) else 1e-6, choose_kind(config)
    bias = (config.norm_embedding != "tokens",)
    yield from list_unlike(config, f"timm's {kind}", **SUPPORTED[kind], norm_eps=(eps,), embedding_bias=bias)
    if config.posemb == "bias" and config.grid[0] != config.grid[1]:
        yield "image_size", "timm loads BEiT for square images only"
    if config.registers and config.posemb_prefix == "class":
        yield "registers", "timm gives positions to all tokens before the patches or to none"
    if config.pool == "average" and config.class_token and not config.norm_pooled and not uses_eva(config):
        yield "pool", "timm normalizes the pooled vector if it averages next to a class token"
