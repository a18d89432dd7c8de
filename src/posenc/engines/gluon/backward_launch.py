"""Launch the Gluon backward kernel: lse and delta by tile before it, dq from its float32 sums after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.arguments import Inputs, Numbers
from ..triton.launcher import Launch
from ..triton.structs import View
from ..triton.tiles import load_tile, padded
from .backward import HALF, KEYS, backward
from .kernel import PAD
from .launch import LOG2E, _describe


class Schedule(NamedTuple):
    stages: int = 3
    slots: int = 2  # tiles of ds that wait for the adder
    queries: int = 64  # of a tile
    registers: tuple[int, int, int] = (208, 64, 32)  # of a consumer, the adder and the rest: 512 threads share 65,536
    add: int = 2  # 0, 1: without dq, without its sums in memory; 3: added by the copy engine
    at_once: int = 1  # heads of all batch rows, whose blocks are taken together where causal


SCHEDULES = {64: Schedule(), 128: Schedule(queries=32)}


@triton.jit(do_not_specialize=["bias_row", "bias_lo", "bias_hi", "first", "last", "width", "scale"])
def pad_table(
    bias, bias_row, bias_lo, bias_hi, table, first, last, width, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """bias [H, bias_lo .. bias_hi] or None -> table [H, width] by distance from `first` on, divided by the scale. CAUSAL: -inf beyond `last`."""
    h = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        r = first + start + tl.arange(0, BLOCK)
        x = tl.zeros([BLOCK], tl.float32)
        if bias is not None:
            x = tl.load(bias + h * bias_row + tl.minimum(tl.maximum(r, bias_lo), bias_hi) - bias_lo) / scale
        if CAUSAL:
            x = tl.where(r > last, float("-inf"), x)
        tl.store(table + h * width + (r - first), x, mask=r - first < width)


@triton.jit(do_not_specialize=["heads", "q_length", "batch_heads", "width", "scale"])
def prepare(
    out, do, d_lse, lse, stats, dq, table, width, heads, q_length, batch_heads, scale, D: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """stats [3, B H, tiles, 2, BM]: lse less the far constants of left, right and near tiles, and delta; and zeros for dq."""
    tiles = tl.cdiv(q_length, BM)
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    i, d = tile * BM + tl.arange(0, BM), tl.arange(0, D)
    valid = i < q_length
    out_tile = load_tile(out.ptr + b * out.b + h * out.h, out.l, tile * BM, q_length, d, D, BM, True)
    do_tile = load_tile(do.ptr + b * do.b + h * do.h, do.l, tile * BM, q_length, d, D, BM, True)
    delta = tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    at = bh * padded(q_length) + i
    if d_lse is not None:
        delta -= 1.4426950408889634 * tl.load(d_lse + at, mask=valid, other=0.0)
    lse_i = tl.load(lse + at, mask=valid, other=float("inf"))
    left, right = 0.0, 0.0
    if table is not None:
        left = tl.load(table + h * width) * scale
        right = tl.load(table + h * width + width - 1) * scale
    plane = (batch_heads * tiles).to(tl.int64) * 2 * BM
    here = stats + (bh * tiles + tile) * 2 * BM + tl.arange(0, BM)
    tl.store(here, lse_i - left)
    tl.store(here + plane, lse_i - right)
    tl.store(here + 2 * plane, lse_i)
    for copy in tl.static_range(3):
        tl.store(here + copy * plane + BM, tl.where(valid, delta, 0.0))
    tl.store(dq + (bh * tiles + tile) * BM * D + tl.arange(0, BM * D), tl.zeros([BM * D], tl.float32))


@triton.jit(do_not_specialize=["heads", "q_length", "scale"])
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


def run_backward(
    launch: Launch, do: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, x: Inputs, num: Numbers, scale: float,
    dq: Tensor, dk: Tensor, dv: Tensor, wants_bias: bool, schedule: Schedule | None = None,
) -> Tensor | None:  # fmt: skip
    """Fills dq, dk and dv; the bias's gradient by block of keys, [B, H, blocks, span]."""
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    k_length = k.shape[2]
    s = schedule or SCHEDULES[size]
    causal = num.right == 0
    lo, hi = num.lo, num.hi
    last = k_length - q_length + num.offset
    if causal:  # the table ends with the first distance that is not visible
        lo, hi = min(lo, last), last + 1
    table, width = None, 0
    if causal or x.bias is not None:
        width = hi - lo + 1 + 2 * PAD.value
        rows = 1 if x.bias is None else heads
        table = lse.new_empty(rows, width)
        row = 0 if x.bias is None else x.bias.stride(0)
        launch(
            pad_table, rows, x.bias, row, num.bias_lo, num.bias_hi, table, lo - PAD.value, last, width, scale, causal, 512
        )  # fmt: skip
    tiles, blocks = -(-q_length // s.queries), -(-k_length // KEYS.value)
    stats = lse.new_empty(3 * batch * heads * tiles, 2 * s.queries)
    sums = lse.new_empty(batch, heads, tiles, s.queries * size)
    has_bias = x.bias is not None
    launch(
        prepare, batch * heads * tiles, _view(out), _view(do), d_lse, lse, stats, sums, table if has_bias else None, width, heads,
        q_length, batch * heads, scale * LOG2E, size, s.queries, num_warps=4,
    )  # fmt: skip
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    programs = min(batch * heads * blocks, processors)
    wants_bias = wants_bias and has_bias
    band = ends = parts = stats
    span = num.bias_hi - num.bias_lo + 1
    pitch = -(-span // 32) * 32
    if wants_bias:
        band = lse.new_empty(programs, KEYS.value, pitch)
        ends = lse.new_empty(programs, 4)
        parts = lse.new_empty(batch, heads, blocks, span)
    layout = gl.NVMMASharedLayout(0, 32, 2)
    launch(
        backward, programs, _describe(k, KEYS.value), _describe(v, KEYS.value), _describe(q, s.queries),
        _describe(do, s.queries), _describe(dk, HALF.value), _describe(dv, HALF.value),
        TensorDescriptor(stats, list(stats.shape), [2 * s.queries, 1], [1, 2 * s.queries], layout), _describe_sums(sums, size, s.queries) if s.add == 3 else sums, lse if table is None else table, band, ends, parts,
        scale * LOG2E, q_length, k_length, heads, batch * heads, min(s.at_once if causal else 1, batch * heads), num.offset,
        width if has_bias else 0, lo, hi, num.bias_lo, num.bias_hi, pitch,
        STAGES=s.stages, SLOTS=s.slots, ADD=s.add, TABLE=table is not None, GRAD=wants_bias,
        CAUSAL=causal, CONSUMER_REGISTERS=s.registers[0], ADDER_REGISTERS=s.registers[1], REGISTERS=s.registers[2], num_warps=4,
    )  # fmt: skip
    launch(
        finish, batch * heads * tiles, sums, _view(dq), heads, q_length, scale, size, s.queries, s.add == 3, num_warps=4
    )
    return parts if wants_bias else None


def _describe_sums(x: Tensor, size: int, queries: int) -> TensorDescriptor:
    """dq's sums in blocks of a tile, [channels, queries]."""
    block = [size, queries]
    rows = x.numel() // queries
    return TensorDescriptor(x, [rows, queries], [queries, 1], block, gl.NVMMASharedLayout(128, 32, 2))


def _view(x: Tensor) -> View:
    return View(x, *x.stride()[:3])
