"""timm's names, which DeiT, DeiT III, MAE, DINO and DINOv2 share.

Such a file does not contain its heads, nor the image size of a square grid; config.json next to it (as on the hub)
does. Models that share the names but compute something that plainvit does not are rejected by the part.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plainvit.config import Model, ResNetConfig, ViTConfig, pair
from plainvit.weights.files import RenamedTensors, Tensors
from plainvit.weights.grids import Grid, Hints, count_layers, read_grid, unsupported_model
from plainvit.weights.layout import DetectedModel, Layout, list_assumptions
from plainvit.weights.limits import ANY, list_unlike
from plainvit.weights.timm_architectures import check_architecture, read_about
from plainvit.weights.timm_layout import Spelling, choose_spelling, read_spelling, uses_eva, vit_layout
from plainvit.weights.timm_parts import guess_rotary, has_coarse_norms, read_numerics, read_parts
from plainvit.weights.timm_resnet import ROOTS, UNITS, bit_layout, check_stem, detect_bit, find_stem, stem_layout

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
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
# (fraction of the short side that the centre crop keeps, mean and std of the pixels)
HALF, IMAGENET, CLIP = ((0.5,), (0.5,)), (IMAGENET_MEAN, IMAGENET_STD), (CLIP_MEAN, CLIP_STD)
FAMILIES = {
    "timm": (0.9, HALF),
    "DeiT": (0.875, IMAGENET),
    "DeiT III": (1.0, IMAGENET),
    "MAE": (0.875, IMAGENET),
    "DINO": (0.875, IMAGENET),
    "DINOv2": (0.875, IMAGENET),
    "DINOv3": (0.875, IMAGENET),
    "CLIP": (1.0, CLIP),
    "EVA": (0.9, CLIP),
    "BEiT": (0.9, HALF),
}


def matches(tensors: Tensors) -> bool:
    names = {_strip_wrapper(name) for name in tensors.shapes}
    is_hybrid = any(name.startswith("patch_embed.backbone.") for name in names)
    is_bit = {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names
    return is_hybrid or is_bit or "patch_embed.proj.weight" in names


def _strip_wrapper(name: str) -> str:
    """Removes the prefixes of DataParallel, torch.compile and DINO."""
    return re.sub(r"^(module\.|_orig_mod\.|backbone\.)+", "", name)


def detect(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any]) -> tuple[DetectedModel, Tensors]:
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
        return detect_bit(tensors, sidecar), tensors
    detected = _detect_vit(tensors, hints, sidecar, _find_family(tensors, wrapper, sidecar))
    if detected.family == "DeiT III" and wrapper != "model":  # DeiT III's code saves "model"
        detected.sources["rotary"] = "assumed: none; some of timm's ViTs with rotary positions have the same names"
        detected.notes.append(f"rotary: {detected.sources['rotary']}")
    return detected, tensors


def _find_family(tensors: Tensors, wrapper: str | None, sidecar: Mapping[str, Any]) -> tuple[str, str]:
    """(family, reason). The family decides the normalisation of pixels, which the weights do not show."""
    names = tensors.shapes
    if sidecar.get("pretrained_cfg"):
        return "timm", "config.json"
    if "dist_token" in names:
        return "DeiT", "it has a distillation token"
    rotary = guess_rotary(names)
    if rotary == "dinov3":
        return "DINOv3", "it has register tokens and no positions"
    if "norm_pre.weight" in names:
        return "CLIP", "it has a norm before the blocks"
    if "blocks.0.attn.relative_position_bias_table" in names:
        return "BEiT", "it has relative position biases"
    if rotary == "eva02" or any(name.startswith(("blocks.0.attn.q_bias", "blocks.0.attn.q_proj")) for name in names):
        return "EVA", "its keys have no bias"
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


def _detect_vit(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any], family: tuple[str, str]) -> DetectedModel:
    shapes = tensors.shapes
    spelling = read_spelling(shapes)
    _check_vit(shapes, spelling, family[0])
    arguments, published = sidecar.get("model_args") or {}, sidecar.get("pretrained_cfg") or {}
    _check_arguments(arguments)
    architecture = str(sidecar.get("architecture") or "")
    check_architecture(architecture)
    width, channels, *patch = shapes["patch_embed.proj.weight"]
    stem, class_token, distillation = find_stem(shapes, ROOTS, UNITS), "cls_token" in shapes, "dist_token" in shapes
    registers = shapes.get(spelling.registers, (0, 0))[-2]
    tokens = class_token + distillation
    cell = (patch[0] * (stem.stride if stem else 1), patch[1] * (stem.stride if stem else 1))
    rows = shapes["pos_embed"][1] if "pos_embed" in shapes else None
    prefixes = (tokens, tokens + registers, 0)
    hints = _add_bias_grid(_add_sidecar_grid(hints, sidecar, rows, cell, prefixes), shapes)
    size = read_grid(rows, cell, prefixes, hints)
    numerics, sources = read_numerics(shapes, spelling, hints, sidecar, family[0])
    crop, (mean, std) = FAMILIES[family[0]]
    mean, std = (mean, std) if channels == 3 or stem else HALF
    pool, pool_source = _find_pool(shapes, arguments.get("global_pool") or sidecar.get("global_pool"), spelling.norm)
    config = ViTConfig(
        width=width,
        depth=count_layers(shapes, r"blocks\.(\d+)\."),
        mlp_dim=shapes[f"blocks.0.{spelling.fc2}weight"][1],
        patch=(patch[0], patch[1]),
        image_size=size.image_size,
        channels=stem.channels if stem else channels,
        classes=shapes.get("head.weight", (0,))[0],
        representation=shapes.get("pre_logits.fc.weight", (0,))[0],
        pool=pool,
        class_token=class_token,
        distillation=distillation,
        registers=registers,
        posemb="1d" if rows else "bias" if _BIAS_TABLE in shapes else "none",
        posemb_prefix="none" if size.prefix_rows == 0 else "class" if size.prefix_rows == tokens else "all",
        norm_pooled=spelling.norm == "fc_norm",
        layer_scale=1e-5 if f"blocks.0.{spelling.scales[0]}" in shapes else None,
        stem=stem,
        mean=tuple(published.get("mean") or mean),
        std=tuple(published.get("std") or std),
        **read_parts(shapes, spelling),
        **numerics,
    )
    sources |= {"image_size": _describe_unfilled_size(size, published, cell) or size.source}
    sources |= pool_source | _list_pixel_sources(published, f"{family[0]} ({family[1]})")
    if config.posemb == "none" and config.rotary == "none":
        sources["posemb"] = "assumed: none, since the file has no pos_embed"
    if not sidecar and config.block_bias != "all" and not config.gated:  # the same names as in timm's post-norm blocks
        sources["norm"] = "assumed: before attention and MLP"
    if stem:
        sources["stem"] = "timm's code: SAME padding, w / sqrt(var + 1e-8), GroupNorm 1e-5"
    crop = 1.0 if family[0] == "timm" and size.image_size[0] >= 384 else crop
    left_out = sorted({name.split(".")[0] for name in shapes if _is_training_only(name)})
    notes = [f"left out what is not the encoder: {', '.join(left_out)}"] if left_out else []
    return DetectedModel(
        family=family[0],
        config=config,
        layout={**vit_layout(spelling), **(stem_layout(stem.blocks) if stem else {})},
        sources=sources,
        about=read_about(sidecar, crop),
        ignore=lambda name: _is_training_only(name) or _is_buffer(name),
        notes=notes + list_assumptions(sources),
    )


_BIAS_TABLE = "blocks.0.attn.relative_position_bias_table"


def _check_vit(shapes: Mapping[str, tuple[int, ...]], spelling: Spelling, family: str) -> None:
    """Rejects files whose weights are missing."""
    qkv = "blocks.0.attn.q_proj.weight" if spelling.qkv == "split" else "blocks.0.attn.qkv.weight"
    required = {"patch_embed.proj.weight": 4, qkv: 2, f"blocks.0.{spelling.fc1[0]}weight": 2}
    required |= {f"blocks.0.{spelling.fc2}weight": 2}
    for name, ndim in required.items():
        if len(shapes.get(name, ())) != ndim:
            raise ValueError(f"this {family} file has no valid {name}: it is incomplete, or of another model")


def _is_buffer(name: str) -> bool:
    """Whether a value follows from the shape of the model: BEiT's index, DINOv3's frequencies and mask."""
    return name.endswith(("relative_position_index", "attn.qkv.bias_mask", "rope_embed.periods", "rope.freqs_cis"))


def _add_bias_grid(hints: Hints, shapes: Mapping[str, tuple[int, ...]]) -> Hints:
    """Adds the square grid of BEiT's (2h - 1)(2w - 1) + 3 biases."""
    if hints.grid or _BIAS_TABLE not in shapes:
        return hints
    side = (math.isqrt(max(shapes[_BIAS_TABLE][0] - 3, 0)) + 1) // 2
    return Hints(heads=hints.heads, image_size=hints.image_size, grid=(side, side))


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Rejects arguments that change what timm computes, but no weight's name or shape."""
    usual = {"norm_layer": (None, "layernorm"), "pool_include_prefix": (None, False)}
    for name, values in usual.items():
        if arguments.get(name) not in values:
            raise unsupported_model(f"a ViT with {name} {arguments[name]!r}", "model_args in config.json")


