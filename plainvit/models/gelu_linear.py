"""GELU and the linear layer after it, for training on NVIDIA GPUs: a backward pass that reads its numbers once.

    h = F.linear(x, fc1.weight, fc1.bias.detach())
    y = gelu_linear(h, fc1.bias, fc2.weight, fc2.bias, tanh=False)         # fc2(gelu(h))

Backward, an MLP needs GELU's slope, GELU itself once more (kept, it would be the largest of all activations), and the
sum over all tokens that is the gradient of the bias before it. PyTorch's compiler makes two kernels of that, each of
which reads the MLP's hidden numbers; here one Triton kernel does (gelu_linear_kernels.py, loaded on first use).
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.models.short_attention import LARGE, device_ready, interpreted

ROWS, COLUMNS = 16, 256  # of a tile
PROGRAMS = 1024  # about as many as fill a large GPU a few times


def pays(x: Tensor) -> bool:
    """Whether there is a GPU for the kernel, and enough work for it where Python has to start it."""
    large = torch.compiler.is_compiling() or x.numel() >= LARGE // 4
    return x.is_cuda and large and device_ready(x.get_device())


def run(grad: Tensor, h: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """GELU of h [T, M], the gradient before it, and its sum over T in fp32; the same bits each time."""
    kernel: Any = import_module("plainvit.models.gelu_linear_kernels").gelu_backward
    grad, h = grad.contiguous(), h.contiguous()
    T, M = h.shape
    across = -(-M // COLUMNS)
    chunk = ROWS * max(1, -(-T // (ROWS * max(PROGRAMS // across, 1))))  # rows of a program
    parts = -(-T // chunk)
    again, dh, sums = torch.empty_like(h), torch.empty_like(h), h.new_empty(parts, M, dtype=torch.float32)
    if T:
        with torch.cuda.device_of(h):
            kernel[parts, across](grad, h, again, dh, sums, T, M, chunk, TANH=tanh, ROWS=ROWS, COLUMNS=COLUMNS)
    return again, dh, sums.sum(0)


@torch.library.custom_op("plainvit::gelu_backward", mutates_args=())
def _gelu_backward(grad: Tensor, h: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not h.is_cuda and not interpreted(h):
        raise ValueError(f"h is on {h.device.type}: this kernel needs a CUDA device")
    return run(grad, h, tanh)


@_gelu_backward.register_fake
def _(grad: Tensor, h: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return h.new_empty(h.shape), h.new_empty(h.shape), h.new_empty(h.shape[1], dtype=torch.float32)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, before: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:  # noqa: ARG004
        ctx.tanh = tanh
        ctx.save_for_backward(h, weight)
        return F.linear(F.gelu(h, approximate="tanh" if tanh else "none"), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:  # pyright: ignore
        h, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)  # [T, D]
        again, dh, sums = _gelu_backward(grad @ weight, h.flatten(0, -2), ctx.tanh)
        return dh.view_as(h), sums, grad.mT @ again, grad.sum(0), None


def gelu_linear(h: Tensor, before: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """weight @ gelu(h) + bias, of h [..., M]. `before` is h's own bias: added already, its gradient comes from here."""
    return _GeluLinear.apply(h, before, weight.to(h.dtype), bias.to(h.dtype), tanh)  # pyright: ignore
