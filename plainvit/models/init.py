"""Initial weights by name: `google` as the paper's JAX code draws them, `timm` as timm's default does.

Two differences from PyTorch's helpers: q, k and v are drawn as separate D x D matrices, because Xavier on the fused
matrix gives a std sqrt(2) too small; and the std of a truncated normal is corrected for the truncation.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor, nn

if TYPE_CHECKING:
    from plainvit.models.resnet import Body, ResNet
    from plainvit.models.vit import ViT

# The std of a unit normal truncated at +-2; JAX divides by it
TRUNCATED_STD = 0.87962566103423978


def lecun_normal(weight: Tensor, generator: Generator | None) -> None:
    """Truncated normal of variance 1 / fan_in."""
    std = math.sqrt(1 / weight[0].numel()) / TRUNCATED_STD
    nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator)


@torch.no_grad()
def initialize_vit(model: "ViT", generator: Generator | None = None) -> None:
    """Draws every weight of a ViT by the scheme `config.init`."""
    config = model.config
    draw = {"google": _draw_google, "timm": _draw_timm}[config.init]
    for name, weight in model.named_parameters():
        if name.startswith("stem."):
            continue
        path, _, leaf = name.rpartition(".")
        module = path.rpartition(".")[2]  # "" for parameters of the ViT itself
        if leaf == "scale" and config.layer_scale is not None:
            nn.init.constant_(weight, config.layer_scale)
        elif module.startswith("norm"):
            nn.init.constant_(weight, 1.0 if leaf == "weight" else 0.0)
        else:
            draw(module, leaf, weight, generator)
    if config.init == "timm":
        # The patch embedding, drawn above too, has PyTorch's default for convolutions, also for the bias.
        # Leaving out its first draw would change the weights that a seed gives
        bound = model.embedding.in_features**-0.5
        for weight in model.embedding.parameters():
            nn.init.uniform_(weight, -bound, bound, generator)
    if model.stem:
        initialize_resnet(model.stem, config.init, generator)


def _draw_google(module: str, leaf: str, weight: Tensor, generator: Generator | None) -> None:
    match module, leaf:
        case "embedding" | "pre_logits" | "projection", "weight":
            lecun_normal(weight, generator)
        case "qkv" | "kv", "weight":  # stacked D x D matrices
            for matrix in weight.split(weight.shape[1]):
                nn.init.xavier_uniform_(matrix, generator=generator)
        case "q" | "out" | "fc1" | "fc2", "weight":
            nn.init.xavier_uniform_(weight, generator=generator)
        case "fc1" | "fc2", "bias":
            nn.init.normal_(weight, 0.0, 1e-6, generator)
        case _, "table" | "rows" | "columns":
            nn.init.normal_(weight, 0.0, 0.02, generator)
        case _, "probe":
            nn.init.xavier_uniform_(weight[0], generator=generator)
        case _, "registers":  # not in the paper: follows the registers paper
            nn.init.normal_(weight, 0.0, 1e-6, generator)
        case _, "distillation_token":  # not in the paper: follows DeiT
            nn.init.trunc_normal_(weight, std=0.02, generator=generator)
        case _:  # class token, heads, remaining biases
            nn.init.zeros_(weight)


def _draw_timm(module: str, leaf: str, weight: Tensor, generator: Generator | None) -> None:
    match module, leaf:
        case _, "bias":
            nn.init.zeros_(weight)
        case _, "class_token" | "registers":
            nn.init.normal_(weight, 0.0, 1e-6, generator)
        case _, "probe":
            nn.init.trunc_normal_(weight, std=weight.shape[-1] ** -0.5, generator=generator)
        case _:
            nn.init.trunc_normal_(weight, std=0.02, generator=generator)


@torch.no_grad()
def initialize_resnet(model: "ResNet | Body", scheme: str, generator: Generator | None = None) -> None:
    """Draws every weight of a ResNet. Standardized convolutions do not depend on the scale of their kernels."""
    for name, weight in model.named_parameters():
        module, leaf = name.split(".")[-2:]
        if "norm" in module:
            # A hybrid's last norm of a unit starts at 0, so that each unit starts as its shortcut
            is_zero = leaf == "bias" or (module == "norm3" and not model.config.preactivation)
            nn.init.constant_(weight, 0.0 if is_zero else 1.0)
        elif module == "head":
            if scheme == "timm" and leaf == "weight":
                nn.init.normal_(weight, 0.0, 0.01, generator)
            else:
                nn.init.zeros_(weight)
        elif scheme == "google":
            lecun_normal(weight, generator)
        elif not model.config.blocks:  # timm uses PyTorch's default for a stem of the root alone
            bound = weight[0].numel() ** -0.5
            nn.init.uniform_(weight, -bound, bound, generator)
        else:
            nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu", generator=generator)
