"""Training speed of plainvit and its peers, interleaved in one process, from the same weights.

    python -m bench.train                               B/16, L/16, H/14, S/16 and Ti/16, all peers
    python -m bench.train --models B/16 --kernels       one size, and the kernels of plainvit's step
    python -m bench.train --models L/16,H/14 --systems "plainvit;plainvit, fp8;timm"
    python -m bench.train --models B/16 --systems "plainvit;plainvit, every token;plainvit, MAE"   the cost of MAE
    python -m bench.train --device cpu --models Ti/16 --batch 2 --repeats 2 --steps 1     a trial

A step is forward, cross-entropy, backward, AdamW and zero_grad, on random images that are on the device already: uint8
for plainvit, which normalizes them itself, normalized floats for the peers. plainvit's step is that of its training
loop, which also reads the loss and the gradient norm. bench/peers.py has the forms of the peers. Before the timing, the
first steps compile, and their losses are compared with plainvit's.

MFU, HFU   FLOPs of the whole model (3 x the forward pass) and FLOPs really executed (for MAE: of every token), in
           percent of the rate of a large matmul that is measured in the same rounds, because a warm GPU is slower
GiB        peak memory of the system
kernel ms  sum of all kernels of a step
loss       largest relative difference from plainvit's losses
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measure import (
    GIB,
    Kernel,
    compute_utilization,
    count_calls,
    count_training_flops,
    first_line,
    make_large_matmul,
    make_parser,
    measure_peak_rates,
    print_kernels,
    print_table,
    profile_kernels,
    run_interleaved,
    sum_kernel_ms,
    time_calls,
    warn_skipped,
    write_results,
)
from bench.peers import PEERS
from bench.steps import BASELINE, FORMS, VARIANTS, Job, TrainingStep, build_step, make_job
from plainvit.config import ViTConfig
from plainvit.device import choose_device
from plainvit.names import configure

MODELS = {"B/16": 256, "L/16": 256, "H/14": 128, "S/16": 1024, "Ti/16": 1024}  # -> images per step on a GPU
LOSS_LIMIT = {"cuda": 0.01, "cpu": 1e-3}  # largest relative difference of a loss: bf16, fp32
MATMUL = "large matmul, TFLOP/s"


@dataclass(frozen=True)
class Options:
    """The validated arguments."""

    device: str
    models: tuple[str, ...] = ("B/16",)
    systems: tuple[str, ...] = (BASELINE,)
    batch: int = 0
    image_size: int = 224
    repeats: int = 5
    steps: int = 0
    loss_steps: int = 0
    compiled: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def configure_model(self, name: str) -> ViTConfig:
        model = configure(f"ViT-{name}", image_size=self.image_size, numerics="timm")  # the exact GELU, as the peers
        assert isinstance(model, ViTConfig)
        return model

    def choose_batch(self, name: str) -> int:
        return self.batch or (MODELS.get(name, 256) if self.is_gpu else 2)


# Measurement ----------------------------------------------------------------------------------------------------------


@dataclass
class System:
    """A compiled system after its first steps, and what is measured of it."""

    name: str
    training_step: TrainingStep
    executed_flops: float  # of one image
    first_seconds: float  # of the first step, with compilation
    losses: list[float]
    peak_bytes: int | None
    rates: list[float] = field(default_factory=list)  # images/s of each round
    kernels: list[Kernel] = field(default_factory=list)
    is_finite: bool = True  # the loss after all rounds

    def step(self) -> float | Tensor:
        with self.training_step.attention_context():
            return self.training_step()


def warm_up(name: str, job: Job, steps: int, skipped: list[str]) -> System | None:
    """Builds and compiles a system and takes its first steps. None, with a warning, if that fails."""
    is_gpu = job.device.startswith("cuda")
    free_memory(is_gpu)
    allocated = torch.cuda.memory_allocated(job.device) if is_gpu else 0
    try:
        step, executed_flops = build_step(name, job)
        with step.attention_context():
            started = time.perf_counter()
            losses = [float(step())]
            seconds = time.perf_counter() - started
            if is_gpu:
                torch.cuda.reset_peak_memory_stats(job.device)
            losses += [float(step()) for _ in range(steps - 1)]
    except Exception as error:  # a missing package, a compiler error, out of memory
        free_memory(is_gpu)
        warn_skipped(f"ViT-{job.name}, {name}: {first_line(error)}", skipped)
        return None
    peak = torch.cuda.max_memory_allocated(job.device) - allocated if is_gpu else None
    print(f"  ViT-{job.name}, {name}: first step after {seconds:.1f} s", file=sys.stderr, flush=True)
    return System(name, step, executed_flops, seconds, losses, peak)


def free_memory(is_gpu: bool) -> None:
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()


def list_systems(systems: Sequence[str]) -> list[str]:
    """plainvit first, then its variants, then both forms of each peer."""
    variants = [name for name in systems if name in VARIANTS and name != BASELINE]
    return [BASELINE, *variants, *(f"{peer}, {form}" for peer in systems if peer in PEERS for form in FORMS)]


def measure_model(name: str, options: Options, skipped: list[str]) -> list[dict[str, Any]]:
    """Rows of every system on one model; those that fail are left out."""
    batch, is_gpu = options.choose_batch(name), options.is_gpu
    job = make_job(name, options.configure_model(name), batch, options.device, compiled=options.compiled)
    steps = options.loss_steps or (30 if is_gpu else 3)
    systems = list(filter(None, (warm_up(system, job, steps, skipped) for system in list_systems(options.systems))))
    if not systems or systems[0].name != BASELINE:
        raise RuntimeError("without plainvit no peer is measured; try --compile off")
    matmul_rates = measure_rounds(systems, job, options, skipped)
    rows = make_rows(name, systems, statistics.median(matmul_rates), options)
    for system in systems:
        system.training_step.close()
    return rows


def measure_rounds(systems: list[System], job: Job, options: Options, skipped: list[str]) -> list[float]:
    """Times all systems in each round, then profiles one step of each. Returns the matmul rates in TFLOP/s."""
    counts = {system.name: options.steps or count_calls(system.step, job.device) for system in systems}

    def measure_rate(system: System) -> float:
        return job.batch / time_calls(system.step, counts[system.name], job.device)

    matmul, flops = make_large_matmul(job.device)
    matmul_count = options.steps or count_calls(matmul, job.device)
    runs: dict[str, Callable[[], float]] = {system.name: partial(measure_rate, system) for system in systems}
    runs[MATMUL] = lambda: flops / time_calls(matmul, matmul_count, job.device) / 1e12
    results = run_interleaved(runs, options.repeats)
    for system in systems:
        system.rates = results[system.name]
        system.kernels = profile_kernels(system.step, job.device, skipped)
        system.is_finite = bool(np.isfinite(float(system.step())))
    return results[MATMUL]


def measure(options: Options, with_kernels: bool = False) -> dict[str, Any]:
    """Measures and prints everything; returns what the JSON contains."""
    skipped: list[str] = []
    if not options.is_gpu:
        warn_skipped("bf16, kernels and memory: there is no GPU, so steps are fp32", skipped)
    if not options.compiled:
        warn_skipped("torch.compile (--compile on): plainvit is eager, tuned peers have only fused AdamW", skipped)
    peaks = measure_peak_rates(options.device)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        try:
            rows += measure_model(name, options, skipped)
        except (RuntimeError, ArithmeticError, ValueError) as error:  # out of memory, or a non-finite step
            warn_skipped(f"ViT-{name}, {options.choose_batch(name)} images: {first_line(error)}", skipped)
        torch.compiler.reset()  # the recompilation limit then counts for each model
        free_memory(options.is_gpu)
    print_rows(rows, options)
    print(f"peak rates before all rounds: matmul {peaks['matmul']:,.3g} TFLOP/s, copy {peaks['copy']:.3g} TB/s")
    for row in rows if with_kernels else ():
        if row["system"] == BASELINE:
            print_kernels(f"{row['model']}: one step of plainvit", row["kernels"])
    return {"peak_rates": peaks, "rows": rows, "skipped": skipped}


# Rows -----------------------------------------------------------------------------------------------------------------


def make_rows(name: str, systems: Sequence[System], matmul: float, options: Options) -> list[dict[str, Any]]:
    """One row per system; `matmul` is the rate of a large matmul in the same rounds."""
    rates = {system.name: statistics.median(system.rates) for system in systems}
    best = max((name for name in rates if name.endswith(", tuned")), key=rates.__getitem__, default=None)
    flops, batch = count_training_flops(options.configure_model(name)), options.choose_batch(name)
    rows: list[dict[str, Any]] = []
    for system in systems:
        rate = rates[system.name]
        row: dict[str, Any] = {"model": f"ViT-{name}", "system": system.name, "batch": batch}
        row |= {"images_per_second": rate, "min": min(system.rates), "max": max(system.rates)}
        row |= {"repeats": len(system.rates), "rounds": system.rates, "step_ms": 1000 * batch / rate}
        row |= {"relative_to_plainvit": rate / rates[BASELINE], "is_best_peer": system.name == best}
        row |= {"ratio": rate / rates[best] if best else None, "matmul": matmul}
        row |= {"mfu": compute_utilization(rate, flops, matmul)}
        row |= {"hfu": compute_utilization(rate, system.executed_flops, matmul)}
        row |= {"peak_gib": None if system.peak_bytes is None else system.peak_bytes / GIB}
        row |= {"first_step_seconds": system.first_seconds, "kernel_ms": sum_kernel_ms(system.kernels)}
        row |= {"kernels": [vars(kernel) for kernel in system.kernels]}
        rows.append(row | compare_losses(system, systems[0], options))
    return rows


def compare_losses(system: System, baseline: System, options: Options) -> dict[str, Any]:
    """The largest relative difference from plainvit's losses (NaN if one is not finite), and its limit."""
    pairs = zip(system.losses, baseline.losses, strict=True)
    difference = float(np.max([abs(loss - expected) / abs(expected) for loss, expected in pairs]))
    limit = VARIANTS[system.name].loss_limit if system.name in VARIANTS else None
    if limit is None:
        limit = LOSS_LIMIT["cuda" if options.is_gpu else "cpu"]
    row = {"losses": system.losses, "loss_difference": difference, "loss_limit": limit}
    return row | {"is_valid": system.is_finite and difference <= limit}


