"""backward_q: one program for each block of queries (after preprocess.py and backward_k).

Two programs never add to one address: each program owns what it writes, the far tiles' part of a table's gradient is a
sum in registers, and within the band each (token, distance) is written once. Sums over programs are fixed-order
reductions afterwards, so two runs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .band_layout import load_band, reaches_ends, select_ends, store_band, store_band_ends, store_band_zeros
from .bf16x3 import load_ones
from .diagonals import store_diagonals, sum_diagonals
from .dropout import dropout_factor
from .masking import add_start, far_tile, general_tile, inner_tiles, key_tiles
from .scores import (
    LOG2E,
    add_band,
    add_bands,
    add_far_keys,
    add_unscaled_terms,
    as_tile,
    broadcast_scale,
    far_row,
    far_scores,
    general_scores,
    load_identity,
    row_end,
    row_scale,
)
from .structs import UNSPECIALISED
from .tiles import load_tile, matmul, padded, store_tile


@triton.jit
def add_mass_gradient(
    dp, terms, positions, masks, b, h, bh, m0, i, j, r, r_lo, r_hi, q_length, dropout,
    DROPOUT: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradient of the probabilities of a general tile, from do.v: the value term's part is added, dropout applied."""
    if terms.mass is not None:
        mass = load_band(terms.mass, positions, b, h, m0, i, j, q_length, r, r_lo, r_hi, KEYS_FIRST, False)
        if reaches_ends(terms.mass.lo, terms.mass.hi, r_lo, r_hi, positions):
            mass = select_ends(mass, terms.mass, bh, i, q_length, r, KEYS_FIRST)
        dp += mass
    if DROPOUT:
        i_tile, j_tile = as_tile(i, j, KEYS_FIRST)
        dp = dp * dropout_factor(masks, bh, i_tile, j_tile, dropout)
    return dp


@triton.jit
def add_to_sums(d_decay, d_slope, d_scale, ds, r, qk, grads):
    """The gradients of each query's decay, slope and scale, with this tile."""
    if grads.decay_q is not None:
        d_decay += tl.sum(ds, 1)
    if grads.slopes is not None:
        d_slope -= tl.sum(ds * tl.abs(r).to(tl.float32), 1)
    if grads.scale is not None:
        d_scale += tl.sum(ds * qk, 1)
    return d_decay, d_slope, d_scale


