"""What every benchmark shares: interleaved repeats and their spread, ceilings, kernels, the machine, tables, JSON."""

import argparse
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from plainvit.config import Model
from plainvit.device import processor
from plainvit.disk import write_atomically
from plainvit.planning.cost import macs
from plainvit.runtime.folder import finite

GIB = 2**30
SIDE = 8192  # of the matrices that say what a GPU can do
Clock = Callable[[], float]
WIDTH = 150  # of the wide tables
# Words in the names of CUDA kernels, tried in this order; Inductor names its own after all that is fused into them
KINDS = {
    "pointwise": ("triton_poi_", "triton_red_", "triton_per_"),
    "attention": ("flash", "fmha", "attention", "attn", "sdpa"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "gemm": ("gemm", "gemv", "nvjet", "cutlass", "cublas", "xmma", "splitk", "triton_tem_", "scaled_mm"),
    "other": ("memcpy", "memset"),
}
IDLE = "idle"  # not a kernel's kind: the time between them
POINTWISE = ("elementwise", "norm", "reduce", "softmax", "gelu", "copy", "cat", "dropout", "index", "fill", "transpose")


# Repeats --------------------------------------------------------------------------------------------------------------


def interleaved(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each run once per round, so that a busy machine is busy for all of them."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats):
        for name, run in runs.items():
            found[name].append(run())
            print(f"  round {number + 1}/{repeats}  {name}: {found[name][-1]:,.1f}", file=sys.stderr)
    return found


def summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "repeats": len(values)}


def settle(device: str) -> None:
    """Until the device has nothing left to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds_a_call(run: Callable[[], object], count: int, device: str, clock: Clock = time.perf_counter) -> float:
    """Of so many calls one after the other, the last one's work included."""
    settle(device)
    started = clock()
    for _ in range(count):
        run()
    settle(device)
    return (clock() - started) / count


def calls_that_last(run: Callable[[], object], device: str, wanted: float = 1.0) -> int:
    """How many calls take about so many seconds, by the median of three."""
    took = statistics.median(seconds_a_call(run, 1, device) for _ in range(3))
    return max(1, math.ceil(wanted / max(took, 1e-6)))


def event_seconds(run: Callable[[], object], count: int, device: str = "cuda") -> float:
    """Seconds of a call among others, by CUDA events: launches that the device waits for count."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    settle(device)
    start.record()
    for _ in range(count):
        run()
    end.record()
    settle(device)
    return start.elapsed_time(end) / count / 1000


# Ceilings -------------------------------------------------------------------------------------------------------------


def ceilings(device: str, left_out: list[str], clock: Clock = time.perf_counter) -> dict[str, float | None]:
    """TFLOP/s of a large product in the precision of the rows and in fp8, TB/s of a copy: what this device can do."""
    gpu = device.startswith("cuda")
    product, flops = large_product(device)
    multiplied = _typical_seconds(product, device, clock)
    return {
        "matmul": flops / multiplied / 1e12,
        "fp8": _fp8_ceiling(device, left_out) if gpu else None,
        "copy": copy_rate(device, clock),
    }


def copy_rate(device: str, clock: Clock = time.perf_counter) -> float:
    """TB/s read and written by a large copy."""
    source = torch.empty(GIB if device.startswith("cuda") else GIB // 32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _typical_seconds(lambda: target.copy_(source), device, clock) / 1e12


def large_product(device: str) -> tuple[Callable[[], object], float]:
    """A product that keeps the device busy, in the precision of the rows, and its FLOPs."""
    side, dtype = (SIDE, torch.bfloat16) if device.startswith("cuda") else (768, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2 * side**3


def _fp8_ceiling(device: str, left_out: list[str]) -> float | None:
    if torch.cuda.get_device_capability(device) < (8, 9):
        tell("fp8 matmul: this GPU has none (compute capability 8.9 or newer has)", left_out)
        return None
    try:
        a, b = (torch.randn(SIDE, SIDE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        how: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        product = _typical_seconds(lambda: torch._scaled_mm(a, b.t(), **how), device)  # pyright: ignore[reportPrivateImportUsage]
    except (RuntimeError, AttributeError, TypeError) as error:
        tell(f"fp8 matmul: {first_line(error)}", left_out)
        return None
    return 2 * SIDE**3 / product / 1e12


def _typical_seconds(run: Callable[[], object], device: str, clock: Clock = time.perf_counter) -> float:
    """The median on a GPU, as it holds its clock under load; the least on a CPU, whose cores others may take."""
    gpu = device.startswith("cuda")
    seconds_a_call(run, 3, device)
    took = [seconds_a_call(run, 10 if gpu else 1, device, clock) for _ in range(7)]
    return statistics.median(took) if gpu else min(took)


def step_flops(model: Model) -> float:
    """Nominal FLOPs of one image in a training step: 2 a multiply-add, and a backward pass of twice the forward."""
    return 3 * 2 * macs(model)


def percent(images_per_second: float, flops: float, matmul: float) -> float:
    """FLOPs an image at that rate, as a share of a matmul rate in TFLOP/s."""
    return 100 * images_per_second * flops / (matmul * 1e12)


# Kernels --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One CUDA kernel of a profiled call."""

    name: str
    kind: str
    ms: float
    calls: int


def kernels(run: Callable[[], object], device: str, left_out: list[str]) -> list[Kernel]:
    """What one call really ran on the GPU, the longest first, and last the time between them.

    None on a CPU, or where the profiler sees nothing.
    """
    if not device.startswith("cuda"):
        return []
    from torch.profiler import ProfilerActivity, profile

    try:
        settle(device)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            settle(device)
        events = [event for event in seen.key_averages() if event.self_device_time_total > 0 and _is_kernel(event)]
        times = [event.time_range for event in seen.events() or () if event.device_time_total > 0 and _is_kernel(event)]
    except RuntimeError as error:
        tell(f"kernels: the profiler does not work here: {first_line(error)}", left_out)
        return []
    if not events:
        tell("kernels: the profiler saw none", left_out)
    found = [Kernel(e.key, kind_of(e.key), e.self_device_time_total / 1000, e.count) for e in events]
    waited = Kernel("between kernels", IDLE, idle([(time.start, time.end) for time in times]) / 1000, len(times))
    return [*sorted(found, key=lambda kernel: -kernel.ms), *([waited] if times else [])]


def idle(times: Sequence[tuple[float, float]]) -> float:
    """From the first start to the last end, the time that none of these takes."""
    total, end = 0.0, min((start for start, _ in times), default=0.0)
    for start, stop in sorted(times):
        total, end = total + max(start - end, 0.0), max(end, stop)
    return total


def busy_ms(found: Sequence[Kernel]) -> float | None:
    return sum(kernel.ms for kernel in found if kernel.kind != IDLE) or None


def _is_kernel(event: Any) -> bool:
    """Not a region that somebody marked, whose time is that of the kernels in it."""
    marked = event.key.startswith(("Optimizer.", "Torch-Compiled", "## Call", "ProfilerStep", "CompiledFunction"))
    return not marked and not getattr(event, "is_user_annotation", False)


def kind_of(kernel: str) -> str:
    """gemm, attention, pointwise, optimizer or other, by the kernel's name."""
    name = kernel.lower()
    known = (kind for kind, words in KINDS.items() if any(word in name for word in words))
    return next(known, "pointwise" if any(word in name for word in POINTWISE) else "other")


def short_name(kernel: str) -> str:
    """Without its return type, arguments, template and namespaces; Inductor's without what is fused into them."""
    name = re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0].strip() or kernel
    return name.rpartition("::")[2][:48]


