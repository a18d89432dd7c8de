"""Triton kernels of contextual position encoding. A program takes a block of queries and walks over the keys from right to left.

    keys      ◀── walk ──            z = scale q·k,  gate = sigmoid(z)
    queries   ████ ████ ▒▒▒▒ ▒◣      count: the sum of the gates on the right, one number for each query
              far ─────▶ near        p = min(count + Σ_{t >= j in the tile} gate_t, n - 1), and by_count[i] is read at p
              count >= n - 1 for all queries of the block: every key further left reads the last row, as plain attention with one
              number for each query does (tiles on the diagonal are always near ones)

by_count = q·e [B, H, Lq, n] is one product, made before. Backward, ds = a (dp - delta) as always; a count's gradient is
dp_ij = ds_ij (by_count[i, high] - by_count[i, low]), where it is not clamped, and a gate is a summand of all counts to its left:

    dz_it = ds_it + gate (1 - gate) Σ_{j <= t} dp_ij

A first walk over the near tiles sums dp over all keys; what the tiles on the right do not have is the sum over j <= t. The gradient of
by_count is added by atomics, as those of keys and values are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..engines.triton.tiles import load_tile, matmul
from .kernel_parts import LOG2E, NEG_INF, accumulate, add_rows, begin, last_tile, store_rows, visible_keys


@triton.jit
def count_tile(q_tile, k_tile, visible, count, by_count, last, scale):
    """Scores [queries, keys], gates, and where by_count [queries: pointers] is read: low, the share of low + 1, both numbers there."""
    z = matmul(q_tile, tl.trans(k_tile)) * scale
    gates = tl.where(visible, tl.sigmoid(z), 0.0)
    p = tl.cumsum(gates, 1, reverse=True) + count[:, None]
    is_clamped = p >= last
    p = tl.minimum(p, last)
    low = p.to(tl.int32)
    share = p - low.to(tl.float32)
    below = tl.load(by_count[:, None] + low, mask=visible, other=0.0)
    above = tl.load(by_count[:, None] + low + 1, mask=visible & (share > 0.0), other=0.0)
    s = z + below * (1.0 - share) + above * share
    slope = tl.where(visible & (share > 0.0) & (is_clamped == 0), above - below, 0.0)
    return tl.where(visible, s, NEG_INF), gates, low, share, slope


@triton.jit(do_not_specialize=["heads", "group", "q_length", "k_length", "n_counts"])
def forward_kernel(
    q, k, v, tokens, out, lse, heads, group, q_length, k_length, scale, by_count, n_counts,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. by_count [B, H, Lq, n], out [B, H, Lq, DV] and lse [B, H, Lq] are contiguous float32."""
    b, _h, m0, i, inside, at, d, dv, q_tile, k_ptr, v_ptr = begin(
        q, k, v, heads, group, q_length, k_length, D, DV, BLOCK_D, BLOCK_DV, M
    )
    start = k_length - q_length + m0  # the first query's slot
    numbers = by_count + at * n_counts
    last = (n_counts - 1).to(tl.float32)
    count = tl.where(inside, 0.0, last)
    m_i, l_i = tl.full([M], NEG_INF, tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_DV], tl.float32)
    n0 = last_tile(start + M, k_length, N)
    while (n0 >= 0) & ((tl.min(count, 0) < last) | (n0 + N > start)):  # near
        j = n0 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, N, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, N, True)
        visible = visible_keys(tokens, b, i, j, k_length, 0)
        s, gates, _, _, _ = count_tile(q_tile, k_tile, visible, count, numbers, last, scale)
        m_i, l_i, acc = accumulate(s, v_tile, m_i, l_i, acc, "ieee")
        count += tl.sum(gates, 1)
        n0 -= N
    far = tl.load(numbers + n_counts - 1)
    for step in range(n0 // N + 1):
        n1 = n0 - step * N
        j = n1 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n1, k_length, d, D, N, False)
        v_tile = load_tile(v_ptr, v.l, n1, k_length, dv, DV, N, False)
        s = matmul(q_tile, tl.trans(k_tile)) * scale + far[:, None]
        if tokens.real is not None or tokens.ids is not None:
            s = tl.where(visible_keys(tokens, b, i, j, k_length, 0), s, NEG_INF)
        m_i, l_i, acc = accumulate(s, v_tile, m_i, l_i, acc, "ieee")
    empty = l_i == 0.0
    total = tl.where(empty, 1.0, l_i)
    store_rows(out, at, inside, dv, DV, acc / total[:, None])
    # +inf for a fully masked query: its probabilities are zero in the backward pass
    tl.store(lse + at, tl.where(empty, float("inf"), m_i + tl.log(total)), mask=inside)


