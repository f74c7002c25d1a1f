"""Inference side by side: many images a second, and one image's latency, from the same weights in one process.

    python -m bench.infer [--model B/16] [--batches 256,1] [--json FILE]
    python -m bench.infer --device cpu [--batches 1,8] [--threads 2]             fp32, and bf16 where the CPU has it
    python -m bench.infer --activation gelu_tanh                                 as Google's weights were trained
    python -m bench.infer --device cpu --model Ti/16 --batches 2 --repeats 2 --seconds 0.1 --compile off   a trial

Images are on the device already: uint8 for plainvit, which normalises them itself; ready floats for the peers. Forms:

as shipped   eager, fp32 weights, on a GPU under bf16 autocast; plainvit's is its Predictor
compiled     torch.compile; on a GPU bf16 weights and cuDNN's attention off, on a CPU packed fp32 or bf16 weights
fp8          plainvit's compiled form with the blocks' matmuls in fp8 (plainvit.models.fast.fp8)
graph        a compiled form replayed as one CUDA graph; for batches of at most 8

"ratio" is to the fastest peer of the same kind of call, "x timm" to timm as shipped. "off" is the greatest difference
of a logit from plainvit's in fp32, over the greatest logit. ms is the time between two calls that follow each other, by
CUDA events on a GPU: launches that the device waits for count. Device: kernels alone. Where others use the same cores,
--threads 1 --clock cpu counts the seconds that this process worked.
A further form of plainvit is a line in OURS: a function from a Job to a function from images to logits.
"""

import argparse
import copy
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from plainvit import device as machine_device

machine_device.set_environment()  # before torch is loaded: what oneDNN may use is decided then

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from bench.measure import (  # noqa: E402
    busy_ms,
    calls_that_last,
    ceilings,
    event_seconds,
    first_line,
    interleaved,
    kernels,
    make_parser,
    percent,
    publish,
    seconds_a_call,
    show,
    tell,
)
from bench.peers import PEERS, build, cast, cudnn_attention  # noqa: E402
from bench.train import attention_of, number  # noqa: E402
from plainvit import create  # noqa: E402
from plainvit.config import ViTConfig  # noqa: E402
from plainvit.evaluate.predictor import Predictor  # noqa: E402
from plainvit.models import ViT  # noqa: E402
from plainvit.models.fast import accelerate  # noqa: E402
from plainvit.models.fast.fp8 import convert_to_fp8, explain_unsupported  # noqa: E402
from plainvit.models.fast.inference import cpu_computes_bf16, pack_weights  # noqa: E402
from plainvit.names import configure  # noqa: E402
from plainvit.planning.cost import macs  # noqa: E402

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SMALL_BATCH = 8  # images up to which a CUDA graph is timed
Answer = Callable[[Tensor], Tensor]  # images [B, 3, H, W] -> logits [B, K]
Form = Callable[["Job"], Answer]


@dataclass
class Job:
    """One model with weights, on one device: what every form is made from."""

    model: ViTConfig
    device: str
    dtype: torch.dtype  # of the compiled form's weights
    clock: Callable[[], float] = time.perf_counter  # on a CPU; a GPU has its own

    def __post_init__(self) -> None:
        self.weights = {name: x.detach() for name, x in self.ours().state_dict().items()}

    def ours(self) -> ViT:
        """On the device, in fp32; a head of zeros would make all logits equal."""
        made = create_from(self.model, self.device)
        assert made.head
        nn.init.normal_(made.head.weight, std=0.02, generator=torch.Generator(self.device).manual_seed(1))
        return made.eval()


def create_from(model: ViTConfig, device: str) -> ViT:
    """Repeatable weights, drawn on the device."""
    shape = {name: getattr(model, name) for name in ("width", "depth", "heads", "mlp_dim", "activation")}
    patch = model.patch[0]
    made = create(f"ViT-B/{patch}", model.classes, model.image_size, numerics="timm", seed=0, device=device, **shape)
    assert isinstance(made, ViT)
    return made


