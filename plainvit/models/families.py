"""Parts of a ViT that only published weights use; each is an option of ViTConfig, off by default.

    norm_embedding, norm_inner, norm_kind, qk_norm    more norms: CLIP, AIMv2, EVA-02 and BEiT-3
    gated                                             SwiGLU: DINOv2 giant, DINOv3, EVA-02, AIMv2 (arXiv 2002.05202)
    block_bias                                        linear layers without some of their biases: DINOv3, EVA-02, AIMv2
    rotary                                            2-D rotary positions: EVA-02, DINOv3, PE, RoPE-ViT
    posemb="bias"                                     BEiT's learned bias per head and offset
    cosine_head                                       zero-shot classification with text embeddings: CLIP, SigLIP

Letters are those of vit.py; n = h * w patches.

A new option needs: a field of ViTConfig, off by default (`plainvit/model_config.py`); the module here; where it changes
attention or MLP, a term in `has_plain_attention` or `has_plain_mlp` there, so that the fast path leaves it as it is;
the names of its weights in `weights/parameter_names`, and how shapes show it in `weights/shapes.py`. Formats without it
need no change: `weights/supported.py` rejects what a format does not list.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.config import ViTConfig
from plainvit.models.buffers import ComputedBuffer
from plainvit.models.positions import RelativePositions


def gelu_sigmoid(x: Tensor) -> Tensor:
    """The sigmoid approximation of the GELU paper ("quick GELU")."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_sigmoid": gelu_sigmoid,
    "relu": F.relu,
    "silu": F.silu,
}


def make_norm(config: ViTConfig, width: int) -> nn.Module:
    if config.norm_kind == "rms":
        return nn.RMSNorm(width, config.norm_eps)
    return nn.LayerNorm(width, config.norm_eps)


