"""Configs and names: invalid settings, JSON round trips, shapes of the named models.

Independent reference for the named models' structure: timm's own models of the same name, on the meta device.
"""

import json
import math
from typing import Any

import pytest
import timm
import tiny
import torch

import plainvit
from plainvit.config import Augment, Checked, Config, Masked, Optim, ResNetConfig, from_json, to_json
from plainvit.models import build
from plainvit.names import configure, list_models
from plainvit.weights.layout import to_format
from plainvit.weights.timm import layout_for

# Errors ---------------------------------------------------------------------------------------------------------------

BAD_NAMES: dict[str, tuple[str, ...]] = {  # the name asked for, and what the message must offer
    "vit-b/16": ("ViT-B/16",),
    "ViT-B16": ("ViT-B/16",),
    "R50+ViT-B/16": ("R50x1+ViT-B/16",),
    "BiT-R51x1": ("BiT-R50x1", "BiT-R101x1"),
    "resnet18": (),
    "": (),
    "ViT-B/16\n": ("ViT-B/16",),
}


def error_of(call: Any, *arguments: Any, **settings: Any) -> str:
    """The message of the ValueError, which must be one line."""
    with pytest.raises(ValueError, match=r".") as caught:
        call(*arguments, **settings)
    assert type(caught.value) is ValueError
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", BAD_NAMES)
def test_unknown_models_suggest_the_nearest(name: str) -> None:
    message = error_of(plainvit.create, name)
    assert "unknown model" in message
    for offered in BAD_NAMES[name]:
        assert offered in message


