"""timm's names, and the codes that share them: DeiT, DeiT III, MAE, DINO, DINOv2.

Heads, and for square grids the image size, are not in such a file; config.json beside it (as on the hub) says more.
Files that only share the names but not the model (SwiGLU, QK norm, relative bias ...) are refused by name.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from plainvit.config import About, Model, ResNetConfig, ViTConfig, nearest, pair
from plainvit.weights.files import Renamed, Tensors
from plainvit.weights.grids import Grid, Hints, count_layers, count_units, read_grid, read_heads, refuse
from plainvit.weights.layout import CONV1X1, LEAD1, PATCHES, Found, Layout, To, linear, to
from plainvit.weights.timm_names import ARCHITECTURES, HYBRIDS, RESNETS, refuse_unknown

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Names that betray a model which is not a plain ViT
STRANGERS = {
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
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "gelu_sigmoid", "relu": "relu"}
# (share of the short side kept, ImageNet's mean and std)
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
    """Names of a ViT or hybrid; the arguments are where the codes differ."""
    block = "blocks.{i}."
    return {
        **linear("embedding", "patch_embed.proj.", change=PATCHES),
        "class_token": to("cls_token", change=LEAD1),
        "distillation_token": to("dist_token", change=LEAD1),
        "registers": to(registers, change=LEAD1),
        "positions.0.table": to("pos_embed", change=LEAD1),
        **linear(f"{block}norm1", f"{block}norm1."),
        **linear(f"{block}attention.qkv", f"{block}attn.qkv."),
        **linear(f"{block}attention.out", f"{block}attn.proj."),
        f"{block}residual1.scale": to(block + scales[0]),
        **linear(f"{block}norm2", f"{block}norm2."),
        **linear(f"{block}mlp.fc1", f"{block}mlp.fc1."),
        **linear(f"{block}mlp.fc2", f"{block}mlp.fc2."),
        f"{block}residual2.scale": to(block + scales[1]),
        **linear("norm", f"{norm}."),
        "pool.probe": to("attn_pool.latent"),
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


def stem_layout(blocks: tuple[int, ...]) -> dict[str, To]:
    backbone = "patch_embed.backbone."
    root = f"{backbone}stem." if blocks else backbone
    layout = {"stem.root.weight": to(f"{root}conv.weight"), **linear("stem.root_norm", f"{root}norm.")}
    return layout | _units("stem.stages.{s}.{u}.", backbone + "stages.{s}.blocks.{u}.")


def bit_layout() -> Layout:
    layout = {"body.root.weight": to("stem.conv.weight"), **linear("body.norm", "norm.")}
    layout |= _units("body.stages.{s}.{u}.", "stages.{s}.blocks.{u}.")
    return layout | linear("head", "head.fc.", change=CONV1X1)


def _units(ours: str, theirs: str) -> dict[str, To]:
    layout = {f"{ours}projection.weight": to(f"{theirs}downsample.conv.weight")}
    layout |= linear(f"{ours}norm_projection", f"{theirs}downsample.norm.")
    for number in "123":
        layout[f"{ours}conv{number}.weight"] = to(f"{theirs}conv{number}.weight")
        layout |= linear(f"{ours}norm{number}", f"{theirs}norm{number}.")
    return layout


def recognise(tensors: Tensors) -> bool:
    names = {_clean(name) for name in tensors.shapes}
    hybrid = any(name.startswith("patch_embed.backbone.") for name in names)
    return (
        hybrid or "patch_embed.proj.weight" in names or {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= names
    )


def _clean(name: str) -> str:
    return re.sub(r"^(module\.|_orig_mod\.|backbone\.)+", "", name)


def find(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any]) -> tuple[Found, Tensors]:
    """What model these names hold; `sidecar` is config.json as timm writes it for the hub."""
    names: dict[str, tuple[str, int | None]] = {_clean(name): (name, None) for name in tensors.shapes}
    if len(names) < len(tensors.shapes):
        raise ValueError("the file has one weight under two names (with and without a wrapper's prefix)")
    wrapper = getattr(tensors, "wrapper", None)  # None: not a PyTorch file; "": one with the state dict bare
    tensors = Renamed(tensors, names)
    for pattern, what in STRANGERS.items():
        culprit = next((name for name in tensors.shapes if re.search(pattern, name)), None)
        if culprit:
            raise refuse(what, culprit)
    if "stem.conv.weight" in tensors.shapes:
        return _find_bit(tensors, sidecar), tensors
    found = _find_vit(tensors, hints, sidecar, _family(tensors, wrapper, sidecar))
    if "blocks.0.gamma_1" in tensors.shapes and wrapper != "model" and not sidecar:  # not as DeiT III's code saves it
        said = "assumed: learned positions alone; some of timm's ViTs with rotary positions have the same names"
        found.sources["posemb"] = said
        found.notes.append(f"posemb: {said}")
    return found, tensors


def _family(tensors: Tensors, wrapper: str | None, sidecar: Mapping[str, Any]) -> tuple[str, str]:
    """(family, why): only what decides the normalisation of pixels, which the weights do not show."""
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
    return "timm", "assumed: timm's names and nothing more"


def _find_vit(tensors: Tensors, hints: Hints, sidecar: Mapping[str, Any], family: tuple[str, str]) -> Found:
    shapes = tensors.shapes
    _check_vit(shapes, family[0])
    arguments, published = sidecar.get("model_args") or {}, sidecar.get("pretrained_cfg") or {}
    _check_arguments(arguments)
    width, channels, *patch = shapes["patch_embed.proj.weight"]
    stem, class_token, distillation = _find_stem(shapes), "cls_token" in shapes, "dist_token" in shapes
    register_name = "register_tokens" if "register_tokens" in shapes else "reg_token"
    registers = shapes.get(register_name, (1, 0))[1]
    own = class_token + distillation
    cell = (patch[0] * (stem.stride if stem else 1), patch[1] * (stem.stride if stem else 1))
    rows = shapes["pos_embed"][1] if "pos_embed" in shapes else None
    prefixes = (own, own + registers, 0)
    size = read_grid(rows, cell, prefixes, _with_sidecar(hints, sidecar, rows, cell, prefixes))
    architecture = str(sidecar.get("architecture") or "")
    refuse_unknown(architecture)
    activation, activation_source = _activation(arguments, architecture, family[0])
    heads, heads_source = _heads(width, hints, arguments, architecture, family[0])
    norm = "fc_norm" if "fc_norm.weight" in shapes and "norm.weight" not in shapes else "norm"
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
        pool=_pool(shapes, arguments.get("global_pool") or sidecar.get("global_pool"), norm),
        class_token=class_token,
        distillation=distillation,
        registers=registers,
        posemb="none" if rows is None else "1d",
        posemb_prefix="none" if size.prefix_rows == 0 else "class" if size.prefix_rows == own else "all",
        norm_pooled=norm == "fc_norm",
        norm_eps=1e-6,
        activation=activation,
        layer_scale=1e-5 if _scales(shapes) in shapes else None,
        stem=stem,
        mean=tuple(published.get("mean") or mean),
        std=tuple(published.get("std") or std),
    )
    scales = ("gamma_1", "gamma_2") if "blocks.0.gamma_1" in shapes else ("ls1.gamma", "ls2.gamma")
    layout = vit_layout(registers=register_name, scales=scales, norm=norm)
    where = f"{family[0]} ({family[1]})"
    sources = {
        "activation": activation_source,
        "norm_eps": f"{family[0]}'s code: 1e-6",
        "heads": heads_source,
        "image_size": _cut_off(size, published, cell) or size.source,
        "posemb": "pos_embed" if rows else "assumed: none, since the file has no pos_embed",
        "mean": "config.json" if published.get("mean") else where,
        "preprocess": "config.json" if published else where,
    }
    if published.get("crop_mode") not in (None, "center", "squash"):
        sources["preprocess"] = f"assumed: a centre crop in place of timm's crop_mode {published['crop_mode']!r}"
    if stem:
        layout = {**layout, **stem_layout(stem.blocks)}
        sources["stem"] = "timm's code: SAME padding, w / sqrt(var + 1e-8), GroupNorm 1e-5"
    crop = 1.0 if family[0] == "timm" and size.image_size[0] >= 384 else crop
    return Found(
        family=family[0],
        config=config,
        layout=layout,
        sources=sources,
        about=_about(sidecar, published, crop),
        ignore=_beside,
        notes=_notes(shapes) + [f"{key}: {value}" for key, value in sources.items() if value.startswith("assumed")],
    )


def _check_vit(shapes: Mapping[str, tuple[int, ...]], family: str) -> None:
    usable = {"patch_embed.proj.weight": 4, "blocks.0.attn.qkv.weight": 2, "blocks.0.mlp.fc1.weight": 2}
    for name, sides in usable.items():
        if len(shapes.get(name, ())) != sides:
            raise ValueError(f"this {family} file has no usable {name}: it is incomplete, or of another model")
    if "blocks.0.gamma_1" in shapes and "pos_embed" not in shapes:
        raise refuse("DINOv3 or another ViT with rotary positions", "blocks.0.gamma_1, and no pos_embed")
    lacks = {
        "attn.qkv.bias": "a ViT without biases on q, k and v",
        ("norm1.bias", "norm2.bias"): "a ViT with RMSNorm",
    }
    for ending, what in lacks.items():
        if not any(name.startswith("blocks.") and name.endswith(ending) for name in shapes):
            raise refuse(what, f"no {ending if isinstance(ending, str) else ending[0]}")
    if "norm.weight" not in shapes and "fc_norm.weight" not in shapes:
        raise refuse("a ViT without a final norm", "no norm.weight")
    if shapes.get("blocks.0.mlp.fc2.weight", (0, 0))[-1] * 2 == shapes["blocks.0.mlp.fc1.weight"][0]:
        raise refuse("a ViT with a packed SwiGLU MLP", "blocks.0.mlp.fc1 is twice as wide as fc2")


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Arguments of timm's that change what is computed, and no weight's name or shape."""
    usual = {"norm_layer": (None, "layernorm"), "pool_include_prefix": (None, False)}
    for name, values in usual.items():
        if arguments.get(name) not in values:
            raise refuse(f"a ViT with {name} {arguments[name]!r}", "model_args in config.json")


