"""The GELU x Phi(x) by a short formula, for compiled code on GPUs in bf16.

    register_decompositions()                 # the compiler fuses the formula and its derivative with its neighbors
        y = gelu(x)                           # F.gelu(x) with a relative error of 6e-6; bf16 rounds to 2e-3
        z = gelu_linear(x, weight, bias, ...) # F.linear(gelu(x), weight, bias), keeping x alone for backward
    y = linear_gelu(x, weight, bias)          # gelu(F.linear(x, weight, bias)) in one kernel, for inference

The hidden values of an MLP are the largest activations, and their GELU should be limited by memory alone. The GPU's
error function is not: some 30 instructions, with branches. The logarithm of the normal distribution's tail,
log Phi(-a), is nearly a parabola, so 7 multiply-adds and one exponential suffice.

The gradient is written out, because autograd's of the formula would take twice as long. These are custom operators:
with an autograd.Function inside `checkpoint`, PyTorch 2.11 keeps the gradient in fp32 instead of recomputing it.
Letters: R tokens, M hidden values per token, D width.
"""

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.models.trace import assume_constant_result

# Coefficients of log Phi(-a) for 0 <= a <= 6, minimax with an error of 4e-6; beyond, it falls towards Phi(-a) = 0
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
ROWS, TURNS, COLUMNS = 16, 8, 128  # of gelu_gradients: a program computes TURNS tiles of ROWS x COLUMNS
PRODUCT = {"ROWS": 128, "COLUMNS": 256, "INNER": 64, "GROUP": 8}  # tile sizes of linear_gelu


def gelu(x: Tensor) -> Tensor:
    return _gelu(x, False)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form, computed by a sigmoid, which is faster than the GPU's tanh."""
    return _gelu(x, True)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Phi(x), and x times its derivative."""
    a = x.abs()
    log = TAIL[-1] * a + TAIL[-2]
    for coefficient in reversed(TAIL[:-2]):
        log = log * a + coefficient
    tail = log.exp()
    return torch.where(x < 0, tail, 1 - tail), x * ((-0.5 * x * x).exp() * (2 * math.pi) ** -0.5)


def sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tanh form's approximation of Phi, and x times its derivative."""
    linear, cubic = (8 / math.pi) ** 0.5, (8 / math.pi) ** 0.5 * 0.044715
    square = (x * x).clamp(max=100)  # beyond, phi is 0 or 1; avoids 0 times Inf in the derivative
    phi = torch.sigmoid(x * (linear + cubic * square))
    return phi, phi * (1 - phi) * x * (linear + 3 * cubic * square)


def _compute_gelu(x: Tensor, tanh: bool) -> Tensor:
    exact = x.float()
    phi, _ = sigmoid(exact) if tanh else normal(exact)
    return (exact * phi).to(x.dtype)


