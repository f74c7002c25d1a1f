"""Training steps side by side: plainvit and its peers in one process, interleaved, from the same weights.

    python -m bench.train                               B/16, L/16, H/14, S/16 and Ti/16, every peer
    python -m bench.train --models B/16 --kernels       one size, and where plainvit's step goes
    python -m bench.train --short                       plainvit and timm, B/16: under 3 minutes on an H200
    python -m bench.train --models L/16,H/14 --systems "plainvit;plainvit, fp8;timm"        with matmuls in fp8
    python -m bench.train --models B/16 --systems "plainvit;plainvit, every token;plainvit, MAE"   the cost of MAE
    python -m bench.train --device cpu --models Ti/16 --batch 2 --repeats 2 --steps 1     shows only that this runs

A step is forward, cross-entropy, backward, AdamW's update and zeroed gradients, on random images that are on the device
already: uint8 for plainvit, which normalises them itself; ready floats for the peers. plainvit's is the training loop's
own (bench/steps.py), which also reads the loss and the norm of each step. The peers' forms are those of bench/peers.py.
The first steps compile, warm up and hold every loss against plainvit's.

%: nominal FLOPs (3 x the forward pass) over the rate of a large product, which takes its turn in every round: a GPU at
work is slower than a cool one. "executed" counts what a system really computes, but of MAE every token. GiB: the most
that the system allocated in a step beyond what lay there before it was built. Device: the time of all kernels of a
step. All systems stay on the device where their weights and optimisers leave it at least two thirds of its memory;
otherwise each peer is alone there with plainvit, in turns with it, and peers are compared through plainvit.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measure import (
    GIB,
    Kernel,
    busy_ms,
    calls_that_last,
    ceilings,
    first_line,
    interleaved,
    kernel_table,
    kernels,
    large_product,
    make_parser,
    percent,
    publish,
    seconds_a_call,
    short_name,
    show,
    step_flops,
    tell,
)
from bench.peers import MODES, PEERS
from bench.steps import FORMS, OURS, VARIANTS, Job, System, draw, make
from plainvit.config import ViTConfig
from plainvit.device import choose_device
from plainvit.names import configure
from plainvit.planning.cost import parameters

MODELS = {"B/16": 256, "L/16": 256, "H/14": 128, "S/16": 1024, "Ti/16": 1024}  # -> images a step on a GPU
PARITY = {"cuda": 0.01, "cpu": 1e-3}  # greatest relative difference of a loss in bf16, in fp32
PRODUCT = "a large product, TFLOP/s"


# One system -----------------------------------------------------------------------------------------------------------


@dataclass
class Warm:
    """A system that is compiled and has made its first steps, with what was learned on the way."""

    name: str
    system: System
    executed: float  # FLOPs an image
    first_s: float  # of the first step, compilation included
    losses: list[float]
    peak: int | None  # bytes beyond what lay on the device before
    resident: int | None  # of which between steps
    rates: list[float] = field(default_factory=list)  # images a second, a round
    own_rates: list[float] = field(default_factory=list)  # plainvit's in the same rounds
    matmul: list[float] = field(default_factory=list)  # TFLOP/s of a large product in the same rounds
    kernels: list[Kernel] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def step(self) -> float | Tensor:
        with self.system.around():
            return self.system()


def warm_up(name: str, job: Job, steps: int, left_out: list[str]) -> Warm | None:
    """Built, compiled and past its first steps; None, and a line, where it cannot be had here."""
    gpu = job.device.startswith("cuda")
    free_memory(gpu)
    before = torch.cuda.memory_allocated(job.device) if gpu else 0
    try:
        made, executed = make(name, job)
        with made.around():
            started = time.perf_counter()
            losses = [float(made())]
            took = time.perf_counter() - started
            if gpu:
                torch.cuda.reset_peak_memory_stats(job.device)
            losses += [float(made()) for _ in range(steps - 1)]
    except Exception as error:  # a package, a compiler or memory that is missing: each raises its own kind
        free_memory(gpu)
        tell(f"ViT-{job.name}, {name}: {first_line(error)}", left_out)
        return None
    peak = torch.cuda.max_memory_allocated(job.device) - before if gpu else None
    resident = torch.cuda.memory_allocated(job.device) - before if gpu else None
    print(f"  ViT-{job.name}, {name}: ready, the first step took {took:.1f} s", file=sys.stderr, flush=True)
    return Warm(name, made, executed, took, losses, peak, resident)


def free_memory(gpu: bool) -> None:
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()


# One model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What a run of this benchmark is asked for."""

    device: str
    models: tuple[str, ...] = tuple(MODELS)
    systems: tuple[str, ...] = (OURS, *PEERS)
    batch: int = 0  # 0: by the model
    image_size: int = 224
    repeats: int = 5
    steps: int = 0  # in a repeat; 0: about a second
    parity: int = 0  # first steps, whose losses are compared; 0: 30 on a GPU, 3 elsewhere
    compiled: bool = True
    mode: str = "default"

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")


