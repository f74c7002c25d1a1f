# type: ignore
"""The Triton kernel of plainvit.models.gelu_linear, which loads this module on use: triton is not everywhere."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def gelu_and_slope(x, TANH: constexpr):
    """GELU and its derivative, by the error function or by the tanh that stands in for it."""
    if TANH:
        t = 2 * tl.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)) - 1
        inner = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner
    below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    return x * below, below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def gelu_backward(grad, h, again, dh, sums, rows, columns, chunk, TANH: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """`chunk` rows of some columns: GELU again, the gradient before it, and the sum of that over the rows."""
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(part * chunk, (part + 1) * chunk, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        value, slope = gelu_and_slope(tl.load(h + at, inside, 0.0).to(tl.float32), TANH)
        found = tl.load(grad + at, inside, 0.0).to(tl.float32) * slope
        tl.store(again + at, value.to(again.dtype.element_ty), inside)
        tl.store(dh + at, found.to(dh.dtype.element_ty), inside)
        total += tl.sum(found, 0)
    tl.store(sums + part * columns + column, total, column < columns)
