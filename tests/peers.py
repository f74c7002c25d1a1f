"""Other libraries' models in tests: random weights, files, pixels."""

import json
import re
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

State = dict[str, Tensor]

ENCODER_LAYER = (
    (r"self_attn\.in_proj_", "attention.qkv."),
    (r"self_attn\.out_proj\.", "attention.out."),
    (r"linear([12])\.", r"mlp.fc\1."),
)


def from_encoder_layer(state: State) -> State:
    """One torch.nn.TransformerEncoderLayer, for one Block."""
    for pattern, replacement in ENCODER_LAYER:
        state = {re.sub(f"^{pattern}", replacement, name): x for name, x in state.items()}
    return state


def normalize(model: Any, images: Tensor) -> Tensor:
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
