"""The backward kernels: `backward_q` per block of queries, `backward_k` per block of keys (before them: prepare.py).

Nothing is added from two programs into one place: each program owns what it writes, a far tile's share of a table's
gradient is a sum in registers, and within the band each (token, distance) is written once. Sums over programs are
left to fixed-order reductions outside. So two runs give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .put import put, put_diagonal, put_ends, put_zeros, store_tile
from .terms import (
    LOG2E,
    added,
    amidst,
    distance,
    edges,
    ended,
    far,
    far_inside,
    far_row,
    far_tile,
    general_tile,
    hidden,
    inside,
    keep,
    lifted,
    load_tile,
    look,
    middle,
    of_documents,
    outside,
    padded,
    picks,
    row_end,
    row_scale,
    segments,
    shown,
    tiled,
    unit_matrix,
)

# Numbers that change from call to call and whose divisibility helps nothing.
PLAIN = [
    "heads", "group", "q_length", "k_length", "q_first", "q_last", "offset", "left", "right", "lo", "hi", "total", "scale",
]  # fmt: skip


class Grads(NamedTuple):
    """Where gradients go; None where none is wanted. Zeros at the start where a kernel may not reach."""

    rows: Any  # Band
    cols: Any  # Band
    bias: Any  # Table over batch, head and query block; with token positions, a Band over queries. float32
    slopes: Any  # [B, H, Lq], to be summed
    scale: Any  # [B, H, Lq]
    decay_k: Any  # [B, H, Lk]


@triton.jit
def weighed(
    dp, slots, places, masks, b, h, bh, m0, i, j, r, r_lo, r_hi, q_length, dropout,
    DROPOUT: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights, from do.v: with the value term's share, after dropout."""
    if slots.mass is not None:
        mass = look(slots.mass, places, b, h, bh, m0, i, j, q_length, r, r_lo, r_hi, KEYS_FIRST, False)
        if edges(slots.mass.lo, slots.mass.hi, r_lo, r_hi, places):
            mass = ended(mass, slots.mass, bh, i, q_length, r, KEYS_FIRST)
        dp += mass
    if DROPOUT:
        if KEYS_FIRST:
            dp = dp * keep(masks, bh, i[None, :], j[:, None], dropout)
        else:
            dp = dp * keep(masks, bh, i[:, None], j[None, :], dropout)
    return dp


