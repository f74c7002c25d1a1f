"""Named models: names -> configs, without loading torch.

list_models("*B/16")      configure("R50x1+ViT-B/16", classes=10)
"""

import re
from fnmatch import fnmatchcase
from typing import Any

from plainvit.config import (
    RESNET_NUMERICS,
    STEM_NUMERICS,
    VIT_NUMERICS,
    Model,
    ResNetConfig,
    ViTConfig,
    nearest,
    pair,
)

# Table 1, with the smaller ones of AugReg and the larger of "Scaling Vision Transformers"
SIZES: dict[str, dict[str, Any]] = {
    "Ti": {"width": 192, "depth": 12, "heads": 3, "mlp_dim": 768},
    "S": {"width": 384, "depth": 12, "heads": 6, "mlp_dim": 1536},
    # Figure 4's "b": B with its hidden dimensions halved. The paper does not give its heads: B's 12 are kept
    "b": {"width": 384, "depth": 12, "heads": 12, "mlp_dim": 1536},
    "B": {"width": 768, "depth": 12, "heads": 12, "mlp_dim": 3072},
    "L": {"width": 1024, "depth": 24, "heads": 16, "mlp_dim": 4096},
    "H": {"width": 1280, "depth": 32, "heads": 16, "mlp_dim": 5120},
    "g": {"width": 1408, "depth": 40, "heads": 16, "mlp_dim": 6144},
    "G": {"width": 1664, "depth": 48, "heads": 16, "mlp_dim": 8192},
}
UNITS: dict[str, tuple[int, ...]] = {
    "R26": (2, 2, 2, 2),
    "R50": (3, 4, 6, 3),
    "R101": (3, 4, 23, 3),
    "R152": (3, 8, 36, 3),
    "R200": (3, 24, 36, 3),
}
# A hybrid's suffix is its total down-sampling. Under /16 stage 4's units go to the end of stage 3 (paper 4.1).
# "R+ViT-Ti/16" is AugReg's name for the root alone (stride 4) under 8 x 8 patches: 32 pixels a token, despite its name.
STEMS: dict[tuple[str, str], tuple[tuple[int, ...], int]] = {
    ("R50x1", "16"): ((3, 4, 9), 1),
    ("R50x1", "32"): (UNITS["R50"], 1),
    ("R26x1", "32"): (UNITS["R26"], 1),
    ("R", "16"): ((), 8),
}
NAMES = (
    *("ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-b/32", "ViT-B/32", "ViT-B/16", "ViT-B/8", "ViT-L/32", "ViT-L/16"),
    *("ViT-H/14", "ViT-g/14", "ViT-G/14", "Axial-ViT-B/32", "Axial-ViT-B/16"),
    *("R+ViT-Ti/16", "R26x1+ViT-S/32", "R50x1+ViT-B/32", "R50x1+ViT-B/16", "R50x1+ViT-L/32", "R50x1+ViT-L/16"),
    *("BiT-R26x1", "BiT-R50x1", "BiT-R50x2", "BiT-R101x1", "BiT-R101x3", "BiT-R152x1", "BiT-R152x2", "BiT-R152x4"),
    "BiT-R200x3",
)


def is_model(name: str) -> bool:
    """Whether a string looks like the name of a model, known or misspelled, rather than a file."""
    return re.search(r"(^|[-+])vi?t-\w+/?\d*$|^bit-r", name, re.IGNORECASE) is not None


def list_models(pattern: str = "*") -> list[str]:
    """The named models that match a shell-style pattern. Other patch sizes of a ViT work too."""
    return [name for name in NAMES if fnmatchcase(name, pattern)]


def configure(
    name: str,
    classes: int = 1000,
    image_size: int | tuple[int, int] = 224,
    numerics: str = "google",
    **settings: Any,
) -> Model:
    """The config of a named model.

    `numerics` selects the library whose activation and epsilons it follows; `settings` change any field.
    """
    settings |= {"classes": classes, "image_size": pair(image_size)}
    channels = settings.get("channels", 3)
    kind, fields = _parse_name(name, numerics, channels)
    return kind(**fields | {"channels": channels}).replace(**settings)


def _parse_name(name: str, numerics: str, channels: int) -> tuple[type[Model], dict[str, Any]]:
    """The kind of config that a name stands for, and the fields that it sets.

    Any patch size is valid by itself: the image size is a placeholder of one patch until `configure` sets the real one.
    """
    vit = re.fullmatch(r"(Axial-)?ViT-(\w+)/([1-9]\d{0,3})", name)
    if vit:
        axial, size, patch = vit.groups()
        fields = _size(size, name) | _numerics(VIT_NUMERICS, numerics)
        fields |= {"patch": pair(int(patch)), "image_size": pair(int(patch))}
        if axial:
            fields |= {"axial": True, "class_token": False, "pool": "average"}
        return ViTConfig, fields
    hybrid = re.fullmatch(r"(R\w*)\+ViT-(\w+)/(16|32)", name)
    if hybrid and (hybrid[1], hybrid[3]) in STEMS:
        blocks, patch = STEMS[hybrid[1], hybrid[3]]
        shape: dict[str, Any] = {"blocks": blocks, "classes": 0, "preactivation": False, "padding": "same"}
        stem = ResNetConfig(**shape, channels=channels, **_numerics(STEM_NUMERICS, numerics))
        fields = _size(hybrid[2], name) | _numerics(VIT_NUMERICS, numerics)
        return ViTConfig, fields | {"patch": pair(patch), "stem": stem}
    resnet = re.fullmatch(r"BiT-(R\d+)x([1-9]\d?)", name)
    if resnet and resnet[1] in UNITS:
        fields = {"blocks": UNITS[resnet[1]], "widen": int(resnet[2])}
        return ResNetConfig, fields | _numerics(RESNET_NUMERICS, numerics)
    raise _unknown_model(name)


def _unknown_model(name: str) -> ValueError:
    return ValueError(f"unknown model {name!r}; {nearest(name, NAMES)}; `plainvit models` lists all")


def _size(size: str, name: str) -> dict[str, Any]:
    if size not in SIZES:
        raise _unknown_model(name)
    return SIZES[size]


def _numerics(known: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in known:
        raise ValueError(f"numerics {name!r} is unknown for this kind of model; {nearest(name, known)}")
    return known[name]
