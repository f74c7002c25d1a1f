"""What a run will need, before anything is spent: compute, memory of each device, images a second, hours.

    plainvit plan vit-h14-jft --images 303000000 --on h200 --devices 64

All of it is arithmetic on the config: `cost` counts compute, `memory` bytes, `speed` seconds by the rates in `devices`;
`ranks` builds and shards the real model for as many ranks. `python -m bench.plan` holds the plan against real steps.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from plainvit.config import Config, Model, ResNetConfig, ViTConfig, length, nearest
from plainvit.data.known import SETS
from plainvit.planning import cost
from plainvit.planning.devices import DEVICES, H200, Device
from plainvit.planning.memory import GIB, Step, checkpoint_bytes, largest_micro_batch, memory, trained_numbers
from plainvit.planning.ranks import simulated
from plainvit.planning.shapes import published_model
from plainvit.planning.step_time import seconds

# Training images of the sets that have a name, as their authors publish them: ILSVRC-2012; ImageNet's release of 2011;
# JFT-300M (arXiv 2010.11929); Tiny-ImageNet (CS231n); CIFAR; Oxford-IIIT Pets' trainval; Flowers-102; digits of UCI
IMAGES = {
    "imagenet": 1_281_167,
    "imagenet21k": 14_197_122,
    "jft": 303_000_000,
    "tiny-imagenet": 100_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "oxford-pets": 3_680,
    "flowers102": 1_020,
    "digits": 1_437,
}
CLASSES = {"jft": 18_291, "digits": 10} | {name: known.classes for name, known in SETS.items()}
SAVE_HOURS = 0.5  # between checkpoints, is suggested where they are rarer than twice that
# Table 2's TPUv3-core-days beside exaFLOPs: Table 6's for the first two, our count of 90 epochs for the third
CORE_DAYS = {
    "ViT-H/14, JFT, 14 epochs": (4262, 2500),
    "ViT-L/16, JFT, 14 epochs": (1567, 680),
    "ViT-L/16, ImageNet-21k, 90 epochs": (470, 230),
}


def plan(
    config: Config,
    *,
    on: str = "",
    devices: int = 1,
    images: int | None = None,
    search: bool = False,
    simulate: bool = True,
) -> dict[str, Any]:
    """What the run takes, as JSON; on a device of `DEVICES` also whether it fits and how long it lasts.

    `images` are those trained on, where the data is no set of known size. `search` counts a run for each rate of
    optim.grid besides. Over several devices the model is also built and sharded for so many ranks, in a child process,
    unless `simulate` is False.
    """
    model = _resolved(config)
    on = _known_device(on)
    _check(config, devices, images, search)
    device = DEVICES[on] if on else None
    count, trained = cost.parameters(model), trained_numbers(model, config.optim)[0]
    run = _length(config, model, images, runs=1 + len(config.optim.grid) * search)
    modes = _modes(config, model, devices)
    report: dict[str, Any] = {
        "recipe": config.recipe,
        "parameters": count,
        "trained": trained,
        "classes": model.classes,
        "image_size": list(model.image_size),
        "tokens": model.tokens if isinstance(model, ViTConfig) else None,
        "flops": {"forward": 2 * cost.macs(model), "training": 6 * cost.macs(model)},  # an image
        "run": run,
        "checkpoint_bytes": checkpoint_bytes(modes[0]),
        "kept": config.keep,
        "on": on,
        "origin": device.origin if device else "",
        "devices": devices,
        "modes": {step.mode: _mode(step, config, device, run) for step in modes},
        "chosen": config.parallel if devices > 1 and len(modes) > 1 else modes[0].mode,
        "simulation": simulated(model, devices) if devices > 1 and simulate else None,
    }
    return report | {"notes": list(_notes(config, model, report))}


def _resolved(config: Config) -> Model:
    """The model, with the classes of its data where those are known."""
    model = config.model or (published_model(config) if config.init else None)
    if model is None and config.init:
        raise ValueError(f"the model of {config.init} is not in the config: fill it in from the weights first")
    if model is None:
        raise ValueError("there is no model to plan for: give --model NAME, or --init WEIGHTS")
    if config.objective != "classify":
        return _encoder(model)
    return model.replace(classes=model.classes or CLASSES.get(config.data, 0))


def _encoder(model: Model) -> Model:
    """What self-supervision trains: there is no head, and answers are read off the patches' tokens, whatever it pools.

    So the last block is computed for all of them.
    """
    if not isinstance(model, ViTConfig):
        return model.replace(classes=0)
    return model.replace(classes=0, representation=0, pool="average" if model.reads_one_token else model.pool)


def _known_device(on: str) -> str:
    """By its name; a100 will do for a100-80, of which alone the rates are known."""
    for name in DEVICES:
        if on.lower() in (name, name.partition("-")[0]):
            return name
    if on:
        raise ValueError(f"no rates of a device {on!r} are known; {nearest(on, DEVICES)}")
    return ""


def _check(config: Config, devices: int, images: int | None, search: bool) -> None:
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices must be a whole number of at least 1, got {devices}")
    if config.batch % devices:
        near = [n for n in range(1, config.batch + 1) if config.batch % n == 0]
        near = min(near, key=lambda n: abs(n - devices))
        raise ValueError(f"a batch of {config.batch} cannot be shared by {devices} devices; try {near}")
    if images is not None and images < 1:
        raise ValueError(f"images must be at least 1, got {images}")
    if search and not config.optim.grid:
        raise ValueError("--search needs rates to try: --optim.grid 0.001 0.003 0.01 0.03")


def _length(config: Config, model: Model, images: int | None, runs: int) -> dict[str, Any]:
    """Steps of a run and what all runs cost; None where the number of images is not known."""
    images = images or _known_images(config)
    steps = length(config, images) if images else config.steps
    found: dict[str, Any] = {"images": images, "batch": config.batch, "runs": runs, "steps": steps or None}
    if not steps:
        return found | dict.fromkeys(("seen", "epochs", "exaflops", "tpuv3_core_days"))
    seen = runs * steps * config.batch
    exaflops = cost.training_exaflops(model, seen)
    return found | {
        "seen": seen,
        "epochs": steps * config.batch / images if images else None,
        "exaflops": exaflops,
        "tpuv3_core_days": _core_days(exaflops),
    }


def _known_images(config: Config) -> int | None:
    """The share of a set with a name, less what is held out; a set with validation images of its own holds none out."""
    images = 800 if config.data.startswith("vtab/") else IMAGES.get(config.data)
    splits = SETS[config.data].splits if config.data in SETS else ()
    if images is None:
        return None
    kept = images if {"val", "test"} <= set(splits) else images - round(images * config.holdout)
    return max(round(config.share * kept), 1)


def _core_days(exaflops: float) -> dict[str, Any]:
    """By the paper's own pairs of compute and time, which do not agree among themselves."""
    rates = [compute / days for compute, days in CORE_DAYS.values()]
    mean = sum(rates) / len(rates)
    return {
        "estimate": exaflops / mean,
        "low": exaflops / max(rates),
        "high": exaflops / min(rates),
        "exaflops_a_core_day": {"mean": mean, "low": min(rates), "high": max(rates)},
    }


