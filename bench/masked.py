"""What hiding patches saves: MAE's step, and its encoder's part of it, against the step with labels on all tokens.

    python -m bench.masked --json masked.json      on a GPU: ViT-B/16, 256 images, bf16, compiled
    python -m bench.masked --device cpu            a tiny model in fp32: shows only that this runs

Steps are the training loop's own, masks and AdamW's update included; those with labels pool by average, so that they
need every token. The encoder's part is forward and backward of the encoder alone on a quarter of the patches. Limits:
0.30 of the step with labels for the encoder, 0.62 for the whole step with the published decoder (8 blocks of 512).
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measure import interleaved, report, seconds_a_call, summary
from bench.train import OurStep, forever
from plainvit.config import Config, Masked, Optim
from plainvit.data.loader import Batch
from plainvit.names import configure
from plainvit.train.graphs import Graph, graphs_fit
from plainvit.train.masked import PredictPatches

LIMITS = {"encoder": 0.30, "mae": 0.62}
PUBLISHED = Masked(ratio=0.75, target="pixels", normalise=True)
WHAT = {
    "labels": "step with labels, all tokens",
    "encoder": "MAE's encoder, forward and backward",
    "mae": "MAE's whole step",
}


def steps(device: str, batch: int, tiny: bool, compiled: bool) -> dict[str, Callable[[], object]]:
    """name -> a step, for each of the three."""
    small: dict[str, Any] = {"depth": 2, "width": 64, "heads": 2, "mlp_dim": 128} if tiny else {}
    masked = PUBLISHED.replace(depth=1, width=32, heads=2) if tiny else PUBLISHED
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8, generator=generator).to(device)
    labels = torch.randint(0, 1000, (batch,), generator=generator).to(device)
    optim = Optim(lr=1e-4, schedule="constant", weight_decay=0.05, clip=0.0)
    config = Config(batch=batch, optim=optim, device=device, compile="on" if compiled else "off")
    seen = configure("ViT-B/16", 0, posemb="sincos2d", numerics="timm", **small)  # as published
    whole = configure("ViT-B/16", 1000, pool="average", numerics="timm", **small)  # every token of the last block too
    mae = OurStep(config.replace(model=seen, objective="mae", masked=masked), forever([(images, labels)]))
    labelled = OurStep(config.replace(model=whole), forever([(images, labels)]))
    return {"labels": labelled, "encoder": _encoder(mae, images), "mae": mae}


def _encoder(mae: OurStep, images: Tensor) -> Callable[[], object]:
    """The encoder's part of MAE's step, started as the loop starts steps."""
    objective, run = mae.run.objective, mae.run
    assert isinstance(objective, PredictPatches)
    batch = Batch(images, images[:, 0, 0, 0].long(), np.arange(len(images)))
    order = objective.prepare(batch, 0)[1]
    shape = len(images), objective.model.config.tokens - objective.hidden, objective.model.config.width
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(images.device)
    encode = torch.compile(objective.encode_visible, dynamic=False) if run.config.compile == "on" else None

    def gradients(*tensors: Tensor) -> None:
        run.optimizers.zero()
        with run.cast():
            found = (encode or objective.encode_visible)(*tensors)
        (found * direction).sum().backward()

    part = Graph(gradients) if graphs_fit(run.config, run.world) else gradients
    return lambda: part(images, order)


def measure(device: str, batch: int, repeats: int, count: int, tiny: bool, compiled: bool) -> list[dict[str, Any]]:
    """A row for each time and each ratio of medians to that of the step with labels."""
    made = steps(device, batch, tiny, compiled)
    for step in made.values():  # compile, capture and warm up
        seconds_a_call(step, 5, device)
    runs = {name: lambda step=step: 1000 * seconds_a_call(step, count, device) for name, step in made.items()}
    found = interleaved(runs, repeats)
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
