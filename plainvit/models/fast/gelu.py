"""The GELU x Phi(x) by a short formula, for compiled code on GPUs in bf16.

    register_decompositions()                 # the compiler fuses the formula and its derivative into what is around
        y = gelu(x)                           # F.gelu(x), off by 6e-6 of it, where bf16 rounds to 2e-3
        z = gelu_linear(x, weight, bias, ...) # F.linear(gelu(x), weight, bias), which keeps x alone to learn from
    y = linear_gelu(x, weight, bias)          # gelu(F.linear(x, weight, bias)) in one kernel, to learn nothing from

An MLP's hidden numbers are the largest of all activations, and its GELU should take no longer than to read and to write
them. The error function of the GPU's library does: some 30 instructions, with branches. But the logarithm of the normal
distribution's tail, log Phi(-a), is nearly a parabola, so that 7 multiply-adds and one exponential do.

Operators, because the slope is written out: that of the formula itself would take twice as long. Not an
autograd.Function: inside of `checkpoint` PyTorch 2.11 keeps the slope, in fp32, in place of computing it again.
Letters: R tokens, M hidden numbers of each, D width.
"""

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.models.trace import assume_constant_result

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
ROWS, TURNS, COLUMNS = 16, 8, 128  # of gelu_gradients: a program's tile, and how many of them one below the other
PRODUCT = {"ROWS": 128, "COLUMNS": 256, "INNER": 64, "GROUP": 8}  # of linear_gelu; and 8 warps, 3 stages


def gelu(x: Tensor) -> Tensor:
    return _gelu(x, False)


