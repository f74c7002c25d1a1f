"""How often a model in fewer bits answers as in fp32, on real images: the ways of plainvit.load(optimise=...).

    python -m bench.agreement RUN --data tiny-imagenet --data-root DIR [--json FILE]

Of the set's test images, or what stands in for them: the share whose most probable class is that of fp32, and the
accuracy of each way. An untrained model's answers lie close together and say little; RUN should be trained on the set.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measure import machine, said, show, tell, write
from plainvit.config import Config
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.splits import open_splits
from plainvit.evaluate.chance import wilson
from plainvit.evaluate.predictor import Predictor
from plainvit.models.fast.fp8 import why_not
from plainvit.models.fast.inference import FP8, PLAIN, Choice, cast_model, compile_call, list_choices

BATCH = 250  # divides 10,000: each other size would be compiled anew


def ways(device: str, left_out: list[str]) -> list[Choice]:
    """The plain one first, then one a precision."""
    reason = why_not(torch.device(device))
    if reason:
        tell(reason, left_out)
    found = (*list_choices(torch.device(device)), *(() if reason else FP8))
    return [PLAIN, *(way for way in found if way.code == "compiled" and way.precision != "fp32")]


@torch.no_grad()
def answers(call: Callable[[Tensor], Tensor], batches: list[Batch]) -> np.ndarray:
    return np.concatenate([call(batch.images).argmax(-1).cpu().numpy() for batch in batches])


def images_of(predictor: Predictor, data: str, root: str) -> list[Batch]:
    source = open_splits(Config(data=data, data_root=root)).test
    if source is None:
        raise SystemExit(f"{data} has no test images")
    how = {"batch": BATCH, "size": predictor.size, "preprocess": predictor.preprocess}
    return list(evaluation_batches(source, device=predictor.device, **how))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--data", required=True)
    parser.add_argument("--data-root", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    predictor, left_out = Predictor(given.run, device=given.device), []
    batches = images_of(predictor, given.data, given.data_root)
    labels = np.concatenate([batch.labels.cpu().numpy() for batch in batches])
    rows: list[dict[str, Any]] = []
    plain = labels
    for way in ways(predictor.device, left_out):
        found = answers(compile_call(cast_model(predictor.model, way), way, "forward"), batches)
        plain = found if way == PLAIN else plain
        same, right = int((found == plain).sum()), int((found == labels).sum())
        agreement = {"agreement": same / len(labels), "interval": wilson(same, len(labels))}
        rows.append({"way": f"{way.precision}, {way.code}", "top1": right / len(labels)} | agreement)
    lines = [(r["way"], *(f"{value:.2%}" for value in (r["top1"], r["agreement"], *r["interval"]))) for r in rows]
    title = f"answers of {given.run} on {len(labels):,} images of {given.data}"
    show(title, ("way", "top-1", "as in fp32", "at least", "at most"), lines, left=("way",))
    if given.json:
        said_so = {"title": title, "command": said("bench.agreement", arguments), "machine": machine()}
        write(given.json, said_so | {"images": len(labels), "rows": rows, "left_out": left_out})


if __name__ == "__main__":
    main()