def print_rows(rows: Sequence[dict[str, Any]], options: Options) -> None:
    columns = ("img/s", "spread", "ratio", "matmul", "MFU %", "HFU %", "GiB", "step ms", "kernel ms", "first s", "loss")
    lines = []
    for row in rows:
        line = [f"{row['model']} x{row['batch']}", row["system"], f"{row['images_per_second']:,.1f}"]
        line += [f"{row['min']:,.1f}-{row['max']:,.1f}"]
        line += [format_number(row["ratio"], ".3f") + ("*" if row["is_best_peer"] else "")]
        line += [f"{row['matmul']:,.3g}", f"{row['mfu']:.1f}", f"{row['hfu']:.1f}"]
        line += [format_number(row["peak_gib"], ".2f"), f"{row['step_ms']:,.2f}"]
        line += [format_number(row["kernel_ms"], ",.2f"), f"{row['first_step_seconds']:.0f}"]
        lines.append([*line, f"{row['loss_difference']:.1e}"])
    device = torch.cuda.get_device_name(options.device) if options.is_gpu else "CPU"
    title = f"training steps at {options.image_size} px, {device}; ratio: to the fastest tuned peer (*)"
    print_table(title, ("model", "system", *columns), lines, left=("model", "system"))
    for row in rows:
        if not row["is_valid"]:
            print(f"warning: {row['model']}, {row['system']}: the losses differ or are not finite")