def gelu_tanh(x: Tensor) -> Tensor:
    """The form with a tanh, which is a sigmoid of twice as much: without the tanh of the GPU's library, again long."""
    return _gelu(x, True)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Phi(x), and x times its slope."""
    a = x.abs()
    log = TAIL[-1] * a + TAIL[-2]
    for coefficient in reversed(TAIL[:-2]):
        log = log * a + coefficient
    tail = log.exp()
    return torch.where(x < 0, tail, 1 - tail), x * ((-0.5 * x * x).exp() * (2 * math.pi) ** -0.5)


def sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """What stands for Phi in the form with a tanh, and x times its slope."""
    linear, cubic = (8 / math.pi) ** 0.5, (8 / math.pi) ** 0.5 * 0.044715
    square = (x * x).clamp(max=100)  # beyond, it is 0 or 1, and a slope of 0 times infinity would be none
    phi = torch.sigmoid(x * (linear + cubic * square))
    return phi, phi * (1 - phi) * x * (linear + 3 * cubic * square)


def _value(x: Tensor, tanh: bool) -> Tensor:
    wide = x.float()
    return (wide * (sigmoid if tanh else normal)(wide)[0]).to(x.dtype)


def _gradient(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    phi, more = (sigmoid if tanh else normal)(x.float())
    return (grad.float() * (phi + more)).to(x.dtype)


# The operators --------------------------------------------------------------------------------------------------------

_gelu = torch.library.custom_op("plainvit::gelu", _value, mutates_args=())
_gelu_backward = torch.library.custom_op("plainvit::gelu_backward", _gradient, mutates_args=())


@_gelu.register_fake
def _(x: Tensor, tanh: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


@_gelu_backward.register_fake
def _(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:  # noqa: ARG001
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _gelu_backward(grad, *ctx.saved_tensors, ctx.tanh), None


_gelu.register_autograd(_differentiate, setup_context=_keep)


# With the product that follows ----------------------------------------------------------------------------------------


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, *, tanh: bool) -> Tensor:
    """A GELU of x [..., M] times weight [D, M], and a bias [D]: [..., D], in x's precision.

    For its gradients x is kept, and the GELU computed again. before [M]: what was added to every row of x, there
    without a gradient. It has one here, for the pass that makes the gradient of x can sum it up.
    """
    return _gelu_linear(x.flatten(0, -2), weight, bias, before, tanh).unflatten(0, x.shape[:-1])


def _product(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, tanh: bool) -> Tensor:  # noqa: ARG001, see above
    return F.linear(_value(x, tanh), weight.to(x.dtype), bias.to(x.dtype))


def _gradients(grad: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of the GELU: that of x [R, M], the GELU itself, and sums of the first, fp32 [some, M]."""
    if not x.is_cuda:
        found = _gradient(grad, x, tanh)
        return found, _value(x, tanh), found.float().sum(0, keepdim=True)
    from plainvit.models.fast import gelu_kernels

    (R, M), x, grad = x.shape, x.contiguous(), grad.contiguous()
    found, again = torch.empty_like(x), torch.empty_like(x)
    sums = x.new_empty(-(-R // (ROWS * TURNS)), M, dtype=torch.float32)
    launch: Any = gelu_kernels.gelu_gradients[(-(-M // COLUMNS), len(sums))]
    with torch.cuda.device_of(x):
        launch(grad, x, found, again, sums, R, M=M, TANH=tanh, ROWS=ROWS, TURNS=TURNS, COLUMNS=COLUMNS)
    return found, again, sums


_gelu_linear = torch.library.custom_op("plainvit::gelu_linear", _product, mutates_args=())
_gelu_gradients = torch.library.custom_op("plainvit::gelu_gradients", _gradients, mutates_args=())


@_gelu_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, tanh: bool) -> Tensor:  # noqa: ARG001
    return x.new_empty(len(x), len(weight))


@_gelu_gradients.register_fake
def _(grad: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    programs = -(-len(x) // (ROWS * TURNS)) if x.is_cuda else 1
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(programs, x.shape[1], dtype=torch.float32)


def _keep_for_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias, before, ctx.tanh = inputs
    ctx.dtypes = bias.dtype, before.dtype
    ctx.save_for_backward(x, weight)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, again, sums = _gelu_gradients(grad @ weight.to(x.dtype), x, ctx.tanh)
    of_weight = (grad.t() @ again).to(weight.dtype)
    bias, before = ctx.dtypes
    return of_x, of_weight, grad.sum(0, dtype=torch.float32).to(bias), sums.sum(0).to(before), None


_gelu_linear.register_autograd(_differentiate_product, setup_context=_keep_for_product)


# With the product before it -------------------------------------------------------------------------------------------


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A GELU of x [..., D] times weight [M, D] and a bias [M]: [..., M]. On a GPU only where `copies_tiles`."""
    return _linear_gelu(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _ended(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if not x.is_cuda:
        return _value(F.linear(x, weight, bias), False)
    from plainvit.models.fast import gelu_kernels

    (R, D), M = x.shape, len(weight)
    y = x.new_empty(R, M)
    tiles = -(-R // PRODUCT["ROWS"]) * -(-M // PRODUCT["COLUMNS"])
    programs = min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count)
    launch: Any = gelu_kernels.linear_gelu[(programs,)]
    with torch.cuda.device_of(x):
        launch(
            *tiled(aligned(x), aligned(weight), y, bias), R, M, D,
            **PRODUCT, PROGRAMS=programs, num_warps=8, num_stages=3,
        )  # fmt: skip
    return y


def aligned(x: Tensor) -> Tensor:
    """Row after row, from a multiple of 16 bytes on: a GPU copies no other tiles."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def tiled(x: Tensor, weight: Tensor, y: Tensor, bias: Tensor) -> tuple[Any, ...]:
    """The kernel's tensors, as its tiles take them."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, columns, inner = PRODUCT["ROWS"], PRODUCT["COLUMNS"], PRODUCT["INNER"]
    tiles = ((x, rows, inner), (weight, columns, inner), (y, rows, columns // 2))
    of_x, of_weight, of_y = (TensorDescriptor(t, [*t.shape], [*t.stride()], [*size]) for t, *size in tiles)
    return of_x, of_weight, bias, of_y


_linear_gelu = torch.library.custom_op("plainvit::linear_gelu", _ended, mutates_args=())


@_linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(len(x), len(weight))


@assume_constant_result
def copies_tiles(index: int) -> bool:
    """Whether that GPU, on which Triton runs, copies tiles by itself: Hopper's, for which the kernel is made."""
    has = importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
    return has and torch.cuda.get_device_capability(index)[0] == 9


# For the compiler -----------------------------------------------------------------------------------------------------


@assume_constant_result
def register_decompositions() -> bool:
    """Whether the compiler takes the formulas, here given to it; it would start the operators as they are."""
    try:
        from torch._inductor.decomposition import select_decomp_table

        operators = torch.ops.plainvit
        formulas = {operators.gelu: _value, operators.gelu_backward: _gradient, operators.gelu_linear: _product}
        select_decomp_table().update({operator.default: formula for operator, formula in formulas.items()})
    except (ImportError, AttributeError):  # no public part of PyTorch: another version may have it elsewhere
        return False
    return True
