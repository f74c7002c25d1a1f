"""The model of published weights, from their name: a plan downloads nothing.

    plainvit plan ft-cifar10 --init vit_b16_orig_i21k_224

The number of parameters is exact. Settings that do not change the cost are the paper's.
"""

import re
from pathlib import Path
from typing import Any

from plainvit.config import Config, Model, pair
from plainvit.names import configure

VIT = re.compile(r"(?:(r\d*)_)?(vit|deit|deit3|mae|dino|dinov2)_(ti|s|b|l|h)(\d+)_(\w+)_(\d+)")
RESNET = re.compile(r"bit_r(\d+x\d)_(\w+)_(\d+)")


def published_model(config: Config) -> Model | None:
    """The model that a run with this --init trains; None if that is a file, or its name does not say what it is."""
    from plainvit.planning import cost
    from plainvit.weights.published import PUBLISHED  # loads torch

    if config.init not in PUBLISHED or Path(config.init).exists():
        return None
    model = parse_name(config.init)
    if model is None or cost.parameters(model) != PUBLISHED[config.init].parameters:
        return None
    if config.image_size:
        model = model.replace(image_size=pair(config.image_size))
    return model.replace(classes=0) if config.head == "zero" else model


def parse_name(name: str) -> Model | None:
    """The model of a published name, with the head of its file; None for families whose names do not fix it."""
    if found := RESNET.fullmatch(name):
        return configure(f"BiT-R{found[1]}", image_size=int(found[3]))
    found = VIT.fullmatch(name)
    if not found:
        return None
    stem, family, size, patch, data, pixels = found.groups()
    hybrid = f"{stem.upper()}{'x1' * (len(stem) > 1)}+" if stem else ""
    headless = family in ("mae", "dino") or data in ("orig_i21k", "lvd142m")
    classes = 0 if headless else 21_843 if data == "augreg_i21k" else 1000
    settings: dict[str, Any] = {"distillation": True} if data.startswith("distilled") else {}
    settings |= {"layer_scale": 1e-5} if family in ("deit3", "dinov2") else {}
    settings |= {"posemb_prefix": "none"} if family == "deit3" else {}
    return configure(f"{hybrid}ViT-{size.capitalize()}/{patch}", classes, int(pixels), **settings)