class QVLinear(nn.Linear):
    """Queries, keys and values where keys have no bias; `bias` holds those of q and v."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 3 * width, bias=False)
        self.bias = nn.Parameter(torch.empty(2 * width))

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, v = self.bias.chunk(2)
        return F.linear(x, self.weight, torch.cat((q, torch.zeros_like(q), v)))


def make_qkv(config: ViTConfig) -> nn.Linear:
    if config.block_bias == "no_k":
        return QVLinear(config.width)
    return nn.Linear(config.width, 3 * config.width, bias=config.block_bias == "all")


class GeneralMlp(nn.Module):
    """An MLP with a gate (SwiGLU), with a norm before its second layer, or without biases."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        M, bias = config.mlp_dim, config.block_bias != "none"
        self.gated, self.activation = config.gated, ACTIVATIONS[config.activation]
        self.fc1 = nn.Linear(config.width, 2 * M if config.gated else M, bias)  # rows: gate | value
        self.norm = make_norm(config, M) if config.norm_inner != "none" else nn.Identity()
        self.fc2 = nn.Linear(M, config.width, bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, x = self.fc1(x).chunk(2, -1)  # 2 x [B, N, M]
            x = self.activation(gate) * x
        else:
            x = self.activation(self.fc1(x))
        return self.fc2(self.norm(self.dropout(x)))


class QueryKeys(nn.Module):
    """What happens to queries and keys before they meet: a norm per head, then rotary positions."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        d = config.width // config.heads
        self.norm_q = make_norm(config, d) if config.qk_norm else nn.Identity()
        self.norm_k = make_norm(config, d) if config.qk_norm else nn.Identity()
        self.rotary = Rotary(config) if config.rotary != "none" else nn.Identity()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(self.norm_q(q)).to(q.dtype), self.rotary(self.norm_k(k)).to(k.dtype)


class Rotary(nn.Module):
    """Rotates pairs of each head's values by angles that depend on a patch's row and column (arXiv 2104.09864)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.prefix, self.halves = config.prefix, config.rotary == "dinov3"
        self.table = ComputedBuffer(partial(rotary_table, config))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, N, d]; tokens before the patches stay as they are."""
        exact = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self.table.value.to(exact)  # [n, d]
        patches = x[:, :, self.prefix :].to(exact)
        if self.halves:
            first, second = patches.chunk(2, -1)
            turned = torch.cat((-second, first), -1)
        else:
            turned = torch.stack((-patches[..., 1::2], patches[..., ::2]), -1).flatten(-2)
        return torch.cat((x[:, :, : self.prefix], (patches * cos + turned * sin).to(x.dtype)), 2)


def rotary_table(config: ViTConfig) -> Tensor:
    """Cosines and sines of the angles of each patch, [2, n, d].

    eva02, pe: positions are those of a grid of `rotary_grid` rows and columns, whatever the image size, and PE counts
    from 1 where it has a class token. axial (RoPE-ViT): rows and columns as they are. dinov3: from -1 to 1.
    """
    d = config.width // config.heads
    base = 100.0 if config.rotary in ("dinov3", "axial") else 10_000.0
    frequencies = base ** -(torch.arange(d // 4, dtype=torch.float64) / (d // 4))
    rows, columns = (rotary_places(config, count) for count in config.grid)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    y, x = y.reshape(-1, 1) * frequencies, x.reshape(-1, 1) * frequencies  # [n, d/4]
    angles = torch.cat((x, y) if config.rotary in ("pe", "axial") else (y, x), 1)  # [n, d/2]
    angles = angles.repeat(1, 2) if config.rotary == "dinov3" else angles.repeat_interleave(2, 1)  # [n, d]
    return torch.stack((angles.cos(), angles.sin()))


def rotary_places(config: ViTConfig, count: int) -> Tensor:
    """The places of `count` rows or columns, which are multiplied by the frequencies."""
    places = torch.arange(count, dtype=torch.float64)
    match config.rotary:
        case "dinov3":
            return 2 * math.pi * (2 * (places + 0.5) / count - 1)
        case "axial":
            return places
        case "pe" if config.class_token:
            return (places + 1) * config.rotary_grid / count
        case _:
            return places * config.rotary_grid / count


class OffsetBias(nn.Module):
    """BEiT's positions: for each head a learned bias per offset between two patches (arXiv 2106.08254).

    The last three rows are for class token to patch, patch to class token, and class token to itself.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        h, w = config.grid
        self.table = nn.Parameter(torch.empty((2 * h - 1) * (2 * w - 1) + 3, config.heads))
        self.index = ComputedBuffer(partial(offset_index, h, w))

    def forward(self, q: Tensor) -> Tensor:
        """What is added to the attention logits, [1, H, N, N]."""
        return self.table[self.index.value].permute(2, 0, 1).unsqueeze(0).to(q.dtype)


def offset_index(h: int, w: int) -> Tensor:
    """The row of the table for each pair of tokens, [1 + n, 1 + n]."""
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    y, x = y.flatten(), x.flatten()  # of each patch
    down, right = y[:, None] - y + h - 1, x[:, None] - x + w - 1  # offsets of each pair, from 0: [n, n]
    index = F.pad(down * (2 * w - 1) + right, (1, 0, 1, 0))
    offsets = (2 * h - 1) * (2 * w - 1)
    index[0, :] = offsets  # class token to patch
    index[:, 0] = offsets + 1  # patch to class token
    index[0, 0] = offsets + 2
    return index


def make_attention_bias(config: ViTConfig) -> nn.Module | None:
    """Positions that are a term of the attention logits."""
    match config.posemb:
        case "relative":
            return RelativePositions(config)
        case "bias":
            return OffsetBias(config)
        case _:
            return None


class CosineHead(nn.Linear):
    """Logits as scaled cosine similarities: rows of the weight are text embeddings times the logit scale."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(F.normalize(x, dim=-1))


def make_head(config: ViTConfig) -> nn.Linear:
    return (CosineHead if config.cosine_head else nn.Linear)(config.feature_width, config.classes)