def _pool(shapes: Mapping[str, Any], told: object, norm: str) -> Literal["token", "average", "attention"]:
    """By the weights; config.json decides where they allow both: a norm after pooling says average, unless told."""
    if told not in (None, "", "token", "avg", "map"):
        raise refuse(f"a ViT pooled by {told!r}", "global_pool in config.json")
    if "attn_pool.latent" in shapes:
        return "attention"
    averaged = told == "avg" or (norm == "fc_norm" and told != "token")
    return "average" if averaged or "cls_token" not in shapes else "token"


def _about(sidecar: Mapping[str, Any], published: Mapping[str, Any], crop: float) -> dict[str, Any]:
    """What is known beyond the model; what config.json does not say is the family's."""
    share = published.get("crop_pct") or crop
    squash = "squash" if share == 1 else "squash-crop"
    preprocess = {
        "resize": squash if published.get("crop_mode") == "squash" else "crop",
        "crop": share,
        "interpolation": published.get("interpolation") or "bicubic",
    }
    names = tuple(published.get("label_names") or sidecar.get("label_names") or ())
    return {"preprocess": preprocess, "class_names": names}


def _notes(shapes: Mapping[str, Any]) -> list[str]:
    left_out = sorted({name.split(".")[0] for name in shapes if _beside(name)})
    return [f"left out what is not the encoder: {', '.join(left_out)}"] if left_out else []


