"""How kernels write: tiles of bands, their ends and the rest of them, sums along diagonals, rows of a tensor."""

from __future__ import annotations

import triton
import triton.language as tl

from .terms import tile_of, token


@triton.jit
def put(band, places, b, h, own0, own, other, r, lo, hi, value, ok, edge, OWN_IS_KEY: tl.constexpr):
    """value of the pairs [own, other] at their distances r, lo < r < hi; `edge`: whether some r are outside.

    `ok`: which tokens there are. A pair outside the mask has a zero to write, and a place of its own. Token positions
    may repeat a distance: their values are added, as integers.
    """
    value = stored(band, value)
    if places.q is None:
        at = tile_of(band, places, b, h, own0, own, other, OWN_IS_KEY)
        if edge:
            tl.store(at, value, mask=ok[:, None] & (r > lo) & (r < hi))
        else:
            tl.store(at, value, mask=ok[:, None])
    else:
        at = token(band, b, h, own0) + ((own - own0) * (band.pitch + 1) - band.origin)[:, None] + r
        tl.atomic_add(at, value, mask=ok[:, None] & (r > lo) & (r < hi), sem="relaxed")


@triton.jit
def stored(band, value):
    """As the band keeps it."""
    if band.ptr.dtype.element_ty == tl.int64:
        value = value * tl.load(band.unit)
    return value.to(band.ptr.dtype.element_ty)


@triton.jit
def put_ends(band, b, h, own0, own, at_left, at_right, ok, MORE: tl.constexpr):
    """The sums at both ends of a band. MORE adds to them."""
    at_left += tl.where(band.hi > band.lo, 0.0, at_right)  # one row is both ends
    at = token(band, b, h, own0) + (own - own0) * (band.pitch + 1)
    first, last = at + (band.lo - band.origin), at + (band.hi - band.origin)
    left, right = stored(band, at_left), stored(band, at_right)
    if MORE:
        left += tl.load(first, mask=ok, other=0)
        right += tl.load(last, mask=ok, other=0)
    tl.store(first, left, mask=ok)
    if band.hi > band.lo:
        tl.store(last, right, mask=ok)


@triton.jit
def put_zeros(band, b, h, own0, own, begin, end, ok, BLOCK: tl.constexpr):
    """Zeros where no general tile wrote: at distances with own + r outside begin .. end, and in the room at the ends of
    the rows. The ends themselves are left to put_ends."""
    base = token(band, b, h, own0)
    for c0 in range(0, band.pitch + 1, BLOCK):
        r0 = band.origin + c0
        outer = (r0 <= band.lo) | (r0 + BLOCK > band.hi)
        if outer | (own0 + r0 < begin) | (own0 + own.shape[0] + r0 + BLOCK > end):
            c = c0 + tl.arange(0, BLOCK)[None, :]
            r = band.origin + c
            there = own[:, None] + r
            rest = (there < begin) | (there >= end) | (r < band.lo) | (r > band.hi)
            rest = rest & (r != band.lo) & (r != band.hi) & (c <= band.pitch)
            at = base + (((own - own0) * (band.pitch + 1))[:, None] + c)
            tl.store(at, tl.zeros([own.shape[0], BLOCK], band.ptr.dtype.element_ty), mask=ok[:, None] & rest)


@triton.jit
def put_diagonal(ptr, r, value, lo, hi, live, BLOCK: tl.constexpr):
    """Sums of distances r .. r + BLOCK; those outside lo .. hi, and the ends themselves, are kept elsewhere."""
    step = r + tl.arange(0, BLOCK)
    tl.store(ptr + (step - lo), value, mask=(step > lo) & (step < tl.where(live, hi, lo)))


@triton.jit
def store_tile(x, b, h, rows, d, D: tl.constexpr, value, ok, MORE: tl.constexpr):
    at = x.ptr + b * x.b + h * x.h + rows.to(tl.int64)[:, None] * x.l + d[None, :]
    within = ok[:, None] & (d[None, :] < D)
    if MORE:
        value += tl.load(at, mask=within, other=0.0).to(tl.float32)
    tl.store(at, value.to(x.ptr.dtype.element_ty), mask=within)
