"""What a training run will need: FLOPs, memory of each device, images per second, hours.

    plainvit plan vit-h14-jft --images 303000000 --on h200 --devices 64
    plainvit plan digits --measure

Everything is computed from the config. With --measure the time of a step is that of real steps on this machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType

from plainvit.config import Config, Model, ResNetConfig, ViTConfig, count_steps, largest_divisor
from plainvit.planning import cost
from plainvit.planning.datasets import CLASSES, count_training_images
from plainvit.planning.devices import DEVICES, USABLE_MEMORY, Device
from plainvit.planning.memory import GIB, Step, checkpoint_bytes, largest_micro_batch, memory
from plainvit.planning.step_time import step_seconds
from plainvit.runtime.display import key_value_table

Report = dict[str, Any]


def plan(
    config: Config,
    *,
    on: str = "",
    devices: int = 1,
    images: int | None = None,
    measured: Report | None = None,
) -> Report:
    """The cost of a run on `devices` of the kind `on`; without a kind, no times.

    `images` is needed if the data is not a known dataset. `measured`, of `train.measure.measure_steps`, replaces the
    estimated time of a step.
    """
    _check_arguments(config, on, devices, images)
    model, device = resolve_model(config), DEVICES.get(on)
    run = _count_steps(config, model, images)
    step = describe_step(config, model, devices)
    timing_source = device.timing_source if device else ""
    if measured:
        on, timing_source = measured["device"], measured["timing_source"]
    report: Report = {
        "recipe": config.recipe,
        "parameters": cost.parameters(model),
        "classes": model.classes,
        "image_size": list(model.image_size),
        "tokens": model.tokens if isinstance(model, ViTConfig) else None,
        "flops_per_image": {"forward": 2 * cost.macs(model), "training": 6 * cost.macs(model)},
        "run": run,
        "checkpoint_bytes": checkpoint_bytes(step),
        "checkpoints_kept": config.keep,
        "on": on,
        "timing_source": timing_source,
        "devices": devices,
        "parallel": step.parallel,
        "step": _plan_step(step, device, run, measured),
    }
    return report | {"notes": list(_list_notes(config, model, report))}


def resolve_model(config: Config) -> Model:
    """The model that is trained, with the classes of its data where they are known."""
    model = config.model
    if model is None:
        raise ValueError("there is no model to plan: give --model NAME or --init WEIGHTS")
    if config.objective == "classify":
        return model.replace(classes=model.classes or CLASSES.get(config.data, 0))
    if isinstance(model, ResNetConfig):
        return model.replace(classes=0)
    # Self-supervision has no head and reads the tokens of the patches, so the last block is computed for all of them
    return model.replace(classes=0, representation=0, pool="average" if model.reads_one_token else model.pool)


def _check_arguments(config: Config, on: str, devices: int, images: int | None) -> None:
    if on and on not in DEVICES:
        raise ValueError(f"--on {on} is unknown: use one of {', '.join(DEVICES)}")
    if devices < 1:
        raise ValueError(f"--devices must be at least 1, got {devices}")
    if config.batch % devices:
        divisors = (n for n in range(1, config.batch + 1) if config.batch % n == 0)
        near = min(divisors, key=lambda n: abs(n - devices))
        raise ValueError(f"--batch {config.batch} is not divisible by --devices {devices}: try --devices {near}")
    if images is not None and images < 1:
        raise ValueError(f"--images must be at least 1, got {images}")


def _count_steps(config: Config, model: Model, images: int | None) -> Report:
    """Steps and FLOPs of the run; None where the number of images is not known."""
    images = images or count_training_images(config)
    steps = (count_steps(config, images) if images else config.steps) or None
    return {
        "images": images,
        "batch": config.batch,
        "steps": steps,
        "epochs": steps * config.batch / images if steps and images else None,
        "exaflops": cost.training_exaflops(model, steps * config.batch) if steps else None,
    }


def describe_step(config: Config, model: Model, devices: int) -> Step:
    """The training step of one device."""
    element_bytes = 4 if config.precision == "fp32" else 2
    fast_path = config.fast_path == "auto"
    return Step(
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
        parallel=config.parallel if devices > 1 else "single",
        devices=devices,
    )


def _plan_step(step: Step, device: Device | None, run: Report, measured: Report | None) -> Report:
    """Memory and time of a step, and the hours of the run."""
    if measured:
        step = replace(step, micro_batch=measured["micro_batch"])
    elif device and not step.micro_batch:
        step = replace(step, micro_batch=plan_micro_batch(step, device.usable_bytes) or 1)
    planned: Report = {"images": step.images, "micro_batch": step.size, "memory": memory(step), "fits": None}
    parts = {"measured": measured["seconds"]} if measured else {}
    if device:
        planned["fits"] = planned["memory"]["total"] <= device.usable_bytes
        planned["largest_micro_batch"] = largest_micro_batch(step, device)
        parts = parts or (step_seconds(step, device) if planned["fits"] else {})
    if not parts:
        return planned
    seconds = sum(parts.values())
    rate = run["batch"] / seconds
    return planned | {
        "parts": parts,
        "seconds": seconds,
        "images_per_second": rate,
        "mfu": 6 * cost.macs(step.model) * rate / step.devices / (device.tflops * 1e12) if device else None,
        "hours": run["steps"] * seconds / 3600 if run["steps"] else None,
    }


def find_micro_batch(images: int, fits: Callable[[int], bool]) -> int:
    """All images if they fit, or their largest divisor of at most half of that, and so on; 0 if not even one fits."""
    size = images
    while size and not fits(size):
        size = largest_divisor(images, size // 2)
    return size


def plan_micro_batch(step: Step, available: float) -> int:
    """The micro-batch that training will choose."""
    return find_micro_batch(step.images, lambda size: memory(replace(step, micro_batch=size))["total"] <= available)


def estimate_micro_batch(config: Config, devices: int, free: int) -> int:
    """The micro-batch of an FSDP step that fits into `free` bytes next to the weights; 0 if none does."""
    assert config.model
    step = replace(describe_step(config, config.model, devices), parallel="fsdp")
    used = memory(step)
    held = sum(used[name] for name in ("weights", "averaged weights", "images"))
    return plan_micro_batch(step, free * USABLE_MEMORY + held)


def _list_notes(config: Config, model: Model, report: Report) -> Iterator[str]:
    """What the values leave out or assume, and what to change."""
    run, step, devices = report["run"], report["step"], report["devices"]
    if not (config.steps or config.epochs or config.init):
        yield "the length of the run is not set: give --epochs or --steps for exaFLOPs and hours"
    elif not run["steps"]:
        yield "the number of training images is not known: give --images for exaFLOPs and hours"
    if not model.classes and config.objective == "classify":
        yield "the number of classes depends on the data: the last layer is not counted"
    if report["on"] in DEVICES and (isinstance(model, ResNetConfig) or model.stem):
        yield "planned times of convolutions are assumed: their rate was not measured"
    if config.objective == "mae":
        yield "planned as if the encoder saw all tokens: a step of MAE takes about half of this"
    if config.teacher:
        yield "memory and time of the teacher are not planned"
    if config.optim.frozen:
        yield "planned for training every weight: an upper bound with --optim.frozen"
    if devices > 1 and report["on"]:
        speed = DEVICES[report["on"]].collective_bandwidth(devices) / 1e9
        yield f"communication is not measured: its bytes at {speed:,.0f} GB/s, overlapped with computation"
    if step["fits"] is False:
        shard = "--parallel fsdp, " if report["parallel"] == "ddp" else ""
        smaller = "a smaller --micro-batch, " if config.micro_batch > 1 else ""
        yield f"a step does not fit: use {smaller}{shard}--recompute, a smaller --image-size or more --devices"
    hours = step.get("hours") or 0.0
    if 0 < config.hours < hours:
        yield f"--hours {config.hours:g} allows about {int(run['steps'] * config.hours / hours):,} steps"


# Table ----------------------------------------------------------------------------------------------------------------


def table(report: Report) -> RenderableType:
    """The report as a table."""
    rows = _describe_run(report) | {"": ""} | _describe_step(report["step"], report["devices"])
    notes = [f"- {note}" for note in report["notes"]]
    if notes:
        notes.insert(0, "")
    return Group(key_value_table(rows), *notes)


def _describe_run(report: Report) -> dict[str, str]:
    run, flops = report["run"], report["flops_per_image"]
    unit, name = (1e9, "GFLOPs") if flops["forward"] >= 1e8 else (1e6, "MFLOPs")
    rows = {"recipe": report["recipe"] or "none", "parameters": f"{report['parameters']:,}"}
    rows["per image"] = f"{flops['forward'] / unit:,.1f} {name} forward, {flops['training'] / unit:,.1f} training"
    if run["steps"]:
        epochs = f", {run['epochs']:,.3g} epochs of {run['images']:,} images" if run["epochs"] else ""
        rows["run"] = f"{run['steps']:,} steps of {run['batch']:,}{epochs}"
        rows["compute"] = f"{_format(run['exaflops'])} exaFLOPs"
    size = _format_bytes(report["checkpoint_bytes"])
    rows["checkpoint"] = f"{size}; the newest {report['checkpoints_kept']} and the best are kept"
    if report["on"]:
        parallel = f", --parallel {report['parallel']}" if report["devices"] > 1 else ""
        rows["device"] = f"{report['devices']:,} x {report['on']}{parallel}: {report['timing_source']}"
    return rows


def _describe_step(step: Report, devices: int) -> dict[str, str]:
    sizes = {name: _format_bytes(size) for name, size in step["memory"].items() if size}
    micro_batch = f"{step['micro_batch']:,} of {step['images']:,} images"
    if step["fits"] is not None:
        micro_batch += f"; at most {step['largest_micro_batch']:,} fit" if step["fits"] else "; does not fit"
    rows = {"memory of a device": sizes.pop("total"), **{f"  {name}": size for name, size in sizes.items()}}
    rows["micro-batch"] = micro_batch
    if "seconds" not in step:
        return rows
    rows["time of a step"] = f"{1000 * step['seconds']:,.1f} ms"
    parts = {name: seconds for name, seconds in step["parts"].items() if seconds}
    rows |= {f"  {name}": f"{1000 * seconds:,.1f} ms" for name, seconds in parts.items() if len(parts) > 1}
    rows["speed"] = f"{_format(step['images_per_second'])} images/s"
    if step["mfu"]:
        rows["speed"] += f", {step['mfu']:.0%} of peak bf16 (MFU)"
    hours = step["hours"]
    if hours and hours < 1:
        rows["time of the run"] = f"{_format(60 * hours)} min"
    elif hours:
        device_hours = f", {_format(hours * devices)} device-hours" if devices > 1 else ""
        rows["time of the run"] = f"{_format(hours)} h{device_hours}"
    return rows


def _format(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _format_bytes(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
