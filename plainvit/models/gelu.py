"""The GELU x Phi(x) by a short formula, for compiled code on GPUs in bf16.

    y = gelu(x)                               # F.gelu(x), off by 6e-6 of it, where bf16 rounds to 2e-3

An MLP's hidden numbers are the largest of all activations, and its GELU should take no longer than to read and to write
them. The error function of the GPU's library does: some 30 instructions, with branches. But the logarithm of the normal
distribution's tail, log Phi(-a), is nearly a parabola, so that 7 multiply-adds and one exponential do.
"""

import math
from typing import Any

import torch
from torch import Tensor

# log Phi(-a) = log(1/2) + ... for 0 <= a <= 6, minimax: off by 4e-6 there. Beyond, it falls on towards Phi(-a) = 0.
TAIL = (
    -0.6931471824645996,
    -0.7979609966278076,
    -0.31783679127693176,
    -0.03735435754060745,
    0.00587570620700717,
    -0.0006399044650606811,
    4.209228063700721e-05,
    -1.2433595202310244e-06,
)


def gelu(x: Tensor) -> Tensor:
    return _Gelu.apply(x)  # pyright: ignore


def normal(x: Tensor) -> Tensor:
    """Phi(x), of fp32."""
    a, log = x.abs(), torch.full_like(x, TAIL[-1])
    for coefficient in reversed(TAIL[:-1]):
        log = log * a + coefficient
    tail = log.exp()
    return torch.where(x < 0, tail, 1 - tail)


class _Gelu(torch.autograd.Function):
    """With its slope written out, Phi(x) + x phi(x): that of the formula would be longer and less exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * normal(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        (x,) = ctx.saved_tensors
        wide = x.float()
        density = (-0.5 * wide * wide).exp() * (2 * math.pi) ** -0.5
        return (grad.float() * (normal(wide) + wide * density)).to(x.dtype)
