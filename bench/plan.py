"""The plan beside real training steps: time and memory of plainvit's own step, measured against `plainvit plan`.

    python -m bench.plan --json FILE          six rows of B/16, L/16 and H/14, about five minutes on an H200
    python -m bench.plan --fit FILE           the shares for plainvit/planning/devices.py that fit those rows best

The step is the loop's: its gradients, its optimiser, compiled, under bf16 autocast, on random uint8 images that are
already on the device. Without a GPU a tiny model runs instead, so that the script itself can be tried.
"""

import argparse
import gc
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from plainvit import device as _device

_device.prepare()  # before torch is loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench.measure import IDLE, ceilings, kernels, machine  # noqa: E402
from bench.measure import kind_of as kind_of_kernel  # noqa: E402
from bench.steps import OurStep, forever  # noqa: E402
from plainvit.config import Config, Model, Optim, ViTConfig, from_json, to_json  # noqa: E402
from plainvit.names import configure  # noqa: E402
from plainvit.planning.cost import is_small  # noqa: E402
from plainvit.planning.devices import DEVICES, Device  # noqa: E402
from plainvit.planning.memory import GIB, Step, memory  # noqa: E402
from plainvit.planning.step_time import ideal, seconds  # noqa: E402

# Those that say most come first: a time that runs out takes the last
ROWS = (
    *(("ViT-B/16", 256), ("ViT-L/16", 256), ("ViT-H/14", 128)),
    *(("ViT-B/16", 128), ("ViT-L/16", 64), ("ViT-H/14", 32)),
)
TINY = ViTConfig(width=32, depth=2, heads=2, mlp_dim=64, patch=(8, 8), image_size=(32, 32), classes=10)
WARM, TIMED = 5, 20
# A part of the plan -> its share of a ceiling
PARTS = {
    "products": "gemm",
    "attention": "short_attention",
    "pointwise": "pointwise",
    "update": "update",
}  # -> the share
WORDS = {"gemm": "products", "attention": "attention", "optimizer": "update"}  # what is none of these is pointwise


