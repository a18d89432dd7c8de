"""Attention per distance, for `add_value`, beside the forward kernel with a content term (window.py): mass[i, r], a band in memory
(triton/band_layout.py), whose product with the values' table is added to the output.

    far tiles     count for the ends of the span: sums of probabilities for each query and side, as of all keys in `l`
    near tiles    are stored as they come, less the maximum that the row has by then (take_tile), which is kept for each row and tile:
                  peaks [B H, SLOTS, Lq rounded up to 64], tile t of keys in slot t % SLOTS
    afterwards    normalise makes probabilities of them, and zeros where no tile was stored
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.tiles import padded
from .bands import begin_aligned
from .kernel import ROWS, along_rows, by_eights, coordinates

HALF = gl.constexpr(64)  # keys that are stored at a time


# ---- in the kernel ------------------------------------------------------------------------------------------------------
@gluon.jit
def rescale(sums, m_before, m):
    """Sums of a row's probabilities (by_eights) less the maximum m_before, less the maximum m."""
    base = gl.where(m == float("-inf"), 0.0, m)
    return sums * along_rows(gl.exp2(m_before - base), sums)


@gluon.jit
def add_ends(p, below, above, dist, lo, hi):
    """below, above with the probabilities of a near tile p [queries, keys] at and beyond the ends of the span."""
    x = by_eights(p.to(gl.float32))
    row, eight, column = coordinates(x)
    if dist - (ROWS - 1) <= lo:
        inside = gl.where(8 * eight <= row - column + (lo - dist), x, 0.0)
        below += gl.convert_layout(gl.sum(inside, 1), below.type.layout)
    hi = gl.maximum(hi, lo + 1)  # a span of one distance: all sums are at its first end
    if dist + (HALF - 1) >= hi:
        inside = gl.where(8 * eight >= row - column + (hi - dist), x, 0.0)
        above += gl.convert_layout(gl.sum(inside, 1), above.type.layout)
    return below, above


@gluon.jit
def store_ends(sums, below, above, l, m0, q_length, S_L: gl.constexpr):
    """The sums at both ends, divided by those of all keys."""
    L: gl.constexpr = gl.SliceLayout(1, S_L)
    total = gl.convert_layout(gl.sum(l, 1), L)
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    rows = m0 + gl.arange(0, ROWS, L)
    padded_length = (q_length + 63) // 64 * 64
    gl.store(sums + rows, gl.convert_layout(gl.sum(below, 1), L) * inverse, mask=rows < q_length)
    gl.store(sums + padded_length + rows, gl.convert_layout(gl.sum(above, 1), L) * inverse, mask=rows < q_length)


@gluon.jit
def store_peaks(peaks, m, m0, q_length):
    """A row's maximum as of this tile: what take_tile stores is relative to it."""
    rows = m0 + gl.arange(0, ROWS, m.type.layout)
    gl.store(peaks + rows, gl.where(m == float("-inf"), 0.0, m), mask=rows < q_length)


