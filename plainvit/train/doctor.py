"""Check this machine and a configuration for known problems, each with its fix.

plainvit doctor          plainvit doctor digits --model.patch 8 8
"""

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
from plainvit.config import Config, ViTConfig
from plainvit.data.splits import find_data_problems, open_splits
from plainvit.device import choose_device, processor
from plainvit.models import build
from plainvit.recipes import list_recipes, recipe
from plainvit.train.optim import freeze
from plainvit.train.transfer import read_starting_model, resolve

REQUIRED = (
    "torch",
    "torchvision",
    "numpy",
    "pillow",
    "simplejpeg",
    "pyarrow",
    "safetensors",
    "huggingface_hub",
    "rich",
)
EXTRAS = ("timm", "transformers", "tensorboard", "wandb", "onnx", "ray")
WAITING = {"sleep": "leave their cores to other work", "spin": "keep their cores, which is fastest on free ones"}
FEW_TOKENS, MANY_TOKENS = 16, 2500
Problem = tuple[str, str]  # (what may go wrong, how to fix it)


def examine(config: Config | None = None, devices: int = 1) -> dict[str, Any]:
    """Versions, devices and attention as JSON values; with a config, its problems when run in so many processes."""
    device.choose_attention_backend()
    report: dict[str, Any] = {
        "versions": {"plainvit": __version__, "python": platform.python_version(), **read_versions(REQUIRED)},
        "extras": {name: version for name, version in read_versions(EXTRAS).items() if version},
        "machine": describe_machine(),
        "attention": list_attention_kernels(),
        "risks": [],
    }
    if config:
        report["config"] = config.recipe
        report["risks"] = [{"risk": problem, "fix": fix} for problem, fix in find_problems(config, devices)]
    return report


def read_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Version of each package; "" if it is not installed."""
    installed = {one.name.lower().replace("-", "_"): one.version for one in importlib.metadata.distributions()}
    return {name: installed.get(name, "") for name in names}


def describe_machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "waiting": "sleep" if os.environ.get(device.WAIT_VARIABLE, "").lower() == "passive" else "spin",
        "memory_gib": round(memory, 1),
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
    use = "used by finetune and load(optimise=True)" if speed.prefers_bf16 else "not used"
    return f"{use}: {times} ({speed.gain:.2g}x)"


def list_attention_kernels() -> dict[str, bool]:
    """Which of PyTorch's attention kernels are enabled on a GPU."""
    cuda = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "memory_efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }


def find_problems(config: Config, devices: int = 1) -> Iterator[Problem]:
    """Problems of the config, and of its data and weights if they can be opened."""
    yield from check_optim(config)
    model, is_readable = config.model, True
    if config.init:
        try:
            implied, _ = read_starting_model(config)
            model = model or implied
            yield from check_weights(config, implied)
        except (ValueError, OSError) as error:
            is_readable = False
            yield f"the initial weights cannot be read: {error}", "give --init a file, a run folder or a published name"
    if isinstance(model, ViTConfig):
        yield from check_tokens(model, has_weights=bool(config.init))
    try:
        choose_device(config.device)
        yield from check_processes(config, devices)
    except ValueError as error:
        yield str(error), "use --device auto"
    if not config.data:
        yield "there is no data to train on", "--data FOLDER, or the name of a known dataset with --data-root"
    elif is_readable:
        yield from check_data(config)


def check_processes(config: Config, devices: int) -> Iterator[Problem]:
    """One process per GPU; without a GPU, as many as are asked for."""
    try:
        choose_device(config.device, 0, devices)
    except ValueError as error:
        yield str(error), f"--devices {torch.cuda.device_count()}, or torchrun on several machines"
    if config.batch % devices:
        words = f"--batch {config.batch} is not divisible by the {devices} processes"
        yield words, f"--batch {math.ceil(config.batch / devices) * devices}"


def check_data(config: Config) -> Iterator[Problem]:
    """Errors that `train` would raise, and problems with the number of images."""
    try:
        splits = open_splits(config)
        resolved = resolve(config, splits)
        assert resolved.model
        with torch.device("meta"):
            freeze(build(resolved.model), config.optim.frozen)
    except (ValueError, OSError) as error:
        yield str(error).splitlines()[0], "see `plainvit data info` for the data, --help for the settings"
        return
    yield from find_data_problems(resolved, splits)
    if splits.val is None:
        yield "no images are held out to validate the run", "--holdout 0.1 holds out a tenth of the training images"


