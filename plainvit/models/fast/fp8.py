"""Products of 8-bit floats for the matrices of a ViT's blocks: nearly twice the rate of bf16 on a GPU that has them.

    plainvit train vit-l16-i21k --precision fp8           training: use_fp8(model)
    plainvit.load("B_16.npz", optimise="fp8")             answers: in_fp8(model)

Each row of an operand, that is each token and each output channel, is scaled by its own largest number to the range of
e4m3 and rounded (3 bits of mantissa, so 1/16 at most); products are summed up and scaled back by the GPU's own kernel
(torch._scaled_mm). Scales are of the numbers at hand, never of an earlier step: nothing is kept, so weights, optimiser
and checkpoints are those of bf16. In plain operations, which the compiler fuses into whatever makes the numbers.
Elsewhere the same arithmetic is emulated in fp32, slowly, for tests. Letters: M tokens, K in, N out.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plainvit.models.fast.attention import device_ready, split
from plainvit.models.fast.mlp import SHORT_GELUS
from plainvit.models.vit import Attention, Mlp, ViT

E4M3 = torch.float8_e4m3fn
MOST = torch.finfo(E4M3).max  # 448
LEAST = 1e-30  # of a row's largest number: a row of zeros is divided by something
ALIGNED = 16  # what the kernels ask of K and N
# Tensor cores add up in about 14 bits, unless told to move on to fp32 every so often, which costs some speed. What is
# lost is less than e4m3 rounds away; but it is cut off, not rounded, and gradients carry a bias on from layer to layer.
FAST_FORWARD, FAST_BACKWARD = True, False
LONG = 1024  # numbers in a row: what the compiler reads once
log = logging.getLogger("plainvit")


def as_it_is(x: Tensor) -> Tensor:
    return x


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] as e4m3 and a scale for each row, fp32 [M, 1]. What is not finite stays so: a bad step must be seen."""
    if x.shape[1] > LONG and kernel_takes(x):
        return quantised_rows(x, "")
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=LEAST) / MOST
    return (x / scale).to(E4M3).contiguous(), scale