def kernel_table(title: str, found: Sequence[Kernel], most: int = 12) -> None:
    """The longest kernels, and the whole by kind."""
    total, longest = busy_ms(found) or 1.0, [kernel for kernel in found if kernel.kind != IDLE][:most]
    rows = [[short_name(k.name), k.kind, k.calls, f"{k.ms:.2f}", f"{k.ms / total:.1%}"] for k in longest]
    for kind in ("gemm", "attention", "pointwise", "optimizer", "other", IDLE):
        some = [kernel for kernel in found if kernel.kind == kind]
        took = sum(kernel.ms for kernel in some)
        rows.append(["all of a kind", kind, sum(k.calls for k in some), f"{took:.2f}", f"{took / total:.1%}"])
    show(title, ("kernel", "kind", "calls", "ms", "share"), rows, left=("kernel", "kind"))


# The machine ----------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the numbers were made on, and from which commit."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    gpu = torch.cuda.is_available()
    return {
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "torchvision", "timm", "transformers", "triton")},
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "driver": _driver() if gpu else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The kernel's module says it, without a tool that may be missing."""
    found = re.search(r"(\d+\.\d+(\.\d+)?)\s", " ".join(_lines("/proc/driver/nvidia/version")[:1]))
    return found[1] if found else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def tell(words: str, left_out: list[str]) -> None:
    """One line, now and in the JSON, on what is not measured."""
    if words not in left_out:
        left_out.append(words)
        print(f"left out: {words}", file=sys.stderr, flush=True)


# The command ----------------------------------------------------------------------------------------------------------


def make_parser(doc: str | None, repeats: int = 0) -> argparse.ArgumentParser:
    """The docstring of a benchmark as its help, and the flags that all have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats, help="rounds, each of which times every system")
    parser.add_argument("--json", type=Path, help="write the rows, the command and the machine here")
    return parser


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], left: Sequence[str] = ()) -> None:
    """A table of words and numbers; columns in `left` are words."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    Console(width=WIDTH, highlight=False).print(table, markup=False)


def report(module: str, title: str, rows: list[dict[str, Any]], path: Path | None) -> None:
    """A table with one row a measurement (name, median, spread, and limits or ratios), and the same as JSON."""
    shown = [
        (
            *(row["what"], f"{row['median']:,.2f}"),
            f"{row['least']:,.2f}-{row['most']:,.2f}" if row.get("repeats", 1) > 1 else "",
            *(row["unit"], row.get("remark", "")),
        )
        for row in rows
    ]
    show(title, ("what", "median", "spread", "unit", "remark"), shown, left=("what", "unit", "remark"))
    publish(module, None, path, title=title, rows=rows)


def publish(module: str, arguments: Sequence[str] | None, path: Path | None, **found: Any) -> None:
    """JSON, where a path is given: the rows with the machine and the command; the path of the JSON is no part of it."""
    if path is None:
        return
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    write_json(path, {"command": shlex.join(["python", "-m", module, *words]), "machine": machine(), **found})


def write_json(path: Path, value: dict[str, Any], *, quiet: bool = False) -> None:
    text = json.dumps(finite(value), indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    if not quiet:
        print(f"written: {path}")
