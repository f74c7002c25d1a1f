"""Small models of timm and torchvision with random weights in float64."""

from functools import partial
from typing import Any

from peers import scramble
from timm.layers import HybridEmbed, StdConv2d
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import _resnetv2
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionViT


def timm_vit(kind: type[VisionTransformer] = VisionTransformer, *, drawn: bool = True, **settings: Any) -> Any:
    """drawn=False: with the weights that timm itself draws."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0}
    return _finish(kind(**shape | {"num_classes": 7} | settings), drawn=drawn)


def timm_hybrid(blocks: tuple[int, ...], patch: int = 1, **settings: Any) -> Any:
    return timm_vit(patch_size=patch, embed_layer=partial(HybridEmbed, backbone=_resnetv2(layers=blocks)), **settings)


def timm_bit(blocks: tuple[int, ...], *, drawn: bool = True) -> Any:
    conv = partial(StdConv2d, eps=1e-8)
    return _finish(ResNetV2(list(blocks), num_classes=7, stem_type="fixed", conv_layer=conv), drawn=drawn)


def torchvision_vit(**settings: Any) -> Any:
    shape = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 48, "mlp_dim": 96}
    return _finish(TorchvisionViT(**shape | {"num_classes": 7} | settings))


def _finish(peer: nn.Module, *, drawn: bool = True) -> Any:
    peer.double().eval()
    if drawn:
        scramble(peer)
    return peer
