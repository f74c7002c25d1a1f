"""BiT and hybrids against timm (its numerics) and against NumPy float64 (Google's numerics, reference.py)."""

from functools import partial

import pytest
import reference
import tiny
import torch
from peers import from_timm, from_timm_resnet, scramble
from timm.layers import HybridEmbed, StdConv2d
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import _resnetv2

from plainvit import Trace
from plainvit.models import build
from plainvit.names import configure

EXACT = 1e-10
# stages, patch and image size of small hybrids: as /16 (stride 8 here), as /32 with odd maps, and the root alone
HYBRIDS = [((1, 2), 1, (48, 80)), ((2, 1, 1), 1, (80, 48)), ((1,), 2, (24, 40)), ((), 8, (64, 32)), ((), 1, (20, 36))]
SIZES = [(64, 64), (33, 47), (50, 31), (65, 98), (7, 9)]


def timm_hybrid(blocks: tuple[int, ...], patch: int, size: tuple[int, int]) -> VisionTransformer:
    embed = partial(HybridEmbed, backbone=_resnetv2(layers=blocks))
    shape = {"embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 7}
    peer = VisionTransformer(img_size=size, patch_size=patch, embed_layer=embed, **shape).double().eval()
    scramble(peer)
    return peer


def timm_bit(blocks: tuple[int, ...]) -> ResNetV2:
    conv = partial(StdConv2d, eps=1e-8)
    peer = ResNetV2(list(blocks), num_classes=7, stem_type="fixed", conv_layer=conv).double().eval()
    scramble(peer)
    return peer


@pytest.mark.parametrize(("blocks", "patch", "size"), HYBRIDS)
def test_hybrid_equals_timm(blocks: tuple[int, ...], patch: int, size: tuple[int, int]) -> None:
    peer = timm_hybrid(blocks, patch, size)
    model = tiny.hybrid(blocks=blocks, patch=patch, image_size=size, numerics="timm")
    model.load_state_dict(from_timm(peer.state_dict()))
    images = tiny.images(size=size)
    with torch.inference_mode():
        assert tiny.difference(model(images), peer(images * 2 - 1)) < EXACT


@pytest.mark.parametrize(("blocks", "patch", "size"), HYBRIDS)
def test_hybrid_equals_numpy(blocks: tuple[int, ...], patch: int, size: tuple[int, int]) -> None:
    model = tiny.hybrid(blocks=blocks, patch=patch, image_size=size)
    images, weights = tiny.images(size=size), reference.weights_of(model)
    features = reference.hybrid_stem(images.numpy() * 2 - 1, reference.under(weights, "stem."), blocks)
    kernels = weights["embedding.weight"].reshape(48, -1, patch, patch)
    tokens = reference.convolve(features, kernels, patch, ((0, 0), (0, 0))).reshape(2, 48, -1).transpose(0, 2, 1)
    logits = reference.vit(tokens + weights["embedding.bias"], weights, depth=2, heads=4)
    with torch.inference_mode():
        assert tiny.difference(model(images), torch.from_numpy(logits)) < EXACT


@pytest.mark.parametrize(
    ("blocks", "size"), tiny.mostly_slow([*(((2, 1, 1), size) for size in SIZES), ((1, 1, 1, 2), (65, 98))], 5)
)
def test_bit_equals_timm(blocks: tuple[int, ...], size: tuple[int, int]) -> None:
    peer = timm_bit(blocks)
    model = tiny.bit(blocks=blocks, numerics="timm")
    model.load_state_dict(from_timm_resnet(peer.state_dict()))
    images = tiny.images(size=size)
    with torch.inference_mode():
        assert tiny.difference(model(images), peer(images * 2 - 1)) < EXACT


@pytest.mark.parametrize("size", SIZES)
def test_bit_equals_numpy(size: tuple[int, int]) -> None:
    model = tiny.bit()
    images = tiny.images(size=size)
    logits = reference.bit(images.numpy() * 2 - 1, reference.weights_of(model), model.config.blocks)
    with torch.inference_mode():
        assert tiny.difference(model(images), torch.from_numpy(logits)) < EXACT


def test_bit_max_pool_pads_with_zeros() -> None:
    """Pre-norm values may be negative; the border's maximum is then the padding's zero, not the values'."""
    model, trace = tiny.bit(), Trace("root")
    with torch.no_grad():
        model.body.root.weight.zero_()
        model.body.root.weight[:, :, 3, 3] = 1.0  # standardised: a positive centre among negative places
    black = torch.zeros(1, 3, 32, 32, dtype=torch.float64)  # -1 everywhere after normalisation
    model(black, trace)
    assert (model.body.root(black * 2 - 1)[..., :2, :] < 0).all()  # all that the pool's first row sees
    assert not trace["root"][..., 0, :].any()


# Structure ------------------------------------------------------------------------------------------------------------

STEMS = {  # name: units per stage, feature map at 224 px and its channels, grid of tokens
    "R+ViT-Ti/16": ((), (56, 56), 64, (7, 7)),
    "R50x1+ViT-B/32": ((3, 4, 6, 3), (7, 7), 2048, (7, 7)),
    "R50x1+ViT-L/16": ((3, 4, 9), (14, 14), 1024, (14, 14)),
}


def trace_shapes(name: str) -> tuple[torch.nn.Module, Trace]:
    """The shapes of a full-sized pass, without its numbers."""
    with torch.device("meta"):
        model, trace = build(configure(name)).eval(), Trace("*")
        model(torch.empty(1, 3, 224, 224), trace)
    return model, trace


def strides(stages: torch.nn.ModuleList) -> list[list[int]]:
    """Stride of each unit, which must sit on the 3 x 3 convolution."""
    for stage in stages:
        for unit in stage:
            assert unit.conv1.stride == unit.conv3.stride == (1, 1)
            assert unit.conv2.kernel_size == (3, 3)
    return [[unit.conv2.stride[0] for unit in stage] for stage in stages]


@pytest.mark.parametrize("name", STEMS)
def test_structure_of_hybrids(name: str) -> None:
    units, size, channels, grid = STEMS[name]
    model, trace = trace_shapes(name)
    stages = model.stem.stages
    assert tuple(map(len, stages)) == units
    assert strides(stages) == [[2 if stage else 1] + [1] * (count - 1) for stage, count in enumerate(units)]
    assert trace["root"].shape == (1, 64, 56, 56)
    last = trace[f"stage{len(units)}"] if units else trace["root"]
    assert last.shape == (1, channels, *size)
    assert model.config.grid == grid
    assert trace["patches"].shape[1] == grid[0] * grid[1]


def test_replace_head_attaches_one_layer_of_zeros() -> None:
    model = tiny.bit()
    images = tiny.images(size=(32, 32))
    features = model.features(images)
    assert model.replace_head(5)(images).tolist() == [[0.0] * 5] * 2
    assert model.config.classes == 5
    assert torch.equal(model.replace_head(0)(images), features)
