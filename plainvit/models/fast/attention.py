"""Attention for short sequences on NVIDIA GPUs, in Triton: packed qkv in, tokens ready for the output projection out.

    if is_faster(qkv, heads):                           # bf16 or fp16, N <= 288, heads of 32, 64 or 80
        tokens = short_attention(qkv, heads)            # [B, N, 3D] -> [B, N, D]
        tokens = short_attention(qkv, heads, bias)      # the same; also computes the gradient of qkv's bias

Flash kernels are made for thousands of tokens: at 197 they pad both sides to 256 and need q, k and v permuted. Here qkv
is read and its gradient written in place, and results are bit-identical from call to call (no atomics). The kernels
are in attention_kernels.py, loaded on first use; `accelerate` (__init__.py) attaches them: FastAttention in modules.py.

Letters: B batch, N tokens, D width, H heads, d head width.
"""

import importlib.util
import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plainvit.models.trace import assume_constant_result

MAX_TOKENS, DTYPES = 288, (torch.bfloat16, torch.float16)
LARGE = 2**24  # values in qkv: about 30 us on a large GPU
LOG2E = 1.4426950408889634


class Launch(NamedTuple):
    """Tile sizes and Triton options of one kernel.

    Args:
        rows: Queries in a block; Hopper's tensor cores want at least 64 where rows come first.
        keys: Keys in the widest tile; in the kernel of dK and dV, keys of a program.
        stages: Loads in flight in the loop; 1 leaves the overlap to other programs on the multiprocessor.
        registers: The most a thread may use, where that lets one more program in; 0 is no limit.
    """

    rows: int
    keys: int
    stages: int = 1
    registers: int = 0

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": 4, "num_stages": self.stages, "enable_fp_fusion": True}
        return options | ({"maxnreg": self.registers} if self.registers else {})


class Tiles(NamedTuple):
    """The launches for one head width."""

    forward: Launch
    queries: Launch  # dQ
    keys: Launch  # dK and dV


# Those of 64 are the best of a sweep on an H200; the others were chosen by the registers and shared memory that the
# compiler reports
_LAUNCHES = Tiles(Launch(64, 64, stages=3), Launch(64, 64, stages=2), Launch(64, 64))
TILES = {
    32: _LAUNCHES,
    64: _LAUNCHES,
    80: Tiles(Launch(64, 64, stages=2), Launch(64, 64, stages=2), Launch(32, 64, stages=2, registers=168)),
}


def split(length: int, widest: int) -> tuple[int, ...]:
    """Powers of two from 16 to `widest` that cover a length with little padding: 197 is 128 + 64 + 16."""
    tiles: list[int] = []
    while length > sum(tiles):
        rest = length - sum(tiles)
        tiles.append(max(16, min(widest, 1 << (rest.bit_length() - 1))))
        while len(tiles) > 1 and tiles[-1] == tiles[-2] and 2 * tiles[-1] <= widest:
            tiles[-2:] = [2 * tiles[-1]]
    return tuple(tiles)


# Where it may be used -------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Shape, dtype and device of a qkv [B, N, 3D] that may not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def is_faster(qkv: Tensor | Packed, heads: int) -> bool:
    """Whether short_attention supports this qkv and is faster than PyTorch's attention.

    Python needs longer to launch a Triton kernel, so in eager code only large inputs gain; compiled code always does.
    """
    return (torch.compiler.is_compiling() or math.prod(qkv.shape) >= LARGE) and explain_unfit(qkv, heads) is None


def explain_unfit(qkv: Tensor | Packed, heads: int) -> str | None:
    """Why short_attention does not support this qkv, or None."""
    if len(qkv.shape) != 3 or heads < 1 or qkv.shape[2] % (3 * heads) != 0:
        return f"qkv of shape {tuple(qkv.shape)} is not [batch, tokens, 3 x {heads} heads x width]"
    if not 1 <= qkv.shape[1] <= MAX_TOKENS:
        return f"{qkv.shape[1]} tokens: short attention supports 1 to {MAX_TOKENS}"
    if qkv.shape[2] // (3 * heads) not in TILES:
        return f"heads of width {qkv.shape[2] // (3 * heads)}: short attention supports {', '.join(map(str, TILES))}"
    if qkv.device.type != "cuda":
        return f"qkv is on {qkv.device.type}: short attention needs a CUDA device"
    if qkv.dtype not in DTYPES:
        return f"qkv is {qkv.dtype}: short attention supports bf16 and fp16"
    return None if device_ready(qkv.device.index) else "short attention needs triton and an NVIDIA GPU from Ampere on"


@assume_constant_result
def device_ready(index: int) -> bool:
    """Whether a GPU can run the kernels. The compiler evaluates it once per graph."""
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(index) >= (8, 0)


# Launches -------------------------------------------------------------------------------------------------------------


def _kernels() -> Any:
    """Imported on first use: triton is optional, and slow to import."""
    from plainvit.models.fast import attention_kernels

    return attention_kernels


def _make_dense(x: Tensor) -> Tensor:
    """Kernels need a last stride of 1; the gradient of a sum has 0."""
    return x if x.stride(-1) == 1 else x.contiguous()


