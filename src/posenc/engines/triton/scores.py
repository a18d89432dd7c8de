"""The score of a pair inside a kernel, written once for all kernels:

    x = scale [ q.k + rows[i, r] + cols[j, r] ] + bias[r] - slope |r| + c_q[i] - c_k[j]       r = p_k - p_q
        ------------- scaled terms -----------   ---------------- unscaled terms -------

Scores are in base 2 (times log2 e). Queries i and keys j are index tensors that broadcast against each other, [BM, 1] and
[1, BN], or transposed ([1, BM] and [BN, 1], KEYS_FIRST), so the same lines serve a tile and its transpose.

Every table is constant outside its span, so a far tile loads none: what remains is one number for each query (`row_end`,
`bias_end`, `far_row`) and one for each key (`add_far_keys`, `far_column`).

Inner tiles add whole tiles of a band by a product with the identity matrix:

                 identity [BM, BM]      band tile [BM, BN]
    qk     +     1 . . .                y00 y01 ..              = qk + y
                 . 1 . .          @     y10 y11 ..
                 . . 1 .                ...

The product itself changes nothing, but it lets the tile go from global to shared memory and into the tensor cores without
passing through registers, where loading, converting and transposing it would take as long as the attention itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .band_layout import load_band, load_end, pair_addresses, reaches_ends, select_ends
from .bf16x3 import add_bf16x3
from .masking import is_masked, load_extra, visible

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def as_tile(i, j, KEYS_FIRST: tl.constexpr):
    """Vectors of queries and keys in the shapes in which they broadcast against each other."""
    if KEYS_FIRST:
        return i[None, :], j[:, None]
    else:
        return i[:, None], j[None, :]


@triton.jit
def distances(positions, b, i, j, m0, n0, offset, q_length, k_length, KEYS_FIRST: tl.constexpr):
    """r = p_k - p_q of every pair of a tile, its smallest and its largest; the last two for consecutive positions only."""
    BM: tl.constexpr = i.shape[0]
    BN: tl.constexpr = j.shape[0]
    i, j = as_tile(i, j, KEYS_FIRST)
    if positions.q is not None:
        p_q = tl.load(positions.q + b * positions.q_row + i, mask=i < q_length, other=0)
        p_k = tl.load(positions.k + b * positions.k_row + j, mask=j < k_length, other=0)
        r = p_k - p_q
    else:
        r = j - i + offset
    return r, n0 - m0 - (BM - 1) + offset, n0 - m0 + (BN - 1) + offset


# ---- general tiles ----------------------------------------------------------------------------------------------------
@triton.jit
def general_scores(
    qk, scale_tile, terms, positions, masks, b, h, bh, m0, n0, i, j, tile, clear0, clear1, offset, q_length, k_length, left, right,
    CLEAR: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """q.k [i, j] or (KEYS_FIRST) [j, i] -> with the scaled terms; the whole scores, -inf where a pair is not visible; and what
    `distances` returns. tile: its number, outside of clear0 .. clear1 if a mask may touch it.
    """
    r, r_lo, r_hi = distances(positions, b, i, j, m0, n0, offset, q_length, k_length, KEYS_FIRST)
    masked = is_masked(tile, clear0, clear1, CLEAR)
    x = add_scaled_terms(
        qk, terms, positions, masks, b, h, bh, m0, n0, i, j, r, r_lo, r_hi, q_length, k_length, left, right, masked,
        KEYS_FIRST,
    )  # fmt: skip
    i, j = as_tile(i, j, KEYS_FIRST)
    y = add_unscaled_terms(x * scale_tile, terms, masks, b, h, bh, i, j, r, q_length, k_length)
    return x, apply_mask(y, terms, masks, b, h, i, j, q_length, k_length, left, right, masked), r, r_lo, r_hi


@triton.jit
def add_scaled_terms(
    qk, terms, positions, masks, b, h, bh, m0, n0, i, j, r, r_lo, r_hi, q_length, k_length, left, right, masked,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """q.k with the terms that the scale multiplies; i and j are vectors.

    With content terms and a scale that is a positive number the mask is applied here (see apply_mask), in one branch with
    the ends of the bands: few tiles take it.
    """
    x = qk
    if (terms.rows is not None) or (terms.cols is not None):
        special = masked
        if terms.rows is not None:
            rows = load_band(terms.rows, positions, b, h, m0, i, j, q_length, r, r_lo, r_hi, KEYS_FIRST, False)
            special = special | reaches_ends(terms.rows.lo, terms.rows.hi, r_lo, r_hi, positions)
        if terms.cols is not None:
            cols = load_band(terms.cols, positions, b, h, n0, j, i, k_length, -r, -r_hi, -r_lo, not KEYS_FIRST, True)
            special = special | reaches_ends(terms.cols.lo, terms.cols.hi, -r_hi, -r_lo, positions)
        if special:
            if terms.rows is not None:
                rows = select_ends(rows, terms.rows, bh, i, q_length, r, KEYS_FIRST)
            if terms.cols is not None:
                cols = select_ends(cols, terms.cols, bh, j, k_length, -r, not KEYS_FIRST)
            if terms.scale is None:
                i_tile, j_tile = as_tile(i, j, KEYS_FIRST)
                mask = visible(masks, b, h, i_tile, j_tile, q_length, k_length, left, right)
                if terms.rows is not None:
                    rows = tl.where(mask, rows, float("-inf"))
                else:
                    cols = tl.where(mask, cols, float("-inf"))
        if terms.rows is not None:
            x += rows
        if terms.cols is not None:
            x += cols
    return x


@triton.jit
def add_unscaled_terms(x, terms, masks, b, h, bh, i, j, r, q_length, k_length):
    """x (already scaled) with the terms that are added after the scale."""
    if terms.bias is not None:
        step = tl.minimum(tl.maximum(r, terms.bias.lo), terms.bias.hi) - terms.bias.lo
        x += LOG2E * tl.load(terms.bias.ptr + h * terms.bias.h + step)
    if terms.slopes is not None:
        x -= (LOG2E * tl.load(terms.slopes + h)) * tl.abs(r).to(tl.float32)
    if terms.decay_q is not None:
        c_q = tl.load(terms.decay_q + bh * q_length + i, mask=i < q_length, other=0.0)
        c_k = tl.load(terms.decay_k + bh * k_length + j, mask=j < k_length, other=0.0)
        x += LOG2E * (c_q - c_k).to(tl.float32)  # sums over long texts come as float64: subtracted first, then rounded
    if masks.extra is not None:
        if not masks.extra_is_bool:
            added = load_extra(masks, b, h, i, j, q_length, k_length).to(tl.float32)
            if (terms.scale is None) and ((terms.rows is not None) or (terms.cols is not None)):
                added = tl.where(j < k_length, added, 0.0)  # else apply_mask hides what lies beyond the last key
            x += LOG2E * added
    return x


@triton.jit
def apply_mask(x, terms, masks, b, h, i, j, q_length, k_length, left, right, masked):
    """x with -inf where a pair is not visible, unless add_scaled_terms has applied the mask."""
    if (terms.scale is not None) or ((terms.rows is None) and (terms.cols is None)):
        if masked:
            x = tl.where(visible(masks, b, h, i, j, q_length, k_length, left, right), x, float("-inf"))
    return x


# ---- the scale --------------------------------------------------------------------------------------------------------
@triton.jit
def row_scale(terms, bh, i, q_length, scale):
    """The scale of each query in base 2: a number, or a vector like i."""
    if terms.scale is not None:
        return LOG2E * tl.load(terms.scale + bh * q_length + i, mask=i < q_length, other=0.0)
    else:
        return LOG2E * scale


@triton.jit
def broadcast_scale(scale_row, terms, KEYS_FIRST: tl.constexpr):
    """What row_scale returned, in a shape that multiplies a tile."""
    if terms.scale is None:
        return scale_row
    elif KEYS_FIRST:
        return scale_row[None, :]
    else:
        return scale_row[:, None]


# ---- inner tiles: whole tiles of bands --------------------------------------------------------------------------------
@triton.jit
def load_identity(terms, SIZE: tl.constexpr):
    """The identity matrix: loaded rather than computed, so that it lies in shared memory. From registers, the compiler
    would run one product after another (wgmma serialised)."""
    step = tl.arange(0, SIZE)
    return tl.load(terms.identity + 128 + step[:, None] - step[None, :])


@triton.jit
def add_band(
    x, identity, band, positions, b, h, own0, own, other, length, TRANSPOSE: tl.constexpr, OWN_IS_KEY: tl.constexpr
):  # fmt: skip
    """x plus the band's tile [own, other] (TRANSPOSE: [other, own]), as a product with the identity matrix."""
    at = pair_addresses(band, positions, b, h, own0, own, other, OWN_IS_KEY)
    y = tl.load(at, mask=(own < length)[:, None], other=0.0)
    if TRANSPOSE:
        y = tl.trans(y)
    return tl.dot(identity, y, x)


