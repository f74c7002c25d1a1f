"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929), whole.

    model = plainvit.create("ViT-B/16")
    logits = model(images)                    # images [B, C, height, width]: uint8, or floats in [0, 1]

    trace = Trace("block*/attention")         # records named intermediates; see ViT.trace_names
    model(images, trace)

Letters: B batch, C channels, P x Q patch, h x w grid of patches, n = h w patches, of which s are chosen, N tokens, D
width, H heads, d head width, M mlp_dim, K classes; q, k and v are queries, keys and values. Equations are the paper's;
what it leaves open follows Google's code, and says so. An image's way: embed_patches, place, blocks, represent, head.

To skip at first reading, since they are there for speed and memory: `keep` and `_of_some` (tokens that nobody reads are
not computed), `skipping` and `plus_some` (nor are branches that stochastic depth drops), `short_attention`,
`lean_mlp`, `recompute`, `take_shortcuts`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plainvit import device
from plainvit.config import About, ViTConfig
from plainvit.models.constant import Constant, Normalise
from plainvit.models.initialise import initialise_vit
from plainvit.models.lean import lean_mlp, product_dtype, without_bias_gradient
from plainvit.models.resnet import Body
from plainvit.models.short_attention import Packed, short_attention
from plainvit.models.short_attention import pays as short_attention_pays
from plainvit.models.trace import Trace, note