@triton.jit(do_not_specialize=["heads", "group", "q_length", "k_length", "n_counts"])
def backward_kernel(
    q, k, v, d_out, tokens, lse, dq, dk, dv_, heads, group, q_length, k_length, scale, out, by_count, d_counts, n_counts,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: dq stored; dk, dv_ [B, Hkv, Lk, ..] and d_counts [B, H, Lq, n] added to; contiguous float32."""
    b, h, m0, i, inside, at, d, dv, q_tile, k_ptr, v_ptr = begin(
        q, k, v, heads, group, q_length, k_length, D, DV, BLOCK_D, BLOCK_DV, M
    )
    start = k_length - q_length + m0  # the first query's slot
    numbers = by_count + at * n_counts
    do_tile = load_tile(d_out.ptr + b * d_out.b + h * d_out.h, d_out.l, m0, q_length, dv, DV, M, True)
    out_tile = tl.load(out + at[:, None] * DV + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
    delta = tl.sum(do_tile.to(tl.float32) * out_tile, 1)
    lse_i = tl.load(lse + at, mask=inside, other=float("inf"))
    last = (n_counts - 1).to(tl.float32)
    kv = (b * (heads // group) + h // group) * k_length

    before = tl.zeros([M], tl.float32)  # of the counts' gradients, over all keys
    count = tl.where(inside, 0.0, last)
    n0 = last_tile(start + M, k_length, N)
    while (n0 >= 0) & ((tl.min(count, 0) < last) | (n0 + N > start)):
        j = n0 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, N, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, N, True)
        visible = visible_keys(tokens, b, i, j, k_length, 0)
        s, gates, _, _, slope = count_tile(q_tile, k_tile, visible, count, numbers, last, scale)
        ds = tl.exp2((s - lse_i[:, None]) * LOG2E) * (matmul(do_tile, tl.trans(v_tile)) - delta[:, None])
        before += tl.sum(ds * slope, 1)
        count += tl.sum(gates, 1)
        n0 -= N

    acc = tl.zeros([M, BLOCK_D], tl.float32)
    count = tl.where(inside, 0.0, last)
    n0 = last_tile(start + M, k_length, N)
    while (n0 >= 0) & ((tl.min(count, 0) < last) | (n0 + N > start)):
        j = n0 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, N, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, N, True)
        visible = visible_keys(tokens, b, i, j, k_length, 0)
        s, gates, low, share, slope = count_tile(q_tile, k_tile, visible, count, numbers, last, scale)
        weights = tl.exp2((s - lse_i[:, None]) * LOG2E)
        ds = weights * (matmul(do_tile, tl.trans(v_tile)) - delta[:, None])
        to = d_counts + (at * n_counts)[:, None] + low
        tl.atomic_add(to, ds * (1.0 - share), mask=visible, sem="relaxed")
        tl.atomic_add(to + 1, ds * share, mask=visible & (share > 0.0), sem="relaxed")
        dp = ds * slope
        until = before[:, None] - tl.cumsum(dp, 1, reverse=True) + dp  # over the keys j <= t
        dz = (tl.where(visible, ds + gates * (1.0 - gates) * until, 0.0) * scale).to(q_tile.dtype)
        acc = matmul(dz, k_tile, acc)
        add_rows(dk, kv, j, k_length, d, D, matmul(tl.trans(dz), q_tile))
        add_rows(dv_, kv, j, k_length, dv, DV, matmul(tl.trans(weights.to(do_tile.dtype)), do_tile))
        before -= tl.sum(dp, 1)
        count += tl.sum(gates, 1)
        n0 -= N

    far = tl.load(numbers + n_counts - 1)
    of_far = tl.zeros([M], tl.float32)
    for step in range(n0 // N + 1):
        n1 = n0 - step * N
        j = n1 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n1, k_length, d, D, N, False)
        v_tile = load_tile(v_ptr, v.l, n1, k_length, dv, DV, N, False)
        s = matmul(q_tile, tl.trans(k_tile)) * scale + far[:, None]
        if tokens.real is not None or tokens.ids is not None:
            s = tl.where(visible_keys(tokens, b, i, j, k_length, 0), s, NEG_INF)
        weights = tl.exp2((s - lse_i[:, None]) * LOG2E)
        ds = weights * (matmul(do_tile, tl.trans(v_tile)) - delta[:, None])
        of_far += tl.sum(ds, 1)
        dz = (ds * scale).to(q_tile.dtype)
        acc = matmul(dz, k_tile, acc)
        add_rows(dk, kv, j, k_length, d, D, matmul(tl.trans(dz), q_tile))
        add_rows(dv_, kv, j, k_length, dv, DV, matmul(tl.trans(weights.to(do_tile.dtype)), do_tile))
    tl.atomic_add(d_counts + at * n_counts + n_counts - 1, of_far, mask=inside, sem="relaxed")
    store_rows(dq, at, inside, d, D, acc)