def format_number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# Command line ---------------------------------------------------------------------------------------------------------


def make_training_parser(doc: str | None) -> argparse.ArgumentParser:
    """The flags that bench.train and bench.gate share."""
    parser = make_parser(doc, repeats=5)
    parser.add_argument("--models", default=",".join(MODELS), help="Sizes, separated by commas")
    systems = "; ".join((*VARIANTS, *PEERS))
    parser.add_argument("--systems", default=";".join((BASELINE, *PEERS)), help=f"Separated by semicolons: {systems}")
    parser.add_argument("--batch", type=int, default=0, help="Images per step; 0: by the model, 2 on a CPU")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=0, help="Steps per round; 0: about a second")
    parser.add_argument("--loss-steps", type=int, default=0, help="Steps whose losses are compared; 0: 30 (CPU: 3)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="Compile; auto: on a GPU")
    return parser


def make_options(args: argparse.Namespace) -> Options:
    """Validates the arguments; raises ValueError."""
    device, models = choose_device(args.device), tuple(args.models.split(","))
    for name in models:
        configure(f"ViT-{name}", image_size=args.image_size)
    systems = tuple(name.strip() for name in args.systems.split(";"))
    for name in systems:
        if name not in VARIANTS and name not in PEERS:
            raise ValueError(f"--systems: {name!r} is unknown: use {'; '.join((*VARIANTS, *PEERS))}")
    counts = {name: getattr(args, name) for name in ("batch", "steps", "loss_steps", "repeats")}
    for name, value in counts.items():
        least = 1 if name == "repeats" else 0
        if value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    compiled = args.compile == "on" or (args.compile == "auto" and device.startswith("cuda"))
    return Options(device, models, systems, compiled=compiled, image_size=args.image_size, **counts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_training_parser(__doc__)
    parser.add_argument("--kernels", action="store_true", help="Print the kernels of plainvit's step")
    args = parser.parse_args(arguments)
    try:
        options = make_options(args)
    except ValueError as error:
        parser.error(str(error))
    write_results("bench.train", arguments, args.json, title="training steps", **measure(options, args.kernels))


if __name__ == "__main__":
    main()