# Forms ----------------------------------------------------------------------------------------------------------------


def our_predictor(job: Job) -> Answer:
    return Predictor(job.ours(), device=job.device).logits


def our_compiled(job: Job) -> Answer:
    """As plainvit.load(optimise=True) has it: of the last block, what the class token needs."""
    return _compiled(accelerate(job.ours().to(job.dtype)), job)


def our_fp8(job: Job) -> Answer:
    return _compiled(accelerate(convert_to_fp8(job.ours(), job.dtype)), job)


def peer_shipped(library: str, job: Job) -> Answer:
    model = build(library, job.model, job.weights, job.device).eval()

    def answer(images: Tensor) -> Tensor:
        with torch.inference_mode(), cast(job.device):
            return model(images)

    return answer


def peer_compiled(library: str, job: Job) -> Answer:
    return _compiled(build(library, job.model, job.weights, job.device).eval().to(job.dtype), job)


def _compiled(model: nn.Module, job: Job) -> Answer:
    forward = torch.compile(model, dynamic=False)
    if job.device == "cpu":
        return pack_weights(forward)

    def answer(images: Tensor) -> Tensor:
        with torch.no_grad():
            return forward(images)

    return answer


class Graphed:
    """A form captured for these images, which stay in their place; its logits are overwritten by the next call."""

    def __init__(self, make: Form, job: Job, images: Tensor) -> None:
        self.answer = make(job)  # kept: the graph reads its weights, and does not hold them
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.answer(images)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.answer(images)

    def __call__(self, _: Tensor) -> Tensor:
        self.graph.replay()
        return self.logits


def in_bf16(make: Form) -> Form:
    """A compiled form with bf16 weights, on a CPU."""

    def made(job: Job) -> Answer:
        low = copy.copy(job)
        low.dtype = torch.bfloat16
        answer = make(low)
        return lambda images: answer(images.to(torch.bfloat16) if images.is_floating_point() else images)

    return made


OURS: dict[str, Form] = {
    "plainvit, as shipped": our_predictor,
    "plainvit, compiled": our_compiled,
}
FP8: dict[str, Form] = {"plainvit, fp8, compiled": our_fp8}
THEIRS: dict[str, Form] = {
    f"{library}, {form}": partial(make, library)
    for library in PEERS
    for form, make in (("as shipped", peer_shipped), ("compiled", peer_compiled))
}


def forms_of(
    systems: Sequence[str], *, compiled: bool, graph: bool = False, fp8: bool = False, bf16: bool = False
) -> dict[str, Form]:
    """Every form of the libraries asked for; a graph, and bf16 on a CPU, is that of a compiled form."""
    every = OURS | (FP8 if fp8 else {}) | THEIRS
    found = {name: make for name, make in every.items() if name.partition(",")[0] in systems}
    found = {name: make for name, make in found.items() if compiled or name.endswith("as shipped")}
    twice = {name: make for name, make in found.items() if name.endswith("compiled")}
    if graph:
        found |= {name.replace(", compiled", ", graph"): make for name, make in twice.items()}
    return found | ({f"{name} bf16": in_bf16(make) for name, make in twice.items()} if bf16 else {})


# Measuring ------------------------------------------------------------------------------------------------------------


@dataclass
class Warm:
    """A form that has answered, and by how much its logits were off."""

    name: str
    run: Callable[[], Tensor]
    cudnn: bool
    first_s: float
    off: float

    def __call__(self) -> Tensor:
        with cudnn_attention(self.cudnn):
            return self.run()


def images_for(name: str, images: Tensor, dtype: torch.dtype) -> Tensor:
    """As each takes them."""
    if name.startswith("plainvit"):
        return images
    floats = images.float() / 127.5 - 1
    return floats if name.endswith("as shipped") else floats.to(dtype)


