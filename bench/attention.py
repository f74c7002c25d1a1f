"""plainvit's attention over short sequences compared with PyTorch's fused kernels, at the shapes of ViTs, in bf16.

    python -m bench.attention --json attention.json     needs an NVIDIA GPU

Times are of a forward and a backward pass, from packed qkv to the gradient of qkv. PyTorch's kernels take q, k and v,
so their time includes the views and copies that a model needs; "separate" is their time on three contiguous tensors.
cuDNN attention is not safe to train with: its gradients became NaN within 230 steps on an H200 (see plainvit.device).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.measure import first_line, make_parser, report, run_interleaved, summarize, time_cuda_calls, warn_skipped
from plainvit.models.fast.attention import explain_unfit, short_attention

ROUND_MICROSECONDS = 20_000
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN (unsafe)": SDPBackend.CUDNN_ATTENTION,
}
Run = Callable[[], object]


SHAPES = {  # images, heads, tokens, width of a head
    "B/16": (256, 12, 197, 64),
    "L/16": (256, 16, 197, 64),
    "H/14": (128, 16, 257, 80),
    "small": (512, 4, 64, 64),
}


def attend_packed(qkv: Tensor, heads: int, backend: SDPBackend) -> Tensor:
    """As a ViT in plain PyTorch computes it."""
    B, N, packed = qkv.shape
    q, k, v = qkv.view(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)  # 3 x [B, H, N, d]
    with sdpa_kernel(backend):
        output = scaled_dot_product_attention(q, k, v)
    return output.transpose(1, 2).reshape(B, N, packed // 3)


def attend_separate(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v)


def make_run(attend: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Run:
    """A forward and a backward pass."""
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad)


def make_runs(name: str, skipped: list[str]) -> dict[str, Run]:
    """System -> function to time; without the backends that fail here."""
    B, H, N, d = SHAPES[name]
    randn = partial(torch.randn, generator=torch.Generator("cuda").manual_seed(0), device="cuda", dtype=torch.bfloat16)
    qkv, grad = randn(B, N, 3 * H * d).requires_grad_(), randn(B, N, H * d)
    separate = [randn(B, H, N, d).requires_grad_() for _ in "qkv"]
    runs = {"plainvit": make_run(partial(short_attention, heads=H), (qkv,), grad)}
    for system, backend in BACKENDS.items():
        packed = make_run(partial(attend_packed, heads=H, backend=backend), (qkv,), grad)
        alone = make_run(partial(attend_separate, backend=backend), separate, randn(B, H, N, d))
        try:
            packed()
            alone()
            runs |= {system: packed, f"{system}, separate": alone}
        except RuntimeError as error:
            warn_skipped(f"{name}: {system}: {first_line(error)}", skipped)
    return runs


def measure_microseconds(run: Run, count: int) -> float:
    return 1e6 * time_cuda_calls(run, count)


def measure_shape(name: str, repeats: int, skipped: list[str]) -> list[dict[str, Any]]:
    """A row for each system."""
    timed: dict[str, Callable[[], float]] = {}
    for system, run in make_runs(name, skipped).items():
        time_cuda_calls(run, 3)  # compile and warm up
        count = max(5, int(ROUND_MICROSECONDS / max(measure_microseconds(run, 5), 1.0)))
        timed[system] = partial(measure_microseconds, run, count)
    times = {system: summarize(values) for system, values in run_interleaved(timed, repeats).items()}
    torch.cuda.empty_cache()
    baseline, shape = times["plainvit"]["median"], " x ".join(map(str, SHAPES[name]))
    return [
        {
            "name": f"{name}: {shape}, {system}",
            **row,
            "unit": "µs",
            "remark": f"{row['median'] / baseline:.2f}x plainvit",
        }
        for system, row in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=7)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, "bench.attention: no CUDA device was found: these kernels need an NVIDIA GPU\n")
    reason = explain_unfit(torch.empty(1, 197, 2304, dtype=torch.bfloat16, device="cuda"), 12)
    if reason:
        parser.exit(2, f"bench.attention: {reason}\n")
    skipped: list[str] = []
    rows = [row for name in SHAPES for row in measure_shape(name, args.repeats, skipped)]
    report("bench.attention", arguments, args.json, "attention, forward and backward", rows, skipped=skipped)


if __name__ == "__main__":
    main()
