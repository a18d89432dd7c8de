"""backward_k: one program for each block of keys (after preprocess.py). Like backward_q, it adds nothing atomically."""

from __future__ import annotations

import triton
import triton.language as tl

from .backward_q import add_mass_gradient
from .band_layout import reaches_ends, store_band, store_band_ends, store_band_zeros
from .bf16x3 import add_bf16x3, load_ones
from .dropout import dropout_factor
from .masking import add_start, far_tile, general_tile, inner_tiles, query_tiles
from .scores import (
    LOG2E,
    add_band,
    add_bands,
    add_unscaled_terms,
    broadcast_scale,
    far_row,
    far_scores,
    general_scores,
    load_identity,
    row_scale,
)
from .structs import UNSPECIALISED
from .tiles import load_tile, matmul, padded, store_tile


@triton.jit
def add_dv(acc_v, p, dp, do_tile, masks, bh, i, j, dropout, DROPOUT: tl.constexpr):
    """acc_v + dropout(p) @ do, and dp after dropout."""
    if DROPOUT:
        keep = dropout_factor(masks, bh, i[None, :], j[:, None], dropout)
        acc_v = matmul((p * keep).to(do_tile.dtype), do_tile, acc_v)
        dp = dp * keep
    else:
        acc_v = matmul(p.to(do_tile.dtype), do_tile, acc_v)
    return acc_v, dp


@triton.jit
def score_gradient(p, dp, d_decay, ones_delta, parts, terms, grads, scale_tile):
    """ds = p (dp - delta), times the queries' scales where they are a tensor; and the decay's gradient with this tile."""
    ds = p * add_bf16x3(dp, ones_delta, parts)
    if grads.decay_k is not None:
        d_decay -= tl.sum(ds, 1)
    if terms.scale is not None:
        ds = ds * (scale_tile / LOG2E)
    return ds, d_decay