def warm_up(name: str, make: Form, job: Job, images: Tensor, right: Tensor, left_out: list[str]) -> Warm | None:
    """A form past its first answers; as a CUDA graph where its name ends so. None, and a line, where it fails."""
    theirs = images_for(name, images, job.dtype)
    cudnn = name in THEIRS and name.endswith("as shipped")
    try:
        with cudnn_attention(cudnn):
            started = time.perf_counter()
            answer = Graphed(make, job, theirs) if name.endswith(", graph") else make(job)
            logits = answer(theirs).float().clone()
            took = time.perf_counter() - started
            for _ in range(2):
                answer(theirs)
    except Exception as error:  # a package, a compiler or memory that is missing: each raises its own kind
        tell(f"{name}, {len(images)} images: {first_line(error)}", left_out)
        return None
    off = ((logits[: len(right)] - right).abs().max() / right.abs().max()).item()
    print(f"  {name}, {len(images)} images: ready after {took:.1f} s", file=sys.stderr, flush=True)
    return Warm(name, partial(answer, theirs), cudnn, took, off)


def milliseconds(run: Callable[[], object], count: int, job: Job) -> float:
    """Of a call among calls that follow each other, by the device's own clock where it has one."""
    if job.device.startswith("cuda"):
        return 1000 * event_seconds(run, count, job.device)
    return 1000 * seconds_a_call(run, count, job.device, job.clock)


