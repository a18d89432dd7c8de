"""What runs before and after the Gluon backward kernel with content terms: lse and delta less the far field's constants, tiles, zeros for dq's
sums and where no tile of a gradient's band is stored; the sums of the keys beyond a span."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.structs import UNSPECIALISED
from .backward_prepare import load_delta, split_keys


@triton.jit(do_not_specialize=UNSPECIALISED)
def prepare_content(
    out, do, d_lse, lse, stats, dq, tiles, blocks, count, positions, masks, row_ends, mass_ends, ends_row, heads, batch_heads, q_length, k_length,
    offset, left, right, lo, hi, scale2, D: tl.constexpr, BM: tl.constexpr, KEYS: tl.constexpr, BY_DISTANCE: tl.constexpr,
):  # fmt: skip
    """The first programs take a tile of queries each, the others a block of keys. row_ends, mass_ends: float32 [B, H, 2, ends_row] or None.

    stats [3, B H, tiles, 2, BM]: lse and delta, less what far tiles on the left and on the right, then near tiles, add to every pair
    """
    pid = tl.program_id(0)
    tiles_of_queries = tl.cdiv(q_length, BM)
    if pid < batch_heads * tiles_of_queries:
        _, tile, bh, _, i, valid, row, delta = load_delta(pid, out, do, d_lse, heads, q_length, D, BM)
        lse_i = tl.load(lse + row, mask=valid, other=float("inf"))
        plane = (batch_heads * tiles_of_queries).to(tl.int64) * 2 * BM
        here = stats + (bh * tiles_of_queries + tile) * 2 * BM + tl.arange(0, BM)
        for copy in tl.static_range(3):
            lse_copy, delta_copy = lse_i, delta
            if copy < 2:
                end = (bh * 2 + copy) * ends_row + i
                if row_ends is not None:
                    lse_copy = lse_i - scale2 * tl.load(row_ends + end, mask=valid, other=0.0)
                if mass_ends is not None:
                    delta_copy = delta - tl.load(mass_ends + end, mask=valid, other=0.0)
            tl.store(here + copy * plane, lse_copy)
            tl.store(here + copy * plane + BM, tl.where(valid, delta_copy, 0.0))
        tl.store(dq + (bh * tiles_of_queries + tile) * BM * D + tl.arange(0, BM * D), tl.zeros([BM * D], tl.float32))
    else:
        at = pid - batch_heads * tiles_of_queries
        split_keys(
            at, tiles, count, positions, masks, q_length, k_length, offset, left, right, lo, hi, BM, KEYS, KEYS, BY_DISTANCE
        )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED)
def clear_rest(
    band, size, pitch, origin, lo, hi, tiles, tiles_row, heads, length, other_length, offset, BM: tl.constexpr, KEYS: tl.constexpr,
    OWN: tl.constexpr, OWN_IS_KEY: tl.constexpr,
):  # fmt: skip
    """Zeros in a gradient's band where the kernel stores nothing: before and after each token's span, and for pairs of tiles that are far, not
    visited, or not there. offset: of the band's distances, other - own + offset."""
    OTHER: tl.constexpr = BM if OWN_IS_KEY else KEYS
    count = tl.cdiv(length, OWN)
    tile, bh = tl.program_id(0) % count, (tl.program_id(0) // count).to(tl.int64)
    own0 = tile * OWN
    own = own0 + tl.arange(0, OWN)
    row = band + bh * size + (own.to(tl.int64) * (pitch + 1) - origin)[:, None]
    valid = (own < length)[:, None]
    zeros = tl.zeros([OWN, 32], band.dtype.element_ty)
    room = tl.arange(0, 32)[None, :]
    tl.store(row + origin + room, zeros, mask=valid & (origin + room < lo))
    tl.store(row + hi + 1 + room, zeros, mask=valid & (hi + 1 + room <= origin + pitch))
    before = 1 << 20  # tiles before the first: divisions round towards zero
    begin = (own0 + lo - offset + before * OTHER) // OTHER - before
    end = (own0 + OWN - 1 + hi - offset + before * OTHER) // OTHER - before
    for other_tile in range(begin, end + 1):
        is_there = (other_tile >= 0) & (other_tile * OTHER < other_length)
        block, t = other_tile, own0 // BM
        if OWN_IS_KEY:
            block, t = own0 // KEYS, other_tile
        at = tiles + bh // heads * tiles_row + tl.where(is_there, block, 0) * 9
        is_far = ((t >= tl.load(at + 1)) & (t < tl.load(at + 2))) | ((t >= tl.load(at + 3)) & (t < tl.load(at + 4)))
        is_stored = is_there & (t >= tl.load(at)) & (t < tl.load(at + 5)) & (is_far == 0)
        if (is_stored == 0) | (other_tile * OTHER + OTHER > other_length):
            other = (other_tile * OTHER + tl.arange(0, OTHER))[None, :]
            r = other - own[:, None] + offset
            is_empty = other >= tl.where(is_stored, other_length, begin * OTHER)
            tl.store(
                row + r, tl.zeros([OWN, OTHER], band.dtype.element_ty), mask=valid & (r >= lo) & (r <= hi) & is_empty
            )


@triton.jit(do_not_specialize=UNSPECIALISED)
def finish_rows(
    outer, d_rows, row, blocks, q_length, offset, size, pitch, origin, lo, hi, side, BM: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Adds what lies beyond the span, outer [B H, blocks, row], to the ends of d_rows. side: content_launch._find_side."""
    tiles = tl.cdiv(q_length, BM)
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    i = tile * BM + tl.arange(0, BM)
    valid = i < q_length
    below, above = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for block in range(blocks):
        x = tl.load(outer + (bh * blocks + block) * row + i, mask=valid, other=0.0)
        on_left = block * KEYS - i + offset < side
        below += tl.where(on_left, x, 0.0)
        above += tl.where(on_left, 0.0, x)
    place = d_rows + bh * size + (i.to(tl.int64) * (pitch + 1) - origin)
    if hi > lo:
        last = tl.load(place + hi, mask=valid, other=0.0).to(tl.float32) + above
        tl.store(place + hi, last.to(d_rows.dtype.element_ty), mask=valid)
    else:
        below += above
    first = tl.load(place + lo, mask=valid, other=0.0).to(tl.float32) + below
    tl.store(place + lo, first.to(d_rows.dtype.element_ty), mask=valid)
