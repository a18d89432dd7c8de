"""Band: one number per token and distance, stored so that a tile of pairs is an aligned matrix.

A band holds a content term (states_i . table[r]), attention per distance, or a gradient of either. Token i has a row of
numbers, one for each distance r; rows are an odd number of elements apart, pitch + 1, where pitch is a multiple of 16:

    token 0    r0 r1 r2 r3 r4                            pitch = 4 in this drawing; rows are 5 apart
    token 1                   r0 r1 r2 r3 r4
    token 2                                  r0 r1 r2 r3 r4

A tile of scores needs the number at r = j - i + offset for each pair (i, j). Its address is

    i (pitch + 1) + r - origin   =   i pitch + j + shift             shift = offset - origin, a multiple of 16

so one query further down in the tile is `pitch` elements further in memory, and one key to the right is one element:

               j=4  j=5  j=6  j=7
    i=0         4    5    6    7            (shift = 0) every row of the tile begins at a multiple of 4 elements,
    i=1         8    9   10   11            although each token's row begins one element later than the last
    i=2        12   13   14   15

Such a tile is loaded 16 bytes at a time, or copied to shared memory asynchronously, like a dense bias [L, L]; plain rows
(pitch apart) would put it at i (pitch - 1) + j, where no two rows of a tile are aligned alike.

Entries with r <= lo or r >= hi are not the token's own: there the two ends of the band are selected. Loads may run past a
token's row by one tile, for which a buffer has MARGIN elements before and after.

Integer sums. With token positions a distance may occur several times in one row, and the probabilities or gradients of
those pairs are added atomically. Float sums would depend on the order of the additions; so such a band is fixed-point:

    int64(value * fixed_point)  +  int64(value * fixed_point)  + ...        the same bits in any order

with fixed_point a power of two for which no sum can overflow; divided by it, the result is a float again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGN = 16  # elements: loads of 16 bytes are aligned in every dtype, and Triton specialises arguments on it
MARGIN = 512  # elements before and after a buffer that a tile at its edge may touch: at least two blocks


class Band(NamedTuple):
    """Distances are other - own + offset: r for a band over queries, -r for a band over keys."""

    ptr: Any
    b: Any
    h: Any
    pitch: Any
    shift: Any
    first: Any  # the first token that has a row
    origin: Any  # the distance in column 0
    lo: Any
    hi: Any
    ends: Any  # float32 [B, H, 2, rows]: the numbers at lo and at hi
    rows: Any
    bf16x3: (
        Any  # bfloat16 [B, H, 2, rows, 16]: three ones, three unused, both ends in three parts (hi, lo; then lo, hi)
    )
    fixed_point: Any  # float32 [1] where the numbers are int64


# ---- on the host ------------------------------------------------------------------------------------------------------
def round_up(number: int, unit: int = ALIGN) -> int:
    return (number + unit - 1) // unit * unit


def band_shape(lo: int, hi: int, offset: int, tokens: int) -> tuple[int, int, int]:
    """Origin, pitch, and the number of elements of one head."""
    origin = lo - (lo - offset) % ALIGN
    pitch = round_up(hi - origin + 14)  # a row has room for its distances shifted by up to 7, rounded up to eights
    return origin, pitch, round_up(tokens * (pitch + 1))


def make_band(
    like: Tensor, heads: int, lo: int, hi: int, offset: int, first: int, last: int, *,
    dtype: torch.dtype | None = None, zero: bool = False, buffer: Tensor | None = None, fixed_point: Tensor | None = None,
) -> Band:  # fmt: skip
    """A band for the tokens first .. last of a batch like this one, in new memory or over an existing buffer.

    A fixed-point band begins with zeros, as kernels add to it.
    """
    batch = like.shape[0]
    origin, pitch, one = band_shape(lo, hi, offset, last - first)
    if buffer is None:
        dtype = (dtype or like.dtype) if fixed_point is None else torch.int64
        buffer = like.new_empty(MARGIN + batch * heads * one + MARGIN, dtype=dtype)
        if zero or fixed_point is not None:
            buffer.zero_()
    ptr = buffer[MARGIN:-MARGIN]
    # Fields that are not used get a pointer too: Triton 3.6 compiles no None in a tuple within a tuple.
    fixed_point = ptr if fixed_point is None else fixed_point
    return Band(ptr, heads * one, one, pitch, offset - origin - first, first, origin, lo, hi, ptr, 0, ptr, fixed_point)


def to_float(band: Band, dtype: torch.dtype = torch.float32) -> Band:
    """The band in floating point."""
    numbers = (band.ptr.float() / band.fixed_point if band.ptr.dtype == torch.int64 else band.ptr).to(dtype)
    return band._replace(ptr=numbers, ends=numbers, bf16x3=numbers, fixed_point=numbers)


# ---- addresses ----------------------------------------------------------------------------------------------------------
@triton.jit
def pair_addresses(band, positions, b, h, own0, own, other, OWN_IS_KEY: tl.constexpr):
    """Addresses of the pairs [own, other] for consecutive positions. The tile begins at token own0; offsets within it are
    32 bits wide, as wider ones take registers."""
    shift = band.shift
    if positions.starts is not None:
        if OWN_IS_KEY:
            shift -= tl.load(positions.starts + b)
        else:
            shift += tl.load(positions.starts + b)
    base = band.ptr + b * band.b + h * band.h + (own0 - band.first).to(tl.int64) * band.pitch
    return base + (((own - own0) * band.pitch)[:, None] + (other + shift)[None, :])


@triton.jit
def row_address(band, b, h, own0):
    """Where the row of token own0 begins; the rows after it are pitch + 1 apart."""
    return band.ptr + b * band.b + h * band.h + (own0 - band.first).to(tl.int64) * (band.pitch + 1)


@triton.jit
def reaches_ends(lo, hi, r_lo, r_hi, positions):
    """Whether a tile with the distances r_lo .. r_hi reaches an end of the span lo .. hi."""
    if positions.q is None:
        return (r_lo <= lo) | (r_hi >= hi)
    else:
        return True


# ---- load ---------------------------------------------------------------------------------------------------------------
@triton.jit
def load_band(
    band, positions, b, h, own0, own, other, length, r, r_lo, r_hi, TRANSPOSE: tl.constexpr, OWN_IS_KEY: tl.constexpr
):  # fmt: skip
    """The numbers of a tile [own, other] (TRANSPOSE: [other, own]), float32; wrong outside lo < r < hi, see select_ends.

    r: distances from own to other in the result's orientation, r_lo .. r_hi. For consecutive positions the tile is loaded
    along the tokens' rows and then transposed.
    """
    valid = own < length
    if positions.q is None:
        reached = own < tl.where((r_hi > band.lo) & (r_lo < band.hi), length, 0)
        at = pair_addresses(band, positions, b, h, own0, own, other, OWN_IS_KEY)
        x = tl.load(at, mask=reached[:, None], other=0.0)
        if TRANSPOSE:
            x = tl.trans(x)
    else:
        row = (own - own0) * (band.pitch + 1) - band.origin
        base = row_address(band, b, h, own0)
        inner = (r > band.lo) & (r < band.hi)
        if TRANSPOSE:
            x = tl.load(base + (row[None, :] + r), mask=valid[None, :] & inner, other=0.0)
        else:
            x = tl.load(base + (row[:, None] + r), mask=valid[:, None] & inner, other=0.0)
    return x.to(tl.float32)


@triton.jit
def load_end(band, bh, own, valid, HIGH):
    """The numbers of the tokens `own` at lo (HIGH=0) or at hi (HIGH=1)."""
    return tl.load(band.ends + (bh * 2 + HIGH) * band.rows + (own - band.first), mask=valid, other=0.0)


@triton.jit
def select_ends(x, band, bh, own, length, r, TRANSPOSE: tl.constexpr):
    """What load_band returned, with the band's ends where r <= lo or r >= hi."""
    valid = own < length
    low, high = load_end(band, bh, own, valid, 0), load_end(band, bh, own, valid, 1)
    if TRANSPOSE:
        low, high = low[None, :], high[None, :]
    else:
        low, high = low[:, None], high[:, None]
    return tl.where(r <= band.lo, low, tl.where(r >= band.hi, high, x))


