"""fp8 matmuls in the blocks of a ViT: nearly twice the speed of bf16 on GPUs that support them.

    plainvit train vit-l16-i21k --precision fp8           training: use_fp8(model)
    plainvit.load("B_16.npz", optimize="fp8")             inference: convert_to_fp8(model)

Each row of an operand (a token, an output channel) is scaled by its own largest value to the range of e4m3 and rounded
(3 bits of mantissa: a relative error of at most 1/16). torch._scaled_mm multiplies and scales back. Scales come from
the current values, never from an earlier step, so weights, optimizer and checkpoints are those of bf16. Quantization
is written in plain operations, which the compiler fuses with the operation before. Without such a GPU the arithmetic is
emulated in fp32, for tests. Letters: M tokens, K in, N out.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plainvit.errors import first_line
from plainvit.models.fast.attention import device_ready, split
from plainvit.models.fast.mlp import SHORT_GELUS
from plainvit.models.vit import Attention, Mlp, ViT

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max  # 448
MIN_ROW_MAX = 1e-30  # lower bound of a row's largest value: avoids division by zero
ALIGNED = 16  # K and N must be multiples
# Fast accumulation sums in about 14 bits. Its error is smaller than e4m3's rounding, but it truncates, and in gradients
# that bias would grow from layer to layer.
FAST_FORWARD, FAST_BACKWARD = True, False
LONGEST_FUSED_ROW = 1024  # values; the compiler reads longer rows twice
log = logging.getLogger("plainvit")


def identity(x: Tensor) -> Tensor:
    return x


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] as e4m3, and a scale per row, fp32 [M, 1]. NaN and Inf stay, so that the guard sees a bad step."""
    if x.shape[1] > LONGEST_FUSED_ROW and has_kernel(x):
        return quantize_rows_op(x, "")
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=MIN_ROW_MAX) / E4M3_MAX
    return (x / scale).to(E4M3).contiguous(), scale


