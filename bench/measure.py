"""Tools shared by all benchmarks: interleaved timing, peak rates, CUDA kernels, tables and JSON."""

import argparse
import json
import math
import os
import platform
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
from plainvit.runtime.folder import replace_non_finite

GIB = 2**30
WIDTH = 150  # characters of a table
IDLE = "idle"  # the time between kernels
# Parts of kernel names, in order of priority. Inductor's prefixes come first: the rest of its names is fused operators
KERNEL_KINDS = {
    "pointwise": ("triton_poi_", "triton_red_", "triton_per_"),
    "attention": ("flash", "fmha", "attention", "attn", "sdpa"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "gemm": ("gemm", "gemv", "nvjet", "cutlass", "cublas", "xmma", "splitk", "triton_tem_", "scaled_mm"),
    "other": ("memcpy", "memset"),
}
POINTWISE = ("elementwise", "norm", "reduce", "softmax", "gelu", "copy", "cat", "dropout", "index", "fill", "transpose")


# Timing ---------------------------------------------------------------------------------------------------------------


def run_interleaved(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Calls each run once per round, so that other load on the machine affects all of them."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats):
        for name, run in runs.items():
            results[name].append(run())
            print(f"  round {number + 1}/{repeats}  {name}: {results[name][-1]:,.1f}", file=sys.stderr)
    return results


def summarize(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def time_calls(
    run: Callable[[], object], count: int, device: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds per call of `count` calls in a row."""
    synchronize(device)
    started = clock()
    for _ in range(count):
        run()
    synchronize(device)
    return (clock() - started) / count


def count_calls(run: Callable[[], object], device: str, seconds: float = 1.0) -> int:
    """How many calls take about so many seconds."""
    per_call = statistics.median(time_calls(run, 1, device) for _ in range(3))
    return max(1, math.ceil(seconds / max(per_call, 1e-6)))


def time_cuda_calls(run: Callable[[], object], count: int, device: str = "cuda") -> float:
    """Seconds per call by CUDA events: includes the time in which the GPU waits for launches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    start.record()
    for _ in range(count):
        run()
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / count / 1000


# Peak rates -----------------------------------------------------------------------------------------------------------


def measure_peak_rates(device: str) -> dict[str, float]:
    """TFLOP/s of a large matmul (bf16 on a GPU, fp32 on a CPU) and TB/s of a large copy."""
    matmul, flops = make_large_matmul(device)
    source = torch.empty(GIB if device.startswith("cuda") else GIB // 32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "matmul": flops / _time_peak(matmul, device) / 1e12,
        "copy": 2 * source.numel() / _time_peak(lambda: target.copy_(source), device) / 1e12,  # reads and writes
    }


def make_large_matmul(device: str) -> tuple[Callable[[], object], float]:
    """A matmul large enough to reach the peak rate, and its FLOPs."""
    side, dtype = (8192, torch.bfloat16) if device.startswith("cuda") else (768, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2 * side**3


def _time_peak(run: Callable[[], object], device: str) -> float:
    """Seconds per call: the median on a GPU; the minimum on a CPU, whose cores other processes may use."""
    is_gpu = device.startswith("cuda")
    time_calls(run, 3, device)
    times = [time_calls(run, 10 if is_gpu else 1, device) for _ in range(7)]
    return statistics.median(times) if is_gpu else min(times)


def count_training_flops(model: Model) -> float:
    """FLOPs of one image in a training step; the backward pass counts as two forward passes."""
    return 3 * 2 * macs(model)


def compute_utilization(images_per_second: float, flops_per_image: float, matmul: float) -> float:
    """Percent of a matmul rate in TFLOP/s that a speed reaches."""
    return 100 * images_per_second * flops_per_image / (matmul * 1e12)


# Kernels --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One CUDA kernel of a profiled call."""

    name: str
    kind: str
    ms: float
    calls: int


def profile_kernels(run: Callable[[], object], device: str, skipped: list[str]) -> list[Kernel]:
    """The CUDA kernels of one call, longest first, then the idle time between them. Empty on a CPU."""
    if not device.startswith("cuda"):
        return []
    from torch.profiler import ProfilerActivity, profile

    try:
        synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            synchronize(device)
        events = [e for e in profiler.key_averages() if e.self_device_time_total > 0 and _is_kernel(e)]
        ranges = [e.time_range for e in profiler.events() or () if e.device_time_total > 0 and _is_kernel(e)]
    except RuntimeError as error:
        warn_skipped(f"kernels: the profiler does not work here: {first_line(error)}", skipped)
        return []
    if not events:
        warn_skipped("kernels: the profiler found none", skipped)
    kernels = [Kernel(e.key, classify_kernel(e.key), e.self_device_time_total / 1000, e.count) for e in events]
    idle = Kernel("between kernels", IDLE, sum_idle_time([(r.start, r.end) for r in ranges]) / 1000, len(ranges))
    return [*sorted(kernels, key=lambda kernel: -kernel.ms), *([idle] if ranges else [])]


def sum_idle_time(ranges: Sequence[tuple[float, float]]) -> float:
    """The time between the first start and the last end that no range covers."""
    total, end = 0.0, min((start for start, _ in ranges), default=0.0)
    for start, stop in sorted(ranges):
        total, end = total + max(start - end, 0.0), max(end, stop)
    return total


def sum_kernel_ms(kernels: Sequence[Kernel]) -> float | None:
    return sum(kernel.ms for kernel in kernels if kernel.kind != IDLE) or None


def _is_kernel(event: Any) -> bool:
    """Whether a profiler event is a kernel, not an annotated region that contains kernels."""
    is_region = event.key.startswith(("Optimizer.", "Torch-Compiled", "## Call", "ProfilerStep", "CompiledFunction"))
    return not is_region and not getattr(event, "is_user_annotation", False)


def classify_kernel(kernel: str) -> str:
    """gemm, attention, pointwise, optimizer or other, by the kernel's name."""
    name = kernel.lower()
    matches = (kind for kind, parts in KERNEL_KINDS.items() if any(part in name for part in parts))
    return next(matches, "pointwise" if any(part in name for part in POINTWISE) else "other")


def print_kernels(title: str, kernels: Sequence[Mapping[str, Any]]) -> None:
    """Prints the 12 longest kernels and the sum of each kind."""
    total = sum(kernel["ms"] for kernel in kernels) or 1.0
    rows = [[kernel["name"][:80], kernel["kind"], kernel["calls"], kernel["ms"]] for kernel in kernels[:12]]
    for kind in dict.fromkeys(kernel["kind"] for kernel in kernels):
        of_kind = [kernel for kernel in kernels if kernel["kind"] == kind]
        rows.append(["all", kind, sum(k["calls"] for k in of_kind), sum(k["ms"] for k in of_kind)])
    lines = [[*row[:3], f"{row[3]:.2f}", f"{row[3] / total:.1%}"] for row in rows]
    print_table(title, ("kernel", "kind", "calls", "ms", "of the step"), lines, left=("kernel", "kind"))


# Environment ----------------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """Commit, versions and hardware of a measurement."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    has_gpu = torch.cuda.is_available()
    return {
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        **{name: _find_version(name) for name in ("torchvision", "timm", "transformers", "triton")},
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "cuda": torch.version.cuda if has_gpu else None,
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
    }


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def warn_skipped(reason: str, skipped: list[str]) -> None:
    """Prints what is not measured and why, and keeps it for the JSON."""
    if reason not in skipped:
        skipped.append(reason)
        print(f"skipped: {reason}", file=sys.stderr, flush=True)


# Command line, tables and JSON ----------------------------------------------------------------------------------------


def make_parser(doc: str | None, *, repeats: int = 0, data: str = "") -> argparse.ArgumentParser:
    """A parser with the docstring as help and the common flags; `data` names the contents of --data."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", type=Path, required=True, help=f"Folder with {data}")
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats, help="Rounds; each measures every system once")
    parser.add_argument("--json", type=Path, help="Write results, command and machine to this file")
    return parser


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], left: Sequence[str] = ()) -> None:
    """Prints a table; the columns in `left` are aligned left, the others right."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    Console(width=WIDTH, highlight=False).print(table, markup=False)


def report(
    module: str,
    arguments: Sequence[str] | None,
    path: Path | None,
    title: str,
    rows: list[dict[str, Any]],
    **content: Any,
) -> None:
    """Prints rows of name, median, min, max, unit and perhaps a remark, and writes them with the content as JSON."""
    lines = []
    for row in rows:
        spread = f"{row['min']:,.2f}-{row['max']:,.2f}" if row["repeats"] > 1 else ""
        lines.append([row["name"], f"{row['median']:,.2f}", spread, row["unit"], row.get("remark", "")])
    print_table(title, ("name", "median", "spread", "unit", "remark"), lines, left=("name", "unit", "remark"))
    write_results(module, arguments, path, title=title, rows=rows, **content)


def write_results(module: str, arguments: Sequence[str] | None, path: Path | None, **content: Any) -> None:
    """Writes the content with the machine and the command, if a path is given. The command leaves out --json."""
    if path is None:
        return
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--json" in words:
        position = words.index("--json")
        del words[position : position + 2]
    command = shlex.join(["python", "-m", module, *words])
    write_json(path, {"command": command, "machine": describe_machine(), **content})


def write_json(path: Path, value: dict[str, Any], *, quiet: bool = False) -> None:
    text = json.dumps(replace_non_finite(value), indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    if not quiet:
        print(f"written: {path}")