@triton.jit(do_not_specialize=UNSPECIALISED)
def backward_q(
    q, k, v, do, dq, lse, delta, ends,
    terms, positions, masks, grads,
    heads, group, q_length, k_length, q_first, q_last, offset, left, right, lo, hi, batch_heads, scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GENERAL: tl.constexpr,
    SCALE_LAST: tl.constexpr, DROPOUT: tl.constexpr, BAND_STAGES: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries; the gradients of the row term and of the scale; partial sums of those of bias and slopes.

    ends: lse and delta for far tiles, with the far constants subtracted (preprocess.py). Tiles are [queries, keys].
    """
    plane = (batch_heads * padded(q_length)).to(tl.int64)  # elements of one [B, H, Lq rounded up] array
    blocks = tl.cdiv(q_last - q_first, BLOCK_M)
    block = q_first // BLOCK_M + blocks - 1 - tl.program_id(0) % blocks
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    m0 = block * BLOCK_M
    k_ptr = k.ptr + b * k.b + (h // group) * k.h
    v_ptr = v.ptr + b * v.b + (h // group) * v.h
    offset = add_start(positions, offset, b)
    MASS: tl.constexpr = DROPOUT and (terms.mass is not None)  # each far probability would be dropped on its own
    CLEAR: tl.constexpr = ((masks.extra is None) or (not masks.extra_is_bool)) and (not MASS) and (positions.q is None)
    FAR: tl.constexpr = CLEAR and (masks.extra is None)
    first, left0, left1, right0, right1, last, clear0, clear1 = key_tiles(
        m0, b, masks, q_length, k_length, offset, left, right, lo, hi, BLOCK_M, BLOCK_N, CLEAR
    )

    i = m0 + tl.arange(0, BLOCK_M)
    valid = i < q_length
    here = bh * padded(q_length) + i
    steps = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    ones_keys = load_ones(terms, 6, BLOCK_M)
    q_tile = load_tile(q.ptr + b * q.b + h * q.h, q.l, m0, q_length, d, D, BLOCK_M, True)
    do_tile = load_tile(do.ptr + b * do.b + h * do.h, do.l, m0, q_length, dv, DV, BLOCK_M, True)
    scale_row = row_scale(terms, bh, i, q_length, scale)
    scale_tile = broadcast_scale(scale_row, terms, False)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sum_left = tl.zeros([BLOCK_M], tl.float32)  # of ds over far keys
    sum_right = tl.zeros([BLOCK_M], tl.float32)
    d_slope = tl.zeros([BLOCK_M], tl.float32)
    d_scale = tl.zeros([BLOCK_M], tl.float32)
    d_decay = tl.zeros([BLOCK_M], tl.float32)
    SUMS: tl.constexpr = (grads.rows is not None) or (grads.bias is not None)

    # ---- far tiles ----------------------------------------------------------------------------------------------------
    if FAR:
        lse_left = tl.load(ends + here, mask=valid, other=float("inf"))
        lse_right = tl.load(ends + 2 * plane + here, mask=valid, other=float("inf"))
        delta_left = tl.load(ends + plane + here, mask=valid, other=0.0)
        delta_right = tl.load(ends + 3 * plane + here, mask=valid, other=0.0)
        for t in range((left1 - left0) + (right1 - right0)):
            n0 = far_tile(t, left0, left1, right0) * BLOCK_N
            on_left = t < left1 - left0
            k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, BLOCK_N, False)
            v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, BLOCK_N, False)
            j = (n0 + steps)[None, :]
            qk = matmul(q_tile, tl.trans(k_tile))
            qk = add_far_keys(qk, terms, bh, n0 + steps, on_left, ones_keys)
            s = far_scores(qk, scale_tile, terms, h, bh, j, m0, on_left, offset, q_length, k_length)
            base = tl.where(on_left, lse_left, lse_right) - far_row(terms, h, bh, i, m0, on_left, q_length)
            if SCALE_LAST:
                p = tl.exp2(s * scale_row - base[:, None])
            else:
                p = tl.exp2(s - base[:, None])
            dp = matmul(do_tile, tl.trans(v_tile))
            if DROPOUT:
                dp = dp * dropout_factor(masks, bh, i[:, None], j, dropout)
            ds = p * (dp - tl.where(on_left, delta_left, delta_right)[:, None])
            if grads.decay_q is not None:
                d_decay += tl.sum(ds, 1)
            if SUMS or (grads.scale is not None):
                ds_sum = tl.sum(ds, 1)
            if SUMS:
                sum_left += tl.where(on_left, ds_sum, 0.0)
                sum_right += tl.where(on_left, 0.0, ds_sum)
            if grads.slopes is not None:
                ds_r = tl.sum(ds * (j + offset - i[:, None]).to(tl.float32), 1)
                d_slope += tl.where(on_left, ds_r, -ds_r)
            if grads.scale is not None:
                end = tl.where(on_left, row_end(terms, bh, i, valid, False), row_end(terms, bh, i, valid, True))
                d_scale += tl.sum(ds * qk, 1) + end * ds_sum
            acc = matmul(ds.to(k_tile.dtype), k_tile, acc)

    lse_i = tl.load(lse + here, mask=valid, other=float("inf"))
    delta_i = tl.load(delta + here, mask=valid, other=0.0)
    # The spans of the row term and the bias may differ: from here on their ends are summed separately.
    row_left, row_right = sum_left, sum_right
    bias_left, bias_right = sum_left, sum_right
    pending_0 = tl.zeros([GENERAL], tl.float32)  # diagonals.py
    pending_1 = tl.zeros([GENERAL], tl.float32)
    DIAGONALS: tl.constexpr = (grads.bias is not None) and (positions.q is None)
    if DIAGONALS:
        bias_ptr = grads.bias.ptr + ((bh * tl.cdiv(q_length, BLOCK_M)) + block) * grads.bias.h

    # ---- inner tiles --------------------------------------------------------------------------------------------------
    inner0, inner1 = right0, right0
    if INNER and FAR and (grads.bias is None):  # sums along diagonals need all tiles of the middle, in order
        inner0, inner1 = inner_tiles(terms, m0, BLOCK_M, BLOCK_N, offset, left1, right0, clear0, clear1, False)
        identity = load_identity(terms, BLOCK_M)
        for t in tl.range(inner0, inner1, num_stages=BAND_STAGES):
            n0 = t * BLOCK_N
            k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, BLOCK_N, False)
            v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, BLOCK_N, False)
            j = n0 + tl.arange(0, BLOCK_N)
            r = j[None, :] - i[:, None] + offset
            qk = matmul(q_tile, tl.trans(k_tile))
            qk = add_bands(qk, identity, terms, positions, b, h, m0, n0, i, j, q_length, k_length, False)
            s = add_unscaled_terms(
                qk * scale_tile, terms, masks, b, h, bh, i[:, None], j[None, :], r, q_length, k_length
            )
            p = tl.exp2(s - lse_i[:, None])
            dp = matmul(do_tile, tl.trans(v_tile))
            if terms.mass is not None:
                dp = add_band(dp, identity, terms.mass, positions, b, h, m0, i, j, q_length, False, False)
            if DROPOUT:
                dp = dp * dropout_factor(masks, bh, i[:, None], j[None, :], dropout)
            ds = p * (dp - delta_i[:, None])
            d_decay, d_slope, d_scale = add_to_sums(d_decay, d_slope, d_scale, ds, r, qk, grads)
            if grads.rows is not None:
                store_band(
                    grads.rows, positions, b, h, m0, i, j, r, lo, hi, ds * (scale_tile / LOG2E), valid, False, False
                )
            acc = matmul(ds.to(k_tile.dtype), k_tile, acc)

    # ---- general tiles ------------------------------------------------------------------------------------------------
    PER_TILE: tl.constexpr = BLOCK_N // GENERAL
    n_general = ((left0 - first) + (last - right1) + (right0 - left1) - (inner1 - inner0)) * PER_TILE
    general_steps = tl.arange(0, GENERAL)
    for t in tl.range(0, n_general, num_stages=BAND_STAGES):
        tile = general_tile(t // PER_TILE, first, left0, left1, right1, last, inner0, inner1)
        n0 = tile * BLOCK_N + t % PER_TILE * GENERAL
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, GENERAL, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, GENERAL, True)
        j = n0 + general_steps
        qk, s, r, r_lo, r_hi = general_scores(
            matmul(q_tile, tl.trans(k_tile)), scale_tile, terms, positions, masks, b, h, bh, m0, n0, i, j, tile, clear0, clear1, offset,
            q_length, k_length, left, right, CLEAR, False,
        )  # fmt: skip
        p = tl.exp2(s - lse_i[:, None])
        dp = matmul(do_tile, tl.trans(v_tile))
        dp = add_mass_gradient(
            dp, terms, positions, masks, b, h, bh, m0, i, j, r, r_lo, r_hi, q_length, dropout, DROPOUT, False
        )
        ds = p * (dp - delta_i[:, None])
        d_decay, d_slope, d_scale = add_to_sums(d_decay, d_slope, d_scale, ds, r, qk, grads)
        # Tiles beyond the far ones count for the ends, even where a wider band reaches them.
        outer = t < ((left0 - first) + (last - right1)) * PER_TILE
        if grads.rows is not None:
            row_lo, row_hi = tl.where(outer, lo, grads.rows.lo), tl.where(outer, hi, grads.rows.hi)
            at_ends = reaches_ends(row_lo, row_hi, r_lo, r_hi, positions)
            if at_ends:
                row_left += tl.sum(tl.where(r <= row_lo, ds, 0.0), 1)
                row_right += tl.sum(tl.where((r >= row_hi) & (r > row_lo), ds, 0.0), 1)
            share = ds * (scale_tile / LOG2E)
            store_band(grads.rows, positions, b, h, m0, i, j, r, row_lo, row_hi, share, valid, at_ends, False)
        if grads.bias is not None:
            bias_lo, bias_hi = tl.where(outer, lo, grads.bias.lo), tl.where(outer, hi, grads.bias.hi)
            bias_left += tl.sum(tl.where(r <= bias_lo, ds, 0.0), 1)
            bias_right += tl.sum(tl.where((r >= bias_hi) & (r > bias_lo), ds, 0.0), 1)
        if DIAGONALS:
            inside = tl.where((r > bias_lo) & (r < bias_hi), ds, 0.0)
            complete, pending_0, pending_1 = sum_diagonals(inside, pending_0, pending_1, GENERAL)
            in_middle = t >= n_general - (right0 - left1) * PER_TILE
            r0 = n0 - m0 + offset - 2 * GENERAL
            store_diagonals(bias_ptr, r0, complete, grads.bias.lo, grads.bias.hi, in_middle, GENERAL)
        elif grads.bias is not None:
            store_band(grads.bias, positions, b, h, m0, i, j, r, bias_lo, bias_hi, ds, valid, True, False)
        acc = matmul(ds.to(k_tile.dtype), k_tile, acc)

    store_tile(dq, b, h, i, d, D, acc * (scale_tile / LOG2E), valid, False)
    if grads.rows is not None:
        factor = scale_row / LOG2E
        if positions.q is None:
            begin, end = left1 * BLOCK_N + offset, right0 * BLOCK_N + offset
            store_band_zeros(grads.rows, b, h, m0, i, begin, end, valid, GENERAL)
        store_band_ends(grads.rows, b, h, m0, i, row_left * factor, row_right * factor, valid, False)
    if DIAGONALS:
        r1 = (right0 * BLOCK_N) - m0 + offset
        store_diagonals(bias_ptr, r1 - 2 * GENERAL, pending_0, grads.bias.lo, grads.bias.hi, left1 <= right0, GENERAL)
        store_diagonals(bias_ptr, r1 - GENERAL, pending_1, grads.bias.lo, grads.bias.hi, left1 <= right0, GENERAL)
        bias_left += tl.where(grads.bias.hi > grads.bias.lo, 0.0, bias_right)  # a span of one distance: it is both ends
        tl.store(bias_ptr, tl.sum(bias_left, 0))
        if grads.bias.hi > grads.bias.lo:
            tl.store(bias_ptr + (grads.bias.hi - grads.bias.lo), tl.sum(bias_right, 0))
    elif grads.bias is not None:
        store_band_ends(grads.bias, b, h, m0, i, bias_left, bias_right, valid, False)
    if grads.slopes is not None:
        tl.store(grads.slopes + bh * q_length + i, d_slope, mask=valid)
    if grads.scale is not None:
        tl.store(grads.scale + bh * q_length + i, d_scale, mask=valid)
    if grads.decay_q is not None:
        tl.store(grads.decay_q + bh * q_length + i, d_decay, mask=valid)
