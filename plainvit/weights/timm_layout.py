"""timm's names and the spellings of the families that share them (DeiT III, DINOv2, DINOv3, EVA-02, BEiT)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from plainvit.config import ViTConfig
from plainvit.weights.layout import LEADING_AXIS, PATCHES, Layout, entry, linear

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Spelling:
    """What differs between files; the defaults are timm's ViT.

    qkv: one matrix (fused), with the biases of q and v apart (qv) or stored with zeros for k (masked); or three layers.
    """

    registers: str = "reg_token"
    scales: tuple[str, str] = ("ls1.gamma", "ls2.gamma")
    norm: str = "norm"
    qkv: Literal["fused", "qv", "masked", "split"] = "fused"
    fc1: tuple[str, ...] = ("mlp.fc1.",)
    fc2: str = "mlp.fc2."
    inner: tuple[str, str] = ("attn.norm.", "mlp.norm.")


def read_spelling(shapes: Shapes) -> Spelling:
    """The spelling of a file, by the names of its first block."""

    def has(name: str) -> bool:
        return f"blocks.0.{name}" in shapes

    registers = next((name for name in ("register_tokens", "storage_tokens") if name in shapes), "reg_token")
    mlps = (("mlp.fc1_g.", "mlp.fc1_x."), "mlp.fc2."), (("mlp.w12.",), "mlp.w3."), (("mlp.w1.", "mlp.w2."), "mlp.w3.")
    fc1, fc2 = next((mlp for mlp in mlps if has(f"{mlp[0][0]}weight")), (("mlp.fc1.",), "mlp.fc2."))
    qkv = "split" if has("attn.q_proj.weight") else "qv" if has("attn.q_bias") else "fused"
    return Spelling(
        registers=registers,
        scales=("gamma_1", "gamma_2") if has("gamma_1") else ("ls1.gamma", "ls2.gamma"),
        norm="fc_norm" if "fc_norm.weight" in shapes and "norm.weight" not in shapes else "norm",
        qkv="masked" if has("attn.qkv.bias_mask") else qkv,
        fc1=fc1,
        fc2=fc2,
        inner=("attn.inner_attn_ln.", "mlp.ffn_ln.") if has("mlp.ffn_ln.weight") else ("attn.norm.", "mlp.norm."),
    )


def choose_spelling(config: ViTConfig) -> Spelling:
    """The spelling of the class of timm that computes what the model does."""
    is_eva = uses_eva(config)
    is_split = is_eva and config.rotary == "eva02" and config.norm_inner != "none"
    apart = is_split or config.rotary == "dinov3" or config.norm_kind == "rms"
    return Spelling(
        scales=("gamma_1", "gamma_2") if is_eva else ("ls1.gamma", "ls2.gamma"),
        norm="fc_norm" if config.norm_pooled else "norm",
        qkv="split" if is_split else "qv" if config.block_bias == "no_k" else "fused",
        fc1=("mlp.fc1_g.", "mlp.fc1_x.") if apart and config.gated else ("mlp.fc1.",),
    )


def uses_eva(config: ViTConfig) -> bool:
    """Whether timm's Eva or Beit computes the model, rather than its VisionTransformer."""
    return config.rotary != "none" or config.block_bias == "no_k"


def vit_layout(spelling: Spelling) -> Layout:
    """Names of a ViT."""
    block, attention = "blocks.{i}.", "blocks.{i}.attn."
    return {
        **linear("embedding", "patch_embed.proj.", conversion=PATCHES),
        **linear("norm_patches", "patch_embed.norm."),
        "class_token": entry("cls_token", conversion=LEADING_AXIS),
        "distillation_token": entry("dist_token", conversion=LEADING_AXIS),
        "registers": entry(spelling.registers, conversion=LEADING_AXIS),
        "positions.0.table": entry("pos_embed", conversion=LEADING_AXIS),
        **linear("norm_tokens", "norm_pre."),
        **linear(f"{block}norm1", f"{block}norm1."),
        **_qkv_layout(f"{block}attention.qkv", attention, spelling.qkv),
        **linear(f"{block}attention.query_keys.norm_q", f"{attention}q_norm."),
        **linear(f"{block}attention.query_keys.norm_k", f"{attention}k_norm."),
        f"{block}attention.relative.table": entry(f"{attention}relative_position_bias_table"),
        **linear(f"{block}attention.norm", block + spelling.inner[0]),
        **linear(f"{block}attention.out", f"{attention}proj."),
        f"{block}residual1.scale": entry(block + spelling.scales[0]),
        **linear(f"{block}norm2", f"{block}norm2."),
        **linear(f"{block}mlp.fc1", *(block + name for name in spelling.fc1)),
        **linear(f"{block}mlp.norm", block + spelling.inner[1]),
        **linear(f"{block}mlp.fc2", block + spelling.fc2),
        f"{block}residual2.scale": entry(block + spelling.scales[1]),
        **linear("norm", f"{spelling.norm}."),
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


def _qkv_layout(ours: str, theirs: str, kind: str) -> Layout:
    if kind == "split":
        weights = entry(*(f"{theirs}{letter}_proj.weight" for letter in "qkv"))
        return {f"{ours}.weight": weights, f"{ours}.bias": entry(f"{theirs}q_proj.bias", f"{theirs}v_proj.bias")}
    biases = {"qv": ("q_bias", "v_bias"), "masked": ("qkv.bias[0/3]", "qkv.bias[2/3]")}.get(kind, ("qkv.bias",))
    return {f"{ours}.weight": entry(f"{theirs}qkv.weight"), f"{ours}.bias": entry(*(theirs + bias for bias in biases))}
