"""What runs before and after the Gluon backward kernels: lse and delta by tile, less the far field's constants; which tiles each block of keys
visits; the padded table; zeros for dq's sums and where no tile of a gradient's band is stored; and dq, and the sums of the keys beyond a span."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.masking import add_start, query_tiles
from ..triton.structs import UNSPECIALISED
from ..triton.tiles import load_tile, padded
from .prepare import pad_bias, store_turns


@triton.jit(do_not_specialize=UNSPECIALISED)
def prepare(
    out, do, d_lse, lse, stats, dq, tiles, blocks, count, positions, masks, bias, bias_row, bias_lo, bias_hi, table, first, width,
    heads, batch_heads, q_length, k_length, offset, left, right, lo, hi, scale, scale2,
    order, order_row, programs, section, kv_heads, D: tl.constexpr, BM: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs take a tile of queries each, the next `blocks` a block of keys, the others a row of the bias. order: int32
    [programs, 1 + ..], of blocks with documents, or None."""
    pid = tl.program_id(0)
    q_tiles = batch_heads * tl.cdiv(q_length, BM)
    if pid < q_tiles:
        prepare_queries(
            pid, out, do, d_lse, lse, stats, dq, bias, bias_row, bias_hi - bias_lo, heads, batch_heads, q_length, scale, scale2, D, BM
        )  # fmt: skip
    elif pid < q_tiles + blocks:
        split_keys(
            pid - q_tiles, tiles, count, positions, masks, q_length, k_length, offset, left, right, lo, hi, BM, KEYS, OWN
        )  # fmt: skip
        if order is not None:
            store_turns(
                pid - q_tiles, order, order_row, programs, blocks, section, masks.doc_k_queries, masks.doc_k_queries_row, kv_heads, count, k_length,
                q_length, right, left, KEYS, BM,
            )  # fmt: skip
    elif bias is not None:
        pad_bias(pid - q_tiles - blocks, bias, bias_row, bias_lo, bias_hi, table, first, width, scale, BLOCK)


