"""Products of a band with token states and tables of distances:

    band_from_states    band[i, r]  =  states[i] . table[r]                 a content term
    states_from_band    states[i]   =  sum_r band[i, r] table[r]            its gradient with respect to the states
    table_from_band     table[r]    =  sum_i band[i, r] states[i]           and with respect to the table

Rows of a band are pitch + 1 elements apart (band_layout.py), so neighbouring rows are not aligned with each other. Every
n-th row is: the tokens s, s + n, s + 2 n, ... have rows n (pitch + 1) apart, a multiple of n, and begin s elements after
a multiple of n. Read from that multiple on, they form an ordinary aligned matrix whose columns are shifted by s:

    n = 4, pitch = 8, rows 9 apart          element    0 1 2 3|4 5 6 7|8 9
    token 0   begins at  0                             r0 r1 r2 ...               s = 0:  tokens 0, 4, 8, ...
    token 1   begins at  9 = 8 + 1                     .  r0 r1 r2 ...            s = 1:  tokens 1, 5, 9, ...
    token 4   begins at 36 = 9 * 4                     r0 r1 r2 ...               column c is the distance origin + c - s

So each product is n products of ordinary matrices, each with the table shifted by s. n is 8, for stores of 16 bytes, and 16
where there are many tokens: memory is written in sectors of 32 bytes, and half a sector costs as much as a whole one. Short
texts, an eighth of which would not fill a tile, have n = 1: one matrix, whose numbers are stored one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.constants import constant
from . import launcher, schedule
from .band_layout import Band, make_band, round_up, to_float
from .bf16x3 import split_bf16x3
from .launcher import Launch
from .structs import view
from .tables import Parts
from .tiles import matmul


@triton.jit(do_not_specialize=["bias_h", "heads", "group", "last", "other_length", "n_strips"])
def band_from_states_kernel(
    states, table, table_h, table_l, bias, bias_h, band,  # states: a View; table: [H or 1, span, E]; bias: [H, span]
    heads, group, last, other_length, n_strips, bias_factor,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    BF16X3: tl.constexpr, ROUNDED: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """states . table for every STEP-th token of a head: one program for each strip of columns, one more for the ends.

    Up to 7 numbers before and after the span are stored too, in the room that each row has at its end.
    """
    span = band.hi - band.lo + 1
    pid = tl.program_id(0)
    strip = pid % (n_strips + 1)
    pid = pid // (n_strips + 1)
    shift = pid % STEP
    bh = (pid // STEP).to(tl.int64)
    b, h = bh // heads, bh % heads
    e = tl.arange(0, BLOCK_E)
    channels = (e < E)[None, :]
    own = tl.arange(0, BLOCK_I) * STEP
    head = states.ptr + b * states.b + (h // group) * states.h + e[None, :]
    begin, end = 0, last - band.first
    if strip == n_strips:
        for own0 in range(begin, end, STEP * BLOCK_I):
            i = own0 + shift + own
            valid = i < last - band.first
            row = head + (band.first + i).to(tl.int64)[:, None] * states.l
            x = tl.load(row, mask=valid[:, None] & channels, other=0.0)
            at_lo = end_column(x, table, table_h, table_l, bias, bias_h, band, h, e, 0, 0, bias_factor, E, ROUNDED)
            at_hi = end_column(
                x, table, table_h, table_l, bias, bias_h, band, h, e, span - 16, 15, bias_factor, E, ROUNDED
            )
            ends = band.ends + bh * 2 * band.rows + i
            tl.store(ends, at_lo, mask=valid)
            tl.store(ends + band.rows, at_hi, mask=valid)
            if BF16X3:
                columns = tl.arange(0, 16)[None, :]
                ones = tl.where(columns < 3, 1.0, tl.zeros([BLOCK_I, 16], tl.float32))
                parts = band.bf16x3 + (bh * 2 * band.rows + i)[:, None] * 16 + columns
                tile = split_bf16x3(split_bf16x3(ones, columns, 6, at_hi), columns, 9, at_lo)
                tl.store(parts, tile.to(tl.bfloat16), mask=valid[:, None])
                tile = split_bf16x3(split_bf16x3(ones, columns, 6, at_lo), columns, 9, at_hi)
                tl.store(parts + band.rows * 16, tile.to(tl.bfloat16), mask=valid[:, None])
    else:
        c0, columns = strip * BLOCK_R, tl.arange(0, BLOCK_R)
        skip = band.lo - band.origin + shift  # the column of the first distance
        steps = c0 - skip + columns  # rows of the table
        real = (steps >= 0) & (steps < span)
        table_rows = table + h * table_h + steps[:, None] * table_l + e[None, :]
        y = tl.load(table_rows, mask=real[:, None] & channels, other=0.0)
        begins = c0 - skip + columns // 8 * 8  # eight numbers are stored together: where they begin
        stored = ((begins > -8) & (begins < span))[None, :]
        if other_length is not None:
            # Column c of token i belongs to the other side's token i + c - shift - band.shift: only 0 .. other_length exist.
            begin = tl.maximum(band.shift - c0 - (BLOCK_R - 1), 0) // (STEP * BLOCK_I) * (STEP * BLOCK_I)
            end = tl.minimum(end, band.shift - c0 + other_length)
        base = band.ptr + b * band.b + h * band.h + shift * band.pitch + c0
        at = own[:, None] * (band.pitch + 1) + columns[None, :]
        for own0 in tl.range(begin, end, STEP * BLOCK_I, num_stages=STAGES):
            i = own0 + shift + own
            valid = i < last - band.first
            row = head + (band.first + i).to(tl.int64)[:, None] * states.l
            x = tl.load(row, mask=valid[:, None] & channels, other=0.0)
            acc = matmul(x, tl.trans(y))
            if bias is not None:
                acc = add_bias(acc, bias + h * bias_h + steps, real, bias_factor, band)
            begin_row = (bh * 0 + own0) * (band.pitch + 1)  # 64 bits
            tl.store(base + begin_row + at, acc.to(band.ptr.dtype.element_ty), mask=valid[:, None] & stored)


@triton.jit
def add_bias(acc, at, real, bias_factor, band):
    """acc + bias_factor * bias. In half precision -inf becomes a very low number: tiles of the band are multiplied with the
    identity matrix (scores.py), and 0 * inf is NaN."""
    acc += bias_factor * tl.load(at, mask=real, other=0.0)[None, :]
    if band.ptr.dtype.element_ty != tl.float32:
        lowest: tl.constexpr = -6e4 if band.ptr.dtype.element_ty == tl.float16 else -1e30
        acc = tl.where(acc < lowest, lowest, acc)
    return acc


@triton.jit
def end_column(
    x, table, table_h, table_l, bias, bias_h, band, h, e, begin, column, bias_factor,
    E: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """The numbers at one end of the span: a column of the product with the table's rows begin .. begin + 16."""
    columns = tl.arange(0, 16)
    steps = begin + columns
    real = (steps >= 0) & (steps <= band.hi - band.lo)
    there = table + h * table_h + steps[:, None] * table_l + e[None, :]
    y = tl.load(there, mask=real[:, None] & (e < E)[None, :], other=0.0)
    acc = matmul(x, tl.trans(y))
    if bias is not None:
        acc = add_bias(acc, bias + h * bias_h + steps, real, bias_factor, band)
    if ROUNDED:
        acc = acc.to(band.ptr.dtype.element_ty).to(tl.float32)
    return tl.sum(tl.where((columns == column)[None, :], acc, 0.0), 1)


