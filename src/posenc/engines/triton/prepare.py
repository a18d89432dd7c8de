"""Before the backward kernels: what each query brings to them."""

from __future__ import annotations

import triton
import triton.language as tl

from .terms import LOG2E, band_end, bias_end, load_tile, padded, row_end, row_scale, thirds


@triton.jit(do_not_specialize=["heads", "q_length", "q_first", "q_last", "total", "scale"])
def prepare(
    out, d_out, d_lse, lse, delta, ends, sums,  # ends: [4, B, H, Lq rounded up]: lse and delta as far tiles on the left, then on the right, see them
    slots,  # slots.mass: the gradient of attention per distance
    heads, q_length, q_first, q_last, total, scale,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta_i = sum_j a_ij dP_ij - dlse_i = o_i . do_i - dlse_i, and the constants of the far field folded into lse and delta.

    sums: bfloat16 [3, B, H, Lq rounded up, 16], as far tiles on the left, those on the right, and others see them: see put_sums.
    """
    total = (total * padded(q_length)).to(tl.int64)
    blocks = tl.cdiv(q_last - q_first, BLOCK)
    m0 = (q_first // BLOCK + tl.program_id(0) % blocks) * BLOCK
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    i = m0 + tl.arange(0, BLOCK)
    ok = (i >= q_first) & (i < q_last)
    dv = tl.arange(0, BLOCK_DV)
    o = load_tile(out.ptr + b * out.b + h * out.h, out.l, m0, q_length, dv, DV, BLOCK, True)
    g = load_tile(d_out.ptr + b * d_out.b + h * d_out.h, d_out.l, m0, q_length, dv, DV, BLOCK, True)
    x = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    here = bh * padded(q_length) + i
    if d_lse is not None:
        x -= LOG2E * tl.load(d_lse + here, mask=ok, other=0.0)
    tl.store(delta + here, x)
    delta_row = x
    scale_row = row_scale(slots, bh, i, q_length, scale)
    bottom = tl.load(lse + here, mask=ok, other=float("inf"))
    left = row_end(slots, bh, i, ok, False) * scale_row + bias_end(slots, h, False)
    right = row_end(slots, bh, i, ok, True) * scale_row + bias_end(slots, h, True)
    tl.store(ends + here, bottom - left, mask=ok)
    tl.store(ends + 2 * total + here, bottom - right, mask=ok)
    y = x
    if slots.mass is not None:
        y = x - band_end(slots.mass, bh, i, ok, 1)
        x = x - band_end(slots.mass, bh, i, ok, 0)
    tl.store(ends + total + here, x, mask=ok)
    tl.store(ends + 3 * total + here, y, mask=ok)
    # The same for backward_k, which has queries in columns.
    unit = 1.0 / scale_row if slots.scale is None else 1.0
    put_sums(sums + here[:, None] * 16, (bottom - left) * unit, x, 6)
    put_sums(sums + (total + here)[:, None] * 16, (bottom - right) * unit, y, 9)
    put_sums(sums + (2 * total + here)[:, None] * 16, bottom * unit, delta_row, 12)


@triton.jit
def put_sums(ptr, bottom, delta, ONES: tl.constexpr):
    """-lse and -delta in three parts each, and three ones for what a key adds (from 12 on: nothing)."""
    c = tl.arange(0, 16)[None, :]
    tile = tl.where((c >= ONES) & (c < ONES + 3) & (c < 12), 1.0, tl.zeros([bottom.shape[0], 16], tl.float32))
    tile = thirds(tile, c, 0, -tl.where(bottom > 1e30, 1e30, bottom))
    tile = thirds(tile, c, 3, -delta)
    tl.store(ptr + c, tile.to(tl.bfloat16))
