"""How often a model in fewer bits answers as in fp32, on real images: the choices of plainvit.load(optimise=...).

    python -m bench.agreement RUN --data tiny-imagenet --data-root DIR [--json FILE]

Of the set's test images, or what stands in for them: the share whose most probable class is that of fp32, and the
accuracy of each choice. RUN should be trained on the set: the answers of an untrained model lie close together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measure import make_parser, publish, show, tell
from plainvit.config import Config
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.splits import open_splits
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.models.fast.fp8 import explain_unsupported
from plainvit.models.fast.inference import FP8, PLAIN, Choice, cast_model, compile_call, list_choices

BATCH = 250  # divides 10,000: each other size would be compiled anew


def choices(device: str, left_out: list[str]) -> list[Choice]:
    """fp32 first, then the compiled choice of each lower precision."""
    reason = explain_unsupported(torch.device(device))
    if reason:
        tell(reason, left_out)
    found = (*list_choices(torch.device(device)), *(() if reason else FP8))
    return [PLAIN, *(one for one in found if one.code == "compiled" and one.precision != "fp32")]


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
    parser = make_parser(__doc__)
    parser.add_argument("run")
    parser.add_argument("--data", required=True)
    parser.add_argument("--data-root", default="")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    predictor, left_out = Predictor(given.run, device=given.device), []
    batches = images_of(predictor, given.data, given.data_root)
    labels = np.concatenate([batch.labels.cpu().numpy() for batch in batches])
    rows: list[dict[str, Any]] = []
    plain = labels
    for choice in choices(predictor.device, left_out):
        found = answers(compile_call(cast_model(predictor.model, choice), choice, "forward"), batches)
        plain = found if choice == PLAIN else plain
        same, right = int((found == plain).sum()), int((found == labels).sum())
        agreement = {"agreement": same / len(labels), "interval": wilson(same, len(labels))}
        rows.append({"system": f"{choice.precision}, {choice.code}", "top1": right / len(labels)} | agreement)
    lines = [(r["system"], *(f"{value:.2%}" for value in (r["top1"], r["agreement"], *r["interval"]))) for r in rows]
    title = f"answers of {given.run} on {len(labels):,} images of {given.data}"
    show(title, ("system", "top-1", "as in fp32", "at least", "at most"), lines, left=("system",))
    publish("bench.agreement", arguments, given.json, title=title, images=len(labels), rows=rows, left_out=left_out)


if __name__ == "__main__":
    main()
