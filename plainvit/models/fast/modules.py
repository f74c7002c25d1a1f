"""Fast versions of the modules of vit.py and masked.py: each computes what the plain one does, with less work.

- FastViT: where only the class token is read, the last block computes that token alone.
- FastBlock: branches that stochastic depth drops are not computed.
- FastAttention: short sequences on a GPU run our own kernel (attention.py).
- FastMlp: compiled code keeps fewer activations and fuses the GELU (mlp.py).
- FastDecoder: MAE's last decoder block computes the hidden patches alone.

Letters are those of vit.py; s is the number of tokens that are computed.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.models.fast.attention import Packed, is_faster, short_attention
from plainvit.models.fast.mlp import compiled_mlp, linear_without_bias_gradient, matmul_dtype
from plainvit.models.masked import Decoder
from plainvit.models.trace import Trace
from plainvit.models.vit import Attention, Block, Mlp, Residual, ViT

DROP_BRANCHES_FROM = 0.2  # the rate of stochastic depth from which not computing a branch is faster than dropping it


class FastAttention(Attention):
    """Uses the kernel for short sequences where it is faster; `tokens` restricts which tokens send queries."""

    def forward(self, x: Tensor, trace: Trace | None = None, name: str = "", tokens: slice | None = None) -> Tensor:
        if tokens is not None:
            return self.query_subset(x, tokens)
        B, N, D = x.shape
        packed = Packed((B, N, 3 * D), matmul_dtype(x), x.device)
        if not self.is_plain or not is_faster(packed, self.heads):
            return super().forward(x, trace, name)
        qkv, bias = linear_without_bias_gradient(self.qkv, x)  # [B, N, 3D]
        attended = short_attention(qkv, self.heads, bias)  # [B, N, D]
        if trace is not None:
            q, k, v = qkv.view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # 3 x [B, H, N, d]
            self.record(trace, name, q, k, v, None, attended.view(B, N, self.heads, -1).transpose(1, 2))
        return self.out(attended)

    def query_subset(self, x: Tensor, tokens: slice) -> Tensor:
        """All tokens are keys and values, only some are queries: [B, s, D]."""
        assert self.is_plain
        read, weight, bias, D = x[:, tokens], self.qkv.weight, self.qkv.bias, x.shape[2]
        q = F.linear(read, weight[:D], bias[:D]).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, s, d]
        kv = F.linear(x, weight[D:], bias[D:]).unflatten(2, (2, self.heads, -1))  # [B, N, 2, H, d]
        k, v = kv.permute(2, 0, 3, 1, 4)  # 2 x [B, H, N, d]
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(read.shape))


class FastMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return compiled_mlp(self, x) if torch.compiler.is_compiling() else super().forward(x)


class FastBlock(Block):
    """Does not compute branches that stochastic depth drops, nor tokens that nobody reads.

    From a rate of 0.2 on, the images of a micro-batch are drawn together (`drop_path`), not independently.
    """

    def forward(self, x: Tensor, trace: Trace | None = None, tokens: slice | None = None) -> Tensor:
        if tokens is not None:
            return self.query_subset(x, tokens)
        if self.pre and trace is None and drops_branch(self.residual1):
            x = drop_path(x, self.residual1, lambda kept: self.attend(self.norm1(kept), None))
            return drop_path(x, self.residual2, lambda kept: self.mlp(self.norm2(kept)))
        return super().forward(x, trace)

    def query_subset(self, x: Tensor, tokens: slice) -> Tensor:
        """Eqs. 2 and 3 for some of the tokens: [B, s, D]."""
        assert self.pre
        assert self.axis is None
        x = x[:, tokens] + self.residual1(self.attention(self.norm1(x), tokens=tokens))
        return x + self.residual2(self.mlp(self.norm2(x)))


def drops_branch(residual: Residual) -> bool:
    """Whether a branch is computed only for the images that keep it."""
    return residual.training and residual.rate >= DROP_BRANCHES_FROM


def drop_path(x: Tensor, residual: Residual, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """x + branch(x) for the images that keep the branch, x for the others.

    Each image keeps it with probability 1 - rate, as in `Residual`, but shapes must be fixed: of B images B (1 - rate)
    keep it, rounded up or down at random so that the mean is exact. DINOv2 always rounds down.
    """
    images = x.shape[0]
    expected = images * (1 - residual.rate)
    count = math.ceil(expected - 1e-6)
    draws = torch.rand(images + 1, device=x.device)
    chosen = draws[:images].argsort()[:count]
    keeps_last = draws[images] < expected - (count - 1)
    is_kept = torch.arange(count, device=x.device) < count - 1 + keeps_last.long()
    kept = x.index_select(0, chosen)
    added = residual.scale_branch(branch(kept)) * (1 / (1 - residual.rate)) * is_kept.view(-1, 1, 1)
    return x.index_copy(0, chosen, kept + added.to(x.dtype))


class FastViT(ViT):
    low_precision_residual: bool

    def forward(self, images: Tensor, trace: Trace | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if trace is not None:
            return super().forward(images, trace)
        return self.classify(self.encode_read_tokens(images))

    def features(self, images: Tensor, layers: Sequence[int] | None = None) -> Tensor | list[Tensor]:
        if layers is not None:
            return super().features(images, layers)
        return self.represent(self.encode_read_tokens(images))

    def encode_read_tokens(self, images: Tensor) -> Tensor:
        """As `encode`, but only of the tokens that pooling reads: [B, 1, D] where that is the class token."""
        if not self.config.reads_one_token:
            return self.encode(images)
        x, last = self.embed(images), len(self.blocks) - 1
        for layer in range(last):
            x = self.run_block(x, layer)
        x = self.blocks[last](self.add_layer_positions(x, last), tokens=slice(0, 1))
        return x if self.config.norm_pooled else self.norm(x)

    def embed_patches(self, x: Tensor) -> Tensor:
        return self.norm_patches(self.embedding(x)) if self.low_precision_residual else super().embed_patches(x)


class FastDecoder(Decoder):
    def decode(self, x: Tensor, hidden: int) -> Tensor:
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            x = block(x, tokens=slice(-hidden, None)) if layer == last else block(x)
        return x


FAST: dict[type[nn.Module], type[nn.Module]] = {
    ViT: FastViT, Block: FastBlock, Attention: FastAttention, Mlp: FastMlp, Decoder: FastDecoder,
}  # fmt: skip
