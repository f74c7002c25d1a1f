"""Real training steps, timed: `plainvit plan RECIPE --measure`."""

import contextlib
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from plainvit.config import Config
from plainvit.data.splits import open_splits
from plainvit.device import choose_precision
from plainvit.runtime.display import Display
from plainvit.runtime.folder import Folder
from plainvit.train.loop import take_step
from plainvit.train.setup import build_training
from plainvit.train.step import Prefetcher
from plainvit.train.transfer import complete_config

WARM_STEPS, TIMED_STEPS = 5, 20  # the first steps compile, capture CUDA graphs and choose the micro-batch


def measure_steps(config: Config) -> tuple[Config, dict[str, Any]]:
    """Trains for 25 steps on this machine and keeps nothing.

    Returns:
        The config with the model, classes and steps of its data; and the median seconds of a step, its micro-batch, the
        number of training images and the device, for `plainvit.planning.plan.plan`.
    """
    splits = open_splits(config)
    config = complete_config(config, splits)
    splits.val = splits.test = None  # nothing is evaluated
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as path, Folder(Path(path)) as folder:
        run = build_training(config.replace(steps=WARM_STEPS + TIMED_STEPS, track=()), splits, folder, quiet=True)
        run.objective.train()
        with (
            contextlib.closing(run.loader.batches(0, run.steps)) as batches,
            Display("measuring", run.steps) as display,
        ):
            prefetcher = Prefetcher(run, batches)
            while run.progress.step < run.steps:
                line, _ = take_step(run, prefetcher, display)
                seconds.append(line["seconds"])
                run.progress.step += 1
                display.advance(run.progress.step, f"{1000 * line['seconds']:,.1f} ms")
    device = run.loader.device
    if choose_precision(config.precision, device.type) is torch.float32:
        config = config.replace(precision="fp32")
    if device.type == "cpu" and config.compile == "auto":
        config = config.replace(compile="off")
    return config, {
        "seconds": statistics.median(seconds[WARM_STEPS:]),
        "micro_batch": run.progress.micro_batch,
        "images": len(splits.train),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "timing_source": f"median of {TIMED_STEPS} steps on this machine",
    }