def check_optim(config: Config) -> Iterator[Problem]:
    optim, is_scratch = config.optim, not config.init
    if optim.name in ("adamw", "lamb", "muon") and not optim.warmup and is_scratch:
        yield "a ViT trained from scratch without warm-up often diverges", "--optim.warmup 0.05"
    if optim.name == "sgd" and optim.weight_decay:
        yield "the weight decay of SGD is L2 in the gradient, unlike Adam's in the paper", "--optim.weight-decay 0"
    if optim.name in ("adamw", "lamb") and 0 < optim.weight_decay < 1e-3:
        yield (
            f"--optim.weight-decay {optim.weight_decay:g} is multiplied by lr and has little effect",
            f"--optim.weight-decay {optim.weight_decay / optim.lr:.3g} if the value is big_vision's",
        )
    if optim.name == "sgd" and is_scratch:
        yield "SGD trains a ViT from scratch far worse than Adam", "--optim.name adamw --optim.lr 1e-3"
    if optim.clip == 0 and is_scratch:
        is_intended = config.recipe in list_recipes() and recipe(config.recipe).optim.clip == 0
        yield f"gradients are not clipped{', as in the recipe' * is_intended}", "--optim.clip 1 if it diverges"
    if optim.lr > 5e-3 and optim.name == "adamw":
        yield f"--optim.lr {optim.lr:g} is high for AdamW", "--optim.lr 1e-3"
    if config.augment.flip and config.data.partition(":")[0] == "digits":
        yield "mirrored digits are not digits", "--augment.flip 0"


def check_tokens(model: ViTConfig, *, has_weights: bool) -> Iterator[Problem]:
    """Too few or too many tokens; weights fix the patch, so only the image size can change then."""
    tokens, (height, width) = model.grid[0] * model.grid[1], model.image_size
    if tokens < FEW_TOKENS:
        factor = math.ceil((FEW_TOKENS / tokens) ** 0.5)
        fix = f"--model.image-size {factor * height} {factor * width}"
        if has_weights:
            fix = f"--image-size {factor * max(height, width)}"
        elif not model.stem:
            patch = [max(n for n in range(1, max(side // 4, 1) + 1) if side % n == 0) for side in model.image_size]
            fix = f"--model.patch {patch[0]} {patch[1]}, or larger images: {fix}"
        words = f"{model.stride[0]}-pixel patches on {height}-pixel images give only {tokens} token{'s' * (tokens > 1)}"
        yield words, fix
    if tokens > MANY_TOKENS:
        yield f"{tokens} tokens: attention grows with their square", "a larger patch or smaller images"
    if model.norm == "post" and model.depth > 6:
        yield "a post-norm model of this depth is hard to train", "--model.norm pre"


def check_weights(config: Config, implied: Any) -> Iterator[Problem]:
    model = config.model
    if model and (model.mean, model.std) != (implied.mean, implied.std):
        mean = " ".join(f"{value:g}" for value in implied.mean)
        yield (
            f"--model.mean and --model.std are not those of {config.init}",
            f"remove them: the weights have mean {mean}",
        )
    if config.optim.name == "adamw" and config.optim.lr > 3e-4:
        yield f"--optim.lr {config.optim.lr:g} may destroy pretrained features", "--optim.lr 5e-5"
    if isinstance(implied, ViTConfig) and config.head == "zero" and "head*" in config.optim.frozen:
        yield "the new head is all zeros and frozen", "remove head* from --optim.frozen, or use --head linear"


def table(report: dict[str, Any]) -> RenderableType:
    """The report for the terminal."""
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="bold")
    shown.add_column()
    machine = report["machine"]
    shown.add_row("cpu", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB")
    shown.add_row("load", f"{machine['load']}; threads that wait for each other {WAITING[machine['waiting']]}")
    shown.add_row("gpu", "\n".join(machine["gpus"]) or "none")
    shown.add_row("bf16 on the cpu", machine["bf16_on_cpu"])
    attention = report["attention"]
    shown.add_row("attention", ", ".join(f"{name} {'on' if on else 'off'}" for name, on in attention.items()))
    shown.add_row("disk", f"{machine['disk_free_gib']:,} GiB free")
    for title in ("versions", "extras"):
        words = ", ".join(f"{name} {version or 'missing'}" for name, version in report[title].items())
        shown.add_row(title, words or "none")
    parts: list[RenderableType] = [shown]
    if "config" in report:
        problems = Table("problem", box=None, pad_edge=False, header_style="bold")
        problems.add_column("fix", style="green")
        for one in report["risks"]:
            problems.add_row(one["risk"], one["fix"])
        parts += ["", problems if report["risks"] else f"{report['config']}: no problem found"]
    return Group(*parts)