class OutOfTimeError(Exception):
    """A row took longer than it may."""


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(name: str, model: Model, batch: int, device: torch.device) -> dict[str, Any]:
    """One row: the median of the timed steps, the peak of memory, and where the time of one step went."""
    images = torch.randint(0, 256, (batch, model.channels, *model.image_size), dtype=torch.uint8, device=device)
    labels = torch.arange(batch, device=device) % model.classes
    config = Config(model=model, batch=batch, optim=Optim(lr=1e-4, schedule="constant"), device=str(device))
    step = OurStep(config, forever([(images, labels)]), model.classes)
    started = time.perf_counter()
    losses = [step()]
    compiling = time.perf_counter() - started
    losses += [step() for _ in range(WARM)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(TIMED):
        started = time.perf_counter()  # each step waits once, for its loss: the steady state of the loop
        losses.append(step())
        times.append(time.perf_counter() - started)
    row = {"what": f"{name}, batch {batch}", "model": to_json(model), "batch": batch, "compiling_s": compiling}
    row |= {"step_s": statistics.median(times), "least_s": min(times), "most_s": max(times), "loss": losses[-1]}
    row["images_per_second"] = batch / row["step_s"]
    if device.type == "cuda":
        row |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        row["parts_s"] = parts(step, str(device))
    step.close()
    return row


def parts(step: OurStep, device: str) -> dict[str, float] | None:
    """Seconds of a step's CUDA kernels by the plan's parts; None where the profiler sees none."""
    found = dict.fromkeys(PARTS, 0.0)
    for kernel in kernels(step, device, []):
        if kernel.kind != IDLE:
            found[kind_of(kernel.name)] += kernel.ms / 1000
    return found if sum(found.values()) else None


def kind_of(kernel: str) -> str:
    """A part of the plan."""
    return WORDS.get(kind_of_kernel(kernel), "pointwise")


@contextmanager
def at_most(limit: float) -> Iterator[None]:
    """Raises when the time is out, in the middle of a compilation too."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    if limit <= 0:
        raise OutOfTimeError
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measured(budget: float) -> Iterator[dict[str, Any]]:
    """The rows that the time allows, one by one; one that fails says why, and the others go on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [(name, configure(name), batch) for name, batch in ROWS]
    if device.type == "cpu":
        print("no GPU: a tiny model stands in, to try the script", file=sys.stderr)
        rows = [("tiny ViT", TINY, 16)]
    end, a_layer = time.monotonic() + budget, 0.0
    for name, model, batch in rows:
        what, left, layers = f"{name}, batch {batch}", end - time.monotonic(), getattr(model, "depth", 1)
        print(f"  {what}: {left:.0f} s left", file=sys.stderr, flush=True)
        try:
            if left < 1.2 * a_layer * layers:  # the backward pass is compiled in a thread that no signal stops
                raise OutOfTimeError
            with at_most(left):
                row = measure(name, model, batch, device)
            a_layer = max(a_layer, row["compiling_s"] / layers)
        except (OutOfTimeError, RuntimeError) as error:
            why = "no time was left" if isinstance(error, OutOfTimeError) else str(error).splitlines()[0]
            row = {"what": what, "left_out": why}
        yield row
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


# Beside the plan ------------------------------------------------------------------------------------------------------


def device_name(given: str) -> str:
    """Of the table, by what the GPU calls itself."""
    if given or not torch.cuda.is_available():
        return given
    own = torch.cuda.get_device_name().lower()
    return next((name for name in DEVICES if name.split("-")[0] in own), "")


def planned(row: dict[str, Any], device: Device) -> dict[str, float]:
    """The same step by the plan, and what it says of the memory."""
    one = step_of(row)
    took = sum(seconds(one, device).values())
    return {"step_s": took, "images_per_second": one.images / took, "allocated": memory(one, device.kept)["total"]}


def step_of(row: dict[str, Any]) -> Step:
    """With the loop's shortcuts, as it was measured."""
    model = from_json(row["model"])
    return Step(model=model, images=row["batch"], stream=2, shortcuts=True, graphs=is_small(model, row["batch"]))


def show(rows: Sequence[dict[str, Any]], name: str) -> None:
    table = Table(title="the plan beside real steps", box=None, pad_edge=False, header_style="bold")
    for title in ("step", "ms", "spread", "images/s", "planned", "ratio", "GiB", "planned", "ratio", "reserved"):
        table.add_column(title, justify="left" if title == "step" else "right", no_wrap=True)
    for row in rows:
        if "left_out" in row:
            table.add_row(row["what"], f"left out: {row['left_out']}", style="dim")
            continue
        plan = planned(row, DEVICES[name]) if name else None
        rate, used = row["images_per_second"], row.get("allocated")
        table.add_row(
            row["what"],
            f"{1000 * row['step_s']:,.1f}",
            f"{1000 * row['least_s']:,.1f}-{1000 * row['most_s']:,.1f}",
            f"{rate:,.0f}",
            f"{plan['images_per_second']:,.0f}" if plan else "-",
            f"{rate / plan['images_per_second']:.3f}" if plan else "-",
            f"{used / GIB:.1f}" if used else "-",
            f"{plan['allocated'] / GIB:.1f}" if plan else "-",
            f"{used / plan['allocated']:.3f}" if used and plan else "-",
            f"{row['reserved'] / GIB:.1f}" if used else "-",
        )
    Console(width=120).print(table)


# Fitting --------------------------------------------------------------------------------------------------------------


def fit(rows: Sequence[dict[str, Any]], device: Device) -> dict[str, float]:
    """The shares that make the relative errors of steps and of their parts least, by least squares.

    Time is linear in 1 / share. Parts are known by themselves where the profiler saw them; where not, the sizes are too
    alike to tell all shares apart, so each is also held, weakly, to what it is now. `kept` is fitted on memory alone.
    """
    rows = [row for row in rows if "left_out" not in row and "allocated" in row]
    if not rows:
        raise ValueError("no row of this file was measured on a GPU")
    names = list(PARTS)
    now = np.array([1 / getattr(device, PARTS[name]) for name in names])
    lines: list[np.ndarray] = []
    for row in rows:
        work = ideal(step_of(row), device)
        each = np.array([work[name] for name in names])
        lines.append(each / row["step_s"])
        parts = row.get("parts_s") or {}
        lines += [np.eye(4)[at] * each[at] / parts[n] for at, n in enumerate(names) if parts.get(n)]
    weak = 0.05 * np.diag(1 / now)
    matrix, wanted = np.vstack([*lines, weak]), np.concatenate([np.ones(len(lines)), np.full(len(names), 0.05)])
    found = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    found = np.where(found > 0, found, now)
    shares = {PARTS[name]: float(1 / value) for name, value in zip(names, found, strict=True)}
    return shares | {"kept": _fit_memory(rows)}


def _fit_memory(rows: Sequence[dict[str, Any]]) -> float:
    """What is kept of the counted activations: measured less what stands anyway, over the count."""
    ratios: list[float] = []
    for row in rows:
        counted = memory(step_of(row))
        moving = counted["activations"] + counted["working"]
        ratios.append((row["allocated"] - counted["total"] + moving) / moving)
    return statistics.fmean(ratios)


def show_fit(path: Path, name: str) -> None:
    """New shares beside the old, and how well each fits."""
    saved = json.loads(path.read_text())
    name = name or saved.get("on", "")
    if name not in DEVICES:
        raise ValueError(f"{path} does not say which device of the table it is of: give --on {' or '.join(DEVICES)}")
    device = DEVICES[name]
    shares = fit(saved["rows"], device)
    better = replace(device, **shares)
    print(f"for {name} in plainvit/planning/devices.py:")
    for word, value in shares.items():
        print(f"    {word}={value:.3f},  # now {getattr(device, word):.3f}")
    for word, value in (saved.get("ceilings") or {}).items():
        print(f"    # ceiling {word}: measured {value:.2f}, now {getattr(device, word):.2f}")
    for row in saved["rows"]:
        if "left_out" not in row:
            old, new = planned(row, device)["step_s"], planned(row, better)["step_s"]
            took = row["step_s"]
            print(
                f"{row['what']:24} measured {1000 * took:8.1f} ms   planned {old / took:.3f}   fitted {new / took:.3f}"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit the shares to the rows of such a file instead")
    parser.add_argument("--on", default="", help="device of the table; without, by the name of the GPU")
    parser.add_argument("--seconds", type=float, default=340, help="rows for which this leaves no time are left out")
    options = parser.parse_args(arguments)
    if options.on and options.on not in DEVICES:
        parser.error(f"--on is one of: {', '.join(DEVICES)}")
    if options.fit:
        try:
            show_fit(options.fit, options.on)
        except ValueError as error:
            parser.error(str(error))
        return
    name = device_name(options.on)
    top = ceilings("cuda", []) if torch.cuda.is_available() else {}
    top = {word: top[word] for word in ("matmul", "copy") if word in top}
    rows: list[dict[str, Any]] = []
    for row in measured(options.seconds):
        rows.append(row)
        if options.json:  # after each, so that none is lost
            saved = {"on": name, "machine": machine(), "rows": rows, "ceilings": top or None}
            options.json.write_text(json.dumps(saved, indent=2) + "\n")
    show(rows, name)
    if options.json:
        print(f"written: {options.json}")


if __name__ == "__main__":
    main()
