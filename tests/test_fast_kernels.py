"""The Triton kernels of the MLP, GELU and fp8 in Triton's interpreter; all kernels compiled for GPUs that are not here.

test_fast_attention.py has the attention kernels. Each test is one child process, as triton reads its settings when it
is loaded.
"""

import json
from pathlib import Path

import pytest
import torch
from children import in_child
from torch import Tensor


def hidden_values(K: int) -> Tensor:
    """Rows of several sizes, one far down the tail, one of zeros."""
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([0.01, 1, 3, 10, 100, 1, 0])[:, None]
    x[5] = -x[5].abs() - 2
    return x


# Sizes that fill no tile, a single row, whole tiles, more than a group of them. fp8: quotients in fp32, because the
# interpreter rounds to e4m3 wrongly where the exponent changes
INTERPRETED = """
import json, torch
from plainvit.models.fast.attention import split
from plainvit.models.fast.fp8 import E4M3_MAX, MIN_ROW_MAX
from plainvit.models.fast.fp8_kernels import quantize_rows
from plainvit.models.fast.gelu import COLUMNS, PRODUCT, ROWS, TURNS, describe_tiles
from plainvit.models.fast.gelu_kernels import gelu_gradients, linear_gelu
from plainvit.models.vit import ACTIVATIONS
from test_fast_kernels import hidden_values

errors = {"gelu_gradients": [], "linear_gelu": [], "quantize_rows": []}
for R, M, tanh in ((1, 16, False), (ROWS * TURNS + 3, COLUMNS + 24, False), (2 * ROWS * TURNS, COLUMNS, True)):
    generator = torch.Generator().manual_seed(R)
    x, grad = (4 * torch.randn(R, M, generator=generator) for _ in range(2))
    dx, y = (torch.full_like(x, float("nan")) for _ in range(2))
    sums = torch.full((-(-R // (ROWS * TURNS)), M), float("nan"))
    sizes = dict(M=M, TANH=tanh, ROWS=ROWS, TURNS=TURNS, COLUMNS=COLUMNS)
    gelu_gradients[(-(-M // COLUMNS), len(sums))](grad, x, dx, y, sums, R, **sizes)
    wide = x.double().requires_grad_()
    right = torch.nn.functional.gelu(wide, approximate="tanh" if tanh else "none")
    (slope,) = torch.autograd.grad(right, wide, grad.double())
    pairs = ((y, right), (dx, slope), (sums.sum(0), slope.sum(0)))
    errors["gelu_gradients"] += [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]
for R, M, D, programs in ((1, 8, 8, 1), (300, 520, 136, 2), (9 * 128 + 5, 264, 64, 3)):
    generator = torch.Generator().manual_seed(R)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((R, D), (M, D), (M,)))
    y = torch.full((R, M), float("nan"))
    linear_gelu[(programs,)](*describe_tiles(x, weight, y, bias), R, M, D, **PRODUCT, PROGRAMS=programs)
    right = torch.nn.functional.gelu(x.double() @ weight.double().T + bias.double())
    errors["linear_gelu"].append(((y - right).abs().max() / right.abs().max()).item())
for K, name in ((48, "gelu"), (768, "gelu_tanh"), (3072, "gelu"), (1280, "")):
    x = hidden_values(K)
    out, scale = torch.full((len(x), K), float("nan")), torch.full((len(x), 1), float("nan"))
    quantize_rows[(len(x),)](x, out, scale, E4M3_MAX, MIN_ROW_MAX, K=K, WIDTHS=split(K, 2048), ACTIVATION=name)
    right = ACTIVATIONS[name](x.double()) if name else x.double()
    most = right.abs().amax(1, keepdim=True).clamp(min=MIN_ROW_MAX)
    errors["quantize_rows"].append(((out * scale - right).abs() / most).max().item())
    errors["quantize_rows"].append((scale / (most / E4M3_MAX) - 1).abs().max().item())
print(json.dumps(errors))
"""


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    errors = json.loads(in_child(INTERPRETED, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore"))
    assert max(errors["gelu_gradients"]) < 1e-5
    assert max(errors["linear_gelu"]) < 1e-5
    assert max(errors["quantize_rows"]) < 6e-6


# A driver that has no GPU but says which one to compile for; a launch ends at the compiler, in `compiled`
COMPILED = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

capability = int(sys.argv[1])

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
compiled = []
JITFunction.__getitem__ = lambda kernel, grid: lambda *a, **k: compiled.append(kernel.warmup(*a, grid=grid, **k))

from plainvit.models.fast import attention, fp8, gelu
from plainvit.models.fast.gelu_kernels import gelu_gradients, linear_gelu

for width, tiles in attention.TILES.items():
    qkv = torch.empty(1, attention.MAX_TOKENS - 1, 3 * 2 * width, dtype=torch.bfloat16)
    out, lse = attention.run_forward(qkv, 2, tiles.forward)
    attention.run_backward(out, qkv, out, lse, 2, tiles)
assert len(compiled) >= 2 * len(attention.TILES)
assert max(kernel.metadata.shared for kernel in compiled) <= 99 * 1024, "the least shared memory of any such GPU"

compiled.clear()
x, bias = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((512, 3072), (512,)))
options = dict(gelu.PRODUCT, PROGRAMS=8, num_warps=8, num_stages=3)
linear_gelu[(8,)](*gelu.describe_tiles(x, x, x[:, :512], bias), 512, 512, 3072, **options)
for tanh in (False, True):
    sizes = dict(M=3072, TANH=tanh, ROWS=gelu.ROWS, TURNS=gelu.TURNS, COLUMNS=gelu.COLUMNS)
    gelu_gradients[(24, 2)](x, x, x, x, torch.zeros(2, 3072), 512, **sizes)
assert len(compiled) == 3

compiled.clear()
if capability >= 89:
    for K, activation in ((3072, "gelu"), (5120, "gelu_tanh"), (1280, "")):
        fp8._quantize_rows(torch.zeros(8, K, dtype=torch.bfloat16), activation)
    assert len(compiled) == 3 and all("e4m3" in kernel.asm["ptx"] for kernel in compiled)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "86", "89", "90"])
def test_kernels_compile_for_other_gpus(capability: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    in_child(COMPILED, capability, TRITON_CACHE_DIR=str(tmp_path))
