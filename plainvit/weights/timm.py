"""timm's names, which DeiT, DeiT III, MAE, DINO and DINOv2 share.

Such a file does not contain its heads, nor the image size of a square grid; config.json next to it (as on the hub)
does. Models that share the names but compute something else (SwiGLU, QK norm, relative bias ...) are rejected.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from plainvit.config import Model, ResNetConfig, ViTConfig, nearest, pair
from plainvit.weights.files import RenamedTensors, Tensors
from plainvit.weights.grids import Grid, Hints, count_layers, read_grid, read_heads, unsupported_model
from plainvit.weights.layout import LEADING_AXIS, PATCHES, DetectedModel, Layout, entry, linear, list_assumptions
from plainvit.weights.timm_names import ACTIVATIONS, ARCHITECTURES, check_architecture, read_about
from plainvit.weights.timm_resnet import bit_layout, find_bit, find_stem, stem_layout

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Names of weights that only models other than a plain ViT have
UNSUPPORTED_NAMES = {
    r"layers\.0\.blocks\.": "Swin",
    r"patch_embed\.norm\.": "AIMv2 or another ViT with a norm on its patches",
    r"patch_embed\.backbone\.(?!stem\.|stages\.|conv\.|norm\.)": "a hybrid whose stem is not BiT's ResNet",
    r"norm_pre\.": "CLIP's or another ViT with a norm before the blocks",
    r"blocks\.0\.attn\.q_norm\.": "a ViT with QK norm",
    r"blocks\.0\.mlp\.w(12|1)\.": "DINOv2 giant or another ViT with a SwiGLU MLP",
    r"blocks\.0\.mlp\.fc1_[gx]\.": "EVA, with a SwiGLU MLP",
    r"blocks\.0\.attn\.(q_bias|relative_position)|^rel_pos_bias": "BEiT or EVA, with relative position bias",
    r"rope|blocks\.0\.attn\.q_proj\.": "EVA-02, DINOv3 or another ViT with rotary positions",
    r"blocks\.0\.0\.": "a DINOv2 training checkpoint with chunked blocks",
    r"blocks\.0\.(attn|mlp)\.norm\.": "BEiT-3 or another ViT with norms inside attention and MLP",
    r"blocks\.0\.(attn\.)?lambda_": "a ViT with differential attention",
    r"blocks\.0\.(attns\.|in_proj\.)": "a ViT with parallel blocks",
}
# (fraction of the short side that the centre crop keeps, whether pixels have ImageNet's mean and std)
FAMILIES = {
    "timm": (0.9, False),
    "DeiT": (0.875, True),
    "DeiT III": (1.0, True),
    "MAE": (0.875, True),
    "DINO": (0.875, True),
    "DINOv2": (0.875, True),
}


def vit_layout(
    *, registers: str = "reg_token", scales: tuple[str, str] = ("ls1.gamma", "ls2.gamma"), norm: str = "norm"
) -> Layout:
    """Names of a ViT or hybrid; the arguments are what differs between the families."""
    block = "blocks.{i}."
    return {
        **linear("embedding", "patch_embed.proj.", conversion=PATCHES),
        "class_token": entry("cls_token", conversion=LEADING_AXIS),
        "distillation_token": entry("dist_token", conversion=LEADING_AXIS),
        "registers": entry(registers, conversion=LEADING_AXIS),
        "positions.0.table": entry("pos_embed", conversion=LEADING_AXIS),
        **linear(f"{block}norm1", f"{block}norm1."),
        **linear(f"{block}attention.qkv", f"{block}attn.qkv."),
        **linear(f"{block}attention.out", f"{block}attn.proj."),
        f"{block}residual1.scale": entry(block + scales[0]),
        **linear(f"{block}norm2", f"{block}norm2."),
        **linear(f"{block}mlp.fc1", f"{block}mlp.fc1."),
        **linear(f"{block}mlp.fc2", f"{block}mlp.fc2."),
        f"{block}residual2.scale": entry(block + scales[1]),
        **linear("norm", f"{norm}."),
        "pool.probe": entry("attn_pool.latent"),
        **linear("pool.q", "attn_pool.q."),
        **linear("pool.kv", "attn_pool.kv."),
        **linear("pool.out", "attn_pool.proj."),
        **linear("pool.norm", "attn_pool.norm."),
        **linear("pool.mlp.fc1", "attn_pool.mlp.fc1."),
        **linear("pool.mlp.fc2", "attn_pool.mlp.fc2."),
        **linear("pre_logits", "pre_logits.fc."),
        **linear("head", "head."),
        **linear("head_distillation", "head_dist."),
    }


def matches(tensors: Tensors) -> bool:
    names = {_strip_wrapper(name) for name in tensors.shapes}
    is_hybrid = any(name.startswith("patch_embed.backbone.") for name in names)
    is_bit = {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names
    return is_hybrid or is_bit or "patch_embed.proj.weight" in names


def _strip_wrapper(name: str) -> str:
    """Removes the prefixes of DataParallel, torch.compile and DINO."""
    return re.sub(r"^(module\.|_orig_mod\.|backbone\.)+", "", name)


def find(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any]) -> tuple[DetectedModel, Tensors]:
    """The model of a file with these names; `sidecar` is config.json as timm writes it for the hub."""
    names: dict[str, tuple[str, int | None]] = {_strip_wrapper(name): (name, None) for name in tensors.shapes}
    if len(names) < len(tensors.shapes):
        raise ValueError("the file has one weight under two names (with and without a wrapper's prefix)")
    wrapper = getattr(tensors, "wrapper", None)  # None: not a PyTorch file; "": a bare state dict
    tensors = RenamedTensors(tensors, names)
    for pattern, what in UNSUPPORTED_NAMES.items():
        culprit = next((name for name in tensors.shapes if re.search(pattern, name)), None)
        if culprit:
            raise unsupported_model(what, culprit)
    if "stem.conv.weight" in tensors.shapes:
        return find_bit(tensors, sidecar), tensors
    found = _find_vit(tensors, hints, sidecar, _find_family(tensors, wrapper, sidecar))
    if "blocks.0.gamma_1" in tensors.shapes and wrapper != "model" and not sidecar:  # DeiT III's code saves "model"
        source = "assumed: learned positions alone; some of timm's ViTs with rotary positions have the same names"
        found.sources["posemb"] = source
        found.notes.append(f"posemb: {source}")
    return found, tensors


def _find_family(tensors: Tensors, wrapper: str | None, sidecar: Mapping[str, Any]) -> tuple[str, str]:
    """(family, reason). The family decides the normalisation of pixels, which the weights do not show."""
    names = tensors.shapes
    if sidecar.get("pretrained_cfg"):
        return "timm", "config.json"
    if "dist_token" in names:
        return "DeiT", "it has a distillation token"
    if "blocks.0.gamma_1" in names:
        return "DeiT III", "its LayerScale is named gamma_1"
    if "register_tokens" in names or ("mask_token" in names and "blocks.0.ls1.gamma" in names):
        return "DINOv2", "it has DINOv2's mask or register tokens"
    if "mask_token" in names or any(name.startswith("decoder_") for name in names):
        return "MAE", "it has a decoder"
    if wrapper in ("teacher", "student"):
        return "DINO", f"its weights are under {wrapper!r}"
    if wrapper == "model":
        headless = "head.weight" not in names
        table = tensors.read("pos_embed") if "pos_embed" in names else None
        if "fc_norm.weight" in names or (headless and table is not None and not table[0, 0].any()):
            return "MAE", "its weights are under 'model', with fixed positions or an averaged head"
        return "DeiT", "its weights are under 'model', as in DeiT's files"
    if wrapper == "" and "head.weight" not in names:
        return "DINO", "assumed: a bare PyTorch file without a head"
    return "timm", "assumed: timm's names without config.json"


def _find_vit(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any], family: tuple[str, str]) -> DetectedModel:
    shapes = tensors.shapes
    _check_vit(shapes, family[0])
    arguments, published = sidecar.get("model_args") or {}, sidecar.get("pretrained_cfg") or {}
    _check_arguments(arguments)
    width, channels, *patch = shapes["patch_embed.proj.weight"]
    stem, class_token, distillation = find_stem(shapes), "cls_token" in shapes, "dist_token" in shapes
    register_name = "register_tokens" if "register_tokens" in shapes else "reg_token"
    registers = shapes.get(register_name, (1, 0))[1]
    tokens = class_token + distillation
    cell = (patch[0] * (stem.stride if stem else 1), patch[1] * (stem.stride if stem else 1))
    rows = shapes["pos_embed"][1] if "pos_embed" in shapes else None
    prefixes = (tokens, tokens + registers, 0)
    size = read_grid(rows, cell, prefixes, _add_sidecar_grid(hints, sidecar, rows, cell, prefixes))
    architecture = str(sidecar.get("architecture") or "")
    check_architecture(architecture)
    activation, activation_source = _read_activation(arguments, architecture, family[0])
    heads, heads_source = _read_heads(width, hints, arguments, architecture, family[0])
    norm = "fc_norm" if "fc_norm.weight" in shapes and "norm.weight" not in shapes else "norm"
    scales = ("gamma_1", "gamma_2") if "blocks.0.gamma_1" in shapes else ("ls1.gamma", "ls2.gamma")
    crop, imagenet = FAMILIES[family[0]]
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if imagenet and channels == 3 else ((0.5,), (0.5,))
    config = ViTConfig(
        width=width,
        depth=count_layers(shapes, r"blocks\.(\d+)\."),
        heads=heads,
        mlp_dim=shapes["blocks.0.mlp.fc1.weight"][0],
        patch=(patch[0], patch[1]),
        image_size=size.image_size,
        channels=stem.channels if stem else channels,
        classes=shapes.get("head.weight", (0,))[0],
        representation=shapes.get("pre_logits.fc.weight", (0,))[0],
        pool=_find_pool(shapes, arguments.get("global_pool") or sidecar.get("global_pool"), norm),
        class_token=class_token,
        distillation=distillation,
        registers=registers,
        posemb="none" if rows is None else "1d",
        posemb_prefix="none" if size.prefix_rows == 0 else "class" if size.prefix_rows == tokens else "all",
        norm_pooled=norm == "fc_norm",
        norm_eps=1e-6,
        activation=activation,
        layer_scale=1e-5 if f"blocks.0.{scales[0]}" in shapes else None,
        stem=stem,
        mean=tuple(published.get("mean") or mean),
        std=tuple(published.get("std") or std),
    )
    sources = {
        "activation": activation_source,
        "norm_eps": f"{family[0]}'s code: 1e-6",
        "heads": heads_source,
        "image_size": _describe_unfilled_size(size, published, cell) or size.source,
        "posemb": "pos_embed" if rows else "assumed: none, since the file has no pos_embed",
    } | _list_pixel_sources(published, f"{family[0]} ({family[1]})")
    layout = vit_layout(registers=register_name, scales=scales, norm=norm)
    if stem:
        layout = {**layout, **stem_layout(stem.blocks)}
        sources["stem"] = "timm's code: SAME padding, w / sqrt(var + 1e-8), GroupNorm 1e-5"
    crop = 1.0 if family[0] == "timm" and size.image_size[0] >= 384 else crop
    left_out = sorted({name.split(".")[0] for name in shapes if _is_training_only(name)})
    notes = [f"left out what is not the encoder: {', '.join(left_out)}"] if left_out else []
    notes += list_assumptions(sources)
    return DetectedModel(family[0], config, layout, sources, read_about(sidecar, crop), _is_training_only, notes)


def _check_vit(shapes: Mapping[str, tuple[int, ...]], family: str) -> None:
    """Rejects files whose weights are missing, or of a ViT that plainvit does not support."""
    required = {"patch_embed.proj.weight": 4, "blocks.0.attn.qkv.weight": 2, "blocks.0.mlp.fc1.weight": 2}
    for name, ndim in required.items():
        if len(shapes.get(name, ())) != ndim:
            raise ValueError(f"this {family} file has no valid {name}: it is incomplete, or of another model")
    if "blocks.0.gamma_1" in shapes and "pos_embed" not in shapes:
        raise unsupported_model("DINOv3 or another ViT with rotary positions", "blocks.0.gamma_1, and no pos_embed")
    in_blocks = [name for name in shapes if name.startswith("blocks.")]
    if not any(name.endswith("attn.qkv.bias") for name in in_blocks):
        raise unsupported_model("a ViT without biases on q, k and v", "no attn.qkv.bias")
    if not any(name.endswith(("norm1.bias", "norm2.bias")) for name in in_blocks):
        raise unsupported_model("a ViT with RMSNorm", "no norm1.bias")
    if "norm.weight" not in shapes and "fc_norm.weight" not in shapes:
        raise unsupported_model("a ViT without a final norm", "no norm.weight")
    if shapes.get("blocks.0.mlp.fc2.weight", (0, 0))[-1] * 2 == shapes["blocks.0.mlp.fc1.weight"][0]:
        raise unsupported_model("a ViT with a packed SwiGLU MLP", "blocks.0.mlp.fc1 is twice as wide as fc2")


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Rejects arguments that change what timm computes, but no weight's name or shape."""
    usual = {"norm_layer": (None, "layernorm"), "pool_include_prefix": (None, False)}
    for name, values in usual.items():
        if arguments.get(name) not in values:
            raise unsupported_model(f"a ViT with {name} {arguments[name]!r}", "model_args in config.json")