def _modes(config: Config, model: Model, devices: int) -> list[Step]:
    """The ways in which the config can run on so many devices."""
    number = 4 if config.precision == "fp32" else 2
    step = Step(
        model=model,
        images=config.batch // devices,
        micro_batch=config.micro_batch,
        optim=config.optim,
        number=number,
        stream=number if config.shortcuts == "auto" else 4,
        shortcuts=config.shortcuts == "auto",
        graphs=config.graphs == "auto" and devices == 1 and cost.is_small(model, config.batch),
        pixel=4 if config.augment.mixup or config.augment.cutmix else 1,
        average=bool(config.ema or config.ema_window),
        recompute=config.recompute,
        eager=config.compile == "off",
        devices=devices,
    )
    if devices == 1:
        return [step]
    ddp, fsdp = replace(step, mode="ddp"), replace(step, mode="fsdp")
    whole = config.optim.name == "muon" or config.optim.lora  # these need whole matrices, which FSDP cuts into rows
    return [ddp] if whole else [ddp, fsdp]


def _mode(step: Step, config: Config, device: Device | None, run: dict[str, Any]) -> dict[str, Any]:
    """Memory and time of one way to run."""
    if device is None:
        return {"images": step.images, "micro_batch": step.size, "memory": memory(step), "fits": None}
    if not step.micro_batch:
        step = replace(step, micro_batch=_halved(step, device))
    used = memory(step, device.kept)
    fits = used["total"] <= device.memory * device.usable * GIB
    most = {
        name: largest_micro_batch(replace(step, recompute=again), device)
        for name, again in (("stored", False), ("recomputed", True))
    }
    found = {"images": step.images, "micro_batch": step.size, "memory": used, "fits": fits, "largest_micro_batch": most}
    if not fits:
        return found
    parts = seconds(step, device)
    each = sum(parts.values())
    rate = config.batch / each
    reached = 6 * cost.macs(step.model) * rate / step.devices / (device.matmul * 1e12)
    hours = run["runs"] * run["steps"] * each / 3600 if run["steps"] else None
    return found | {
        "seconds": parts,
        "step_seconds": each,
        "images_per_second": rate,
        "images_per_second_of_a_device": rate / step.devices,
        "share_of_matmul": reached,
        "hours": hours,
        "device_hours": hours * step.devices if hours else None,
        "bound": max(parts, key=lambda name: parts[name]),
    }


