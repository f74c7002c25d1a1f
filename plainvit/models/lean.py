"""Parts of a block as compiled code has them on a GPU: the same numbers from less memory and fewer passes over it.

    hidden, bias = without_bias_gradient(linear, x)       # whose gradient whoever comes next has at hand
    tokens = lean_mlp(mlp, x)                             # Mlp.forward; of the hidden numbers, one tensor is kept

Which way is taken follows from what is asked for and what is there; all of them are tested against the plain one.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plainvit.models import gelu
from plainvit.models.short_attention import device_ready

if TYPE_CHECKING:
    from plainvit.models.vit import Mlp

SHORT_FORMS = {"gelu": gelu.gelu, "gelu_tanh": gelu.gelu_tanh}  # the same in fewer instructions, for bf16
ENOUGH = 2**25  # hidden numbers: eight tiles for each of an H200's 132 multiprocessors


def product_dtype(x: Tensor) -> torch.dtype:
    """Of what a Linear makes of x on a GPU."""
    return torch.get_autocast_dtype("cuda") if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype


def without_bias_gradient(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What it makes of x; and its bias, for whoever comes next to give it a gradient, where that is left to them."""
    if type(linear) is not nn.Linear or not torch.is_grad_enabled():
        return linear(x), None
    return F.linear(x, linear.weight, linear.bias.detach()), linear.bias


def lean_mlp(mlp: "Mlp", x: Tensor) -> Tensor:
    """x [B, N, D] -> [B, N, D]. Only while the compiler traces."""
    tanh = mlp.kind == "gelu_tanh"
    if tanh and answers_in_bf16(mlp.fc1, x):
        rows = torch.ops.aten._addmm_activation(mlp.fc1.bias, x.flatten(0, -2), mlp.fc1.weight.t(), use_gelu=True)
        return mlp.fc2(mlp.dropout(rows.unflatten(0, x.shape[:-1])))
    if mlp.kind == "gelu" and answers_in_bf16(mlp.fc1, x) and fills_a_gpu(mlp.fc1, x):
        return mlp.fc2(mlp.dropout(gelu.linear_gelu(x, mlp.fc1.weight, mlp.fc1.bias)))
    if mlp.kind in SHORT_FORMS and not mlp.dropout.p and learns_by_kernel(mlp.fc1, mlp.fc2, x):
        hidden, before = without_bias_gradient(mlp.fc1, x)
        assert before is not None
        return gelu.gelu_linear(hidden, mlp.fc2.weight, mlp.fc2.bias, before, tanh=tanh)
    return mlp.fc2(mlp.dropout(activated(mlp, mlp.fc1(x))))


def answers_in_bf16(linear: nn.Module, x: Tensor) -> bool:
    """Whether nothing is learned and this is a product that can end with a GELU: by cuBLAS with a tanh, or by ours."""
    plain = type(linear) is nn.Linear and x.dtype is linear.weight.dtype is torch.bfloat16
    return plain and x.is_cuda and not torch.is_grad_enabled()


def fills_a_gpu(linear: nn.Linear, x: Tensor) -> bool:
    """Whether our product is faster than cuBLAS' and a GELU: it has many tiles, each of whole 16 bytes."""
    (M, D), rows, gpu = linear.weight.shape, x.shape[:-1].numel(), x.device.index
    return rows * M >= ENOUGH and M % 8 == D % 8 == 0 and device_ready(gpu) and gelu.copies_tiles(gpu)


def learns_by_kernel(first: nn.Module, second: nn.Module, x: Tensor) -> bool:
    """Whether our kernel can stand between these two products, and gradients are wanted."""
    plain = type(first) is type(second) is nn.Linear and product_dtype(x) is torch.bfloat16
    ours = plain and x.is_cuda and device_ready(x.device.index)
    return ours and torch.is_grad_enabled() and gelu.taught()


def activated(mlp: "Mlp", x: Tensor) -> Tensor:
    """What its activation makes of x, again in the backward pass: x alone is kept. Of a ReLU the answer is enough."""
    short = x.dtype is torch.bfloat16 and mlp.kind in SHORT_FORMS and gelu.taught()
    activation = SHORT_FORMS[mlp.kind] if short else mlp.activation
    if mlp.kind == "relu" or not torch.is_grad_enabled():
        return activation(x)
    return checkpoint(activation, x, use_reentrant=False, preserve_rng_state=False)
