"""The Triton kernels of plainvit.models.short_attention, which alone imports this module: triton is not everywhere.

FlashAttention's equations (arXiv 2205.14135, 2307.08691) cut for sequences so short that the keys of a head lie whole
in one program: the softmax takes one pass, and no gradient is shared between programs, so none needs atomics.

Letters: N tokens, H heads, d = D0 + D1 head width (80 = 64 + 16: widths of tiles are powers of two), W0 + W1 + W2 the
tiles of keys (197 = 128 + 64 + 5 of 16). q, k, v are columns of the packed [B, N, 3 H d]; logits are in base 2:
`scale` is log2(e) / sqrt(d), and lse the base-2 logarithm of a row's sum.
"""

import triton
import triton.language as tl
from triton.language import constexpr

LOG2E = 1.4426950408889634


@triton.jit
def load(start, first, stride, N: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """[ROWS, COLUMNS] from row `first` on; rows from N on are zero."""
    rows = first + tl.arange(0, ROWS)
    places = start + rows[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
    return tl.load(places, mask=rows[:, None] < N, other=0.0)


@triton.jit
def load_head(start, first, stride, N: constexpr, ROWS: constexpr, D0: constexpr, D1: constexpr):
    """Both parts of a head's width; the second is the first again where there is none."""
    part0 = load(start, first, stride, N, ROWS, D0)
    part1 = part0
    if D1 > 0:
        part1 = load(start + D0, first, stride, N, ROWS, D1)
    return part0, part1


@triton.jit
def store(start, tile, first, stride, N: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """Rows below N of a tile [ROWS, COLUMNS]."""
    rows = first + tl.arange(0, ROWS)
    places = start + rows[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
    tl.store(places, tile.to(start.dtype.element_ty), mask=rows[:, None] < N)


@triton.jit
def store_head(start, part0, part1, first, stride, N: constexpr, ROWS: constexpr, D0: constexpr, D1: constexpr):
    store(start, part0, first, stride, N, ROWS, D0)
    if D1 > 0:
        store(start + D0, part1, first, stride, N, ROWS, D1)


@triton.jit
def product(a0, a1, b0, b1, D1: constexpr):
    """a bT over both parts of the width, in fp32."""
    found = tl.dot(a0, tl.trans(b0))
    if D1 > 0:
        found = tl.dot(a1, tl.trans(b1), found)
    return found


@triton.jit
def without_padding(logits, FIRST: constexpr, N: constexpr, WIDTH: constexpr):
    """Keys from N on get no weight: the tile of keys [rows, WIDTH] begins at key FIRST."""
    if FIRST + WIDTH > N:
        logits = tl.where((FIRST + tl.arange(0, WIDTH))[None, :] < N, logits, float("-inf"))
    return logits


@triton.jit
def place(batch_stride, H: constexpr, D: constexpr):
    """Image and head of this program, and where that head's queries begin in a packed tensor."""
    image, head = tl.program_id(0) // H, tl.program_id(0) % H
    return image, head, image.to(tl.int64) * batch_stride + head * D


# Forward --------------------------------------------------------------------------------------------------------------


@triton.jit
def forward(
    qkv,
    out,
    lse,
    batch_stride,
    token_stride,
    scale,
    N: constexpr,
    H: constexpr,
    D0: constexpr,
    D1: constexpr,
    W0: constexpr,
    W1: constexpr,
    W2: constexpr,
    ROWS: constexpr,
    PROGRAMS: constexpr,
):
    """out [B, N, H d] and lse [B, H, N]: keys and values are loaded once, then blocks of queries pass by."""
    D: constexpr = D0 + D1
    image, head, at = place(batch_stride, H, D)
    q = qkv + at
    k, v = q + H * D, q + 2 * H * D
    out += image.to(tl.int64) * (N * H * D) + head * D
    lse += tl.program_id(0).to(tl.int64) * N
    k00, k01 = load_head(k, 0, token_stride, N, W0, D0, D1)
    v00, v01 = load_head(v, 0, token_stride, N, W0, D0, D1)
    if W1 > 0:
        k10, k11 = load_head(k, W0, token_stride, N, W1, D0, D1)
        v10, v11 = load_head(v, W0, token_stride, N, W1, D0, D1)
    if W2 > 0:
        k20, k21 = load_head(k, W0 + W1, token_stride, N, W2, D0, D1)
        v20, v21 = load_head(v, W0 + W1, token_stride, N, W2, D0, D1)
    for first in range(tl.program_id(1) * ROWS, N, PROGRAMS * ROWS):
        q0, q1 = load_head(q, first, token_stride, N, ROWS, D0, D1)
        s0 = without_padding(product(q0, q1, k00, k01, D1), 0, N, W0)
        most = tl.max(s0, 1)
        if W1 > 0:
            s1 = without_padding(product(q0, q1, k10, k11, D1), W0, N, W1)
            most = tl.maximum(most, tl.max(s1, 1))
        if W2 > 0:
            s2 = without_padding(product(q0, q1, k20, k21, D1), W0 + W1, N, W2)
            most = tl.maximum(most, tl.max(s2, 1))
        most *= scale
        p0 = tl.exp2(s0 * scale - most[:, None])
        total = tl.sum(p0, 1)
        p0 = p0.to(v00.dtype)
        o0 = tl.dot(p0, v00)
        o1 = o0
        if D1 > 0:
            o1 = tl.dot(p0, v01)
        if W1 > 0:
            p1 = tl.exp2(s1 * scale - most[:, None])
            total += tl.sum(p1, 1)
            p1 = p1.to(v00.dtype)
            o0 = tl.dot(p1, v10, o0)
            if D1 > 0:
                o1 = tl.dot(p1, v11, o1)
        if W2 > 0:
            p2 = tl.exp2(s2 * scale - most[:, None])
            total += tl.sum(p2, 1)
            p2 = p2.to(v00.dtype)
            o0 = tl.dot(p2, v20, o0)
            if D1 > 0:
                o1 = tl.dot(p2, v21, o1)
        o0 = o0 / total[:, None]
        if D1 > 0:
            o1 = o1 / total[:, None]
        store_head(out, o0, o1, first, H * D, N, ROWS, D0, D1)
        rows = first + tl.arange(0, ROWS)
        tl.store(lse + rows, most + tl.log2(total), mask=rows < N)


# Backward -------------------------------------------------------------------------------------------------------------


@triton.jit
def load_delta(out, g0, g1, first, stride, N: constexpr, ROWS: constexpr, D0: constexpr, D1: constexpr):
    """rowsum(dO * O) of a block of queries: the gradient that a softmax's sum takes away."""
    o0, o1 = load_head(out, first, stride, N, ROWS, D0, D1)
    delta = tl.sum(o0.to(tl.float32) * g0.to(tl.float32), 1)
    if D1 > 0:
        delta += tl.sum(o1.to(tl.float32) * g1.to(tl.float32), 1)
    return delta


@triton.jit
def add_to_queries(
    dq0,
    dq1,
    q0,
    q1,
    g0,
    g1,
    k0,
    k1,
    v0,
    v1,
    lse,
    delta,
    scale,
    FIRST: constexpr,
    N: constexpr,
    WIDTH: constexpr,
    D1: constexpr,
):
    """dQ + dS K of one tile of keys, for a block of queries."""
    s = without_padding(product(q0, q1, k0, k1, D1), FIRST, N, WIDTH)
    p = tl.exp2(s * scale - lse[:, None])  # [ROWS, WIDTH]
    ds = (p * (product(g0, g1, v0, v1, D1) - delta[:, None])).to(k0.dtype)
    dq0 = tl.dot(ds, k0, dq0)
    if D1 > 0:
        dq1 = tl.dot(ds, k1, dq1)
    return dq0, dq1


@triton.jit
def backward_queries(
    qkv,
    out,
    lse,
    grad,
    delta,
    dqkv,
    batch_stride,
    token_stride,
    grad_batch_stride,
    grad_token_stride,
    scale,
    shrink,
    N: constexpr,
    H: constexpr,
    D0: constexpr,
    D1: constexpr,
    W0: constexpr,
    W1: constexpr,
    W2: constexpr,
    ROWS: constexpr,
    PROGRAMS: constexpr,
):
    """dQ, and the delta [B, H, N] that backward_keys reads: like the forward pass, each row sees all keys."""
    D: constexpr = D0 + D1
    image, head, at = place(batch_stride, H, D)
    q = qkv + at
    k, v = q + H * D, q + 2 * H * D
    grad += image.to(tl.int64) * grad_batch_stride + head * D
    out += image.to(tl.int64) * (N * H * D) + head * D
    dq = dqkv + image.to(tl.int64) * (N * 3 * H * D) + head * D
    lse += tl.program_id(0).to(tl.int64) * N
    delta += tl.program_id(0).to(tl.int64) * N
    k00, k01 = load_head(k, 0, token_stride, N, W0, D0, D1)
    v00, v01 = load_head(v, 0, token_stride, N, W0, D0, D1)
    if W1 > 0:
        k10, k11 = load_head(k, W0, token_stride, N, W1, D0, D1)
        v10, v11 = load_head(v, W0, token_stride, N, W1, D0, D1)
    if W2 > 0:
        k20, k21 = load_head(k, W0 + W1, token_stride, N, W2, D0, D1)
        v20, v21 = load_head(v, W0 + W1, token_stride, N, W2, D0, D1)
    for first in range(tl.program_id(1) * ROWS, N, PROGRAMS * ROWS):
        q0, q1 = load_head(q, first, token_stride, N, ROWS, D0, D1)
        g0, g1 = load_head(grad, first, grad_token_stride, N, ROWS, D0, D1)
        rows = first + tl.arange(0, ROWS)
        taken = load_delta(out, g0, g1, first, H * D, N, ROWS, D0, D1)
        tl.store(delta + rows, taken, mask=rows < N)
        total = tl.load(lse + rows, mask=rows < N, other=0.0)
        dq0 = tl.zeros((ROWS, D0), tl.float32)
        dq1 = dq0
        if D1 > 0:
            dq1 = tl.zeros((ROWS, D1), tl.float32)
        dq0, dq1 = add_to_queries(
            dq0, dq1, q0, q1, g0, g1, k00, k01, v00, v01, total, taken, scale, 0, N, W0, D1
        )
        if W1 > 0:
            dq0, dq1 = add_to_queries(
                dq0, dq1, q0, q1, g0, g1, k10, k11, v10, v11, total, taken, scale, W0, N, W1, D1
            )
        if W2 > 0:
            dq0, dq1 = add_to_queries(
                dq0, dq1, q0, q1, g0, g1, k20, k21, v20, v21, total, taken, scale, W0 + W1, N, W2, D1
            )
        store_head(dq, dq0 * shrink, dq1 * shrink, first, 3 * H * D, N, ROWS, D0, D1)


@triton.jit
def add_to_keys(dk0, dk1, dv0, dv1, q0, q1, g0, g1, k0, k1, v0, v1, lse, delta, scale, D1: constexpr):
    """dK + dST Q and dV + PT dO of one block of queries; keys first, so that PT and dST stay in registers.

    Rows of padded keys hold anything: none of them meets another key's row, and none is stored.
    """
    pt = tl.exp2(product(k0, k1, q0, q1, D1) * scale - lse[None, :])  # [KEYS, ROWS]
    weights = pt.to(g0.dtype)
    dv0 = tl.dot(weights, g0, dv0)
    dst = (pt * (product(v0, v1, g0, g1, D1) - delta[None, :])).to(q0.dtype)
    dk0 = tl.dot(dst, q0, dk0)
    if D1 > 0:
        dv1 = tl.dot(weights, g1, dv1)
        dk1 = tl.dot(dst, q1, dk1)
    return dk0, dk1, dv0, dv1


@triton.jit
def load_rows(
    q,
    grad,
    lse,
    delta,
    first,
    token_stride,
    grad_token_stride,
    N: constexpr,
    ROWS: constexpr,
    D0: constexpr,
    D1: constexpr,
):
    """What a block of keys wants of a block of queries. Padded rows get P = 1 and dS = 0, and meet dO = 0."""
    q0, q1 = load_head(q, first, token_stride, N, ROWS, D0, D1)
    g0, g1 = load_head(grad, first, grad_token_stride, N, ROWS, D0, D1)
    rows = first + tl.arange(0, ROWS)
    total = tl.load(lse + rows, mask=rows < N, other=0.0)
    taken = tl.load(delta + rows, mask=rows < N, other=0.0)
    return q0, q1, g0, g1, total, taken


@triton.jit
def backward_keys(
    qkv,
    lse,
    grad,
    delta,
    dqkv,
    batch_stride,
    token_stride,
    grad_batch_stride,
    grad_token_stride,
    scale,
    shrink,
    N: constexpr,
    H: constexpr,
    D0: constexpr,
    D1: constexpr,
    KEYS: constexpr,
    ROWS: constexpr,
    TAIL: constexpr,
):
    """dK and dV of a block of keys: all queries pass by, the last of them in a block of TAIL rows."""
    D: constexpr = D0 + D1
    image, head, at = place(batch_stride, H, D)
    q = qkv + at
    grad += image.to(tl.int64) * grad_batch_stride + head * D
    dk = dqkv + image.to(tl.int64) * (N * 3 * H * D) + H * D + head * D
    lse += tl.program_id(0).to(tl.int64) * N
    delta += tl.program_id(0).to(tl.int64) * N
    key = tl.program_id(1) * KEYS
    k0, k1 = load_head(q + H * D, key, token_stride, N, KEYS, D0, D1)
    v0, v1 = load_head(q + 2 * H * D, key, token_stride, N, KEYS, D0, D1)
    dk0 = tl.zeros((KEYS, D0), tl.float32)
    dv0 = tl.zeros((KEYS, D0), tl.float32)
    dk1, dv1 = dk0, dv0
    if D1 > 0:
        dk1 = tl.zeros((KEYS, D1), tl.float32)
        dv1 = tl.zeros((KEYS, D1), tl.float32)
    FULL: constexpr = N - N % ROWS
    for first in range(0, FULL, ROWS):
        q0, q1, g0, g1, total, taken = load_rows(
            q, grad, lse, delta, first, token_stride, grad_token_stride, N, ROWS, D0, D1
        )
        dk0, dk1, dv0, dv1 = add_to_keys(
            dk0, dk1, dv0, dv1, q0, q1, g0, g1, k0, k1, v0, v1, total, taken, scale, D1
        )
    if TAIL > 0:
        q0, q1, g0, g1, total, taken = load_rows(
            q, grad, lse, delta, FULL, token_stride, grad_token_stride, N, TAIL, D0, D1
        )
        dk0, dk1, dv0, dv1 = add_to_keys(
            dk0, dk1, dv0, dv1, q0, q1, g0, g1, k0, k1, v0, v1, total, taken, scale, D1
        )
    store_head(dk, dk0 * shrink, dk1 * shrink, key, 3 * H * D, N, KEYS, D0, D1)
    store_head(dk + H * D, dv0, dv1, key, 3 * H * D, N, KEYS, D0, D1)


# Backward in one program ----------------------------------------------------------------------------------------------


@triton.jit
def add_to_all(
    dq, dk, dv, q, g, k, v, lse, delta, scale, FIRST: constexpr, N: constexpr, WIDTH: constexpr
):
    """dQ, dK and dV of one tile of keys and one block of queries: five products where the two kernels take seven."""
    st = tl.dot(k, tl.trans(q)) * scale - lse[None, :]  # [WIDTH, ROWS]
    if FIRST + WIDTH > N:  # dQ mixes the keys: padded ones must weigh nothing
        st = tl.where((FIRST + tl.arange(0, WIDTH))[:, None] < N, st, float("-inf"))
    pt = tl.exp2(st)
    dv = tl.dot(pt.to(g.dtype), g, dv)
    dst = (pt * (tl.dot(v, tl.trans(g)) - delta[None, :])).to(q.dtype)
    dk = tl.dot(dst, q, dk)
    dq = tl.dot(tl.trans(dst), k, dq)
    return dq, dk, dv


@triton.jit
def backward_whole(
    qkv,
    out,
    lse,
    grad,
    dqkv,
    batch_stride,
    token_stride,
    grad_batch_stride,
    grad_token_stride,
    scale,
    shrink,
    N: constexpr,
    H: constexpr,
    D: constexpr,
    W0: constexpr,
    W1: constexpr,
    W2: constexpr,
    ROWS: constexpr,
):
    """All gradients of a head in one program, the sums of dK and dV in registers: for few tokens and d <= 64."""
    image, head, at = place(batch_stride, H, D)
    q = qkv + at
    k, v = q + H * D, q + 2 * H * D
    grad += image.to(tl.int64) * grad_batch_stride + head * D
    out += image.to(tl.int64) * (N * H * D) + head * D
    dq = dqkv + image.to(tl.int64) * (N * 3 * H * D) + head * D
    dk, dv = dq + H * D, dq + 2 * H * D
    lse += tl.program_id(0).to(tl.int64) * N
    k0 = load(k, 0, token_stride, N, W0, D)
    v0 = load(v, 0, token_stride, N, W0, D)
    dk0 = tl.zeros((W0, D), tl.float32)
    dv0 = tl.zeros((W0, D), tl.float32)
    if W1 > 0:
        k1 = load(k, W0, token_stride, N, W1, D)
        v1 = load(v, W0, token_stride, N, W1, D)
        dk1 = tl.zeros((W1, D), tl.float32)
        dv1 = tl.zeros((W1, D), tl.float32)
    if W2 > 0:
        k2 = load(k, W0 + W1, token_stride, N, W2, D)
        v2 = load(v, W0 + W1, token_stride, N, W2, D)
        dk2 = tl.zeros((W2, D), tl.float32)
        dv2 = tl.zeros((W2, D), tl.float32)
    for first in range(0, N, ROWS):
        qi = load(q, first, token_stride, N, ROWS, D)
        gi = load(grad, first, grad_token_stride, N, ROWS, D)
        taken = load_delta(out, gi, gi, first, H * D, N, ROWS, D, 0)
        rows = first + tl.arange(0, ROWS)
        total = tl.load(lse + rows, mask=rows < N, other=0.0)
        dqi = tl.zeros((ROWS, D), tl.float32)
        dqi, dk0, dv0 = add_to_all(dqi, dk0, dv0, qi, gi, k0, v0, total, taken, scale, 0, N, W0)
        if W1 > 0:
            dqi, dk1, dv1 = add_to_all(dqi, dk1, dv1, qi, gi, k1, v1, total, taken, scale, W0, N, W1)
        if W2 > 0:
            dqi, dk2, dv2 = add_to_all(dqi, dk2, dv2, qi, gi, k2, v2, total, taken, scale, W0 + W1, N, W2)
        store(dq, dqi * shrink, first, 3 * H * D, N, ROWS, D)
    store(dk, dk0 * shrink, 0, 3 * H * D, N, W0, D)
    store(dv, dv0, 0, 3 * H * D, N, W0, D)
    if W1 > 0:
        store(dk, dk1 * shrink, W0, 3 * H * D, N, W1, D)
        store(dv, dv1, W0, 3 * H * D, N, W1, D)
    if W2 > 0:
        store(dk, dk2 * shrink, W0 + W1, 3 * H * D, N, W2, D)
        store(dv, dv2, W0 + W1, 3 * H * D, N, W2, D)