@triton.jit
def load_delta(at, out, do, d_lse, heads, q_length, D: tl.constexpr, BM: tl.constexpr):
    """The tile of queries `at`: tiles of a head, its own one, its head of all batch rows and within its row; its queries, which of them exist, where
    they are in [B, H, Lq rounded up to 64], and their delta."""
    tiles = tl.cdiv(q_length, BM)
    tile, bh = at % tiles, (at // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    i, d = tile * BM + tl.arange(0, BM), tl.arange(0, D)
    valid = i < q_length
    out_tile = load_tile(out.ptr + b * out.b + h * out.h, out.l, tile * BM, q_length, d, D, BM, True)
    do_tile = load_tile(do.ptr + b * do.b + h * do.h, do.l, tile * BM, q_length, d, D, BM, True)
    delta = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    row = bh * padded(q_length) + i
    if d_lse is not None:
        delta -= 1.4426950408889634 * tl.load(d_lse + row, mask=valid, other=0.0)
    return tiles, tile, bh, h, i, valid, row, delta


@triton.jit
def prepare_queries(
    at, out, do, d_lse, lse, stats, dq, bias, bias_row, bias_end, heads, batch_heads, q_length, scale, scale2, D: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """stats [3, B H, tiles, 2, BM]: lse less the far constants of left, right and near tiles, and delta; and zeros for dq."""
    tiles, tile, bh, h, _, valid, row, delta = load_delta(at, out, do, d_lse, heads, q_length, D, BM)
    lse_i = tl.load(lse + row, mask=valid, other=float("inf"))
    left, right = 0.0, 0.0
    if bias is not None:  # divided and multiplied as in near tiles
        left = tl.load(bias + h * bias_row) / scale * scale2
        right = tl.load(bias + h * bias_row + bias_end) / scale * scale2
    plane = (batch_heads * tiles).to(tl.int64) * 2 * BM
    here = stats + (bh * tiles + tile) * 2 * BM + tl.arange(0, BM)
    tl.store(here, lse_i - left)
    tl.store(here + plane, lse_i - right)
    tl.store(here + 2 * plane, lse_i)
    for copy in tl.static_range(3):
        tl.store(here + copy * plane + BM, tl.where(valid, delta, 0.0))
    tl.store(dq + (bh * tiles + tile) * BM * D + tl.arange(0, BM * D), tl.zeros([BM * D], tl.float32))


@triton.jit
def split_keys(
    at, tiles, count, positions, masks, q_length, k_length, offset, left, right, lo, hi, BM: tl.constexpr, KEYS: tl.constexpr,
    OWN: tl.constexpr, BY_DISTANCE: tl.constexpr = False,
):  # fmt: skip
    """tiles [.., count, 9] as in kernel.load_tiles, of queries: first, right0, right1, left0, left1, last, clear0, clear1, offset.

    A block that no query sees visits the first tile, in which all pairs are masked; one in which the last key is a consumer's, and not its
    last one, has near tiles alone, all masked: the bias's gradient must not count what lies behind the keys. BY_DISTANCE: masked tiles are far
    too where all of their distances are, and those that no query sees.
    """
    b, n0 = at // count, at % count * KEYS
    offset = add_start(positions, offset, b)
    first, right0, right1, left0, left1, last, clear0, clear1 = query_tiles(
        n0, b, masks, q_length, k_length, 0, q_length, offset, left, right, lo, hi, BM, KEYS, True
    )
    some = tl.where(last > first, 1, 0)
    whole = tl.where((n0 + KEYS <= k_length) | (k_length % OWN == 0), some, 0)
    first = first * some
    last = tl.maximum(last * some, 1)
    if BY_DISTANCE:
        right0, left1 = first, last
        right1 = tl.minimum(tl.maximum(tl.maximum(n0 + offset - hi + 1, 0) // BM, first), last)
        right1 = tl.where(some != 0, right1, last)
        left0 = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(n0 + KEYS - 1 + offset - lo, 0), BM), right1), last)
    else:
        right0, right1 = tl.where(whole != 0, right0, first), tl.where(whole != 0, right1, first)
        left0, left1 = tl.where(whole != 0, left0, last), tl.where(whole != 0, left1, last)
    to = tiles + at * 9
    tl.store(to, first)
    tl.store(to + 1, right0)
    tl.store(to + 2, right1)
    tl.store(to + 3, left0)
    tl.store(to + 4, left1)
    tl.store(to + 5, last)
    tl.store(to + 6, clear0)
    tl.store(to + 7, clear1 * whole)
    tl.store(to + 8, offset)


@triton.jit(do_not_specialize=UNSPECIALISED)
def finish(sums, dq, heads, q_length, scale, D: tl.constexpr, BM: tl.constexpr, SORTED: tl.constexpr):
    """dq from its sums, which are transposed, and in the order of backward.add_tile if not SORTED."""
    tiles = tl.cdiv(q_length, BM)
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    x = tl.load(sums + (bh * tiles + tile) * BM * D + tl.arange(0, BM * D)) * scale
    if SORTED:
        x = tl.trans(tl.reshape(x, [D, BM]))
    else:
        x = tl.reshape(x, [D // 64, BM // 8, 4, 8, 4, 2, 2])  # channels // 64, queries // 8, warp, g, c, half, pair
        x = tl.reshape(tl.permute(x, (1, 4, 6, 0, 2, 5, 3)), [BM, D])
    i, d = tile * BM + tl.arange(0, BM), tl.arange(0, D)
    place = dq.ptr + b * dq.b + h * dq.h + i[:, None].to(tl.int64) * dq.l + d[None, :]
    tl.store(place, x.to(dq.ptr.dtype.element_ty), mask=(i < q_length)[:, None])


# ---- with content terms -----------------------------------------------------------------------------------------------
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
