# type: ignore
"""The Triton kernel of plainvit.models.fp8, which loads this module on use: triton is not everywhere.

A row is read once: its GELU where one is asked for, the largest number, and the quotients in e4m3 are made while it
lies in registers. The compiler reads rows longer than 1,024 twice, and computes their GELU twice.
"""

# Triton's language only looks like Python: type checkers cannot follow it, and it has no starred tuples.
# ruff: noqa: RUF005

import triton
import triton.language as tl
from triton.language import constexpr

from plainvit.models import gelu
from plainvit.models.short_attention_kernels import before

TAIL = constexpr(gelu.TAIL)


@triton.jit
def activated(x, ACTIVATION: constexpr):
    """x itself, or a GELU of it: as plainvit.models.gelu has both."""
    if ACTIVATION == "":
        return x
    if ACTIVATION == "gelu_tanh":
        square = tl.minimum(x * x, 100.0)
        return x * tl.sigmoid(x * (1.5957691216057308 + 0.07135481282859875 * square))
    a = tl.abs(x)
    log = tl.full(x.shape, TAIL[7], tl.float32)
    for i in tl.static_range(1, 8):
        log = log * a + TAIL[7 - i]
    tail = tl.exp(log)
    return x * tl.where(x < 0, tail, 1 - tail)


@triton.jit
def quantise_rows(x, out, scales, most, least, K: constexpr, WIDTHS: constexpr, ACTIVATION: constexpr):
    """A program a row: out [M, K] in e4m3 and scales [M] of x [M, K]. WIDTHS: powers of two that cover K."""
    row = tl.program_id(0).to(tl.int64)
    largest = 0.0
    tiles = ()
    for t in tl.static_range(len(WIDTHS)):
        columns = before(WIDTHS, t) + tl.arange(0, WIDTHS[t])
        tile = activated(tl.load(x + row * K + columns, columns < K, 0.0).to(tl.float32), ACTIVATION)
        largest = tl.maximum(largest, tl.max(tl.abs(tile)))
        tiles = tiles + (tile,)
    scale = tl.maximum(largest, least) / most
    for t in tl.static_range(len(WIDTHS)):
        columns = before(WIDTHS, t) + tl.arange(0, WIDTHS[t])
        tl.store(out + row * K + columns, (tiles[t] / scale).to(out.dtype.element_ty), columns < K)
    tl.store(scales + row, scale)
