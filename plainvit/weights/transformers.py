"""transformers' vision models: a folder with config.json and preprocessor_config.json, or the weights alone.

ViT, DeiT, ViTMAE (its encoder), CLIP, SigLIP, DINOv2, DINOv3, I-JEPA, BEiT and AIMv2. Version 5 renamed the modules of
ViT but still writes the old names to disk: both are read, the old ones written. The weights do not contain the number
of heads; config.json does, with the activation, the epsilon of the norms and the image size.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from plainvit.config import ViTConfig, nearest, pair
from plainvit.weights.files import Tensors
from plainvit.weights.grids import Hints, count_layers, read_grid, read_heads, unsupported_model
from plainvit.weights.layout import DetectedModel, Layout, list_assumptions
from plainvit.weights.limits import ANY, list_unlike
from plainvit.weights.timm_resnet import check_stem, find_stem
from plainvit.weights.transformers_files import (
    SPELLINGS,
    add_defaults,
    default_processor,
    find_mlp_ratio,
    read_class_names,
    read_pixels,
    read_preprocess,
)
from plainvit.weights.transformers_layout import KINDS, STEM, TOWER, Kind, Names, choose_kind, in_memory, vit_layout

Shapes = Mapping[str, tuple[int, ...]]


PATCH_KERNELS = tuple(dict.fromkeys(f"{kind.names.patches}weight" for kind in KINDS.values()))
OWN_PREFIXES = tuple({kind.prefix for kind in KINDS.values()} - {""})
UNSUPPORTED_NAMES = {
    "encoder.relative_position_bias.": "BEiT with one relative position bias for all layers",
    "rope_embeddings.inv_freq": "a ViT with rotary positions that plainvit does not know",
    "head.cls_token": "AIMv2 with an attention pooling head",
    "shared_position_bias.": "BEiT with one relative position bias for all layers",
    "attention.relative_position_bias_table": "a vision model with relative positions that is not BEiT",
}


def find_kernel(names: Shapes) -> str | None:
    """The name of the patch kernel in a file; None if it is not transformers'."""
    return next((name for name in names if f".{name}".endswith(tuple(f".{kernel}" for kernel in PATCH_KERNELS))), None)


def matches(tensors: Tensors) -> bool:
    return find_kernel(tensors.shapes) is not None


def _find_kind(shapes: Shapes, kernel: str) -> Kind:
    """The model class, by names under the model's prefix."""
    names = [name for name, kind in KINDS.items() if f"{kind.names.patches}weight" == kernel]
    if len(names) == 1:
        return KINDS[names[0]]
    if kernel.startswith(TOWER.patches):
        return KINDS["CLIP" if "embeddings.class_embedding" in shapes else "SigLIP"]
    if any(name.endswith("layer_scale1.lambda1") for name in shapes):
        return KINDS["DINOv2 with registers" if "embeddings.register_tokens" in shapes else "DINOv2"]
    if any(name.endswith(("relative_position_bias_table", "lambda_1")) for name in shapes):
        return KINDS["BEiT"]
    if any(name.startswith(STEM) for name in shapes):
        return KINDS["ViTHybrid"]
    if "embeddings.cls_token" not in shapes:
        return KINDS["I-JEPA"]
    return KINDS["DeiT" if "embeddings.distillation_token" in shapes else "ViT"]


def _read_names(kind: Kind, shapes: Shapes) -> Names:
    """The names on disk, or those of version 5's modules; of these DINOv2's have the old name of a block."""
    blocks = {re.sub(r"\.0\..*", ".{i}.", name) for name in shapes if re.match(r"[a-z.]*layers?\.0\.", name)}
    names = kind.names if kind.names.block in blocks else replace(kind.names, block=min(blocks, default=""))
    is_old = not any(name.endswith("0.attention.o_proj.weight") for name in shapes)
    return names if is_old or names.out == "attention.o_proj." else replace(in_memory(names), block=names.block)


