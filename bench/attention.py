"""Attention over short sequences compared with PyTorch's fused kernels, forward and backward, at the shapes of ViTs.

    python -m bench.attention --json attention.json     every system at every shape, bf16, on a CUDA device

Packed qkv in, tokens out; backward: from their gradient to that of the packed qkv. PyTorch's kernels want q, k and v
apart: their time includes the views, permutes and copies that eager PyTorch makes for that, and is given without them
too ("q, k, v apart"). cuDNN's is not safe to train with: its gradients became NaN within 230 steps on an H200 (see
plainvit.device). GB/s: what must move at least (forward: qkv and tokens; backward: qkv, tokens, their gradient and
that of qkv) over the time taken, and its share of the rate of a copy measured in the same run. Times are of CUDA
events around many calls; systems take turns in every round.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.measure import copy_rate, event_seconds, first_line, interleaved, make_parser, publish, show, summary, tell
from plainvit.models.fast.attention import short_attention, unfit

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
    return 1e6 * event_seconds(run, count)


def calls(run: Run) -> int:
    """How many last long enough; compiles and warms up on the way."""
    event_seconds(run, 3)
    return max(5, int(LASTS / max(microseconds(run, 5), 1.0)))


def measure(shapes: Sequence[Shape], repeats: int, left_out: list[str]) -> tuple[float, list[dict[str, Any]]]:
    """The rate of a copy in GB/s, and a row for each shape, pass and system."""
    copied, rows = 1000 * copy_rate("cuda"), []
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
    shape: Shape, what: str, name: str, numbers: dict[str, Any], medians: Mapping[str, Any], copied: float
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
        "relative_to_plainvit": numbers["median"] / medians["plainvit"]["median"],
    }


def table(rows: Sequence[dict[str, Any]], copied: float) -> None:
    columns = ("pass", "system", "µs", "spread", "GB/s", "of copy", "x plainvit")
    for shape, some in itertools.groupby(rows, key=lambda row: row["shape"]):
        lines = [
            [
                *(row["pass"], row["system"], f"{row['median']:.0f}", f"{row['least']:.0f}-{row['most']:.0f}"),
                *(f"{row['gigabytes_per_second']:.0f}", f"{row['of_copy']:.0%}", f"{row['relative_to_plainvit']:.2f}"),
            ]
            for row in some
        ]
        show(f"{shape}, bf16; a copy moves {copied:.0f} GB/s", columns, lines, left=("pass", "system"))


# Command --------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES), help="some of them, by name")
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
    copied, rows = measure(shapes, words.repeats, left_out)
    table(rows, copied)
    found = {"copy_gigabytes_per_second": copied, "rows": rows, "left_out": left_out}
    publish("bench.attention", arguments, words.json, title="short attention", **found)


if __name__ == "__main__":
    main()