def _halved(step: Step, device: Device) -> int:
    """As the loop finds it: the device's whole batch, or at most the half, or of that ..., in equal parts."""
    size, most = step.images, largest_micro_batch(step, device)
    alone = memory(replace(step, micro_batch=size), device.kept)["total"] <= device.memory * device.usable * GIB
    while size > max(most, 1) and not alone:
        size = max((n for n in range(1, size // 2 + 1) if step.images % n == 0), default=1)
    return size


def estimate_micro_batch(config: Config, devices: int, free: int) -> int:
    """Images at once of an FSDP step in `free` bytes on each device, the weights being there already; 0: not one."""
    assert config.model
    step = next(step for step in _modes(config, config.model, devices) if step.mode == "fsdp")
    for size in sorted((n for n in range(1, step.images + 1) if step.images % n == 0), reverse=True):
        used = memory(replace(step, micro_batch=size))
        there = used["weights"] + used["averaged weights"] + used["images"]
        if used["total"] - there <= free * H200.usable:
            return size
    return 0


def _notes(config: Config, model: Model, report: dict[str, Any]) -> Iterator[str]:
    """What the numbers leave out or take for granted."""
    if not (config.steps or config.epochs or config.init):
        yield "the run has no length: give --epochs or --steps for exaFLOPs and hours"
    elif not report["run"]["images"] and not config.steps:
        yield "the number of training images is not known: give --images for exaFLOPs and hours"
    if not model.classes and config.objective == "classify":
        yield "the classes follow the data: counted without the last layer"
    if isinstance(model, ResNetConfig) or model.stem:
        yield "the rate of convolutions is assumed, not measured: take times as a guess"
    if config.objective == "mae":
        yield "counted as if all tokens went through the encoder: MAE's step takes about half of that"
    elif config.objective != "classify":
        yield "what answers for the hidden patches is not counted: it is one linear layer"
    if config.teacher:
        yield "the teacher's memory and time are left out"
    if config.optim.frozen or config.optim.lora:
        yield "activations and time are those of training every weight: an upper bound"
    if report["devices"] > 1 and report["on"]:
        yield _links(DEVICES[report["on"]], report["devices"])
    if report["devices"] > 1 and "fsdp" not in report["modes"]:
        yield "muon and lora need whole matrices: no fsdp"
    yield from _other_mode(report)
    runs = report["run"]["runs"]
    if runs > 1:
        rates = ", ".join(f"{lr:g}" for lr in config.optim.grid)
        tried = f"the search tries {rates} without {100 * config.search_holdout:g} % of the images"
        yield f"compute and time are of {runs} runs of all the steps: {tried}, the last takes the best on all"
    yield from _of_each_run(config, report, (report["modes"][report["chosen"]].get("hours") or 0.0) / runs)


def _of_each_run(config: Config, report: dict[str, Any], hours: float) -> Iterator[str]:
    """Where a run has a limit, how far that goes; else what its death would cost."""
    if config.hours and hours > config.hours:
        each = " of each run" if report["run"]["runs"] > 1 else ""
        allowed = int(report["run"]["steps"] * config.hours / hours)
        yield f"{config.hours:g} hours allow about {allowed:,} of the steps{each}"
    elif hours:
        yield from _at_stake(config, report["run"]["steps"], hours)


def _links(device: Device, devices: int) -> str:
    """What the time of communication takes for granted."""
    between = f" and {device.between:g} GB/s of each to other nodes" if devices > device.per_node else ""
    links = f"{device.inside:g} GB/s between the devices of a node of {device.per_node}{between}"
    words = "communication is what computing does not hide, not measured:"
    return f"{words} {links}, at {device.network:.0%} of these data sheets, with the latencies of NCCL's own model"


def _other_mode(report: dict[str, Any]) -> Iterator[str]:
    """A way to run that is planned to be better than the one that the config takes."""
    chosen, modes = report["chosen"], report["modes"]
    for name, mode in modes.items():
        if not mode["fits"] or name == chosen:
            continue
        if not modes[chosen]["fits"]:
            yield f"{chosen} does not fit, {name} does: --parallel {name}"
        elif (gain := modes[chosen]["step_seconds"] / mode["step_seconds"] - 1) > 0.01:
            yield f"the run takes {chosen}, as it is configured; --parallel {name} is planned {gain:.0%} faster"


def _at_stake(config: Config, steps: int, hours: float) -> Iterator[str]:
    """What a machine that dies would cost."""
    each = hours * min(math.ceil(steps / config.evaluations), config.save_every or steps) / steps
    if each > 2 * SAVE_HOURS:
        due = float(f"{SAVE_HOURS * steps / hours:.2g}")
        words = f"a checkpoint comes every {_short(each)} hours, which is what a machine that dies would cost"
        yield f"{words}: --save-every {due:.0f} saves about every {60 * SAVE_HOURS:.0f} minutes"


# For people -----------------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> RenderableType:
    """The plan for people."""
    parts: list[RenderableType] = [_summary(report), "", _memory_table(report)]
    if any("seconds" in mode for mode in report["modes"].values()):
        parts += ["", _time_table(report)]
    if len(report["modes"]) > 1:
        parts += [f"* as the config has it: --parallel {report['chosen']}"]
    if report["simulation"]:
        parts += ["", _simulation_line(report["simulation"])]
    parts += ["", *(f"- {note}" for note in report["notes"])] if report["notes"] else []
    return Group(*parts)


def _summary(report: dict[str, Any]) -> Table:
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    run, flops = report["run"], report["flops"]
    shown.add_row("recipe", report["recipe"] or "none")
    trained = "" if report["trained"] == report["parameters"] else f", {report['trained']:,} of them trained"
    shown.add_row("parameters", f"{report['parameters']:,}{trained}")
    each, unit = (1e9, "GFLOPs") if flops["forward"] >= 1e8 else (1e6, "MFLOPs")
    shown.add_row("an image", f"{flops['forward'] / each:,.1f} {unit} forward, {flops['training'] / each:,.1f} trained")
    if run["steps"]:
        epochs = f", {run['epochs']:,.3g} epochs of {run['images']:,} images" if run["epochs"] else ""
        title = "run" if run["runs"] == 1 else f"each of {run['runs']} runs"
        shown.add_row(title, f"{run['steps']:,} steps of {run['batch']:,}{epochs}")
        days = run["tpuv3_core_days"]
        rate = days["exaflops_a_core_day"]
        shown.add_row("compute", f"{_short(run['exaflops'])} exaFLOPs")
        shown.add_row(
            "TPUv3-core-days",
            f"{_short(days['estimate'])} ({_short(days['low'])} to {_short(days['high'])}: the paper's runs made "
            f"{rate['low']:.1f} to {rate['high']:.1f} exaFLOPs a core-day)",
        )
    kept = "the newest is kept" if report["kept"] == 1 else f"the newest {report['kept']} are kept"
    shown.add_row("a checkpoint", f"{_size(report['checkpoint_bytes'])}; {kept}, and the best")
    if report["on"]:
        shown.add_row("device", f"{report['devices']:,} x {report['on']}: {report['origin']}")
    return shown


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _size(count: int) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / 2**20:,.1f} MiB"


def _columns(report: dict[str, Any], title: str) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column(title, no_wrap=True)
    for name in report["modes"]:
        mark = "*" if len(report["modes"]) > 1 and name == report["chosen"] else ""
        shown.add_column(f"{name}{mark}", justify="right", no_wrap=True)
    return shown


def _memory_table(report: dict[str, Any]) -> Table:
    modes = report["modes"].values()
    each, unit = (GIB, "GiB") if max(mode["memory"]["total"] for mode in modes) >= GIB else (2**20, "MiB")
    shown = _columns(report, f"memory of a device, {unit}")
    for name in next(iter(modes))["memory"]:
        values = [mode["memory"][name] for mode in modes]
        title = "at most at one time" if name == "total" else name
        if any(values):
            shown.add_row(title, *(f"{value / each:,.2f}" for value in values), style="bold" if name == "total" else "")
    shown.add_row("images of the batch", *(f"{mode['images']:,}" for mode in modes))
    shown.add_row("at once", *(f"{mode['micro_batch']:,}" for mode in modes))
    if report["on"]:
        shown.add_row("it fits", *("yes" if mode["fits"] else "no" for mode in modes))
        shown.add_row("at once at most", *(f"{mode['largest_micro_batch']['stored']:,}" for mode in modes))
        shown.add_row("  blocks recomputed", *(f"{mode['largest_micro_batch']['recomputed']:,}" for mode in modes))
    return shown


def _time_table(report: dict[str, Any]) -> Table:
    shown, modes = _columns(report, "a step, ms"), list(report["modes"].values())

    def row(title: str, name: str, form: Callable[[Any], str]) -> None:
        shown.add_row(title, *(form(mode[name]) if mode.get(name) is not None else "-" for mode in modes))

    names = next(mode["seconds"] for mode in modes if "seconds" in mode)
    for name in names:
        values = [mode.get("seconds", {}).get(name, 0.0) for mode in modes]
        if any(values):
            shown.add_row(name, *(f"{1000 * value:,.1f}" for value in values))
    shown.add_row("in all", *(f"{1000 * mode.get('step_seconds', 0):,.1f}" for mode in modes), style="bold")
    row("images to read a second", "images_per_second", _short)
    if report["devices"] > 1:
        row("  for each device", "images_per_second_of_a_device", _short)
    row("share of matmul", "share_of_matmul", "{:.0%}".format)
    short = all((mode.get("hours") or 0.0) < 1 for mode in modes)
    row("minutes" if short else "hours", "hours", (lambda hours: _short(60 * hours)) if short else _short)
    row("device-hours", "device_hours", _short)
    row("bound by", "bound", str)
    return shown


def _simulation_line(found: dict[str, Any]) -> str:
    if "left_out" in found:
        return f"fsdp was not simulated: {found['left_out']}"
    return (
        f"fsdp on {found['ranks']:,} simulated ranks: each holds {found['held_bytes'] / 2**20:,.1f} MiB of weights "
        f"({found['filling']:.1%} filling) in {found['groups']} groups; a step has {found['all_gathers']} all-gathers "
        f"({found['all_gather_bytes'] / GIB:,.2f} GiB) and {found['reduce_scatters']} reduce-scatters "
        f"({found['reduce_scatter_bytes'] / GIB:,.2f} GiB)"
    )
