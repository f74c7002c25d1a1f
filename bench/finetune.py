"""Fine-tuning on a CPU next to timm: the steps of `plainvit finetune`, and the accuracy of its first result.

    python -m bench.finetune --data photos/ --weights vit_ti16_augreg.safetensors [--json FILE]
    python -m bench.finetune --data photos/ --weights vit_ti16_augreg.safetensors --new new-photos/

Steps: plainvit and a plain loop with timm, in turns, read, crop and flip as many photos for each step, then do forward,
backward, clipping and AdamW, with the linear head and all layers trained. "auto" is the precision that plainvit
chooses: bf16 where it measures that it is faster. The time is that of the process on the CPU with one thread, which
other work on the machine hardly changes; --clock wall --threads 2 is for an idle machine. The target is 1.1x timm.

--new: the peer of the first result, timm's frozen features and scikit-learn's logistic regression, on new photos.
`plainvit evaluate RUN/first --data new-photos/` measures ours on them. Folders have one folder of photos per class.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
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

from bench.measure import interleaved, make_parser, report, summary
from bench.steps import steps_on_data
from plainvit.recipes import recipe

BATCH, WARM = 16, 2
NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"  # of the weights, in timm
PEER = "timm, fp32"
LIMIT = 1.1


# Steps ----------------------------------------------------------------------------------------------------------------


def timm_step(data: Path, weights: str) -> Callable[[], object]:
    """A loop as timm's documentation has it: its default augmentation, AdamW, clipping; no data workers."""
    images = ImageFolder(str(data), create_transform((3, 224, 224), is_training=True, auto_augment=None))
    model = timm.create_model(NAME)
    model.load_state_dict(load_file(weights))
    model.reset_classifier(len(images.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    epochs = itertools.chain.from_iterable(DataLoader(images, BATCH, shuffle=True, drop_last=True) for _ in range(999))
    model.train()

    def step() -> None:
        pixels, labels = next(epochs)
        torch.nn.functional.cross_entropy(model(pixels), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_steps(data: Path, weights: str, steps: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """A row for each system; ratios are medians of those within a round."""
    with contextlib.ExitStack() as stack:
        systems: dict[str, Callable[[], object]] = {PEER: timm_step(data, weights)}
        config = recipe("finetune").replace(data=str(data), init=weights, batch=BATCH, steps=1000)
        for name in ("fp32", "auto"):  # without data workers
            changes: dict[str, Any] = {"precision": name, "workers": 0, "device": "cpu"}
            systems[f"plainvit, {name}"] = stack.enter_context(steps_on_data(config.replace(**changes)))
        for step in systems.values():
            for _ in range(WARM):
                step()
        found = interleaved({name: partial(milliseconds, step, clock) for name, step in systems.items()}, steps)
    rows: list[dict[str, Any]] = []
    for name, values in found.items():
        ratio = statistics.median(theirs / ours for ours, theirs in zip(values, found[PEER], strict=True))
        remark = f"{ratio:.2f}x {PEER}" + (f" (at least {LIMIT})" if name == "plainvit, auto" else "")
        rows.append({"what": name, "unit": "ms", "ratio": ratio, "remark": remark, **summary(values)})
    return rows


def milliseconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    step()
    return 1000 * (clock() - started)


# Accuracy -------------------------------------------------------------------------------------------------------------


def fit_features(data: Path, new: Path, weights: str) -> list[dict[str, Any]]:
    """timm's frozen features, scaled, and logistic regression, whose regularization five folds choose."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    started = time.perf_counter()
    model = timm.create_model(NAME)
    model.load_state_dict(load_file(weights))
    model.reset_classifier(0)
    features, labels = extract(model.eval(), data)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    classifier = GridSearchCV(pipeline, {"logisticregression__C": [0.01, 0.03, 0.1, 0.3, 1.0]}, cv=5)
    classifier.fit(features, labels)
    seconds = time.perf_counter() - started
    features, truth = extract(model, new)
    right = classifier.predict(features) == truth
    return [
        {"what": f"classifier of {len(labels)} photos", "unit": "s", **summary([seconds])},
        {"what": f"top-1 of {len(right)} new photos", "unit": "%", **summary([100 * float(np.mean(right))])},
    ]


@torch.inference_mode()
def extract(model: torch.nn.Module, folder: Path, batch: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Features and class names of all images in a folder of class folders."""
    transform = create_transform(**resolve_model_data_config(model))
    files = sorted(path for path in folder.glob("*/*") if path.is_file())
    rows = []
    for start in range(0, len(files), batch):
        images = [transform(Image.open(path).convert("RGB")) for path in files[start : start + batch]]
        rows.append(model(torch.stack(images)).numpy())
    return np.concatenate(rows), np.array([path.parent.name for path in files])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder of photos per class")
    parser.add_argument("--weights", required=True, help=f"weights of timm's {NAME}, as safetensors")
    parser.add_argument("--new", type=Path, help="new photos of the same classes: measure the peer's accuracy instead")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    if words.new:
        rows, title = fit_features(words.data, words.new, words.weights), "timm and scikit-learn, frozen features"
    else:
        clock = time.process_time if words.clock == "cpu" else time.perf_counter
        rows = time_steps(words.data, words.weights, words.steps, clock)
        title = f"a fine-tuning step of {BATCH} photos, {words.threads} threads, {words.clock} time"
    report("bench.finetune", title, rows, words.json)


if __name__ == "__main__":
    main()