def _find_pool(shapes: Mapping[str, Any], stated: object, norm: str) -> Literal["token", "average", "attention"]:
    """From the weights; where they allow both, config.json decides, and a norm after pooling implies the average."""
    if stated not in (None, "", "token", "avg", "map"):
        raise unsupported_model(f"a ViT pooled by {stated!r}", "global_pool in config.json")
    if "attn_pool.latent" in shapes:
        return "attention"
    is_averaged = stated == "avg" or (norm == "fc_norm" and stated != "token")
    return "average" if is_averaged or "cls_token" not in shapes else "token"


def _add_sidecar_grid(
    hints: Hints, sidecar: Mapping[str, Any], rows: int | None, cell: tuple[int, int], prefixes: Sequence[int]
) -> Hints:
    """Adds the grid of config.json's image size, if the table of positions has as many rows."""
    size = (sidecar.get("model_args") or {}).get("img_size") or (sidecar.get("pretrained_cfg") or {}).get("input_size")
    if hints.grid or size is None:
        return hints
    height, width = pair(size if isinstance(size, int) else tuple(size)[-2:])
    grid = height // cell[0], width // cell[1]
    fits = rows is None or rows - grid[0] * grid[1] in prefixes
    return Hints(heads=hints.heads, image_size=hints.image_size, grid=grid if fits else None)


