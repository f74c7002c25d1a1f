"""Inference speed of plainvit and its peers, interleaved in one process, from the same weights.

    python -m bench.infer [--model B/16] [--batches 256,1] [--json FILE]
    python -m bench.infer --device cpu [--batches 1,8]                           fp32, and bf16 if the CPU has it
    python -m bench.infer --device cpu --model Ti/16 --batches 2 --repeats 2 --seconds 0.1 --compile off   a trial

Images are on the device already: uint8 for plainvit, which normalizes them itself, normalized floats for the peers.

eager        fp32 weights, on a GPU under bf16 autocast; plainvit's is its Predictor
compiled     torch.compile; on a GPU bf16 weights without cuDNN attention, on a CPU packed fp32 or bf16 weights;
             "fp8" computes the matmuls of plainvit's blocks in fp8
graph        the compiled model as one CUDA graph, for batches of at most 8

"ratio" is to the fastest peer, of graphs to the fastest graph; "x timm" to timm, eager. "error" is the largest
difference of a logit from plainvit in fp32, relative to the largest logit. "ms" is the time per call of calls in a row,
on a GPU by CUDA events, so that it includes waiting for launches; "kernel ms" is the sum of the kernels.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bench.measure import (
    compute_utilization,
    count_calls,
    first_line,
    make_parser,
    measure_peak_rates,
    print_table,
    profile_kernels,
    run_interleaved,
    sum_kernel_ms,
    time_calls,
    time_cuda_calls,
    warn_skipped,
    write_results,
)
from bench.peers import PEERS, autocast, build_peer, set_cudnn_attention
from bench.train import format_number, free_memory
from plainvit import create
from plainvit import device as machine_device
from plainvit.config import ViTConfig
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT
from plainvit.models.fast.fp8 import explain_unsupported
from plainvit.models.fast.inference import (
    Choice,
    cast_model,
    compile_call,
    cpu_computes_bf16,
    pack_weights,
)
from plainvit.names import configure
from plainvit.planning.cost import macs

MAX_GRAPH_BATCH = 8
Forward = Callable[[Tensor], Tensor]  # images [B, 3, H, W] -> logits [B, K]
Precision = Literal["fp32", "bf16", "fp8"]


class Form(NamedTuple):
    """How a library computes logits."""

    library: str
    mode: Literal["eager", "compiled", "graph"]
    precision: Precision  # of eager on a GPU: fp32 weights under bf16 autocast

    def __str__(self) -> str:
        return ", ".join((self.library, self.mode, *([] if self.mode == "eager" else [self.precision])))


class Job:
    """A model and its weights on a device, the same for every form."""

    def __init__(self, model: ViTConfig, device: str) -> None:
        self.model, self.device = model, device
        self.is_gpu = device.startswith("cuda")
        self.weights = {name: x.detach() for name, x in self.create_plainvit().state_dict().items()}

    def create_plainvit(self) -> ViT:
        """In fp32, with weights from a fixed seed. A head of zeros would make all logits equal."""
        shape = {name: getattr(self.model, name) for name in ("width", "depth", "heads", "mlp_dim")}
        options = {"numerics": "timm", "seed": 0, "device": self.device}
        patch, classes, size = self.model.patch[0], self.model.classes, self.model.image_size
        model = create(f"ViT-B/{patch}", classes, size, **options, **shape)
        assert isinstance(model, ViT)
        assert model.head
        nn.init.normal_(model.head.weight, std=0.02, generator=torch.Generator(self.device).manual_seed(1))
        return model.eval()


# Forms ----------------------------------------------------------------------------------------------------------------


def list_forms(libraries: Sequence[str], *, compiled: bool, graph: bool, fp8: bool, low: bool, gpu: bool) -> list[Form]:
    """All forms of the libraries; `low`: bf16 is available."""
    forms: list[Form] = []
    for library in libraries:
        forms.append(Form(library, "eager", "bf16" if gpu else "fp32"))
        precisions: list[Precision] = ["bf16"] if gpu else ["fp32"]
        precisions += ["bf16"] if low and not gpu else []
        precisions += ["fp8"] if fp8 and library == "plainvit" else []
        for precision in precisions if compiled else ():
            forms += [Form(library, "compiled", precision), *([Form(library, "graph", precision)] if graph else [])]
    return forms


def build_form(form: Form, job: Job, images: Tensor) -> Forward:
    if form.mode == "graph":
        return GraphedForward(form._replace(mode="compiled"), job, images)
    if form.mode == "compiled":
        return build_compiled(form, job)
    if form.library == "plainvit":
        return Predictor(job.create_plainvit(), device=job.device).logits
    model = build_peer(form.library, job.model, job.weights, job.device).eval()

    def forward(images: Tensor) -> Tensor:
        with torch.inference_mode(), autocast(job.device):
            return model(images)

    return forward


def build_compiled(form: Form, job: Job) -> Forward:
    if form.library == "plainvit":  # as plainvit.load(optimize=True)
        choice = Choice(form.precision, "compiled")
        call = compile_call(cast_model(job.create_plainvit(), choice), choice, "forward")
    else:
        model = build_peer(form.library, job.model, job.weights, job.device).eval()
        call = torch.compile(model.to(find_dtype(form)), dynamic=False)
        call = call if job.is_gpu else pack_weights(call)

    def forward(images: Tensor) -> Tensor:
        with torch.no_grad():
            return call(images)

    return forward


class GraphedForward:
    """A compiled form captured as a CUDA graph of these images. The next call overwrites the logits."""

    def __init__(self, form: Form, job: Job, images: Tensor) -> None:
        self.forward = build_compiled(form, job)  # keeps the weights, which the graph only points to
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.forward(images)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.forward(images)

    def __call__(self, _: Tensor) -> Tensor:
        self.graph.replay()
        return self.logits


def find_dtype(form: Form) -> torch.dtype:
    return torch.float32 if form.precision == "fp32" else torch.bfloat16


def convert_images(form: Form, images: Tensor) -> Tensor:
    """uint8 for plainvit, normalized floats for the peers."""
    if form.library == "plainvit":
        return images
    floats = images.float() / 127.5 - 1
    return floats if form.mode == "eager" else floats.to(find_dtype(form))


# Measurement ----------------------------------------------------------------------------------------------------------


@dataclass
class System:
    """A form after its first calls."""

    form: Form
    run: Callable[[], Tensor]
    cudnn_attention: bool
    first_seconds: float
    error: float

    def __call__(self) -> Tensor:
        with set_cudnn_attention(self.cudnn_attention):
            return self.run()


def warm_up(form: Form, job: Job, images: Tensor, expected: Tensor, skipped: list[str]) -> System | None:
    """Builds a form, calls it and compares its logits. None, with a warning, if that fails."""
    converted = convert_images(form, images)
    cudnn_attention = form.library != "plainvit" and form.mode == "eager"  # PyTorch's default
    try:
        with set_cudnn_attention(cudnn_attention):
            started = time.perf_counter()
            forward = build_form(form, job, converted)
            logits = forward(converted).float().clone()
            seconds = time.perf_counter() - started
            for _ in range(2):
                forward(converted)
    except Exception as error:  # a missing package, a compiler error, out of memory
        warn_skipped(f"{form}, {len(images)} images: {first_line(error)}", skipped)
        return None
    error = ((logits[: len(expected)] - expected).abs().max() / expected.abs().max()).item()
    print(f"  {form}, {len(images)} images: ready after {seconds:.1f} s", file=sys.stderr, flush=True)
    return System(form, partial(forward, converted), cudnn_attention, seconds, error)


def measure_batch(
    job: Job, forms: Sequence[Form], batch: int, repeats: int, seconds: float, skipped: list[str]
) -> list[dict[str, Any]]:
    """Rows of one batch size."""
    generator = torch.Generator(job.device).manual_seed(2)
    shape = (batch, job.model.channels, *job.model.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=job.device, generator=generator)
    with torch.no_grad():
        expected = job.create_plainvit()(images[:8])
    assert isinstance(expected, Tensor)
    systems = list(filter(None, (warm_up(form, job, images, expected, skipped) for form in forms)))
    counts = {system.form: count_calls(system, job.device, seconds) for system in systems}
    measure_seconds = time_cuda_calls if job.is_gpu else time_calls

    def measure_ms(system: System) -> float:
        return 1000 * measure_seconds(system, counts[system.form], job.device)

    times = run_interleaved({str(system.form): partial(measure_ms, system) for system in systems}, repeats)
    rows: list[dict[str, Any]] = []
    for system in systems:
        rounds = times[str(system.form)]
        ms, kernel_ms = statistics.median(rounds), sum_kernel_ms(profile_kernels(system, job.device, skipped))
        row: dict[str, Any] = {**system.form._asdict(), "system": str(system.form), "batch": batch, "ms": ms}
        row |= {"min_ms": min(rounds), "max_ms": max(rounds), "repeats": repeats, "rounds_ms": rounds}
        row |= {"images_per_second": 1000 * batch / ms, "kernel_ms": kernel_ms}
        rows.append(row | {"first_call_seconds": system.first_seconds, "error": system.error})
    del systems
    torch.compiler.reset()
    free_memory(job.is_gpu)
    return add_ratios(rows)


def add_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds speeds relative to the fastest peer, of graphs to the fastest graph, and to timm, eager."""
    timm = next((row["ms"] for row in rows if row["system"] == "timm, eager"), None)
    for is_graph in (False, True):
        group = [row for row in rows if (row["mode"] == "graph") == is_graph]
        best = min((row["ms"] for row in group if row["library"] != "plainvit"), default=None)
        for row in group:
            row["ratio"] = best / row["ms"] if best else None
            row["is_best_peer"] = row["library"] != "plainvit" and row["ms"] == best
            row["x_timm"] = timm / row["ms"] if timm else None
    return rows