# ---- store --------------------------------------------------------------------------------------------------------------
@triton.jit
def to_band_dtype(band, value):
    if band.ptr.dtype.element_ty == tl.int64:
        value = value * tl.load(band.fixed_point)
    return value.to(band.ptr.dtype.element_ty)


@triton.jit
def store_band(
    band, positions, b, h, own0, own, other, r, lo, hi, value, valid, at_ends, OWN_IS_KEY: tl.constexpr
):  # fmt: skip
    """Store the pairs [own, other] with distances lo < r < hi; at_ends: whether some r lie outside.

    Masked pairs are stored too, as zeros: every pair has an address of its own, and nobody else writes it. Token positions
    may repeat a distance; their values are added as integers.
    """
    value = to_band_dtype(band, value)
    if positions.q is None:
        at = pair_addresses(band, positions, b, h, own0, own, other, OWN_IS_KEY)
        if at_ends:
            tl.store(at, value, mask=valid[:, None] & (r > lo) & (r < hi))
        else:
            tl.store(at, value, mask=valid[:, None])
    else:
        at = row_address(band, b, h, own0) + ((own - own0) * (band.pitch + 1) - band.origin)[:, None] + r
        tl.atomic_add(at, value, mask=valid[:, None] & (r > lo) & (r < hi), sem="relaxed")