@triton.jit
def add_bands(qk, identity, terms, positions, b, h, m0, n0, i, j, q_length, k_length, KEYS_FIRST: tl.constexpr):
    """add_scaled_terms for an inner tile."""
    x = qk
    if terms.rows is not None:
        x = add_band(x, identity, terms.rows, positions, b, h, m0, i, j, q_length, KEYS_FIRST, False)
    if terms.cols is not None:
        x = add_band(x, identity, terms.cols, positions, b, h, n0, j, i, k_length, not KEYS_FIRST, True)
    return x


# ---- far tiles: constants of each row and of each column --------------------------------------------------------------
@triton.jit
def row_end(terms, bh, i, valid, RIGHT: tl.constexpr):
    """What every far key on one side adds to query i before the scale: the query's end of the band."""
    if terms.rows is not None:
        return load_end(terms.rows, bh, i, valid, RIGHT)
    else:
        return tl.zeros(i.shape, tl.float32)


@triton.jit
def bias_end(terms, h, RIGHT: tl.constexpr):
    """The bias of every far key on one side. Base 2."""
    if terms.bias is not None:
        at = terms.bias.ptr + h * terms.bias.h
        if RIGHT:
            at += terms.bias.hi - terms.bias.lo
        return LOG2E * tl.load(at)
    else:
        return 0.0