def print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    columns = ("batch", "img/s", "ms", "spread", "ratio", "x timm", "MFU %", "kernel ms", "error", "first s")
    lines: list[list[Any]] = []
    for row in rows:
        line = [row["system"], row["batch"], f"{row['images_per_second']:,.1f}", f"{row['ms']:,.3f}"]
        line += [f"{row['min_ms']:,.3f}-{row['max_ms']:,.3f}"]
        line += [format_number(row["ratio"], ".3f") + ("*" if row["is_best_peer"] else "")]
        line += [format_number(row["x_timm"], ".2f")]
        line += [f"{row['mfu']:.1f}", format_number(row["kernel_ms"], ",.3f"), f"{row['error']:.1e}"]
        lines.append([*line, f"{row['first_call_seconds']:.0f}"])
    print_table(title, ("system", *columns), lines, left=("system",))


def explain_missing(device: str, compiled: bool) -> dict[str, str]:
    """What is not measured, and why; "" if it is."""
    has_gpu = device.startswith("cuda")
    no_bf16 = "" if has_gpu or cpu_computes_bf16() else "this CPU has no fast bf16"
    if not has_gpu and machine_device.is_cpu_bf16_unsafe():
        no_bf16 = "it ends the process on this CPU"
    return {
        "CUDA graphs and kernels": "" if has_gpu else "there is no GPU",
        "compiled forms": "" if compiled else "--compile is off",
        "fp8": explain_unsupported(device),
        "bf16": no_bf16,
    }