def names_of(systems: Sequence[str]) -> list[str]:
    """plainvit first, whatever the order; a peer in both its forms."""
    ours = [name for name in systems if name in VARIANTS and name != OURS]
    return [OURS, *ours, *(f"{peer}, {form}" for peer in systems if peer in PEERS for form in FORMS)]


def groups(names: Sequence[str], model: ViTConfig, memory: int) -> list[list[str]]:
    """What stands on the device together, next to plainvit: all, or one by one where they would fill it."""
    others = [name for name in names if name != OURS]
    together = 12 * parameters(model) * len(names)  # fp32 weights and AdamW's two moments
    return [others] if not memory or together <= memory / 3 else [[name] for name in others]


def batch_of(name: str, options: Options) -> int:
    return options.batch or (MODELS.get(name, 256) if options.gpu else 2)


def model_of(name: str, options: Options) -> ViTConfig:
    """With the exact GELU, which all three peers have."""
    model = configure(f"ViT-{name}", image_size=options.image_size, numerics="timm")
    assert isinstance(model, ViTConfig)
    return model


def job_of(name: str, options: Options) -> Job:
    job = Job(name, model_of(name, options), batch_of(name, options), options.device, options.compiled, options.mode)
    draw(job)
    return job


def measure_model(name: str, options: Options, left_out: list[str]) -> list[Warm]:
    """Every system of one model, warmed up, timed in turns and profiled; those that could not be had are left out."""
    job = job_of(name, options)
    steps = options.parity or (30 if options.gpu else 3)
    memory = torch.cuda.get_device_properties(options.device).total_memory if options.gpu else 0
    ours = warm_up(OURS, job, steps, left_out)
    if ours is None:
        tell(
            f"ViT-{name}: nothing to compare with, so no peer is measured; without torch.compile: --compile off",
            left_out,
        )
        return []
    found = [ours]
    for group in groups(names_of(options.systems), job.model, memory):
        peers = [one for other in group if (one := warm_up(other, job, steps, left_out))]
        try:
            take_turns([ours, *peers], job, options, left_out)
            found += peers
        except (RuntimeError, ArithmeticError, ValueError) as error:  # memory, or a step that is no step
            tell(f"ViT-{name}, {', '.join(one.name for one in (ours, *peers))}: {first_line(error)}", left_out)
        for one in peers:
            one.system.close()
    ours.system.close()
    return found if ours.rates else []


def take_turns(systems: list[Warm], job: Job, options: Options, left_out: list[str]) -> None:
    """Rounds in which each runs for about a second; then one step of each under the profiler."""
    counts = {one.name: options.steps or calls_that_last(one.step, job.device) for one in systems}
    graphs = _graphs_compiled()

    def rate(one: Warm) -> float:
        return job.batch / seconds_a_call(one.step, counts[one.name], job.device)

    product, flops = large_product(job.device)
    many = options.steps or calls_that_last(product, job.device)
    turns: dict[str, Callable[[], float]] = {one.name: partial(rate, one) for one in systems}
    turns[PRODUCT] = lambda: flops / seconds_a_call(product, many, job.device) / 1e12
    found = interleaved(turns, options.repeats)
    again = _graphs_compiled() != graphs
    for one in systems:
        one.rates += found[one.name]
        one.own_rates += found[OURS]
        one.matmul += found[PRODUCT]
        one.kernels = one.kernels or kernels(one.step, job.device, left_out)
        last = float(one.step())
        if not np.isfinite(last):
            one.remarks.append("loss is no longer finite")
        if again:
            one.remarks.append("something compiled again meanwhile")


