# type: ignore
"""The Triton kernels of plainvit.models.fast.gelu, which imports this module on first use: triton is optional.

gelu_gradients: one pass over an MLP's hidden values and their gradients computes all that the backward pass needs. The
compiler would need two, because it does not fuse a sum over rows with writing them.
linear_gelu: a matmul that ends with the GELU, so the hidden values are written once and not read again. Each program
computes several tiles, and loads the next one while it writes the last.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from plainvit.models.fast import gelu

TAIL = constexpr(gelu.TAIL)


@triton.jit
def normal(x, TANH: constexpr):
    """Phi(x), and x times its derivative, as in plainvit.models.fast.gelu."""
    if TANH:
        square = tl.minimum(x * x, 100.0)
        phi = tl.sigmoid(x * (1.5957691216057308 + 0.07135481282859875 * square))
        return phi, phi * (1 - phi) * x * (1.5957691216057308 + 3 * 0.07135481282859875 * square)
    a = tl.abs(x)
    log = tl.full(x.shape, TAIL[7], tl.float32)
    for i in tl.static_range(1, 8):
        log = log * a + TAIL[7 - i]
    tail = tl.exp(log)
    return tl.where(x < 0, tail, 1 - tail), x * (tl.exp(-0.5 * x * x) * 0.3989422804014327)


@triton.jit
def gelu_gradients(
    grad, x, dx, y, sums, R, M: constexpr, TANH: constexpr, ROWS: constexpr, TURNS: constexpr, COLUMNS: constexpr
):
    """dx [R, M] and y = gelu(x) of x and y's gradient; and sums of dx over ROWS x TURNS rows, fp32 [programs, M]."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in range(TURNS):
        rows = (tl.program_id(1) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        offsets = rows[:, None].to(tl.int64) * M + columns[None, :]
        inside = (rows[:, None] < R) & (columns[None, :] < M)
        numbers = tl.load(x + offsets, inside, 0.0).to(tl.float32)
        phi, more = normal(numbers, TANH)
        slope = tl.load(grad + offsets, inside, 0.0).to(tl.float32) * (phi + more)
        tl.store(y + offsets, (numbers * phi).to(y.dtype.element_ty), inside)
        tl.store(dx + offsets, slope.to(dx.dtype.element_ty), inside)
        total += slope
    tl.store(sums + tl.program_id(1).to(tl.int64) * M + columns, tl.sum(total, 0), columns < M)


@triton.jit
def linear_gelu(
    x,
    weight,
    bias,
    y,
    R,
    M,
    D,
    ROWS: constexpr,
    COLUMNS: constexpr,
    INNER: constexpr,
    GROUP: constexpr,
    PROGRAMS: constexpr,
):
    """y [R, M] = gelu(x [R, D] weight [M, D]T + bias [M]). All but the bias as tiles, those of y half as wide."""
    down, across = tl.cdiv(R, ROWS), tl.cdiv(M, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        first = tile // (GROUP * across) * GROUP  # GROUP rows of tiles at a time share cached operands
        height, inside = tl.minimum(down - first, GROUP), tile % (GROUP * across)
        row, column = (first + inside % height) * ROWS, inside // height * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, D, INNER):
            total = tl.dot(x.load([row, k]), weight.load([column, k]).T, total)
        left, right = total.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        store_gelu(left, bias, y, row, column, M, COLUMNS // 2)
        store_gelu(right, bias, y, row, column + COLUMNS // 2, M, COLUMNS // 2)


@triton.jit
def store_gelu(hidden, bias, y, row, column, M, COLUMNS: constexpr):
    columns = column + tl.arange(0, COLUMNS)
    hidden += tl.load(bias + columns, columns < M, 0.0).to(tl.float32)[None, :]
    phi, _ = normal(hidden, False)
    y.store([row, column], (hidden * phi).to(y.dtype))
