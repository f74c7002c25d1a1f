"""How often plainvit.load(optimize=...) predicts the same class as the model in fp32, on real images.

    python -m bench.agreement RUN --data tiny-imagenet --data-root DIR [--json FILE]

Measures top-1 accuracy and agreement with fp32 on the test images of a dataset, for each precision of this device. RUN
should be trained on the dataset: the logits of an untrained model are too close to each other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measure import make_parser, print_table, warn_skipped, write_results
from plainvit.config import Config
from plainvit.data.loader import Batch, evaluation_batches
from plainvit.data.splits import open_splits
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.models.fast.fp8 import explain_unsupported
from plainvit.models.fast.inference import FP8, PLAIN, Choice, cast_model, compile_call, list_choices

BATCH = 250  # divides 10,000: a smaller last batch would be compiled again


def select_choices(device: str, skipped: list[str]) -> list[Choice]:
    """fp32 eager, then the compiled choice of each lower precision."""
    no_fp8 = explain_unsupported(device)
    if no_fp8:
        warn_skipped(no_fp8, skipped)
    choices = (*list_choices(torch.device(device)), *(() if no_fp8 else FP8))
    return [PLAIN, *(choice for choice in choices if choice.code == "compiled" and choice.precision != "fp32")]


@torch.no_grad()
def predict_classes(call: Callable[[Tensor], Tensor], batches: list[Batch]) -> np.ndarray:
    return np.concatenate([call(batch.images).argmax(-1).cpu().numpy() for batch in batches])


def load_test_images(predictor: Predictor, data: str, root: str) -> list[Batch]:
    source = open_splits(Config(data=data, data_root=root)).test
    if source is None:
        raise SystemExit(f"--data {data} has no test images")
    options = {"batch": BATCH, "size": predictor.size, "preprocess": predictor.preprocess}
    return list(evaluation_batches(source, device=predictor.device, **options))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("run", help="Run folder or weights")
    parser.add_argument("--data", required=True, help="Dataset with test images")
    parser.add_argument("--data-root", default="", help="Folder of known datasets")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(arguments)
    predictor, skipped = Predictor(args.run, device=args.device), []
    batches = load_test_images(predictor, args.data, args.data_root)
    labels = np.concatenate([batch.labels.cpu().numpy() for batch in batches])
    classes: dict[Choice, np.ndarray] = {}
    rows: list[dict[str, Any]] = []
    for choice in select_choices(predictor.device, skipped):
        classes[choice] = predict_classes(compile_call(cast_model(predictor.model, choice), choice, "forward"), batches)
        same = int((classes[choice] == classes[PLAIN]).sum())
        row = {"system": f"{choice.precision}, {choice.code}", "top1": float(np.mean(classes[choice] == labels))}
        rows.append(row | {"agreement": same / len(labels), "interval": wilson(same, len(labels))})
    lines = [(r["system"], *(f"{value:.2%}" for value in (r["top1"], r["agreement"], *r["interval"]))) for r in rows]
    title = f"{args.run} on {len(labels):,} images of {args.data}"
    print_table(title, ("system", "top-1", "same as fp32", "from", "to"), lines, left=("system",))
    write_results("bench.agreement", arguments, args.json, title=title, images=len(labels), rows=rows, skipped=skipped)


if __name__ == "__main__":
    main()
