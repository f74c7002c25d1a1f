"""The GELU x Phi(x) by a short formula, for compiled code on GPUs in bf16.

    y = gelu(x)                               # F.gelu(x), off by 6e-6 of it, where bf16 rounds to 2e-3

An MLP's hidden numbers are the largest of all activations, and its GELU should take no longer than to read and to write
them. The error function of the GPU's library does: some 30 instructions, with branches. But the logarithm of the normal
distribution's tail, log Phi(-a), is nearly a parabola, so that 7 multiply-adds and one exponential do.
"""

import math
from collections.abc import Callable
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
    return _Gelu.apply(x, normal)  # pyright: ignore


def gelu_tanh(x: Tensor) -> Tensor:
    """The form with a tanh, which is a sigmoid of twice as much: without the tanh of the GPU's library, again long."""
    return _Gelu.apply(x, sigmoid)  # pyright: ignore


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Phi(x), and x times its slope."""
    a, log = x.abs(), torch.full_like(x, TAIL[-1])
    for coefficient in reversed(TAIL[:-1]):
        log = log * a + coefficient
    tail = log.exp()
    density = (-0.5 * x * x).exp() * (2 * math.pi) ** -0.5
    return torch.where(x < 0, tail, 1 - tail), x * density


def sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """What stands for Phi in the form with a tanh, and x times its slope."""
    linear, cubic = (8 / math.pi) ** 0.5, (8 / math.pi) ** 0.5 * 0.044715
    square = (x * x).clamp(max=100)  # beyond, it is 0 or 1, and a slope of 0 times infinity would be none
    phi = torch.sigmoid(x * (linear + cubic * square))
    return phi, phi * (1 - phi) * x * (linear + 3 * cubic * square)


class _Gelu(torch.autograd.Function):
    """x Phi(x) with its slope written out, Phi(x) + x Phi'(x): that of the formula would be longer and less exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.form = form
        wide = x.float()
        return (wide * form(wide)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        (x,) = ctx.saved_tensors
        phi, more = ctx.form(x.float())
        return (grad.float() * (phi + more)).to(x.dtype), None
