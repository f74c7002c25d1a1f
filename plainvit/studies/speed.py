"""How fast ViTs and ResNets are, and how many images fit into memory, as images get larger.

    plainvit study speed --budget cpu

ViT (arXiv 2010.11929), D.5 and Figure 12; claim 28. Nothing is trained. Images a second are those of the forward pass,
the best of several times; the largest batch is that of a training step with AdamW.
cpu      fp32, one core by its own clock, as other work on the machine is not to count; the batch by arithmetic
         (plainvit.planning.memory) for an H200's memory, since a CPU hands out memory that it has not
gpu      bf16, uncompiled, the better of two sizes; the batch by the peak memory of two real steps of few images, and a
         line through them
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
from plainvit.studies.study import Arm, Budget, Found, Study, Verdict, gap, settle

SIDES: dict[Budget, tuple[int, ...]] = {
    "cpu": (32, 64, 96, 128),
    "gpu": (64, 128, 224, 384, 512),
}
NAMES = ("ViT-B/32", "ViT-B/16", "BiT-R50x1", "BiT-R50x2")  # compared on a GPU
ALIKE = 1.5  # models whose multiply-adds differ by more than this are not compared
SECONDS = 0.3  # that a speed is measured over


# Arms -----------------------------------------------------------------------------------------------------------------


def models(budget: Budget) -> dict[str, Model]:
    """By name; on a CPU a small one of each kind, of about the same multiply-adds."""
    if budget != "cpu":
        return {name: configure(name) for name in NAMES}
    plain = ViTConfig(width=128, depth=8, heads=2, mlp_dim=512, patch=(8, 8), image_size=(64, 64), classes=200)
    return {"ViT": plain, "ResNet": ResNetConfig(blocks=(1, 1, 1, 1), image_size=(64, 64), classes=200)}


def arms(budget: Budget) -> dict[str, Arm]:
    """Along the axis: the side in pixels."""
    found: dict[str, Arm] = {}
    for name, model in models(budget).items():
        for side in SIDES[budget]:
            config = Config(
                model=model.replace(image_size=(side, side)), batch=batch_size(budget, side), device=device(budget)
            )
            found[f"{name} at {side} px"] = Arm(config, x=side, group=name, trained=False)
    return found


def batch_size(budget: Budget, side: int) -> int:
    """On a GPU so many that it has as much to do at each side: 256 of 224 pixels."""
    return 8 if budget == "cpu" else min(2 ** round(math.log2(256 * (224 / side) ** 2)), 2048)


def device(budget: Budget) -> str:
    return "cpu" if budget == "cpu" else "cuda"


# Measurements ---------------------------------------------------------------------------------------------------------


def measure(config: Config, folder: Path) -> dict[str, float]:  # noqa: ARG001
    """Of the model that the config describes, with random weights."""
    assert config.model is not None
    torch.manual_seed(config.seed)
    with torch.device(config.device):
        model = build(config.model)
    sizes = {config.batch} if config.device == "cpu" else {config.batch, max(config.batch // 4, 1)}
    rate = max(images_per_second(model, config, size) for size in sizes)
    most = estimate_batch(config.model) if config.device == "cpu" else measure_batch(model, config)
    return {"images_per_second": rate, "largest_batch": float(most)}


def images_per_second(model: nn.Module, config: Config, size: int) -> float:
    """The best of several forward passes, after one that warms up."""
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
    """A GPU works on after the call has returned, so it is waited for; a core's clock stands while others have it."""
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
    """In fp32, as a CPU trains."""
    return memory.largest_micro_batch(memory.Step(model=model, images=2, element_bytes=4), H200)


