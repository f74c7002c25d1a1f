"""The models' arithmetic in NumPy float64, written from the papers and sharing no code with plainvit.

Slow and literal on purpose: loops over patches; only convolutions and GroupNorm are PyTorch's. Weights come as a
dictionary of arrays in plainvit's names; [B, N, D] are tokens, [B, C, H, W] images and feature maps.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Array = np.ndarray
Weights = Mapping[str, Array]


def weights_of(module: nn.Module) -> dict[str, Array]:
    return {name: x.detach().double().numpy() for name, x in module.state_dict().items()}


def under(weights: Weights, prefix: str) -> dict[str, Array]:
    """The weights of one part, without its name."""
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


# Transformer ----------------------------------------------------------------------------------------------------------


def linear(x: Array, weights: Weights, name: str) -> Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(x: Array, weights: Weights, name: str, eps: float = 1e-6) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    return (
        centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]
        + (weights[f"{name}.bias"])
    )


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def split_heads(x: Array, weights: Weights, heads: int) -> tuple[Array, Array, Array]:
    """q, k and v, each [B, H, N, d]: thirds of the fused projection, then head by head."""
    B, N, D = x.shape
    thirds = np.split(linear(x, weights, "qkv"), 3, axis=-1)
    q, k, v = (third.reshape(B, N, heads, D // heads).transpose(0, 2, 1, 3) for third in thirds)
    return q, k, v


def attention_weights(x: Array, weights: Weights, heads: int, prefix: int = 0) -> Array:
    """Eqs. 6 and 7 [B, H, N, N]. Relative positions are a second key for each pair of patches, by their offset."""
    q, k, _ = split_heads(x, weights, heads)
    logits = q @ k.transpose(0, 1, 3, 2)
    if "relative.table" in weights:
        patches = x.shape[1] - prefix
        for i in range(patches):
            keys = weights["relative.table"][[i - j + patches - 1 for j in range(patches)]]
            logits[:, :, prefix + i, prefix:] += q[:, :, prefix + i] @ keys.T
    return softmax(logits / np.sqrt(q.shape[-1]))


def attention(x: Array, weights: Weights, heads: int, prefix: int = 0) -> Array:
    """Eqs. 5 to 8."""
    _, _, v = split_heads(x, weights, heads)
    mixed = attention_weights(x, weights, heads, prefix) @ v
    return linear(mixed.transpose(0, 2, 1, 3).reshape(x.shape), weights, "out")


def mlp(x: Array, weights: Weights) -> Array:
    return linear(gelu_tanh(linear(x, weights, "fc1")), weights, "fc2")


def block(x: Array, weights: Weights, heads: int, attend: Callable[..., Array] = attention) -> Array:
    """Eqs. 2 and 3."""
    x = x + attend(layer_norm(x, weights, "norm1"), under(weights, "attention."), heads)
    return x + mlp(layer_norm(x, weights, "norm2"), under(weights, "mlp."))


def along(axis: str, grid: tuple[int, int]) -> Callable[..., Array]:
    """Attention among the tokens of one row (or column), one after the other."""
    tokens = np.arange(grid[0] * grid[1]).reshape(grid)

    def attend(x: Array, weights: Weights, heads: int) -> Array:
        result = np.empty_like(x)
        for line in tokens if axis == "row" else tokens.T:
            result[:, line] = attention(x[:, line], weights, heads)
        return result

    return attend


def sincos2d(h: int, w: int, width: int, temperature: float = 10_000.0) -> Array:
    """sin x, cos x, sin y, cos y, each at width/4 wavelengths from 1 to `temperature`."""
    quarter = width // 4
    rows = []
    for y in range(h):
        for x in range(w):
            scales = [temperature ** (-i / (quarter - 1)) for i in range(quarter)]
            parts = [np.sin(x * s) for s in scales], [np.cos(x * s) for s in scales]
            parts += [np.sin(y * s) for s in scales], [np.cos(y * s) for s in scales]
            rows.append(np.concatenate(parts))
    return np.stack(rows)


# ResNet ---------------------------------------------------------------------------------------------------------------

Pads = tuple[tuple[int, int], tuple[int, int]]


def same_pads(x: Array, kernel: int, stride: int) -> Pads:
    """TensorFlow's SAME: ceil(size / stride) outputs, the odd zero at the end."""
    pads = []
    for size in x.shape[2:]:
        outputs = int(np.ceil(size / stride))
        total = max((outputs - 1) * stride + kernel - size, 0)
        pads.append((total // 2, total - total // 2))
    return pads[0], pads[1]


def symmetric_pads(x: Array, kernel: int, stride: int) -> Pads:  # noqa: ARG001
    return (kernel // 2, kernel // 2), (kernel // 2, kernel // 2)


def convolve(x: Array, kernels: Array, stride: int, pads: Pads) -> Array:
    """kernels [O, C, k, k]"""
    padded = np.pad(x, ((0, 0), (0, 0), *pads))
    return F.conv2d(torch.from_numpy(padded), torch.from_numpy(kernels), stride=stride).numpy()


def max_pool(x: Array, pads: Pads, fill: float) -> Array:
    padded = np.pad(x, ((0, 0), (0, 0), *pads), constant_values=fill)
    return F.max_pool2d(torch.from_numpy(padded), 3, 2).numpy()


def group_norm(x: Array, weights: Weights, name: str, eps: float) -> Array:
    scale, bias = (torch.from_numpy(weights[f"{name}.{leaf}"]) for leaf in ("weight", "bias"))
    return F.group_norm(torch.from_numpy(x), 32, scale, bias, eps).numpy()


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def standardize_hybrid(kernels: Array) -> Array:
    """Google's vision_transformer: (w - mean) / (std + 1e-5)."""
    centered = kernels - kernels.mean((1, 2, 3), keepdims=True)
    return centered / (np.sqrt((centered**2).mean((1, 2, 3), keepdims=True)) + 1e-5)


def standardize_bit(kernels: Array) -> Array:
    """Google's big_transfer: (w - mean) / sqrt(var + 1e-10)."""
    centered = kernels - kernels.mean((1, 2, 3), keepdims=True)
    return centered / np.sqrt((centered**2).mean((1, 2, 3), keepdims=True) + 1e-10)
