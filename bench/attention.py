"""plainvit's attention over short sequences compared with PyTorch's fused kernels, at the shapes of ViTs, in bf16.

    python -m bench.attention --json attention.json     needs an NVIDIA GPU

Input is packed qkv, output are tokens; the backward pass computes the gradient of qkv. PyTorch's kernels take q, k and
v, so their time includes the views and copies that a model needs; "separate" is their time on three contiguous tensors.
cuDNN attention is not safe to train with: its gradients became NaN within 230 steps on an H200 (see plainvit.device).
Times are medians of interleaved rounds, by CUDA events over many calls.
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

from bench.measure import (
    first_line,
    make_parser,
    print_table,
    run_interleaved,
    summarize,
    time_cuda_calls,
    warn_skipped,
    write_results,
)
from plainvit.models.fast.attention import short_attention, unfit

PASSES = ("forward", "backward", "both")
ROUND_MICROSECONDS = 20_000
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
    head_width: int

    def __str__(self) -> str:
        return f"{self.name}: {self.batch} x {self.heads} x {self.tokens} x {self.head_width}"


SHAPES = (
    Shape("B/16", 256, 12, 197, 64),
    Shape("L/16", 256, 16, 197, 64),
    Shape("H/14", 128, 16, 257, 80),
    Shape("small", 512, 4, 64, 64),
)


# Systems --------------------------------------------------------------------------------------------------------------


def make_inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    """Packed qkv [B, N, 3D], and a gradient of the output [B, N, D]."""
    generator = torch.Generator("cuda").manual_seed(0)
    D = shape.heads * shape.head_width
    randn = partial(torch.randn, generator=generator, device="cuda")
    qkv = randn(shape.batch, shape.tokens, 3 * D).bfloat16().requires_grad_()
    return qkv, randn(shape.batch, shape.tokens, D).bfloat16()


def attend_packed(qkv: Tensor, heads: int, backend: SDPBackend) -> Tensor:
    """As a ViT in plain PyTorch computes it."""
    B, N, packed = qkv.shape
    q, k, v = qkv.view(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)  # 3 x [B, H, N, d]
    with sdpa_kernel(backend):
        output = scaled_dot_product_attention(q, k, v)
    return output.transpose(1, 2).reshape(B, N, packed // 3)


def attend_separate(qkv: Sequence[Tensor], backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        q, k, v = qkv
        return scaled_dot_product_attention(q, k, v)


def separate(qkv: Tensor, grad: Tensor, heads: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient as contiguous tensors [B, H, N, d]."""
    B, N, _ = grad.shape
    parts = qkv.detach().view(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)
    separate_grad = grad.view(B, N, heads, -1).transpose(1, 2).contiguous()
    return [part.contiguous().requires_grad_() for part in parts], separate_grad


def make_passes(attend: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor) -> dict[str, Run]:
    output = attend()
    return {
        "forward": attend,
        "backward": lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True),
        "both": lambda: torch.autograd.grad(attend(), inputs, grad),
    }


def make_systems(shape: Shape, skipped: list[str]) -> dict[str, dict[str, Run]]:
    """System -> pass -> function to time; without the peers that fail here."""
    qkv, grad = make_inputs(shape)
    systems = {"plainvit": make_passes(lambda: short_attention(qkv, shape.heads), (qkv,), grad)}
    parts, separate_grad = separate(qkv, grad, shape.heads)
    for name, backend in PEERS.items():
        try:
            packed = make_passes(partial(attend_packed, qkv, shape.heads, backend), (qkv,), grad)
            alone = make_passes(partial(attend_separate, parts, backend), parts, separate_grad)
            packed["both"]()
            alone["both"]()
            systems |= {name: packed, f"{name}, separate": alone}
        except RuntimeError as error:
            warn_skipped(f"{shape.name}: {name}: {first_line(error)}", skipped)
    return systems


# Measurement ----------------------------------------------------------------------------------------------------------


def measure_microseconds(run: Run, count: int) -> float:
    return 1e6 * time_cuda_calls(run, count)


def choose_count(run: Run) -> int:
    """Calls per round; compiles and warms up first."""
    time_cuda_calls(run, 3)
    return max(5, int(ROUND_MICROSECONDS / max(measure_microseconds(run, 5), 1.0)))


def measure(repeats: int, skipped: list[str]) -> list[dict[str, Any]]:
    """A row for each shape, pass and system."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        systems = make_systems(shape, skipped)
        for name in PASSES:
            runs = {
                system: partial(measure_microseconds, passes[name], choose_count(passes[name]))
                for system, passes in systems.items()
            }
            times = {system: summarize(values) for system, values in run_interleaved(runs, repeats).items()}
            rows += [{"shape": str(shape), "pass": name, **row} for row in make_rows(times)]
        del systems
        torch.cuda.empty_cache()
    return rows


def make_rows(times: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    baseline = times["plainvit"]["median"]
    return [
        {"system": system, "unit": "microseconds", **values, "relative_to_plainvit": values["median"] / baseline}
        for system, values in times.items()
    ]


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    for shape, group in itertools.groupby(rows, key=lambda row: row["shape"]):
        lines = [
            [
                *(row["pass"], row["system"], f"{row['median']:.0f}", f"{row['min']:.0f}-{row['max']:.0f}"),
                f"{row['relative_to_plainvit']:.2f}",
            ]
            for row in group
        ]
        print_table(shape, ("pass", "system", "µs", "spread", "x plainvit"), lines, left=("pass", "system"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=7)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, "bench.attention: no CUDA device was found: these kernels need an NVIDIA GPU\n")
    if reason := unfit(torch.empty(1, 197, 2304, dtype=torch.bfloat16, device="cuda"), 12):
        parser.exit(2, f"bench.attention: {reason}\n")
    skipped: list[str] = []
    rows = measure(args.repeats, skipped)
    print_rows(rows)
    write_results("bench.attention", arguments, args.json, title="short attention", rows=rows, skipped=skipped)


if __name__ == "__main__":
    main()
