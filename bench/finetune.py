"""Fine-tuning on a CPU compared with timm: training steps, and the accuracy of a first classifier.

    python -m bench.finetune --data photos/ --weights vit_ti16_augreg.safetensors [--json FILE]
    python -m bench.finetune --data photos/ --weights vit_ti16_augreg.safetensors --new new-photos/

Steps: plainvit and a plain loop with timm take turns. Both read, crop and flip 16 photos per step, then do forward,
backward, gradient clipping and AdamW on all layers. "auto" is the precision that plainvit chooses. The time is CPU time
of the process with one thread, which other load on the machine hardly changes. Target: 1.1 times timm's speed.

--new: the accuracy of a peer on new photos, timm's frozen features with scikit-learn's logistic regression. Compare it
with `plainvit evaluate RUN/first --data new-photos/`. Folders contain one folder of photos per class.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from bench.measure import make_parser, report, run_interleaved, summarize, time_calls
from bench.steps import open_steps
from plainvit.recipes import recipe

BATCH, WARM_UP_STEPS, STEPS = 16, 2, 10
TIMM_NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
PEER = "timm, fp32"


def load_timm(weights: str, classes: int) -> Any:
    model = timm.create_model(TIMM_NAME)
    model.load_state_dict(load_file(weights))
    model.reset_classifier(classes)
    return model


# Steps ----------------------------------------------------------------------------------------------------------------


def make_timm_step(data: Path, weights: str) -> Callable[[], object]:
    """As in timm's documentation: its default augmentation, AdamW, clipping; no worker processes."""
    images = ImageFolder(str(data), create_transform((3, 224, 224), is_training=True, auto_augment=None))
    model = load_timm(weights, len(images.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batches = itertools.chain.from_iterable(DataLoader(images, BATCH, shuffle=True, drop_last=True) for _ in range(999))
    model.train()

    def step() -> None:
        pixels, labels = next(batches)
        torch.nn.functional.cross_entropy(model(pixels), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_steps(data: Path, weights: str) -> list[dict[str, Any]]:
    """A row for each system; ratios are medians of the ratios within a round."""
    with contextlib.ExitStack() as stack:
        steps: dict[str, Callable[[], object]] = {PEER: make_timm_step(data, weights)}
        config = recipe("finetune").replace(data=str(data), init=weights, batch=BATCH, steps=1000)
        for precision in ("fp32", "auto"):
            changes: dict[str, Any] = {"precision": precision, "workers": 0, "device": "cpu"}
            steps[f"plainvit, {precision}"] = stack.enter_context(open_steps(config.replace(**changes)))
        for step in steps.values():
            time_calls(step, WARM_UP_STEPS, "cpu")
        times = run_interleaved({name: partial(measure_ms, step) for name, step in steps.items()}, STEPS)
    rows: list[dict[str, Any]] = []
    for name, values in times.items():
        ratio = statistics.median(peer / ms for ms, peer in zip(values, times[PEER], strict=True))
        remark = f"{ratio:.2f}x {PEER}" + (" (target 1.1)" if name == "plainvit, auto" else "")
        rows.append({"name": name, "unit": "ms", "ratio": ratio, "remark": remark, **summarize(values)})
    return rows


def measure_ms(step: Callable[[], object]) -> float:
    return 1000 * time_calls(step, 1, "cpu", time.process_time)


# Accuracy -------------------------------------------------------------------------------------------------------------


def measure_accuracy(data: Path, new: Path, weights: str) -> list[dict[str, Any]]:
    """timm's frozen features, standardized, and logistic regression with cross-validated regularization."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    started = time.perf_counter()
    model = load_timm(weights, 0).eval()
    features, labels = extract_features(model, data)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    classifier = GridSearchCV(pipeline, {"logisticregression__C": [0.01, 0.03, 0.1, 0.3, 1.0]}, cv=5)
    classifier.fit(features, labels)
    seconds = time.perf_counter() - started
    new_features, new_labels = extract_features(model, new)
    top1 = 100 * float(np.mean(classifier.predict(new_features) == new_labels))
    return [
        {"name": f"classifier of {len(labels)} photos", "unit": "s", **summarize([seconds])},
        {"name": f"top-1 of {len(new_labels)} new photos", "unit": "%", **summarize([top1])},
    ]


@torch.inference_mode()
def extract_features(model: torch.nn.Module, folder: Path, batch: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Features and class names of all images in a folder of class folders."""
    transform = create_transform(**resolve_model_data_config(model))
    files = sorted(path for path in folder.glob("*/*") if path.is_file())
    features = []
    for start in range(0, len(files), batch):
        images = [transform(Image.open(path).convert("RGB")) for path in files[start : start + batch]]
        features.append(model(torch.stack(images)).numpy())
    return np.concatenate(features), np.array([path.parent.name for path in files])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, data="one folder of photos per class")
    parser.add_argument("--weights", required=True, help=f"Weights of timm's {TIMM_NAME}, as safetensors")
    parser.add_argument("--new", type=Path, help="New photos of the same classes: measure the peer's accuracy on them")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.new:
        rows, title = measure_accuracy(args.data, args.new, args.weights), "timm and scikit-learn, frozen features"
    else:
        rows, title = measure_steps(args.data, args.weights), f"a fine-tuning step of {BATCH} photos, CPU time"
    report("bench.finetune", arguments, args.json, title, rows)


if __name__ == "__main__":
    main()
