"""Products of token states with a table of distances, where the attention kernels want them, and back.

A Band keeps a token's numbers in rows of an odd stride, so that a tile of pairs is aligned. So is, seen otherwise, every
n-th row: tokens s, s + n, s + 2 n, ... have rows that begin at multiples of n once they are shifted by s,

    column c of such a row is the distance origin + c - s,

and `spread` (states . table -> Band), `gather` (Band . table -> states) and `collect` (Bandᵀ . states -> table) work on
n ordinary matrices, each with the table shifted by s. n is 8, for 16 bytes at a time, and where there are many tokens 16:
memory is written in pieces of 32 bytes, and half a piece costs as much as a whole one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.constants import constant
from . import tiles
from .terms import Band, View, thirds

ALIGN = 16  # elements: aligned loads of 16 bytes in every dtype, and what Triton looks for in arguments
MARGIN = 512  # elements before and after a buffer that a tile at its edge may touch: two blocks and more


@triton.jit(do_not_specialize=["heads", "group", "last", "others", "strips"])
def spread_kernel(
    states, table, table_h, table_l, bias, bias_h, band,  # states: a View; table: [H or 1, span, E]; bias: [H, span]
    heads, group, last, others, strips, unit,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    EACH: tl.constexpr, THIRDS: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes one strip of columns, of every EACH-th token of a head; the one past the last strip, the ends.

    Up to 7 numbers before and after the span are written, into room that each row leaves at its end.
    """
    span = band.hi - band.lo + 1
    pid = tl.program_id(0)
    strip = pid % (strips + 1)
    pid = pid // (strips + 1)
    place = pid % EACH
    bh = (pid // EACH).to(tl.int64)
    b, h = bh // heads, bh % heads
    e = tl.arange(0, BLOCK_E)
    whole = (e < E)[None, :]
    own = tl.arange(0, BLOCK_I) * EACH
    head = states.ptr + b * states.b + (h // group) * states.h + e[None, :]
    begin, end = 0, last - band.first
    if strip == strips:
        for own0 in range(begin, end, EACH * BLOCK_I):
            i = own0 + place + own
            ok = i < last - band.first
            x = tl.load(head + (band.first + i).to(tl.int64)[:, None] * states.l, mask=ok[:, None] & whole, other=0.0)
            at_low = end_of(x, table, table_h, table_l, bias, bias_h, band, h, e, 0, 0, unit, E, ROUNDED, PRECISION)
            at_high = end_of(
                x, table, table_h, table_l, bias, bias_h, band, h, e, span - 16, 15, unit, E, ROUNDED, PRECISION
            )
            ends = band.ends + bh * 2 * band.rows + i
            tl.store(ends, at_low, mask=ok)
            tl.store(ends + band.rows, at_high, mask=ok)
            if THIRDS:
                parts = tl.arange(0, 16)[None, :]
                around = tl.where(parts < 3, 1.0, tl.zeros([BLOCK_I, 16], tl.float32))
                in_thirds = band.thirds + (bh * 2 * band.rows + i)[:, None] * 16 + parts
                tile = thirds(thirds(around, parts, 6, at_high), parts, 9, at_low)
                tl.store(in_thirds, tile.to(tl.bfloat16), mask=ok[:, None])
                tile = thirds(thirds(around, parts, 6, at_low), parts, 9, at_high)
                tl.store(in_thirds + band.rows * 16, tile.to(tl.bfloat16), mask=ok[:, None])
    else:
        c0, columns = strip * BLOCK_R, tl.arange(0, BLOCK_R)
        skip = band.lo - band.origin + place  # the column of the first distance
        steps = c0 - skip + columns
        real = (steps >= 0) & (steps < span)
        y = tl.load(table + h * table_h + steps[:, None] * table_l + e[None, :], mask=real[:, None] & whole, other=0.0)
        begins = c0 - skip + columns // 8 * 8  # of the eight numbers that are stored together
        stored = ((begins > -8) & (begins < span))[None, :]
        if others is not None:
            # Token i's column c is its distance to token i + c - place - shift, and no more than 0 .. others are asked for.
            begin = tl.maximum(band.shift - c0 - (BLOCK_R - 1), 0) // (EACH * BLOCK_I) * (EACH * BLOCK_I)
            end = tl.minimum(end, band.shift - c0 + others)
        base = band.ptr + b * band.b + h * band.h + place * band.pitch + c0
        at = own[:, None] * (band.pitch + 1) + columns[None, :]
        for own0 in tl.range(begin, end, EACH * BLOCK_I, num_stages=STAGES):
            i = own0 + place + own
            ok = i < last - band.first
            x = tl.load(head + (band.first + i).to(tl.int64)[:, None] * states.l, mask=ok[:, None] & whole, other=0.0)
            acc = tl.dot(x, tl.trans(y), input_precision=PRECISION)
            if bias is not None:
                acc = biased(acc, bias + h * bias_h + steps, real, unit, band)
            row = (bh * 0 + own0) * (band.pitch + 1)  # 64 bits
            tl.store(base + row + at, acc.to(band.ptr.dtype.element_ty), mask=ok[:, None] & stored)


@triton.jit
def biased(acc, at, real, unit, band):
    """acc and `unit` times the bias. In half precision -inf becomes a number, for tiles are multiplied (`added`): 0 · inf is
    NaN."""
    acc += unit * tl.load(at, mask=real, other=0.0)[None, :]
    if band.ptr.dtype.element_ty != tl.float32:
        lowest: tl.constexpr = -6e4 if band.ptr.dtype.element_ty == tl.float16 else -1e30
        acc = tl.where(acc < lowest, lowest, acc)
    return acc


@triton.jit
def end_of(
    x, table, table_h, table_l, bias, bias_h, band, h, e, begin, column, unit,
    E: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The numbers at one end of the span: a column of the product with 16 rows of the table, from `begin` on."""
    columns = tl.arange(0, 16)
    steps = begin + columns
    real = (steps >= 0) & (steps <= band.hi - band.lo)
    there = table + h * table_h + steps[:, None] * table_l + e[None, :]
    y = tl.load(there, mask=real[:, None] & (e < E)[None, :], other=0.0)
    acc = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    if bias is not None:
        acc = biased(acc, bias + h * bias_h + steps, real, unit, band)
    if ROUNDED:
        acc = acc.to(band.ptr.dtype.element_ty).to(tl.float32)
    return tl.sum(tl.where((columns == column)[None, :], acc, 0.0), 1)


def spread(
    states: Tensor, table: Tensor, heads: int, lo: int, hi: int, offset: int, first: int = 0, last: int | None = None,
    bias: Tensor | None = None, unit: float = 1.0, in_thirds: bool = False, rounded: bool = False,
    others: int | None = None,
) -> Band:  # fmt: skip
    """states [B, H or Hkv, L, E] of the tokens first .. last times table [H or 1, hi - lo + 1, E]; r = other - own + offset.

    bias [H, hi - lo + 1], float32: `unit` times it is added before the sum is rounded to the states' dtype. others: how many
    tokens there are on the other side, if positions are runs: numbers that none of them asks for are not made. in_thirds:
    the ends in that form, too. rounded: the ends as they are in the band, for distances that are here in one, there in the
    other.
    """
    batch, own_heads, length, size = states.shape
    last = length if last is None else last
    tokens = last - first
    rows = up(tokens, 64)
    ends = states.new_empty(batch, heads, 2, rows, dtype=torch.float32)
    parts = states.new_empty(batch, heads, 2, rows, 16, dtype=torch.bfloat16) if in_thirds else ends
    band = room(states, heads, lo, hi, offset, first, last)._replace(ends=ends, rows=rows, thirds=parts)
    if states.stride(-1) != 1:
        states = states.contiguous()
    table = table.to(states.dtype).contiguous()
    wide = max(16, tiles.power(size))
    tile = tiles.choose_spread(wide, hi - lo + 1, states.dtype, states.device)
    each = tiles.each(tokens, states.device)
    strips = tiles.cdiv(lo - band.origin + each - 1 + hi - lo + 1, tile.keys)
    spread_kernel[(batch * heads * each * (strips + 1),)](
        View(states, *states.stride()[:3]), table, table.stride(0) if table.shape[0] > 1 else 0, table.stride(1),
        bias, 0 if bias is None else bias.stride(0), band, heads, heads // own_heads, last, others, strips, unit,
        size, wide, tile.queries, tile.keys, each, in_thirds, rounded,
        PRECISION="ieee", STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return band


def shape(lo: int, hi: int, offset: int, tokens: int) -> tuple[int, int, int]:
    """Origin, pitch, and the elements of one head."""
    origin = lo - (lo - offset) % ALIGN
    pitch = up(hi - origin + 14)  # a row has room for eight shifts of its distances, rounded up to eights
    return origin, pitch, up(tokens * (pitch + 1))


def room(
    like: Tensor, heads: int, lo: int, hi: int, offset: int, first: int, last: int, *,
    dtype: torch.dtype | None = None, zero: bool = False, buffer: Tensor | None = None, unit: Tensor | None = None,
) -> Band:  # fmt: skip
    """A band for the tokens first .. last of a batch like this one: fresh, or over a buffer made before.

    With a `unit` it begins with zeros and is added to, as integers.
    """
    batch = like.shape[0]
    origin, pitch, one = shape(lo, hi, offset, last - first)
    if buffer is None:
        dtype = (dtype or like.dtype) if unit is None else torch.int64
        buffer = like.new_empty(MARGIN + batch * heads * one + MARGIN, dtype=dtype)
        if zero or unit is not None:
            buffer.zero_()
    ptr = buffer[MARGIN:-MARGIN]
    # No ends yet; and a pointer that is not used, as Triton has no None in a tuple within a tuple.
    unit = ptr if unit is None else unit
    return Band(ptr, heads * one, one, pitch, offset - origin - first, first, origin, lo, hi, ptr, 0, ptr, unit)


@triton.jit(do_not_specialize=["heads", "group", "tokens", "others"])
def gather_kernel(
    band, table, table_h, table_l, into, heads, group, tokens, begin, rows, others,  # table: [H or 1, rows, E]; into: a View
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
    EACH: tl.constexpr, MORE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Band . table of every EACH-th token of a block, summed over the heads of a group. `begin`: the table's row at the band's
    origin."""
    blocks = tl.cdiv(tokens, EACH * BLOCK_I)
    pid = tl.program_id(0)
    place = pid % EACH
    own0 = pid // EACH % blocks * (EACH * BLOCK_I)
    bh = (pid // EACH // blocks).to(tl.int64)
    b, h = bh // (heads // group), bh % (heads // group)
    own = tl.arange(0, BLOCK_I) * EACH
    ok = own0 + place + own < tokens
    e = tl.arange(0, BLOCK_E)
    whole = (e < E)[None, :]
    columns = tl.arange(0, BLOCK_C)
    first, end = 0, band.hi - band.origin + 1 + place
    if others is not None:  # as in spread_kernel
        first = tl.maximum(band.shift - own0 - EACH * (BLOCK_I - 1), 0) // BLOCK_C * BLOCK_C
        end = tl.minimum(end, band.shift - own0 + others)
    acc = tl.zeros([BLOCK_I, BLOCK_E], tl.float32)
    for each in range(group):
        head = h * group + each
        base = band.ptr + b * band.b + head * band.h + own0.to(tl.int64) * (band.pitch + 1) + place * band.pitch
        for c0 in tl.range(first, end, BLOCK_C, num_stages=STAGES):
            eights = c0 + columns // 8 * 8
            near = ok[:, None] & ((eights + 8 > place) & (eights < end))[None, :]
            x = tl.load(base + c0 + (own[:, None] * (band.pitch + 1) + columns[None, :]), mask=near, other=0.0)
            step = begin + c0 - place + columns
            there = table + head * table_h + step[:, None] * table_l + e[None, :]
            y = tl.load(there, mask=((step >= 0) & (step < rows))[:, None] & whole, other=0.0)
            acc = tl.dot(x.to(y.dtype), y, acc, input_precision=PRECISION)
    i = (own0 + place + own).to(tl.int64)
    at = into.ptr + b * into.b + h * into.h + i[:, None] * into.l + e[None, :]
    if MORE:
        acc += tl.load(at, mask=ok[:, None] & whole, other=0.0).to(tl.float32)
    tl.store(at, acc.to(into.ptr.dtype.element_ty), mask=ok[:, None] & whole)


def gather(band: Band, table: Tensor, lo: int, into: Tensor, more: bool, others: int | None = None) -> None:
    """The band times a table [H or 1, span, E] whose first distance is lo -> `into` [B, H or Hkv, tokens, E], summed over the
    heads of a group, and added to what is there if `more`. The band has zeros outside its span. others: see `spread`."""
    batch, groups, tokens, size = into.shape
    heads = band.b // band.h
    if not into.numel():
        return
    if band.ptr.dtype == torch.int64:
        band = _numbers(band)
    if table.stride(-1) != 1:
        table = table.contiguous()
    wide = max(16, tiles.power(size))
    tile = tiles.choose_gather(wide, table.dtype, into.device)
    each = tiles.each(tokens, into.device)
    gather_kernel[(batch * groups * tiles.cdiv(tokens, each * tile.queries) * each,)](
        band, table, table.stride(0) if table.shape[0] > 1 else 0, table.stride(1), View(into, *into.stride()[:3]),
        heads, heads // groups, tokens, band.origin - lo, table.shape[1], others, size, wide, tile.queries, tile.keys, each, more,
        PRECISION="ieee", STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "group", "batch", "tokens", "columns", "rows"])
def collect_kernel(
    band, states, ones, total, sums,  # states: a View; total: [H, PARTS, rows, E] and sums: [H, PARTS, rows], float32
    heads, group, batch, tokens, columns, rows,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Bandᵀ . states of some eighths of one head's tokens, over the whole batch, for BLOCK_C - 8 distances. As in
    spread_kernel, the rows of every eighth token are aligned, and their columns shifted by the token's place among eight: so
    each eighth is summed in registers, and then added to the rows of those before."""
    OWN: tl.constexpr = BLOCK_C - 8
    blocks = tl.cdiv(rows, OWN)
    pid = tl.program_id(0)
    c0 = pid % blocks * OWN
    part = pid // blocks % PARTS
    h = (pid // blocks // PARTS).to(tl.int64)
    own, e = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_E)
    c = c0 + tl.arange(0, BLOCK_C)
    eights = c0 + tl.arange(0, BLOCK_C) // 8 * 8 < columns  # known to be the same for eight columns
    steps = tl.cdiv(tokens, 8 * BLOCK_I)
    begin = (h * PARTS + part) * rows
    if sums is not None:
        every = tl.load(ones + own[:, None] * 0 + tl.arange(0, 16)[None, :])
    for eighth in range(part, 8, PARTS):
        row = c - eighth
        mine = (row >= c0) & (row < tl.minimum(c0 + OWN, rows))
        into = total + begin * E + (row[:, None] * E + e[None, :])
        ours = mine[:, None] & (e < E)[None, :]
        acc = tl.zeros([BLOCK_C, BLOCK_E], tl.float32)
        # A product with ones: sums over threads would take longer than all else.
        summed = tl.zeros([BLOCK_C, 16], tl.float32)
        if PARTS < 8:
            if eighth != part:
                tl.debug_barrier()  # other threads wrote what this one reads
                acc = tl.load(into, mask=ours, other=0.0)
                if sums is not None:
                    summed += tl.load(sums + begin + row, mask=mine, other=0.0)[:, None]
        for t in tl.range(0, batch * steps, num_stages=STAGES):
            b, own0 = (t // steps).to(tl.int64), t % steps * BLOCK_I
            i = (own0 + own) * 8 + eighth
            ok = i < tokens
            base = band.ptr + b * band.b + h * band.h + own0.to(tl.int64) * (8 * (band.pitch + 1)) + eighth * band.pitch
            at = base + (own[:, None] * (8 * (band.pitch + 1)) + c[None, :])
            x = tl.load(at, mask=ok[:, None] & eights[None, :], other=0.0)
            positions = states.ptr + b * states.b + (h // group) * states.h
            y = tl.load(
                positions + i.to(tl.int64)[:, None] * states.l + e[None, :],
                mask=ok[:, None] & (e < E)[None, :],
                other=0.0,
            )
            acc = tl.dot(tl.trans(x), y.to(x.dtype), acc, input_precision=PRECISION)
            if sums is not None:
                summed = tl.dot(tl.trans(x), every, summed, input_precision=PRECISION)
        tl.store(into, acc, mask=ours)
        if sums is not None:
            tl.store(sums + begin + row, tl.max(summed, 1), mask=mine)  # all columns are the same


def collect(
    band: Band, states: Tensor, heads: int, table_heads: int, span: int, summed: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The band, transposed, times states [B, H or Hkv, tokens, E] -> [H or 1, span, E], float32; with `summed` its sums over
    tokens too, [H or 1, span]."""
    batch, own_heads, tokens, size = states.shape
    wide = max(16, tiles.power(size))
    columns, rows = up(band.hi - band.origin + 8, 8), band.hi - band.origin + 1
    tile = tiles.choose_collect(wide, states.dtype, states.device)
    blocks = tiles.cdiv(rows, tile.keys - 8)
    parts = tiles.parts(heads * blocks, states.device)
    total = states.new_empty(heads, parts, rows, size, dtype=torch.float32)
    sums = total.new_empty(heads, parts, rows) if summed else None
    if not (tokens and batch):
        total.zero_()
        if sums is not None:
            sums.zero_()
    else:
        band = _numbers(band, states.dtype)
        if states.stride(-1) != 1:
            states = states.contiguous()
        collect_kernel[(heads * parts * blocks,)](
            band, View(states, *states.stride()[:3]), constant((1.0,) * 16, states.device, states.dtype), total, sums,
            heads, heads // own_heads, batch, tokens, columns, rows, size, wide, tile.queries, tile.keys, parts,
            PRECISION="ieee", STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    near = slice(band.lo - band.origin, band.lo - band.origin + span)

    def whole(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        over = [dim for dim, some in ((0, table_heads < heads), (1, True)) if some and x.shape[dim] > 1]
        x = x[:, :, near]
        return (x.sum(over, keepdim=True) if over else x).squeeze(1)

    return whole(total), whole(sums)


def _numbers(band: Band, dtype: torch.dtype = torch.float32) -> Band:
    """The band in floating point."""
    numbers = (band.ptr.float() / band.unit if band.ptr.dtype == torch.int64 else band.ptr).to(dtype)
    return band._replace(ptr=numbers, ends=numbers, thirds=numbers, unit=numbers)


def up(number: int, unit: int = ALIGN) -> int:
    return (number + unit - 1) // unit * unit
