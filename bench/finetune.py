"""A fine-tuning step on a CPU: `plainvit finetune` next to a plain loop with timm, in turns, on a folder of photos.

    python -m bench.finetune --data photos/ --weights vit_ti16_augreg.safetensors

Both read, crop and flip the same number of photos for each step, then do forward, backward, clipping and AdamW. The
time is that of the process on the CPU with one thread, which other work on the machine hardly changes; --clock wall
--threads 2 is for an idle machine.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from timm.data import create_transform
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from plainvit.data.splits import open_splits
from plainvit.recipes import recipe
from plainvit.runtime.display import Display
from plainvit.runtime.folder import Folder
from plainvit.train.loop import take_step
from plainvit.train.setup import build_training
from plainvit.train.step import Prefetcher
from plainvit.train.transfer import resolve

BATCH, WARM = 16, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder with one folder of photos per class")
    parser.add_argument("--weights", required=True, help="Weights of timm's vit_tiny_patch16_224, as safetensors")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    with contextlib.ExitStack() as stack:
        steps = {"timm, fp32": timm_step(options.data, options.weights)}
        for name in ("fp32", "auto"):
            steps[f"plainvit, {name}"] = stack.enter_context(plainvit_step(options.data, options.weights, name))
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(WARM + options.steps):
            for name, step in steps.items():
                started = clock()
                step()
                times[name].append(clock() - started)
    medians = {name: statistics.median(values[WARM:]) for name, values in times.items()}
    for name, seconds in medians.items():
        ratio = medians["timm, fp32"] / seconds
        print(json.dumps({"system": name, "ms": round(1000 * seconds), "ratio": round(ratio, 2)}))


def timm_step(data: Path, weights: str) -> Callable[[], object]:
    """A loop as timm's documentation has it: its default augmentation, AdamW, clipping; no data workers."""
    images = ImageFolder(str(data), create_transform((3, 224, 224), is_training=True, auto_augment=None))
    model = timm.create_model("vit_tiny_patch16_224")
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


@contextlib.contextmanager
def plainvit_step(data: Path, weights: str, precision: str) -> Iterator[Callable[[], object]]:
    """The step of `plainvit finetune`, in this process: no data workers."""
    config = recipe("finetune").replace(
        data=str(data), init=weights, batch=BATCH, steps=1000, precision=precision, workers=0, device="cpu"
    )
    splits = open_splits(config)
    config = resolve(config, splits)
    with tempfile.TemporaryDirectory() as path, Folder(Path(path)) as folder:
        run = build_training(config, splits, folder, quiet=True)
        run.objective.train()
        with contextlib.closing(run.loader.batches(0, run.steps)) as batches:
            prefetcher, display = Prefetcher(run, batches), Display("steps", run.steps, quiet=True)

            def step() -> None:
                take_step(run, prefetcher, display)
                run.progress.step += 1

            yield step


if __name__ == "__main__":
    main()
