"""Short attention beside PyTorch's fused kernels, forward and backward, at the shapes of ViTs.

    python -m bench.attention --json attention.json     every system at every shape, bf16, on a CUDA device
    python -m bench.attention --sweep                   times the candidates of plainvit.models.short_attention instead,
                                                        and prints the best as lines for its table TILES

Packed qkv in, tokens out; backward: from their gradient to that of the packed qkv. PyTorch's kernels want q, k and v
apart: their time includes the views, permutes and copies that eager PyTorch makes for that, and is given without them
too ("q, k, v apart"). cuDNN's is not safe to train with: its gradients became NaN within 230 steps on an H200 (see
plainvit.device). GB/s: what must move at least (forward: qkv and tokens; backward: qkv, tokens, their gradient and
that of qkv) over the time taken, and its share of the rate of a copy measured in the same run. Times are of CUDA
events around many calls; systems take turns in every round.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.measure import first_line, interleaved, machine, said, show, summary, tell, write
from plainvit.models import short_attention as short
from plainvit.models.short_attention import Launch, short_attention, unfit

PASSES = ("forward", "backward", "both")
LASTS = 20_000  # microseconds of calls in one measurement, about
PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN (unsafe)": SDPBackend.CUDNN_ATTENTION,
}
Run = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    heads: int
    tokens: int
    width: int  # of a head

    def bytes(self, what: str) -> int:
        """The least that must move, in bf16: 4 tensors of [B, N, D] forward, 8 backward."""
        tensors = {"forward": 4, "backward": 8, "both": 12}[what]
        return tensors * 2 * self.batch * self.tokens * self.heads * self.width

    def __str__(self) -> str:
        return f"{self.name}: {self.batch} x {self.heads} x {self.tokens} x {self.width}"


SHAPES = (
    Shape("B/16", 256, 12, 197, 64),
    Shape("L/16", 256, 16, 197, 64),
    Shape("H/14", 128, 16, 257, 80),
    Shape("small", 512, 4, 64, 64),
)


# What is timed --------------------------------------------------------------------------------------------------------


def inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    """Packed qkv, and a gradient of the tokens."""
    generator = torch.Generator("cuda").manual_seed(0)
    D = shape.heads * shape.width
    make = partial(torch.randn, generator=generator, device="cuda")
    qkv = make(shape.batch, shape.tokens, 3 * D).bfloat16().requires_grad_()
    return qkv, make(shape.batch, shape.tokens, D).bfloat16()


def by_sdpa(qkv: Tensor, heads: int, backend: SDPBackend) -> Tensor:
    """As a ViT does it without kernels of its own."""
    B, N, packed = qkv.shape
    q, k, v = qkv.view(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)  # 3 x [B, H, N, d]
    with sdpa_kernel(backend):
        found = scaled_dot_product_attention(q, k, v)
    return found.transpose(1, 2).reshape(B, N, packed // 3)


def apart(qkv: Tensor, grad: Tensor, heads: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient as the peers like them best: [B, H, N, d], each in one piece."""
    B, N, _ = grad.shape
    parts = qkv.detach().view(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return [part.contiguous().requires_grad_() for part in parts], grad.view(B, N, heads, -1).transpose(
        1, 2
    ).contiguous()


def passes(attend: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor) -> dict[str, Run]:
    """The forward pass, the backward pass of one that was kept, and both."""
    kept = attend()
    return {
        "forward": attend,
        "backward": lambda: torch.autograd.grad(kept, leaves, grad, retain_graph=True),
        "both": lambda: torch.autograd.grad(attend(), leaves, grad),
    }


def systems(shape: Shape, left_out: list[str]) -> dict[str, dict[str, Run]]:
    """name -> pass -> what to call; those that do not run here are left out, and ours where it is wrong."""
    qkv, grad = inputs(shape)
    made = {"plainvit": passes(lambda: short_attention(qkv, shape.heads), (qkv,), grad)}
    check(qkv, grad, shape)
    leaves, turned = apart(qkv, grad, shape.heads)
    for name, backend in PEERS.items():
        try:
            packed = passes(partial(by_sdpa, qkv, shape.heads, backend), (qkv,), grad)
            alone = passes(partial(_alone, leaves, backend), leaves, turned)
            for one in (packed, alone):
                one["both"]()
            made |= {name: packed, f"{name}, q, k, v apart": alone}
        except RuntimeError as error:
            tell(f"{shape.name}: {name}: {first_line(error)}", left_out)
    return made


def _alone(leaves: Sequence[Tensor], backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        q, k, v = leaves
        return scaled_dot_product_attention(q, k, v)


def check(qkv: Tensor, grad: Tensor, shape: Shape) -> None:
    """A few images against the math in float64: a wrong kernel's time is worth nothing."""
    few, direction = qkv[:2].detach(), grad[:2]
    found, right = ([*_both(a, few.to(t), direction.to(t), shape.heads)] for a, t in _AGAINST)
    for mine, expected in zip(found, right, strict=True):
        distance = (mine.double() - expected).abs().max() / expected.abs().max()
        if not distance <= 0.03:
            raise SystemExit(f"{shape}: short attention is off by {distance:.3g} of the largest value: not timed")


_AGAINST: tuple[tuple[Callable[[Tensor, int], Tensor], torch.dtype], ...] = (
    (short_attention, torch.bfloat16),
    (partial(by_sdpa, backend=SDPBackend.MATH), torch.float64),
)


def _both(attend: Callable[[Tensor, int], Tensor], qkv: Tensor, grad: Tensor, heads: int) -> tuple[Tensor, ...]:
    qkv = qkv.clone().requires_grad_()
    out = attend(qkv, heads)
    return out.detach(), *torch.autograd.grad(out, qkv, grad)


# Times ----------------------------------------------------------------------------------------------------------------


def microseconds(run: Run, count: int) -> float:
    """Of one call, from events around so many."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end) / count


def calls(run: Run) -> int:
    """How many last long enough; compiles and warms up on the way."""
    microseconds(run, 3)
    return max(5, int(LASTS / max(microseconds(run, 5), 1.0)))


def copy_rate() -> float:
    """GB/s read and written, by the median of seven copies of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    run = partial(target.copy_, source)
    microseconds(run, 3)
    return 2 * source.numel() / statistics.median(microseconds(run, 10) for _ in range(7)) / 1000


def measure(shapes: Sequence[Shape], repeats: int, left_out: list[str]) -> tuple[float, list[dict[str, Any]]]:
    """The rate of a copy in GB/s, and a row for each shape, pass and system."""
    copied, rows = copy_rate(), []
    for shape in shapes:
        made = systems(shape, left_out)
        for what in PASSES:
            runs = {name: partial(microseconds, by[what], calls(by[what])) for name, by in made.items()}
            found = {name: summary(values) for name, values in interleaved(runs, repeats).items()}
            rows += [_row(shape, what, name, numbers, found, copied) for name, numbers in found.items()]
        del made
        torch.cuda.empty_cache()
    return copied, rows


def _row(
    shape: Shape, what: str, name: str, numbers: dict[str, Any], beside: Mapping[str, Any], copied: float
) -> dict[str, Any]:
    rate = shape.bytes(what) / numbers["median"] / 1000
    return {
        "shape": str(shape),
        "pass": what,
        "system": name,
        "unit": "microseconds",
        **numbers,
        "gigabytes_per_second": rate,
        "of_copy": rate / copied,
        "beside_plainvit": numbers["median"] / beside["plainvit"]["median"],
    }


def table(rows: Sequence[dict[str, Any]], copied: float) -> None:
    columns = ("pass", "system", "µs", "spread", "GB/s", "of copy", "x plainvit")
    for shape, some in itertools.groupby(rows, key=lambda row: row["shape"]):
        lines = [
            [
                *(row["pass"], row["system"], f"{row['median']:.0f}", f"{row['least']:.0f}-{row['most']:.0f}"),
                *(f"{row['gigabytes_per_second']:.0f}", f"{row['of_copy']:.0%}", f"{row['beside_plainvit']:.2f}"),
            ]
            for row in some
        ]
        show(f"{shape}, bf16; a copy moves {copied:.0f} GB/s", columns, lines, left=("pass", "system"))


# The sweep ------------------------------------------------------------------------------------------------------------


def candidates(shape: Shape) -> dict[str, dict[Launch, Callable[[], Tensor]]]:
    """kernel -> launch -> a call that returns what it wrote."""
    qkv, grad = (tensor.detach() for tensor in inputs(shape))
    tiles = short.choose(shape.tokens, shape.width)
    out, lse = short.run_forward(qkv, shape.heads, tiles.forward)
    dqkv, delta = torch.zeros_like(qkv), torch.empty_like(lse)
    short.run_queries(grad, qkv, out, lse, delta, dqkv, shape.heads, tiles.queries)

    def queries(launch: Launch) -> Tensor:
        short.run_queries(grad, qkv, out, lse, delta, dqkv, shape.heads, launch)
        return dqkv[..., : out.shape[2]]

    def keys(launch: Launch) -> Tensor:
        short.run_keys(grad, qkv, lse, delta, dqkv, shape.heads, launch)
        return dqkv[..., out.shape[2] :]

    def forward(launch: Launch) -> Tensor:
        return short.run_forward(qkv, shape.heads, launch)[0]

    found = {"forward": (forward, short.FORWARD), "queries": (queries, short.QUERIES), "keys": (keys, short.KEYS)}
    return {kind: {one: partial(run, one) for one in some} for kind, (run, some) in found.items()}


def working(
    kind: str, runs: dict[Launch, Callable[[], Tensor]], shape: Shape, left_out: list[str]
) -> dict[Launch, Run]:
    """Those that compile, run, and agree with the first that does."""
    kept: dict[Launch, Run] = {}
    first: Tensor | None = None
    for launch, run in runs.items():
        try:
            found = run().float()
            torch.cuda.synchronize()
        except Exception as error:  # whatever the compiler or the driver says, the sweep goes on
            tell(f"{shape.name}: {kind}: {words_of(launch)}: {first_line(error)}", left_out)
            continue
        first = found.clone() if first is None else first
        if not (found - first).abs().max() <= 0.03 * first.abs().max():
            tell(f"{shape.name}: {kind}: {words_of(launch)}: WRONG NUMBERS", left_out)
            continue
        kept[launch] = run
    return kept


def words_of(launch: Launch) -> str:
    """As it is written in the table: what is not the default."""
    named = [f"{f.name}={getattr(launch, f.name)}" for f in fields(Launch)[2:] if getattr(launch, f.name) != f.default]
    return f"Launch({', '.join([str(launch.rows), str(launch.keys), *named])})"


def sweep(shapes: Sequence[Shape], repeats: int, left_out: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each candidate of each kernel, and the best of each shape as a line of TILES."""
    rows, lines = [], []
    for shape in shapes:
        best: dict[str, tuple[float, Launch]] = {}
        for kind, every in candidates(shape).items():
            runs = working(kind, every, shape, left_out)
            if not runs:
                continue
            found = timed(runs, repeats)
            some = [
                {
                    "shape": str(shape),
                    "kernel": kind,
                    "launch": words_of(one),
                    "unit": "microseconds",
                    **summary(values),
                }
                for one, values in sorted(found.items(), key=lambda pair: statistics.median(pair[1]))
            ]
            best[kind] = min(
                ((statistics.median(values), one) for one, values in found.items()), key=lambda pair: pair[0]
            )
            shown = [[row["launch"], f"{row['median']:.0f}", f"{row['least']:.0f}-{row['most']:.0f}"] for row in some]
            show(f"{shape}, {kind}", ("launch", "µs", "spread"), shown, left=("launch",))
            rows += some
        lines += [line for line in [line_of(shape, best)] if line]
        torch.cuda.empty_cache()
    return rows, lines


def timed(runs: Mapping[Launch, Run], repeats: int) -> dict[Launch, list[float]]:
    """In turns, as bench.measure.interleaved does, without a line a measurement: there are hundreds."""
    counts = {one: calls(run) for one, run in runs.items()}
    found: dict[Launch, list[float]] = {one: [] for one in runs}
    for _ in range(repeats):
        for one, run in runs.items():
            found[one].append(microseconds(run, counts[one]))
    return found


def line_of(shape: Shape, best: Mapping[str, tuple[float, Launch]]) -> str | None:
    """`(most tokens, head width): Tiles(...),`."""
    if not {"forward", "queries", "keys"} <= set(best):
        return None
    most = next(most for most, width in short.TILES if width == shape.width and shape.tokens <= most)
    launches = ", ".join(words_of(best[kind][1]) for kind in ("forward", "queries", "keys"))
    took = " + ".join(f"{best[kind][0]:.0f}" for kind in ("forward", "queries", "keys"))
    return f"({most}, {shape.width}): Tiles({launches}),  # {took} µs at {shape}"


# Command --------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time the candidates of our kernels against each other")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES), help="some of them, by name")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    words = parser.parse_args(arguments)
    known = {shape.name: shape for shape in SHAPES}
    if unknown := set(words.shapes.split(",")) - set(known):
        parser.error(f"no shape is called {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    if words.repeats < 5:
        parser.error("--repeats is at least 5: a spread of fewer says little")
    if not torch.cuda.is_available():
        parser.exit(2, "bench.attention: no CUDA device here: these kernels run on NVIDIA GPUs only\n")
    shapes = [known[name] for name in words.shapes.split(",")]
    if reason := unfit(torch.empty(1, 197, 2304, dtype=torch.bfloat16, device="cuda"), 12):
        parser.exit(2, f"bench.attention: {reason}\n")
    left_out: list[str] = []
    found: dict[str, Any] = {"command": said("bench.attention", arguments), "machine": machine(), "left_out": left_out}
    if words.sweep:
        shapes = [shape for shape in shapes if shape.name != "L/16"]  # B/16's line of the table
        found["rows"], found["best"] = sweep(shapes, words.repeats, left_out)
        print("\n".join(["best, as lines of TILES:", *found["best"]]))
    else:
        found["copy_gigabytes_per_second"], found["rows"] = measure(shapes, words.repeats, left_out)
        table(found["rows"], found["copy_gigabytes_per_second"])
    if words.json:
        write(words.json, {"title": "short attention", **found})


if __name__ == "__main__":
    main()
