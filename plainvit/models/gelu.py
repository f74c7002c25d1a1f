"""The GELU x Phi(x) by a short formula, for compiled code on GPUs in bf16.

    y = gelu(x)                               # F.gelu(x), off by 6e-6 of it, where bf16 rounds to 2e-3

An MLP's hidden numbers are the largest of all activations, and its GELU should take no longer than to read and to write
them. The error function of the GPU's library does: some 30 instructions, with branches. But the logarithm of the normal
distribution's tail, log Phi(-a), is nearly a parabola, so that 7 multiply-adds and one exponential do.
"""

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
LINEAR = 1.5957691216057308  # sqrt(8 / pi)
CUBIC = LINEAR * 0.044715


def gelu(x: Tensor) -> Tensor:
    wide = x.float()
    a = wide.abs().clamp(max=100)  # where the tail is 0, and its logarithm still a number
    log = TAIL[-1] * a + TAIL[-2]
    for coefficient in reversed(TAIL[:-2]):
        log = log * a + coefficient
    tail = torch.exp(log)
    return (wide * torch.where(wide < 0, tail, 1 - tail)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The form with a tanh, which is a sigmoid of twice as much: without the tanh of the GPU's library, again long."""
    wide = x.float()
    square = (wide * wide).clamp(max=100)  # beyond, it is 0 or 1
    return (wide * torch.sigmoid(wide * (LINEAR + CUBIC * square))).to(x.dtype)