@triton.jit
def store_band_ends(band, b, h, own0, own, at_lo, at_hi, valid, ACCUMULATE: tl.constexpr):
    """Store the sums of all distances <= lo and >= hi at the two ends of each row, or add them to what is there."""
    at_lo += tl.where(band.hi > band.lo, 0.0, at_hi)  # a span of one distance: it is both ends
    at = row_address(band, b, h, own0) + (own - own0) * (band.pitch + 1)
    first, last = at + (band.lo - band.origin), at + (band.hi - band.origin)
    low, high = to_band_dtype(band, at_lo), to_band_dtype(band, at_hi)
    if ACCUMULATE:
        low += tl.load(first, mask=valid, other=0)
        high += tl.load(last, mask=valid, other=0)
    tl.store(first, low, mask=valid)
    if band.hi > band.lo:
        tl.store(last, high, mask=valid)


@triton.jit
def store_band_zeros(band, b, h, own0, own, begin, end, valid, BLOCK: tl.constexpr):
    """Store zeros where no tile was stored: at distances with own + r outside begin .. end, and in the room after each
    row. The ends themselves are left to store_band_ends."""
    base = row_address(band, b, h, own0)
    for c0 in range(0, band.pitch + 1, BLOCK):
        r0 = band.origin + c0
        outer = (r0 <= band.lo) | (r0 + BLOCK > band.hi)
        if outer | (own0 + r0 < begin) | (own0 + own.shape[0] + r0 + BLOCK > end):
            c = c0 + tl.arange(0, BLOCK)[None, :]
            r = band.origin + c
            other = own[:, None] + r
            rest = (other < begin) | (other >= end) | (r < band.lo) | (r > band.hi)
            rest = rest & (r != band.lo) & (r != band.hi) & (c <= band.pitch)
            at = base + (((own - own0) * (band.pitch + 1))[:, None] + c)
            tl.store(at, tl.zeros([own.shape[0], BLOCK], band.ptr.dtype.element_ty), mask=valid[:, None] & rest)
