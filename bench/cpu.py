"""Inference on a CPU, side by side: plainvit eager and compiled, timm likewise, transformers and torchvision eager.

    python -m bench.cpu [--model B/16] [--batches 1,8] [--threads 2] [--json FILE]
    python -m bench.cpu --model Ti/16 --batches 1 --repeats 2 --seconds 0.1 --compile off       shows only that it runs

All have the same weights, in fp32, and are interleaved. Compiled: torch.compile with frozen weights (Inductor packs
them). bf16 rows come where the CPU computes in bf16 and plainvit.device's probe says that doing so does not kill the
process. "x timm" is to timm's eager model, "of best" to the fastest row. Where others use the same cores, --threads 1
--clock cpu counts the seconds that this process worked: rates are then those of one core that it has to itself.
"""

import argparse
import copy
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plainvit import device

device.prepare()  # before torch is loaded

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.infer import (  # noqa: E402
    Answer,
    Form,
    Job,
    measure_batch,
    our_compiled,
    our_predictor,
    peer_compiled,
    peer_shipped,
)
from bench.measure import ceilings, machine, percent, said, show, tell, write  # noqa: E402
from plainvit.config import ViTConfig  # noqa: E402
from plainvit.models.fast.inference import cpu_computes_bf16  # noqa: E402
from plainvit.names import configure  # noqa: E402
from plainvit.planning.cost import macs  # noqa: E402

FORMS: dict[str, Form] = {
    "plainvit, as shipped": our_predictor,
    "plainvit, compiled": our_compiled,
    "timm, as shipped": partial(peer_shipped, "timm"),
    "timm, compiled": partial(peer_compiled, "timm"),
    "transformers, as shipped": partial(peer_shipped, "transformers"),
    "torchvision, as shipped": partial(peer_shipped, "torchvision"),
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def in_bf16(make: Form) -> Form:
    """A compiled form with bf16 weights."""

    def made(job: Job) -> Answer:
        low = copy.copy(job)
        low.dtype = torch.bfloat16
        answer = make(low)

        def cast_first(images: Tensor) -> Tensor:
            return answer(images.to(torch.bfloat16) if images.is_floating_point() else images)

        return cast_first

    return made


def bf16_is_refused() -> str:
    """Why bf16 is not measured here; "" where it is."""
    if device.cpu_bf16_refused():
        return "bf16: it kills the process on this CPU"
    return "" if cpu_computes_bf16() else "bf16: this CPU does not compute in it"


def forms_of(compiled: bool, left_out: list[str]) -> dict[str, Form]:
    forms = {name: make for name, make in FORMS.items() if compiled or not name.endswith("compiled")}
    if not compiled:
        tell("the compiled forms: torch.compile is off (--compile on)", left_out)
        return forms
    refused = bf16_is_refused()
    if refused:
        tell(refused, left_out)
        return forms
    low = {f"{name} bf16": in_bf16(make) for name, make in FORMS.items() if name.endswith("compiled")}
    return forms | low


def measure(words: argparse.Namespace, batches: Sequence[int]) -> dict[str, Any]:
    left_out: list[str] = []
    model = configure(f"ViT-{words.model}", image_size=words.image_size, numerics="timm")
    assert isinstance(model, ViTConfig)
    torch.set_num_threads(words.threads)
    top = ceilings("cpu", left_out, CLOCKS[words.clock])
    job = Job(model, "cpu", torch.float32, CLOCKS[words.clock])
    rows: list[dict[str, Any]] = []
    for batch in batches:
        forms = forms_of(words.compile == "on", left_out)
        rows += beside(measure_batch(job, forms, batch, words.repeats, words.seconds, left_out))
    assert top["matmul"]
    for row in rows:
        row["percent"] = percent(row["images_per_second"], 2 * macs(model), top["matmul"])
    rate = f"{1000 * top['matmul']:,.0f} GFLOP/s"
    show_rows(f"ViT-{words.model}, {words.threads} threads, {words.clock} time, matmul fp32 {rate}", rows)
    found = {"machine": machine(), "ceilings": top, "model": f"ViT-{words.model}", "rows": rows, "left_out": left_out}
    return found | {device.ISA_VARIABLE.lower(): os.environ.get(device.ISA_VARIABLE)}


def beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row's speed over that of timm's eager model, and over the fastest."""
    eager = next((row["ms"] for row in rows if row["system"] == "timm, as shipped"), None)
    least = min((row["ms"] for row in rows), default=None)
    for row in rows:
        row["of_timm_eager"] = eager / row["ms"] if eager else None
        row["of_fastest"] = least / row["ms"] if least else None
    return rows


def show_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    columns = ("system", "batch", "img/s", "ms", "spread", "x timm", "of best", "%", "off", "first s")
    shown: list[list[Any]] = []
    for row in rows:
        ratio = f"{row['of_timm_eager']:.2f}" if row["of_timm_eager"] else "-"
        numbers = [f"{row['images_per_second']:,.2f}", f"{row['ms']:,.1f}"]
        numbers += [f"{row['least_ms']:,.1f}-{row['most_ms']:,.1f}", ratio, f"{row['of_fastest']:.2f}"]
        numbers += [f"{row['percent']:.0f}", f"{row['off']:.1e}", f"{row['first_s']:.0f}"]
        shown.append([row["system"].replace("as shipped", "eager"), row["batch"], *numbers])
    show(title, columns, shown, left=("system",))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="about, of a repeat")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: seconds of this process's cores")
    parser.add_argument("--compile", choices=("on", "off"), default="on")
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    words = parser.parse_args(arguments)
    try:
        configure(f"ViT-{words.model}", image_size=words.image_size)
        batches = [int(word) for word in words.batches.split(",")]
        if min(*batches, words.threads, words.repeats) < 1 or words.seconds <= 0:
            raise ValueError("--batches, --threads and --repeats are at least 1, --seconds above 0")
    except ValueError as error:
        parser.error(str(error))
    found = measure(words, batches)
    if words.json:
        write(words.json, {"title": "inference on a CPU", "command": said("bench.cpu", arguments), **found})


if __name__ == "__main__":
    main()
