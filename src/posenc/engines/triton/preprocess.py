"""Before the backward kernels: delta of each query, and lse and delta in the forms in which tiles need them."""

from __future__ import annotations

import triton
import triton.language as tl

from .band_layout import load_end
from .bf16x3 import split_bf16x3
from .scores import LOG2E, bias_end, row_end, row_scale
from .structs import UNSPECIALISED
from .tiles import load_tile, padded


@triton.jit(do_not_specialize=UNSPECIALISED)
def preprocess(
    out, do, d_lse, lse, delta, ends, row_parts,
    terms,  # terms.mass: the gradient of attention per distance
    heads, q_length, q_first, q_last, batch_heads, scale, zeros, zero_count,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta_i = sum_j p_ij dp_ij - dlse_i = o_i . do_i - dlse_i.

    A far tile has constants in each row; they are subtracted from lse and delta once, here, instead of added in each tile:

    ends       float32 [4, B, H, Lq rounded up]: lse and delta for far tiles on the left, then for those on the right
    row_parts  bfloat16 [3, B, H, Lq rounded up, 16]: -lse and -delta for backward_k, whose queries are columns (bf16x3.py):
               for far tiles on the left, for those on the right, for all others

    zeros, zero_count: memory that backward_q adds to, or None; all programs share the work of clearing it.
    """
    if zeros is not None:
        share = tl.cdiv(zero_count.to(tl.int64), tl.num_programs(0))
        begin = tl.program_id(0) * share
        end = tl.minimum(begin + share, zero_count)
        for z0 in range(begin, end, 256):
            z = z0 + tl.arange(0, 256)
            tl.store(zeros + z, tl.zeros([256], tl.float32), mask=z < end)
    plane = (batch_heads * padded(q_length)).to(tl.int64)
    blocks = tl.cdiv(q_last - q_first, BLOCK)
    m0 = (q_first // BLOCK + tl.program_id(0) % blocks) * BLOCK
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    i = m0 + tl.arange(0, BLOCK)
    valid = (i >= q_first) & (i < q_last)
    dv = tl.arange(0, BLOCK_DV)
    out_tile = load_tile(out.ptr + b * out.b + h * out.h, out.l, m0, q_length, dv, DV, BLOCK, True)
    do_tile = load_tile(do.ptr + b * do.b + h * do.h, do.l, m0, q_length, dv, DV, BLOCK, True)
    delta_i = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    at = bh * padded(q_length) + i
    if d_lse is not None:
        delta_i -= LOG2E * tl.load(d_lse + at, mask=valid, other=0.0)
    tl.store(delta + at, delta_i)
    scale_row = row_scale(terms, bh, i, q_length, scale)
    lse_i = tl.load(lse + at, mask=valid, other=float("inf"))
    far_left = row_end(terms, bh, i, valid, False) * scale_row + bias_end(terms, h, False)
    far_right = row_end(terms, bh, i, valid, True) * scale_row + bias_end(terms, h, True)
    tl.store(ends + at, lse_i - far_left, mask=valid)
    tl.store(ends + 2 * plane + at, lse_i - far_right, mask=valid)
    delta_left, delta_right = delta_i, delta_i
    if terms.mass is not None:
        delta_right = delta_i - load_end(terms.mass, bh, i, valid, 1)
        delta_left = delta_i - load_end(terms.mass, bh, i, valid, 0)
    tl.store(ends + plane + at, delta_left, mask=valid)
    tl.store(ends + 3 * plane + at, delta_right, mask=valid)
    factor = 1.0 / scale_row if terms.scale is None else 1.0
    store_row_parts(row_parts + at[:, None] * 16, (lse_i - far_left) * factor, delta_left, 6)
    store_row_parts(row_parts + (plane + at)[:, None] * 16, (lse_i - far_right) * factor, delta_right, 9)
    store_row_parts(row_parts + (2 * plane + at)[:, None] * 16, lse_i * factor, delta_i, 12)


@triton.jit
def store_row_parts(ptr, lse_i, delta, ONES: tl.constexpr):
    """Columns 0 to 2: -lse, 3 to 5: -delta, and ones at ONES .. ONES + 3, which select a key's far term (12: none)."""
    c = tl.arange(0, 16)[None, :]
    tile = tl.where((c >= ONES) & (c < ONES + 3) & (c < 12), 1.0, tl.zeros([lse_i.shape[0], 16], tl.float32))
    tile = split_bf16x3(tile, c, 0, -tl.where(lse_i > 1e30, 1e30, lse_i))
    tile = split_bf16x3(tile, c, 3, -delta)
    tl.store(ptr + c, tile.to(tl.bfloat16))
