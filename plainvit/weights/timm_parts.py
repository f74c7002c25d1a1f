"""What the weights of a file with timm's names show of a model's parts, and what its name or family adds."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from plainvit.config import nearest
from plainvit.weights.grids import Hints, read_heads, unsupported_model
from plainvit.weights.timm_architectures import ACTIVATIONS, load_architectures
from plainvit.weights.timm_layout import Shapes, Spelling


def read_parts(shapes: Shapes, spelling: Spelling) -> dict[str, Any]:
    """The settings of `models/parts.py` that names and shapes show."""
    first = "blocks.0."
    inner = [f"{first}{name}weight" in shapes for name in spelling.inner]
    fc1, fc2 = (shapes[f"{first}{name}weight"] for name in (spelling.fc1[0], spelling.fc2))
    has_norm = "norm.weight" in shapes or "fc_norm.weight" in shapes
    patches = "patches" if "patch_embed.norm.weight" in shapes else "none"
    return {
        "gated": len(spelling.fc1) > 1 or fc1[0] == 2 * fc2[1],
        "norm_inner": "both" if inner[0] else "mlp" if inner[1] else "none",
        "norm_kind": "layer" if f"{first}norm1.bias" in shapes else "rms",
        "norm_embedding": "tokens" if "norm_pre.weight" in shapes else patches,
        "norm_final": has_norm,
        "qk_norm": f"{first}attn.q_norm.weight" in shapes,
        "block_bias": _find_block_bias(shapes, spelling),
        "embedding_bias": "norm_pre.weight" not in shapes,
    }


def _find_block_bias(shapes: Shapes, spelling: Spelling) -> str:
    attention = "blocks.0.attn."
    if spelling.qkv in ("qv", "masked") or f"{attention}q_proj.bias" in shapes:
        return "no_k"
    if f"{attention}qkv.bias" in shapes:
        return "all"
    return "no_qkv" if f"{attention}proj.bias" in shapes else "none"


def guess_rotary(shapes: Shapes) -> str:
    """The rotary positions of a family whose weights look like this; the weights do not contain them."""
    has_table, has_class = "pos_embed" in shapes, "cls_token" in shapes
    if "rope_embed.periods" in shapes or "storage_tokens" in shapes:
        return "dinov3"
    if "norm_pre.weight" in shapes:
        return "none" if "norm.weight" in shapes and "attn_pool.latent" not in shapes else "pe"
    if not has_table and "blocks.0.gamma_1" in shapes and "blocks.0.attn.relative_position_bias_table" not in shapes:
        return "eva02" if not has_class else "dinov3" if "reg_token" in shapes else "axial"
    is_gated = any(f"blocks.0.mlp.{name}.weight" in shapes for name in ("fc1_g", "w1"))
    is_packed = shapes.get("blocks.0.mlp.fc1.weight", (0,))[0] == 2 * shapes.get("blocks.0.mlp.fc2.weight", (0, -1))[-1]
    return "eva02" if is_gated or (is_packed and "blocks.0.attn.q_bias" in shapes) else "none"


def read_numerics(
    shapes: Shapes, spelling: Spelling, hints: Hints, sidecar: Mapping[str, Any], family: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """(settings, sources) of what no weight shows: heads, activation, epsilon, rotary positions."""
    arguments, name = sidecar.get("model_args") or {}, str(sidecar.get("architecture") or "")
    known = load_architectures().get(name)
    if known:
        settings = dict(known)
        sources = dict.fromkeys(settings, f"config.json: timm's {name}")
    else:
        settings, sources = _guess_numerics(shapes, spelling, hints, family)
    if "act_layer" in arguments and arguments["act_layer"] is not None:
        activation = arguments["act_layer"]
        if activation not in ACTIVATIONS:
            known_names = nearest(str(activation), ACTIVATIONS)
            raise ValueError(f"act_layer {activation!r} in config.json is not supported; {known_names}")
        settings["activation"], sources["activation"] = ACTIVATIONS[activation], "config.json"
    if hints.heads is not None or "num_heads" in arguments:
        given = hints.heads is not None
        settings["heads"] = hints.heads if given else arguments["num_heads"]
        sources["heads"] = "given by the caller" if given else "config.json"
    return settings, sources


def _guess_numerics(
    shapes: Shapes, spelling: Spelling, hints: Hints, family: str
) -> tuple[dict[str, Any], dict[str, str]]:
    rotary, width = guess_rotary(shapes), shapes["patch_embed.proj.weight"][0]
    parts = read_parts(shapes, spelling)
    if rotary == "pe":
        raise unsupported_model("a Perception Encoder without config.json, whose rotary grid is unknown", "norm_pre")
    bias_table = shapes.get("blocks.0.attn.relative_position_bias_table", ())
    if len(bias_table) == 2:
        heads, heads_source = bias_table[1], "columns of relative_position_bias_table"
    elif rotary == "dinov3" and hints.heads is None and width % 64 == 0:
        heads = 32 if width == 4096 else width // 64
        heads_source = f"assumed: DINOv3 of width {width} has {heads} heads"
    else:
        heads, heads_source = read_heads(width, hints, family)
    coarse = has_coarse_norms(SimpleNamespace(rotary=rotary, **parts))
    eps, activation = (1e-5 if coarse else 1e-6), "silu" if parts["gated"] else "gelu"
    code = "assumed: timm's default" if family in ("timm", "CLIP") or coarse else f"{family}'s code"
    settings = {"heads": heads, "activation": activation, "norm_eps": eps, "rotary": rotary, "rotary_grid": 16}
    exact = "SiLU" if parts["gated"] else "exact GELU"
    sources = {"heads": heads_source, "activation": f"{code}, {exact}", "norm_eps": f"{code}, {eps:g}"}
    if rotary != "none":
        sources["rotary"] = f"assumed: {rotary}, by the names of the weights"
    return settings, sources


def has_coarse_norms(parts: Any) -> bool:
    """Whether norms have an epsilon of 1e-5: CLIP, DINOv3, PE, AIMv2 and BEiT-3."""
    is_beit3 = parts.norm_inner == "both" and parts.block_bias == "all"
    return parts.rotary in ("dinov3", "pe") or parts.norm_embedding == "tokens" or parts.norm_kind == "rms" or is_beit3