def _is_training_only(name: str) -> bool:
    """Whether a weight belongs to the training of MAE, DINO or DINOv2 and not to the encoder."""
    heads = ("decoder_", "head.mlp.", "head.last_layer.", "dino_head.", "ibot_head.")
    return name == "mask_token" or name.startswith(heads)


def _read_activation(arguments: Mapping[str, Any], architecture: str, family: str) -> tuple[Any, str]:
    """(activation, source): the weights do not show it."""
    name = arguments.get("act_layer")
    if name is not None:
        if name not in ACTIVATIONS:
            raise ValueError(f"act_layer {name!r} in config.json is not supported; {nearest(str(name), ACTIVATIONS)}")
        return ACTIVATIONS[name], "config.json"
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture][0], f"config.json: timm's {architecture}"
    return "gelu", "assumed: timm's default, exact GELU" if family == "timm" else f"{family}'s code: exact GELU"


def _read_heads(
    width: int, hints: Hints, arguments: Mapping[str, Any], architecture: str, family: str
) -> tuple[int, str]:
    """(heads, source)"""
    if hints.heads is None and "num_heads" in arguments:
        return arguments["num_heads"], "config.json"
    if hints.heads is None and architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture][1], f"config.json: timm's {architecture}"
    return read_heads(width, hints, family)


