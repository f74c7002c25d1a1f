"""Position embeddings (eq. 1, Table 8): learned in one or two dimensions, fixed sine and cosine, or relative.

    positions = Positions(config)             # one table of vectors, added to the tokens
    tokens = positions(tokens)                # [B, N, D]

Letters are those of vit.py; n = h * w patches.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.config import ViTConfig
from plainvit.models.buffers import ComputedBuffer


class Positions(nn.Module):
    """Adds to every token a vector for its position in the grid."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        (h, w), D = config.grid, config.width
        self.kind, self.grid, self.prefix = config.posemb, config.grid, config.prefix
        self.prefix_rows = config.prefix_rows if self.kind == "1d" else 0
        if self.kind == "1d":
            self.table = nn.Parameter(torch.empty(self.prefix_rows + h * w, D))
        elif self.kind == "2d":
            self.columns = nn.Parameter(torch.empty(w, D // 2))  # the paper's X
            self.rows = nn.Parameter(torch.empty(h, D // 2))  # the paper's Y
        else:
            self.fixed = ComputedBuffer(partial(sincos2d, h, w, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.token_table().to(x.dtype)  # [B, N, D]

    def token_table(self) -> Tensor:
        """The vectors of all tokens, [N, D]; tokens before the patches without a row of their own get zeros."""
        if self.kind == "1d" and self.prefix_rows == self.prefix:
            return self.table
        table = self.grid_table()
        own = self.table[: self.prefix_rows] if self.kind == "1d" else table[:0]
        return torch.cat((own, table.new_zeros(self.prefix - self.prefix_rows, table.shape[1]), table))

    def grid_table(self) -> Tensor:
        """The vectors of the patches in raster order, [n, D]."""
        h, w = self.grid
        if self.kind == "1d":
            return self.table[self.prefix_rows :]
        if self.kind == "2d":
            return torch.cat((self.columns.repeat(h, 1), self.rows.repeat_interleave(w, 0)), 1)
        return self.fixed.value


def count_position_tables(config: ViTConfig, layers: int) -> int:
    """Tables of positions that are added to tokens (Table 8): none, one, or one for each layer."""
    if config.posemb in ("none", "relative", "bias"):
        return 0
    return layers if config.posemb_at == "every" else 1


def sincos2d(h: int, w: int, D: int, *, endpoint: bool = True) -> Tensor:
    """Fixed positions: sin x, cos x, sin y, cos y, each on D/4 frequencies (big_vision's order and spacing).

    Frequencies fall from 1 to 1/10,000, the last one included; MAE leaves it out (endpoint=False).
    """
    y, x = torch.meshgrid(torch.arange(h, dtype=torch.float64), torch.arange(w, dtype=torch.float64), indexing="ij")
    last = D // 4 - 1 if endpoint else D // 4
    frequency = 10_000.0 ** -(torch.arange(D // 4, dtype=torch.float64) / last)
    x, y = x.reshape(-1, 1) * frequency, y.reshape(-1, 1) * frequency  # [n, D/4]
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), 1)  # [n, D]


class RelativePositions(nn.Module):
    """Table 8, "relative": a learned vector per 1-D offset between two patches, as an extra key for the same query.

    The paper leaves open: here each layer has its table, shared by the heads; offsets are not clipped; tokens before
    the patches have no offset and get no term; the term is scaled by 1/sqrt(d) like the content's.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        n = config.grid[0] * config.grid[1]
        self.prefix = config.prefix
        self.table = nn.Parameter(torch.empty(2 * n - 1, config.width // config.heads))
        self.index = ComputedBuffer(partial(offsets, n))

    def forward(self, q: Tensor) -> Tensor:
        """What is added to the attention logits, [B, H, N, N]."""
        B, H, _, d = q.shape
        by_offset = q[:, :, self.prefix :] @ self.table.to(q.dtype).mT * d**-0.5  # [B, H, n, 2n-1]
        bias = by_offset.gather(-1, self.index.value.expand(B, H, -1, -1))  # [B, H, n, n]
        return F.pad(bias, (self.prefix, 0, self.prefix, 0))


def offsets(n: int) -> Tensor:
    """p_q - p_k of each pair of positions, shifted to start at 0: [n, n]."""
    return torch.arange(n).unsqueeze(1) - torch.arange(n) + n - 1