@triton.jit
def far_row(terms, h, bh, i, q0, on_left, q_length):
    """What slopes and decay add to a far score for query i, relative to query q0: differences are small numbers. Base 2."""
    x = tl.zeros(i.shape, tl.float32)
    if terms.slopes is not None:
        slope = LOG2E * tl.load(terms.slopes + h)
        slope = tl.where(on_left, -slope, slope)
        x += slope * (i - q0).to(tl.float32)
    if terms.decay_q is not None:
        c_q = tl.load(terms.decay_q + bh * q_length + i, mask=i < q_length, other=0.0)
        x += LOG2E * (c_q - tl.load(terms.decay_q + bh * q_length + q0)).to(tl.float32)
    return x


@triton.jit
def far_column(terms, h, bh, j, q0, on_left, offset, q_length, k_length):
    """What slopes and decay add to a far score for key j, relative to query q0. Base 2."""
    x = tl.zeros(j.shape, tl.float32)
    if terms.slopes is not None:
        slope = LOG2E * tl.load(terms.slopes + h)
        slope = tl.where(on_left, slope, -slope)
        x += slope * (j + offset - q0).to(tl.float32)
    if terms.decay_q is not None:
        c_k = tl.load(terms.decay_k + bh * k_length + j, mask=j < k_length, other=0.0)
        x += LOG2E * (tl.load(terms.decay_q + bh * q_length + q0) - c_k).to(tl.float32)
    return x


@triton.jit
def add_far_keys(qk, terms, bh, j, on_left, ones):
    """q.k of a far tile [queries, keys] with its keys' ends of the band (bf16x3.py), before the scale."""
    if terms.cols is not None:
        row = (bh * 2 + tl.where(on_left, 0, 1)) * terms.cols.rows + j
        qk = add_bf16x3(qk, ones, tl.load(terms.cols.bf16x3 + row[:, None] * 16 + tl.arange(0, 16)[None, :]))
    return qk


@triton.jit
def far_scores(x, scale, terms, h, bh, j, q0, on_left, offset, q_length, k_length):
    """Scores of a far tile without their row constants; left unscaled where no column adds anything (SCALE_LAST)."""
    if (terms.slopes is not None) or (terms.decay_q is not None):
        x = x * scale + far_column(terms, h, bh, j, q0, on_left, offset, q_length, k_length)
    elif terms.scale is not None:
        x = x * scale
    return x