def quantise_activated(x: Tensor, kind: str, activation: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """`quantise` of what an MLP's activation makes of x [M, K]; of a GELU in one pass over x, where Triton is there."""
    if kind in SHORT_GELUS and kernel_takes(x):
        return quantised_rows(x, kind)
    return quantise(activation(x))


def kernel_takes(x: Tensor) -> bool:
    return x.is_cuda and x.dtype is torch.bfloat16 and device_ready(x.get_device())


def _quantised_rows(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    from plainvit.models.fast import fp8_kernels

    x, (M, K) = x.contiguous(), x.shape
    out, scale = torch.empty_like(x, dtype=E4M3), x.new_empty(M, 1, dtype=torch.float32)
    launch: Any = fp8_kernels.quantise_rows[(M,)]
    with torch.cuda.device_of(x):
        launch(x, out, scale, MOST, LEAST, K=K, WIDTHS=split(K, 2048), ACTIVATION=activation)
    return out, scale


quantised_rows = torch.library.custom_op("plainvit::quantised_rows", _quantised_rows, mutates_args=())


@quantised_rows.register_fake
def _(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty(x.shape, dtype=E4M3, device=x.device), x.new_empty(len(x), 1, dtype=torch.float32)


def product(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None, *, fast: bool) -> Tensor:
    """a [M, K] times b [N, K] transposed, both as `quantise` gives them: [M, N], bf16 on a GPU."""
    if not a.is_cuda:
        return emulated(a, b, scales, bias)
    return scaled_product(a, b, *scales, None if bias is None else bias.bfloat16(), fast)


def _scaled_product(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b.t(), rows, columns.t(), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


# An operator of its own: of the bare call the compiler tries dozens of kernels for every shape, for minutes.
scaled_product = torch.library.custom_op("plainvit::scaled_product", _scaled_product, mutates_args=())
scaled_product.register_fake(_scaled_product)


def emulated(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
    """The same in fp32, on any device: sums are exact but for fp32's rounding."""
    with torch.autocast(a.device.type, enabled=False):
        found = (a.float() @ b.float().t()) * scales[0] * scales[1].t()
        return found if bias is None else found + bias.float()


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] in x's precision, with gradients.

    The gradient of the input is a product in fp8 too, and of e4m3: e5m2's wider range serves gradients that share one
    scale, and where each row has its own the third bit of mantissa is worth more. That of the weight, a sum over all
    tokens, is in x's precision: both operands would have to be quantised again along the tokens, and transposed.
    """
    return learned_product(x, weight, bias, *quantise(x.detach()), *quantise(weight.detach()))


def _learned_product(
    x: Tensor,
    weight: Tensor,  # noqa: ARG001, see below
    bias: Tensor,
    a: Tensor,
    rows: Tensor,
    b: Tensor,
    columns: Tensor,
) -> Tensor:
    return product(a, b, (rows, columns), bias, fast=FAST_FORWARD).to(x.dtype)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:3])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    (a, rows), (b, columns) = quantise(grad), quantise(weight.t())
    of_x = product(a, b, (rows, columns), None, fast=FAST_BACKWARD).to(x.dtype)  # [M, K]
    return of_x, (grad.t() @ x).to(weight.dtype), grad.sum(0, dtype=bias.dtype), None, None, None, None


# x, weight and bias are there for their gradients. Not an autograd.Function: of one that calls an operator PyTorch
# 2.11 compiles the answer and no gradient, without a word.
learned_product = torch.library.custom_op("plainvit::learned_product", _learned_product, mutates_args=())
learned_product.register_fake(_learned_product)
learned_product.register_autograd(_gradients, setup_context=_keep)


class Fp8Linear(nn.Linear):
    """A Linear to train: parameters, names and initial values are the plain one's; it answers in `low`."""

    low: torch.dtype

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = x.to(self.low).flatten(0, -2)  # [M, K]: as autocast does, whatever the residual stream is in
        return linear(rows, self.weight, self.bias).unflatten(0, x.shape[:-1])


class Fp8Answer(nn.Module):
    """A Linear that only answers: its weights were quantised once, and are a quarter of fp32's size.

    `kind`, `activation`: what it is given is to go through that first, as a part of being quantised.
    """

    kind: str
    activation: Callable[[Tensor], Tensor]
    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.activation = "", as_it_is
        weight, scale = quantise(linear.weight.detach())
        for name, value in (("weight", weight), ("scale", scale), ("bias", linear.bias.detach().to(dtype))):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        a, rows = quantise_activated(x.flatten(0, -2), self.kind, self.activation)
        found = product(a, self.weight, (rows, self.scale), self.bias, fast=FAST_FORWARD)
        return found.to(x.dtype).unflatten(0, x.shape[:-1])


def use_fp8(model: ViT, dtype: torch.dtype = torch.bfloat16) -> ViT:
    """In place: the blocks' Linears train by fp8, whole under autocast to dtype. Others see the Linears they know."""
    for linear in _fitting(model):
        linear.__class__ = Fp8Linear
        linear.low = dtype  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return model


def in_fp8(model: ViT, dtype: torch.dtype = torch.bfloat16) -> ViT:
    """A copy for answers, the blocks' matrices in fp8 and all else in dtype.

    Not the last block's q, k and v, of which the class token's shortcut takes parts (FastAttention.query_subset).
    """
    low = copy.deepcopy(model).to(dtype)
    last = {id(part.qkv) for part in model.blocks[-1].modules() if isinstance(part, Attention)}
    fitting = {id(linear) for linear in _fitting(model)} - last
    for name, linear in model.named_modules():
        if id(linear) in fitting:
            assert isinstance(linear, nn.Linear)
            low.set_submodule(name, Fp8Answer(linear, dtype))
    for mlp in low.modules():
        if isinstance(mlp, Mlp) and isinstance(mlp.fc2, Fp8Answer):
            mlp.fc2.kind, mlp.fc2.activation, mlp.kind, mlp.activation = mlp.kind, mlp.activation, "", as_it_is
    return low.eval().requires_grad_(False)


def _fitting(model: ViT) -> list[nn.Linear]:
    """The Linears of the blocks, but those of sizes that the kernels do not take."""
    every = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    fit = [one for one in every if one.in_features % ALIGNED == 0 and one.out_features % ALIGNED == 0]
    if len(fit) < len(every):
        rest = len(every) - len(fit)
        log.warning("fp8: %d of %d matrices stay bf16, a side of theirs is no multiple of 16", rest, len(every))
    return fit


def why_not(place: torch.device | str) -> str:
    """Why there are no fp8 products there, for a person; nothing where there are. One is tried."""
    place = torch.device(place)
    if place.type != "cuda":
        return f"fp8 needs a CUDA GPU, this is {place.type}"
    name, capability = torch.cuda.get_device_name(place), torch.cuda.get_device_capability(place)
    if capability < (8, 9):
        has = ".".join(map(str, capability))
        return f"fp8 needs a GPU of compute capability 8.9 or newer, {name} has {has}"
    try:
        one, scale = quantise(torch.ones(64, 32, device=place))
        for fast in {FAST_FORWARD, FAST_BACKWARD}:
            product(one, one, (scale, scale), one[:, 0].float(), fast=fast)
    except (RuntimeError, ValueError) as error:
        return f"fp8 products fail on {name}: {str(error).splitlines()[0]}"
    return ""
