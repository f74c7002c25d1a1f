"""Trace one forward pass: shape, mean and standard deviation of each intermediate.

plainvit inspect ViT-B/16
"""

from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from plainvit.config import to_json
from plainvit.models import Trace, create


def report(name: str, image_size: int = 224, seed: int = 0) -> dict[str, Any]:
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


def tables(described: dict[str, Any]) -> Group:
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
