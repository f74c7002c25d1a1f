"""The model of published weights, by their name alone: for a plan nothing need be fetched.

    plainvit plan ft-cifar10 --init vit_b16_orig_i21k_224

Its parameters are those of the table of names; arithmetic and pixels, which cost nothing, are the paper's.
"""

import re
from pathlib import Path
from typing import Any

from plainvit.config import Config, Model, pair
from plainvit.names import configure

NAME = re.compile(r"(?:(r\d*)_)?(vit|deit|deit3|mae|dino|dinov2)_(ti|s|b|l|h)(\d+)_(\w+)_(\d+)")
RESNET = re.compile(r"bit_r(\d+x\d)_(\w+)_(\d+)")
HEADLESS = ("orig_i21k", "lvd142m")  # what their files have no head for, besides mae's and dino's


def published_model(config: Config) -> Model | None:
    """What a run with this `init` begins from; nothing where that is no published name, or a file has it."""
    from plainvit.weights.published import PUBLISHED  # loads torch, so only for a name

    if config.init not in PUBLISHED or Path(config.init).exists():
        return None
    model = shape(config.init)
    if config.image_size:
        model = model.replace(image_size=pair(config.image_size))
    return model.replace(classes=0) if config.head == "zero" else model


def shape(name: str) -> Model:
    """Of a published name, with the head of its file."""
    if found := RESNET.fullmatch(name):
        return configure(f"BiT-R{found[1]}", image_size=int(found[3]))
    found = NAME.fullmatch(name)
    assert found, f"{name} has another form than the published names"
    stem, family, size, patch, data, pixels = found.groups()
    hybrid = f"{stem.upper()}{'x1' * (len(stem) > 1)}+" if stem else ""
    model = f"{hybrid}ViT-{size.capitalize()}/{patch}"
    return configure(model, _classes(family, data), int(pixels), **_settings(family, data))


def _classes(family: str, data: str) -> int:
    if family in ("mae", "dino") or data in HEADLESS:
        return 0
    return 21_843 if data == "augreg_i21k" else 1000


def _settings(family: str, data: str) -> dict[str, Any]:
    """What the family has beyond the paper's ViT."""
    scaled = {"layer_scale": 1e-5} if family in ("deit3", "dinov2") else {}
    unplaced = {"posemb_prefix": "none"} if family == "deit3" else {}
    return scaled | unplaced | ({"distillation": True} if data.startswith("distilled") else {})
