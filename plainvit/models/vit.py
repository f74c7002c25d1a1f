"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929), in plain PyTorch.

    model = plainvit.create("ViT-B/16")
    logits = model(images)                    # images [B, C, height, width]: uint8, or floats in [0, 1]

    trace = Trace("block*/attention")         # records named intermediates; see ViT.trace_names
    model(images, trace)

Letters: B batch, C channels, P x Q patch, h x w grid of patches, N tokens, D width, H heads, d head width, M mlp_dim,
K classes; q, k and v are queries, keys and values. Equations are the paper's. Where the paper leaves something open,
this follows Google's code and says so. Options that only the weights of other families use are in `families.py`; faster
versions of these modules attach from outside: `models/fast`.
"""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit import device
from plainvit.config import About, ViTConfig
from plainvit.models.buffers import Normalize
from plainvit.models.families import (
    ACTIVATIONS,
    GeneralMlp,
    QueryKeys,
    make_attention_bias,
    make_head,
    make_norm,
    make_qkv,
)
from plainvit.models.init import initialize_vit
from plainvit.models.positions import Positions, count_position_tables
from plainvit.models.resnet import Body
from plainvit.models.trace import Trace, note, number_layers


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Splits images into flattened patches in raster order: x_p of eq. 1, each in the order of a convolution kernel."""
    B, C, height, width = images.shape
    P, Q = patch
    x = images.reshape(B, C, height // P, P, width // Q, Q)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, h*w, C*P*Q]


class Attention(nn.Module):
    """Multi-head self-attention, eqs. 5-8."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads, self.is_plain = config.heads, config.has_plain_attention
        self.qkv = make_qkv(config)  # rows: q | k | v, each head by head
        self.out = nn.Linear(config.width, config.width, bias=config.block_bias != "none")
        self.relative = make_attention_bias(config)
        self.query_keys = QueryKeys(config) if config.qk_norm or config.rotary != "none" else None
        self.norm = make_norm(config, config.width) if config.norm_inner == "both" else nn.Identity()

    def forward(self, x: Tensor, trace: Trace | None = None, name: str = "") -> Tensor:
        B, N, D = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # 3 x [B, H, N, d]
        if self.query_keys is not None:
            q, k = self.query_keys(q, k)
        bias = self.relative(q) if self.relative else None  # [B, H, N, N]
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # softmax(q k^T / sqrt(d)) v: [B, H, N, d]
        self.record(trace, name, q, k, v, bias, heads)
        return self.out(self.norm(heads.transpose(1, 2).reshape(B, N, D)))

    def record(
        self, trace: Trace | None, name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, heads: Tensor
    ) -> None:
        """Notes values, head outputs and attention weights; the weights are computed only where they are asked for."""
        note(trace, f"{name}/values", v)
        note(trace, f"{name}/heads", heads)
        if trace is not None and trace.wants(f"{name}/attention"):
            trace[f"{name}/attention"] = attention_weights(q, k, bias, trace.heads)


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None, heads: Sequence[int] | None) -> Tensor:
    """The softmax of eq. 6, which the fused kernel never materializes, in fp32 for the heads asked for."""
    if heads is not None:
        q, k = q[:, heads], k[:, heads]
        bias = bias[:, heads] if bias is not None else None
    exact = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
        logits = q.to(exact) @ k.to(exact).mT * q.shape[-1] ** -0.5  # [B, H, N, N]
        return (logits if bias is None else logits + bias).softmax(-1)


class Mlp(nn.Module):
    """Two linear layers with a nonlinearity between them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, config.width)
        self.kind, self.activation = config.activation, ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activation(self.fc1(x))))  # [B, N, M] inside


