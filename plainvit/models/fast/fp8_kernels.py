# type: ignore
"""The Triton kernel of plainvit.models.fast.fp8, which imports this module on first use: triton is optional.

It reads a row once and computes GELU, maximum and e4m3 values in registers. The compiler would read rows longer than
1,024 twice, and compute their GELU twice.
"""

# Triton's language only looks like Python: type checkers cannot follow it, and it has no starred tuples.
# ruff: noqa: RUF005

import triton
import triton.language as tl
from triton.language import constexpr

from plainvit.models.fast.attention_kernels import tile_start
from plainvit.models.fast.gelu_kernels import normal


@triton.jit
def activate(x, ACTIVATION: constexpr):
    """x itself, or a GELU of it."""
    if ACTIVATION == "":
        return x
    return x * normal(x, ACTIVATION == "gelu_tanh")[0]


@triton.jit
def quantize_rows(x, out, scales, most, least, K: constexpr, WIDTHS: constexpr, ACTIVATION: constexpr):
    """A program a row: out [M, K] in e4m3 and scales [M] of x [M, K]. WIDTHS: powers of two that cover K."""
    row = tl.program_id(0).to(tl.int64)
    largest = 0.0
    tiles = ()
    for t in tl.static_range(len(WIDTHS)):
        columns = tile_start(WIDTHS, t) + tl.arange(0, WIDTHS[t])
        tile = activate(tl.load(x + row * K + columns, columns < K, 0.0).to(tl.float32), ACTIVATION)
        largest = tl.maximum(largest, tl.max(tl.abs(tile)))
        tiles = tiles + (tile,)
    scale = tl.maximum(largest, least) / most
    for t in tl.static_range(len(WIDTHS)):
        columns = tile_start(WIDTHS, t) + tl.arange(0, WIDTHS[t])
        tl.store(out + row * K + columns, (tiles[t] / scale).to(out.dtype.element_ty), columns < K)
    tl.store(scales + row, scale)
