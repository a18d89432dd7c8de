"""The forward kernel: FlashAttention with one program for each block of queries (or, split, for its share of the keys)."""

from __future__ import annotations

import triton
import triton.language as tl

from .band_layout import reaches_ends, store_band, store_band_ends
from .bf16x3 import load_ones
from .dropout import dropout_factor
from .masking import add_start, far_tile, general_tile, inner_tiles, key_tiles
from .scores import (
    add_bands,
    add_far_keys,
    add_unscaled_terms,
    bias_end,
    broadcast_scale,
    far_row,
    far_scores,
    general_scores,
    load_identity,
    row_end,
    row_scale,
)
from .structs import UNSPECIALISED
from .tiles import load_tile, matmul, online_softmax, padded


@triton.jit
def accumulate(qk, m_i, l_i, acc, mass_left, mass_right, v_tile, masks, bh, i, j, dropout, DROPOUT: tl.constexpr):
    """One step of FlashAttention: m_i, l_i, acc (and the sums of far probabilities) with the tile of scores qk."""
    p, alpha, m_i, l_i = online_softmax(qk, m_i, l_i, 1)
    if DROPOUT:
        p = p * dropout_factor(masks, bh, i[:, None], j[None, :], dropout)
    acc = matmul(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    return m_i, l_i, acc, mass_left * alpha, mass_right * alpha


@triton.jit
def split_range(first, left0, left1, right0, right1, last, split, splits):
    """The share `split` of the tiles first .. last, and the far tiles within it."""
    tiles = tl.cdiv(last - first, splits)
    begin = first + split * tiles
    end = tl.minimum(begin + tiles, last)
    begin = tl.minimum(begin, end)
    left0, left1 = tl.minimum(tl.maximum(left0, begin), end), tl.minimum(tl.maximum(left1, begin), end)
    right0, right1 = tl.minimum(tl.maximum(right0, begin), end), tl.minimum(tl.maximum(right1, begin), end)
    return begin, left0, left1, right0, right1, end


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward(
    q, k, v, out, lse,  # Views; lse: [B, H, Lq rounded up to 64] float32, base 2, +inf for a fully masked query
    terms, positions, masks,
    heads, group, q_length, k_length, q_first, q_last, offset, left, right, lo, hi, splits, scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GENERAL: tl.constexpr,
    SCALE_LAST: tl.constexpr, DROPOUT: tl.constexpr, SPLIT: tl.constexpr, BAND_STAGES: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Queries q_first .. q_last. Tiles are [queries, keys]; masking.py draws which are far, inner and general.

    SPLIT: this program visits a share of the keys, and shares are merged afterwards. GENERAL: keys of a general tile.
    """
    blocks = tl.cdiv(q_last - q_first, BLOCK_M)
    pid = tl.program_id(0)
    if SPLIT:
        split = pid % splits
        pid = pid // splits
    block = blocks - 1 - pid % blocks  # causal: the longest first
    bh = (pid // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    m0 = (q_first // BLOCK_M + block) * BLOCK_M  # the compiler knows that it is aligned
    k_ptr = k.ptr + b * k.b + (h // group) * k.h
    v_ptr = v.ptr + b * v.b + (h // group) * v.h

    offset = add_start(positions, offset, b)
    MASS: tl.constexpr = DROPOUT and (terms.mass is not None)  # each far probability would be dropped on its own
    CLEAR: tl.constexpr = ((masks.extra is None) or (not masks.extra_is_bool)) and (not MASS) and (positions.q is None)
    FAR: tl.constexpr = CLEAR and (masks.extra is None)
    first, left0, left1, right0, right1, last, clear0, clear1 = key_tiles(
        m0, b, masks, q_length, k_length, offset, left, right, lo, hi, BLOCK_M, BLOCK_N, CLEAR
    )
    if SPLIT:
        first, left0, left1, right0, right1, last = split_range(
            first, left0, left1, right0, right1, last, split, splits
        )

    i = m0 + tl.arange(0, BLOCK_M)
    steps = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    ones = load_ones(terms, 6, BLOCK_M)
    q_tile = load_tile(q.ptr + b * q.b + h * q.h, q.l, m0, q_length, d, D, BLOCK_M, True)
    scale_row = row_scale(terms, bh, i, q_length, scale)
    scale_tile = broadcast_scale(scale_row, terms, False)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    mass_left = tl.zeros([BLOCK_M], tl.float32)
    mass_right = tl.zeros([BLOCK_M], tl.float32)

    # ---- far tiles: the terms are constants of each row and column; row constants go into the maximum ----------------
    if FAR:
        end_left = row_end(terms, bh, i, i < q_length, False) * scale_row + bias_end(terms, h, False)
        end_right = row_end(terms, bh, i, i < q_length, True) * scale_row + bias_end(terms, h, True)
        for t in range((left1 - left0) + (right1 - right0)):
            n0 = far_tile(t, left0, left1, right0) * BLOCK_N
            on_left = t < left1 - left0
            k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, BLOCK_N, False)
            qk = matmul(q_tile, tl.trans(k_tile))
            j = (n0 + steps)[None, :]
            qk = add_far_keys(qk, terms, bh, n0 + steps, on_left, ones)
            qk = far_scores(qk, scale_tile, terms, h, bh, j, m0, on_left, offset, q_length, k_length)
            row = tl.where(on_left, end_left, end_right) + far_row(terms, h, bh, i, m0, on_left, q_length)
            if SCALE_LAST:
                m_new = tl.maximum(m_i, tl.max(qk, 1) * scale_row + row)
            else:
                m_new = tl.maximum(m_i, tl.max(qk, 1) + row)
            base = tl.where(m_new == float("-inf"), 0.0, m_new) - row
            if SCALE_LAST:
                p = tl.exp2(qk * scale_row - base[:, None])
            else:
                p = tl.exp2(qk - base[:, None])
            alpha = tl.exp2(m_i - row - base)
            p_sum = tl.sum(p, 1)
            l_i = l_i * alpha + p_sum
            if terms.mass is not None:
                mass_left = mass_left * alpha + tl.where(on_left, p_sum, 0.0)
                mass_right = mass_right * alpha + tl.where(on_left, 0.0, p_sum)
            acc = acc * alpha[:, None]
            if DROPOUT:
                p = p * dropout_factor(masks, bh, i[:, None], j, dropout)
            v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, BLOCK_N, False)
            acc = matmul(p.to(v_tile.dtype), v_tile, acc)
            m_i = m_new

    # ---- inner tiles: whole tiles of the bands, no masks --------------------------------------------------------------
    inner0, inner1 = right0, right0
    if INNER and FAR and (not SPLIT):
        inner0, inner1 = inner_tiles(terms, m0, BLOCK_M, BLOCK_N, offset, left1, right0, clear0, clear1, False)
        identity = load_identity(terms, BLOCK_M)
        for t in tl.range(inner0, inner1, num_stages=BAND_STAGES):
            n0 = t * BLOCK_N
            k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, BLOCK_N, False)
            v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, BLOCK_N, False)
            j = n0 + tl.arange(0, BLOCK_N)
            qk = matmul(q_tile, tl.trans(k_tile))
            qk = add_bands(qk, identity, terms, positions, b, h, m0, n0, i, j, q_length, k_length, False) * scale_tile
            r = j[None, :] - i[:, None] + offset
            qk = add_unscaled_terms(qk, terms, masks, b, h, bh, i[:, None], j[None, :], r, q_length, k_length)
            m_i, l_i, acc, mass_left, mass_right = accumulate(
                qk, m_i, l_i, acc, mass_left, mass_right, v_tile, masks, bh, i, j, dropout, DROPOUT
            )

    # ---- general tiles: table entries of each pair, and masks ---------------------------------------------------------
    # A general tile may have fewer keys than a far one, as it needs more registers.
    PER_TILE: tl.constexpr = BLOCK_N // GENERAL
    n_general = ((left0 - first) + (last - right1) + (right0 - left1) - (inner1 - inner0)) * PER_TILE
    general_steps = tl.arange(0, GENERAL)
    for t in tl.range(0, n_general, num_stages=BAND_STAGES):
        tile = general_tile(t // PER_TILE, first, left0, left1, right1, last, inner0, inner1)
        n0 = tile * BLOCK_N + t % PER_TILE * GENERAL
        k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, GENERAL, True)
        v_tile = load_tile(v_ptr, v.l, n0, k_length, dv, DV, GENERAL, True)
        j = n0 + general_steps
        _, qk, r, r_lo, r_hi = general_scores(
            matmul(q_tile, tl.trans(k_tile)), scale_tile, terms, positions, masks, b, h, bh, m0, n0, i, j, tile, clear0, clear1, offset,
            q_length, k_length, left, right, CLEAR, False,
        )  # fmt: skip
        m_i, l_i, acc, mass_left, mass_right = accumulate(
            qk, m_i, l_i, acc, mass_left, mass_right, v_tile, masks, bh, i, j, dropout, DROPOUT
        )

    is_empty = l_i == 0.0
    inv_l_i = 1.0 / tl.where(is_empty, 1.0, l_i)
    valid = i < q_length
    if SPLIT:
        at_split = bh * splits + split
        # maximum and sum apart: their log-sum-exp would be rounded to the size of the scores
        at_sums = lse.ptr + at_split * 2 * padded(q_length) + i
        tl.store(at_sums, tl.where(is_empty, float("-inf"), m_i), mask=valid)
        tl.store(at_sums + padded(q_length), l_i, mask=valid)
        at = out.ptr + (at_split * q_length + i[:, None]) * DV + dv[None, :]
        tl.store(at, acc * inv_l_i[:, None], mask=valid[:, None] & (dv[None, :] < DV))
    else:
        # +inf makes every probability of a fully masked query 0 in the backward kernels.
        lse_i = tl.where(is_empty, float("inf"), m_i + tl.log2(l_i))
        tl.store(lse.ptr + bh * padded(q_length) + i, lse_i, mask=valid)
        at = out.ptr + b * out.b + h * out.h + i.to(tl.int64)[:, None] * out.l + dv[None, :]
        tl.store(at, (acc * inv_l_i[:, None]).to(out.ptr.dtype.element_ty), mask=valid[:, None] & (dv[None, :] < DV))

        # ---- attention per distance: probabilities need the final l_i, so the band is visited again -------------------
        if terms.mass is not None:
            mass_left = mass_left * inv_l_i
            mass_right = mass_right * inv_l_i
            band = terms.mass
            for t in tl.range(0, n_general + (inner1 - inner0) * PER_TILE, num_stages=BAND_STAGES):
                tile = general_tile(t // PER_TILE, first, left0, left1, right1, last, right0, right0)
                n0 = tile * BLOCK_N + t % PER_TILE * GENERAL
                k_tile = load_tile(k_ptr, k.l, n0, k_length, d, D, GENERAL, True)
                j = n0 + general_steps
                _, qk, r, r_lo, r_hi = general_scores(
                    matmul(q_tile, tl.trans(k_tile)), scale_tile, terms, positions, masks, b, h, bh, m0, n0, i, j, tile, clear0, clear1,
                    offset, q_length, k_length, left, right, CLEAR, False,
                )  # fmt: skip
                p = tl.exp2(qk - lse_i[:, None])
                if DROPOUT:
                    p = p * dropout_factor(masks, bh, i[:, None], j[None, :], dropout)
                at_ends = reaches_ends(band.lo, band.hi, r_lo, r_hi, positions)
                if at_ends:
                    mass_left += tl.sum(tl.where(r <= band.lo, p, 0.0), 1)
                    mass_right += tl.sum(tl.where((r >= band.hi) & (r > band.lo), p, 0.0), 1)
                store_band(band, positions, b, h, m0, i, j, r, band.lo, band.hi, p, valid, at_ends, False)
            store_band_ends(band, b, h, m0, i, mass_left, mass_right, valid, False)