@gluon.jit
def store_half(band, buffer, p, bh, m0, dist, q_length):
    """A tile [queries, 64 keys] by way of shared memory, 16 bytes of a query at a time. Up to 7 numbers beside the span are stored too, in the
    room between queries' rows."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    gl.thread_barrier()  # what the buffer held is read by now
    buffer.store(p)
    gl.thread_barrier()
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, L)), 1)
    key = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, L)), 0)
    eight = key // 8 * 8 - row + dist  # the first of eight distances: one mask for all of them
    is_stored = (eight + 7 >= lo) & (eight <= hi) & (row < q_length - m0)
    place = (ptr + begin_aligned(band, bh, m0, dist)) + (row * (pitch // 16 * 16) + key)
    gl.store(place, buffer.load(L), mask=is_stored)


@gluon.jit
def take_half(band, buffer, p, below, above, bh, m0, dist, q_length, C_L: gl.constexpr):
    """A near tile p [queries, 64 keys]: stored, and added to the sums of the ends."""
    ptr, d_ptr, size, pitch, origin, lo, hi = band
    if (dist + (HALF - 1) > lo) & (dist - (ROWS - 1) < hi):
        store_half(band, buffer, p, bh, m0, dist, q_length)
    return add_ends(gl.convert_layout(p, C_L), below, above, dist, lo, hi)


@gluon.jit
def take_tile(band, buffer, p, below, above, bh, m0, dist, q_length, S_L: gl.constexpr, C_L: gl.constexpr):
    """take_half for a tile of 64 or 128 keys."""
    p = gl.convert_layout(p, S_L)
    if p.shape[1] == HALF:
        return take_half(band, buffer, p, below, above, bh, m0, dist, q_length, C_L)
    else:
        first, second = gl.split(gl.permute(gl.reshape(p, [ROWS, 2, HALF]), (0, 2, 1)))
        below, above = take_half(band, buffer, first, below, above, bh, m0, dist, q_length, C_L)
        return take_half(band, buffer, second, below, above, bh, m0, dist + HALF, q_length, C_L)


# ---- after it -----------------------------------------------------------------------------------------------------------
@triton.jit(
    do_not_specialize=[
        "size", "pitch", "origin", "lo", "hi", "tiles_row", "heads", "q_length", "k_length", "offset", "right", "slots",
    ]
)  # fmt: skip
def normalise(
    band, size, pitch, origin, lo, hi, peaks, sums, lse, tiles, tiles_row, heads, q_length, k_length, offset, right, slots,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Probabilities from what take_tile stored; sums [B H, 2, Lq rounded up to 64], of both ends. QUERIES, KEYS: of the kernel's blocks and
    tiles, of which `tiles` tells which are near (kernel.load_tiles)."""
    blocks = tl.cdiv(q_length, TOKENS)
    pid = tl.program_id(0)
    bh = (pid // blocks).to(tl.int64)
    i = pid % blocks * TOKENS + tl.arange(0, TOKENS)
    valid = i < q_length
    own = tiles + bh // heads * tiles_row + tl.minimum(i, q_length - 1) // QUERIES * BLOCK
    first, left0, left1 = tl.load(own)[:, None], tl.load(own + 1)[:, None], tl.load(own + 2)[:, None]
    right0, right1, last = tl.load(own + 3)[:, None], tl.load(own + 4)[:, None], tl.load(own + 5)[:, None]
    row = padded(q_length)
    lse_i = tl.load(lse + bh * row + i, mask=valid, other=float("inf"))
    below = tl.load(sums + bh * 2 * row + i, mask=valid, other=0.0)
    above = tl.load(sums + bh * 2 * row + row + i, mask=valid, other=0.0)
    below += tl.where(hi > lo, 0.0, above)
    last_key = tl.minimum(i + (k_length - q_length) + right, k_length - 1)
    base = band + bh * size + (i.to(tl.int64) * (pitch + 1))[:, None]
    for c0 in range(0, pitch + 1, COLUMNS):
        c = (c0 + tl.arange(0, COLUMNS))[None, :]
        r = origin + c
        j = i[:, None] + r - offset
        tile = j // KEYS
        stored = valid[:, None] & (r > lo) & (r < hi) & (j >= 0) & (j <= last_key[:, None])
        stored = (
            stored & (tile >= first) & (tile < last)
        )  # and not far, where a wide band reaches further than the span
        stored = stored & ((tile < left0) | (tile >= left1)) & ((tile < right0) | (tile >= right1))
        x = tl.load(base + c, mask=stored, other=0.0).to(tl.float32)
        peak = tl.load(peaks + (bh * slots + tile % slots) * row + i[:, None], mask=stored, other=float("-inf"))
        x = tl.where(stored, x * tl.exp2(peak - lse_i[:, None]), 0.0)
        x = tl.where(r == lo, below[:, None], tl.where(r == hi, above[:, None], x))
        tl.store(base + c, x.to(band.dtype.element_ty), mask=valid[:, None] & (c <= pitch))