def detect(tensors: Tensors, hints: Hints, config: Mapping[str, Any], processor: Mapping[str, Any]) -> DetectedModel:
    """`config` and `processor` are config.json and preprocessor_config.json, or {}."""
    kernel = find_kernel(tensors.shapes)
    assert kernel
    suffix = next(suffix for suffix in PATCH_KERNELS if f".{kernel}".endswith(f".{suffix}"))
    prefix = kernel.removesuffix(suffix)
    if prefix not in (*OWN_PREFIXES, ""):
        raise unsupported_model(f"a model with a ViT inside, under {prefix!r}", suffix)
    shapes = {name.removeprefix(prefix): shape for name, shape in tensors.shapes.items()}
    kind = _find_kind(shapes, suffix)
    kind = KINDS["DeiT"] if prefix == "deit." else kind
    config = config.get("vision_config") or config
    kind = replace(kind, names=_read_names(kind, shapes))
    _check_supported(kind, tensors.shapes, shapes, config)
    family = f"transformers {kind.name}"
    model, sources, notes = _read_model(kind, family, shapes, hints, config)
    decoder = any(name.startswith("decoder.") for name in shapes)  # ViTMAE: its encoder is a ViT
    default = default_processor(kind.name, masked=decoder, channels=model.channels)
    settings = add_defaults(processor, default) if processor else default
    mean, std = read_pixels(settings)
    preprocess, problem = read_preprocess(settings)
    pixels = "preprocessor_config.json" if processor else f"assumed: {family}'s usual processor"
    sources |= {"mean": pixels, "preprocess": f"assumed: a square resize, since {problem}" if problem else pixels}
    return DetectedModel(
        family=family,
        config=model.replace(mean=mean, std=std),
        layout=vit_layout(kind, prefix, model),
        sources=sources,
        about={"preprocess": preprocess, "class_names": read_class_names(config, model.classes)},
        ignore=lambda name: _is_left_out(name.removeprefix(prefix), model),
        notes=notes + list_assumptions(sources) + (["left out what is not the encoder: decoder"] if decoder else []),
    )


def _is_left_out(name: str, model: ViTConfig) -> bool:
    """Whether a weight belongs to pre-training, to a text tower, or to a part that the classifier does not read."""
    training = ("embeddings.mask_token", "decoder.", "lm_head.")
    text = ("text_model.", "text_projection.", "logit_scale", "logit_bias", "embeddings.position_ids")
    unread = (
        ("post_layernorm.",)
        if not model.norm_final
        else ("head.",)
        if model.pool == "average" and model.classes
        else ()
    )
    empty = "embeddings.register_tokens" if not model.registers else ""  # DINOv3 stores (1, 0, D)
    return name.startswith((*training, *text, *unread)) or name == empty


def _check_supported(kind: Kind, full: Shapes, shapes: Shapes, config: Mapping[str, Any]) -> None:
    for pattern, what in UNSUPPORTED_NAMES.items():
        culprit = next((name for name in full if pattern in name), None)
        if culprit and not (pattern == "head.cls_token" and kind.name != "AIMv2"):
            raise unsupported_model(what, culprit)
    first, names = kind.names.block.format(i=0), kind.names
    patches, hidden = shapes[f"{names.patches}weight"], shapes.get(f"{first}{_list_fc1(kind, shapes)[0]}weight", ())
    if len(patches) == 2 and kind.name == "SigLIP":
        raise unsupported_model("SigLIP2 NaFlex, for images of any shape", f"{names.patches}weight of two dimensions")
    if len(patches) != 4 or len(hidden) != 2:
        raise ValueError("this transformers file has no valid patch projection or first layer: it is incomplete")
    needed = [] if kind.name in ("SigLIP", "I-JEPA", "AIMv2") else [names.class_token]
    if kind.name == "BEiT" and names.positions not in shapes:
        needed.append(first + names.bias_table)
    elif kind.name not in ("DINOv3", "BEiT"):
        needed.append(names.positions)
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise ValueError(f"this transformers {kind.name} file lacks {', '.join(missing)}: it is incomplete")
    if "pooler.dense.weight" in shapes and config.get("pooler_act", "tanh") != "tanh":
        raise unsupported_model("a ViT whose pooler is not tanh", "pooler_act in config.json")
    if not float(config.get("rope_theta", 100.0)) == 100.0:
        raise unsupported_model(f"DINOv3 with rope_theta {config['rope_theta']}", "config.json")
    if config.get("is_native"):
        raise unsupported_model("AIMv2 for images of any shape", "is_native in config.json")


def _list_fc1(kind: Kind, shapes: Shapes) -> tuple[str, ...]:
    """The names of the first layer of an MLP: more than one, or twice as wide, if it is gated."""
    gated, first = kind.names.gated_mlp[0], kind.names.block.format(i=0)
    return gated if f"{first}{gated[0]}weight" in shapes else (kind.names.mlp[0],)


