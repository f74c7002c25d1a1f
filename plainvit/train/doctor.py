"""What this machine is and has, and what may go wrong with a configuration, each with its mending.

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
from plainvit.train.transfer import resolve, starting_model

PARTS = ("torch", "torchvision", "numpy", "pillow", "simplejpeg", "pyarrow", "safetensors", "huggingface_hub", "rich")
WAITING = {"sleep": "leave their cores to other work", "spin": "keep their cores, which is fastest on free ones"}
EXTRAS = ("timm", "transformers", "tensorboard", "wandb", "onnx", "ray")


def examine(config: Config | None = None, devices: int = 1) -> dict[str, Any]:
    """Everything as JSON: versions, devices, attention, quirks; with a config, its risks in so many processes."""
    device.choose_attention_backend()
    report: dict[str, Any] = {
        "versions": {"plainvit": __version__, "python": platform.python_version(), **_versions(PARTS)},
        "extras": {name: version for name, version in _versions(EXTRAS).items() if version},
        "machine": _machine(),
        "attention": _attention(),
        "risks": [],
    }
    if config:
        report["config"] = config.recipe
        report["risks"] = [{"risk": risk, "mend": mend} for risk, mend in find_problems(config, devices)]
    return report


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "waiting": "sleep" if os.environ.get(device.WAIT_VARIABLE, "").lower() == "passive" else "spin",
        "memory_gib": round(memory, 1),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "bf16_on_cpu": "would kill the process: capped below AMX" if device.cpu_bf16_kills() else "safe",
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
    }


def _attention() -> dict[str, bool]:
    """Which of PyTorch's fused kernels may run on a GPU."""
    cuda = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "memory_efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }


def find_problems(config: Config, devices: int = 1) -> Iterator[tuple[str, str]]:
    """(what may go wrong, how to mend it), from the config, and from data and weights where they can be opened."""
    yield from _of_optim(config)
    model, readable = config.model, True
    if config.init:
        try:
            implied, _ = starting_model(config)
            model = model or implied
            yield from _of_weights(config, implied)
        except (ValueError, OSError) as error:
            readable = False
            yield f"the initial weights cannot be read: {error}", "give --init a file, a run folder or a published name"
    if isinstance(model, ViTConfig):
        yield from _of_model(model, fixed=bool(config.init))
    try:
        choose_device(config.device)
    except ValueError as error:
        yield str(error), "--device auto takes what is there"
    else:
        yield from _of_processes(config, devices)
    if not config.data:
        yield "there is no data to train on", "--data FOLDER, or a known set's name with --data-root"
    elif readable:
        yield from _of_run(config)


def _of_processes(config: Config, devices: int) -> Iterator[tuple[str, str]]:
    """One process a GPU; without any, as many as are asked for."""
    try:
        choose_device(config.device, 0, devices)
    except ValueError as error:
        yield str(error), f"--devices {torch.cuda.device_count()}, or torchrun on several machines"
    if config.batch % devices:
        words = f"a batch of {config.batch} cannot be shared equally by {devices} processes"
        yield words, f"--batch {math.ceil(config.batch / devices) * devices}"


def _of_run(config: Config) -> Iterator[tuple[str, str]]:
    """What `train` would refuse, and what the number of images says."""
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
        yield "nothing validates the run", "--holdout 0.1 keeps a tenth of the training images apart"


def _of_optim(config: Config) -> Iterator[tuple[str, str]]:
    optim = config.optim
    if optim.name in ("adamw", "lamb", "muon") and not optim.warmup and not config.init:
        yield "a ViT trained from scratch without warm-up often diverges", "--optim.warmup 0.05"
    if optim.name == "sgd" and optim.weight_decay:
        yield (
            "SGD's decay is coupled: it goes through momentum, and is not the decay of the paper's Adam",
            "--optim.weight-decay 0 (the paper's fine-tuning), or --optim.name adamw",
        )
    if optim.name in ("adamw", "lamb") and 0 < optim.weight_decay < 1e-3:
        yield (
            f"weight_decay {optim.weight_decay:g} is multiplied by lr here: is it big_vision's, or a coupled one?",
            f"--optim.weight-decay {optim.weight_decay / optim.lr:.3g} if it is big_vision's",
        )
    if optim.name == "sgd" and not config.init:
        yield "SGD trains a ViT from scratch far worse than Adam", "--optim.name adamw --optim.lr 1e-3"
    if optim.clip == 0 and not config.init:
        meant = config.recipe in list_recipes() and recipe(config.recipe).optim.clip == 0
        also, where = (", as the recipe means it", ", if it diverges") if meant else ("", "")
        yield f"gradients are not clipped{also}", f"--optim.clip 1{where}"
    if optim.lr > 5e-3 and optim.name == "adamw":
        yield f"lr {optim.lr:g} is high for AdamW", "--optim.lr 1e-3"
    if config.augment.flip and config.data.partition(":")[0] == "digits":
        yield "mirrored digits are no digits", "--augment.flip 0"


def _of_model(model: ViTConfig, *, fixed: bool) -> Iterator[tuple[str, str]]:
    """`fixed`: weights have the patch that they have."""
    tokens, (height, width) = model.grid[0] * model.grid[1], model.image_size
    if tokens < 16:
        times = math.ceil((16 / tokens) ** 0.5)
        larger = (
            f"--image-size {times * max(height, width)}"
            if fixed
            else (f"--model.image-size {times * height} {times * width}")
        )
        patch = tuple(max(n for n in range(1, max(side // 4, 1) + 1) if side % n == 0) for side in model.image_size)
        smaller = "" if fixed or model.stem else f"--model.patch {patch[0]} {patch[1]}, or larger images: "
        words = f"{model.stride[0]}-pixel patches on {height}-pixel images give only {tokens} token{'s' * (tokens > 1)}"
        yield words, f"{smaller}{larger}"
    if tokens > 2500:
        yield f"{tokens} tokens: attention grows with their square", "a larger patch or smaller images"
    if model.norm == "post" and model.depth > 6:
        yield "post-norm of this depth is hard to train", "--model.norm pre"


def _of_weights(config: Config, implied: Any) -> Iterator[tuple[str, str]]:
    model = config.model
    if model and (model.mean, model.std) != (implied.mean, implied.std):
        mean = " ".join(f"{value:g}" for value in implied.mean)
        yield f"mean and std are not those of {config.init}", f"leave them out: the weights' own mean is {mean}"
    if config.optim.name == "adamw" and config.optim.lr > 3e-4:
        yield f"lr {config.optim.lr:g} may undo what the weights have learned", "--optim.lr 5e-5"
    if isinstance(implied, ViTConfig) and config.head == "zero" and "head*" in config.optim.frozen:
        yield "the new head is frozen, and all zeros", "leave head* out of --optim.frozen"


def table(report: dict[str, Any]) -> RenderableType:
    """For people."""
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
        risky = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
        risky.add_column("risk")
        risky.add_column("mend it by", style="green")
        for one in report["risks"]:
            risky.add_row(one["risk"], one["mend"])
        parts += ["", risky if report["risks"] else f"{report['config']}: no risk was found"]
    return Group(*parts)