def _graphs_compiled() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


# Rows -----------------------------------------------------------------------------------------------------------------


def rows_of(job_name: str, found: Sequence[Warm], options: Options) -> list[dict[str, Any]]:
    """A row a system; ratios are to the fastest tuned peer, through plainvit's speed in the same rounds."""
    links = {one.name: statistics.median(one.rates) / statistics.median(one.own_rates) for one in found}
    tuned = {name: link for name, link in links.items() if name.endswith(", tuned")}
    best = max(tuned, key=lambda name: tuned[name]) if tuned else None
    model = model_of(job_name, options)
    rows: list[dict[str, Any]] = []
    for one in found:
        rate, matmul = statistics.median(one.rates), statistics.median(one.matmul)
        off = difference(one.losses, found[0].losses)
        own = VARIANTS[one.name].parity if one.name in VARIANTS else 0.0
        limit = own or PARITY["cuda" if options.gpu else "cpu"]
        remarks = [*one.remarks, *([f"losses differ by more than {limit:g}"] if not off <= limit else [])]
        row: dict[str, Any] = {"model": f"ViT-{job_name}", "system": one.name, "batch": batch_of(job_name, options)}
        row |= {"images_per_second": rate, "least": min(one.rates), "most": max(one.rates), "repeats": len(one.rates)}
        row |= {"rounds": one.rates, "step_ms": 1000 * row["batch"] / rate, "relative_to_plainvit": links[one.name]}
        row |= {"ratio": links[one.name] / links[best] if best else None, "best_peer": one.name == best}
        row |= {"matmul": matmul}
        row |= {"percent": percent(rate, step_flops(model), matmul), "executed": percent(rate, one.executed, matmul)}
        row |= {"peak_gib": _gib(one.peak), "resident_gib": _gib(one.resident), "first_s": one.first_s}
        row |= {"device_ms": busy_ms(one.kernels), "attention": attention_of(one.kernels)}
        row |= {"losses": one.losses, "loss_difference": off, "loss_limit": limit, "remarks": remarks}
        rows.append(row)
    return rows


def _gib(count: int | None) -> float | None:
    return None if count is None else count / GIB


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The greatest relative difference of two runs' losses, step by step; NaN where one is not finite."""
    apart = [abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True)]
    return float(np.max(apart))


def attention_of(found: Sequence[Kernel]) -> list[str]:
    """The attention kernels that really ran."""
    return sorted({short_name(kernel.name) for kernel in found if kernel.kind == "attention"})


def show_rows(rows: Sequence[dict[str, Any]], title: str) -> None:
    speed = ("img/s", "spread", "ratio", "matmul", "%", "executed", "GiB", "step ms", "device", "first s", "loss")
    shown: list[list[str]] = []
    for row in rows:
        numbers = [f"{row['images_per_second']:,.1f}", f"{row['least']:,.1f}-{row['most']:,.1f}"]
        numbers += [f"{row['ratio']:.3f}{'*' if row['best_peer'] else ''}" if row["ratio"] else "-"]
        numbers += [f"{row['matmul']:,.3g}", f"{row['percent']:.1f}", f"{row['executed']:.1f}"]
        numbers += [number(row["peak_gib"], ".2f")]
        numbers += [f"{row['step_ms']:,.2f}", number(row["device_ms"], ",.2f"), f"{row['first_s']:.0f}"]
        words = ", ".join(row["attention"]) or "-"
        shown.append(
            [f"{row['model']} x{row['batch']}", row["system"], *numbers, f"{row['loss_difference']:.1e}", words]
        )
    left = ("model", "system", "attention kernels")
    show(title, (*left[:2], *speed, *left[2:]), shown, left=left)
    for row in rows:
        for remark in row["remarks"]:
            print(f"note: {row['model']}, {row['system']}: {remark}")


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def measure(options: Options, with_kernels: bool = False) -> dict[str, Any]:
    """All of it, as the JSON has it."""
    left_out: list[str] = []
    if not options.gpu:
        tell("bf16, kernels and memory: no GPU, so fp32 steps alone; the rates say nothing of a GPU's", left_out)
    if not options.compiled:
        tell("compilation: torch.compile is off, so plainvit is eager and tuned means fused AdamW alone", left_out)
    top = ceilings(options.device, left_out)
    rows: list[dict[str, Any]] = []
    tables: list[tuple[str, list[Kernel]]] = []
    for name in options.models:
        try:
            found = measure_model(name, options, left_out)
        except torch.OutOfMemoryError as error:  # already by the images
            tell(f"ViT-{name}, {batch_of(name, options)} images: {first_line(error)}", left_out)
            continue
        rows += rows_of(name, found, options) if found else []
        tables += [(f"ViT-{name}, plainvit: one step", found[0].kernels)] if found and found[0].kernels else []
        del found
        torch.compiler.reset()  # the limit of compilations of one function is for one model
        free_memory(options.gpu)
    show_rows(rows, title_of(options))
    print(ceiling_words(top, "bf16" if options.gpu else "fp32"))
    if with_kernels:
        for title, some in tables:
            kernel_table(title, some)
        if not tables:
            tell("kernels: none were seen", left_out)
    listed = {title: [vars(kernel) for kernel in some] for title, some in tables} if with_kernels else None
    return {"ceilings": top, "rows": rows, "left_out": left_out, "kernels": listed}


