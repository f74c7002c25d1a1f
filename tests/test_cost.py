"""Computed costs compared with the parameters of built models, PyTorch's FLOP counter and other libraries' models.

test_paper_tables.py compares the compute of pre-training with the paper's Table 6.
"""

import functools
from typing import Any

import pytest
import tiny
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from plainvit.config import Model, ResNetConfig, ViTConfig
from plainvit.models import build
from plainvit.names import configure, list_models
from plainvit.planning import cost

# name: parameters with 1000 classes, and headless where known, counted on the models of other libraries
PARAMETERS: dict[str, tuple[int, int | None]] = {
    "ViT-Ti/16": (5_717_416, 5_524_416),
    "ViT-S/16": (22_050_664, 21_665_664),
    "ViT-B/16": (86_567_656, 85_798_656),
    "ViT-B/32": (88_224_232, 87_455_232),
    "ViT-L/16": (304_326_632, 303_301_632),
    "ViT-L/32": (306_535_400, 305_510_400),
    "ViT-H/14": (632_045_800, 630_764_800),
    "R50x1+ViT-B/16": (98_659_112, 97_890_112),
    "BiT-R50x1": (25_549_352, None),
    "BiT-R101x3": (387_934_888, None),
    "BiT-R152x4": (936_533_224, None),
}


@functools.cache
def count_with_pytorch(config: Model) -> tuple[int, int]:
    """Parameters and multiply-adds as PyTorch counts them on the built model, which holds no numbers."""
    with torch.device("meta"):
        model = build(config).eval()
        image = torch.empty(1, config.channels, *config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops()


def check_costs(config: Model) -> None:
    assert (cost.parameters(config), 2 * cost.macs(config)) == count_with_pytorch(config)


@pytest.mark.parametrize("name", tiny.mostly_slow(PARAMETERS, 5))
def test_parameters_to_the_last_digit(name: str) -> None:
    with_head, headless = PARAMETERS[name]
    assert cost.parameters(configure(name)) == with_head == count_with_pytorch(configure(name))[0]
    if headless:
        config = configure(name, classes=0)
        assert cost.parameters(config) == headless == count_with_pytorch(config)[0]


@pytest.mark.parametrize("name", tiny.mostly_slow(list_models(), 6))
def test_arithmetic_equals_the_built_model(name: str) -> None:
    check_costs(configure(name))


@st.composite
def vit_configs(draw: st.DrawFn) -> ViTConfig:
    """Any config that the checks let pass, of a few tokens."""
    axial = draw(st.booleans())
    pool = draw(st.sampled_from(("average", "attention") if axial else ("token", "average", "attention")))
    distillation = pool == "token" and draw(st.booleans())
    posemb = draw(st.sampled_from(("none", "1d", "2d", "sincos2d") if axial else ("none", "1d", "2d", "relative")))
    heads = draw(st.integers(1, 3))
    return ViTConfig(
        width=8 * heads * draw(st.integers(1, 2)),
        heads=heads,
        depth=draw(st.integers(1, 2)),
        mlp_dim=draw(st.integers(1, 33)),
        patch=(2, 3),
        image_size=(2 * draw(st.integers(1, 4)), 3 * draw(st.integers(1, 4))),
        channels=draw(st.integers(1, 4)),
        classes=draw(st.integers(0, 5)),
        representation=0 if distillation else draw(st.integers(0, 7)),
        pool=pool,
        class_token=not axial and (pool == "token" or draw(st.booleans())),
        distillation=distillation,
        registers=0 if axial else draw(st.integers(0, 2)),
        posemb=posemb,
        posemb_at=draw(st.sampled_from(("stem", "every", "shared"))) if posemb in ("1d", "2d", "sincos2d") else "stem",
        posemb_prefix=draw(st.sampled_from(("none", "class", "all"))),
        norm=draw(st.sampled_from(("pre", "post"))),
        layer_scale=draw(st.sampled_from((None, 0.1))),
        axial=axial,
    )


@settings(max_examples=25)
@given(vit_configs())
def test_arithmetic_of_any_vit(config: ViTConfig) -> None:
    check_costs(config)


@settings(max_examples=25)
@given(
    posemb=st.sampled_from(("1d", "bias")),
    rotary=st.sampled_from(("none", "eva02", "dinov3")),
    block_bias=st.sampled_from(("all", "no_k", "no_qkv", "none")),
    norm_kind=st.sampled_from(("layer", "rms")),
    norm_embedding=st.sampled_from(("none", "patches", "tokens")),
    norm_inner=st.sampled_from(("none", "mlp", "both")),
    pool=st.sampled_from(("token", "average", "token+average")),
    projection=st.sampled_from((0, 6)),
    switches=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_arithmetic_of_the_parts_of_other_families(switches: list[bool], **options: Any) -> None:
    """CLIP, SigLIP, DINOv2 and DINOv3, EVA-02, BEiT and AIMv2 are combinations of these."""
    if options["pool"] == "token+average":
        options["projection"] = 0
    named = dict(zip(("norm_final", "qk_norm", "gated", "embedding_bias"), switches, strict=True))
    sizes = {"width": 16, "depth": 2, "heads": 2, "mlp_dim": 24, "patch": (4, 4), "image_size": (8, 12), "classes": 3}
    config = ViTConfig(**sizes, **named, **options)
    check_costs(config)


@settings(max_examples=12)
@given(
    blocks=st.lists(st.integers(1, 3), max_size=4),
    widen=st.integers(1, 2),
    classes=st.integers(0, 5),
    channels=st.integers(1, 4),
    size=st.tuples(st.integers(32, 99), st.integers(32, 99)),
    post=st.booleans(),
)
@example(blocks=[], widen=1, classes=5, channels=3, size=(33, 64), post=False)
def test_arithmetic_of_any_resnet(
    blocks: list[int], widen: int, classes: int, channels: int, size: tuple[int, int], post: bool
) -> None:
    shape = {"blocks": tuple(blocks), "widen": widen, "classes": classes, "channels": channels, "image_size": size}
    hybrid = {"preactivation": False, "padding": "same"}
    config = ResNetConfig(**shape | (hybrid if post else {}))
    check_costs(config)
