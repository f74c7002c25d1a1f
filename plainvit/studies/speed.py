"""Claim 28: speed and largest batch of ViTs and ResNets by image size (D.5, Figure 12).

    plainvit study speed --budget gpu

Nothing is trained. Images/s are the best of several forward passes; the largest batch is that of a training step with
AdamW.
cpu      fp32, one thread; the largest batch is computed (plainvit.planning.memory) for an H200
gpu      bf16, not compiled, the better of two batch sizes; the largest batch is extrapolated from the peak memory of
         two small steps
"""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

from plainvit.analyse.figures import new_figure, styled
from plainvit.config import Config, Model, ResNetConfig, ViTConfig
from plainvit.models import build
from plainvit.names import configure
from plainvit.planning.devices import H200, USABLE_MEMORY
from plainvit.planning.memory import Step, largest_micro_batch
from plainvit.studies.drawings import SERIES, set_log_ticks
from plainvit.studies.study import Arm, Budget, Results, define
from plainvit.studies.verdict import Criterion, contrast, require_above, slope_weights, welch

SIDES: dict[Budget, tuple[int, ...]] = {"cpu": (32, 64, 96, 128), "gpu": (64, 224, 384)}
ALIKE = {"ViT": "ResNet", "ViT-B/32": "BiT-R50x1", "ViT-B/16": "BiT-R50x2"}  # of the nearest multiply-adds
SLACK = 1.05  # of the largest batch
SECONDS = 0.3  # of measurement


def models(budget: Budget) -> dict[str, Model]:
    """On a CPU one small model of each kind, with about the same multiply-adds."""
    if budget != "cpu":
        return {name: configure(name) for name in ("ViT-B/32", "ViT-B/16", "BiT-R50x1", "BiT-R50x2")}
    plain = ViTConfig(width=128, depth=8, heads=2, mlp_dim=512, patch=(8, 8), image_size=(64, 64), classes=200)
    return {"ViT": plain, "ResNet": ResNetConfig(blocks=(1, 1, 1, 1), image_size=(64, 64), classes=200)}


def arms(budget: Budget) -> dict[str, Arm]:
    """x is the image side in pixels."""
    arms: dict[str, Arm] = {}
    device = "cpu" if budget == "cpu" else "cuda"
    for name, model in models(budget).items():
        for side in SIDES[budget]:
            config = Config(model=model.replace(image_size=(side, side)), batch=batch_size(budget, side), device=device)
            arms[f"{name} at {side} px"] = Arm(config, x=side, group=name, is_trained=False)
    return arms


def batch_size(budget: Budget, side: int) -> int:
    """On a GPU about the same number of pixels for all sides: 256 images of 224 px."""
    return 8 if budget == "cpu" else min(2 ** round(math.log2(256 * (224 / side) ** 2)), 2048)


# Measurements ---------------------------------------------------------------------------------------------------------


def measure(config: Config, folder: Path) -> dict[str, float]:  # noqa: ARG001
    """Images per second and largest training batch of the config's model with random weights.

    On a GPU the speed is the better one of two batch sizes.
    """
    assert config.model is not None
    is_cpu = config.device == "cpu"
    torch.manual_seed(config.seed)
    with torch.device(config.device):
        model = build(config.model)
    batch_sizes = {config.batch} if is_cpu else {config.batch, max(config.batch // 4, 1)}
    speed = max(images_per_second(model, config, size) for size in batch_sizes)
    if is_cpu:
        largest_batch = largest_micro_batch(Step(model=config.model, images=2, element_bytes=4), H200)  # fp32
    else:
        largest_batch = measure_batch(model, config)
    torch.cuda.empty_cache()  # the process continues, next to those of the other studies
    return {"images_per_second": speed, "largest_batch": float(largest_batch)}


def images_per_second(model: nn.Module, config: Config, size: int) -> float:
    """The best of several forward passes, after a warm-up."""
    from torch.utils.benchmark import Timer  # here, since it warns where there is no GPU

    scope = {"model": model.eval(), "images": random_images(config, size)}
    with torch.inference_mode(), autocast(config.device):
        timer = Timer("model(images)", globals=scope, num_threads=1)
        return size / min(timer.blocked_autorange(min_run_time=SECONDS).times)


def random_images(config: Config, size: int) -> torch.Tensor:
    assert config.model is not None
    shape = (size, config.model.channels, *config.model.image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=config.device)


def autocast(kind: str) -> torch.autocast:
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


def measure_batch(model: nn.Module, config: Config) -> int:
    """Extrapolates the memory of two small steps."""
    small = max(config.batch // 16, 2)
    peaks = {size: measure_peak_memory(model, config, size) for size in (small, 3 * small)}
    total = torch.cuda.get_device_properties(config.device).total_memory * USABLE_MEMORY
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return extrapolate_batch(peaks, total - 12 * parameters)  # gradients and AdamW's state


def extrapolate_batch(peaks: dict[int, float], memory: float) -> int:
    """The largest batch that fits into `memory` bytes, on the line through two measured peaks, batch -> bytes."""
    (small, small_bytes), (large, large_bytes) = sorted(peaks.items())
    bytes_per_image = (large_bytes - small_bytes) / (large - small)
    return max(int(small + (memory - small_bytes) / bytes_per_image), 0)


def measure_peak_memory(model: nn.Module, config: Config, size: int) -> float:
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


def criteria(results: Results) -> list[Criterion]:
    """Of logarithms: the exponent of the side by which images/s fall, and the ratio of the largest batches."""
    criteria: list[Criterion] = []
    for vit in (group for group in results.groups() if group in ALIKE):
        names, resnets = results.group(vit), results.group(ALIKE[vit])
        slope = slope_weights(np.log([results.arms[arm].x for arm in names]).tolist())
        logs = [np.log(results.samples(arm, "images_per_second")).tolist() for arm in names]
        fall = contrast(list(zip(slope, logs, strict=True)))
        criteria.append(require_above(f"exponent of the side in images/s, {vit}", fall, limit=-4.0))
        for pair in zip(resnets, names, strict=True):
            ratio = welch(*(np.log(results.samples(arm, "largest_batch")).tolist() for arm in pair))
            criteria.append(require_above(f"log(largest batch), {pair[1]} - {pair[0]}", ratio, limit=-math.log(SLACK)))
    return criteria


@styled()
def draw(results: Results) -> Figure:
    """The two panels of Figure 12; ResNets dashed."""
    figure, axes = new_figure(1, 2, (4.6, 3.2))
    titles = {"images_per_second": "forward pass, images/s", "largest_batch": "largest training batch"}
    for panel, (metric, title) in zip(axes[0], titles.items(), strict=True):
        for group, color in zip(results.groups(), SERIES, strict=False):
            names = results.group(group)
            style = "-" if group in ALIKE else "--"
            values = [results.mean(name, metric) for name in names]
            panel.plot([results.arms[name].x for name in names], values, style, marker="o", color=color, label=group)
        set_log_ticks(panel, sorted({arm.x for arm in results.arms.values()}))
        panel.set(title=title, xlabel="image side, pixels", yscale="log")
        panel.legend()
    return figure


STUDIES = (define("speed", arms, criteria, draw=draw, measure=measure, metric="images_per_second"),)