def run_forward(qkv: Tensor, heads: int, launch: Launch) -> tuple[Tensor, Tensor]:
    """Tokens [B, N, D], and the base-2 logarithm of each softmax's sum [B, H, N]."""
    qkv = _make_dense(qkv)
    B, N, D = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    d = D // heads
    out, lse = qkv.new_empty(B, N, D), qkv.new_empty(B, heads, N, dtype=torch.float32)
    if B == 0:
        return out, lse
    programs = math.ceil(N / launch.rows)
    with torch.cuda.device_of(qkv):
        _kernels().attention_forward[(B * heads * programs,)](
            qkv, out, lse, qkv.stride(0), qkv.stride(1), LOG2E * d**-0.5, heads,
            N=N, PARTS=split(d, 64), WIDTHS=split(N, launch.keys), ROWS=launch.rows, PROGRAMS=programs,
            **launch.options(),
        )  # fmt: skip
    return out, lse


def run_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """dqkv, the gradient of the packed qkv [B, N, 3D], and its sum over images and tokens: the bias's, fp32 [3D].

    The two kernels fill dqkv in place: run_queries the first third, run_keys the others. Because softmax weights sum
    to 1, the gradients of values sum to the output's gradient, and those of keys to 0.
    """
    grad, qkv = _make_dense(grad), _make_dense(qkv)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0] == 0:
        return dqkv, lse.new_zeros(qkv.shape[2])
    delta = torch.empty_like(lse)
    sums = run_queries(grad, qkv, out, lse, delta, dqkv, heads, tiles.queries)
    run_keys(grad, qkv, lse, delta, dqkv, heads, tiles.keys)
    query_bias_grad, value_bias_grad = sums.sum(0).chunk(2)
    return dqkv, torch.cat((query_bias_grad, torch.zeros_like(query_bias_grad), value_bias_grad))


def _backward_arguments(grad: Tensor, qkv: Tensor, heads: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that both backward kernels share: strides, scales and heads; constant sizes."""
    d = qkv.shape[2] // (3 * heads)
    strides = qkv.stride(0), qkv.stride(1), grad.stride(0), grad.stride(1)
    return (*strides, LOG2E * d**-0.5, d**-0.5, heads), {"N": qkv.shape[1], "PARTS": split(d, 64)}


def run_queries(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, delta: Tensor, dqkv: Tensor, heads: int, launch: Launch
) -> Tensor:
    """Writes the first third of dqkv, and delta. Sums of that third and of grad: fp32 [programs, 2D]."""
    arguments, sizes = _backward_arguments(grad, qkv, heads)
    programs = math.ceil(qkv.shape[1] / launch.rows)
    sums = lse.new_empty(qkv.shape[0] * programs, qkv.shape[2] // 3 * 2)
    with torch.cuda.device_of(qkv):
        _kernels().attention_backward_queries[(qkv.shape[0] * heads * programs,)](
            qkv, out, lse, grad, delta, dqkv, sums, *arguments, **sizes,
            WIDTHS=split(qkv.shape[1], launch.keys), ROWS=launch.rows, PROGRAMS=programs, **launch.options(),
        )  # fmt: skip
    return sums


def run_keys(grad: Tensor, qkv: Tensor, lse: Tensor, delta: Tensor, dqkv: Tensor, heads: int, launch: Launch) -> None:
    """Writes the other two thirds of dqkv; after run_queries, whose delta it reads."""
    arguments, sizes = _backward_arguments(grad, qkv, heads)
    N = qkv.shape[1]
    programs = math.ceil(N / launch.keys)
    with torch.cuda.device_of(qkv):
        _kernels().attention_backward_keys[(qkv.shape[0] * heads * programs,)](
            qkv, lse, grad, delta, dqkv, *arguments, **sizes,
            KEYS=launch.keys, WIDTHS=split(N, launch.rows), PROGRAMS=programs, **launch.options(),
        )  # fmt: skip


# One opaque operator for autograd, the compiler and export ------------------------------------------------------------


@torch.library.custom_op("plainvit::short_attention", mutates_args=())
def _forward(qkv: Tensor, heads: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001, for its gradient
    is_interpreted = not qkv.is_cuda and os.environ.get("TRITON_INTERPRET") == "1"  # instead of a GPU, as in tests
    reason = "" if is_interpreted else explain_unfit(qkv, heads)
    if reason:
        raise ValueError(reason)
    return run_forward(qkv, heads, TILES[qkv.shape[2] // (3 * heads)].forward)


@_forward.register_fake
def _(qkv: Tensor, heads: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    B, N, D = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    return qkv.new_empty(B, N, D), qkv.new_empty(B, heads, N, dtype=torch.float32)


@torch.library.custom_op("plainvit::short_attention_backward", mutates_args=())
def _backward(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return run_backward(grad, qkv, out, lse, heads, TILES[qkv.shape[2] // (3 * heads)])


@_backward.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return qkv.new_empty(qkv.shape), lse.new_empty(qkv.shape[2])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, int, Tensor | None], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.heads, bias = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(qkv, *output)


def _differentiate(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, None, Tensor | None]:  # noqa: ARG001  lse stays inside
    dqkv, summed = _backward(grad, *ctx.saved_tensors, ctx.heads)
    return dqkv, None, None if ctx.bias is None else summed.to(ctx.bias)


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


def short_attention(qkv: Tensor, heads: int, bias: Tensor | None = None) -> Tensor:
    """softmax(q kT / sqrt(d)) v of each head, eqs. 5-8: qkv [B, N, 3D], q | k | v head by head -> [B, N, D].

    bias [3D] is the bias that was added to qkv without a gradient. Its gradient is the sum of qkv's, which the backward
    kernels compute on the way; a separate pass would cost a sixth of their time.
    """
    return _forward(qkv, heads, bias)[0]
