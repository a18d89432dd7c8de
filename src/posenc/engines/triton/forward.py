"""The forward kernel: one program makes one block of queries (or, split, its share of the keys)."""

from __future__ import annotations

import triton
import triton.language as tl

from .put import put, put_ends
from .terms import (
    amidst,
    bias_end,
    distance,
    edges,
    far,
    far_inside,
    far_row,
    far_tile,
    general_tile,
    hidden,
    inside,
    keep,
    load_tile,
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


@triton.jit
def softened(x, top, total):
    """Weights of a tile's scores and what earlier sums are multiplied by: -> p, alpha, and top and total with this tile."""
    higher = tl.maximum(top, tl.max(x, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(x - base[:, None])
    alpha = tl.exp2(top - base)
    return p, alpha, higher, total * alpha + tl.sum(p, 1)


@triton.jit(
    do_not_specialize=[
        "heads",
        "group",
        "q_length",
        "k_length",
        "q_first",
        "q_last",
        "offset",
        "left",
        "right",
        "lo",
        "hi",
        "splits",
        "scale",
    ]
)
def forward(
    q, k, v, out, lse,  # Views; lse: [B, H, Lq rounded up to 64] float32, base 2, +inf for a query that sees nothing
    slots, places, masks,
    heads, group, q_length, k_length, q_first, q_last, offset, left, right, lo, hi, splits, scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr,
    RAW: tl.constexpr, DROPOUT: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, BAND_STAGES: tl.constexpr,
    AMIDST: tl.constexpr,
):  # fmt: skip
    """Queries q_first .. q_last. Tiles are [queries, keys]."""
    blocks = tl.cdiv(q_last - q_first, BLOCK_M)
    pid = tl.program_id(0)
    if SPLIT:
        share = pid % splits
        pid = pid // splits
    block = blocks - 1 - pid % blocks  # causal: the longest first
    bh = (pid // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    m0 = (q_first // BLOCK_M + block) * BLOCK_M  # known to be aligned
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
    if SPLIT:
        each = tl.cdiv(a1 - a0, splits)
        s0 = a0 + share * each
        s1 = tl.minimum(s0 + each, a1)
        s0 = tl.minimum(s0, s1)
        a0, a1 = s0, s1
        l0, l1 = tl.minimum(tl.maximum(l0, a0), a1), tl.minimum(tl.maximum(l1, a0), a1)
        r0, r1 = tl.minimum(tl.maximum(r0, a0), a1), tl.minimum(tl.maximum(r1, a0), a1)

    i = m0 + tl.arange(0, BLOCK_M)
    steps = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    keys_three = picks(slots, 6, BLOCK_M, 16)
    q_tile = load_tile(q.ptr + b * q.b + h * q.h, q.l, m0, q_length, d, D, BLOCK_M, True)
    scale_row = row_scale(slots, bh, i, q_length, scale)
    scale_tile = tiled(scale_row, slots, False)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    mass_left = tl.zeros([BLOCK_M], tl.float32)
    mass_right = tl.zeros([BLOCK_M], tl.float32)

    # ---- far tiles: constants only -------------------------------------------------------------------------
    if CLEAR:
        end_left = row_end(slots, bh, i, i < q_length, False) * scale_row + bias_end(slots, h, False)
        end_right = row_end(slots, bh, i, i < q_length, True) * scale_row + bias_end(slots, h, True)
        for t in range((l1 - l0) + (r1 - r0)):
            n0 = far_tile(t, l0, l1, r0) * BLOCK_N
            on_left = t < l1 - l0
            k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, BLOCK_N, False)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            j = (n0 + steps)[None, :]
            x = far_inside(x, slots, bh, n0 + steps, on_left, keys_three)
            x = far(x, scale_tile, slots, h, bh, j, m0, on_left, offset, q_length, k_length)
            row = tl.where(on_left, end_left, end_right) + far_row(slots, h, bh, i, m0, on_left, q_length)
            if RAW:
                higher = tl.maximum(top, tl.max(x, 1) * scale_row + row)
            else:
                higher = tl.maximum(top, tl.max(x, 1) + row)
            base = tl.where(higher == float("-inf"), 0.0, higher) - row
            if RAW:
                p = tl.exp2(x * scale_row - base[:, None])
            else:
                p = tl.exp2(x - base[:, None])
            alpha = tl.exp2(top - row - base)
            gained = tl.sum(p, 1)
            total = total * alpha + gained
            if slots.mass is not None:
                mass_left = mass_left * alpha + tl.where(on_left, gained, 0.0)
                mass_right = mass_right * alpha + tl.where(on_left, 0.0, gained)
            acc = acc * alpha[:, None]
            if DROPOUT:
                p = p * keep(masks, bh, i[:, None], j, dropout)
            v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, BLOCK_N, False)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
            top = higher

    # ---- tiles within the bands' spans: numbers for each pair, no masks -------------------------------------------
    s0, s1 = r0, r0
    if AMIDST and CLEAR and (not SPLIT):
        s0, s1 = middle(slots, m0, BLOCK_M, BLOCK_N, offset, l1, r0, c0, c1, False)
        same = unit_matrix(slots, BLOCK_M)
        for t in tl.range(s0 * (BLOCK_N // AMIDST), s1 * (BLOCK_N // AMIDST), num_stages=BAND_STAGES):
            n0 = t * AMIDST
            k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, AMIDST, False)
            v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, AMIDST, False)
            j = n0 + tl.arange(0, AMIDST)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            x = amidst(x, same, slots, places, b, h, m0, n0, i, j, q_length, k_length, False) * scale_tile
            r = j[None, :] - i[:, None] + offset
            x = outside(x, slots, masks, b, h, bh, i[:, None], j[None, :], r, q_length, k_length)
            p, alpha, top, total = softened(x, top, total)
            if DROPOUT:
                p = p * keep(masks, bh, i[:, None], j[None, :], dropout)
            mass_left = mass_left * alpha
            mass_right = mass_right * alpha
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)

    # ---- general tiles: look-ups and masks -----------------------------------------------------------------
    # A general tile has BAND keys, so that its look-ups find registers.
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
            x, slots, places, masks, b, h, bh, m0, n0, i, j, r, r_lo, r_hi,
            q_length, k_length, left, right, some, False,
        )  # fmt: skip
        x = x * scale_tile
        x = outside(x, slots, masks, b, h, bh, i[:, None], j[None, :], r, q_length, k_length)
        x = shown(x, slots, masks, b, h, i[:, None], j[None, :], q_length, k_length, left, right, some)
        p, alpha, top, total = softened(x, top, total)
        if DROPOUT:
            p = p * keep(masks, bh, i[:, None], j[None, :], dropout)
        mass_left = mass_left * alpha
        mass_right = mass_right * alpha
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)

    empty = total == 0.0
    weight = 1.0 / tl.where(empty, 1.0, total)
    ok = i < q_length
    if SPLIT:
        part = bh * splits + share
        tl.store(lse.ptr + part * padded(q_length) + i, tl.where(empty, float("-inf"), top + tl.log2(total)), mask=ok)
        at = out.ptr + (part * q_length + i[:, None]) * DV + dv[None, :]
        tl.store(at, acc * weight[:, None], mask=ok[:, None] & (dv[None, :] < DV))
    else:
        # +inf makes every weight of an empty row 0 in the backward kernels.
        bottom = tl.where(empty, float("inf"), top + tl.log2(total))
        tl.store(lse.ptr + bh * padded(q_length) + i, bottom, mask=ok)
        at = out.ptr + b * out.b + h * out.h + i.to(tl.int64)[:, None] * out.l + dv[None, :]
        tl.store(at, (acc * weight[:, None]).to(out.ptr.dtype.element_ty), mask=ok[:, None] & (dv[None, :] < DV))

        # ---- attention per distance: the weights are known only now, so the band is gone through again ----------
        if slots.mass is not None:
            mass_left = mass_left * weight
            mass_right = mass_right * weight
            band = slots.mass
            for t in tl.range(0, general + (s1 - s0) * PER, num_stages=BAND_STAGES):
                tile = general_tile(t // PER, a0, l0, l1, r0, r1, a1, r0, r0)
                n0 = tile * BLOCK_N + t % PER * BAND
                k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, BAND, True)
                j = n0 + few
                r = distance(places, b, i[:, None], j[None, :], offset, q_length, k_length)
                r_lo, r_hi = n0 - m0 - (BLOCK_M - 1) + offset, n0 - m0 + (BAND - 1) + offset
                x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                some = hidden(tile, c0, c1, CLEAR)
                x = inside(
                    x, slots, places, masks, b, h, bh, m0, n0, i, j, r, r_lo, r_hi,
                    q_length, k_length, left, right, some, False,
                )  # fmt: skip
                x = x * scale_tile
                x = outside(x, slots, masks, b, h, bh, i[:, None], j[None, :], r, q_length, k_length)
                x = shown(x, slots, masks, b, h, i[:, None], j[None, :], q_length, k_length, left, right, some)
                p = tl.exp2(x - bottom[:, None])
                if DROPOUT:
                    p = p * keep(masks, bh, i[:, None], j[None, :], dropout)
                edge = edges(band.lo, band.hi, r_lo, r_hi, places)
                if edge:
                    mass_left += tl.sum(tl.where(r <= band.lo, p, 0.0), 1)
                    mass_right += tl.sum(tl.where((r >= band.hi) & (r > band.lo), p, 0.0), 1)
                put(band, places, b, h, m0, i, j, r, band.lo, band.hi, p, ok, edge, False)
            put_ends(band, b, h, m0, i, mass_left, mass_right, ok, False)