def gelu_sigmoid(x: Tensor) -> Tensor:
    """The GELU paper's quick form."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_sigmoid": gelu_sigmoid,
    "relu": F.relu,
}


ALL = slice(None)  # tokens
SKIPPED = 0.2  # the least rate of stochastic depth at which not to compute is faster than to compute and drop


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Cuts images into flattened patches in raster order: eq. 1's x_p, in the order of a convolution's kernel."""
    B, C, height, width = images.shape
    P, Q = patch
    x = images.reshape(B, C, height // P, P, width // Q, Q)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, h*w, C*P*Q]


def take(x: Tensor, places: Tensor) -> Tensor:
    """The rows of x [B, n, D] at places [B, s]: [B, s, D]."""
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class Attention(nn.Module):
    """Multi-head self-attention, eqs. 5-8, by a fused kernel: ours for short sequences, PyTorch's for others."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.short = True  # where it fits; False: always PyTorch's
        self.qkv = nn.Linear(config.width, 3 * config.width)  # rows: q | k | v, each head by head
        self.out = nn.Linear(config.width, config.width)
        self.relative = RelativePositions(config) if config.posemb == "relative" else None

    def forward(self, x: Tensor, trace: Trace | None, name: str, keep: slice = ALL) -> Tensor:
        """Every token looks at all; with `keep`, which is for the last block, only those look that are read later.

        The kernels do softmax(q k^T / sqrt(d)) v in one go; `attention_weights` below has the softmax written out.
        """
        if keep != ALL:
            return self._of_some(x, keep)
        B, N, D = x.shape
        packed = Packed((B, N, 3 * D), product_dtype(x), x.device)
        short = self.short and self.relative is None and short_attention_pays(packed, self.heads)
        qkv, learned = without_bias_gradient(self.qkv, x) if short else (self.qkv(x), None)  # [B, N, 3D]
        q, k, v = qkv.view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # 3 x [B, H, N, d]; views, so free
        bias = self.relative(q) if self.relative else None  # [B, H, N, N]
        if short:
            heads = short_attention(qkv, self.heads, learned).view(B, N, self.heads, -1).transpose(1, 2)
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # [B, H, N, d]
        if trace is not None:
            note(trace, f"{name}/values", v)
            note(trace, f"{name}/heads", heads)
            if trace.wants(f"{name}/attention"):
                trace[f"{name}/attention"] = attention_weights(q, k, bias, trace.heads)
        return self.out(heads.transpose(1, 2).reshape(B, N, D))

    def _of_some(self, x: Tensor, keep: slice) -> Tensor:
        """All tokens are looked at, but only some, s of them, look: [B, s, D]."""
        assert self.relative is None
        some, weight, bias, D = x[:, keep], self.qkv.weight, self.qkv.bias, x.shape[2]
        q = F.linear(some, weight[:D], bias[:D]).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, s, d]
        k, v = (
            F.linear(x, weight[D:], bias[D:]).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )  # 2 x [B, H, N, d]
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(some.shape))


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None, heads: Sequence[int] | None) -> Tensor:
    """The softmax that the fused kernel never shows, computed beside it: eq. 6, for the heads asked for, in fp32."""
    if heads is not None:
        q, k = q[:, heads], k[:, heads]
        bias = bias[:, heads] if bias is not None else None
    exact = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
        logits = q.to(exact) @ k.to(exact).mT * q.shape[-1] ** -0.5  # [B, H, N, N]
        return (logits if bias is None else logits + bias).softmax(-1)


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
        self.index = Constant(partial(offsets, n))

    def forward(self, q: Tensor) -> Tensor:
        B, H, _, d = q.shape
        by_offset = q[:, :, self.prefix :] @ self.table.to(q.dtype).mT * d**-0.5  # [B, H, n, 2n-1]
        bias = by_offset.gather(-1, self.index.value.expand(B, H, -1, -1))  # [B, H, n, n]
        return F.pad(bias, (self.prefix, 0, self.prefix, 0))  # [B, H, N, N]


def offsets(n: int) -> Tensor:
    """p_q - p_k of each pair, shifted to start at 0: [n, n]."""
    return torch.arange(n).unsqueeze(1) - torch.arange(n) + n - 1


class Positions(nn.Module):
    """Adds to every token a vector for its place in the grid (eq. 1, Table 8)."""

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
            self.fixed = Constant(partial(sincos2d, h, w, D))

    def grid_table(self) -> Tensor:
        """The vectors of the patches in raster order."""
        h, w = self.grid
        if self.kind == "1d":
            return self.table[self.prefix_rows :]  # [h*w, D]
        if self.kind == "2d":
            return torch.cat((self.columns.repeat(h, 1), self.rows.repeat_interleave(w, 0)), 1)  # [h*w, D]
        return self.fixed.value

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        """Where `places` [B, s] are given, x holds those patches alone."""
        table = self.grid_table()
        if self.prefix_rows == self.prefix and self.kind == "1d":
            table = self.table
        elif self.prefix:  # tokens without a row of their own get zero
            own = self.table[: self.prefix_rows] if self.kind == "1d" else table[:0]
            table = torch.cat((own, table.new_zeros(self.prefix - self.prefix_rows, table.shape[1]), table))
        if places is not None:
            first = torch.arange(self.prefix, device=x.device).expand(len(x), -1)
            rows = torch.cat((first, places + self.prefix), 1)
            # From a copy for each image: rows of one shared table would add up their gradients in any order on a GPU
            table = take(table.to(x.dtype).expand(len(x), -1, -1), rows)  # [B, prefix + s, D]
        return x + table.to(x.dtype)  # [B, N, D]


def sincos2d(h: int, w: int, D: int, temperature: float = 10_000.0, *, closed: bool = True) -> Tensor:
    """Fixed positions: sin x, cos x, sin y, cos y, each on D/4 frequencies (big_vision's order and spacing).

    Frequencies fall from 1 to 1/temperature, that last one included; where not closed, it is left out as in MAE.
    """
    y, x = torch.meshgrid(torch.arange(h, dtype=torch.float64), torch.arange(w, dtype=torch.float64), indexing="ij")
    last = D // 4 - 1 if closed else D // 4
    frequency = temperature ** -(torch.arange(D // 4, dtype=torch.float64) / last)
    x, y = x.reshape(-1, 1) * frequency, y.reshape(-1, 1) * frequency  # [h*w, D/4]
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), 1)  # [h*w, D]


class Mlp(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, config.width)
        self.kind, self.activation = config.activation, ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)
        self.lean = False  # see lean.py

    def forward(self, x: Tensor) -> Tensor:
        if self.lean and torch.compiler.is_compiling():
            return lean_mlp(self, x)
        return self.fc2(self.dropout(self.activation(self.fc1(x))))  # [B, N, M] inside


class Residual(nn.Module):
    """What happens to a branch before it is added: dropout, LayerScale (CaiT), stochastic depth per sample."""

    def __init__(self, config: ViTConfig, rate: float) -> None:
        super().__init__()
        self.dropout, self.rate = nn.Dropout(config.dropout), rate
        self.skips = False  # whether what is dropped is not computed either
        self.scale = nn.Parameter(torch.empty(config.width)) if config.layer_scale is not None else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(x)
        if self.rate and self.training:
            kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)
            x = x * (kept / (1 - self.rate))
        return x

    def scaled(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        return x if self.scale is None else x * self.scale

    @property
    def skipping(self) -> bool:
        """Whether a branch is to be computed only for the images that keep it."""
        return self.skips and self.training and self.rate >= SKIPPED

    def plus_some(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """x + branch(x) for the images that keep the branch; x for the others.

        Each image keeps it with probability 1 - rate, as in `forward`. But images are not drawn independently, so that
        shapes are fixed: of B images B (1 - rate) keep it, rounded up or down at random so that the mean is exact.
        DINOv2 (drop_add_residual_stochastic_depth) rounds down always.
        """
        images = x.shape[0]
        expected = images * (1 - self.rate)
        count = math.ceil(expected - 1e-6)
        draws = torch.rand(images + 1, device=x.device)
        chosen = draws[:images].argsort()[:count]
        last = draws[images] < expected - (count - 1)  # whether the last of them keeps it too
        kept = torch.arange(count, device=x.device) < count - 1 + last.long()
        some = x.index_select(0, chosen)
        added = self.scaled(branch(some)) * (1 / (1 - self.rate)) * kept.view(-1, 1, 1)
        return x.index_copy(0, chosen, some + added.to(x.dtype))


class Block(nn.Module):
    """Eqs. 2 and 3; with norm "post", the order of the original Transformer. Axial blocks attend along one axis."""

    def __init__(self, config: ViTConfig, layer: int, layers: int) -> None:
        super().__init__()
        rate = config.stochastic_depth * layer / max(layers - 1, 1)
        self.name, self.pre, self.grid = f"block{layer}", config.norm == "pre", config.grid
        self.axis = ("row", "column")[layer % 2] if config.axial else None
        self.norm1 = nn.LayerNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.residual1 = Residual(config, rate)
        self.norm2 = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = Mlp(config)
        self.residual2 = Residual(config, rate)

    def forward(self, x: Tensor, trace: Trace | None = None, keep: slice = ALL) -> Tensor:
        """`keep`: nobody will look at other tokens, so they are not computed (of a block with pre-norm, not axial)."""
        if keep != ALL:
            return self._of_some(x, keep)
        if self.pre and trace is None and self.residual1.skipping:
            x = self.residual1.plus_some(x, lambda some: self.attend(self.norm1(some), None))
            return self.residual2.plus_some(x, lambda some: self.mlp(self.norm2(some)))
        if self.pre:
            x = x + note(trace, f"{self.name}/msa", self.residual1(self.attend(self.norm1(x), trace)))  # eq. 2
            x = x + note(trace, f"{self.name}/mlp", self.residual2(self.mlp(self.norm2(x))))  # eq. 3
        else:
            x = self.norm1(x + note(trace, f"{self.name}/msa", self.residual1(self.attend(x, trace))))
            x = self.norm2(x + note(trace, f"{self.name}/mlp", self.residual2(self.mlp(x))))
        return note(trace, f"{self.name}/tokens", x)  # [B, N, D]

    def _of_some(self, x: Tensor, keep: slice) -> Tensor:
        """Eqs. 2 and 3 for some of the tokens: [B, s, D]."""
        assert self.pre
        assert self.axis is None
        x = x[:, keep] + self.residual1(self.attention(self.norm1(x), None, self.name, keep))
        return x + self.residual2(self.mlp(self.norm2(x)))

    def attend(self, x: Tensor, trace: Trace | None) -> Tensor:
        if self.axis is None:
            return self.attention(x, trace, self.name)
        B, N, D = x.shape
        x = x.reshape(B, *self.grid, D)  # [B, h, w, D]
        x = x if self.axis == "row" else x.transpose(1, 2)
        attended = self.attention(x.reshape(-1, x.shape[2], D), trace, self.name).view_as(x)  # rows (columns) as batch
        attended = attended if self.axis == "row" else attended.transpose(1, 2)
        return attended.reshape(B, N, D)


def shorten(part: nn.Module, wanted: bool = True) -> None:
    """Our own attention, activations that are not kept, and no work for what is dropped, in all blocks of a model."""
    for module in part.modules():
        if isinstance(module, Attention):
            module.short = wanted
        if isinstance(module, Mlp):
            module.lean = wanted
        if isinstance(module, Residual):
            module.skips = wanted


class AttentionPool(nn.Module):
    """Pooling by one learned query over the patches, then a residual MLP (the MAP head of "Scaling ViT")."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D, self.heads = config.width, config.heads
        self.probe = nn.Parameter(torch.empty(1, 1, D))
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.norm = nn.LayerNorm(D, config.norm_eps)
        self.mlp = Mlp(config.replace(dropout=0.0))

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q = (
            self.q(self.probe.to(x.dtype)).view(1, 1, self.heads, -1).transpose(1, 2).expand(B, -1, -1, -1)
        )  # [B, H, 1, d]
        k, v = self.kv(x).view(B, N, 2, self.heads, -1).permute(2, 0, 3, 1, 4)  # 2 x [B, H, N, d]
        x = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, D))  # [B, D]
        return x + self.mlp(self.norm(x))