def band_from_states(
    launch: Launch, states: Tensor, table: Tensor, heads: int, lo: int, hi: int, offset: int, first: int = 0, last: int | None = None,
    bias: Tensor | None = None, bias_factor: float = 1.0, with_bf16x3: bool = False, rounded: bool = False, wide: bool = False,
    other_length: int | None = None,
) -> Band:  # fmt: skip
    """states [B, H or Hkv, L, E] of the tokens first .. last times table [H or 1, hi - lo + 1, E]; r = other - own + offset.

    bias          [H, hi - lo + 1], float32: bias_factor * bias is added before the sum is rounded to the states' dtype
    with_bf16x3   the ends are stored as bfloat16 parts too
    rounded       the ends are rounded like the band: a distance may be read from either
    wide          whole tiles lie within the band
    other_length  tokens on the other side, for consecutive positions: entries beyond them are not computed
    """
    batch, own_heads, length, size = states.shape
    last = length if last is None else last
    tokens = last - first
    rows = round_up(tokens, 64)
    ends = states.new_empty(batch, heads, 2, rows, dtype=torch.float32)
    parts = states.new_empty(batch, heads, 2, rows, 16, dtype=torch.bfloat16) if with_bf16x3 else ends
    band = make_band(states, heads, lo, hi, offset, first, last)._replace(ends=ends, rows=rows, bf16x3=parts)
    if states.stride(-1) != 1:
        states = states.contiguous()
    table = table.to(states.dtype)
    if table.stride(-1) != 1:
        table = table.contiguous()
    block_size = max(16, schedule.next_power_of_2(size))
    tile = schedule.choose_band_tile(block_size, wide, states.dtype, states.device)
    step = schedule.choose_row_step(tokens, states.device)
    n_strips = schedule.cdiv(lo - band.origin + step - 1 + hi - lo + 1, tile.keys)
    _launch_step(
        launch, step, band_from_states_kernel, batch * heads * step * (n_strips + 1), view(states), table, table.stride(0) if table.shape[0] > 1 else 0, table.stride(1),
        bias, 0 if bias is None else bias.stride(0), band, heads, heads // own_heads, last, other_length, n_strips, bias_factor,
        size, block_size, tile.queries, tile.keys, with_bf16x3, rounded,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return band


def _launch_step(launch: Launch, step: int, kernel, programs: int, *args, **constants) -> None:
    """Launch with STEP=step. What the next text needs, which may be short or not, is compiled at the same time."""
    launch(kernel, programs, *args, **constants, STEP=step)
    if not launcher.INTERPRETED and step in schedule.EVERYDAY_STEPS:
        for other in schedule.EVERYDAY_STEPS:
            launcher.compile_kernel(kernel, args, constants | {"STEP": other})


@triton.jit(do_not_specialize=["heads", "group", "tokens", "begin", "rows", "other_length", "factor"])
def states_from_band_kernel(
    band, table, table_h, table_l, into, heads, group, tokens, begin, rows, other_length, factor,  # table: [H or 1, rows, E]; into: a View
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
    ACCUMULATE: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """factor * band . table of every STEP-th token of a block, summed over the heads of a group. begin: the table's row at the band's
    origin."""
    blocks = tl.cdiv(tokens, STEP * BLOCK_I)
    pid = tl.program_id(0)
    shift = pid % STEP
    own0 = pid // STEP % blocks * (STEP * BLOCK_I)
    bh = (pid // STEP // blocks).to(tl.int64)
    b, h = bh // (heads // group), bh % (heads // group)
    own = tl.arange(0, BLOCK_I) * STEP
    valid = own0 + shift + own < tokens
    e = tl.arange(0, BLOCK_E)
    channels = (e < E)[None, :]
    columns = tl.arange(0, BLOCK_C)
    first, end = 0, band.hi - band.origin + 1 + shift
    if other_length is not None:  # as in band_from_states_kernel
        first = tl.maximum(band.shift - own0 - STEP * (BLOCK_I - 1), 0) // BLOCK_C * BLOCK_C
        end = tl.minimum(end, band.shift - own0 + other_length)
    acc = tl.zeros([BLOCK_I, BLOCK_E], tl.float32)
    for member in range(group):
        head = h * group + member
        base = band.ptr + b * band.b + head * band.h + own0.to(tl.int64) * (band.pitch + 1) + shift * band.pitch
        for c0 in tl.range(first, end, BLOCK_C, num_stages=STAGES):
            eights = c0 + columns // 8 * 8
            near = valid[:, None] & ((eights + 8 > shift) & (eights < end))[None, :]
            x = tl.load(base + c0 + (own[:, None] * (band.pitch + 1) + columns[None, :]), mask=near, other=0.0)
            step = begin + c0 - shift + columns
            there = table + head * table_h + step[:, None] * table_l + e[None, :]
            y = tl.load(there, mask=((step >= 0) & (step < rows))[:, None] & channels, other=0.0)
            acc = matmul(x.to(y.dtype), y, acc)
    i = (own0 + shift + own).to(tl.int64)
    at = into.ptr + b * into.b + h * into.h + i[:, None] * into.l + e[None, :]
    acc = acc * factor
    if ACCUMULATE:
        acc += tl.load(at, mask=valid[:, None] & channels, other=0.0).to(tl.float32)
    tl.store(at, acc.to(into.ptr.dtype.element_ty), mask=valid[:, None] & channels)


def states_from_band(
    launch: Launch, band: Band, table: Tensor, lo: int, into: Tensor, accumulate: bool, other_length: int | None = None, factor: float = 1.0
) -> None:  # fmt: skip
    """The band times the factor and a table [H or 1, span, E] whose first distance is lo -> `into` [B, H or Hkv, tokens, E], summed over the
    heads of a group; accumulate: added to what is there. The band has zeros outside its span."""
    batch, groups, tokens, size = into.shape
    heads = band.b // band.h
    if not into.numel():
        return
    if band.ptr.dtype == torch.int64:
        band = to_float(band)
    if table.stride(-1) != 1:
        table = table.contiguous()
    block_size = max(16, schedule.next_power_of_2(size))
    tile = schedule.choose_states_tile(block_size, table.dtype, into.device)
    step = schedule.choose_row_step(tokens, into.device)
    _launch_step(
        launch, step, states_from_band_kernel, batch * groups * schedule.cdiv(tokens, step * tile.queries) * step, band, table, table.stride(0) if table.shape[0] > 1 else 0, table.stride(1), view(into),
        heads, heads // groups, tokens, band.origin - lo, table.shape[1], other_length, factor, size, block_size, tile.queries, tile.keys, accumulate,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "group", "batch", "tokens", "columns", "rows"])
def table_from_band_kernel(
    band, states, ones, total, sums,  # states: a View; total: [H, PARTS, rows, E] and sums: [H, PARTS, rows], float32
    heads, group, batch, tokens, columns, rows,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """bandᵀ . states of one head over the whole batch, for BLOCK_C - 8 distances. Every eighth token forms one product, summed
    in registers and added to the products before it, whose columns are shifted by another number; a program takes every
    PARTS-th of the eight. sums: of the band over tokens, as a product with ones (reductions across threads are slower)."""
    OWN: tl.constexpr = BLOCK_C - 8
    blocks = tl.cdiv(rows, OWN)
    pid = tl.program_id(0)
    c0 = pid % blocks * OWN
    part = pid // blocks % PARTS
    h = (pid // blocks // PARTS).to(tl.int64)
    own, e = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_E)
    c = c0 + tl.arange(0, BLOCK_C)
    eights = c0 + tl.arange(0, BLOCK_C) // 8 * 8 < columns  # the compiler knows: the same for eight columns
    of_text = tl.cdiv(tokens, 8)  # every eighth token of a text; those of several short texts share a tile
    begin = (h * PARTS + part) * rows
    if sums is not None:
        ones_tile = tl.load(ones + own[:, None] * 0 + tl.arange(0, 16)[None, :])
    for shift in range(part, 8, PARTS):
        row = c - shift
        own_rows = (row >= c0) & (row < tl.minimum(c0 + OWN, rows))
        into = total + begin * E + (row[:, None] * E + e[None, :])
        stored = own_rows[:, None] & (e < E)[None, :]
        acc = tl.zeros([BLOCK_C, BLOCK_E], tl.float32)
        summed = tl.zeros([BLOCK_C, 16], tl.float32)
        if PARTS < 8:
            if shift != part:
                tl.debug_barrier()  # other threads wrote what this one reads
                acc = tl.load(into, mask=stored, other=0.0)
                if sums is not None:
                    summed += tl.load(sums + begin + row, mask=own_rows, other=0.0)[:, None]
        base = band.ptr + h * band.h + shift * band.pitch
        head = states.ptr + (h // group) * states.h
        for own0 in tl.range(0, batch * of_text, BLOCK_I, num_stages=STAGES):
            b = (own0 + own) // of_text
            eighth = (own0 + own - b * of_text).to(tl.int64) * 8
            valid = (b < batch) & (eighth + shift < tokens)
            at = base + (b.to(tl.int64) * band.b + eighth * (band.pitch + 1))[:, None] + c[None, :]
            x = tl.load(at, mask=valid[:, None] & eights[None, :], other=0.0)
            rows_at = head + (b.to(tl.int64) * states.b + (eighth + shift) * states.l)[:, None] + e[None, :]
            y = tl.load(rows_at, mask=valid[:, None] & (e < E)[None, :], other=0.0)
            acc = matmul(tl.trans(x), y.to(x.dtype), acc)
            if sums is not None:
                summed = matmul(tl.trans(x), ones_tile, summed)
        tl.store(into, acc, mask=stored)
        if sums is not None:
            tl.store(sums + begin + row, tl.max(summed, 1), mask=own_rows)  # all columns are the same


def table_from_band(
    launch: Launch, band: Band, states: Tensor, heads: int, with_sums: bool = False
) -> tuple[Parts, Parts | None]:
    """The band, transposed, times states [B, H or Hkv, tokens, E] -> parts of [H, span, E]; with_sums: and of the band's sums
    over tokens, [H, span]."""
    batch, own_heads, tokens, size = states.shape
    block_size = max(16, schedule.next_power_of_2(size))
    columns, rows = round_up(band.hi - band.origin + 8, 8), band.hi - band.origin + 1
    tile = schedule.choose_table_tile(block_size, states.dtype, states.device)
    blocks = schedule.cdiv(rows, tile.keys - 8)
    parts = schedule.choose_table_parts(heads * blocks, states.device)
    total = states.new_empty(heads, parts, rows, size, dtype=torch.float32)
    sums = total.new_empty(heads, parts, rows) if with_sums else None
    if not (tokens and batch):
        total.zero_()
        if sums is not None:
            sums.zero_()
    else:
        band = to_float(band, states.dtype)
        if states.stride(-1) != 1:
            states = states.contiguous()
        launch(
            table_from_band_kernel, heads * parts * blocks, band, view(states), constant((1.0,) * 16, states.device, states.dtype), total, sums,
            heads, heads // own_heads, batch, tokens, columns, rows, size, block_size, tile.queries, tile.keys, parts,
            STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    first = band.lo - band.origin
    return Parts(total, 0, first), None if sums is None else Parts(sums, 0, first)
