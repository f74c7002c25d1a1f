"""The names of transformers' vision models: a record per model class, and one function that makes a layout of it."""

from dataclasses import dataclass, replace

from plainvit.config import ViTConfig
from plainvit.weights.layout import FIRST_ROW, LEADING_AXIS, PATCHES, SAME, Layout, entry, linear
from plainvit.weights.timm_resnet import unit_layout

STEM = "embeddings.patch_embeddings.backbone.bit."  # ViTHybrid's ResNet


@dataclass(frozen=True)
class Names:
    """The names of one model class, without its prefix; the defaults are ViT's on disk."""

    patches: str = "embeddings.patch_embeddings.projection."
    class_token: str = "embeddings.cls_token"
    positions: str = "embeddings.position_embeddings"
    block: str = "encoder.layer.{i}."
    norms: tuple[str, str] = ("layernorm_before.", "layernorm_after.")
    qkv: tuple[str, str, str] = ("attention.attention.query.", "attention.attention.key.", "attention.attention.value.")
    out: str = "attention.output.dense."
    mlp: tuple[str, str] = ("intermediate.dense.", "output.dense.")
    gated_mlp: tuple[tuple[str, ...], str] = (("mlp.weights_in.",), "mlp.weights_out.")
    scales: tuple[str, str] = ("layer_scale1.lambda1", "layer_scale2.lambda1")
    bias_table: str = "attention.attention.relative_position_bias.relative_position_bias_table"
    norm: str = "layernorm."


def in_memory(names: Names) -> Names:
    """The names of version 5's modules, which differ from those on disk."""
    return replace(
        names,
        block="layers.{i}.",
        qkv=_projections("attention."),
        out="attention.o_proj.",
        mlp=("mlp.fc1.", "mlp.fc2."),
        gated_mlp=(("mlp.gate_proj.", "mlp.up_proj."), "mlp.down_proj."),
        bias_table="relative_position_bias.relative_position_bias_table",
    )


@dataclass(frozen=True)
class Kind:
    """A model class: its own prefix, its names, and the defaults of its code."""

    name: str
    prefix: str
    names: Names = Names()
    eps: float = 1e-12
    activation: str = "gelu"
    heads: int = 12
    assumed: tuple[str, ...] = ()  # defaults from which published weights differ


def _projections(block: str) -> tuple[str, str, str]:
    return f"{block}q_proj.", f"{block}k_proj.", f"{block}v_proj."


TOWER = Names(
    patches="embeddings.patch_embedding.",
    class_token="embeddings.class_embedding",
    positions="embeddings.position_embedding.weight",
    block="encoder.layers.{i}.",
    norms=("layer_norm1.", "layer_norm2."),
    qkv=_projections("self_attn."),
    out="self_attn.out_proj.",
    mlp=("mlp.fc1.", "mlp.fc2."),
    norm="post_layernorm.",
)
_DINOV2 = Names(norms=("norm1.", "norm2."), mlp=("mlp.fc1.", "mlp.fc2."))
_DINOV3 = Names(
    patches="embeddings.patch_embeddings.",
    block="layer.{i}.",
    norms=("norm1.", "norm2."),
    qkv=_projections("attention."),
    out="attention.o_proj.",
    mlp=("mlp.up_proj.", "mlp.down_proj."),
    gated_mlp=(("mlp.gate_proj.", "mlp.up_proj."), "mlp.down_proj."),
    norm="norm.",
)
_AIMV2 = Names(
    patches="embeddings.patch_embed.",
    positions="embeddings.position_embedding.weight",
    block="encoder.layers.{i}.",
    norms=("rms_norm1.", "rms_norm2."),
    qkv=_projections("attention."),
    out="attention.out_proj.",
    mlp=("ffn.up_proj.", "ffn.down_proj."),
    gated_mlp=(("ffn.gate_proj.", "ffn.up_proj."), "ffn.down_proj."),
    norm="rms_norm.",
)
KINDS = {
    kind.name: kind
    for kind in (
        Kind("ViT", "vit."),
        Kind("ViTHybrid", "vit."),
        Kind("DeiT", "deit."),
        Kind("CLIP", "vision_model.", TOWER, 1e-5, "quick_gelu", assumed=("activation",)),
        Kind("SigLIP", "vision_model.", TOWER, 1e-6, "gelu_pytorch_tanh"),
        Kind("DINOv2", "dinov2.", _DINOV2, 1e-6),
        Kind("DINOv2 with registers", "dinov2_with_registers.", _DINOV2, 1e-6),
        Kind("DINOv3", "", _DINOV3, 1e-5, heads=6),
        Kind("I-JEPA", "ijepa.", assumed=("norm_eps",)),
        Kind("BEiT", "beit.", Names(scales=("lambda_1", "lambda_2"))),
        Kind("AIMv2", "", _AIMV2, 1e-5, "silu", heads=8),
    )
}


