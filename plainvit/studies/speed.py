"""Claim 28: speed and largest batch of ViTs and ResNets by image size (D.5, Figure 12).

    plainvit study speed --budget gpu

Nothing is trained. Images/s are the best of several forward passes; the largest batch is that of a training step with
AdamW.
cpu      fp32, CPU time of one thread; the largest batch is computed (plainvit.planning.memory) for an H200
gpu      bf16, not compiled, the better of two batch sizes; the largest batch is extrapolated from the peak memory of
         two small steps
"""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from torch import nn

from plainvit.analyse.figures import new_figure, styled
from plainvit.config import Config, Model, ResNetConfig, ViTConfig
from plainvit.models import build
from plainvit.names import configure
from plainvit.planning import cost, memory
from plainvit.planning.devices import H200, USABLE_MEMORY
from plainvit.studies.drawings import SERIES, set_log_ticks
from plainvit.studies.evidence import Part, above, contrast, slope_weights, welch
from plainvit.studies.study import Arm, Budget, Results, define

SIDES: dict[Budget, tuple[int, ...]] = {"cpu": (32, 64, 96, 128), "gpu": (64, 128, 224, 384, 512)}
NAMES = ("ViT-B/32", "ViT-B/16", "BiT-R50x1", "BiT-R50x2")  # compared on a GPU
ALIKE = 1.5  # largest ratio of multiply-adds of compared models
SLACK = 1.05  # of the largest batch
SECONDS = 0.3  # of measurement


# Arms -----------------------------------------------------------------------------------------------------------------


def models(budget: Budget) -> dict[str, Model]:
    """On a CPU one small model of each kind, with about the same multiply-adds."""
    if budget != "cpu":
        return {name: configure(name) for name in NAMES}
    plain = ViTConfig(width=128, depth=8, heads=2, mlp_dim=512, patch=(8, 8), image_size=(64, 64), classes=200)
    return {"ViT": plain, "ResNet": ResNetConfig(blocks=(1, 1, 1, 1), image_size=(64, 64), classes=200)}


def arms(budget: Budget) -> dict[str, Arm]:
    """x is the image side in pixels."""
    found: dict[str, Arm] = {}
    for name, model in models(budget).items():
        for side in SIDES[budget]:
            config = Config(
                model=model.replace(image_size=(side, side)), batch=batch_size(budget, side), device=device(budget)
            )
            found[f"{name} at {side} px"] = Arm(config, x=side, group=name, trained=False)
    return found


def batch_size(budget: Budget, side: int) -> int:
    """On a GPU about the same number of pixels for all sides: 256 images of 224 px."""
    return 8 if budget == "cpu" else min(2 ** round(math.log2(256 * (224 / side) ** 2)), 2048)


def device(budget: Budget) -> str:
    return "cpu" if budget == "cpu" else "cuda"


# Measurements ---------------------------------------------------------------------------------------------------------


