"""Masked image modeling around the same ViT: the paper's masked patch prediction (4.6) and MAE.

    net = MaskedViT(model, "mae", Masked(ratio=0.75, target="pixels", normalize=True))
    predictions = net.predict(images, order)  # [B, k, ...]: for the hidden patches alone

`order` [B, n] lists the patches of each image, the k hidden ones first. MAE (arXiv 2111.06377) drops these before the
first layer, so that the blocks process n - k tokens only, and a small decoder predicts them. The paper (B.1.2)
replaces them by a learned embedding, and one linear layer predicts them. Which patches are hidden, and with which
probabilities each is masked, replaced or kept, is drawn in `plainvit/train/masked_objective.py`.
Letters are those of vit.py; n = h * w patches, k of them hidden.
"""

import math
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from plainvit.config import Masked, Model, ViTConfig
from plainvit.models.families import make_norm
from plainvit.models.init import initialize_vit
from plainvit.models.positions import Positions, sincos2d
from plainvit.models.vit import Block, ViT, patchify

Objective = Literal["masked", "mae"]
COLORS = 512  # 3 bits of each of red, green and blue
CELLS = {"color": 1, "colors16": 4}  # rows and columns of colors in a patch


def take(x: Tensor, patches: Tensor) -> Tensor:
    """The rows of x [B, n, D] of these patches [B, s]: [B, s, D]."""
    return x.gather(1, patches.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def count_hidden_patches(config: ViTConfig, masked: Masked) -> int:
    """k, the hidden patches of each image: rounded up, as in MAE's code."""
    return math.ceil(round(masked.ratio * math.prod(config.grid), 6))


def count_target_values(config: ViTConfig, masked: Masked) -> int:
    """The number of values predicted for a hidden patch."""
    if masked.target == "pixels":
        return config.channels * math.prod(config.patch)
    return COLORS * CELLS[masked.target] ** 2


def check_maskable(config: Model | None, objective: str, masked: Masked) -> None:
    """Raises ValueError if the objective does not support the model."""
    flag = f"--objective {objective}"
    if not isinstance(config, ViTConfig):
        raise ValueError(f"{flag} needs a ViT, this model is a ResNet: use --model ViT-B/16")
    if config.stem:
        raise ValueError(f"{flag} needs a plain ViT: a hybrid's stem mixes the pixels of hidden and visible patches")
    h, w = config.grid
    hidden = count_hidden_patches(config, masked)
    if not 0 < hidden < h * w:
        raise ValueError(
            f"--masked.ratio {masked.ratio:g} hides {hidden} of {h} x {w} patches, but some must be hidden and some "
            "visible: use a smaller patch or larger images"
        )
    if masked.target in CELLS and config.channels != 3:
        raise ValueError(
            f"--masked.target {masked.target} needs 3 channels, the model has {config.channels}: "
            "use --masked.target pixels"
        )
    if masked.target == "colors16" and any(side % 4 for side in config.patch):
        patch = " x ".join(map(str, config.patch))
        raise ValueError(
            f"--masked.target colors16 needs a patch divisible by 4, got {patch}: use --masked.target color"
        )
    relative = config.posemb in ("relative", "bias") or config.rotary != "none"
    if objective == "mae" and (config.axial or relative or config.posemb_at != "stem"):
        raise ValueError(
            f"{flag} does not support axial blocks, relative or rotary positions, or positions at every layer: "
            "use --model.posemb 1d"
        )


class Decoder(nn.Module):
    """MAE's decoder: the encoded visible patches and a mask token per hidden one, through a few narrow blocks.

    Its parts have the names of a ViT's, so that the same scheme initializes them.
    """

    positions: Tensor
    stem = None

    def __init__(self, encoder: ViTConfig, masked: Masked, out: int) -> None:
        super().__init__()
        width = masked.width
        plain = {"dropout": 0.0, "stochastic_depth": 0.0, "layer_scale": None, "norm": "pre", "posemb": "none"}
        plain |= {"rotary": "none", "gated": False, "qk_norm": False, "norm_inner": "none", "block_bias": "all"}
        self.config = encoder.replace(width=width, depth=masked.depth, heads=masked.heads, mlp_dim=4 * width, **plain)
        self.prefix = encoder.prefix
        self.embedding = nn.Linear(encoder.width, width)
        self.mask_token = nn.Parameter(torch.empty(1, width))
        table = sincos2d(*encoder.grid, width, endpoint=False).float()  # tokens before the patches have none
        self.register_buffer("positions", torch.cat((table.new_zeros(self.prefix, width), table)))
        self.blocks = nn.ModuleList(Block(self.config, layer, masked.depth) for layer in range(masked.depth))
        self.norm = make_norm(encoder, width)
        self.prediction = nn.Linear(width, out)

    def forward(self, x: Tensor, order: Tensor, hidden: int) -> Tensor:
        """Encoded tokens x [B, prefix + n - k, D] to predictions [B, k, out]."""
        x = self.embedding(x)  # under autocast the residual stream of the decoder is low precision
        x = torch.cat((x, self.mask_token.to(x.dtype).expand(len(x), hidden, -1)), 1)  # [B, prefix + n, D]
        # Blocks do not depend on the order of tokens: the hidden ones stay last, and positions are reordered
        prefix = torch.arange(self.prefix, device=x.device).expand(len(x), -1)
        places = torch.cat((prefix, order.roll(-hidden, 1) + self.prefix), 1)  # [B, prefix + n]
        x = x + self.positions.to(x.dtype)[places]
        return self.prediction(self.norm(self.decode(x, hidden)))  # [B, k, out]

    def decode(self, x: Tensor, hidden: int) -> Tensor:
        """Tokens [B, prefix + n, D] through all blocks; those of the hidden patches: [B, k, D]."""
        for block in self.blocks:
            x = block(x)
        return x[:, -hidden:]


class MaskedViT(nn.Module):
    """A ViT (`model`, the part to keep) and the decoder or linear layer that predicts hidden patches."""

    def __init__(self, model: ViT, objective: Objective, masked: Masked) -> None:
        super().__init__()
        config = model.config
        check_maskable(config, objective, masked)
        self.model, self.objective, self.masked = model, objective, masked
        self.hidden_count, out = count_hidden_patches(config, masked), count_target_values(config, masked)
        self.mask = None if objective == "mae" else nn.Parameter(torch.empty(1, config.width))
        self.decoder = Decoder(config, masked, out) if objective == "mae" else nn.Linear(config.width, out)
        self.initialize()

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> Self:
        """Draws all weights but those of the ViT itself; does nothing on the meta device.

        Mask tokens and the decoder's last layer follow MAE; the linear layer starts at 0, like heads.
        """
        decoder = self.decoder
        token = decoder.mask_token if isinstance(decoder, Decoder) else self.mask
        assert token is not None
        if token.is_meta:
            return self
        if isinstance(decoder, Decoder):
            initialize_vit(cast(Any, decoder), generator)
            nn.init.xavier_uniform_(decoder.prediction.weight, generator=generator)
        else:
            nn.init.zeros_(decoder.weight)
            nn.init.zeros_(decoder.bias)
        nn.init.normal_(token, 0.0, 0.02, generator)
        return self

    def predict(self, images: Tensor, order: Tensor, source: Tensor | None = None) -> Tensor:
        """Predictions [B, k, ...] for the hidden patches, order[:, :k].

        `source` [B, n], for all but MAE, is the patch shown at each position, or -1 for the mask.
        """
        if self.mask is None:
            return self.decoder(self.encode_visible(images, order), order, self.hidden_count)
        assert source is not None
        # The embedding is linear per patch: moving pixels is moving embeddings
        x = self._embed(images, source.clamp(min=0))  # [B, n, D]
        x = self.model.prepend_tokens(torch.where((source < 0).unsqueeze(-1), self.mask.to(x.dtype), x))
        if self.model.positions and self.model.config.posemb_at == "stem":
            x = self.model.positions[0](x)
        x = self._encode(self.model.dropout(self.model.norm_tokens(x)))
        return self.decoder(take(x[:, self.model.config.prefix :], order[:, : self.hidden_count]))

    def encode_visible(self, images: Tensor, order: Tensor) -> Tensor:
        """MAE's encoder, which never sees the hidden patches: [B, prefix + n - k, D]."""
        visible = order[:, self.hidden_count :]
        x = self.model.prepend_tokens(self._embed(images, visible))
        if self.model.positions:
            x = x + self._select_positions(visible, x)
        return self._encode(self.model.dropout(self.model.norm_tokens(x)))

    def _embed(self, images: Tensor, patches: Tensor) -> Tensor:
        """The embeddings of the patches numbered `patches` [B, s] alone: [B, s, D]."""
        pixels = self.model.normalize.convert(images, self.model.embedding.weight, self.model.config.image_size)
        return self.model.embed_patches(take(patchify(pixels, self.model.config.patch), patches))

    def _select_positions(self, patches: Tensor, x: Tensor) -> Tensor:
        """The positions of the tokens before the patches and of the patches numbered `patches`: [B, prefix + s, D]."""
        positions = self.model.positions[0]
        assert isinstance(positions, Positions)
        first = torch.arange(positions.prefix, device=patches.device).expand(len(patches), -1)
        # One copy per image: on a GPU, gradients of a shared table would be summed in random order
        table = positions.token_table().to(x.dtype).expand(len(patches), -1, -1)
        return take(table, torch.cat((first, patches + positions.prefix), 1))

    def _encode(self, x: Tensor) -> Tensor:
        """Normalizes all tokens, also if the model normalizes the pooled vector: here nothing is pooled."""
        x = self.model.encode_tokens(x)
        return self.model.norm(x) if self.model.config.norm_pooled else x