def vit_layout(kind: Kind, prefix: str, config: ViTConfig) -> Layout:
    """Names of a model. DeiT's second token is a register if no head reads it."""
    names, block = kind.names, prefix + kind.names.block
    is_tower, fc1, fc2 = kind.names is TOWER, (names.mlp[0],), names.mlp[1]
    if config.gated:
        fc1, fc2 = names.gated_mlp
    second = "registers" if kind.name == "DeiT" and not config.distillation else "distillation_token"
    table = SAME if names.positions.endswith(".weight") else LEADING_AXIS
    layout = {
        **linear("embedding", prefix + names.patches, conversion=PATCHES),
        "class_token": entry(prefix + names.class_token, conversion=FIRST_ROW if is_tower else LEADING_AXIS),
        "registers": entry(f"{prefix}embeddings.register_tokens", conversion=LEADING_AXIS),
        second: entry(f"{prefix}embeddings.distillation_token", conversion=LEADING_AXIS),
        "positions.0.table": entry(prefix + names.positions, conversion=table),
        "norm_patches.weight": entry(f"{prefix}embeddings.rms_norm.weight"),
        **linear("norm_tokens", f"{prefix}pre_layrnorm."),
        **linear("blocks.{i}.norm1", block + names.norms[0]),
        **linear("blocks.{i}.attention.qkv", *(block + part for part in names.qkv)),
        "blocks.{i}.attention.relative.table": entry(block + names.bias_table),
        **linear("blocks.{i}.attention.out", block + names.out),
        "blocks.{i}.residual1.scale": entry(block + names.scales[0]),
        **linear("blocks.{i}.norm2", block + names.norms[1]),
        **linear("blocks.{i}.mlp.fc1", *(block + part for part in fc1)),
        **linear("blocks.{i}.mlp.fc2", block + fc2),
        "blocks.{i}.residual2.scale": entry(block + names.scales[1]),
        **linear("norm", prefix + ("pooler.layernorm." if config.norm_pooled else names.norm)),
        **linear("pre_logits", f"{prefix}pooler.dense."),
        "projection.weight": entry("visual_projection.weight"),
        **linear("head", "cls_classifier." if config.distillation else "classifier."),
        **linear("head_distillation", "distillation_classifier."),
        **_pool_layout(f"{prefix}head."),
    }
    if config.stem:
        layout |= _stem_layout(f"{prefix}{STEM}")
    if config.block_bias == "no_k":
        layout["blocks.{i}.attention.qkv.bias"] = entry(block + names.qkv[0] + "bias", block + names.qkv[2] + "bias")
    return layout


def _stem_layout(stem: str) -> Layout:
    """ViTHybrid's BiT, whose units have timm's names."""
    layout = {"stem.root.weight": entry(f"{stem}embedder.convolution.weight")}
    layout |= linear("stem.root_norm", f"{stem}embedder.norm.")
    return layout | unit_layout("stem.stages.{s}.{u}.", stem + "encoder.stages.{s}.layers.{u}.")


def _pool_layout(head: str) -> Layout:
    """SigLIP's attention pooling, whose q, k and v are one matrix."""
    layout = {"pool.probe": entry(f"{head}probe"), **linear("pool.out", f"{head}attention.out_proj.")}
    for leaf in ("weight", "bias"):
        thirds = [f"{head}attention.in_proj_{leaf}[{third}/3]" for third in range(3)]
        layout |= {f"pool.q.{leaf}": entry(thirds[0]), f"pool.kv.{leaf}": entry(*thirds[1:])}
    layout |= linear("pool.norm", f"{head}layernorm.")
    return layout | linear("pool.mlp.fc1", f"{head}mlp.fc1.") | linear("pool.mlp.fc2", f"{head}mlp.fc2.")


def choose_kind(config: ViTConfig) -> Kind:
    """The class that a model is written as."""
    second = config.distillation or (config.registers == 1 and config.posemb_prefix == "all")
    name = "ViT"
    if config.stem:
        name = "ViTHybrid"
    elif config.posemb == "bias":
        name = "BEiT"
    elif config.rotary != "none":
        name = "DINOv3"
    elif config.norm_kind == "rms":
        name = "AIMv2"
    elif config.norm_embedding != "none":
        name = "CLIP"
    elif config.pool == "attention":
        name = "SigLIP"
    elif config.layer_scale is not None and (not config.classes or config.pool == "token+average"):
        name = "DINOv2 with registers" if config.registers else "DINOv2"
    elif not config.class_token:
        name = "I-JEPA"
    elif second:
        name = "DeiT"
    return KINDS[name]
