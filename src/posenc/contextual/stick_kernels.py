"""Triton kernels of stick-breaking attention. A program takes a block of queries and walks over the keys from right to left.

    keys      ◀── walk ──           z = scale q·k,  lost = log(1 - sigmoid(z))
    queries   . . ▒▒▒▒ ████ ◣       rest: the sum of lost over the tiles on the right, one number for each query
                  ▲                 weight = exp(z + Σ_{t >= j in the tile} lost_t + rest)
                  rest < STOP: exp(rest) is what all keys from here on can have together, so the walk ends

The gradient of log a_ij is g_ij = a_ij (d_out_i·v_j), and lost_it is a summand of every log a_ij with j < t, hence

    dz_ij = g_ij - sigmoid(z_ij) (g_ij + Σ_{t < j} g_it + left_i d_left_i)

The sum over t < j is what the sum over all keys, d_out_i·out_i with the output in float32, leaves after the tiles on the right. One
kernel walks as the forward pass does; dK and dV are added to float32 memory by atomics, in no fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..engines.triton.tiles import load_tile, matmul
from .kernel_parts import add_rows, last_tile, visible_keys

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


@triton.jit(do_not_specialize=["heads", "group", "q_length", "k_length", "real_row", "ids_row"])
def forward_kernel(
    q, k, v, real, ids, out, left, heads, group, q_length, k_length, real_row, ids_row, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STRICT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. out [B, H, Lq, DV] float32, left [B, H, Lq] float32, contiguous."""
    blocks = tl.cdiv(q_length, M)
    pid = tl.program_id(0)
    m0 = (blocks - 1 - pid % blocks) * M  # the longest walks begin first
    bh = (pid // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = k_length - q_length
    row = m0 + tl.arange(0, M)
    i = first + row
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_ptr, v_ptr = k.ptr + b * k.b + h // group * k.h, v.ptr + b * v.b + h // group * v.h
    q_tile = load_tile(q.ptr + b * q.b + h * q.h, q.l, m0, q_length, d, D, M, True)
    acc = tl.zeros([M, BLOCK_DV], tl.float32)
    rest = tl.where(row < q_length, 0.0, STOP)
    n0 = last_tile(first + m0 + M - STRICT, k_length, N)
    while (n0 >= 0) & (tl.max(rest, 0) > STOP):
        j = n0 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, N, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, N, True)
        visible = visible_keys(real, ids, b, i, j, k_length, real_row, ids_row, STRICT)
        _, weights, lost = stick_tile(q_tile, k_tile, visible, rest, scale)
        acc = matmul(weights.to(v_tile.dtype), v_tile, acc)
        rest += lost
        n0 -= N
    at = bh * q_length + row
    inside = row < q_length
    tl.store(out + at[:, None] * DV + dv[None, :], acc, mask=inside[:, None] & (dv < DV)[None, :])
    tl.store(left + at, tl.exp(rest), mask=inside)


@triton.jit(do_not_specialize=["heads", "group", "q_length", "k_length", "real_row", "ids_row"])
def backward_kernel(
    q, k, v, d_out, real, ids, out, left, d_left, dq, dk, dv_, heads, group, q_length, k_length, real_row, ids_row, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STRICT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: dq [B, H, Lq, D] stored, dk and dv_ [B, Hkv, Lk, ..] added to, all contiguous float32."""
    blocks = tl.cdiv(q_length, M)
    pid = tl.program_id(0)
    m0 = (blocks - 1 - pid % blocks) * M
    bh = (pid // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = k_length - q_length
    row = m0 + tl.arange(0, M)
    i = first + row
    inside = row < q_length
    at = bh * q_length + row
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_ptr, v_ptr = k.ptr + b * k.b + h // group * k.h, v.ptr + b * v.b + h // group * v.h
    q_tile = load_tile(q.ptr + b * q.b + h * q.h, q.l, m0, q_length, d, D, M, True)
    do_tile = load_tile(d_out.ptr + b * d_out.b + h * d_out.h, d_out.l, m0, q_length, dv, DV, M, True)
    out_tile = tl.load(out + at[:, None] * DV + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
    before = tl.sum(do_tile.to(tl.float32) * out_tile, 1)  # of g, over the keys of this tile and those on the left
    of_left = tl.zeros([M], tl.float32)
    if d_left is not None:
        of_left = tl.load(left + at, mask=inside, other=0.0) * tl.load(d_left + at, mask=inside, other=0.0)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    rest = tl.where(inside, 0.0, STOP)
    kv = (b * (heads // group) + h // group) * k_length
    n0 = last_tile(first + m0 + M - STRICT, k_length, N)
    while (n0 >= 0) & (tl.max(rest, 0) > STOP):
        j = n0 + tl.arange(0, N)
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, N, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, N, True)
        visible = visible_keys(real, ids, b, i, j, k_length, real_row, ids_row, STRICT)
        z, weights, lost = stick_tile(q_tile, k_tile, visible, rest, scale)
        g = weights * matmul(do_tile, tl.trans(v_tile))
        from_here = tl.cumsum(g, 1, reverse=True)
        dz = g - tl.sigmoid(z) * (g + before[:, None] - from_here + of_left[:, None])
        dz = (tl.where(visible, dz, 0.0) * scale).to(q_tile.dtype)
        acc = matmul(dz, k_tile, acc)
        add_rows(dk, kv, j, k_length, d, D, matmul(tl.trans(dz), q_tile))
        add_rows(dv_, kv, j, k_length, dv, DV, matmul(tl.trans(weights.to(do_tile.dtype)), do_tile))
        before -= tl.sum(g, 1)
        rest += lost
        n0 -= N
    tl.store(dq + at[:, None] * D + d[None, :], acc, mask=inside[:, None] & (d < D)[None, :])