def _gradient(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    phi, slope = sigmoid(x.float()) if tanh else normal(x.float())
    return (grad.float() * (phi + slope)).to(x.dtype)


# The operators --------------------------------------------------------------------------------------------------------

_gelu = torch.library.custom_op("plainvit::gelu", _compute_gelu, mutates_args=())
_gelu_backward = torch.library.custom_op("plainvit::gelu_backward", _gradient, mutates_args=())


@_gelu.register_fake
def _(x: Tensor, tanh: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


@_gelu_backward.register_fake
def _(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:  # noqa: ARG001
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _gelu_backward(grad, *ctx.saved_tensors, ctx.tanh), None


_gelu.register_autograd(_differentiate, setup_context=_save_for_backward)


# With the matmul that follows -----------------------------------------------------------------------------------------


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor, hidden_bias: Tensor, *, tanh: bool) -> Tensor:
    """F.linear(gelu(x), weight, bias) for x [..., M] and weight [D, M]: [..., D], in x's precision.

    The backward pass keeps x and recomputes the GELU. hidden_bias [M] is the bias that was added to x without a
    gradient: its gradient is computed here, in the same pass as the gradient of x.
    """
    return _gelu_linear(x.flatten(0, -2), weight, bias, hidden_bias, tanh).unflatten(0, x.shape[:-1])


def _linear_of_gelu(x: Tensor, weight: Tensor, bias: Tensor, hidden_bias: Tensor, tanh: bool) -> Tensor:  # noqa: ARG001, see above
    return F.linear(_compute_gelu(x, tanh), weight.to(x.dtype), bias.to(x.dtype))


def _gradients(grad: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x [R, M] from that of the GELU, the GELU, and partial sums of the gradient, fp32 [.., M]."""
    if not x.is_cuda:
        dx = _gradient(grad, x, tanh)
        return dx, _compute_gelu(x, tanh), dx.float().sum(0, keepdim=True)
    from plainvit.models.fast import gelu_kernels

    (R, M), x, grad = x.shape, x.contiguous(), grad.contiguous()
    dx, y = torch.empty_like(x), torch.empty_like(x)
    sums = x.new_empty(math.ceil(R / (ROWS * TURNS)), M, dtype=torch.float32)
    launch: Any = gelu_kernels.gelu_gradients[(math.ceil(M / COLUMNS), len(sums))]
    with torch.cuda.device_of(x):
        launch(grad, x, dx, y, sums, R, M=M, TANH=tanh, ROWS=ROWS, TURNS=TURNS, COLUMNS=COLUMNS)
    return dx, y, sums


_gelu_linear = torch.library.custom_op("plainvit::gelu_linear", _linear_of_gelu, mutates_args=())
_gelu_gradients = torch.library.custom_op("plainvit::gelu_gradients", _gradients, mutates_args=())


@_gelu_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, hidden_bias: Tensor, tanh: bool) -> Tensor:  # noqa: ARG001
    return x.new_empty(len(x), len(weight))


@_gelu_gradients.register_fake
def _(grad: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    programs = -(-len(x) // (ROWS * TURNS)) if x.is_cuda else 1  # rounded up, also where the length is symbolic
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(programs, x.shape[1], dtype=torch.float32)


def _save_for_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias, hidden_bias, ctx.tanh = inputs
    ctx.dtypes = bias.dtype, hidden_bias.dtype
    ctx.save_for_backward(x, weight)


def _differentiate_linear_of_gelu(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    bias_dtype, hidden_bias_dtype = ctx.dtypes
    grad_x, y, sums = _gelu_gradients(grad @ weight.to(x.dtype), x, ctx.tanh)
    grad_weight = (grad.t() @ y).to(weight.dtype)
    grad_bias = grad.sum(0, dtype=torch.float32).to(bias_dtype)
    return grad_x, grad_weight, grad_bias, sums.sum(0).to(hidden_bias_dtype), None


_gelu_linear.register_autograd(_differentiate_linear_of_gelu, setup_context=_save_for_matmul)


# With the matmul before it --------------------------------------------------------------------------------------------


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(F.linear(x, weight, bias)) for x [..., D] and weight [M, D]: [..., M]. On a GPU only if `copies_tiles`."""
    return _linear_gelu(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _linear_then_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if not x.is_cuda:
        return _compute_gelu(F.linear(x, weight, bias), False)
    from plainvit.models.fast import gelu_kernels

    (R, D), M = x.shape, len(weight)
    y = x.new_empty(R, M)
    tiles = math.ceil(R / PRODUCT["ROWS"]) * math.ceil(M / PRODUCT["COLUMNS"])
    programs = min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count)
    launch: Any = gelu_kernels.linear_gelu[(programs,)]
    with torch.cuda.device_of(x):
        launch(
            *describe_tiles(align_rows(x), align_rows(weight), y, bias), R, M, D,
            **PRODUCT, PROGRAMS=programs, num_warps=8, num_stages=3,
        )  # fmt: skip
    return y


def align_rows(x: Tensor) -> Tensor:
    """Contiguous, and aligned to 16 bytes, as tensor descriptors require."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def describe_tiles(x: Tensor, weight: Tensor, y: Tensor, bias: Tensor) -> tuple[Any, ...]:
    """The kernel's tensors as tensor descriptors."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, columns, inner = PRODUCT["ROWS"], PRODUCT["COLUMNS"], PRODUCT["INNER"]
    tiles = ((x, rows, inner), (weight, columns, inner), (y, rows, columns // 2))
    tiled_x, tiled_weight, tiled_y = (TensorDescriptor(t, [*t.shape], [*t.stride()], [*size]) for t, *size in tiles)
    return tiled_x, tiled_weight, bias, tiled_y


_linear_gelu = torch.library.custom_op("plainvit::linear_gelu", _linear_then_gelu, mutates_args=())


@_linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(len(x), len(weight))


@assume_constant_result
def copies_tiles(index: int) -> bool:
    """Whether a GPU has tensor descriptors: Hopper, for which the kernel is written."""
    has = importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
    return has and torch.cuda.get_device_capability(index)[0] == 9


# For the compiler -----------------------------------------------------------------------------------------------------


@assume_constant_result
def register_decompositions() -> bool:
    """Registers the formulas with the compiler, which would otherwise call the operators; False if it cannot."""
    try:
        from torch._inductor.decomposition import select_decomp_table

        operators, table = torch.ops.plainvit, select_decomp_table()
        table[operators.gelu.default] = _compute_gelu
        table[operators.gelu_backward.default] = _gradient
        table[operators.gelu_linear.default] = _linear_of_gelu
    except (ImportError, AttributeError):  # a private part of PyTorch, which other versions may not have
        return False
    return True