class Residual(nn.Module):
    """What happens to a branch before it is added: dropout, LayerScale (CaiT), stochastic depth per image."""

    def __init__(self, config: ViTConfig, rate: float) -> None:
        super().__init__()
        self.dropout, self.rate = nn.Dropout(config.dropout), rate
        self.scale = nn.Parameter(torch.empty(config.width)) if config.layer_scale is not None else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale_branch(x)
        if self.rate and self.training:
            kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)
            x = x * (kept / (1 - self.rate))
        return x

    def scale_branch(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        return x if self.scale is None else x * self.scale


class Block(nn.Module):
    """Eqs. 2 and 3; norm "post" is the order of the original Transformer. Axial blocks attend along one axis."""

    def __init__(self, config: ViTConfig, layer: int, layers: int) -> None:
        super().__init__()
        rate = config.stochastic_depth * layer / max(layers - 1, 1)
        self.name, self.pre, self.grid = f"block{layer}", config.norm == "pre", config.grid
        self.axis = ("row", "column")[layer % 2] if config.axial else None
        self.norm1 = make_norm(config, config.width)
        self.attention = Attention(config)
        self.residual1 = Residual(config, rate)
        self.norm2 = make_norm(config, config.width)
        self.mlp = Mlp(config) if config.has_plain_mlp else GeneralMlp(config)
        self.residual2 = Residual(config, rate)

    def forward(self, x: Tensor, trace: Trace | None = None) -> Tensor:
        if self.pre:
            x = x + note(trace, f"{self.name}/msa", self.residual1(self.attend(self.norm1(x), trace)))  # eq. 2
            x = x + note(trace, f"{self.name}/mlp", self.residual2(self.mlp(self.norm2(x))))  # eq. 3
        else:
            x = self.norm1(x + note(trace, f"{self.name}/msa", self.residual1(self.attend(x, trace))))
            x = self.norm2(x + note(trace, f"{self.name}/mlp", self.residual2(self.mlp(x))))
        return note(trace, f"{self.name}/tokens", x)  # [B, N, D]

    def attend(self, x: Tensor, trace: Trace | None) -> Tensor:
        if self.axis is None:
            return self.attention(x, trace, self.name)
        B, N, D = x.shape
        x = x.reshape(B, *self.grid, D)  # [B, h, w, D]
        x = x if self.axis == "row" else x.transpose(1, 2)
        y = self.attention(x.reshape(-1, x.shape[2], D), trace, self.name).view_as(x)  # rows (or columns) as the batch
        return (y if self.axis == "row" else y.transpose(1, 2)).reshape(B, N, D)


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
        q = self.q(self.probe.to(x.dtype)).view(1, 1, self.heads, -1).transpose(1, 2)  # [1, H, 1, d]
        k, v = self.kv(x).view(B, N, 2, self.heads, -1).permute(2, 0, 3, 1, 4)  # 2 x [B, H, N, d]
        x = F.scaled_dot_product_attention(q.expand(B, -1, -1, -1), k, v)  # [B, H, 1, d]
        x = self.out(x.transpose(1, 2).reshape(B, D))  # [B, D]
        return x + self.mlp(self.norm(x))


class ViT(nn.Module):
    """Images to logits. `encode` gives the tokens, `features` the vector that the head reads."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        device.choose_attention_backend()
        self.config, self.about = config, About()
        D = config.width
        layers = 2 * config.depth if config.axial else config.depth
        self.normalize = Normalize(config.mean, config.std)
        self.stem = Body(config.stem) if config.stem else None
        in_channels = config.stem.width if config.stem else config.channels
        patch_values = in_channels * config.patch[0] * config.patch[1]
        self.embedding = nn.Linear(patch_values, D, bias=config.embedding_bias)  # E of eq. 1
        self.norm_patches = make_norm(config, D) if config.norm_embedding == "patches" else nn.Identity()
        self.class_token = nn.Parameter(torch.empty(1, D)) if config.class_token else None
        self.distillation_token = nn.Parameter(torch.empty(1, D)) if config.distillation else None
        self.registers = nn.Parameter(torch.empty(config.registers, D)) if config.registers else None
        self.positions = nn.ModuleList(Positions(config) for _ in range(count_position_tables(config, layers)))
        self.norm_tokens = make_norm(config, D) if config.norm_embedding == "tokens" else nn.Identity()  # CLIP's
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer, layers) for layer in range(layers))
        self.norm = make_norm(config, D) if config.norm == "pre" and config.norm_final else nn.Identity()
        self.pool = AttentionPool(config) if config.pool == "attention" else None
        self.pre_logits = nn.Linear(D, config.representation) if config.representation else None
        self.projection = nn.Linear(D, config.projection, bias=False) if config.projection else None
        self.head = make_head(config) if config.classes else None
        self.head_distillation = nn.Linear(D, config.classes) if config.distillation and config.classes else None
        self.initialize()

    def initialize(self, generator: torch.Generator | None = None) -> Self:
        """Draws all weights by the scheme `config.init`; does nothing on the meta device."""
        if not self.embedding.weight.is_meta:
            initialize_vit(self, generator)
        return self

    def forward(self, images: Tensor, trace: Trace | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [B, K]. A model with a distillation token returns both heads' logits in training, else their mean."""
        if trace is not None:
            trace.check(self.trace_names(), self.config.heads)
        return self.classify(self.encode(images, trace), trace)

    def features(self, images: Tensor, layers: Sequence[int] | None = None) -> Tensor | list[Tensor]:
        """The representation [B, D]; or the tokens [B, N, D] after each of the chosen blocks (-1 is the last)."""
        if layers is None:
            return self.represent(self.encode(images))
        names = [f"block{layer}/tokens" for layer in number_layers(layers, len(self.blocks))]
        trace = Trace(*names)
        self.encode(images, trace)
        return [trace[name] for name in names]

    def encode(self, images: Tensor, trace: Trace | None = None) -> Tensor:
        """Tokens after the last block and, unless it comes after pooling, the final norm (the LN of eq. 4)."""
        return self.encode_tokens(self.embed(images, trace), trace)

    def embed(self, images: Tensor, trace: Trace | None = None) -> Tensor:
        """Eq. 1: images to tokens."""
        x = self.normalize.convert(images, self.embedding.weight, self.config.image_size)  # [B, C, height, width]
        x = note(trace, "pixels", x)
        x = x if self.stem is None else self.stem(x, trace)
        x = note(trace, "patches", self.embed_patches(patchify(x, self.config.patch)))  # [B, h*w, D]
        x = self.prepend_tokens(x)  # [B, N, D]
        if self.positions and self.config.posemb_at == "stem":
            x = self.positions[0](x)
        return note(trace, "embedded", self.dropout(self.norm_tokens(x)))

    def embed_patches(self, x: Tensor) -> Tensor:
        """[B, n, C*P*Q] -> [B, n, D]. The residual stream keeps the precision of the weights, also under autocast."""
        return self.norm_patches(self.embedding(x).to(self.embedding.weight.dtype))

    def prepend_tokens(self, x: Tensor) -> Tensor:
        """Puts the class token, the distillation token and the registers before the patches."""
        learned = [self.class_token, self.distillation_token, self.registers]
        prefix = [tokens.to(x.dtype).expand(x.shape[0], -1, -1) for tokens in learned if tokens is not None]
        return torch.cat([*prefix, x], 1) if prefix else x

    def encode_tokens(self, x: Tensor, trace: Trace | None = None) -> Tensor:
        for layer in range(len(self.blocks)):
            x = self.run_block(x, layer, trace)
        return note(trace, "encoded", x if self.config.norm_pooled else self.norm(x))  # [B, N, D]

    def run_block(self, x: Tensor, layer: int, trace: Trace | None = None) -> Tensor:
        return self.blocks[layer](self.add_layer_positions(x, layer), trace)

    def add_layer_positions(self, x: Tensor, layer: int) -> Tensor:
        """Positions at every block (Table 8): one table per layer, or one for all."""
        if self.config.posemb_at == "stem":
            return x
        return self.positions[layer if self.config.posemb_at == "every" else 0](x)

    def represent(self, x: Tensor, trace: Trace | None = None) -> Tensor:
        """Tokens [B, N, D] to one vector per image: pooling, then the hidden layer or projection before the head."""
        if self.config.pool == "average":
            x = x[:, self.config.prefix :].mean(1)
        elif self.config.pool == "token+average":
            x = torch.cat((x[:, 0], x[:, self.config.prefix :].mean(1)), -1)  # [B, 2D]
        elif self.pool is not None:
            x = self.pool(x[:, self.config.prefix :])
        elif self.config.distillation:  # the mean of the class token and DeiT's second token
            x = (x[:, 0] + x[:, 1]) / 2
        else:
            x = x[:, 0]
        x = note(trace, "pooled", self.norm(x) if self.config.norm_pooled else x)  # [B, D]
        x = x if self.pre_logits is None else torch.tanh(self.pre_logits(x))
        return x if self.projection is None else self.projection(x)

    def classify(self, x: Tensor, trace: Trace | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Encoded tokens [B, N, D] to logits [B, K], or to the representation where the model has no head."""
        representation = note(trace, "representation", self.represent(x, trace))
        if self.head is None:
            return representation
        if self.head_distillation is None:
            return note(trace, "logits", self.head(representation))  # [B, K]
        by_class, by_distillation = self.head(x[:, 0]), self.head_distillation(x[:, 1])
        mean = note(trace, "logits", (by_class + by_distillation) / 2)
        return (by_class, by_distillation) if self.training else mean

    def replace_head(self, classes: int) -> Self:
        """For transfer (paper 3.2): removes the whole head and attaches one linear layer of zeros."""
        self.config = self.config.without_head().replace(classes=classes)
        self.pre_logits = self.projection = None
        self.head = self._make_zero_head() if classes else None
        self.head_distillation = self._make_zero_head() if classes and self.config.distillation else None
        return self

    def _make_zero_head(self) -> nn.Linear:
        head = make_head(self.config).to(self.embedding.weight)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

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