def _with_sidecar(
    hints: Hints, sidecar: Mapping[str, Any], rows: int | None, cell: tuple[int, int], prefixes: Sequence[int]
) -> Hints:
    """config.json's image size is that of the table, square or not, where the table agrees."""
    size = (sidecar.get("model_args") or {}).get("img_size") or (sidecar.get("pretrained_cfg") or {}).get("input_size")
    if hints.grid or size is None:
        return hints
    height, width = pair(size if isinstance(size, int) else tuple(size)[-2:])
    grid = height // cell[0], width // cell[1]
    fits = rows is None or rows - grid[0] * grid[1] in prefixes
    return Hints(heads=hints.heads, image_size=hints.image_size, grid=grid if fits else None)


def _beside(name: str) -> bool:
    """Parts of MAE's, DINO's and DINOv2's training that are not the encoder."""
    return name == "mask_token" or name.startswith(
        ("decoder_", "head.mlp.", "head.last_layer.", "dino_head.", "ibot_head.")
    )


def _scales(shapes: Mapping[str, object]) -> str:
    return "blocks.0.gamma_1" if "blocks.0.gamma_1" in shapes else "blocks.0.ls1.gamma"


def _activation(arguments: Mapping[str, Any], architecture: str, family: str) -> tuple[Any, str]:
    """(activation, where that was learned): weights do not show it."""
    name = arguments.get("act_layer")
    if name is not None:
        if name not in ACTIVATIONS:
            raise ValueError(f"config.json asks for the activation {name!r}; {nearest(str(name), ACTIVATIONS)}")
        return ACTIVATIONS[name], "config.json"
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture][0], f"config.json: timm's {architecture}"
    return "gelu", "assumed: timm's default, exact GELU" if family == "timm" else f"{family}'s code: exact GELU"


