"""plainvit's attention over short sequences compared with PyTorch's fused kernels, at the shapes of ViTs, in bf16.

    python -m bench.attention --json attention.json     needs an NVIDIA GPU

Times are of a forward and a backward pass, from packed qkv to the gradient of qkv. PyTorch's kernels take q, k and v,
so their time includes the views and copies that a model needs; "separate" is their time on three contiguous tensors.
cuDNN attention is not safe to train with: its gradients became NaN within 230 steps on an H200 (see plainvit.device).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.measure import first_line, make_parser, report, run_interleaved, summarize, time_cuda_calls, warn_skipped
from plainvit.models.fast.attention import short_attention, unfit

ROUND_MICROSECONDS = 20_000
BACKENDS = {
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


def make_run(attend: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Run:
    """A forward and a backward pass."""
    return lambda: torch.autograd.grad(attend(), inputs, grad)


def make_runs(shape: Shape, skipped: list[str]) -> dict[str, Run]:
    """System -> function to time; without the backends that fail here."""
    qkv, grad = make_inputs(shape)
    runs = {"plainvit": make_run(lambda: short_attention(qkv, shape.heads), (qkv,), grad)}
    parts, separate_grad = separate(qkv, grad, shape.heads)
    for name, backend in BACKENDS.items():
        try:
            packed = make_run(partial(attend_packed, qkv, shape.heads, backend), (qkv,), grad)
            alone = make_run(partial(attend_separate, parts, backend), parts, separate_grad)
            packed()
            alone()
            runs |= {name: packed, f"{name}, separate": alone}
        except RuntimeError as error:
            warn_skipped(f"{shape.name}: {name}: {first_line(error)}", skipped)
    return runs


# Measurement ----------------------------------------------------------------------------------------------------------


def measure_microseconds(run: Run, count: int) -> float:
    return 1e6 * time_cuda_calls(run, count)


def choose_count(run: Run) -> int:
    """Calls per round; compiles and warms up first."""
    time_cuda_calls(run, 3)
    return max(5, int(ROUND_MICROSECONDS / max(measure_microseconds(run, 5), 1.0)))


def measure_shape(shape: Shape, repeats: int, skipped: list[str]) -> list[dict[str, Any]]:
    """A row for each system."""
    runs = make_runs(shape, skipped)
    timed = {system: partial(measure_microseconds, run, choose_count(run)) for system, run in runs.items()}
    times = {system: summarize(values) for system, values in run_interleaved(timed, repeats).items()}
    torch.cuda.empty_cache()
    baseline = times["plainvit"]["median"]
    return [
        {"name": f"{shape}, {system}", **row, "unit": "µs", "remark": f"{row['median'] / baseline:.2f}x plainvit"}
        for system, row in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=7)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, "bench.attention: no CUDA device was found: these kernels need an NVIDIA GPU\n")
    if reason := unfit(torch.empty(1, 197, 2304, dtype=torch.bfloat16, device="cuda"), 12):
        parser.exit(2, f"bench.attention: {reason}\n")
    skipped: list[str] = []
    rows = [row for shape in SHAPES for row in measure_shape(shape, args.repeats, skipped)]
    report("bench.attention", arguments, args.json, "attention, forward and backward", rows, skipped=skipped)


if __name__ == "__main__":
    main()