@triton.jit(do_not_specialize=PLAIN)
def backward_q(
    q, k, v, d_out, dq, lse, delta, ends,
    slots, places, masks, grads,
    heads, group, q_length, k_length, q_first, q_last, offset, left, right, lo, hi, total, scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr,
    RAW: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BAND_STAGES: tl.constexpr, AMIDST: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries, and what belongs to queries: rows, scale; the shares of bias and slopes."""
    total = (total * padded(q_length)).to(tl.int64)
    blocks = tl.cdiv(q_last - q_first, BLOCK_M)
    block = q_first // BLOCK_M + blocks - 1 - tl.program_id(0) % blocks
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    m0 = block * BLOCK_M
    k_ptr = k.ptr + b * k.b + (h // group) * k.h
    v_ptr = v.ptr + b * v.b + (h // group) * v.h
    if places.starts is not None:
        offset += tl.load(places.starts + b)
    begin, end, clear = 0, k_length, 1
    if masks.spans is not None:
        begin, end, clear = (
            tl.load(masks.spans + 3 * b),
            tl.load(masks.spans + 3 * b + 1),
            tl.load(masks.spans + 3 * b + 2),
        )
    MASS: tl.constexpr = DROPOUT and (slots.mass is not None)  # far values would be dropped one by one
    CLEAR: tl.constexpr = (masks.extra is None) and (not MASS) and (places.q is None)
    if masks.doc_q is not None:
        doc_begin, doc_end, one = of_documents(
            masks.doc_q_sees, masks.doc_q_sees_row, b, m0 + tl.arange(0, BLOCK_M), q_length
        )
        begin, end, clear = tl.maximum(begin, doc_begin), tl.minimum(end, doc_end), tl.where(one, clear, 0)
    if not CLEAR:
        clear = 0
    a0, l0, l1, r0, r1, a1, c0, c1 = segments(
        m0, BLOCK_M, BLOCK_N, q_length, k_length, offset, left, right, lo, hi, begin, end, clear != 0
    )

    i = m0 + tl.arange(0, BLOCK_M)
    ok = i < q_length
    here = bh * padded(q_length) + i
    steps = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    keys_three = picks(slots, 6, BLOCK_M, 16)
    q_tile = load_tile(q.ptr + b * q.b + h * q.h, q.l, m0, q_length, d, D, BLOCK_M, True)
    g_tile = load_tile(d_out.ptr + b * d_out.b + h * d_out.h, d_out.l, m0, q_length, dv, DV, BLOCK_M, True)
    scale_row = row_scale(slots, bh, i, q_length, scale)
    scale_tile = tiled(scale_row, slots, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sum_left = tl.zeros([BLOCK_M], tl.float32)  # of dS over far keys
    sum_right = tl.zeros([BLOCK_M], tl.float32)
    d_slope = tl.zeros([BLOCK_M], tl.float32)
    d_scale = tl.zeros([BLOCK_M], tl.float32)
    SUMS: tl.constexpr = (grads.rows is not None) or (grads.bias is not None)

    if CLEAR:
        lse_left = tl.load(ends + here, mask=ok, other=float("inf"))
        lse_right = tl.load(ends + 2 * total + here, mask=ok, other=float("inf"))
        delta_left = tl.load(ends + total + here, mask=ok, other=0.0)
        delta_right = tl.load(ends + 3 * total + here, mask=ok, other=0.0)
        for t in range((l1 - l0) + (r1 - r0)):
            n0 = far_tile(t, l0, l1, r0) * BLOCK_N
            on_left = t < l1 - l0
            k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, BLOCK_N, False)
            v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, BLOCK_N, False)
            j = (n0 + steps)[None, :]
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            x = far_inside(x, slots, bh, n0 + steps, on_left, keys_three)
            y = far(x, scale_tile, slots, h, bh, j, m0, on_left, offset, q_length, k_length)
            base = tl.where(on_left, lse_left, lse_right) - far_row(slots, h, bh, i, m0, on_left, q_length)
            if RAW:
                p = tl.exp2(y * scale_row - base[:, None])
            else:
                p = tl.exp2(y - base[:, None])
            dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
            if DROPOUT:
                dp = dp * keep(masks, bh, i[:, None], j, dropout)
            ds = p * (dp - tl.where(on_left, delta_left, delta_right)[:, None])
            if SUMS or (grads.scale is not None):
                gained = tl.sum(ds, 1)
            if SUMS:
                sum_left += tl.where(on_left, gained, 0.0)
                sum_right += tl.where(on_left, 0.0, gained)
            if grads.slopes is not None:
                way = tl.sum(ds * (j + offset - i[:, None]).to(tl.float32), 1)
                d_slope += tl.where(on_left, way, -way)
            if grads.scale is not None:
                last = tl.where(on_left, row_end(slots, bh, i, ok, False), row_end(slots, bh, i, ok, True))
                d_scale += tl.sum(ds * x, 1) + last * gained
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)

    bottom = tl.load(lse + here, mask=ok, other=float("inf"))
    delta_row = tl.load(delta + here, mask=ok, other=0.0)
    row_left, row_right = sum_left, sum_right  # rows' and bias's spans differ, so their ends gather apart from here
    bias_left, bias_right = sum_left, sum_right
    # Sums along diagonals, r = n0 - m0 + offset + c + w BAND for w = -2, -1, 0: the next tile's w is this one's w + 1.
    wait_0 = tl.zeros([BAND], tl.float32)
    wait_1 = tl.zeros([BAND], tl.float32)
    DIAGONALS: tl.constexpr = (grads.bias is not None) and (places.q is None)
    if DIAGONALS:
        bias_ptr = grads.bias.ptr + ((bh * tl.cdiv(q_length, BLOCK_M)) + block) * grads.bias.h

    s0, s1 = r0, r0
    if AMIDST and CLEAR and (grads.bias is None):  # sums along diagonals take the middle's tiles one after another
        s0, s1 = middle(slots, m0, BLOCK_M, BLOCK_N, offset, l1, r0, c0, c1, False)
        same = unit_matrix(slots, BLOCK_M)
        for t in tl.range(s0 * (BLOCK_N // AMIDST), s1 * (BLOCK_N // AMIDST), num_stages=BAND_STAGES):
            n0 = t * AMIDST
            k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, AMIDST, False)
            v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, AMIDST, False)
            j = n0 + tl.arange(0, AMIDST)
            r = j[None, :] - i[:, None] + offset
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            x = amidst(x, same, slots, places, b, h, m0, n0, i, j, q_length, k_length, False)
            y = outside(x * scale_tile, slots, masks, b, h, bh, i[:, None], j[None, :], r, q_length, k_length)
            p = tl.exp2(y - bottom[:, None])
            dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
            if slots.mass is not None:
                dp = added(dp, same, slots.mass, places, b, h, m0, i, j, q_length, False, False)
            if DROPOUT:
                dp = dp * keep(masks, bh, i[:, None], j[None, :], dropout)
            ds = p * (dp - delta_row[:, None])
            if grads.slopes is not None:
                d_slope -= tl.sum(ds * tl.abs(r).to(tl.float32), 1)
            if grads.scale is not None:
                d_scale += tl.sum(ds * x, 1)
            if grads.rows is not None:
                put(grads.rows, places, b, h, m0, i, j, r, lo, hi, ds * (scale_tile / LOG2E), ok, False, False)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)

    PER: tl.constexpr = BLOCK_N // BAND
    general = ((l0 - a0) + (a1 - r1) + (r0 - l1) - (s1 - s0)) * PER
    few = tl.arange(0, BAND)
    for t in tl.range(0, general, num_stages=BAND_STAGES):
        tile = general_tile(t // PER, a0, l0, l1, r0, r1, a1, s0, s1)
        n0 = tile * BLOCK_N + t % PER * BAND
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, BAND, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, BAND, True)
        j = n0 + few
        r = distance(places, b, i[:, None], j[None, :], offset, q_length, k_length)
        r_lo, r_hi = n0 - m0 - (BLOCK_M - 1) + offset, n0 - m0 + (BAND - 1) + offset
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        some = hidden(tile, c0, c1, CLEAR)
        x = inside(
            x, slots, places, masks, b, h, bh, m0, n0, i, j, r, r_lo, r_hi, q_length, k_length, left, right, some, False
        )
        y = outside(x * scale_tile, slots, masks, b, h, bh, i[:, None], j[None, :], r, q_length, k_length)
        y = shown(y, slots, masks, b, h, i[:, None], j[None, :], q_length, k_length, left, right, some)
        p = tl.exp2(y - bottom[:, None])
        dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        dp = weighed(dp, slots, places, masks, b, h, bh, m0, i, j, r, r_lo, r_hi, q_length, dropout, DROPOUT, False)
        ds = p * (dp - delta_row[:, None])
        if grads.slopes is not None:
            d_slope -= tl.sum(ds * tl.abs(r).to(tl.float32), 1)
        if grads.scale is not None:
            d_scale += tl.sum(ds * x, 1)
        # Tiles beyond the far ones belong to the ends, even where a band reaches there.
        outer = t < ((l0 - a0) + (a1 - r1)) * PER
        if grads.rows is not None:
            row_lo, row_hi = tl.where(outer, lo, grads.rows.lo), tl.where(outer, hi, grads.rows.hi)
            edge = edges(row_lo, row_hi, r_lo, r_hi, places)
            if edge:
                row_left += tl.sum(tl.where(r <= row_lo, ds, 0.0), 1)
                row_right += tl.sum(tl.where((r >= row_hi) & (r > row_lo), ds, 0.0), 1)
            share = ds * (scale_tile / LOG2E)
            put(grads.rows, places, b, h, m0, i, j, r, row_lo, row_hi, share, ok, edge, False)
        if grads.bias is not None:
            bias_lo, bias_hi = tl.where(outer, lo, grads.bias.lo), tl.where(outer, hi, grads.bias.hi)
            bias_left += tl.sum(tl.where(r <= bias_lo, ds, 0.0), 1)
            bias_right += tl.sum(tl.where((r >= bias_hi) & (r > bias_lo), ds, 0.0), 1)
        if DIAGONALS:
            within = tl.where((r > bias_lo) & (r < bias_hi), ds, 0.0)
            rows = tl.arange(0, BLOCK_M)[:, None]
            from_column = (few[None, :] + rows) % BAND
            rolled = tl.gather(within, from_column, 1)  # [row, c] comes from the column with column - row = c + w BAND
            wrap = from_column - rows - few[None, :]
            first = wait_0 + tl.sum(tl.where(wrap == -2 * BAND, rolled, 0.0), 0)
            second = wait_1 + tl.sum(tl.where(wrap == -BAND, rolled, 0.0), 0)
            third = tl.sum(tl.where(wrap == 0, rolled, 0.0), 0)
            put_diagonal(
                bias_ptr,
                n0 - m0 + offset - 2 * BAND,
                first,
                grads.bias.lo,
                grads.bias.hi,
                t >= general - (r0 - l1) * PER,
                BAND,
            )
            wait_0, wait_1 = second, third
        elif grads.bias is not None:
            put(grads.bias, places, b, h, m0, i, j, r, bias_lo, bias_hi, ds, ok, True, False)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)

    store_tile(dq, b, h, i, d, D, acc * (scale_tile / LOG2E), ok, False)
    if grads.rows is not None:
        unit = scale_row / LOG2E
        if places.q is None:
            begin, end = l1 * BLOCK_N + offset, r0 * BLOCK_N + offset
            put_zeros(grads.rows, b, h, m0, i, begin, end, ok, BAND)
        put_ends(grads.rows, b, h, m0, i, row_left * unit, row_right * unit, ok, False)
    if DIAGONALS:
        last = (r0 * BLOCK_N) - m0 + offset
        put_diagonal(bias_ptr, last - 2 * BAND, wait_0, grads.bias.lo, grads.bias.hi, l1 <= r0, BAND)
        put_diagonal(bias_ptr, last - BAND, wait_1, grads.bias.lo, grads.bias.hi, l1 <= r0, BAND)
        bias_left += tl.where(grads.bias.hi > grads.bias.lo, 0.0, bias_right)  # one row is both ends
        tl.store(bias_ptr, tl.sum(bias_left, 0))
        if grads.bias.hi > grads.bias.lo:
            tl.store(bias_ptr + (grads.bias.hi - grads.bias.lo), tl.sum(bias_right, 0))
    elif grads.bias is not None:
        put_ends(grads.bias, b, h, m0, i, bias_left, bias_right, ok, False)
    if grads.slopes is not None:
        tl.store(grads.slopes + bh * q_length + i, d_slope, mask=ok)
    if grads.scale is not None:
        tl.store(grads.scale + bh * q_length + i, d_scale, mask=ok)


@triton.jit(do_not_specialize=PLAIN)
def backward_k(
    q, k, v, d_out, dk, dv, sums,
    slots, places, masks, grads,
    heads, group, q_length, k_length, q_first, q_last, offset, left, right, lo, hi, total, scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr,
    RAW: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BAND_STAGES: tl.constexpr, AMIDST: tl.constexpr,
    MORE: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, and what belongs to keys: cols, decay. Tiles are [keys, queries].

    Queries q_first .. q_last; with MORE their share is added to that of the queries before.
    """
    total = (total * padded(q_length)).to(tl.int64)
    blocks = tl.cdiv(k_length, BLOCK_N)
    block = tl.program_id(0) % blocks
    b_kv = (tl.program_id(0) // blocks).to(tl.int64)
    kv_heads = heads // group
    b, h_kv = b_kv // kv_heads, b_kv % kv_heads
    n0 = block * BLOCK_N
    if places.starts is not None:
        offset += tl.load(places.starts + b)
    begin, end, clear = q_first, q_last, n0 >= 0
    if masks.spans is not None:
        first, last = tl.load(masks.spans + 3 * b), tl.load(masks.spans + 3 * b + 1)
        clear = (tl.load(masks.spans + 3 * b + 2) != 0) & (first <= n0) & (n0 + BLOCK_N <= last)
        end = tl.where((n0 + BLOCK_N <= first) | (n0 >= last), 0, end)
    MASS: tl.constexpr = DROPOUT and (slots.mass is not None)  # far values would be dropped one by one
    CLEAR: tl.constexpr = (masks.extra is None) and (not MASS) and (places.q is None)
    if masks.doc_q is not None:
        doc_begin, doc_end, one = of_documents(
            masks.doc_k_sees, masks.doc_k_sees_row, b, n0 + tl.arange(0, BLOCK_N), k_length
        )
        begin, end, clear = tl.maximum(begin, doc_begin), tl.minimum(end, doc_end), clear & one
    if not CLEAR:
        clear = n0 < 0
    # With the sides swapped r turns its sign, and so do all bounds; "left" below is the side of later queries' r <= lo.
    a0, l0, l1, r0, r1, a1, c0, c1 = segments(
        n0, BLOCK_N, BLOCK_M, k_length, q_length, -offset, right, left, -hi, -lo, begin, end, clear
    )

    j = n0 + tl.arange(0, BLOCK_N)
    ok = j < k_length
    steps = tl.arange(0, BLOCK_M)
    PER: tl.constexpr = BLOCK_M // BAND  # a general tile has BAND queries
    few = tl.arange(0, BAND)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    k_tile = load_tile(k.ptr + b * k.b + h_kv * k.h, k.l, n0, k_length, d, D, BLOCK_N, True)
    v_tile = load_tile(v.ptr + b * v.b + h_kv * v.h, v.l, n0, k_length, d_v, DV, BLOCK_N, True)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    c = tl.arange(0, 16)[None, :]
    first_three, next_three = picks(slots, 0, BLOCK_N, 16), picks(slots, 3, BLOCK_N, 16)

    for member in range(group):
        h = h_kv * group + member
        bh = b * heads + h
        q_ptr = q.ptr + b * q.b + h * q.h
        g_ptr = d_out.ptr + b * d_out.b + h * d_out.h
        sum_left = tl.zeros([BLOCK_N], tl.float32)
        sum_right = tl.zeros([BLOCK_N], tl.float32)
        d_decay = tl.zeros([BLOCK_N], tl.float32)
        far_score = first_three
        if slots.cols is not None:
            at = slots.cols.thirds + (bh * 2 * slots.cols.rows + j)[:, None] * 16 + c
            if slots.scale is None:
                far_score = tl.load(at, mask=ok[:, None], other=0.0)
            else:
                far_keys = tl.load(at, mask=ok[:, None] & (c >= 6), other=0.0)

        if CLEAR:
            for t in range((l1 - l0) + (r1 - r0)):
                m0 = far_tile(t, l0, l1, r0) * BLOCK_M
                on_left = t >= l1 - l0  # earlier queries have r >= hi: their far keys are on the right
                q_tile = load_tile(q_ptr, q.l, m0, q_length, d, D, BLOCK_M, False)
                i = m0 + steps
                side = tl.where(on_left, 0, total)
                e_tile = tl.load(sums + (side + bh * padded(q_length) + i)[:, None] * 16 + c)
                scale_row = row_scale(slots, bh, i, q_length, scale)
                scale_tile = tiled(scale_row, slots, True)
                x = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                if slots.scale is None:
                    x = lifted(x, far_score, e_tile)
                elif slots.cols is not None:
                    x = lifted(x, far_keys, e_tile)
                x = far(x, scale_tile, slots, h, bh, j[:, None], m0, on_left, offset, q_length, k_length)
                if (slots.slopes is not None) or (slots.decay_q is not None):
                    x += far_row(slots, h, bh, i, m0, on_left, q_length)[None, :]
                if slots.scale is not None:
                    x = lifted(x, first_three, e_tile)
                if RAW:
                    p = tl.exp2(x * scale_row)
                else:
                    p = tl.exp2(x)
                g_tile = load_tile(g_ptr, d_out.l, m0, q_length, d_v, DV, BLOCK_M, False)
                dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
                if DROPOUT:
                    stays = keep(masks, bh, i[None, :], j[:, None], dropout)
                    acc_v = tl.dot((p * stays).to(g_tile.dtype), g_tile, acc_v, input_precision=PRECISION)
                    dp = dp * stays
                else:
                    acc_v = tl.dot(p.to(g_tile.dtype), g_tile, acc_v, input_precision=PRECISION)
                ds = p * lifted(dp, next_three, e_tile)
                if grads.decay_k is not None:
                    d_decay -= tl.sum(ds, 1)
                if slots.scale is not None:
                    ds = ds * (scale_tile / LOG2E)
                if grads.cols is not None:
                    gained = tl.sum(ds, 1)
                    sum_left += tl.where(on_left, gained, 0.0)
                    sum_right += tl.where(on_left, 0.0, gained)
                acc_k = tl.dot(ds.to(q_tile.dtype), q_tile, acc_k, input_precision=PRECISION)

        s0, s1 = r0, r0
        if AMIDST and CLEAR:
            s0, s1 = middle(slots, n0, BLOCK_N, BLOCK_M, -offset, l1, r0, c0, c1, True)
            same = unit_matrix(slots, BLOCK_N)
            for t in tl.range(s0 * (BLOCK_M // AMIDST), s1 * (BLOCK_M // AMIDST), num_stages=BAND_STAGES):
                m0 = t * AMIDST
                q_tile = load_tile(q_ptr, q.l, m0, q_length, d, D, AMIDST, False)
                g_tile = load_tile(g_ptr, d_out.l, m0, q_length, d_v, DV, AMIDST, False)
                i = m0 + tl.arange(0, AMIDST)
                e_tile = tl.load(sums + (2 * total + bh * padded(q_length) + i)[:, None] * 16 + c)
                scale_row = row_scale(slots, bh, i, q_length, scale)
                scale_tile = tiled(scale_row, slots, True)
                r = j[:, None] - i[None, :] + offset
                x = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                if slots.scale is None:
                    x = lifted(x, first_three, e_tile)
                x = amidst(x, same, slots, places, b, h, m0, n0, i, j, q_length, k_length, True) * scale_tile
                x = outside(x, slots, masks, b, h, bh, i[None, :], j[:, None], r, q_length, k_length)
                if slots.scale is not None:
                    x = lifted(x, first_three, e_tile)
                p = tl.exp2(x)
                dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
                if slots.mass is not None:
                    dp = added(dp, same, slots.mass, places, b, h, m0, i, j, q_length, True, False)
                if DROPOUT:
                    stays = keep(masks, bh, i[None, :], j[:, None], dropout)
                    acc_v = tl.dot((p * stays).to(g_tile.dtype), g_tile, acc_v, input_precision=PRECISION)
                    dp = dp * stays
                else:
                    acc_v = tl.dot(p.to(g_tile.dtype), g_tile, acc_v, input_precision=PRECISION)
                ds = p * lifted(dp, next_three, e_tile)
                if grads.decay_k is not None:
                    d_decay -= tl.sum(ds, 1)
                if slots.scale is not None:
                    ds = ds * (scale_tile / LOG2E)
                if grads.cols is not None:
                    if slots.scale is None:
                        share = ds * scale
                    else:
                        share = ds
                    put(grads.cols, places, b, h, n0, j, i, -r, lo, hi, share, ok, False, True)
                acc_k = tl.dot(ds.to(q_tile.dtype), q_tile, acc_k, input_precision=PRECISION)

        for t in tl.range(0, ((l0 - a0) + (a1 - r1) + (r0 - l1) - (s1 - s0)) * PER, num_stages=BAND_STAGES):
            tile = general_tile(t // PER, a0, l0, l1, r0, r1, a1, s0, s1)
            m0 = tile * BLOCK_M + t % PER * BAND
            q_tile = load_tile(q_ptr, q.l, m0, q_length, d, D, BAND, True)
            g_tile = load_tile(g_ptr, d_out.l, m0, q_length, d_v, DV, BAND, True)
            i = m0 + few
            e_tile = tl.load(sums + (2 * total + bh * padded(q_length) + i)[:, None] * 16 + c)
            scale_row = row_scale(slots, bh, i, q_length, scale)
            scale_tile = tiled(scale_row, slots, True)
            r = distance(places, b, i[None, :], j[:, None], offset, q_length, k_length)
            r_lo, r_hi = n0 - m0 - (BAND - 1) + offset, n0 - m0 + (BLOCK_N - 1) + offset
            x = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
            if slots.scale is None:
                x = lifted(x, first_three, e_tile)
            some = hidden(tile, c0, c1, CLEAR)
            x = inside(
                x, slots, places, masks, b, h, bh, m0, n0, i, j, r, r_lo, r_hi,
                q_length, k_length, left, right, some, True,
            )  # fmt: skip
            x = x * scale_tile
            x = outside(x, slots, masks, b, h, bh, i[None, :], j[:, None], r, q_length, k_length)
            x = shown(x, slots, masks, b, h, i[None, :], j[:, None], q_length, k_length, left, right, some)
            if slots.scale is not None:
                x = lifted(x, first_three, e_tile)
            p = tl.exp2(x)
            if DROPOUT:
                kept = p * keep(masks, bh, i[None, :], j[:, None], dropout)
                acc_v = tl.dot(kept.to(g_tile.dtype), g_tile, acc_v, input_precision=PRECISION)
            else:
                acc_v = tl.dot(p.to(g_tile.dtype), g_tile, acc_v, input_precision=PRECISION)
            dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
            dp = weighed(dp, slots, places, masks, b, h, bh, m0, i, j, r, r_lo, r_hi, q_length, dropout, DROPOUT, True)
            ds = p * lifted(dp, next_three, e_tile)
            if grads.decay_k is not None:
                d_decay -= tl.sum(ds, 1)
            if slots.scale is not None:
                ds = ds * (scale_tile / LOG2E)
            if grads.cols is not None:
                share = ds
                if slots.scale is None:
                    share = ds * scale
                back = -r
                if places.q is None:
                    back = i[None, :] - j[:, None] - offset  # the same, in a form known to be consecutive
                outer = t < ((l0 - a0) + (a1 - r1)) * PER  # as in backward_q
                col_lo, col_hi = tl.where(outer, -hi, grads.cols.lo), tl.where(outer, -lo, grads.cols.hi)
                edge = edges(col_lo, col_hi, -r_hi, -r_lo, places)
                if edge:
                    sum_left += tl.sum(tl.where(back >= col_hi, ds, 0.0), 1)
                    sum_right += tl.sum(tl.where((back <= col_lo) & (back < col_hi), ds, 0.0), 1)
                put(grads.cols, places, b, h, n0, j, i, back, col_lo, col_hi, share, ok, edge, True)
            acc_k = tl.dot(ds.to(q_tile.dtype), q_tile, acc_k, input_precision=PRECISION)

        if grads.cols is not None:
            if slots.scale is None:
                sum_left = sum_left * scale
                sum_right = sum_right * scale
            if ZERO:
                first, last = l1 * BLOCK_M - offset, r0 * BLOCK_M - offset
                put_zeros(grads.cols, b, h, n0, j, first, last, ok, BAND)
            put_ends(grads.cols, b, h, n0, j, sum_right, sum_left, ok, MORE)
        if grads.decay_k is not None:
            if MORE:
                d_decay += tl.load(grads.decay_k + bh * k_length + j, mask=ok, other=0.0)
            tl.store(grads.decay_k + bh * k_length + j, d_decay, mask=ok)

    if slots.scale is None:
        acc_k = acc_k * scale
    store_tile(dk, b, h_kv, j, d, D, acc_k, ok, MORE)
    store_tile(dv, b, h_kv, j, d_v, DV, acc_v, ok, MORE)
