"""Which tiles a block visits, and which pairs of a tile are visible.

A block of queries visits the key tiles first .. last. Tiles that no mask touches are clear (clear0 .. clear1); clear tiles
whose distances all lie outside the span lo .. hi are far, and need no table:

            first    left0      left1             right0      right1     last
    skipped | general |   far    |     general      |    far    | general  | skipped
                                     |        |
                                   inner0   inner1

    far       every distance r <= lo (left) or r >= hi (right): constants for each row replace tables
    inner     clear tiles whose distances lie strictly within the span of every band: whole tiles of a band are added
    general   all others: each pair loads its table entry, masks are applied

In backward_k, a block of keys visits query tiles in the same way: the sides are swapped, so distances change their sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

EVERYWHERE = tl.constexpr(1 << 29)
"""More than any distance."""


@triton.jit
def add_start(positions, offset, b):
    """The offset of batch row b: r = j - i + offset."""
    if positions.starts is not None:
        offset += tl.load(positions.starts + b)
    return offset


@triton.jit
def key_tiles(
    m0, b, masks, q_length, k_length, offset, left, right, lo, hi,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """split_tiles for the block of queries from m0 on: padding and documents bound the keys. CLEAR: tiles may be clear."""
    begin, end, clear = 0, k_length, 1
    if masks.extra is not None:  # a dense mask is a number of each pair: no tile is far
        lo, hi = -EVERYWHERE, EVERYWHERE
    if masks.key_bounds is not None:
        bounds = masks.key_bounds + 3 * b
        begin, end, clear = tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2)
    if masks.doc_q is not None:
        own = m0 + tl.minimum(tl.arange(0, triton.next_power_of_2(BLOCK_M)), BLOCK_M - 1)
        doc_begin, doc_end, one = document_bounds(masks.doc_q_keys, masks.doc_q_keys_row, b, own, q_length)
        begin, end, clear = tl.maximum(begin, doc_begin), tl.minimum(end, doc_end), tl.where(one, clear, 0)
    if not CLEAR:
        clear = 0
    return split_tiles(
        m0, BLOCK_M, BLOCK_N, q_length, k_length, offset, left, right, lo, hi, begin, end, clear != 0
    )  # fmt: skip


@triton.jit
def query_tiles(
    n0, b, masks, q_length, k_length, q_first, q_last, offset, left, right, lo, hi,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """split_tiles for the block of keys from n0 on, over the queries q_first .. q_last. With the sides swapped, r changes
    its sign, and the left side is that of earlier queries, whose distances are r >= hi."""
    begin, end, clear = q_first, q_last, n0 >= 0
    if masks.extra is not None:
        lo, hi = -EVERYWHERE, EVERYWHERE
    if masks.key_bounds is not None:
        bounds = masks.key_bounds + 3 * b
        first, last = tl.load(bounds), tl.load(bounds + 1)
        clear = (tl.load(bounds + 2) != 0) & (first <= n0) & (n0 + BLOCK_N <= last)
        end = tl.where((n0 + BLOCK_N <= first) | (n0 >= last), 0, end)
    if masks.doc_q is not None:
        own = n0 + tl.minimum(tl.arange(0, triton.next_power_of_2(BLOCK_N)), BLOCK_N - 1)
        doc_begin, doc_end, one = document_bounds(masks.doc_k_queries, masks.doc_k_queries_row, b, own, k_length)
        begin, end, clear = tl.maximum(begin, doc_begin), tl.minimum(end, doc_end), clear & one
    if not CLEAR:
        clear = n0 < 0
    return split_tiles(
        n0, BLOCK_N, BLOCK_M, k_length, q_length, -offset, right, left, -hi, -lo, begin, end, clear
    )  # fmt: skip


@triton.jit
def split_tiles(
    own, OWN: tl.constexpr, OTHER: tl.constexpr, own_length, other_length, offset, left, right, lo, hi, begin, end, clear
):  # fmt: skip
    """The bounds drawn above for the block own .. own + OWN: first, left0, left1, right0, right1, last, clear0, clear1.

    r = other - own + offset. left, right: limits of other - own, aligned at the ends of both sides (causality, windows);
    begin, end: the other side's tokens; clear: no further mask touches the block.
    """
    diff = other_length - own_length
    begin_visible, end_visible = begin, end
    clear0 = tl.cdiv(begin, OTHER)
    clear1 = end // OTHER
    if left is not None:
        begin_visible = tl.maximum(begin_visible, own + diff - left)
        clear0 = tl.maximum(clear0, tl.cdiv(tl.maximum(own + OWN - 1 + diff - left, 0), OTHER))
    if right is not None:
        end_visible = tl.minimum(end_visible, own + OWN + diff + right)
        clear1 = tl.minimum(clear1, tl.maximum(own + diff + right + 1, 0) // OTHER)
    first = tl.maximum(begin_visible, 0) // OTHER
    last = tl.maximum(tl.cdiv(tl.maximum(end_visible, 0), OTHER), first)
    clear1 = tl.where(clear, clear1, 0)
    left0 = tl.minimum(tl.maximum(clear0, first), last)
    left1 = tl.maximum(tl.minimum(tl.maximum(lo + own - offset + 1, 0) // OTHER, tl.minimum(clear1, last)), left0)
    right0 = tl.cdiv(tl.maximum(hi + own + OWN - 1 - offset, 0), OTHER)
    right0 = tl.minimum(tl.maximum(tl.maximum(right0, clear0), left1), last)
    right1 = tl.maximum(tl.minimum(clear1, last), right0)
    # Empty far ranges move to the ends, so that the general tiles in the middle are consecutive.
    none_left, none_right = left0 == left1, right0 == right1
    left0 = tl.where(none_left, first, left0)
    left1 = tl.where(none_left, first, left1)
    right0 = tl.where(none_right, last, right0)
    right1 = tl.where(none_right, last, right1)
    return first, left0, left1, right0, right1, last, clear0, clear1


@triton.jit
def document_bounds(bounds, row, b, own, length):
    """Where the documents of a block of tokens begin and end on the other side, and whether it is one document with known
    bounds.

    Begin and end are both compared: a document without tokens on the other side is an empty range that begins where the
    next document does.
    """
    at = bounds + b * row + tl.minimum(own, length - 1) * 2
    first, last = tl.load(at), tl.load(at + 1)
    begin, end = tl.min(first, 0), tl.max(last, 0)
    return begin, end, (begin == tl.max(first, 0)) & (end == tl.min(last, 0)) & (begin >= 0)


@triton.jit
def inner_tiles(
    terms, own, OWN: tl.constexpr, OTHER: tl.constexpr, offset, left1, right0, clear0, clear1, OWN_IS_KEY: tl.constexpr
):  # fmt: skip
    """inner0 and inner1: the clear tiles within the span of every band."""
    inner0, inner1 = tl.maximum(left1, clear0), tl.minimum(right0, clear1)
    inner0, inner1 = limit_to_span(terms.rows, inner0, inner1, own, OWN, OTHER, offset, OWN_IS_KEY)
    inner0, inner1 = limit_to_span(terms.cols, inner0, inner1, own, OWN, OTHER, offset, not OWN_IS_KEY)
    inner0, inner1 = limit_to_span(terms.mass, inner0, inner1, own, OWN, OTHER, offset, OWN_IS_KEY)
    inner0 = tl.minimum(inner0, right0)
    return inner0, tl.maximum(inner0, inner1)


@triton.jit
def limit_to_span(
    band, inner0, inner1, own, OWN: tl.constexpr, OTHER: tl.constexpr, offset, OPPOSITE: tl.constexpr
):  # fmt: skip
    """OPPOSITE: the band counts distances from the other side."""
    if band is not None:
        if OPPOSITE:
            lo, hi = -band.hi, -band.lo
        else:
            lo, hi = band.lo, band.hi
        inner0 = tl.maximum(inner0, tl.cdiv(tl.maximum(lo + own + OWN - offset, 0), OTHER))
        inner1 = tl.minimum(inner1, tl.maximum(hi + own - offset, 0) // OTHER)
    return inner0, inner1


@triton.jit
def far_tile(t, left0, left1, right0):
    """The t-th far tile: first those on the left, then those on the right."""
    return tl.where(t < left1 - left0, left0 + t, right0 + t - (left1 - left0))


@triton.jit
def general_tile(t, first, left0, left1, right1, last, inner0, inner1):
    """The t-th general tile: those before the left far tiles, those after the right ones, then the middle without
    inner0 .. inner1."""
    before = left0 - first
    after = last - right1
    middle = left1 + t - before - after
    middle += tl.where(middle >= inner0, inner1 - inner0, 0)
    return tl.where(t < before, first + t, tl.where(t < before + after, right1 + t - before, middle))


@triton.jit
def is_masked(tile, clear0, clear1, CLEAR: tl.constexpr):
    """Whether a mask may touch this tile."""
    if CLEAR:
        return (tile < clear0) | (tile >= clear1)
    else:
        return True


@triton.jit
def visible(masks, b, h, i, j, q_length, k_length, left, right):
    """Which pairs are visible; False outside the tensors. i and j broadcast against each other."""
    mask = (i < q_length) & (j < k_length)
    step = j - i - (k_length - q_length)
    if left is not None:
        mask = mask & (step >= -left)
    if right is not None:
        mask = mask & (step <= right)
    if masks.keys is not None:
        mask = mask & (tl.load(masks.keys + b * masks.keys_row + j, mask=j < k_length, other=0) != 0)
    if masks.doc_q is not None:
        q_id = tl.load(masks.doc_q + b * masks.doc_q_row + i, mask=i < q_length, other=0)
        k_id = tl.load(masks.doc_k + b * masks.doc_k_row + j, mask=j < k_length, other=0)
        mask = mask & (q_id == k_id)
    if masks.extra is not None:
        if masks.extra_is_bool:
            mask = mask & (load_extra(masks, b, h, i, j, q_length, k_length) != 0)
    return mask


@triton.jit
def load_extra(masks, b, h, i, j, q_length, k_length):
    """The numbers of a dense mask, by an address for each query and a small offset for each key. Whole units of keys, so that each is one
    load; what lies beyond the last key is not masked here."""
    at = masks.extra + (b * masks.extra_b + h * masks.extra_h) * masks.extra_unit
    at = at + i.to(tl.int64) * (masks.extra_q * masks.extra_unit)
    exists = (i < q_length) & (j // masks.extra_unit * masks.extra_unit < k_length)
    if masks.extra_k is None:
        return tl.load(at + j, mask=exists, other=0)
    else:
        return tl.load(at + j.to(tl.int64) * masks.extra_k, mask=exists, other=0)
