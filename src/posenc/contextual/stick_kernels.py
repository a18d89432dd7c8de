"""Triton kernels of stick-breaking attention. A program takes a block of queries and walks over the keys from right to left.

    keys      ◀── walk ──           z = scale q·k,  lost = log(1 - sigmoid(z))
    queries   . . ▒▒▒▒ ████ ◣       rest: the sum of lost over the tiles on the right, one number for each query
                  ▲                 weight = exp(z + Σ_{t >= j in the tile} lost_t + rest)
                  rest < STOP: exp(rest) is what all keys from here on can have together, so the walk ends

The gradient of log a_ij is g_ij = a_ij (d_out_i·v_j), and lost_it is a summand of every log a_ij with j < t, hence

    dz_ij = g_ij - sigmoid(z_ij) (Σ_{t <= j} g_it + left_i d_left_i)

Sums from the left have no cancellation: a far key whose weight is nothing gets nothing. So the backward pass first walks as the forward
pass does, for rest alone, and then back to the right, taking each tile's sum out of rest again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..engines.triton.tiles import load_tile, matmul
from .kernel_parts import add_rows, begin, last_tile, store_rows, visible_keys

STOP = tl.constexpr(-40.0)
"""exp(-40) = 4e-18, below the rounding of any float32 sum of size 1."""


@triton.jit
def softplus(z):
    """log(1 + exp(z)). For a small x = exp(-|z|), 1 + x would round it away, in the same direction for each of thousands of keys."""
    x = tl.exp(-tl.abs(z))
    return tl.maximum(z, 0.0) + tl.where(x < 0.01, x * (1.0 - x * (0.5 - x * (1.0 / 3.0 - x * 0.25))), tl.log(1.0 + x))


@triton.jit
def stick_tile(q_tile, k_tile, visible, rest, scale):
    """z, weights [queries, keys], and the sum of lost over the tile's keys."""
    z = matmul(q_tile, tl.trans(k_tile)) * scale
    lost = tl.where(visible, -softplus(z), 0.0)
    after = tl.cumsum(lost, 1, reverse=True)
    weights = tl.where(visible, tl.exp(z + after + rest[:, None]), 0.0)
    return z, weights, tl.sum(lost, 1)


@triton.jit(do_not_specialize=["heads", "group", "q_length", "k_length"])
def forward_kernel(
    q, k, v, tokens, out, left, heads, group, q_length, k_length, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STRICT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. out [B, H, Lq, DV] and left [B, H, Lq] are contiguous."""
    b, _h, m0, i, inside, at, d, dv, q_tile, k_ptr, v_ptr = begin(
        q, k, v, heads, group, q_length, k_length, D, DV, BLOCK_D, BLOCK_DV, M
    )
    acc = tl.zeros([M, BLOCK_DV], tl.float32)
    rest = tl.where(inside, 0.0, STOP)
    n0 = last_tile(k_length - q_length + m0 + M - STRICT, k_length, N)
    while (n0 >= 0) & (tl.max(rest, 0) > STOP):
        j = n0 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, N, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, N, True)
        visible = visible_keys(tokens, b, i, j, k_length, STRICT)
        _, weights, lost = stick_tile(q_tile, k_tile, visible, rest, scale)
        acc = matmul(weights.to(v_tile.dtype), v_tile, acc)
        rest += lost
        n0 -= N
    store_rows(out, at, inside, dv, DV, acc)
    tl.store(left + at, tl.exp(rest), mask=inside)


@triton.jit(do_not_specialize=["heads", "group", "q_length", "k_length"])
def backward_kernel(
    q, k, v, d_out, tokens, left, dq, dk, dv_, heads, group, q_length, k_length, scale, d_left,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STRICT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: dq [B, H, Lq, D] stored, dk and dv_ [B, Hkv, Lk, ..] added to, all contiguous float32."""
    b, h, m0, i, inside, at, d, dv, q_tile, k_ptr, v_ptr = begin(
        q, k, v, heads, group, q_length, k_length, D, DV, BLOCK_D, BLOCK_DV, M
    )
    do_tile = load_tile(d_out.ptr + b * d_out.b + h * d_out.h, d_out.l, m0, q_length, dv, DV, M, True)
    kv = (b * (heads // group) + h // group) * k_length

    rest = tl.where(inside, 0.0, STOP)
    more = tl.zeros([M], tl.float32)  # what rest has rounded away
    n0 = last_tile(k_length - q_length + m0 + M - STRICT, k_length, N)
    stop = n0 + N
    while (n0 >= 0) & (tl.max(rest, 0) > STOP):
        j = n0 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, N, True)
        visible = visible_keys(tokens, b, i, j, k_length, STRICT)
        rest, more = add_exactly(rest, more, lost_in(q_tile, k_tile, visible, scale))
        n0 -= N

    before = tl.zeros([M], tl.float32)  # the sum of g over the tiles on the left, and left d_left
    if d_left is not None:
        before = tl.load(left + at, mask=inside, other=0.0) * tl.load(d_left + at, mask=inside, other=0.0)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    for _ in range((stop - n0) // N - 1):
        n0 += N
        j = n0 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, N, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, N, True)
        visible = visible_keys(tokens, b, i, j, k_length, STRICT)
        rest, more = add_exactly(rest, more, -lost_in(q_tile, k_tile, visible, scale))
        z, weights, _ = stick_tile(q_tile, k_tile, visible, rest + more, scale)
        g = weights * matmul(do_tile, tl.trans(v_tile))
        dz = g - tl.sigmoid(z) * (before[:, None] + tl.cumsum(g, 1))
        dz = (tl.where(visible, dz, 0.0) * scale).to(q_tile.dtype)
        acc = matmul(dz, k_tile, acc)
        add_rows(dk, kv, j, k_length, d, D, matmul(tl.trans(dz), q_tile))
        add_rows(dv_, kv, j, k_length, dv, DV, matmul(tl.trans(weights.to(do_tile.dtype)), do_tile))
        before += tl.sum(g, 1)
    store_rows(dq, at, inside, d, D, acc)


@triton.jit
def lost_in(q_tile, k_tile, visible, scale):
    """The sum of lost over the keys of a tile."""
    return tl.sum(tl.where(visible, -softplus(matmul(q_tile, tl.trans(k_tile)) * scale), 0.0), 1)


@triton.jit
def add_exactly(high, low, x):
    """(high + low) + x as two float32 numbers: sums that are taken back tile by tile end where they began."""
    total = high + x
    part = total - high
    return total, low + ((high - (total - part)) + (x - part))
