"""transformers' vision models: a folder with config.json and preprocessor_config.json, or the weights alone.

ViT, ViTHybrid, DeiT, ViTMAE (its encoder), CLIP, SigLIP, DINOv2, DINOv3, I-JEPA, BEiT and AIMv2. Version 5 renamed the
modules of ViT but still writes the old names to disk: both are read, the old ones written. The weights do not contain
the number of heads; config.json does, with the activation, the epsilon of the norms and the image size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plainvit.config import ViTConfig, nearest, pair
from plainvit.disk import read_json
from plainvit.weights.files import Tensors
from plainvit.weights.layout import FIRST, DetectedModel, Layout, Shapes, make_layout, read_shapes
from plainvit.weights.shapes import BLOCK, Hints, check_names, read_vit, unsupported_model
from plainvit.weights.supported import list_unlike, list_unlike_resnet
from plainvit.weights.transformers_files import (
    FIXED,
    KINDS,
    SPELLINGS,
    SUPPORTED,
    Kind,
    add_defaults,
    choose_kind,
    default_processor,
    find_mlp_ratio,
    read_class_names,
    read_pixels,
    read_preprocess,
)

PATCH_KERNELS = tuple(dict.fromkeys(make_layout(kind.section)["embedding.weight"].names[0] for kind in KINDS.values()))
OWN_PREFIXES = tuple({kind.prefix for kind in KINDS.values()} - {""})
UNSUPPORTED_NAMES = {
    r"encoder\.relative_position_bias\.|shared_position_bias\.": "BEiT with one relative position bias for all layers",
    r"rope_embeddings\.inv_freq": "a ViT with rotary positions that plainvit does not know",
    r"head\.cls_token": "AIMv2 with an attention pooling head",
    r"attention\.relative_position_bias_table": "a vision model with relative positions that is not BEiT",
}
# (end of a name, the class that has such names), the first that a file has; for kernels that several classes share
SIGNS = {
    "embeddings.class_embedding": "CLIP",
    "embeddings.patch_embedding.weight": "SigLIP",
    "embeddings.register_tokens": "DINOv2 with registers",
    "layer_scale1.lambda1": "DINOv2",
    "relative_position_bias_table": "BEiT",
    "lambda_1": "BEiT",
    "backbone.bit.embedder.convolution.weight": "ViTHybrid",
    "embeddings.distillation_token": "DeiT",
    "embeddings.cls_token": "ViT",
}
PROCESSOR = "the image processor's config"  # source of the settings of `read_processor`
SQUARE = ("CLIP", "SigLIP", "DINOv2", "DINOv2 with registers", "BEiT", "AIMv2")  # classes for square images alone
ASSUMED = {"CLIP": "activation", "I-JEPA": "norm_eps"}  # defaults from which published weights differ
# Weights of pre-training and of text towers
LEFT_OUT = ("embeddings.mask_token", "decoder.", "lm_head.", "embeddings.position_ids")
LEFT_OUT += ("text_model.", "text_projection.", "logit_scale", "logit_bias")


def _find_kernel(names: Shapes) -> str | None:
    """The name of the patch kernel in a file; None if it is not transformers'."""
    ends = tuple(f".{kernel}" for kernel in PATCH_KERNELS)
    return next((name for name in names if f".{name}".endswith(ends)), None)


def matches(tensors: Tensors) -> bool:
    return _find_kernel(tensors.shapes) is not None


def _find_kind(shapes: Shapes, kernel: str, prefix: str) -> Kind:
    """The model class, by names."""
    if prefix == "deit.":
        return KINDS["DeiT"]
    own = {"embeddings.patch_embeddings.weight": "DINOv3", "embeddings.patch_embed.weight": "AIMv2"}
    signs = (kind for sign, kind in SIGNS.items() if any(name.endswith(sign) for name in shapes))
    return KINDS[own.get(kernel) or next(signs, "I-JEPA")]


def read_processor(folder: Path) -> dict[str, Any]:
    """The settings of the image processor in a folder, alone or as version 5 saves it with a tokenizer."""
    alone = read_json(folder / "preprocessor_config.json")
    return alone or read_json(folder / "processor_config.json").get("image_processor") or {}


