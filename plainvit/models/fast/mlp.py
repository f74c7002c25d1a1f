"""The MLP of a block as compiled code runs it on a GPU: the same values from less memory and fewer passes over it.

    hidden, bias = linear_without_bias_gradient(linear, x)    # the next operation computes the bias gradient
    tokens = compiled_mlp(mlp, x)                             # Mlp.forward, keeping one hidden tensor for backward

Which variant runs depends on the precision, the device and whether gradients are needed; each is tested against the
plain MLP.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plainvit.models.fast import gelu
from plainvit.models.fast.attention import device_ready
from plainvit.models.vit import Mlp

SHORT_GELUS = {"gelu": gelu.gelu, "gelu_tanh": gelu.gelu_tanh}  # fewer instructions, exact enough for bf16
LARGE = 2**25  # hidden values: eight tiles for each of an H200's 132 multiprocessors


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a Linear returns for x on a GPU."""
    return torch.get_autocast_dtype("cuda") if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype


def linear_without_bias_gradient(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output, and the bias where its gradient is left to the next operation."""
    if type(linear) is not nn.Linear or not torch.is_grad_enabled():
        return linear(x), None
    return F.linear(x, linear.weight, linear.bias.detach()), linear.bias


def compiled_mlp(mlp: Mlp, x: Tensor) -> Tensor:
    """x [B, N, D] -> [B, N, D]; called only while the compiler traces."""
    tanh = mlp.kind == "gelu_tanh"
    if tanh and infers_in_bf16(mlp.fc1, x):
        rows = torch.ops.aten._addmm_activation(mlp.fc1.bias, x.flatten(0, -2), mlp.fc1.weight.t(), use_gelu=True)
        return mlp.fc2(mlp.dropout(rows.unflatten(0, x.shape[:-1])))
    if mlp.kind == "gelu" and infers_in_bf16(mlp.fc1, x) and fills_gpu(mlp.fc1, x):
        return mlp.fc2(mlp.dropout(gelu.linear_gelu(x, mlp.fc1.weight, mlp.fc1.bias)))
    if mlp.kind in SHORT_GELUS and not mlp.dropout.p and trains_by_kernel(mlp.fc1, mlp.fc2, x):
        hidden, hidden_bias = linear_without_bias_gradient(mlp.fc1, x)
        assert hidden_bias is not None
        return gelu.gelu_linear(hidden, mlp.fc2.weight, mlp.fc2.bias, hidden_bias, tanh=tanh)
    return mlp.fc2(mlp.dropout(activate(mlp, mlp.fc1(x))))


def infers_in_bf16(linear: nn.Module, x: Tensor) -> bool:
    """Whether no gradient is needed and the matmul can end with a GELU: tanh by cuBLAS, exact by our kernel."""
    plain = type(linear) is nn.Linear and x.dtype is linear.weight.dtype is torch.bfloat16
    return plain and x.is_cuda and not torch.is_grad_enabled()


def fills_gpu(linear: nn.Linear, x: Tensor) -> bool:
    """Whether our matmul with GELU is faster than cuBLAS and a GELU: many tiles, with rows of whole 16 bytes."""
    (M, D), rows, gpu = linear.weight.shape, x.shape[:-1].numel(), x.device.index
    return rows * M >= LARGE and M % 8 == D % 8 == 0 and device_ready(gpu) and gelu.copies_tiles(gpu)


def trains_by_kernel(first: nn.Module, second: nn.Module, x: Tensor) -> bool:
    """Whether gradients are needed and our GELU kernel can stand between these two matmuls."""
    plain = type(first) is type(second) is nn.Linear and matmul_dtype(x) is torch.bfloat16
    ours = plain and x.is_cuda and device_ready(x.device.index)
    return ours and torch.is_grad_enabled() and gelu.register_decompositions()


def activate(mlp: Mlp, x: Tensor) -> Tensor:
    """The activation, computed again in the backward pass, so that x alone is kept; ReLU needs only its output."""
    short = x.dtype is torch.bfloat16 and mlp.kind in SHORT_GELUS and gelu.register_decompositions()
    activation = SHORT_GELUS[mlp.kind] if short else mlp.activation
    if mlp.kind == "relu" or not torch.is_grad_enabled():
        return activation(x)
    return checkpoint(activation, x, use_reentrant=False, preserve_rng_state=False)
