"""BiT's ResNets under timm's names, alone and as the stem of a hybrid."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from plainvit.config import ResNetConfig
from plainvit.weights.files import Tensors
from plainvit.weights.grids import count_units, unsupported_model
from plainvit.weights.layout import CONV1X1, DetectedModel, Entry, Layout, entry, linear, list_assumptions
from plainvit.weights.timm_architectures import check_architecture, read_about

ROOTS = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")
UNITS = r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\."
NUMERICS: dict[str, Any] = {"standardise": "var+1e-8", "norm_eps": 1e-5}


def stem_layout(blocks: tuple[int, ...]) -> Layout:
    backbone = "patch_embed.backbone."
    root = f"{backbone}stem." if blocks else backbone
    layout = {"stem.root.weight": entry(f"{root}conv.weight"), **linear("stem.root_norm", f"{root}norm.")}
    return layout | unit_layout("stem.stages.{s}.{u}.", backbone + "stages.{s}.blocks.{u}.")


def bit_layout() -> Layout:
    layout = {"body.root.weight": entry("stem.conv.weight"), **linear("body.norm", "norm.")}
    layout |= unit_layout("body.stages.{s}.{u}.", "stages.{s}.blocks.{u}.")
    return layout | linear("head", "head.fc.", conversion=CONV1X1)


def unit_layout(ours: str, theirs: str) -> dict[str, Entry]:
    layout = {f"{ours}projection.weight": entry(f"{theirs}downsample.conv.weight")}
    layout |= linear(f"{ours}norm_projection", f"{theirs}downsample.norm.")
    for number in "123":
        layout[f"{ours}conv{number}.weight"] = entry(f"{theirs}conv{number}.weight")
        layout |= linear(f"{ours}norm{number}", f"{theirs}norm{number}.")
    return layout


def check_stem(resnet: ResNetConfig, padding: str) -> Iterator[tuple[str, str]]:
    """(part, reason) if timm's and transformers' ResNet computes something else."""
    if (resnet.standardise, resnet.norm_eps, resnet.padding) != (*NUMERICS.values(), padding):
        yield "standardise", f"the library computes w / sqrt(var + 1e-8), GroupNorm 1e-5 and {padding} padding"


def find_stem(shapes: Mapping[str, tuple[int, ...]], roots: tuple[str, ...], units: str) -> ResNetConfig | None:
    """The ResNet of a hybrid by the names of its root and the pattern of its units; None: a plain ViT."""
    root = next((shapes[name] for name in roots if name in shapes), None)
    if root is None:
        return None
    if len(root) != 4:
        raise ValueError(f"the hybrid's root convolution has shape {root}: the file is damaged")
    return ResNetConfig(
        blocks=count_units(shapes, units, 0),
        widen=max(root[0] // 64, 1),
        channels=root[1],
        classes=0,
        preactivation=False,
        padding="same",
        **NUMERICS,
    )


def detect_bit(tensors: Tensors, sidecar: Mapping[str, Any]) -> DetectedModel:
    root, published = tensors.shapes["stem.conv.weight"], sidecar.get("pretrained_cfg") or {}
    culprit = next((name for name in tensors.shapes if re.search(r"running_mean$|^stem\.norm\.", name)), None)
    if len(root) != 4 or culprit or "stages.0.blocks.0.conv3.weight" not in tensors.shapes:
        raise unsupported_model("a ResNet that is not BiT", culprit or "stem")
    check_architecture(str(sidecar.get("architecture") or ""))
    size = published.get("input_size") or (3, 224, 224)
    config = ResNetConfig(
        image_size=(int(size[1]), int(size[2])),
        blocks=count_units(tensors.shapes, r"stages\.(\d+)\.blocks\.(\d+)\.", 0),
        widen=max(root[0] // 64, 1),
        channels=root[1],
        classes=tensors.shapes.get("head.fc.weight", (0,))[0],
        mean=tuple(published.get("mean") or (0.5,)),
        std=tuple(published.get("std") or (0.5,)),
        **NUMERICS,
    )
    sources = {
        "standardise": "timm's code: w / sqrt(var + 1e-8)",
        "padding": "timm's code: symmetric, zeros before the root's pooling",
        "preprocess": "config.json" if published else "assumed: BiT's evaluation, a square resize",
        "norm_eps": "timm's code: 1e-5",
        "image_size": "config.json" if published.get("input_size") else "convolutions take any size",
        "mean": "config.json" if published.get("mean") else "timm's BiT: pixels in [-1, 1]",
    }
    about = read_about(sidecar, 1.0) if published else {"preprocess": {"resize": "squash"}}
    return DetectedModel("timm", config, bit_layout(), sources, about, notes=list_assumptions(sources))
