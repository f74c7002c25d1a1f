# type: ignore
"""The Triton kernels of plainvit.models.fast.attention, which imports this module on first use: triton is optional.

FlashAttention's equations (arXiv 2205.14135, 2307.08691) with tiles for sequences of up to 288 tokens. No gradient is
summed across programs, so no kernel needs atomics.

Letters: N tokens, H heads, D head width. Tiles are powers of two wide, so 80 columns are PARTS (64, 16), and 197 keys
WIDTHS (128, 64, 16): a head's block of rows is a tuple with one tile a part, its keys a tuple with one such block a
width. q, k, v are columns of the packed [B, N, 3 H D]. Logits are in base 2: `scale` is log2(e) / sqrt(D), and lse the
base-2 logarithm of a row's sum. PROGRAMS in a row share one head of one image, and find its rows in the cache.
"""

# Triton's language only looks like Python: type checkers cannot follow it, and it has no starred tuples.
# ruff: noqa: RUF005

import triton
import triton.language as tl
from triton.language import constexpr


@triton.constexpr_function
def tile_start(widths, number):
    """The first column of a tile."""
    return sum(widths[:number])


@triton.constexpr_function
def count_looped(length, widths):
    """How many whole tiles run in a loop; the rest are unrolled."""
    return length // widths[0]


@triton.jit
def load(start, first, stride, N: constexpr, ROWS: constexpr, PARTS: constexpr):
    """Rows of one head from `first` on; rows from N on are zero."""
    tiles = ()
    rows = first + tl.arange(0, ROWS)
    for i in tl.static_range(len(PARTS)):
        columns = tile_start(PARTS, i) + tl.arange(0, PARTS[i])
        tiles = tiles + (tl.load(start + rows[:, None] * stride + columns[None, :], rows[:, None] < N, 0.0),)
    return tiles


@triton.jit
def store(start, tiles, factor, first, stride, N: constexpr, ROWS: constexpr, PARTS: constexpr):
    """Rows below N, each times `factor`."""
    rows = first + tl.arange(0, ROWS)
    for i in tl.static_range(len(PARTS)):
        columns = tile_start(PARTS, i) + tl.arange(0, PARTS[i])
        tile = (tiles[i] * factor).to(start.dtype.element_ty)
        tl.store(start + rows[:, None] * stride + columns[None, :], tile, rows[:, None] < N)


@triton.jit
def store_sums(start, sums, PARTS: constexpr):
    for i in tl.static_range(len(PARTS)):
        tl.store(start + tile_start(PARTS, i) + tl.arange(0, PARTS[i]), sums[i])


@triton.jit
def sum_rows(tiles, factor, PARTS: constexpr):
    """The sum of all rows, times `factor`."""
    sums = ()
    for i in tl.static_range(len(PARTS)):
        sums = sums + (tl.sum(tiles[i].to(tl.float32), 0) * factor,)
    return sums


@triton.jit
def zeros(ROWS: constexpr, PARTS: constexpr):
    tiles = ()
    for i in tl.static_range(len(PARTS)):
        tiles = tiles + (tl.full((ROWS, PARTS[i]), 0.0, tl.float32),)
    return tiles


@triton.jit
def matmul(a, b, PARTS: constexpr):
    """a bT over the head's width, in fp32."""
    total = tl.dot(a[0], tl.trans(b[0]))
    for i in tl.static_range(1, len(PARTS)):
        total = tl.dot(a[i], tl.trans(b[i]), total)
    return total


@triton.jit
def add_weighted(sums, weights, rows, PARTS: constexpr):
    """sums + weights @ rows, part by part."""
    totals = ()
    weights = weights.to(rows[0].dtype)
    for i in tl.static_range(len(PARTS)):
        totals = totals + (tl.dot(weights, rows[i], sums[i]),)
    return totals