def measure_batch(model: nn.Module, config: Config) -> int:
    """Memory grows by the same with each image: two small steps say by how much, and what stands beside them."""
    few = max(config.batch // 16, 2)
    low, high = (_peak(model, config, size) for size in (few, 3 * few))
    total = torch.cuda.get_device_properties(config.device).total_memory * USABLE_MEMORY
    count = sum(parameter.numel() for parameter in model.parameters())
    return extrapolate_batch(few, low, 3 * few, high, total - 12 * count)  # gradients, and AdamW's two numbers for each


def extrapolate_batch(few: int, low: float, more: int, high: float, room: float) -> int:
    """How many images fit into `room` where `few` take `low` bytes and `more` take `high`."""
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


# The rule -------------------------------------------------------------------------------------------------------------


def kinds(found: Found) -> tuple[list[str], list[str]]:
    """The names of the ViTs, and of the ResNets."""
    groups = {arm.group: isinstance(arm.config.model, ViTConfig) for arm in found.arms.values()}
    return [name for name, is_vit in groups.items() if is_vit], [name for name, is_vit in groups.items() if not is_vit]


def exponents(found: Found, group: str) -> list[float]:
    """For each seed: the power of the side by which images a second fall."""
    names = found.group(group)
    sides = np.log([found.arms[name].x for name in names])
    rows = np.log(np.array([found.of(name, "images_per_second") for name in names])).T
    return [-float(np.polyfit(sides, row, 1)[0]) for row in rows]


def nearest_resnet(found: Found, group: str) -> str:
    """The ResNet of the nearest multiply-adds in the middle of the range; "" where none is near."""
    work = {name: _work(found, name) for name in (group, *kinds(found)[1])}
    difference = {name: abs(math.log(work[name] / work[group])) for name in kinds(found)[1]}
    nearest = min(difference, key=lambda name: difference[name], default="")
    return nearest if nearest and difference[nearest] <= math.log(ALIKE) else ""


def _work(found: Found, group: str) -> int:
    names = found.group(group)
    model = found.arms[names[len(names) // 2]].config.model
    assert model is not None
    return cost.macs(model)


def decide(found: Found) -> Verdict:
    """Every ViT slows down by less than the fourth power of the side; its largest batch is no less than its twin's."""
    signs, words = [], []
    for name in kinds(found)[0]:
        fall = exponents(found, name)
        signs.append(gap(fall, [4.0] * len(fall)).sign)
        words.append(f"{name} slows down by the power {np.mean(fall):.2f} of the side")
        if other := nearest_resnet(found, name):
            batches, rates = (_ratios(found, name, other, what) for what in ("largest_batch", "images_per_second"))
            signs.append(1 if min(batches) >= 1 else -1)
            words.append(
                f"beside {other} its largest batch is {_range(batches)} times, its speed {_range(rates)} times"
            )
    return settle(signs, "; ".join(words))


def _ratios(found: Found, group: str, other: str, metric: str) -> list[float]:
    pairs = zip(found.group(group), found.group(other), strict=True)
    return [found.mean(a, metric) / found.mean(b, metric) for a, b in pairs]


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


@styled()
def draw(found: Found) -> Figure:
    """Figure 12's two panels, both axes logarithmic: ResNets dashed."""
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
        panel.set_xlabel("side of an image, pixels")
        panel.legend()
    axes[0, 0].set_title("images a second, forward")
    axes[0, 1].set_title("largest batch of a training step")
    return figure


STUDY = Study(
    number=28,
    name="speed",
    claim="ViTs take no more memory than comparable ResNets, and slow down by less than the side's fourth power.",
    source="ViT, D.5 and Figure 12",
    paper="There, on TPUv3 at 64 to 512 pixels, the cost of attention hardly shows but in the largest models, and "
    "large ViTs fit larger batches; no table.",
    rule="images a second of each ViT fall by less than the fourth power of the side, by more than two standard "
    "errors, and its largest training batch is at every side at least that of the ResNet of the nearest multiply-adds "
    "(within 1.5 times)",
    arms=arms,
    decide=decide,
    draw=draw,
    measure=measure,
    metric="images_per_second",
)

STUDIES = (STUDY,)