def measure_batch(
    job: Job, forms: Mapping[str, Form], batch: int, repeats: int, wanted: float, left_out: list[str]
) -> list[dict[str, Any]]:
    """Rows of one batch size: every form that can be had, in turns."""
    generator = torch.Generator(job.device).manual_seed(2)
    shape = (batch, job.model.channels, *job.model.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=job.device, generator=generator)
    with torch.no_grad():
        right = job.ours()(images[:8])
    assert isinstance(right, Tensor)
    systems = [one for name, make in forms.items() if (one := warm_up(name, make, job, images, right, left_out))]
    counts = {one.name: calls_that_last(one, job.device, wanted) for one in systems}
    times = interleaved({one.name: partial(milliseconds, one, counts[one.name], job) for one in systems}, repeats)
    rows: list[dict[str, Any]] = []
    for one in systems:
        took = statistics.median(times[one.name])
        seen = kernels(one, job.device, left_out)
        row: dict[str, Any] = {"system": one.name, "batch": batch, "ms": took, "rounds_ms": times[one.name]}
        row |= {"least_ms": min(times[one.name]), "most_ms": max(times[one.name]), "repeats": repeats}
        row |= {"images_per_second": 1000 * batch / took, "device_ms": busy_ms(seen)}
        rows.append(row | {"first_s": one.first_s, "off": one.off, "attention": attention_of(seen)})
    del systems
    torch.compiler.reset()
    gc.collect()
    if job.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return with_ratios(rows)


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speeds over that of the fastest peer of the same kind of call (graph or not), and over timm as shipped."""
    shipped = next((row["ms"] for row in rows if row["system"] == "timm, as shipped"), None)
    for graph in (False, True):
        some = [row for row in rows if row["system"].endswith(", graph") == graph]
        theirs = [row["ms"] for row in some if not row["system"].startswith("plainvit")]
        for row in some:
            row["ratio"] = min(theirs) / row["ms"] if theirs else None
            row["best_peer"] = bool(theirs) and row["ms"] == min(theirs)
            row["x_timm"] = shipped / row["ms"] if shipped else None
    return rows


def show_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    left = ("system", "attention kernels")
    columns = ("batch", "img/s", "ms", "spread", "ratio", "x timm", "%", "device", "off", "first s")
    shown: list[list[Any]] = []
    for row in rows:
        numbers = [f"{row['images_per_second']:,.1f}", f"{row['ms']:,.3f}"]
        numbers += [f"{row['least_ms']:,.3f}-{row['most_ms']:,.3f}"]
        numbers += [number(row["ratio"], ".3f") + "*" * row["best_peer"], number(row["x_timm"], ".2f")]
        numbers += [f"{row['percent']:.1f}", number(row["device_ms"], ",.3f"), f"{row['off']:.1e}"]
        shown.append([row["system"], row["batch"], *numbers, f"{row['first_s']:.0f}", ", ".join(row["attention"])])
    show(title, (left[0], *columns, left[1]), shown, left=left)


def measure(words: argparse.Namespace, device: str, batches: Sequence[int]) -> dict[str, Any]:
    left_out: list[str] = []
    gpu, compiled = device.startswith("cuda"), words.compile == "on"
    if not gpu:
        tell("CUDA graphs and kernels: no GPU; the rates say nothing of a GPU's", left_out)
        torch.set_num_threads(words.threads or torch.get_num_threads())
    if not compiled:
        tell("the compiled forms: torch.compile is off (--compile on)", left_out)
    fp8, bf16 = explain_unsupported(device), "" if gpu else no_bf16()
    for name, reason in (("the fp8 form", fp8), ("bf16", bf16)):
        if reason:
            tell(f"{name}: {reason}", left_out)
    clock = CLOCKS[words.clock]
    top = ceilings(device, left_out, clock)
    assert top["matmul"]
    model = configure(f"ViT-{words.model}", image_size=words.image_size, numerics="timm", activation=words.activation)
    assert isinstance(model, ViTConfig)
    job = Job(model, device, torch.bfloat16 if gpu else torch.float32, clock)
    systems = ["plainvit", *(name for name in words.systems.split(",") if name != "plainvit")]
    forms = partial(forms_of, systems, compiled=compiled, fp8=not fp8, bf16=not gpu and not bf16)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        some = forms(graph=gpu and batch <= SMALL_BATCH)
        rows += measure_batch(job, some, batch, words.repeats, words.seconds, left_out)
    for row in rows:
        row["percent"] = percent(row["images_per_second"], 2 * macs(model), top["matmul"])
    where = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads, {words.clock} time"
    what = f"inference, ViT-{words.model}, {words.activation}, {where}: matmul {top['matmul']:,.3g} TFLOP/s"
    show_rows(f"{what}; ratio: to the best peer (*)", rows)
    about = {"model": f"ViT-{words.model}", "activation": words.activation, "ceilings": top}
    isa = {machine_device.ISA_VARIABLE.lower(): os.environ.get(machine_device.ISA_VARIABLE)}
    return {**about, **isa, "rows": rows, "left_out": left_out}


def no_bf16() -> str:
    """Why bf16 is not timed on this CPU; "" where it is."""
    if machine_device.cpu_bf16_refused():
        return "it ends the process on this CPU"
    return "" if cpu_computes_bf16() else "this CPU does not compute in it"


def check(words: argparse.Namespace) -> tuple[str, list[int]]:
    """The device and the batches; what is not known is a ValueError with one line."""
    configure(f"ViT-{words.model}", image_size=words.image_size)
    for name in words.systems.split(","):
        if name != "plainvit" and name not in PEERS:
            raise ValueError(f"system {name!r} is unknown: one of plainvit, {', '.join(PEERS)}")
    device = machine_device.choose_device(words.device)
    batches = [int(word) for word in (words.batches or ("256,1" if device.startswith("cuda") else "1,8")).split(",")]
    if min(*batches, words.repeats) < 1 or words.threads < 0 or words.seconds <= 0:
        raise ValueError("--batches and --repeats are at least 1, --threads at least 0, --seconds above 0")
    return device, batches


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--activation", choices=("gelu", "gelu_tanh"), default="gelu", help="of every system")
    parser.add_argument("--systems", default=",".join(("plainvit", *PEERS)))
    parser.add_argument("--batches", default="", help="images a call; 256,1 on a GPU, 1,8 on a CPU")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=1.0, help="about, of a repeat")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", choices=("on", "off"), default="on")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: PyTorch's own number")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: seconds of this process's cores")
    words = parser.parse_args(arguments)
    try:
        device, batches = check(words)
    except ValueError as error:
        parser.error(str(error))
    publish("bench.infer", arguments, words.json, title="inference", **measure(words, device, batches))


if __name__ == "__main__":
    main()
