"""Encoders of images with hidden patches, around the same ViT: the paper's masked patch prediction (4.6), MAE, SimMIM.

    net = MaskedViT(model, "mae", Masked(ratio=0.75, target="pixels", normalise=True))
    answers = net.predict(images, order)      # [B, k, ...]: for the hidden patches alone

`order` [B, n] lists the patches of each image, the k hidden ones first. MAE (arXiv 2111.06377) drops these before the
first layer, so that the blocks work on n - k tokens only, and a small decoder answers for them. The paper (B.1.2) and
SimMIM (arXiv 2111.09886) put a learned embedding in their place, and one linear layer answers.
Letters are those of vit.py; n = h * w patches, k of them hidden.
"""

import math
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from plainvit.config import Masked, Model, ViTConfig
from plainvit.models.init import initialise_vit
from plainvit.models.positions import sincos2d
from plainvit.models.vit import Block, ViT, patchify

Objective = Literal["masked", "mae", "simmim"]
COLOURS = 512  # 3 bits of each of red, green and blue
CELLS = {"colour": 1, "colours16": 4}  # a side of the grid of colours in a patch


def take(x: Tensor, places: Tensor) -> Tensor:
    """The rows of x [B, n, D] at places [B, s]: [B, s, D]."""
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def hidden_patches(config: ViTConfig, masked: Masked) -> int:
    """k: how many patches of each image are hidden. Rounded up to whole units, as in MAE's and SimMIM's code."""
    units = math.prod(side // masked.unit for side in config.grid)
    return math.ceil(round(masked.ratio * units, 6)) * masked.unit**2


def answer_size(config: ViTConfig, masked: Masked) -> int:
    """Numbers that are predicted for a hidden patch."""
    if masked.target == "pixels":
        return config.channels * math.prod(config.patch)
    return COLOURS * CELLS[masked.target] ** 2


def check_maskable(config: Model | None, objective: str, masked: Masked) -> None:
    """Whether the objective makes sense for a model; an error in one line where it does not."""
    if not isinstance(config, ViTConfig):
        raise ValueError(
            f"objective {objective!r} hides patches of a ViT, and this model is a ResNet: --model ViT-B/16"
        )
    if config.stem:
        raise ValueError(
            f"objective {objective!r} hides patches of pixels, which a hybrid's stem would mix: a plain ViT"
        )
    h, w = config.grid
    if h % masked.unit or w % masked.unit:
        raise ValueError(
            f"a grid of {h} x {w} patches is not made of squares of masked.unit {masked.unit}; 1 always is"
        )
    hidden = hidden_patches(config, masked)
    if not 0 < hidden < h * w:
        words = f"masked.ratio {masked.ratio:g} hides {hidden} of {h} x {w} patches"
        raise ValueError(f"{words}, and some must be hidden and some seen: a smaller patch, or larger images")
    if masked.target in CELLS and config.channels != 3:
        raise ValueError(
            f"masked.target {masked.target!r} is of red, green and blue, the model has {config.channels} "
            "channels: --masked.target pixels"
        )
    if masked.target == "colours16" and any(side % 4 for side in config.patch):
        shape = " x ".join(map(str, config.patch))
        raise ValueError(
            f"masked.target 'colours16' cuts a patch into 4 x 4, and {shape} is not divisible by 4: 'colour'"
        )
    if objective == "mae" and (config.axial or config.posemb == "relative" or config.posemb_at != "stem"):
        raise ValueError(
            "objective 'mae' drops tokens, so positions are added once, and blocks are not axial: --model.posemb 1d"
        )


class Decoder(nn.Module):
    """MAE's: the encoded visible patches beside a mask token for each hidden one, through a few narrow blocks.

    Its parts are called as a ViT's are, so that the same scheme draws their initial weights.
    """

    positions: Tensor
    stem = None

    def __init__(self, encoder: ViTConfig, masked: Masked, out: int) -> None:
        super().__init__()
        width = masked.width
        plain = {"dropout": 0.0, "stochastic_depth": 0.0, "layer_scale": None, "norm": "pre", "posemb": "none"}
        self.config = encoder.replace(width=width, depth=masked.depth, heads=masked.heads, mlp_dim=4 * width, **plain)
        self.prefix = encoder.prefix
        self.embedding = nn.Linear(encoder.width, width)
        self.mask_token = nn.Parameter(torch.empty(1, width))
        places = sincos2d(*encoder.grid, width, closed=False).float()  # tokens before the patches have none
        self.register_buffer("positions", torch.cat((places.new_zeros(self.prefix, width), places)))
        self.blocks = nn.ModuleList(Block(self.config, layer, masked.depth) for layer in range(masked.depth))
        self.norm = nn.LayerNorm(width, encoder.norm_eps)
        self.answer = nn.Linear(width, out)

    def forward(self, x: Tensor, order: Tensor, hidden: int) -> Tensor:
        """x [B, prefix + n - k, D] as the encoder left it: answers [B, k, out]."""
        x = self.embedding(x)  # under autocast the decoder, which nobody keeps, stays in low precision throughout
        x = torch.cat((x, self.mask_token.to(x.dtype).expand(len(x), hidden, -1)), 1)  # [B, prefix + n, D]
        # Blocks do not mind the order of tokens: the hidden ones stay last, and it is the positions that move
        first = torch.arange(self.prefix, device=x.device).expand(len(x), -1)
        x = x + self.positions.to(x.dtype)[torch.cat((first, order.roll(-hidden, 1) + self.prefix), 1)]
        return self.answer(self.norm(self.decode(x, hidden)))  # [B, k, out]

    def decode(self, x: Tensor, hidden: int) -> Tensor:
        """Tokens [B, prefix + n, D] through all blocks; those of the hidden patches: [B, k, D]."""
        for block in self.blocks:
            x = block(x)
        return x[:, -hidden:]


class MaskedViT(nn.Module):
    """A ViT (`model`, the part to keep) and what predicts hidden patches from its tokens."""

    squares: Tensor

    def __init__(self, model: ViT, objective: Objective, masked: Masked) -> None:
        super().__init__()
        config = model.config
        check_maskable(config, objective, masked)
        self.model, self.objective, self.masked = model, objective, masked
        self.hidden, out = hidden_patches(config, masked), answer_size(config, masked)
        self.register_buffer("squares", squares(*config.grid, masked.unit), persistent=False)
        self.mask = None if objective == "mae" else nn.Parameter(torch.empty(1, config.width))
        self.decoder = Decoder(config, masked, out) if objective == "mae" else nn.Linear(config.width, out)
        self.initialise()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> Self:
        """Draws all weights but those of the ViT itself; nothing to do on the meta device.

        Mask tokens and the decoder's last layer are MAE's; the linear layer that answers starts at 0, as heads do.
        """
        decoder = self.decoder
        token = decoder.mask_token if isinstance(decoder, Decoder) else self.mask
        assert token is not None
        if token.is_meta:
            return self
        if isinstance(decoder, Decoder):
            initialise_vit(cast(Any, decoder), generator)
            nn.init.xavier_uniform_(decoder.answer.weight, generator=generator)
        else:
            nn.init.zeros_(decoder.weight)
            nn.init.zeros_(decoder.bias)
        nn.init.normal_(token, 0.0, 0.02, generator)
        return self

    def predict(self, images: Tensor, order: Tensor, source: Tensor | None = None) -> Tensor:
        """Answers [B, k, ...] for the hidden patches, order[:, :k].

        `source` [B, n], for all but MAE, says what stands in each place: a patch, by its number, or -1 for the mask.
        """
        if self.mask is None:
            return self.decoder(self.encode_visible(images, order), order, self.hidden)
        assert source is not None
        # A patch's embedding is linear in its own pixels: to move the pixels is to move the embedding
        x = self._embed(images, source.clamp(min=0))  # [B, n, D]
        x = self.model.prepend_tokens(torch.where((source < 0).unsqueeze(-1), self.mask.to(x.dtype), x))
        if self.model.positions and self.model.config.posemb_at == "stem":
            x = self.model.positions[0](x)
        x = self._encode(self.model.dropout(x))
        return self.decoder(take(x[:, self.model.config.prefix :], order[:, : self.hidden]))

    def encode_visible(self, images: Tensor, order: Tensor) -> Tensor:
        """MAE's encoder: what is hidden never enters, not even the embedding. [B, prefix + n - k, D]."""
        visible = order[:, self.hidden :]
        x = self.model.prepend_tokens(self._embed(images, visible))
        if self.model.positions:
            x = x + self._positions_of(visible, x)
        return self._encode(self.model.dropout(x))

    def _embed(self, images: Tensor, places: Tensor) -> Tensor:
        """The embeddings of the patches at `places` [B, s] alone: [B, s, D]."""
        self.model.check_images(images)
        pixels = self.model.normalise(images).to(self.model.embedding.weight.dtype)
        return self.model.embed_patches(take(patchify(pixels, self.model.config.patch), places))

    def _positions_of(self, places: Tensor, like: Tensor) -> Tensor:
        """The vectors of the tokens before the patches and of the patches at `places`: [B, prefix + s, D]."""
        positions = self.model.positions[0]
        first = torch.arange(positions.prefix, device=places.device).expand(len(places), -1)
        # A copy for each image: gradients of one shared table would add up in any order on a GPU
        table = positions.token_table().to(like.dtype).expand(len(places), -1, -1)
        return take(table, torch.cat((first, places + positions.prefix), 1))

    def _encode(self, x: Tensor) -> Tensor:
        """All tokens are normed, also where the model norms a pooled vector: here nothing is pooled."""
        x = self.model.encode_tokens(x)
        return self.model.norm(x) if self.model.config.norm_pooled else x


def squares(h: int, w: int, unit: int) -> Tensor:
    """The patches of each unit x unit square of the grid: [h*w / unit^2, unit^2]."""
    grid = torch.arange(h * w).view(h // unit, unit, w // unit, unit)
    return grid.transpose(1, 2).reshape(-1, unit * unit)
