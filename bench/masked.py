"""What hiding patches saves: MAE's step, and its encoder's part of it, against the step with labels on all tokens.

    python -m bench.masked --json masked.json      on a GPU: ViT-B/16, 256 images, bf16, compiled
    python -m bench.masked --device cpu            a tiny model in fp32: shows only that this runs

A step is forward, backward and AdamW's update; MAE's draws its masks too. The encoder's part is forward and backward of
the encoder alone on a quarter of the patches. Limits: 0.30 of the step with labels for the encoder, 0.62 for the whole
step with the published decoder (8 blocks of 512).
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.measure import interleaved, report, summary
from plainvit import create
from plainvit.config import Config, Masked
from plainvit.data.loader import Batch
from plainvit.models import ViT
from plainvit.train.masked import PredictPatches
from plainvit.train.objectives import Classify

LIMITS = {"encoder": 0.30, "mae": 0.62}
PUBLISHED = Masked(ratio=0.75, target="pixels", normalise=True)
WHAT = {
    "labels": "step with labels, all tokens",
    "encoder": "MAE's encoder, forward and backward",
    "mae": "MAE's whole step",
}


class Encoder(nn.Module):
    """MAE's encoder with a gradient to take back through it."""

    def __init__(self, net: PredictPatches) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, order: Tensor, direction: Tensor) -> Tensor:
        return (self.net.encode_visible(images, order) * direction).sum()


def steps(device: str, batch: int, tiny: bool, compiled: bool) -> dict[str, Callable[[int], None]]:
    """name -> a step by its number, for each of the three."""
    settings: dict[str, Any] = {"depth": 2, "width": 64, "heads": 2, "mlp_dim": 128} if tiny else {}
    masked = PUBLISHED.replace(depth=1, width=32, heads=2) if tiny else PUBLISHED
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8, generator=generator).to(device)
    labels = torch.randint(0, 1000, (batch,), generator=generator).to(device)
    given = Batch(images, labels, np.arange(batch))

    def model(classes: int, **more: Any) -> ViT:
        made = create("ViT-B/16", classes, seed=0, device=device, **settings | more)
        assert isinstance(made, ViT)
        return made.train()

    config = Config(objective="mae", masked=masked)
    hidden = {"posemb": "sincos2d", "numerics": "timm"}  # as published
    labelled = Classify(model(1000), Config()).to(device)
    mae, encoder = (PredictPatches(model(0, **hidden), config).to(device) for _ in range(2))
    seen = model(0).config.tokens - mae.hidden
    direction = torch.randn(batch, seen, mae.model.config.width, generator=generator).to(device)

    def prepare_encoder(number: int) -> tuple[Tensor, ...]:
        return *encoder.prepare(given, number), direction

    return {
        "labels": _step(labelled, lambda number: labelled.prepare(given, number), device, compiled),
        "encoder": _step(Encoder(encoder), prepare_encoder, device, compiled, update=False),
        "mae": _step(mae, lambda number: mae.prepare(given, number), device, compiled),
    }


def _step(
    objective: nn.Module,
    prepare: Callable[[int], tuple[Tensor, ...]],
    device: str,
    compiled: bool,
    update: bool = True,
) -> Callable[[int], None]:
    forward = torch.compile(objective, dynamic=False) if compiled else objective
    parameters = list(objective.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.05, fused=device != "cpu") if update else None

    def step(number: int) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            found = forward(*prepare(number))
        (found[0] if isinstance(found, tuple) else found).backward()
        if optimizer:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    return step


def timed(step: Callable[[int], None], count: int, device: str) -> float:
    """Milliseconds a step."""
    settle(device)
    started = time.perf_counter()
    for number in range(count):
        step(number)
    settle(device)
    return 1000 * (time.perf_counter() - started) / count


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(device: str, batch: int, repeats: int, count: int, tiny: bool, compiled: bool) -> list[dict[str, Any]]:
    """A row for each time and each ratio of medians to that of the step with labels."""
    made = steps(device, batch, tiny, compiled)
    for step in made.values():  # compile, and warm up
        timed(step, 3, device)
    found = interleaved({name: lambda step=step: timed(step, count, device) for name, step in made.items()}, repeats)
    times = {name: summary(values) for name, values in found.items()}
    rows = [{"what": WHAT[name], "unit": "ms", **numbers} for name, numbers in times.items()]
    for name, limit in LIMITS.items():
        ratios = [one / other for one, other in zip(found[name], found["labels"], strict=True)]
        ratio = times[name]["median"] / times["labels"]["median"]
        verdict = f"limit {limit}: {'kept' if ratio <= limit else 'missed'}" if not tiny else "tiny: no verdict"
        spread = {"least": min(ratios), "most": max(ratios), "repeats": repeats}
        rows.append({"what": WHAT[name], "unit": "x labels", "median": ratio, **spread, "remark": verdict})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=0, help="256 on a GPU, 4 elsewhere")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=0, help="in each repeat: 20 on a GPU, 2 elsewhere")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    tiny = words.device == "cpu"
    batch, count = words.batch or (4 if tiny else 256), words.steps or (2 if tiny else 20)
    rows = measure(words.device, batch, words.repeats, count, tiny, compiled=not words.eager and not tiny)
    model = "a tiny ViT, fp32" if tiny else f"ViT-B/16, bf16, {'eager' if words.eager else 'compiled'}"
    report(f"MAE against labels: {model}, {batch} images of 224 pixels", rows, words.json)


if __name__ == "__main__":
    main()
