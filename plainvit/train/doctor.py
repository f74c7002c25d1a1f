"""Check this machine and a configuration for known problems, each with its fix.

plainvit doctor          plainvit doctor digits --model.patch 8 8
"""

import contextlib
import importlib.metadata
import math
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from plainvit import __version__, device
from plainvit.config import Config, ViTConfig, largest_divisor, pluralize
from plainvit.data.splits import find_data_problems, open_splits
from plainvit.device import choose_device, processor
from plainvit.errors import first_line
from plainvit.models import build
from plainvit.runtime.display import key_value_table
from plainvit.train.optim import freeze
from plainvit.train.transfer import complete_config, read_starting_model

PACKAGES = ("torch", "torchvision", "numpy", "timm", "transformers", "onnx", "ray")
FEW_TOKENS, MANY_TOKENS = 16, 2500
Problem = tuple[str, str]  # (what may go wrong, how to fix it)


def examine(config: Config | None = None, devices: int = 1) -> dict[str, Any]:
    """Versions and devices as JSON values; with a config, its problems when run in so many processes."""
    report: dict[str, Any] = {"machine": describe_machine(), "versions": read_versions(), "risks": []}
    if config:
        report["config"] = config.recipe
        report["risks"] = [{"risk": problem, "fix": fix} for problem, fix in find_problems(config, devices)]
    return report


def read_versions() -> dict[str, str]:
    """Version of each package that is installed."""
    versions = {"plainvit": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def describe_machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": f"{processor()}, {os.cpu_count()} cores, {memory:.1f} GiB",
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "bf16_on_cpu": describe_bf16(device.measure_cpu()),
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
    }


def describe_bf16(speed: device.CpuSpeed) -> str:
    """How bf16 compares with fp32 on this CPU, and whether it is used."""
    if speed.crash:
        return f"not used: it crashes the process ({speed.crash})"
    if not speed.bf16:
        return "not used: it could not be measured"
    times = f"a training step of a block takes {1000 * speed.bf16:.0f} ms, in fp32 {1000 * speed.fp32:.0f} ms"
    use = "used by finetune and load(optimize=True)" if speed.prefers_bf16 else "not used"
    return f"{use}: {times} ({speed.gain:.2g}x)"


def find_problems(config: Config, devices: int = 1) -> Iterator[Problem]:
    """Problems of the config, its data and its weights: errors that `train` would raise, and what often goes wrong."""
    yield from check_optim(config)
    yield from check_processes(config, devices)
    if not config.data:
        yield "there is no data to train on", "--data FOLDER, or the name of a known dataset with --data-root"
        return
    try:
        splits = open_splits(config)
        resolved = complete_config(config, splits)
        assert resolved.model
        with torch.device("meta"):
            freeze(build(resolved.model), config.optim.frozen)
    except (ValueError, OSError) as error:
        yield first_line(error), "see `plainvit data info` for the data, --help for the settings"
        return
    if config.init:
        yield from check_weights(config)
    if isinstance(resolved.model, ViTConfig):
        yield from check_tokens(resolved.model, has_weights=bool(config.init))
    yield from find_data_problems(resolved, splits)
    if splits.val is None:
        yield "no images are held out to validate the run", "--holdout 0.1 holds out a tenth of the training images"


def check_processes(config: Config, devices: int) -> Iterator[Problem]:
    """One process per GPU; without a GPU, as many as are asked for."""
    try:
        choose_device(config.device, 0, devices)
    except ValueError as error:
        gpus = torch.cuda.device_count()
        yield str(error), f"--devices {gpus}" if gpus else "--device auto"
    if config.batch % devices:
        problem = f"--batch {config.batch} is not divisible by the {devices} processes"
        yield problem, f"--batch {math.ceil(config.batch / devices) * devices}"


def check_optim(config: Config) -> Iterator[Problem]:
    """Settings of the optimizer that often go wrong."""
    optim = config.optim
    if optim.name != "sgd" and not optim.warmup and not config.init:
        yield "a ViT trained from scratch without warm-up often diverges", "--optim.warmup 0.05"
    if optim.name in ("adamw", "lamb") and 0 < optim.weight_decay < 1e-3:
        problem = f"--optim.weight-decay {optim.weight_decay:g} is multiplied by lr and has little effect"
        yield problem, f"--optim.weight-decay {optim.weight_decay / optim.lr:.3g} if the value is big_vision's"
    if optim.lr > 5e-3 and optim.name == "adamw":
        yield f"--optim.lr {optim.lr:g} is high for AdamW", "--optim.lr 1e-3"


def check_tokens(model: ViTConfig, *, has_weights: bool) -> Iterator[Problem]:
    """Too few or too many tokens; weights fix the patch, so only the image size can change then."""
    (rows, columns), (height, width) = model.grid, model.image_size
    tokens = rows * columns
    if tokens < FEW_TOKENS:
        factor = math.ceil((FEW_TOKENS / tokens) ** 0.5)
        fix = f"--model.image-size {factor * height} {factor * width}"
        if has_weights:
            fix = f"--image-size {factor * max(height, width)}"
        elif not model.stem:
            patch = [largest_divisor(side, max(side // 4, 1)) for side in model.image_size]
            fix = f"--model.patch {patch[0]} {patch[1]}, or larger images: {fix}"
        yield f"{model.stride[0]}-pixel patches on {height}-pixel images give only {pluralize(tokens, 'token')}", fix
    if tokens > MANY_TOKENS:
        yield f"{tokens} tokens: attention grows with their square", "a larger patch or smaller images"


def check_weights(config: Config) -> Iterator[Problem]:
    """Settings that do not fit to the weights that the run starts from."""
    model, (implied, _) = config.model, read_starting_model(config)
    if model and (model.mean, model.std) != (implied.mean, implied.std):
        mean = " ".join(f"{value:g}" for value in implied.mean)
        yield f"--model.mean and --model.std are not those of {config.init}", f"remove them: the mean is {mean}"
    if config.optim.name == "adamw" and config.optim.lr > 3e-4:
        yield f"--optim.lr {config.optim.lr:g} may destroy pretrained features", "--optim.lr 5e-5"


def table(report: dict[str, Any]) -> RenderableType:
    """The report for the terminal."""
    machine, versions = report["machine"], report["versions"]
    rows = {
        "cpu": machine["cpu"],
        "gpu": "\n".join(machine["gpus"]) or "none",
        "bf16 on the cpu": machine["bf16_on_cpu"],
        "disk": f"{machine['disk_free_gib']:,} GiB free",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    shown = key_value_table(rows)
    if "config" not in report:
        return shown
    if not report["risks"]:
        return Group(shown, f"\n{report['config']}: no problem found")
    problems = Table("problem", box=None, pad_edge=False, header_style="bold")
    problems.add_column("fix", style="green")
    for risk in report["risks"]:
        problems.add_row(risk["risk"], risk["fix"])
    return Group(shown, "", problems)