def _read_model(
    kind: Kind, family: str, shapes: Shapes, hints: Hints, config: Mapping[str, Any]
) -> tuple[ViTConfig, dict[str, str], list[str]]:
    """(config, sources, notes); mean and std come from the processor."""
    names, first = kind.names, kind.names.block.format(i=0)
    width, channels, *patch = shapes[f"{names.patches}weight"]
    second, teacher = "embeddings.distillation_token" in shapes, "distillation_classifier.weight" in shapes
    has_class, has_bias_table = names.class_token in shapes, f"{first}{names.bias_table}" in shapes
    rows = shapes[names.positions][-2] if names.positions in shapes else None
    stem = find_stem(shapes, (f"{STEM}embedder.convolution.weight",), _UNITS)
    stride = stem.stride if stem else 1
    cell = (patch[0] * stride, patch[1] * stride)
    hints = _add_config_grid(hints, config, cell)
    if has_bias_table and not hints.grid:  # (2h-1)(2w-1) + 3 rows: a square grid, unless config.json says otherwise
        side = (math.isqrt(max(shapes[f"{first}{names.bias_table}"][0] - 3, 0)) + 1) // 2
        hints = Hints(heads=hints.heads, grid=(side, side))
    size = read_grid(rows, cell, (has_class + second,), hints)
    if has_bias_table and size.image_size[0] // cell[0] != size.image_size[1] // cell[1]:
        raise unsupported_model("BEiT for images that are not square", "transformers mixes up rows and columns there")
    heads, heads_source = _read_heads(kind, shapes, hints, config, family)
    activation = config.get("hidden_act", kind.activation)
    if activation not in SPELLINGS:
        raise ValueError(f"hidden_act {activation!r} in config.json is not supported; {nearest(activation, SPELLINGS)}")
    fc1 = _list_fc1(kind, shapes)
    gated = fc1 == names.gated_mlp[0]
    head = shapes.get("cls_classifier.weight") or shapes.get("classifier.weight") or (0,)
    eps = config.get("rms_norm_eps" if kind.name == "AIMv2" else "layer_norm_eps", kind.eps)
    registers = shapes.get("embeddings.register_tokens", (1, 0))[1] + int(second and not teacher)
    model = ViTConfig(
        width=width,
        depth=count_layers(shapes, re.escape(names.block).replace(r"\{i\}", r"(\d+)")),
        heads=heads,
        mlp_dim=shapes[f"{first}{(names.gated_mlp if gated else names.mlp)[1]}weight"][1],
        patch=(patch[0], patch[1]),
        image_size=size.image_size,
        channels=stem.channels if stem else channels,
        stem=stem,
        classes=head[0],
        representation=shapes.get("pooler.dense.weight", (0,))[0],
        class_token=has_class,
        distillation=teacher,
        registers=registers,  # DeiT's second token, if no head reads it
        posemb="1d" if rows else "bias" if has_bias_table else "none",
        posemb_prefix="all" if second and not teacher else "class",
        norm_eps=float(eps),
        # transformers' DINOv2 computes SiLU in its gated MLP, whatever hidden_act says
        activation="silu" if gated and kind.name.startswith("DINOv2") else SPELLINGS[activation],
        gated=gated,
        layer_scale=1e-5 if f"{first}{names.scales[0]}" in shapes else None,
        rotary="dinov3" if kind.name == "DINOv3" else "none",
        norm_kind="rms" if kind.name == "AIMv2" else "layer",
        norm_embedding="tokens" if "pre_layrnorm.weight" in shapes else "patches" if kind.name == "AIMv2" else "none",
        block_bias=_find_block_bias(kind, shapes),
        embedding_bias=kind.name != "CLIP",
        projection=shapes.get("visual_projection.weight", (0,))[0],
        **_find_pooling(kind, shapes, has_class, head),
    )
    source = "config.json" if config else f"{family}'s default"
    sources = {"activation": source, "norm_eps": source, "heads": heads_source, "image_size": size.source}
    sources |= {name: f"assumed: {family}'s default" for name in kind.assumed if not config}
    stated = pair(config["image_size"]) if config.get("image_size") else size.image_size
    if stated != size.image_size:
        sources["image_size"] = f"assumed: the {stated[0]} pixels of config.json without those that patches do not fill"
    return model, sources, []


_UNITS = re.escape(STEM) + r"encoder\.stages\.(\d+)\.layers\.(\d+)\."


def _find_pooling(kind: Kind, shapes: Shapes, has_class: bool, head: tuple[int, ...]) -> dict[str, Any]:
    """What the head reads, as each class's code has it."""
    width = shapes[f"{kind.names.patches}weight"][0]
    if kind.name == "CLIP" and head[0]:  # CLIPForImageClassification averages patches before the final norm
        return {"pool": "average", "norm_final": False}
    if "head.probe" in shapes and not head[0]:
        return {"pool": "attention"}
    if kind.name == "BEiT" and "pooler.layernorm.weight" in shapes:
        return {"pool": "average", "norm_pooled": True}
    if kind.name.startswith("DINOv2") and head[-1] == 2 * width:
        return {"pool": "token+average"}
    return {"pool": "token" if has_class else "average"}


