"""MAE's published files: an encoder under timm's names and, before fine-tuning, a decoder.

    net = read_mae("mae_visualize_vit_base.pth")           encoder and decoder: a MaskedViT
    write_mae(net, "mae.pth")                              both; write_mae(net.model, ...) the encoder alone

Source: facebookresearch/mae, models_mae.py and models_vit.py: a PyTorch file {"model": weights by name}. plainvit.load
reads the encoder too. Positions are stored as tables, also fixed ones, and pixels are predicted in the order (row,
column, channel), where ours is (channel, row, column).
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from plainvit.config import Masked, ViTConfig
from plainvit.disk import write_atomically
from plainvit.models import ViT
from plainvit.models.masked import Decoder, MaskedViT
from plainvit.models.positions import sincos2d
from plainvit.weights import timm
from plainvit.weights.files import Tensors
from plainvit.weights.grids import count_layers
from plainvit.weights.layout import (
    LEADING_AXIS,
    Conversion,
    Layout,
    build_model,
    check_values,
    emit,
    entry,
    linear,
    locate,
)
from plainvit.weights.reading import inspect_weights
from plainvit.weights.writing import write_torch

log = logging.getLogger("plainvit")

HEAD_WIDTH = 32  # of the published decoders: 16 heads, width 512; the files do not say


def decoder_layout(config: ViTConfig) -> Layout:
    """Names of the decoder."""
    block, theirs, last = "blocks.{i}.", "decoder_blocks.{i}.", _pixels_last(config)
    return {
        **linear("embedding", "decoder_embed."),
        "mask_token": entry("mask_token", conversion=LEADING_AXIS),
        "positions": entry("decoder_pos_embed", conversion=LEADING_AXIS),
        **linear(f"{block}norm1", f"{theirs}norm1."),
        **linear(f"{block}attention.qkv", f"{theirs}attn.qkv."),
        **linear(f"{block}attention.out", f"{theirs}attn.proj."),
        **linear(f"{block}norm2", f"{theirs}norm2."),
        **linear(f"{block}mlp.fc1", f"{theirs}mlp.fc1."),
        **linear(f"{block}mlp.fc2", f"{theirs}mlp.fc2."),
        **linear("norm", "decoder_norm."),
        "answer.weight": entry("decoder_pred.weight", conversion=last),
        "answer.bias": entry("decoder_pred.bias", conversion=last),
    }


def _pixels_last(config: ViTConfig) -> Conversion:
    """Rows in the order (C, P, Q) to (P, Q, C), and back."""
    C, (P, Q) = config.channels, config.patch
    return Conversion(
        lambda t, _: t.unflatten(0, (C, P, Q)).movedim(0, 2).flatten(0, 2),
        lambda t: t.unflatten(0, (P, Q, C)).movedim(2, 0).flatten(0, 2),
    )


def read_mae(
    source: str | Path, *, heads: int | None = None, decoder_heads: int | None = None, normalise: bool = True
) -> MaskedViT:
    """Reads encoder and decoder of a pre-training file.

    heads and decoder_heads are needed if the heads are not 64 wide, and 32 in the decoder. normalise: whether it was
    trained on pixels normalised by each patch's mean and std, as all but the mae_visualize_* files were.
    """
    found, tensors = inspect_weights(source, heads=heads)
    if "decoder_embed.weight" not in tensors.shapes:
        raise ValueError(f"{source} has no MAE decoder: use plainvit.load for an encoder alone")
    model = build_model(found, tensors, torch.float32)
    assert isinstance(model, ViT)
    width = tensors.shapes["decoder_embed.weight"][0]
    depth = count_layers(tensors.shapes, r"decoder_blocks\.(\d+)\.")
    masked = Masked(
        ratio=0.75,
        target="pixels",
        normalise=normalise,
        depth=depth,
        width=width,
        heads=decoder_heads or max(width // HEAD_WIDTH, 1),
    )
    net = MaskedViT(model, "mae", masked)
    assert isinstance(net.decoder, Decoder)
    net.decoder.load_state_dict(dict(_decoder_weights(net.decoder, model.config, tensors)))
    return net.eval()


def _decoder_weights(decoder: Decoder, config: ViTConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    layout = decoder_layout(config)
    for name, weight in decoder.state_dict().items():
        place = locate(layout, name)
        assert place is not None, name
        (their,) = place.names
        if their not in tensors.shapes:
            raise ValueError(f"this MAE file lacks {their}: it is incomplete")
        expected = tuple(place.conversion.write(weight, config).shape)
        if tensors.shapes[their] != expected:
            raise ValueError(f"{their} has shape {tensors.shapes[their]} where MAE's decoder has {expected}")
        yield name, place.conversion.read(check_values(tensors.pop(their), their)).reshape(weight.shape)


def write_mae(model: MaskedViT | ViT, path: str | Path) -> Path:
    """A file that MAE's own code loads: of a MaskedViT with its decoder, of a ViT the encoder (and head) alone."""
    path, vit = Path(path), model if isinstance(model, ViT) else model.model
    if path.suffix != ".pth":
        raise ValueError(f"MAE's format is a .pth file: use {path.with_suffix('.pth')}")
    config = vit.config
    unsupported = "; ".join(f"{part} ({why})" for part, why in _list_unsupported(config))
    if unsupported:
        raise ValueError(f"MAE's format does not support {unsupported}")
    weights = {name: weight.detach().cpu() for name, weight in vit.state_dict().items()}
    if config.posemb == "sincos2d":
        table = sincos2d(*config.grid, config.width).to(weights["class_token"])
        weights["positions.0.table"] = torch.cat((torch.zeros_like(table[:1]), table))
    out = emit(timm.layout_for(config), weights, config)
    if isinstance(model, MaskedViT):
        if not isinstance(model.decoder, Decoder) or model.masked.target != "pixels":
            raise ValueError(f"MAE's format has no place for the head of {model.objective!r}: write its .model alone")
        theirs = {name: weight.detach().cpu() for name, weight in model.decoder.state_dict().items()}
        out |= emit(decoder_layout(config), theirs, config)
    if (config.mean, config.std) != (timm.IMAGENET_MEAN, timm.IMAGENET_STD):
        log.warning("%s does not store mean %s and std %s: pass them to load()", path, config.mean, config.std)
    write_atomically(path, lambda target: write_torch(target, {"model": out}))
    return path


def _list_unsupported(config: ViTConfig) -> Iterator[tuple[str, str]]:
    """(part, reason) for what MAE's model does not have: it is timm's with a class token and fixed positions."""
    fixed = config.replace(posemb="1d") if config.posemb == "sincos2d" else config
    yield from timm.list_unsupported(fixed)
    if not config.class_token or config.prefix != 1 or config.posemb_prefix == "none":
        yield "tokens", "it has a class token with a position, and no other"
    if config.stem or config.axial or config.norm == "post" or config.layer_scale is not None:
        yield "blocks", "it has a plain ViT's without LayerScale"
    if config.patch[0] != config.patch[1] or config.grid[0] != config.grid[1] or config.channels != 3:
        yield "image_size", "its patches and images are square, of three channels"