def _heads(width: int, hints: Hints, arguments: Mapping[str, Any], architecture: str, family: str) -> tuple[int, str]:
    """(heads, where that was learned)"""
    if hints.heads is None and "num_heads" in arguments:
        return arguments["num_heads"], "config.json"
    if hints.heads is None and architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture][1], f"config.json: timm's {architecture}"
    return read_heads(width, hints, family)


def _cut_off(size: Grid, published: Mapping[str, Any], cell: tuple[int, int]) -> str:
    """timm leaves out the last pixels of images that patches do not fill; plainvit prepares smaller images."""
    told = tuple(published.get("input_size") or ())[-2:]
    if not any(0 < larger - side < step for larger, side, step in zip(told, size.image_size, cell, strict=False)):
        return ""
    theirs, ours = (" x ".join(map(str, sides)) for sides in (told, size.image_size))
    return f"assumed: {ours} images; timm prepares {theirs} and leaves out the last rows and columns"


def _find_stem(shapes: Mapping[str, tuple[int, ...]]) -> ResNetConfig | None:
    root = shapes.get("patch_embed.backbone.stem.conv.weight") or shapes.get("patch_embed.backbone.conv.weight")
    if root is None:
        return None
    if len(root) != 4:
        raise ValueError("the hybrid's root convolution has no usable shape: the file is damaged")
    blocks = count_units(shapes, r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.", 0)
    return ResNetConfig(
        blocks=blocks,
        widen=max(root[0] // 64, 1),
        channels=root[1],
        classes=0,
        preactivation=False,
        padding="same",
        standardise="var+1e-8",
        norm_eps=1e-5,
    )


def _find_bit(tensors: Tensors, sidecar: Mapping[str, Any]) -> Found:
    root, published = tensors.shapes["stem.conv.weight"], sidecar.get("pretrained_cfg") or {}
    culprit = next((name for name in tensors.shapes if re.search(r"running_mean$|^stem\.norm\.", name)), None)
    if len(root) != 4 or culprit or "stages.0.blocks.0.conv3.weight" not in tensors.shapes:
        raise refuse("a ResNet that is not BiT", culprit or "stem")
    refuse_unknown(str(sidecar.get("architecture") or ""))
    size = published.get("input_size") or (3, 224, 224)
    config = ResNetConfig(
        image_size=(int(size[1]), int(size[2])),
        blocks=count_units(tensors.shapes, r"stages\.(\d+)\.blocks\.(\d+)\.", 0),
        widen=max(root[0] // 64, 1),
        channels=root[1],
        classes=tensors.shapes.get("head.fc.weight", (0,))[0],
        standardise="var+1e-8",
        norm_eps=1e-5,
        mean=tuple(published.get("mean") or (0.5,)),
        std=tuple(published.get("std") or (0.5,)),
    )
    sources = {
        "standardise": "timm's code: w / sqrt(var + 1e-8)",
        "padding": "timm's code: symmetric, zeros before the root's pooling",
        "preprocess": "config.json" if published else "assumed: BiT's evaluation, a square resize",
        "norm_eps": "timm's code: 1e-5",
        "image_size": "config.json" if published.get("input_size") else "convolutions take any size",
        "mean": "config.json" if published.get("mean") else "timm's BiT: pixels in [-1, 1]",
    }
    about = _about(sidecar, published, 1.0) if published else {"preprocess": {"resize": "squash"}}
    notes = [f"{key}: {value}" for key, value in sources.items() if value.startswith("assumed")]
    return Found("timm", config, bit_layout(), sources, about, notes=notes)


def layout_for(config: Model) -> Layout:
    if isinstance(config, ResNetConfig):
        return bit_layout()
    layout = vit_layout(norm="fc_norm" if config.norm_pooled else "norm")
    without_hidden = {name: place for name, place in layout.items() if not name.startswith("pre_logits")}
    return {**without_hidden, **(stem_layout(config.stem.blocks) if config.stem else {})}


def lacks(config: Model) -> Iterator[tuple[str, str]]:
    """(part, why) for what timm's model of these names computes otherwise or does not have."""
    resnet = config if isinstance(config, ResNetConfig) else config.stem
    padding = "symmetric" if isinstance(config, ResNetConfig) else "same"
    if resnet and (resnet.standardise, resnet.norm_eps, resnet.padding) != ("var+1e-8", 1e-5, padding):
        yield "standardise", f"timm computes w / sqrt(var + 1e-8), GroupNorm 1e-5 and {padding} padding"
    if isinstance(config, ResNetConfig):
        return
    if config.activation != "gelu":
        yield "activation", "timm takes a bare file to mean the exact GELU; a folder can say otherwise"
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
        yield "pool", "timm's average pooling beside a class token norms the pooled vector"


SIDECAR_SAYS = ("activation",)  # config.json in a folder can ask timm for another


def sidecar_for(config: Model, about: About) -> dict[str, Any]:
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
    elif config.stem:
        architecture = HYBRIDS.get((config.stem.blocks, config.width))
        arguments = _arguments(config)
    else:
        architecture = "deit_base_distilled_patch16_224" if config.distillation else "vit_base_patch16_224"
        arguments = _arguments(config)
    if architecture is None:
        raise ValueError("timm has no model of this shape to name in config.json: write a single file instead")
    described = {"architecture": architecture, "num_classes": config.classes, "model_args": arguments}
    return described | {"pretrained_cfg": {key: value for key, value in published.items() if value is not None}}


def _mlp_ratio(config: ViTConfig) -> float:
    """timm computes int(width * ratio), one too few where the ratio was rounded down: then the next number."""
    ratio = config.mlp_dim / config.width
    return ratio if int(config.width * ratio) == config.mlp_dim else math.nextafter(ratio, math.inf)


def _arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer; any size of it can be asked for through one architecture's name."""
    arguments: dict[str, Any] = {
        "img_size": list(config.image_size),
        "patch_size": config.patch[0] if config.patch[0] == config.patch[1] else list(config.patch),
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": _mlp_ratio(config),
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
