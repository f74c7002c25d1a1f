"""What a training run will need: FLOPs, memory of each device, images per second, hours.

    plainvit plan vit-h14-jft --images 303000000 --on h200 --devices 64
    plainvit plan digits --measure

Everything is computed from the config. With --measure the time of a step is that of real steps on this machine.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from plainvit.config import Config, Model, ResNetConfig, ViTConfig, count_steps, nearest
from plainvit.planning import cost
from plainvit.planning.datasets import CLASSES, count_training_images
from plainvit.planning.devices import DEVICES, USABLE_MEMORY, Device
from plainvit.planning.memory import GIB, Step, checkpoint_bytes, count_trained, largest_micro_batch, memory
from plainvit.planning.shapes import published_model
from plainvit.planning.step_time import step_seconds

SAVE_HOURS = 0.5  # suggested time between checkpoints that are more than twice as far apart
Report = dict[str, Any]


def plan(
    config: Config,
    *,
    on: str = "",
    devices: int = 1,
    images: int | None = None,
    search: bool = False,
    measured: Report | None = None,
) -> Report:
    """Cost of the run, as JSON; with `on`, a name of `DEVICES`, also whether it fits and its time.

    `images`: training images, where the data is not a known dataset. `search`: add a run for each rate of optim.grid.
    `measured`: from `plainvit.train.measure.measure_steps`, in place of the estimated step time.
    """
    model, on = resolve_model(config), _find_device(on)
    _check(config, devices, images, search)
    device = DEVICES[on] if on else None
    run = _count_steps(config, model, images, runs=1 + len(config.optim.grid) * search)
    steps = _list_steps(config, model, devices)
    report: Report = {
        "recipe": config.recipe,
        "parameters": cost.parameters(model),
        "trained": count_trained(model, config.optim)[0],
        "classes": model.classes,
        "image_size": list(model.image_size),
        "tokens": model.tokens if isinstance(model, ViTConfig) else None,
        "flops_per_image": {"forward": 2 * cost.macs(model), "training": 6 * cost.macs(model)},
        "run": run,
        "checkpoint_bytes": checkpoint_bytes(steps[0]),
        "checkpoints_kept": config.keep,
        "on": measured["device"] if measured else on,
        "origin": measured["origin"] if measured else device.origin if device else "",
        "devices": devices,
        "modes": {step.parallel: _plan_mode(step, device, run, measured) for step in steps},
        "chosen": config.parallel if len(steps) > 1 else steps[0].parallel,
    }
    return report | {"notes": [*_list_assumptions(config, model, report), *_list_advice(config, report)]}


def resolve_model(config: Config) -> Model:
    """The model that is trained, with the classes of its data where they are known."""
    model = config.model or (published_model(config) if config.init else None)
    if model is None:
        unknown = f"the model of {config.init} is not known without its weights" if config.init else "there is no model"
        raise ValueError(f"{unknown}: give --model NAME")
    if config.objective == "classify":
        return model.replace(classes=model.classes or CLASSES.get(config.data, 0))
    if isinstance(model, ResNetConfig):
        return model.replace(classes=0)
    # Self-supervision has no head and reads the tokens of the patches, so the last block is computed for all of them
    return model.replace(classes=0, representation=0, pool="average" if model.reads_one_token else model.pool)


def _find_device(on: str) -> str:
    """A name of `DEVICES`; a100 stands for a100-80."""
    found = [name for name in DEVICES if on.lower() in (name, name.partition("-")[0])]
    if on and not found:
        raise ValueError(f"--on {on}: this device is not known; {nearest(on, DEVICES)}")
    return found[0] if found else ""


def _check(config: Config, devices: int, images: int | None, search: bool) -> None:
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"--devices must be an integer of at least 1, got {devices}")
    if config.batch % devices:
        near = min((n for n in range(1, config.batch + 1) if config.batch % n == 0), key=lambda n: abs(n - devices))
        raise ValueError(f"--batch {config.batch} is not divisible by --devices {devices}: try --devices {near}")
    if images is not None and images < 1:
        raise ValueError(f"--images must be at least 1, got {images}")
    if search and not config.optim.grid:
        raise ValueError("--search needs rates to try: --optim.grid 0.001 0.003 0.01 0.03")


def _count_steps(config: Config, model: Model, images: int | None, runs: int) -> Report:
    """Steps of a run and the FLOPs of all runs; None where the number of images is not known."""
    images = images or count_training_images(config)
    steps = (count_steps(config, images) if images else config.steps) or None
    seen = runs * steps * config.batch if steps else None
    found = {"images": images, "batch": config.batch, "runs": runs, "steps": steps, "seen": seen}
    found["epochs"] = steps * config.batch / images if steps and images else None
    return found | {"exaflops": cost.training_exaflops(model, seen) if seen else None}


def _list_steps(config: Config, model: Model, devices: int) -> list[Step]:
    """A step on one device, or one by ddp and one by fsdp."""
    element_bytes, fast_path = 4 if config.precision == "fp32" else 2, config.fast_path == "auto"
    step = Step(
        model=model,
        images=config.batch // devices,
        micro_batch=config.micro_batch,
        optim=config.optim,
        element_bytes=element_bytes,
        residual_bytes=element_bytes if fast_path else 4,
        pixel_bytes=4 if config.augment.mixup or config.augment.cutmix else 1,
        fast_path=fast_path,
        has_average=bool(config.ema or config.ema_window),
        recompute=config.recompute,
        eager=config.compile == "off",
        graphs=config.graphs == "auto" and devices == 1 and cost.is_small(model, config.batch),
        fp8=config.precision == "fp8",
        devices=devices,
    )
    if devices == 1:
        return [step]
    ddp_only = config.optim.name == "muon" or config.optim.lora or config.objective != "classify" or step.fp8
    return [replace(step, parallel=name) for name in (("ddp",) if ddp_only else ("ddp", "fsdp"))]


def _plan_mode(step: Step, device: Device | None, run: Report, measured: Report | None) -> Report:
    """Memory and time of one way to run."""
    if measured:
        step = replace(step, micro_batch=measured["micro_batch"])
    elif device and not step.micro_batch:
        step = replace(step, micro_batch=choose_micro_batch(step, device))
    found: Report = {"images": step.images, "micro_batch": step.size, "memory": memory(step), "fits": None}
    if device:
        found["fits"] = found["memory"]["total"] <= device.usable_bytes
        found["largest_micro_batch"] = largest_micro_batch(replace(step, recompute=False), device)
        found["largest_with_recompute"] = largest_micro_batch(replace(step, recompute=True), device)
    if measured:
        seconds = {"measured": measured["seconds"]}
    elif device and found["fits"]:
        seconds = step_seconds(step, device)
    else:
        return found
    total = sum(seconds.values())
    rate = run["batch"] / total
    hours = run["runs"] * run["steps"] * total / 3600 if run["steps"] else None
    return found | {
        "seconds": seconds,
        "step_seconds": total,
        "images_per_second": rate,
        "mfu": 6 * cost.macs(step.model) * rate / step.devices / (device.tflops * 1e12) if device else None,
        "hours": hours,
        "device_hours": hours * step.devices if hours else None,
    }


def choose_micro_batch(step: Step, device: Device) -> int:
    """As training does: the full batch of the device, or its largest divisor of at most half of it, and so on."""
    size, largest = step.images, largest_micro_batch(step, device)
    if memory(replace(step, micro_batch=size))["total"] <= device.usable_bytes:
        return size
    while size > max(largest, 1):
        size = max((n for n in range(1, size // 2 + 1) if step.images % n == 0), default=1)
    return size


def estimate_micro_batch(config: Config, devices: int, free: int) -> int:
    """The micro-batch of an FSDP step that fits into `free` bytes next to the weights; 0 if none does."""
    assert config.model
    step = next(step for step in _list_steps(config, config.model, devices) if step.parallel == "fsdp")
    for size in sorted((n for n in range(1, step.images + 1) if step.images % n == 0), reverse=True):
        used = memory(replace(step, micro_batch=size))
        there = used["weights"] + used["averaged weights"] + used["images"]
        if used["total"] - there <= free * USABLE_MEMORY:
            return size
    return 0


def _list_assumptions(config: Config, model: Model, report: Report) -> Iterator[str]:
    """What the values leave out or assume."""
    if not (config.steps or config.epochs or config.init):
        yield "the length of the run is not set: give --epochs or --steps for exaFLOPs and hours"
    elif not report["run"]["images"] and not config.steps:
        yield "the number of training images is not known: give --images for exaFLOPs and hours"
    if not model.classes and config.objective == "classify":
        yield "the number of classes depends on the data: the last layer is not counted"
    if report["on"] in DEVICES and (isinstance(model, ResNetConfig) or model.stem):
        yield "planned times of convolutions are a guess: their rate was not measured"
    if config.objective == "mae":
        yield "planned as if the encoder saw all tokens: a step of MAE takes about half of this"
    if config.teacher:
        yield "memory and time of the teacher are not planned"
    if config.optim.frozen or config.optim.lora:
        yield "activations and time are planned for training every weight: an upper bound"
    if report["devices"] > 1 and report["on"]:
        speed = DEVICES[report["on"]].collective_bandwidth(report["devices"]) / 1e9
        yield f"communication is not measured: its bytes at {speed:,.0f} GB/s, overlapped with computation"


def _list_advice(config: Config, report: Report) -> Iterator[str]:
    """What to change, and what the flags of the command mean for the result."""
    run, chosen = report["run"], report["modes"][report["chosen"]]
    for name, mode in report["modes"].items():
        if mode["fits"] and not chosen["fits"]:
            yield f"--parallel {report['chosen']} does not fit: use --parallel {name}"
        elif mode["fits"] and chosen["step_seconds"] > 1.01 * mode["step_seconds"]:
            yield f"--parallel {name} is planned {chosen['step_seconds'] / mode['step_seconds'] - 1:.0%} faster"
    if run["runs"] > 1:
        rates = ", ".join(f"{lr:g}" for lr in config.optim.grid)
        yield f"FLOPs and time are those of {run['runs']} runs: --search tries {rates}, then trains with the best"
    if not chosen.get("hours"):
        return
    hours, steps = chosen["hours"] / run["runs"], run["steps"]
    apart = hours * min(math.ceil(steps / config.evaluations), config.save_every or steps) / steps
    if config.hours and hours > config.hours:
        yield f"--hours {config.hours:g} allows about {int(steps * config.hours / hours):,} steps of each run"
    elif apart > 2 * SAVE_HOURS:
        every = float(f"{SAVE_HOURS * steps / hours:.2g}")
        yield f"checkpoints are {_format(apart)} hours apart: --save-every {every:.0f} saves about every 30 minutes"


# Tables ---------------------------------------------------------------------------------------------------------------


def table(report: Report) -> RenderableType:
    """The report for people."""
    marks = [f"* the run uses --parallel {report['chosen']}"] if len(report["modes"]) > 1 else []
    notes = ["", *(f"- {note}" for note in report["notes"])] if report["notes"] else []
    return Group(_summary_table(report), "", _mode_table(report), *marks, *notes)


def _summary_table(report: Report) -> Table:
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    run, flops = report["run"], report["flops_per_image"]
    trained = "" if report["trained"] == report["parameters"] else f", {report['trained']:,} of them trained"
    unit, name = (1e9, "GFLOPs") if flops["forward"] >= 1e8 else (1e6, "MFLOPs")
    shown.add_row("recipe", report["recipe"] or "none")
    shown.add_row("parameters", f"{report['parameters']:,}{trained}")
    shown.add_row(
        "per image", f"{flops['forward'] / unit:,.1f} {name} forward, {flops['training'] / unit:,.1f} training"
    )
    if run["steps"]:
        epochs = f", {run['epochs']:,.3g} epochs of {run['images']:,} images" if run["epochs"] else ""
        title = "run" if run["runs"] == 1 else f"each of {run['runs']} runs"
        shown.add_row(title, f"{run['steps']:,} steps of {run['batch']:,}{epochs}")
        shown.add_row("compute", f"{_format(run['exaflops'])} exaFLOPs")
    size = _format_bytes(report["checkpoint_bytes"])
    shown.add_row("checkpoint", f"{size}; the newest {report['checkpoints_kept']} and the best are kept")
    if report["on"]:
        shown.add_row("device", f"{report['devices']:,} x {report['on']}: {report['origin']}")
    return shown


def _mode_table(report: Report) -> Table:
    """Memory and time, one column for each way to run; rows without a value are left out."""
    shown = Table("one step", box=None, pad_edge=False, header_style="bold")
    for name in report["modes"]:
        is_marked = len(report["modes"]) > 1 and name == report["chosen"]
        shown.add_column(f"{name}*" if is_marked else name, justify="right")
    modes = [_describe_mode(mode) for mode in report["modes"].values()]
    for title in max(modes, key=len):
        cells = [mode.get(title, "-") for mode in modes]
        if set(cells) != {"-"}:
            shown.add_row(title, *cells, style="bold" if title in ("memory of a device", "time") else "")
    return shown


def _describe_mode(mode: Report) -> dict[str, str]:
    """Title -> text of each row."""
    rows = {name: _format_bytes(size) if size else "-" for name, size in mode["memory"].items()}
    rows["memory of a device"] = rows.pop("total")
    rows |= {"images of a device": f"{mode['images']:,}", "micro-batch": f"{mode['micro_batch']:,}"}
    if mode["fits"] is not None:
        rows |= {"fits": "yes" if mode["fits"] else "no", "largest micro-batch": f"{mode['largest_micro_batch']:,}"}
        rows["  with --recompute"] = f"{mode['largest_with_recompute']:,}"
    if "seconds" not in mode:
        return rows
    times = mode["seconds"] | {"time": mode["step_seconds"]}
    rows |= {"": ""} | {name: f"{1000 * value:,.1f} ms" if value else "-" for name, value in times.items()}
    rows |= {"images/s": _format(mode["images_per_second"])}
    rows |= {"MFU (of peak bf16)": f"{mode['mfu']:.0%}" if mode["mfu"] else "-"}
    hours = mode["hours"]
    rows["run"] = "-" if hours is None else f"{_format(hours)} h" if hours >= 1 else f"{_format(60 * hours)} min"
    return rows | {"device-hours": _format(mode["device_hours"]) if hours and hours >= 1 else "-"}


def _format(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _format_bytes(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