class ViT(nn.Module):
    """Images to logits. `encode` gives the tokens, `features` the representation that the last layer reads."""

    recompute: bool

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        device.choose_attention_backend()
        self._cpu_bf16_refused = device.cpu_bf16_refused()  # on some CPUs it kills the process
        self.config, self.about = config, About()
        self.recompute = False  # gradient checkpointing: blocks are computed again in the backward pass
        self.shortcuts = False  # see take_shortcuts
        D, layers = config.width, config.depth * (2 if config.axial else 1)
        self.normalise = Normalise(config.mean, config.std)
        self.stem = Body(config.stem) if config.stem else None
        in_channels = config.stem.width if config.stem else config.channels
        self.embedding = nn.Linear(in_channels * config.patch[0] * config.patch[1], D)  # eq. 1's E
        self.class_token = nn.Parameter(torch.empty(1, D)) if config.class_token else None
        self.distillation_token = nn.Parameter(torch.empty(1, D)) if config.distillation else None
        self.registers = nn.Parameter(torch.empty(config.registers, D)) if config.registers else None
        tables = 0 if config.posemb in ("none", "relative") else layers if config.posemb_at == "every" else 1
        self.positions = nn.ModuleList(Positions(config) for _ in range(tables))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer, layers) for layer in range(layers))
        self.norm = nn.LayerNorm(D, config.norm_eps) if config.norm == "pre" else nn.Identity()
        self.pool = AttentionPool(config) if config.pool == "attention" else None
        self.pre_logits = nn.Linear(D, config.representation) if config.representation else None
        self.head = nn.Linear(config.representation or D, config.classes) if config.classes else None
        self.head_distillation = nn.Linear(D, config.classes) if config.distillation and config.classes else None
        self.initialise()

    def initialise(self, generator: torch.Generator | None = None) -> Self:
        """Draws every weight anew by the config's scheme; nothing to do on the meta device."""
        if not self.embedding.weight.is_meta:
            initialise_vit(self, generator)
        return self

    def forward(self, images: Tensor, trace: Trace | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [B, K]. A model with a distillation token gives both heads' logits in training, else their mean."""
        if trace is not None:
            trace.check(self.trace_names(), self.config.heads)
        x = self.encode_tokens(self.embed(images, trace), trace, self._wanted_tokens(trace))  # [B, N, D]
        representation = note(trace, "representation", self.represent(x, trace))
        if self.head is None:
            return representation
        if self.head_distillation is None:
            return note(trace, "logits", self.head(representation))  # [B, K]
        both = self.head(x[:, 0]), self.head_distillation(x[:, 1])
        mean = note(trace, "logits", (both[0] + both[1]) / 2)
        return both if self.training else mean

    def take_shortcuts(self, wanted: bool = True) -> Self:
        """Whether to save work that no result needs, as training does: the same but for rounding and one kind of draw.

        Then the last block computes the class token alone, where nothing else is read; branches that stochastic depth
        drops at a rate of 0.2 or more are not computed, and the images of a micro-batch are drawn together: each keeps
        a branch with the same probability as before, but not independently (Residual.plus_some); under autocast, tokens
        between blocks stay in the short numbers of the products. A pass with a trace takes none of these, so that it
        sees whole blocks; a model begins without, so that its logits are to the bit the same with a trace. Compiled
        code keeps less of an MLP (lean.py), with a trace or without. Our attention kernel is used unless `wanted` is
        False.
        """
        self.shortcuts = wanted
        shorten(self, wanted)
        return self

    def features(self, images: Tensor, layers: Sequence[int] | None = None) -> Tensor | list[Tensor]:
        """The representation [B, D]; or the tokens [B, N, D] after each of the chosen blocks (-1 is the last)."""
        if layers is None:
            return self.represent(self.encode_tokens(self.embed(images), keep=self._wanted_tokens(None)))
        depth = len(self.blocks)
        if not layers or not all(-depth <= layer < depth for layer in layers):
            raise ValueError(f"layers {list(layers)} are not all among this model's 0 to {depth - 1}")
        wanted = [layer % depth for layer in layers]
        kept: dict[int, Tensor] = {}
        x = self.embed(images)
        for layer in range(max(wanted) + 1):
            x = self.run_block(x, layer)
            if layer in wanted:
                kept[layer] = x
        return [kept[layer] for layer in wanted]

    def encode(self, images: Tensor, trace: Trace | None = None) -> Tensor:
        """Tokens after the last block and, unless it comes after pooling, the final norm (eq. 4's LN)."""
        return self.encode_tokens(self.embed(images, trace), trace)

    def encode_tokens(self, x: Tensor, trace: Trace | None = None, keep: slice = ALL) -> Tensor:
        last = len(self.blocks) - 1
        for layer in range(last + 1):
            x = self.run_block(x, layer, trace, keep if layer == last else ALL)
        return note(trace, "encoded", x if self.config.norm_pooled else self.norm(x))  # [B, N, D]

    def embed(self, images: Tensor, trace: Trace | None = None) -> Tensor:
        """Eq. 1: patches to tokens, with the tokens before them and positions."""
        return self.place(self.embed_patches(images, trace), trace)

    def embed_patches(self, images: Tensor, trace: Trace | None = None, places: Tensor | None = None) -> Tensor:
        """The patches' embeddings x_p E; only of those at `places` [B, s], and in that order, where these are given."""
        self._check_images(images)
        dtype = self.embedding.weight.dtype
        x = note(trace, "pixels", self.normalise(images).to(dtype))  # [B, C, height, width]
        x = x if self.stem is None else self.stem(x, trace)
        x = patchify(x, self.config.patch)  # [B, h*w, C*P*Q]
        x = x if places is None else take(x, places)  # [B, s, C*P*Q]
        x = self.embedding(x)  # [B, h*w, D]
        # The residual stream has the weights' precision under autocast; with shortcuts that of the products
        return note(trace, "patches", x if self.shortcuts and trace is None else x.to(dtype))

    def place(self, x: Tensor, trace: Trace | None = None, places: Tensor | None = None) -> Tensor:
        """Embeddings to tokens: the tokens before them, and positions, of the patches at `places` or of all."""
        prefix = [p for p in (self.class_token, self.distillation_token, self.registers) if p is not None]
        if prefix:
            x = torch.cat([p.to(x.dtype).expand(x.shape[0], -1, -1) for p in prefix] + [x], 1)  # [B, N, D]
        if self.positions and self.config.posemb_at == "stem":
            x = self.positions[0](x, places)
        return note(trace, "embedded", self.dropout(x))

    def _wanted_tokens(self, trace: Trace | None) -> slice:
        """Those that are read after the last block."""
        return slice(0, 1) if self.shortcuts and self.config.reads_one_token and trace is None else ALL

    def run_block(self, x: Tensor, layer: int, trace: Trace | None = None, keep: slice = ALL) -> Tensor:
        if self.config.posemb_at != "stem":  # Table 8's other columns: one table per layer, or one for all
            x = self.positions[layer if self.config.posemb_at == "every" else 0](x)
        if self.recompute and trace is None and torch.is_grad_enabled():
            return checkpoint(self.blocks[layer], x, keep=keep, use_reentrant=False)
        return self.blocks[layer](x, trace, keep)

    def represent(self, x: Tensor, trace: Trace | None = None) -> Tensor:
        """Tokens [B, N, D] to one vector per image: pooling, then the pre-training head's hidden layer."""
        if self.config.pool == "average":
            x = x[:, self.config.prefix :].mean(1)
        elif self.pool is not None:
            x = self.pool(x[:, self.config.prefix :])
        else:  # the class token; with DeiT's second token, the mean of both
            x = (x[:, 0] + x[:, 1]) / 2 if self.config.distillation else x[:, 0]
        x = note(trace, "pooled", self.norm(x) if self.config.norm_pooled else x)  # [B, D]
        return x if self.pre_logits is None else torch.tanh(self.pre_logits(x))

    def replace_head(self, classes: int) -> Self:
        """For transfer (paper 3.2): drops the whole head and attaches one linear layer of zeros."""
        self.config = self.config.replace(classes=classes, representation=0)
        like = self.embedding.weight
        self.pre_logits = None
        for name in ("head", "head_distillation"):
            wanted = classes and (name == "head" or self.config.distillation)
            layer = nn.Linear(self.config.width, classes, device=like.device, dtype=like.dtype) if wanted else None
            for parameter in layer.parameters() if layer else ():
                nn.init.zeros_(parameter)
            setattr(self, name, layer)
        return self

    def trace_names(self) -> list[str]:
        """What a Trace can ask for, in the order of computation."""
        per_block = ("values", "heads", "attention", "msa", "mlp", "tokens")
        return [
            "pixels",
            *(self.stem.trace_names() if self.stem else ()),
            *("patches", "embedded"),
            *(f"{block.name}/{name}" for block in self.blocks for name in per_block),
            *("encoded", "pooled", "representation"),
            *(("logits",) if self.head else ()),
        ]

    def _check_images(self, images: Tensor) -> None:
        wanted = (self.config.channels, *self.config.image_size)
        if images.ndim != 4 or images.shape[1:] != wanted:
            raise ValueError(
                f"images of shape {tuple(images.shape)} do not fit this model: it takes [batch, channels, height, "
                f"width] = [batch, {', '.join(map(str, wanted))}]"
            )
        if self._cpu_bf16_refused:
            device.check_cpu_bf16(self.embedding.weight)