def _list_pixel_sources(published: Mapping[str, Any], family: str) -> dict[str, str]:
    """The sources of normalisation and preprocessing: config.json, or the convention of the family."""
    mean = "config.json" if published.get("mean") else family
    if published.get("crop_mode") not in (None, "center", "squash"):
        crop = f"assumed: a centre crop instead of timm's crop_mode {published['crop_mode']!r}"
        return {"mean": mean, "preprocess": crop}
    return {"mean": mean, "preprocess": "config.json" if published else family}


def _describe_unfilled_size(size: Grid, published: Mapping[str, Any], cell: tuple[int, int]) -> str:
    """timm drops the last pixels of images that patches do not fill; plainvit prepares smaller images."""
    stated = tuple(published.get("input_size") or ())[-2:]
    if not any(0 < larger - side < step for larger, side, step in zip(stated, size.image_size, cell, strict=False)):
        return ""
    theirs, ours = (" x ".join(map(str, sides)) for sides in (stated, size.image_size))
    return f"assumed: {ours} images; timm prepares {theirs} and drops the last rows and columns"


def layout_for(config: Model) -> Layout:
    if isinstance(config, ResNetConfig):
        return bit_layout()
    layout = vit_layout(norm="fc_norm" if config.norm_pooled else "norm")
    without_pre_logits = {name: place for name, place in layout.items() if not name.startswith("pre_logits")}
    return {**without_pre_logits, **(stem_layout(config.stem.blocks) if config.stem else {})}


def list_unsupported(config: Model) -> Iterator[tuple[str, str]]:
    """(part, reason) for what timm's model computes differently or does not have."""
    resnet = config if isinstance(config, ResNetConfig) else config.stem
    padding = "symmetric" if isinstance(config, ResNetConfig) else "same"
    if resnet and (resnet.standardise, resnet.norm_eps, resnet.padding) != ("var+1e-8", 1e-5, padding):
        yield "standardise", f"timm computes w / sqrt(var + 1e-8), GroupNorm 1e-5 and {padding} padding"
    if isinstance(config, ResNetConfig):
        return
    if config.activation != "gelu":
        yield "activation", "timm uses the exact GELU for a bare file; a folder can state another"
    if config.norm_eps != 1e-6:
        yield "norm_eps", "timm has LayerNorm 1e-6"
    if config.representation:
        yield "pre_logits", "timm has no hidden layer in the head"
    if config.posemb not in ("none", "1d"):
        yield "posemb", "timm has learned 1-D positions"
    if config.registers and config.posemb_prefix == "class":
        yield "registers", "timm gives positions to all tokens before the patches or to none"
    if config.distillation and (config.registers or config.posemb_prefix == "none"):
        yield "distillation", "timm's distilled DeiT has no registers, and positions for both tokens"
    if config.pool == "average" and config.class_token and not config.norm_pooled:
        yield "pool", "timm normalises the pooled vector if it averages next to a class token"