@triton.jit
def compute_delta(grad, out, PARTS: constexpr):
    """rowsum(dO * O): what the softmax's normalization subtracts from each gradient."""
    delta = tl.sum(grad[0].to(tl.float32) * out[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(PARTS)):
        delta += tl.sum(grad[i].to(tl.float32) * out[i].to(tl.float32), 1)
    return delta


@triton.jit
def head_start(pointer, head, batch_stride, H, D: constexpr):
    """The address of a head, counted over all images, in a tensor [B, N, ... H D]."""
    return pointer + (head // H).to(tl.int64) * batch_stride + (head % H) * D


@triton.jit
def add_online(
    most, total, sums, queries, keys, values, scale, first,
    N: constexpr, WIDTH: constexpr, MASKED: constexpr, PARTS: constexpr,
):  # fmt: skip
    """Adds one tile of keys to an online softmax; earlier sums are rescaled if the maximum grows."""
    logits = matmul(queries, keys, PARTS)
    if MASKED:
        logits = tl.where((first + tl.arange(0, WIDTH))[None, :] < N, logits, float("-inf"))
    greater = tl.maximum(most, tl.max(logits, 1) * scale)
    shrink = tl.exp2(most - greater)
    p = tl.exp2(logits * scale - greater[:, None])
    shrunk = ()
    for i in tl.static_range(len(PARTS)):
        shrunk = shrunk + (sums[i] * shrink[:, None],)
    return greater, total * shrink + tl.sum(p, 1), add_weighted(shrunk, p, values, PARTS)


@triton.jit(do_not_specialize=["H"])
def attention_forward(
    qkv, out, lse, batch_stride, token_stride, scale, H,
    N: constexpr, PARTS: constexpr, WIDTHS: constexpr, ROWS: constexpr, PROGRAMS: constexpr,
):  # fmt: skip
    """out [B, N, H D] and lse [B, H, N]: one program per block of queries, keys and values in a loop."""
    D: constexpr = tile_start(PARTS, len(PARTS))
    LOOPED: constexpr = count_looped(N, WIDTHS)
    head = tl.program_id(0) // PROGRAMS
    q = head_start(qkv, head, batch_stride, H, D)
    k = q + H * D
    v = k + H * D
    lse += head.to(tl.int64) * N
    first = tl.program_id(0) % PROGRAMS * ROWS
    rows = first + tl.arange(0, ROWS)
    queries = load(q, first, token_stride, N, ROWS, PARTS)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = zeros(ROWS, PARTS)
    for t in range(LOOPED):
        keys = load(k, t * WIDTHS[0], token_stride, N, WIDTHS[0], PARTS)
        values = load(v, t * WIDTHS[0], token_stride, N, WIDTHS[0], PARTS)
        most, total, sums = add_online(most, total, sums, queries, keys, values, scale, 0, N, WIDTHS[0], False, PARTS)
    for t in tl.static_range(LOOPED, len(WIDTHS)):
        tile_keys = load(k, tile_start(WIDTHS, t), token_stride, N, WIDTHS[t], PARTS)
        tile_values = load(v, tile_start(WIDTHS, t), token_stride, N, WIDTHS[t], PARTS)
        most, total, sums = add_online(
            most, total, sums, queries, tile_keys, tile_values, scale,
            tile_start(WIDTHS, t), N, WIDTHS[t], tile_start(WIDTHS, t + 1) > N, PARTS,
        )  # fmt: skip
    store(head_start(out, head, N * H * D, H, D), sums, 1.0 / total[:, None], first, H * D, N, ROWS, PARTS)
    tl.store(lse + rows, most + tl.log2(total), rows < N)


# Backward: dQ, then dK and dV, seven matmuls -------------------------------------------------------------------------


@triton.jit
def add_to_queries(
    sums, queries, grads, keys, values, total, taken, scale, first,
    N: constexpr, WIDTH: constexpr, MASKED: constexpr, PARTS: constexpr,
):  # fmt: skip
    """dQ + dS K of one tile of keys, and one block of queries."""
    logits = matmul(queries, keys, PARTS) * scale - total[:, None]  # [ROWS, WIDTH]
    if MASKED:
        logits = tl.where((first + tl.arange(0, WIDTH))[None, :] < N, logits, float("-inf"))
    ds = tl.exp2(logits) * (matmul(grads, values, PARTS) - taken[:, None])
    return add_weighted(sums, ds, keys, PARTS)


@triton.jit(do_not_specialize=["H"])
def attention_backward_queries(
    qkv, out, lse, grad, delta, dqkv, summed, batch_stride, token_stride, grad_batch_stride, grad_token_stride,
    scale, shrink, H, N: constexpr, PARTS: constexpr, WIDTHS: constexpr, ROWS: constexpr, PROGRAMS: constexpr,
):  # fmt: skip
    """dQ, the delta [B, H, N] that dK and dV need, and sums over queries of dQ and of dO: [B PROGRAMS, 2 H D]."""
    D: constexpr = tile_start(PARTS, len(PARTS))
    LOOPED: constexpr = count_looped(N, WIDTHS)
    head = tl.program_id(0) // PROGRAMS
    q = head_start(qkv, head, batch_stride, H, D)
    k = q + H * D
    v = k + H * D
    first = tl.program_id(0) % PROGRAMS * ROWS
    rows = first + tl.arange(0, ROWS)
    queries = load(q, first, token_stride, N, ROWS, PARTS)
    grads = load(head_start(grad, head, grad_batch_stride, H, D), first, grad_token_stride, N, ROWS, PARTS)
    taken = compute_delta(grads, load(head_start(out, head, N * H * D, H, D), first, H * D, N, ROWS, PARTS), PARTS)
    tl.store(delta + head.to(tl.int64) * N + rows, taken, rows < N)
    total = tl.load(lse + head.to(tl.int64) * N + rows, rows < N, 0.0)
    sums = zeros(ROWS, PARTS)
    for t in range(LOOPED):
        keys = load(k, t * WIDTHS[0], token_stride, N, WIDTHS[0], PARTS)
        values = load(v, t * WIDTHS[0], token_stride, N, WIDTHS[0], PARTS)
        sums = add_to_queries(
            sums, queries, grads, keys, values, total, taken, scale, 0, N, WIDTHS[0], False, PARTS
        )  # fmt: skip
    for t in tl.static_range(LOOPED, len(WIDTHS)):
        tile_keys = load(k, tile_start(WIDTHS, t), token_stride, N, WIDTHS[t], PARTS)
        tile_values = load(v, tile_start(WIDTHS, t), token_stride, N, WIDTHS[t], PARTS)
        sums = add_to_queries(
            sums, queries, grads, tile_keys, tile_values, total, taken, scale,
            tile_start(WIDTHS, t), N, WIDTHS[t], tile_start(WIDTHS, t + 1) > N, PARTS,
        )  # fmt: skip
    store(head_start(dqkv, head, N * 3 * H * D, H, D), sums, shrink, first, 3 * H * D, N, ROWS, PARTS)
    row = (head // H).to(tl.int64) * PROGRAMS + tl.program_id(0) % PROGRAMS
    summed += row * (2 * H * D) + (head % H) * D
    store_sums(summed, sum_rows(sums, shrink, PARTS), PARTS)  # rows of padding are 0
    store_sums(summed + H * D, sum_rows(grads, 1.0, PARTS), PARTS)


@triton.jit
def add_to_keys(
    dk, dv, keys, values, q, grad, lse, delta, first, token_stride, grad_token_stride, scale,
    N: constexpr, ROWS: constexpr, PARTS: constexpr,
):  # fmt: skip
    """dK + dST Q and dV + PT dO of one block of queries; keys come first, so that PT and dST can stay in registers.

    Padded queries have P = 1, dO = 0 and dS = 0. Padded keys have rows of their own, which are not stored.
    """
    rows = first + tl.arange(0, ROWS)
    queries = load(q, first, token_stride, N, ROWS, PARTS)
    grads = load(grad, first, grad_token_stride, N, ROWS, PARTS)
    total = tl.load(lse + rows, rows < N, 0.0)
    taken = tl.load(delta + rows, rows < N, 0.0)
    p = tl.exp2(matmul(keys, queries, PARTS) * scale - total[None, :])  # [KEYS, ROWS]
    dv = add_weighted(dv, p, grads, PARTS)
    ds = p * (matmul(values, grads, PARTS) - taken[None, :])
    return add_weighted(dk, ds, queries, PARTS), dv


@triton.jit(do_not_specialize=["H"])
def attention_backward_keys(
    qkv, lse, grad, delta, dqkv, batch_stride, token_stride, grad_batch_stride, grad_token_stride,
    scale, shrink, H, N: constexpr, PARTS: constexpr, KEYS: constexpr, WIDTHS: constexpr, PROGRAMS: constexpr,
):  # fmt: skip
    """dK and dV of one block of keys: loops over queries in blocks of WIDTHS rows."""
    D: constexpr = tile_start(PARTS, len(PARTS))
    LOOPED: constexpr = count_looped(N, WIDTHS)
    head = tl.program_id(0) // PROGRAMS
    q = head_start(qkv, head, batch_stride, H, D)
    grad = head_start(grad, head, grad_batch_stride, H, D)
    dk = head_start(dqkv, head, N * 3 * H * D, H, D) + H * D
    lse += head.to(tl.int64) * N
    delta += head.to(tl.int64) * N
    key = tl.program_id(0) % PROGRAMS * KEYS
    keys = load(q + H * D, key, token_stride, N, KEYS, PARTS)
    values = load(q + 2 * H * D, key, token_stride, N, KEYS, PARTS)
    dks = zeros(KEYS, PARTS)
    dvs = zeros(KEYS, PARTS)
    for t in range(LOOPED):
        dks, dvs = add_to_keys(
            dks, dvs, keys, values, q, grad, lse, delta, t * WIDTHS[0], token_stride, grad_token_stride, scale,
            N, WIDTHS[0], PARTS,
        )  # fmt: skip
    for t in tl.static_range(LOOPED, len(WIDTHS)):
        dks, dvs = add_to_keys(
            dks, dvs, keys, values, q, grad, lse, delta, tile_start(WIDTHS, t), token_stride, grad_token_stride, scale,
            N, WIDTHS[t], PARTS,
        )  # fmt: skip
    store(dk, dks, shrink, key, 3 * H * D, N, KEYS, PARTS)
    store(dk + H * D, dvs, 1.0, key, 3 * H * D, N, KEYS, PARTS)