def measure(args: argparse.Namespace, device: str, batches: Sequence[int]) -> dict[str, Any]:
    skipped: list[str] = []
    gpu, compiled = device.startswith("cuda"), args.compile == "on"
    missing = explain_missing(device, compiled)
    for name, reason in missing.items():
        if reason:
            warn_skipped(f"{name}: {reason}", skipped)
    peaks = measure_peak_rates(device)
    model = configure(f"ViT-{args.model}", image_size=args.image_size, numerics="timm")
    assert isinstance(model, ViTConfig)
    job, libraries = Job(model, device), dict.fromkeys(("plainvit", *args.systems.split(",")))
    rows: list[dict[str, Any]] = []
    for batch in batches:
        options = {"compiled": compiled, "graph": gpu and batch <= MAX_GRAPH_BATCH, "gpu": gpu}
        forms = list_forms(list(libraries), fp8=not missing["fp8"], low=not missing["bf16"], **options)
        rows += measure_batch(job, forms, batch, args.repeats, args.seconds, skipped)
    for row in rows:
        row["mfu"] = compute_utilization(row["images_per_second"], 2 * macs(model), peaks["matmul"])
    name = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    matmul = f"matmul {peaks['matmul']:,.3g} TFLOP/s"
    print_rows(f"inference, ViT-{args.model}, {name}, {matmul}; ratio: to the fastest peer (*)", rows)
    isa = {machine_device.ISA_VARIABLE.lower(): os.environ.get(machine_device.ISA_VARIABLE)}
    return {"model": f"ViT-{args.model}", "peak_rates": peaks, **isa, "rows": rows, "skipped": skipped}


# Command line ---------------------------------------------------------------------------------------------------------


def check_arguments(args: argparse.Namespace) -> tuple[str, list[int]]:
    """The device and the batch sizes; raises ValueError."""
    configure(f"ViT-{args.model}", image_size=args.image_size)
    for name in args.systems.split(","):
        if name != "plainvit" and name not in PEERS:
            raise ValueError(f"--systems: {name!r} is unknown: use plainvit, {', '.join(PEERS)}")
    device = machine_device.choose_device(args.device)
    batches = [int(size) for size in (args.batches or ("256,1" if device.startswith("cuda") else "1,8")).split(",")]
    if min(*batches, args.repeats) < 1 or args.seconds <= 0:
        raise ValueError("--batches and --repeats must be at least 1, --seconds above 0")
    return device, batches


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--systems", default=",".join(("plainvit", *PEERS)), help="Libraries, separated by commas")
    parser.add_argument("--batches", default="", help="Batch sizes; default: 256,1 on a GPU, 1,8 on a CPU")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=1.0, help="Approximate time of each system in a round")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", choices=("on", "off"), default="on", help="Measure compiled forms, too")
    args = parser.parse_args(arguments)
    try:
        device, batches = check_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    write_results("bench.infer", arguments, args.json, title="inference", **measure(args, device, batches))


if __name__ == "__main__":
    main()