@triton.jit(do_not_specialize=UNSPECIALISED)
def backward_k(
    q, k, v, do, dk, dv, row_parts,
    terms, positions, masks, grads,
    heads, group, q_length, k_length, q_first, q_last, offset, left, right, lo, hi, batch_heads, scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GENERAL: tl.constexpr,
    SCALE_LAST: tl.constexpr, DROPOUT: tl.constexpr, BAND_STAGES: tl.constexpr, INNER: tl.constexpr,
    ACCUMULATE: tl.constexpr, ZERO_REST: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, and the gradients of the column term and of the keys' decay. Tiles are [keys, queries].

    From the queries q_first .. q_last; ACCUMULATE: added to what earlier queries gave. ZERO_REST: the column term's
    gradient has memory that no tile writes. row_parts: lse and delta of each query as bfloat16 parts (preprocess.py).
    """
    plane = (batch_heads * padded(q_length)).to(tl.int64)  # elements of one [B, H, Lq rounded up] array
    blocks = tl.cdiv(k_length, BLOCK_N)
    block = tl.program_id(0) % blocks
    b_kv = (tl.program_id(0) // blocks).to(tl.int64)
    kv_heads = heads // group
    b, h_kv = b_kv // kv_heads, b_kv % kv_heads
    n0 = block * BLOCK_N
    offset = add_start(positions, offset, b)
    MASS: tl.constexpr = DROPOUT and (terms.mass is not None)  # each far probability would be dropped on its own
    CLEAR: tl.constexpr = ((masks.extra is None) or (not masks.extra_is_bool)) and (not MASS) and (positions.q is None)
    FAR: tl.constexpr = CLEAR and (masks.extra is None)
    first, left0, left1, right0, right1, last, clear0, clear1 = query_tiles(
        n0, b, masks, q_length, k_length, q_first, q_last, offset, left, right, lo, hi, BLOCK_M, BLOCK_N, CLEAR
    )

    j = n0 + tl.arange(0, BLOCK_N)
    valid = j < k_length
    steps = tl.arange(0, BLOCK_M)
    PER_TILE: tl.constexpr = BLOCK_M // GENERAL  # a general tile has GENERAL queries
    general_steps = tl.arange(0, GENERAL)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    k_tile = load_tile(k.ptr + b * k.b + h_kv * k.h, k.l, n0, k_length, d, D, BLOCK_N, True)
    v_tile = load_tile(v.ptr + b * v.b + h_kv * v.h, v.l, n0, k_length, d_v, DV, BLOCK_N, True)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    c = tl.arange(0, 16)[None, :]
    ones_lse, ones_delta = load_ones(terms, 0, BLOCK_N), load_ones(terms, 3, BLOCK_N)

    for member in range(group):
        h = h_kv * group + member
        bh = b * heads + h
        q_ptr = q.ptr + b * q.b + h * q.h
        do_ptr = do.ptr + b * do.b + h * do.h
        sum_left = tl.zeros([BLOCK_N], tl.float32)
        sum_right = tl.zeros([BLOCK_N], tl.float32)
        d_decay = tl.zeros([BLOCK_N], tl.float32)
        far_keys = ones_lse  # [keys, 16]: ones that select -lse, and the parts of both ends of the key's band
        if terms.cols is not None:
            at = terms.cols.bf16x3 + (bh * 2 * terms.cols.rows + j)[:, None] * 16 + c
            if terms.scale is None:
                far_keys = tl.load(at, mask=valid[:, None], other=0.0)
            else:
                key_parts = tl.load(at, mask=valid[:, None] & (c >= 6), other=0.0)

        # ---- far tiles ------------------------------------------------------------------------------------------------
        if FAR:
            for t in range((left1 - left0) + (right1 - right0)):
                m0 = far_tile(t, left0, left1, right0) * BLOCK_M
                on_left = t >= left1 - left0  # later queries have their far keys on the left, r <= lo
                q_tile = load_tile(q_ptr, q.l, m0, q_length, d, D, BLOCK_M, False)
                i = m0 + steps
                side = tl.where(on_left, 0, plane)
                parts = tl.load(row_parts + (side + bh * padded(q_length) + i)[:, None] * 16 + c)
                scale_row = row_scale(terms, bh, i, q_length, scale)
                scale_tile = broadcast_scale(scale_row, terms, True)
                qk = matmul(k_tile, tl.trans(q_tile))
                if terms.scale is None:
                    qk = add_bf16x3(qk, far_keys, parts)
                elif terms.cols is not None:
                    qk = add_bf16x3(qk, key_parts, parts)
                qk = far_scores(qk, scale_tile, terms, h, bh, j[:, None], m0, on_left, offset, q_length, k_length)
                if (terms.slopes is not None) or (terms.decay_q is not None):
                    qk += far_row(terms, h, bh, i, m0, on_left, q_length)[None, :]
                if terms.scale is not None:
                    qk = add_bf16x3(qk, ones_lse, parts)
                if SCALE_LAST:
                    p = tl.exp2(qk * scale_row)
                else:
                    p = tl.exp2(qk)
                do_tile = load_tile(do_ptr, do.l, m0, q_length, d_v, DV, BLOCK_M, False)
                dp = matmul(v_tile, tl.trans(do_tile))
                acc_v, dp = add_dv(acc_v, p, dp, do_tile, masks, bh, i, j, dropout, DROPOUT)
                ds, d_decay = score_gradient(p, dp, d_decay, ones_delta, parts, terms, grads, scale_tile)
                if grads.cols is not None:
                    ds_sum = tl.sum(ds, 1)
                    sum_left += tl.where(on_left, ds_sum, 0.0)
                    sum_right += tl.where(on_left, 0.0, ds_sum)
                acc_k = matmul(ds.to(q_tile.dtype), q_tile, acc_k)

        # ---- inner tiles ----------------------------------------------------------------------------------------------
        inner0, inner1 = right0, right0
        if INNER and FAR:
            inner0, inner1 = inner_tiles(terms, n0, BLOCK_N, BLOCK_M, -offset, left1, right0, clear0, clear1, True)
            identity = load_identity(terms, BLOCK_N)
            for t in tl.range(inner0, inner1, num_stages=BAND_STAGES):
                m0 = t * BLOCK_M
                q_tile = load_tile(q_ptr, q.l, m0, q_length, d, D, BLOCK_M, False)
                do_tile = load_tile(do_ptr, do.l, m0, q_length, d_v, DV, BLOCK_M, False)
                i = m0 + tl.arange(0, BLOCK_M)
                parts = tl.load(row_parts + (2 * plane + bh * padded(q_length) + i)[:, None] * 16 + c)
                scale_row = row_scale(terms, bh, i, q_length, scale)
                scale_tile = broadcast_scale(scale_row, terms, True)
                r = j[:, None] - i[None, :] + offset
                qk = matmul(k_tile, tl.trans(q_tile))
                if terms.scale is None:
                    qk = add_bf16x3(qk, ones_lse, parts)
                qk = add_bands(qk, identity, terms, positions, b, h, m0, n0, i, j, q_length, k_length, True)
                qk = qk * scale_tile
                qk = add_unscaled_terms(qk, terms, masks, b, h, bh, i[None, :], j[:, None], r, q_length, k_length)
                if terms.scale is not None:
                    qk = add_bf16x3(qk, ones_lse, parts)
                p = tl.exp2(qk)
                dp = matmul(v_tile, tl.trans(do_tile))
                if terms.mass is not None:
                    dp = add_band(dp, identity, terms.mass, positions, b, h, m0, i, j, q_length, True, False)
                acc_v, dp = add_dv(acc_v, p, dp, do_tile, masks, bh, i, j, dropout, DROPOUT)
                ds, d_decay = score_gradient(p, dp, d_decay, ones_delta, parts, terms, grads, scale_tile)
                if grads.cols is not None:
                    if terms.scale is None:
                        share = ds * scale
                    else:
                        share = ds
                    store_band(grads.cols, positions, b, h, n0, j, i, -r, lo, hi, share, valid, False, True)
                acc_k = matmul(ds.to(q_tile.dtype), q_tile, acc_k)

        # ---- general tiles --------------------------------------------------------------------------------------------
        n_general = ((left0 - first) + (last - right1) + (right0 - left1) - (inner1 - inner0)) * PER_TILE
        for t in tl.range(0, n_general, num_stages=BAND_STAGES):
            tile = general_tile(t // PER_TILE, first, left0, left1, right1, last, inner0, inner1)
            m0 = tile * BLOCK_M + t % PER_TILE * GENERAL
            q_tile = load_tile(q_ptr, q.l, m0, q_length, d, D, GENERAL, True)
            do_tile = load_tile(do_ptr, do.l, m0, q_length, d_v, DV, GENERAL, True)
            i = m0 + general_steps
            parts = tl.load(row_parts + (2 * plane + bh * padded(q_length) + i)[:, None] * 16 + c)
            scale_row = row_scale(terms, bh, i, q_length, scale)
            scale_tile = broadcast_scale(scale_row, terms, True)
            qk = matmul(k_tile, tl.trans(q_tile))
            if terms.scale is None:
                qk = add_bf16x3(qk, ones_lse, parts)
            _, qk, r, r_lo, r_hi = general_scores(
                qk, scale_tile, terms, positions, masks, b, h, bh, m0, n0, i, j, tile, clear0, clear1, offset,
                q_length, k_length, left, right, CLEAR, True,
            )  # fmt: skip
            if terms.scale is not None:
                qk = add_bf16x3(qk, ones_lse, parts)
            p = tl.exp2(qk)
            if DROPOUT:
                kept = p * dropout_factor(masks, bh, i[None, :], j[:, None], dropout)
                acc_v = matmul(kept.to(do_tile.dtype), do_tile, acc_v)
            else:
                acc_v = matmul(p.to(do_tile.dtype), do_tile, acc_v)
            dp = matmul(v_tile, tl.trans(do_tile))
            dp = add_mass_gradient(
                dp, terms, positions, masks, b, h, bh, m0, i, j, r, r_lo, r_hi, q_length, dropout, DROPOUT, True
            )
            ds, d_decay = score_gradient(p, dp, d_decay, ones_delta, parts, terms, grads, scale_tile)
            if grads.cols is not None:
                share = ds
                if terms.scale is None:
                    share = ds * scale
                back = -r
                if positions.q is None:
                    back = i[None, :] - j[:, None] - offset  # the same, and the compiler knows that it is consecutive
                outer = t < ((left0 - first) + (last - right1)) * PER_TILE  # as in backward_q
                col_lo, col_hi = tl.where(outer, -hi, grads.cols.lo), tl.where(outer, -lo, grads.cols.hi)
                at_ends = reaches_ends(col_lo, col_hi, -r_hi, -r_lo, positions)
                if at_ends:
                    sum_left += tl.sum(tl.where(back >= col_hi, ds, 0.0), 1)
                    sum_right += tl.sum(tl.where((back <= col_lo) & (back < col_hi), ds, 0.0), 1)
                store_band(grads.cols, positions, b, h, n0, j, i, back, col_lo, col_hi, share, valid, at_ends, True)
            acc_k = matmul(ds.to(q_tile.dtype), q_tile, acc_k)

        if grads.cols is not None:
            if terms.scale is None:
                sum_left = sum_left * scale
                sum_right = sum_right * scale
            if ZERO_REST:
                begin, end = left1 * BLOCK_M - offset, right0 * BLOCK_M - offset
                store_band_zeros(grads.cols, b, h, n0, j, begin, end, valid, GENERAL)
            store_band_ends(grads.cols, b, h, n0, j, sum_right, sum_left, valid, ACCUMULATE)
        if grads.decay_k is not None:
            if ACCUMULATE:
                d_decay += tl.load(grads.decay_k + bh * k_length + j, mask=valid, other=0.0)
            tl.store(grads.decay_k + bh * k_length + j, d_decay, mask=valid)

    if terms.scale is None:
        acc_k = acc_k * scale
    store_tile(dk, b, h_kv, j, d, D, acc_k, valid, ACCUMULATE)
    store_tile(dv, b, h_kv, j, d_v, DV, acc_v, valid, ACCUMULATE)