def measure(config: Config, folder: Path) -> dict[str, float]:  # noqa: ARG001
    """Speed and largest batch of the config's model with random weights."""
    assert config.model is not None
    torch.manual_seed(config.seed)
    with torch.device(config.device):
        model = build(config.model)
    sizes = {config.batch} if config.device == "cpu" else {config.batch, max(config.batch // 4, 1)}
    rate = max(images_per_second(model, config, size) for size in sizes)
    most = estimate_batch(config.model) if config.device == "cpu" else measure_batch(model, config)
    return {"images_per_second": rate, "largest_batch": float(most)}


def images_per_second(model: nn.Module, config: Config, size: int) -> float:
    """The best of several forward passes, after a warm-up."""
    images = random_images(config, size)
    best, spent = math.inf, 0.0
    model.eval()
    with torch.inference_mode(), autocast(config.device), use_one_thread(config.device):
        model(images)
        while spent < SECONDS:
            seconds = _seconds(model, images)
            best, spent = min(best, seconds), spent + seconds
    return size / best


def _seconds(model: nn.Module, images: torch.Tensor) -> float:
    """On a GPU wall time with synchronisation; on a CPU the time of this thread, without other processes."""
    if not images.is_cuda:
        started = time.thread_time()
        model(images)
        return time.thread_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    model(images)
    torch.cuda.synchronize()
    return time.perf_counter() - started


@contextlib.contextmanager
def use_one_thread(kind: str) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if kind == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def random_images(config: Config, size: int) -> torch.Tensor:
    assert config.model is not None
    shape = (size, config.model.channels, *config.model.image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=config.device)


def autocast(kind: str) -> torch.autocast:
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


def estimate_batch(model: Model) -> int:
    """In fp32."""
    return memory.largest_micro_batch(memory.Step(model=model, images=2, element_bytes=4), H200)


def measure_batch(model: nn.Module, config: Config) -> int:
    """Extrapolates the memory of two small steps."""
    few = max(config.batch // 16, 2)
    low, high = (_peak(model, config, size) for size in (few, 3 * few))
    total = torch.cuda.get_device_properties(config.device).total_memory * USABLE_MEMORY
    count = sum(parameter.numel() for parameter in model.parameters())
    return extrapolate_batch(few, low, 3 * few, high, total - 12 * count)  # gradients and AdamW's state


def extrapolate_batch(few: int, low: float, more: int, high: float, room: float) -> int:
    """How many images fit into `room` bytes if `few` need `low` bytes and `more` need `high`."""
    each = (high - low) / (more - few)
    return max(int((room - low) / each + few), 0)


def _peak(model: nn.Module, config: Config, size: int) -> float:
    images = random_images(config, size)
    labels = torch.zeros(size, dtype=torch.long, device=config.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with autocast(config.device):
        loss = F.cross_entropy(model.train()(images), labels)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return float(torch.cuda.max_memory_allocated())


# Parts and figure -----------------------------------------------------------------------------------------------------


def kinds(found: Results) -> tuple[list[str], list[str]]:
    """(names of the ViTs, names of the ResNets)"""
    groups = {arm.group: isinstance(arm.config.model, ViTConfig) for arm in found.arms.values()}
    return [name for name, is_vit in groups.items() if is_vit], [name for name, is_vit in groups.items() if not is_vit]


def nearest_resnet(found: Results, group: str) -> str:
    """The ResNet with the nearest multiply-adds at the middle image size; "" if none is within ALIKE."""
    work = {name: _middle_macs(found, name) for name in (group, *kinds(found)[1])}
    difference = {name: abs(math.log(work[name] / work[group])) for name in kinds(found)[1]}
    nearest = min(difference, key=lambda name: difference[name], default="")
    return nearest if nearest and difference[nearest] <= math.log(ALIKE) else ""


def _middle_macs(found: Results, group: str) -> int:
    names = found.group(group)
    model = found.arms[names[len(names) // 2]].config.model
    assert model is not None
    return cost.macs(model)


def parts(found: Results) -> list[Part]:
    """Of logarithms: the exponent of the side by which images/s fall, and the ratio of the largest batches."""
    found_parts: list[Part] = []
    for name in kinds(found)[0]:
        names = found.group(name)
        slope = slope_weights(np.log([found.arms[arm].x for arm in names]).tolist())
        samples = [
            (w, np.log(found.of(arm, "images_per_second")).tolist()) for w, arm in zip(slope, names, strict=True)
        ]
        found_parts.append(above(f"exponent of the side in images/s, {name}", contrast(samples), limit=-4.0))
        if other := nearest_resnet(found, name):
            for ours, theirs in zip(names, found.group(other), strict=True):
                ratio = welch(*(np.log(found.of(arm, "largest_batch")).tolist() for arm in (theirs, ours)))
                found_parts.append(above(f"log(largest batch), {ours} - {theirs}", ratio, limit=-math.log(SLACK)))
    return found_parts


@styled()
def draw(found: Results) -> Figure:
    """The two panels of Figure 12; ResNets dashed."""
    figure, axes = new_figure(1, 2, (4.6, 3.2))
    vits, resnets = kinds(found)
    for panel, metric in zip(axes[0], ("images_per_second", "largest_batch"), strict=True):
        for at, group in enumerate((*vits, *resnets)):
            names = found.group(group)
            values = [found.mean(name, metric) for name in names]
            dashed = "--" if group in resnets else "-"
            places = [found.arms[name].x for name in names]
            panel.plot(places, values, dashed, marker="o", color=SERIES[at % len(SERIES)], label=group)
        set_log_ticks(panel, sorted({arm.x for arm in found.arms.values()}))
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.set_xlabel("image side, pixels")
        panel.legend()
    axes[0, 0].set_title("forward pass, images/s")
    axes[0, 1].set_title("largest training batch")
    return figure


STUDIES = (define("speed", arms, parts, draw=draw, measure=measure, metric="images_per_second"),)
