"""MAE's published files, read and written: an encoder under timm's names, and beside it, before fine-tuning, a decoder.

    net = read_mae("mae_visualize_vit_base.pth")           encoder and decoder: a MaskedViT
    write_mae(net, "mae.pth")                              both again; write_mae(net.model, ...) the encoder alone

Source: facebookresearch/mae, models_mae.py and models_vit.py: a PyTorch file {"model": weights by name}. The encoder of
either kind is read by plainvit.load too. Positions are kept as tables, fixed ones included, and pixels are predicted in
the order (row, column, channel), where ours is (channel, row, column).
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
from plainvit.weights.layout import LEAD1, Change, Layout, emit, fill, linear, locate, to
from plainvit.weights.reading import look
from plainvit.weights.writing import write_torch

log = logging.getLogger("plainvit")

HEAD_WIDTH = 32  # of the published decoder's 16 heads of 512; a file does not say


def decoder_layout(config: ViTConfig) -> Layout:
    """Our decoder's names against MAE's."""
    block, theirs, last = "blocks.{i}.", "decoder_blocks.{i}.", _pixels_last(config)
    return {
        **linear("embedding", "decoder_embed."),
        "mask_token": to("mask_token", change=LEAD1),
        "positions": to("decoder_pos_embed", change=LEAD1),
        **linear(f"{block}norm1", f"{theirs}norm1."),
        **linear(f"{block}attention.qkv", f"{theirs}attn.qkv."),
        **linear(f"{block}attention.out", f"{theirs}attn.proj."),
        **linear(f"{block}norm2", f"{theirs}norm2."),
        **linear(f"{block}mlp.fc1", f"{theirs}mlp.fc1."),
        **linear(f"{block}mlp.fc2", f"{theirs}mlp.fc2."),
        **linear("norm", "decoder_norm."),
        "answer.weight": to("decoder_pred.weight", change=last),
        "answer.bias": to("decoder_pred.bias", change=last),
    }


def _pixels_last(config: ViTConfig) -> Change:
    """Rows in the order (C, P, Q) as (P, Q, C), and back."""
    C, (P, Q) = config.channels, config.patch
    return Change(
        lambda t, _: t.unflatten(0, (C, P, Q)).movedim(0, 2).flatten(0, 2),
        lambda t: t.unflatten(0, (P, Q, C)).movedim(2, 0).flatten(0, 2),
    )


def read_mae(
    source: str | Path, *, heads: int | None = None, decoder_heads: int | None = None, normalise: bool = True
) -> MaskedViT:
    """Encoder and decoder of a pre-training file.

    heads and decoder_heads say what the file cannot, where they are not 64 wide, and 32 in the decoder. normalise:
    whether it learned pixels normalised by each patch's own mean and std, as all but the mae_visualize_* files did.
    """
    found, tensors = look(source, heads=heads)
    if "decoder_embed.weight" not in tensors.shapes:
        raise ValueError(f"{source} has no decoder of MAE's: plainvit.load reads an encoder alone")
    model = fill(found, tensors, torch.float32)
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
        wanted = tuple(place.change.theirs(weight, config).shape)
        if tensors.shapes[their] != wanted:
            raise ValueError(f"{their} has shape {tensors.shapes[their]} where MAE's decoder has {wanted}")
        found = tensors.take(their)
        if not found.is_floating_point() or not torch.isfinite(found).all():
            raise ValueError(f"{their} holds values that are not finite numbers: the file is damaged")
        yield name, place.change.ours(found).reshape(weight.shape)


def write_mae(model: MaskedViT | ViT, path: str | Path) -> Path:
    """A file that MAE's own code loads: of a MaskedViT with its decoder, of a ViT the encoder (and head) alone."""
    path, vit = Path(path), model if isinstance(model, ViT) else model.model
    if path.suffix != ".pth":
        raise ValueError(f"MAE's files are .pth, not {path.suffix or path.name!r}")
    config = vit.config
    lacking = [(part, why) for part, why in _lacks(config)]
    if lacking:
        raise ValueError(f"MAE's layout cannot express {'; '.join(f'{part} ({why})' for part, why in lacking)}")
    weights = {name: weight.detach().cpu() for name, weight in vit.state_dict().items()}
    if config.posemb == "sincos2d":
        table = sincos2d(*config.grid, config.width).to(weights["class_token"])
        weights["positions.0.table"] = torch.cat((torch.zeros_like(table[:1]), table))
    out = emit(timm.layout_for(config), weights, config)
    if isinstance(model, MaskedViT):
        if not isinstance(model.decoder, Decoder) or model.masked.target != "pixels":
            raise ValueError(
                f"MAE's layout has MAE's decoder of pixels, and this is of {model.objective!r}: write .model"
            )
        theirs = {name: weight.detach().cpu() for name, weight in model.decoder.state_dict().items()}
        out |= emit(decoder_layout(config), theirs, config)
    if (config.mean, config.std) != (timm.IMAGENET_MEAN, timm.IMAGENET_STD):
        log.warning("%s does not hold its mean %s and std %s: load it with them", path, config.mean, config.std)
    write_atomically(path, lambda beside: write_torch(beside, {"model": out}))
    return path


def _lacks(config: ViTConfig) -> Iterator[tuple[str, str]]:
    """(part, why) for what MAE's model, which is timm's with a class token and fixed positions, has not."""
    fixed = config.replace(posemb="1d") if config.posemb == "sincos2d" else config
    yield from timm.lacks(fixed)
    if not config.class_token or config.prefix != 1 or config.posemb_prefix == "none":
        yield "tokens", "it has a class token with a position, and no other"
    if config.stem or config.axial or config.norm == "post" or config.layer_scale is not None:
        yield "blocks", "it has a plain ViT's, and no LayerScale"
    if config.patch[0] != config.patch[1] or config.grid[0] != config.grid[1] or config.channels != 3:
        yield "image_size", "its patches and images are square, of three channels"