BAD_SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {  # name of a model, settings, a part of the message
    "size not divisible": ("ViT-B/16", {"image_size": 225}, "224 or 240, or a patch size that divides 225"),
    "size below a patch": ("ViT-B/16", {"image_size": 15}, "use image size 16"),
    "hybrid's size": ("R50x1+ViT-B/16", {"image_size": 100}, "use image size 96 or 112"),
    "a side not divisible": ("ViT-B/16", {"image_size": (32, 40)}, "use image width 32 or 48"),
    "size of zero": ("ViT-B/16", {"image_size": 0}, "image_size"),
    "three sizes": ("ViT-B/16", {"image_size": (224, 224, 3)}, "(height, width)"),
    "a fractional size": ("ViT-B/16", {"image_size": 224.0}, "224.0"),
    "heads": ("ViT-B/16", {"heads": 11}, "use heads 6, 8 or 12, or width 770"),
    "no heads": ("ViT-B/16", {"heads": 0}, "heads"),
    "fractional depth": ("ViT-B/16", {"depth": 1.5}, "depth"),
    "dropout of one": ("ViT-B/16", {"dropout": 1.0}, "dropout"),
    "dropout not a number": ("ViT-B/16", {"dropout": float("nan")}, "dropout"),
    "negative classes": ("ViT-B/16", {"classes": -1}, "classes"),
    "unknown setting": ("ViT-B/16", {"witdh": 64}, "width"),
    "a ViT's setting for a ResNet": ("BiT-R50x1", {"patch": 16}, "patch"),
    "unknown posemb": ("ViT-B/16", {"posemb": "2D"}, "2d"),
    "unknown numerics": ("ViT-B/16", {"numerics": "tim"}, "timm"),
    "no such numerics for a hybrid": ("R50x1+ViT-B/16", {"numerics": "torchvision"}, "timm"),
    "pool token without a class token": ("ViT-B/16", {"class_token": False}, "average"),
    "distillation with average": ("ViT-B/16", {"distillation": True, "pool": "average"}, "token"),
    "no table to add": ("ViT-B/16", {"posemb": "none", "posemb_at": "every"}, "stem"),
    "axial with a class token": ("Axial-ViT-B/16", {"class_token": True}, "class_token off"),
    "post-norm with fc_norm": ("ViT-B/16", {"norm": "post", "norm_pooled": True}, "norm_pooled"),
    "sincos2d": ("ViT-B/16", {"width": 66, "heads": 3, "posemb": "sincos2d"}, "divisible by 4"),
    "two means": ("ViT-B/16", {"mean": (0.5, 0.5)}, "3 channels"),
    "a std of zero": ("ViT-B/16", {"std": (0.5, 0.0, 0.5)}, "std must be above 0, got 0.0"),
    "five stages": ("BiT-R50x1", {"blocks": (1, 1, 1, 1, 1)}, "4 stages"),
    "a stem with other channels": ("R50x1+ViT-B/16", {"stem": ResNetConfig(blocks=(1,), channels=1)}, "channels"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_invalid_model_settings(case: str) -> None:
    name, settings, part = BAD_SETTINGS[case]
    assert part in error_of(plainvit.create, name, **settings)


BAD_RUNS: list[tuple[type[Checked], dict[str, Any], str]] = [
    (Augment, {"flip": 1.5}, "--augment.flip must be between 0 and 1, got 1.5"),
    (Augment, {"area": (0.5, 0.1)}, "area"),
    (Augment, {"randaugment": (-2, 9)}, "got -2 in (-2, 9)"),
    (Augment, {"randaugment": (2, 31)}, "randaugment"),
    (Optim, {"clip": -1.0}, "--optim.clip"),
    (Optim, {"grid": (1e-3, -1.0)}, "--optim.grid"),
    (Optim, {"milestones": (0.6, 0.3)}, "milestones"),
    (Optim, {"betas": (0.9, 1.0)}, "--optim.betas"),
    (Config, {"batch": 0}, "--batch"),
    (Config, {"hours": -1.0}, "--hours"),
    (Config, {"head": "zeros"}, "--head 'zeros' is unknown; nearest: zero"),
    (Config, {"seed": 2**63}, "seed"),
    (Config, {"workers": -2}, "--workers"),
    (Config, {"save_every": -1}, "--save-every"),
    (Config, {"timeout": 0.0}, "timeout"),
    (Config, {"batch": 64, "micro_batch": 24}, "nearest: 16"),
    (Config, {"batch": 64, "micro_batch": 10**12}, "nearest: 64"),  # at once
    (Config, {"ema": 0.9, "ema_window": 0.1}, "use --ema 0 or --ema-window 0"),
    (Config, {"objective": "mae", "ema": 0.9, "teacher": "weights"}, "add --teacher '' --ema 0"),
    (
        Config,
        {"objective": "masked", "augment": Augment(mixup=0.2, cutmix=1.0)},
        "--augment.mixup 0 --augment.cutmix 0",
    ),
    (Config, {"objective": "mea"}, "mae"),
    *((Masked, {"ratio": ratio}, "ratio") for ratio in (0.0, 1.0, -0.5, 1.5, math.nan)),
    (Masked, {"normalize": True}, "normalize"),
    (Masked, {"width": 30, "heads": 4}, "masked.heads"),
    (Config, {"track": ("tensorbord",)}, "tensorboard"),
]


@pytest.mark.parametrize(("kind", "settings", "part"), BAD_RUNS)
def test_invalid_run_settings(kind: Any, settings: dict[str, Any], part: str) -> None:
    assert part in error_of(kind, **settings)


BAD_IMAGES: dict[str, torch.Tensor] = {
    "wrong channels": torch.zeros(1, 1, 24, 40),
    "channels last": torch.zeros(1, 24, 40, 3),
    "no batch": torch.zeros(3, 24, 40),
    "wrong dtype": torch.zeros(1, 3, 24, 40, dtype=torch.int64),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
@pytest.mark.parametrize("make", [tiny.vit, tiny.bit])
def test_invalid_images(make: Any, case: str) -> None:
    message = error_of(make(torch.float32), BAD_IMAGES[case])
    assert ("int64" if case == "wrong dtype" else "images") in message


# JSON -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_models())
def test_json_round_trip(name: str) -> None:
    config = configure(name, classes=10, image_size=224, dropout=0.1) if "ViT" in name else configure(name, classes=10)
    text = json.dumps(to_json(config))
    assert from_json(json.loads(text)) == config


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({}, "kind"),
        ({"kind": "vit", "witdh": 3}, "width"),
        ({"kind": "resnet"}, "blocks"),
        ({"kind": "vit", "stem": {"kind": "resnet", "blocks": [3], "color": 1}}, "color"),
        ({"kind": "vit", "dropout": "much"}, "dropout"),
        ({"kind": "vit", "dropout": 10**400}, "invalid vit config"),
        ({"kind": "vit", "stem": 3}, "invalid vit config"),
        ({"kind": ["vit"]}, "kind"),
        ({"kind": "vit", "norm_eps": -1.0}, "norm_eps"),
        ({"kind": "vit", "class_token": "no"}, "class_token"),
    ],
)
def test_invalid_json(values: dict[str, Any], part: str) -> None:
    assert part in error_of(from_json, values)


# Names ----------------------------------------------------------------------------------------------------------------

TIMM_NAMES = {
    "ViT-Ti/16": "vit_tiny_patch16_224",
    "ViT-S/32": "vit_small_patch32_224",
    "ViT-S/16": "vit_small_patch16_224",
    "ViT-B/32": "vit_base_patch32_224",
    "ViT-B/16": "vit_base_patch16_224",
    "ViT-B/8": "vit_base_patch8_224",
    "ViT-L/32": "vit_large_patch32_224",
    "ViT-L/16": "vit_large_patch16_224",
    "ViT-H/14": "vit_huge_patch14_224",
    "ViT-g/14": "vit_giant_patch14_224",
    "ViT-G/14": "vit_gigantic_patch14_224",
    "R+ViT-Ti/16": "vit_tiny_r_s16_p8_224",
    "R26x1+ViT-S/32": "vit_small_r26_s32_224",
    "R50x1+ViT-B/16": "vit_base_r50_s16_224",
    "R50x1+ViT-L/32": "vit_large_r50_s32_224",
    "BiT-R50x1": "resnetv2_50x1_bit",
    "BiT-R101x1": "resnetv2_101x1_bit",
    "BiT-R101x3": "resnetv2_101x3_bit",
    "BiT-R152x2": "resnetv2_152x2_bit",
    "BiT-R152x4": "resnetv2_152x4_bit",
}


@pytest.mark.parametrize("name", tiny.mostly_slow(TIMM_NAMES, 4))
def test_named_models_have_the_shape_of_timms(name: str) -> None:
    """Every weight of timm's model has its counterpart of the same shape, none is left over; and heads agree."""
    with torch.device("meta"):
        peer, model = timm.create_model(TIMM_NAMES[name], num_classes=1000), build(configure(name))
    written = to_format(layout_for(model.config), model.state_dict(), model.config)
    assert {key: x.shape for key, x in written.items()} == {key: x.shape for key, x in peer.state_dict().items()}
    if "ViT" in name:
        assert model.config.heads == peer.blocks[0].attn.num_heads