def _find_pool(shapes: Mapping[str, Any], stated: object, norm: str) -> tuple[Any, dict[str, str]]:
    """(pool, source) from the weights; where they allow both, config.json decides, and fc_norm implies the average."""
    if stated not in (None, "", "token", "avg", "map"):
        raise unsupported_model(f"a ViT pooled by {stated!r}", "global_pool in config.json")
    if "attn_pool.latent" in shapes:
        return "attention", {}
    is_averaged = stated == "avg" or (norm == "fc_norm" and stated != "token")
    pool = "average" if is_averaged or "cls_token" not in shapes else "token"
    return pool, {} if stated or pool == "average" else {"pool": "assumed: the class token"}


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
    heads = ("decoder_", "head.mlp.", "head.last_layer.", "dino_head.", "ibot_head.", "local_cls_norm.")
    return name == "mask_token" or name.startswith(heads)


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
    layout = {**vit_layout(choose_spelling(config)), **(stem_layout(config.stem.blocks) if config.stem else {})}
    return {name: theirs for name, theirs in layout.items() if not name.startswith("pre_logits")}


def list_unsupported(config: Model) -> Iterator[tuple[str, str]]:
    """(part, reason) for what timm's model computes differently or does not have."""
    resnet = config if isinstance(config, ResNetConfig) else config.stem
    padding = "symmetric" if isinstance(config, ResNetConfig) else "same"
    if resnet:
        yield from check_stem(resnet, padding)
    if isinstance(config, ResNetConfig):
        return
    if config.activation != ("silu" if config.gated else "gelu"):
        yield "activation", "timm uses the exact GELU (SiLU if gated) for a bare file; a folder can state another"
    any_value = "registers distillation layer_scale norm_pooled posemb_prefix stem gated qk_norm norm_kind norm_inner"
    has: dict[str, Any] = dict.fromkeys(f"{any_value} norm_final rotary norm_embedding block_bias".split(), ANY)
    has |= {"pool": ("token", "average", "attention"), "posemb": ("none", "1d", "bias")}
    has |= {"norm_eps": (1e-5 if has_coarse_norms(config) else 1e-6,)}
    yield from list_unlike(config, "timm", **has, embedding_bias=(config.norm_embedding != "tokens",))
    if config.posemb == "bias" and config.grid[0] != config.grid[1]:
        yield "image_size", "timm loads BEiT for square images only"
    if config.registers and config.posemb_prefix == "class":
        yield "registers", "timm gives positions to all tokens before the patches or to none"
    if config.distillation and (config.registers or config.posemb_prefix == "none"):
        yield "distillation", "timm's distilled DeiT has no registers, and positions for both tokens"
    if config.pool == "average" and config.class_token and not config.norm_pooled and not uses_eva(config):
        yield "pool", "timm normalises the pooled vector if it averages next to a class token"
