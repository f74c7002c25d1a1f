"""Weights of other libraries under plainvit's names: a small mapping that shares no code with plainvit.weights."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

State = dict[str, Tensor]

# (pattern, replacement), tried in this order; the first that matches the start of a name is used
TIMM = (
    (r"cls_token$", "class_token"),
    (r"dist_token$", "distillation_token"),
    (r"reg_token$", "registers"),
    (r"pos_embed$", "positions.0.table"),
    (r"patch_embed\.proj\.", "embedding."),
    (r"patch_embed\.backbone\.(stem\.)?conv\.", "stem.root."),
    (r"patch_embed\.backbone\.(stem\.)?norm\.", "stem.root_norm."),
    (r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.downsample\.conv\.", r"stem.stages.\1.\2.projection."),
    (r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.downsample\.norm\.", r"stem.stages.\1.\2.norm_projection."),
    (r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.", r"stem.stages.\1.\2."),
    (r"blocks\.(\d+)\.attn\.qkv\.", r"blocks.\1.attention.qkv."),
    (r"blocks\.(\d+)\.attn\.proj\.", r"blocks.\1.attention.out."),
    (r"blocks\.(\d+)\.ls([12])\.gamma$", r"blocks.\1.residual\2.scale"),
    (r"fc_norm\.", "norm."),
    (r"attn_pool\.latent$", "pool.probe"),
    (r"attn_pool\.proj\.", "pool.out."),
    (r"attn_pool\.", "pool."),
    (r"head_dist\.", "head_distillation."),
)
TIMM_RESNET = (
    (r"stem\.conv\.", "body.root."),
    (r"stages\.(\d+)\.blocks\.(\d+)\.downsample\.conv\.", r"body.stages.\1.\2.projection."),
    (r"stages\.(\d+)\.blocks\.(\d+)\.", r"body.stages.\1.\2."),
    (r"norm\.", "body.norm."),
    (r"head\.fc\.", "head."),
)
TORCHVISION = (
    (r"class_token$", "class_token"),
    (r"conv_proj\.", "embedding."),
    (r"encoder\.pos_embedding$", "positions.0.table"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.ln_([12])\.", r"blocks.\1.norm\2."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_", r"blocks.\1.attention.qkv."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.", r"blocks.\1.attention.out."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.0\.", r"blocks.\1.mlp.fc1."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.3\.", r"blocks.\1.mlp.fc2."),
    (r"encoder\.ln\.", "norm."),
    (r"heads\.pre_logits\.", "pre_logits."),
    (r"heads\.head\.", "head."),
)
TRANSFORMERS = (
    (r"vit\.embeddings\.cls_token$", "class_token"),
    (r"vit\.embeddings\.position_embeddings$", "positions.0.table"),
    (r"vit\.embeddings\.patch_embeddings\.projection\.", "embedding."),
    (r"vit\.layers\.(\d+)\.attention\.o_proj\.", r"blocks.\1.attention.out."),
    (r"vit\.layers\.(\d+)\.attention\.([qkv])_proj\.", r"blocks.\1.attention.\2."),
    (r"vit\.layers\.(\d+)\.layernorm_before\.", r"blocks.\1.norm1."),
    (r"vit\.layers\.(\d+)\.layernorm_after\.", r"blocks.\1.norm2."),
    (r"vit\.layers\.(\d+)\.", r"blocks.\1."),
    (r"vit\.layernorm\.", "norm."),
    (r"classifier\.", "head."),
)
ENCODER_LAYER = (
    (r"self_attn\.in_proj_", "attention.qkv."),
    (r"self_attn\.out_proj\.", "attention.out."),
    (r"linear([12])\.", r"mlp.fc\1."),
)


def from_timm(state: State) -> State:
    """timm's VisionTransformer, its distilled form and its hybrids."""
    return _reshape(_rename(state, TIMM))


def from_timm_resnet(state: State) -> State:
    """timm's ResNetV2 as it builds BiT; its head is a 1 x 1 convolution."""
    renamed = _rename(state, TIMM_RESNET)
    return {name: x.flatten(1) if name == "head.weight" else x for name, x in renamed.items()}


def from_torchvision(state: State) -> State:
    return _reshape(_rename(state, TORCHVISION))


def from_transformers(state: State) -> State:
    """ViTForImageClassification as it is in memory: q, k and v apart."""
    renamed = _rename(state, TRANSFORMERS)
    for name in [name for name in renamed if ".attention.q." in name]:
        parts = [renamed.pop(name.replace(".q.", f".{letter}.")) for letter in "qkv"]
        renamed[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    return _reshape(renamed)


def from_encoder_layer(state: State) -> State:
    """One torch.nn.TransformerEncoderLayer, for one Block."""
    return _rename(state, ENCODER_LAYER)


def normalise(model: Any, images: Tensor) -> Tensor:
    """Pixels in [0, 1] by the mean and std of the model's config, computed here."""
    mean, std = (torch.tensor(x, dtype=images.dtype)[:, None, None] for x in (model.config.mean, model.config.std))
    return (images - mean) / std


def write(value: Any, path: Path) -> Path:
    """A state dict as .safetensors, or anything as a PyTorch file."""
    if path.suffix == ".safetensors":
        safetensors.torch.save_file({name: x.contiguous() for name, x in value.items()}, path)
    else:
        torch.save(value, path)
    return path


def hollow(state: State, path: Path) -> Path:
    """A safetensors file of the right names and shapes, all zeros, that takes no room on disk."""
    header, end = {}, 0
    for name, x in state.items():
        start, end = end, end + 4 * x.numel()
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


@torch.no_grad()
def scramble(module: nn.Module, seed: int = 0) -> None:
    """Gives every parameter values that no mistake could hide behind: no zeros, no ones, nothing equal.

    Matrices keep the scale of their input, so that a deep model neither dies nor explodes.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("bias", "in_proj_bias"):
            weight.copy_(0.3 * noise)
        elif leaf in ("gamma", "scale") or (leaf == "weight" and weight.ndim == 1):
            weight.copy_(1 + 0.3 * noise)
        elif leaf in ("weight", "in_proj_weight"):
            weight.copy_(1.5 * noise * weight[0].numel() ** -0.5)
        else:  # tokens and positions
            weight.copy_(0.5 * noise)


def _rename(state: State, rules: Iterable[tuple[str, str]]) -> State:
    return {_renamed(name, rules): x.clone() for name, x in state.items()}


def _renamed(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", replacement, name)
    return name


def _reshape(state: State) -> State:
    """Tokens and tables lose their batch axis, the patch convolution becomes a matrix."""
    loose = ("class_token", "distillation_token", "registers", "positions.0.table")
    return {
        name: x.flatten(1) if name == "embedding.weight" else x[0] if name in loose else x for name, x in state.items()
    }
