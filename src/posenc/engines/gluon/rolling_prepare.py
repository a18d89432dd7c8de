"""What runs before and after the Gluon kernels with a content term over every distance: the bias as channels; delta, and which tiles each block of
keys visits; the gradients of the table and the bias from the sums of programs."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.structs import UNSPECIALISED
from .backward_prepare import load_delta, split_keys


@triton.jit(do_not_specialize=UNSPECIALISED)
def prepare_rolling(
    out, do, d_lse, delta, tiles, blocks, count, positions, masks, heads, batch_heads, q_length, k_length, offset, left, right, lo, hi,
    D: tl.constexpr, BM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The first programs take a tile of queries each, the others a block of keys."""
    pid = tl.program_id(0)
    q_tiles = tl.cdiv(q_length, BM)
    if pid < batch_heads * q_tiles:
        _, _, _, _, _, valid, row, x = load_delta(pid, out, do, d_lse, heads, q_length, D, BM)
        tl.store(delta + row, x, mask=valid)
    else:
        at = pid - batch_heads * q_tiles
        split_keys(at, tiles, count, positions, masks, q_length, k_length, offset, left, right, lo, hi, BM, KEYS, KEYS)


@triton.jit(do_not_specialize=UNSPECIALISED)
def split_bias(bias, bias_row, bias_lo, bias_hi, out, lo, span, scale, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """out [H, span, SPLIT]: of each distance from lo on, three numbers in 16 bits whose sum is the bias over the scale, in float32's precision; then
    zeros. A bias beyond the greatest number of the dtype stays beyond it."""
    MOST: tl.constexpr = 3.3895313892515355e38 if out.dtype.element_ty == tl.bfloat16 else 65504.0
    blocks = tl.cdiv(span, BLOCK)
    h, row = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    r = tl.minimum(tl.maximum(lo + row, bias_lo), bias_hi) - bias_lo
    x = tl.load(bias + h * bias_row + r, mask=row < span, other=0.0) / scale
    first = clamp(x, MOST).to(out.dtype.element_ty)
    x -= first.to(tl.float32)
    second = clamp(x, MOST).to(out.dtype.element_ty)
    third = clamp(x - second.to(tl.float32), MOST).to(out.dtype.element_ty)
    channel = tl.arange(0, SPLIT)[None, :]
    y = tl.where(channel == 0, first[:, None], tl.where(channel == 1, second[:, None], third[:, None]))
    y = tl.where(channel < 3, y, tl.zeros_like(y))
    tl.store(out + (h * span + row[:, None]) * SPLIT + channel, y, mask=(row < span)[:, None])


@triton.jit
def clamp(x, most):
    return tl.where(x > most, most, tl.where(x < -most, -most, x))  # NaN stays NaN


@triton.jit(do_not_specialize=UNSPECIALISED)
def sum_tables(sums, bias_sums, table, bias, programs, chunks, first, span, scale, D: tl.constexpr, KEYS: tl.constexpr):
    """sums [H, programs, chunks, D KEYS] (rolling_backward.py) -> table [H, span, D], times the scale, and bias [H, span]. first: the table's row at
    which the first chunk begins."""
    chunk, h = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    x = tl.zeros([KEYS * D], tl.float32)
    y = tl.zeros([KEYS], tl.float32)
    for program in range(programs):
        at = (h * programs + program) * chunks + chunk
        x += tl.load(sums + at * KEYS * D + tl.arange(0, KEYS * D))
        if bias is not None:
            y += tl.load(bias_sums + at * KEYS + tl.arange(0, KEYS))
    x = tl.reshape(x, [D // 8, 4, 8, 4, 2, 2])  # channels // 8, warp, g, c, half, pair
    x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [KEYS, D])
    row, d = first + chunk * KEYS + tl.arange(0, KEYS), tl.arange(0, D)
    inside = (row >= 0) & (row < span)
    tl.store(table + h * span * D + (row[:, None] * D + d[None, :]), x * scale, mask=inside[:, None])
    if bias is not None:
        tl.store(bias + h * span + row, y, mask=inside)