def detect(tensors: Tensors, hints: Hints, config: Mapping[str, Any], processor: Mapping[str, Any]) -> DetectedModel:
    """`config` and `processor` are config.json and preprocessor_config.json, or {}."""
    shapes, kernel = tensors.shapes, _find_kernel(tensors.shapes)
    assert kernel
    suffix = next(suffix for suffix in PATCH_KERNELS if f".{kernel}".endswith(f".{suffix}"))
    prefix = kernel.removesuffix(suffix)
    if prefix not in (*OWN_PREFIXES, ""):
        raise unsupported_model(f"a model with a ViT inside, under {prefix!r}", suffix)
    kind, labels = _find_kind(shapes, suffix, prefix), config
    config = config.get("vision_config") or config
    has_teacher = "distillation_classifier.weight" in shapes
    layout = make_layout(kind.section, shapes, prefix)
    if kind.name == "DeiT" and not has_teacher:
        layout["registers"] = layout.pop("distillation_token")  # no head reads it
    _check_supported(kind, layout, shapes, kernel, config)
    family = f"transformers {kind.name}"
    model, sources = _read_model(kind, layout, shapes, hints, config)
    decoder = any(name.startswith("decoder.") for name in shapes)  # ViTMAE: its encoder is a ViT
    default = default_processor(kind, masked=decoder, channels=model.channels)
    settings = add_defaults(processor, default) if processor else default
    mean, std = read_pixels(settings)
    preprocess, problem = read_preprocess(settings)
    pixels = PROCESSOR if processor else f"assumed: {family}'s usual processor"
    sources |= {"mean": pixels, "preprocess": f"assumed: a square resize, since {problem}" if problem else pixels}
    return DetectedModel(
        family=family,
        config=model.replace(mean=mean, std=std),
        layout=layout,
        sources=sources,
        preprocess=preprocess,
        class_names=read_class_names(labels, model.classes),
        ignore=lambda name: _is_left_out(name.removeprefix(prefix), model) or _is_empty(name, shapes),
        notes=["left out what is not the encoder: decoder"] if decoder else [],
    )


def _is_left_out(name: str, model: ViTConfig) -> bool:
    """Whether a weight belongs to pre-training, to a text tower, or to a part that the classifier does not read."""
    if name.startswith(LEFT_OUT):
        return True
    if not model.norm_final:
        return name.startswith("post_layernorm.")
    return name.startswith("head.") and model.pool == "average" and model.classes > 0


def _is_empty(name: str, shapes: Shapes) -> bool:
    """Whether these are the registers of a DINOv3 without any, (1, 0, D)."""
    return name.endswith("embeddings.register_tokens") and 0 in shapes[name]


def _check_supported(kind: Kind, layout: Layout, shapes: Shapes, kernel: str, config: Mapping[str, Any]) -> None:
    check_names(shapes, UNSUPPORTED_NAMES)
    if len(shapes[kernel]) == 2 and kind.name == "SigLIP":
        raise unsupported_model("SigLIP2 NaFlex, for images of any shape", f"{kernel} of two dimensions")
    needed = [] if kind.name in ("SigLIP", "I-JEPA", "AIMv2") else ["class_token"]
    if kind.name not in ("DINOv3", "BEiT"):
        needed.append("positions.0.table")
    elif kind.name == "BEiT" and layout["positions.0.table"].names[0] not in shapes:
        needed.append(f"{BLOCK}attention.relative.table")
    needed_names = [layout[ours].names[0].format(**FIRST) for ours in needed]
    missing = [name for name in needed_names if name not in shapes]
    if missing:
        raise ValueError(f"this transformers {kind.name} file lacks {', '.join(missing)}: it is incomplete")
    has_pooler = layout["pre_logits.weight"].names[0] in shapes
    if has_pooler and config.get("pooler_act", "tanh") != "tanh":
        raise unsupported_model("a ViT whose pooler is not tanh", "pooler_act in config.json")
    if float(config.get("rope_theta", 100.0)) != 100.0:
        raise unsupported_model(f"DINOv3 with rope_theta {config['rope_theta']}", "config.json")
    if config.get("is_native"):
        raise unsupported_model("AIMv2 for images of any shape", "is_native in config.json")


def _read_model(
    kind: Kind, layout: Layout, shapes: Shapes, hints: Hints, config: Mapping[str, Any]
) -> tuple[ViTConfig, dict[str, str]]:
    """(config, sources); mean and std come from the processor."""
    family, ours = f"transformers {kind.name}", read_shapes(layout, shapes)
    is_second_unread = kind.name == "DeiT" and "registers" in ours and "head_distillation.weight" not in ours
    activation = config.get("hidden_act", kind.activation)
    if activation not in SPELLINGS:
        raise ValueError(f"hidden_act {activation!r} in config.json is not supported; {nearest(activation, SPELLINGS)}")
    eps = config.get("rms_norm_eps" if kind.name == "AIMv2" else "layer_norm_eps", kind.eps)
    hints = replace(hints, stated_size=config.get("image_size"))
    if hints.heads is None and config:
        hints = replace(hints, stated_heads=(config.get("num_attention_heads", int(kind.heads)), "config.json"))
    numerics: dict[str, Any] = {"norm_eps": float(eps), "activation": SPELLINGS[activation]}
    settings, sources = read_vit(
        layout,
        shapes,
        family,
        hints,
        optional=SUPPORTED[kind.name],
        rows="all" if is_second_unread else "class",
    )
    settings |= numerics | FIXED.get(kind.name, {}) | _find_pooling(kind, layout, ours)
    is_assumed = settings["gated"] and kind.name == "DINOv3" and not config
    ignores_activation = settings["gated"] and kind.name.startswith("DINOv2")  # its code has SiLU there
    if is_assumed or ignores_activation:
        settings["activation"] = "silu"
    model = ViTConfig(**settings)
    if model.posemb == "bias" and model.grid[0] != model.grid[1]:
        raise unsupported_model("BEiT for images that are not square", "transformers mixes up rows and columns there")
    source = "config.json" if config else f"{family}'s default"
    sources |= {"activation": source, "norm_eps": source}
    if is_assumed:
        sources["activation"] = "assumed: SiLU, as in the published gated DINOv3"
    if kind.name in ASSUMED and not config:
        sources[ASSUMED[kind.name]] = f"assumed: {family}'s default"
    stated = pair(config["image_size"]) if config.get("image_size") else model.image_size
    if stated != model.image_size:
        sources["image_size"] = f"assumed: the {stated[0]} pixels of config.json without those that patches do not fill"
    return model, sources