def title_of(options: Options) -> str:
    where = torch.cuda.get_device_name(options.device) if options.gpu else "CPU"
    return f"training steps at {options.image_size} px, {where}"


def ceiling_words(top: Mapping[str, float | None], kind: str) -> str:
    matmul, fp8, copy = (number(top[name], ",.3g") for name in ("matmul", "fp8", "copy"))
    ceiling = f"ceilings: matmul {kind} {matmul} and fp8 {fp8} TFLOP/s, copy {copy} TB/s"
    return f"{ceiling}, before all; ratio: to the fastest tuned peer (*); loss: most, relative, off plainvit's"


def parser_of(description: str) -> argparse.ArgumentParser:
    """The words that the training benchmarks share."""
    parser = make_parser(description, repeats=5)
    parser.add_argument("--models", default="", help=f"such as B/16,L/16; all: {','.join(MODELS)}")
    parser.add_argument("--systems", default="", help=f"of: {'; '.join((*VARIANTS, *PEERS))}; apart by ;")
    parser.add_argument("--batch", type=int, default=0, help="images a step; 0: by the model, 2 on a CPU")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=0, help="in a repeat; 0: about a second")
    parser.add_argument("--parity", type=int, default=0, help="first steps, losses compared; 0: 30, or 3 on a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="auto: on a GPU")
    parser.add_argument("--mode", choices=MODES, default="default", help="torch.compile's, of tuned peers")
    parser.add_argument("--short", action="store_true", help="plainvit and timm, B/16")
    return parser


def options_of(words: argparse.Namespace) -> Options:
    """Checked: what is not known is a ValueError with one line."""
    device = choose_device(words.device)
    models = tuple(words.models.split(",")) if words.models else ("B/16",) if words.short else tuple(MODELS)
    for name in models:
        configure(f"ViT-{name}", image_size=words.image_size)
    systems = tuple(name.strip() for name in words.systems.split(";")) if words.systems else ()
    systems = systems or ((OURS, "timm") if words.short else (OURS, *PEERS))
    for name in systems:
        if name not in VARIANTS and name not in PEERS:
            raise ValueError(f"system {name!r} is unknown: one of {'; '.join((*VARIANTS, *PEERS))}")
    for name in ("batch", "steps", "parity"):
        if getattr(words, name) < 0:
            raise ValueError(f"--{name} must be at least 0, got {getattr(words, name)}")
    if words.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {words.repeats}")
    compiled = words.compile == "on" or (words.compile == "auto" and device.startswith("cuda"))
    counts = {name: getattr(words, name) for name in ("batch", "image_size", "repeats", "steps", "parity")}
    return Options(device, models, systems, compiled=compiled, mode=words.mode, **counts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--kernels", action="store_true", help="a table of the kernels of plainvit's step")
    words = parser.parse_args(arguments)
    try:
        options = options_of(words)
    except ValueError as error:
        parser.error(str(error))
    found = measure(options, words.kernels)
    publish("bench.train", arguments, words.json, title="training steps", **found)


if __name__ == "__main__":
    main()
