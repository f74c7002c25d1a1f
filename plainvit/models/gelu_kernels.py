# type: ignore
"""The Triton kernel of plainvit.models.gelu, which loads this module on use: triton is not everywhere.

One pass over an MLP's hidden numbers and their gradients makes all that a backward pass wants of them. The compiler
makes two: it does not sum up over rows what it writes along them.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from plainvit.models import gelu

TAIL = constexpr(gelu.TAIL)


@triton.jit
def normal(x, TANH: constexpr):
    """Phi(x), and x times its slope: as plainvit.models.gelu has both forms."""
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
        places = rows[:, None].to(tl.int64) * M + columns[None, :]
        inside = (rows[:, None] < R) & (columns[None, :] < M)
        numbers = tl.load(x + places, inside, 0.0).to(tl.float32)
        phi, more = normal(numbers, TANH)
        found = tl.load(grad + places, inside, 0.0).to(tl.float32) * (phi + more)
        tl.store(y + places, (numbers * phi).to(y.dtype.element_ty), inside)
        tl.store(dx + places, found.to(dx.dtype.element_ty), inside)
        total += found
    tl.store(sums + tl.program_id(1).to(tl.int64) * M + columns, tl.sum(total, 0), columns < M)