def _find_pooling(kind: Kind, layout: Layout, ours: Shapes) -> dict[str, Any]:
    """What the head reads, as each class's code has it."""
    head = ours.get("head.weight", (0,))
    if kind.name == "CLIP" and head[0]:  # CLIPForImageClassification averages patches before the final norm
        return {"pool": "average", "norm_final": False}
    if "pool.probe" in ours and not head[0]:
        return {"pool": "attention"}
    if kind.name == "BEiT" and "pooler" in layout["norm.weight"].names[0]:
        return {"pool": "average", "norm_pooled": True}
    if kind.name.startswith("DINOv2") and head[-1] == 2 * ours["embedding.weight"][0]:
        return {"pool": "token+average"}
    return {"pool": "token" if "class_token" in ours else "average"}


def layout_for(config: ViTConfig) -> Layout:
    kind = choose_kind(config)
    is_written = {
        "pooler.layernorm": config.norm_pooled,
        "cls_classifier": config.distillation,
        "query.bias": kind.name == "BEiT" and config.block_bias == "no_k",
        "q_proj.bias": kind.name == "DINOv3" and config.block_bias == "no_k",
        "mlp.up_proj": kind.name == "DINOv3" and not config.gated,
        "weights_": kind.name.startswith("DINOv2") and config.gated,
    }
    name_parts = tuple(part for part, holds in is_written.items() if holds)
    prefix = kind.prefix if config.classes or config.projection else ""
    layout = make_layout(kind.section, prefix=prefix, name_parts=name_parts)
    if kind.name == "DeiT" and not config.distillation:
        layout["registers"] = layout.pop("distillation_token")
    return layout


def list_unsupported(config: ViTConfig) -> Iterator[tuple[str, str]]:
    """(part, reason) for what the closest of transformers' classes does not have."""
    kind = choose_kind(config)
    library = f"transformers' {kind.name}"
    yield from list_unlike(
        config, library, **{name: (value,) for name, value in FIXED.get(kind.name, {}).items()}, **SUPPORTED[kind.name]
    )
    if config.stem:
        yield from list_unlike_resnet(config, "timm")
        if not config.stem.blocks:
            yield "stem", "transformers' ViTHybrid has no stem without stages"
    if config.representation and config.classes:
        yield "pre_logits", f"{library} has no hidden layer before its classifier"
    if kind.name in ("CLIP", "SigLIP", "DINOv3", "AIMv2") and config.classes:
        yield "head", f"{library} has no classifier of these features: load with classes=0"
    if kind.name in SQUARE and config.image_size[0] != config.image_size[1]:
        yield "image_size", f"{library} takes square images"
    if kind.name == "SigLIP" and config.class_token:
        yield "pool", "transformers' SigLIP has no class token"
    if kind.name == "BEiT" and (config.pool == "average") != config.norm_pooled:
        yield "pool", "transformers' BEiT reads the class token, or normalizes the mean of the patches"
    if kind.name == "DeiT" and config.registers > 1:
        yield "registers", "transformers' DeiT has one token besides the class token"
    if config.distillation and not config.classes:
        yield "distillation", "transformers' DeiT without a classifier reads its class token alone"
    if kind.name.startswith("DINOv2"):
        if (config.pool == "token+average") != (config.classes > 0):
            yield "pool", "transformers' DINOv2 reads the class token, and its classifier the mean of the patches too"
        if find_mlp_ratio(config) is None:
            yield (
                "mlp_dim",
                "transformers' DINOv2 has MLPs that are a whole multiple of its width, or two thirds of one",
            )
        if config.gated and config.activation != "silu":
            yield "activation", "transformers' DINOv2 has SiLU in gated MLPs"