def _find_block_bias(kind: Kind, shapes: Shapes) -> Any:
    first, names = kind.names.block.format(i=0), kind.names
    has_qkv = any(f"{first}{name}bias" in shapes for name in names.qkv)
    if kind.name == "AIMv2":
        return "none"
    if not has_qkv:
        return "no_qkv"
    return "no_k" if kind.name in ("DINOv3", "BEiT") and f"{first}{names.qkv[1]}bias" not in shapes else "all"


def _read_heads(kind: Kind, shapes: Shapes, hints: Hints, config: Mapping[str, Any], family: str) -> tuple[int, str]:
    width = shapes[f"{kind.names.patches}weight"][0]
    bias_table = shapes.get(kind.names.block.format(i=0) + kind.names.bias_table)
    if hints.heads is None and config:
        return config.get("num_attention_heads", kind.heads), "config.json"
    if hints.heads is None and kind.name == "DINOv3" and width % 64 == 0:
        heads = 32 if width == 4096 else width // 64
        return heads, f"assumed: DINOv3 of width {width} has {heads} heads"
    if bias_table:
        return bias_table[1], "columns of relative_position_bias_table"
    return read_heads(width, hints, family)


def _add_config_grid(hints: Hints, config: Mapping[str, Any], patch: tuple[int, int]) -> Hints:
    """Adds the grid of config.json's image size, square or not."""
    size = config.get("image_size")
    if hints.grid or size is None:
        return hints
    height, width = pair(size)
    return Hints(heads=hints.heads, grid=(height // patch[0], width // patch[1]))


def layout_for(config: ViTConfig) -> Layout:
    kind = choose_kind(config)
    return vit_layout(kind, kind.prefix if config.classes or config.projection else "", config)


# The settings of each class besides the paper's
_DINOV2 = {"pool": ("token", "token+average"), "gated": ANY, "layer_scale": (True,)}
ALLOWED: dict[str, dict[str, Any]] = {
    "ViT": {"posemb_prefix": ("class", "all"), "representation": ANY},
    "ViTHybrid": {"posemb_prefix": ("class", "all"), "representation": ANY, "stem": ANY},
    "DeiT": {"posemb_prefix": ("class", "all"), "representation": ANY, "distillation": ANY, "registers": ANY},
    "CLIP": {"norm_embedding": ("tokens",), "embedding_bias": (False,), "projection": ANY},
    "SigLIP": {"pool": ("attention",)},
    "DINOv2": _DINOV2,
    "DINOv2 with registers": _DINOV2 | {"registers": ANY},
    "DINOv3": {"rotary": ("dinov3",), "posemb": ("none",), "registers": ANY, "gated": ANY, "layer_scale": (True,)}
    | {"block_bias": ("all", "no_k", "no_qkv")},
    "I-JEPA": {"pool": ("average",)},
    "BEiT": {"posemb": ("bias",), "pool": ("average", "token"), "norm_pooled": ANY, "layer_scale": (True,)}
    | {"block_bias": ("no_k",)},
    "AIMv2": {"pool": ("average",), "norm_kind": ("rms",), "norm_embedding": ("patches",), "gated": (True,)}
    | {"block_bias": ("none",)},
}


def list_unsupported(config: ViTConfig) -> Iterator[tuple[str, str]]:
    """(part, reason) for what the closest of transformers' classes does not have."""
    kind = choose_kind(config)
    library = f"transformers' {kind.name}"
    yield from list_unlike(config, library, **ALLOWED[kind.name])
    if config.stem:
        yield from check_stem(config.stem, "same")
        if not config.stem.blocks:
            yield "stem", "transformers' ViTHybrid has no stem without stages"
    if config.representation and config.classes:
        yield "pre_logits", f"{library} has no hidden layer before its classifier"
    if kind.name in ("CLIP", "SigLIP", "DINOv3", "AIMv2") and config.classes:
        yield "head", f"{library} has no classifier of these features: load with classes=0"
    if kind.name.startswith("DINOv2") and config.classes and config.pool != "token+average":
        yield "pool", "transformers' DINOv2 classifies the class token next to the mean of the patches"
    if kind.name == "BEiT" and config.grid[0] != config.grid[1]:
        yield "image_size", "transformers' BEiT mixes up the rows and columns of images that are not square"
    if kind.name == "DeiT" and config.registers > 1:
        yield "registers", "transformers' DeiT has one token besides the class token"
    if kind.name.startswith("DINOv2") and find_mlp_ratio(config) is None:
        yield "mlp_dim", "transformers' DINOv2 has MLPs that are a whole multiple of its width, or two thirds of one"
