"""Describe a weights file, or trace one forward pass through a named model.

plainvit inspect B_16.npz          settings, and where each was detected
plainvit inspect ViT-B/16          shape, mean and standard deviation of each intermediate
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from plainvit.config import ViTConfig, to_json
from plainvit.models import Trace, create
from plainvit.planning import cost
from plainvit.weights.files import CHECKSUM, Tensors
from plainvit.weights.layout import DetectedModel, locate
from plainvit.weights.pixels import GIVEN, find_source
from plainvit.weights.reading import inspect_weights

# A weights file -------------------------------------------------------------------------------------------------------


def describe_weights(source: str | Path, **hints: Any) -> dict[str, Any]:
    """Describes a file from its headers; only the head is read, to see whether it was trained."""
    detected, tensors = inspect_weights(source, **hints)
    settings = {key: value for key, value in to_json(detected.config).items() if key not in ("kind", "init", "stem")}
    if isinstance(detected.config, ViTConfig) and detected.config.stem:
        settings["stem"] = {key: value for key, value in to_json(detected.config.stem).items() if key != "kind"}
    notes = list(detected.notes)
    if "plainvit" in tensors.metadata and CHECKSUM not in tensors.metadata:
        notes.append("the file has no checksum, so damage cannot be detected")
    sources = {key: detected.sources.get(key, detected.default) for key in settings}
    sources["std"] = find_source(detected, "std")
    for key in {"dropout", "stochastic_depth"} & settings.keys():
        sources[key] = "not in a weights file"
    return {
        "source": str(source),
        "family": detected.family,
        "parameters": cost.parameters(detected.config),
        "head": _describe_head(detected, tensors),
        "settings": settings,
        "preprocess": asdict(detected.preprocess),
        "class_names": list(detected.class_names),
        "sources": sources | {"preprocess": _preprocess_source(detected)},
        "notes": notes,
    }


def _describe_head(detected: DetectedModel, tensors: Tensors) -> str:
    head = locate(detected.layout, "head.weight")
    if not head or head.names[0] not in tensors.shapes:
        return "none"
    return "trained" if tensors.read(head.names[0]).any() else "all zeros: features only"


def _preprocess_source(detected: DetectedModel) -> str:
    given = [name for name in asdict(detected.preprocess) if detected.sources.get(name) == GIVEN]
    other = detected.sources.get("preprocess", detected.default)
    return f"{', '.join(given)} {GIVEN}; else {other}" if given else other


def weights_table(described: dict[str, Any]) -> Group:
    """The description as a table."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title, style in (("setting", "cyan"), ("value", ""), ("learned from", "dim")):
        shown.add_column(title, style=style)
    for key, value in described["settings"].items():
        shown.add_row(key, _format(value, key), described["sources"][key])
    prepared = ", ".join(f"{key} {value}" for key, value in described["preprocess"].items())
    shown.add_row("preprocess", prepared, described["sources"]["preprocess"])
    names = described["class_names"]
    shown_names = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    shown.add_row("class names", f"{len(names)}: {shown_names}" if names else "none", "")
    title = f"{described['family']}, {described['parameters']:,} parameters, head: {described['head']}"
    heading = Text.assemble((described["source"], "bold"), f": {title}\n")
    return Group(heading, shown, *(f"note: {note}" for note in described["notes"]))


def _format(value: object, key: str = "") -> str:
    """Sizes as 224 x 224; mean and std with their channels."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(inner, name)}" for name, inner in value.items())
    if key in ("mean", "std") and isinstance(value, list):
        same = len(set(value)) == 1
        return f"{value[0]} of each channel" if same else f"{', '.join(map(str, value))} of red, green, blue"
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)


# A named model --------------------------------------------------------------------------------------------------------


def trace_model(name: str, image_size: int, seed: int) -> dict[str, Any]:
    """Settings of a named model, and shape, mean and std of each intermediate for a color gradient."""
    model = create(name, image_size=image_size, seed=seed).eval()
    pixels = make_gradient(image_size)
    trace = Trace("*")
    with torch.inference_mode():
        model(pixels, trace)
    steps = [
        {"name": step, "shape": list(x.shape), "mean": x.mean().item(), "std": x.std(correction=0).item()}
        for step, x in trace.items()
    ]
    settings = {key: value for key, value in to_json(model.config).items() if key != "kind"}
    return {"name": name, "settings": settings, "steps": steps}


def trace_table(described: dict[str, Any]) -> Group:
    """The report as a table; blocks after the first, which have the same shapes, are only in --json."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("intermediate", style="cyan")
    for title in ("shape", "mean", "std"):
        shown.add_column(title, justify="right")
    for step in described["steps"]:
        block, _, part = step["name"].partition("/")
        if part and block != "block0" and part != "tokens":
            continue
        shape = " x ".join(map(str, step["shape"]))
        shown.add_row(step["name"], shape, f"{step['mean']:.4f}", f"{step['std']:.4f}")
    settings = ", ".join(f"{key} {value}" for key, value in described["settings"].items() if key != "stem")
    return Group(
        Text.assemble((described["name"], "bold"), "  ", (settings, "dim"), "\n"),
        shown,
        "\none image, fresh weights; all blocks: --json",
    )


def make_gradient(size: int) -> Tensor:
    """A test image: red grows to the right, green downwards, blue along the diagonal."""
    ramp = torch.linspace(0, 255, size)
    x, y = ramp.expand(size, size), ramp.unsqueeze(1).expand(size, size)
    return torch.stack((x, y, (x + y) / 2)).to(torch.uint8).unsqueeze(0)  # [1, 3, size, size]