def quantize_activated(x: Tensor, kind: str, activation: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """`quantize(activation(x))` of x [M, K]; with Triton, a GELU and its quantization take one pass."""
    if kind in SHORT_GELUS and has_kernel(x):
        return quantize_rows_op(x, kind)
    return quantize(activation(x))


def has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype is torch.bfloat16 and device_ready(x.get_device())


def _quantize_rows(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    from plainvit.models.fast import fp8_kernels

    x, (M, K) = x.contiguous(), x.shape
    out, scale = torch.empty_like(x, dtype=E4M3), x.new_empty(M, 1, dtype=torch.float32)
    launch: Any = fp8_kernels.quantize_rows[(M,)]
    with torch.cuda.device_of(x):
        launch(x, out, scale, E4M3_MAX, MIN_ROW_MAX, K=K, WIDTHS=split(K, 2048), ACTIVATION=activation)
    return out, scale


quantize_rows_op = torch.library.custom_op("plainvit::quantized_rows", _quantize_rows, mutates_args=())


@quantize_rows_op.register_fake
def _(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty(x.shape, dtype=E4M3, device=x.device), x.new_empty(len(x), 1, dtype=torch.float32)


def matmul(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None, *, fast: bool) -> Tensor:
    """a [M, K] times b [N, K] transposed, both from `quantize`: [M, N], bf16 on a GPU."""
    if not a.is_cuda:
        return emulate_matmul(a, b, scales, bias)
    return scaled_matmul(a, b, *scales, None if bias is None else bias.bfloat16(), fast)


def _scaled_matmul(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b.t(), rows, columns.t(), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


# A custom operator, because the compiler would autotune the bare call for minutes per shape
scaled_matmul = torch.library.custom_op("plainvit::scaled_product", _scaled_matmul, mutates_args=())
scaled_matmul.register_fake(_scaled_matmul)


def emulate_matmul(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
    """The same in fp32, on any device."""
    with torch.autocast(a.device.type, enabled=False):
        output = (a.float() @ b.float().t()) * scales[0] * scales[1].t()
        return output if bias is None else output + bias.float()


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] in x's precision, with gradients.

    The gradient of the input is an fp8 matmul too, in e4m3: with a scale per row, e5m2's wider range is not needed. The
    gradient of the weight is in x's precision: fp8 would need both operands quantized again along the tokens.
    """
    return trainable_matmul(x, weight, bias, *quantize(x.detach()), *quantize(weight.detach()))


def _trainable_matmul(
    x: Tensor,
    weight: Tensor,  # noqa: ARG001, see below
    bias: Tensor,
    a: Tensor,
    rows: Tensor,
    b: Tensor,
    columns: Tensor,
) -> Tensor:
    return matmul(a, b, (rows, columns), bias, fast=FAST_FORWARD).to(x.dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:3])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    (a, rows), (b, columns) = quantize(grad), quantize(weight.t())
    grad_x = matmul(a, b, (rows, columns), None, fast=FAST_BACKWARD).to(x.dtype)  # [M, K]
    return grad_x, (grad.t() @ x).to(weight.dtype), grad.sum(0, dtype=bias.dtype), None, None, None, None


# x, weight and bias are arguments for their gradients. Not an autograd.Function: PyTorch 2.11 silently compiles one
# that calls a custom operator without its gradient.
trainable_matmul = torch.library.custom_op("plainvit::learned_product", _trainable_matmul, mutates_args=())
trainable_matmul.register_fake(_trainable_matmul)
trainable_matmul.register_autograd(_gradients, setup_context=_save_for_backward)


class Fp8Linear(nn.Linear):
    """A Linear for training: parameters, names and initial values are the plain one's; its output has dtype `low`."""

    low: torch.dtype

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = x.to(self.low).flatten(0, -2)  # [M, K]: as autocast does
        return linear(rows, self.weight, self.bias).unflatten(0, x.shape[:-1])


class Fp8InferenceLinear(nn.Module):
    """A Linear for inference, with weights quantized once: a quarter of fp32's size.

    `kind` and `activation` are applied to the input as part of its quantization.
    """

    kind: str
    activation: Callable[[Tensor], Tensor]
    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.activation = "", identity
        weight, scale = quantize(linear.weight.detach())
        for name, value in (("weight", weight), ("scale", scale), ("bias", linear.bias.detach().to(dtype))):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        a, rows = quantize_activated(x.flatten(0, -2), self.kind, self.activation)
        output = matmul(a, self.weight, (rows, self.scale), self.bias, fast=FAST_FORWARD)
        return output.to(x.dtype).unflatten(0, x.shape[:-1])


def use_fp8(model: ViT, dtype: torch.dtype = torch.bfloat16) -> ViT:
    """Replaces the Linears of the blocks by fp8 ones for training under autocast to dtype, in place."""
    for linear in _find_linears(model):
        linear.__class__ = Fp8Linear
        linear.low = dtype  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return model


def convert_to_fp8(model: ViT, dtype: torch.dtype = torch.bfloat16) -> ViT:
    """A copy for inference: Linears of the blocks in fp8, everything else in dtype.

    The last block's qkv stays in dtype, because FastAttention.query_subset slices its weight.
    """
    converted = copy.deepcopy(model).to(dtype)
    last_qkv = {id(attention.qkv) for attention in model.blocks[-1].modules() if isinstance(attention, Attention)}
    convertible = {id(linear) for linear in _find_linears(model)} - last_qkv
    for name, linear in model.named_modules():
        if id(linear) in convertible:
            assert isinstance(linear, nn.Linear)
            converted.set_submodule(name, Fp8InferenceLinear(linear, dtype))
    for mlp in converted.modules():
        if isinstance(mlp, Mlp) and isinstance(mlp.fc2, Fp8InferenceLinear):
            # fc2 applies the activation while it quantizes its input
            mlp.fc2.kind, mlp.fc2.activation = mlp.kind, mlp.activation
            mlp.kind, mlp.activation = "", identity
    return converted.eval().requires_grad_(False)


def _find_linears(model: ViT) -> list[nn.Linear]:
    """The Linears of the blocks whose sizes the kernels support."""
    linears = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    plain = [linear for linear in linears if type(linear) is nn.Linear and linear.bias is not None]
    supported = [linear for linear in plain if linear.in_features % ALIGNED == linear.out_features % ALIGNED == 0]
    if len(supported) < len(linears):
        count = len(linears) - len(supported), len(linears)
        log.warning("fp8: %d of %d layers stay bf16: no bias, or sizes not divisible by %d", *count, ALIGNED)
    return supported


def explain_unsupported(device: torch.device | str) -> str:
    """Why a device does not support fp8; "" if it does. Runs one fp8 matmul."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"fp8 needs a CUDA GPU, this is {device.type}"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        has = ".".join(map(str, capability))
        return f"fp8 needs a GPU of compute capability 8.9 or newer, {name} has {has}"
    try:
        ones, scale = quantize(torch.ones(64, 32, device=device))
        for fast in {FAST_FORWARD, FAST_BACKWARD}:
            matmul(ones, ones, (scale, scale), ones[:, 0].float(), fast=fast)
    except (RuntimeError, ValueError) as error:
        return f"fp8 matmuls fail on {name}: {first_line(error)}"
    return ""
