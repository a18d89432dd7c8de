"""Launch the Gluon backward kernel: lse and delta by tile before it, dq from its float32 sums after it."""

from __future__ import annotations

from functools import lru_cache
from heapq import heapreplace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...core.constants import constant
from ..triton.arguments import Inputs, Numbers
from ..triton.launch import make_masks, position_args
from ..triton.launcher import Launch
from ..triton.structs import view
from .backward import backward
from .backward_prepare import finish, prepare
from .backward_sums import ROWS
from .backward_tiles import KEY_CONSUMERS, KEYS, OWN
from .kernel import NUMBERS, PAD
from .launch import LOG2E, NO_LIMIT, _describe, _rows, section_of


class Schedule(NamedTuple):
    stages: int = 3
    slots: int = 2  # tiles of ds that wait for the adder
    queries: int = 64  # of a tile
    registers: tuple[int, int, int] = (208, 64, 32)  # of a consumer, the adder and the rest: 512 threads share 65,536
    add: int = 2  # dq is added by the threads; 3: by the copy engine
    late: int = 0  # 1: dv and dk of a tile run beside the next one's softmax
    spread: int = 1  # 0: blocks of keys all begin at their first tile of queries
    copied: int = 2  # tiles of content terms by the copy engine; 1: of wide spans alone; 0: none


SCHEDULES = {64: Schedule(), 128: Schedule(queries=32, add=3, registers=(216, 56, 24))}

COLUMNS = 128  # of the band that are summed at a time
TOGETHER = 8  # heads at the end, whose blocks are taken by their length
BEYOND = 3  # what a block costs beside its tiles, in tiles


def choose_schedule(size: int, has_slopes: bool) -> Schedule:
    """late: 1.63 ms instead of 1.66 for heads of 64 (4 x 16 x 4096, a bias; causal 0.935 and 0.932); for heads of 128 3.30 instead of 3.27."""
    return SCHEDULES[size]._replace(late=int(size == 64 and not has_slopes))


@lru_cache(maxsize=256)
def order_blocks(heads: int, costs: tuple[int, ...], programs: int) -> tuple[tuple[int, ...], int]:
    """int32 [programs, 1 + ..]: how many blocks of keys each program takes, and their numbers (head * blocks + block); and the length
    of a row.

    costs: of a head's blocks. Heads come one after the other, so that what they read stays in the L2 cache; the last ones
    together, the most expensive blocks first. Each block goes to the program that has the least to do so far.
    """
    blocks = len(costs)
    last = min(heads, TOGETHER)
    jobs = [(head, block) for head in range(heads - last) for block in sorted(range(blocks), key=lambda x: -costs[x])]
    jobs += sorted(product(range(heads - last, heads), range(blocks)), key=lambda job: -costs[job[1]])
    taken: list[list[int]] = [[] for _ in range(programs)]
    free = [(0, program) for program in range(programs)]
    for head, block in jobs:
        busy, program = free[0]
        taken[program].append(head * blocks + block)
        heapreplace(free, (busy + costs[block], program))
    width = 1 + max(map(len, taken))
    return tuple(x for row in taken for x in (len(row), *row, *[0] * (width - 1 - len(row)))), width


def order_keys(x: Inputs, num: Numbers, keys: int, queries: int) -> tuple[Tensor, int, int]:
    """order_blocks of a call's blocks of so many keys, whose cost are the tiles of queries that may see them; and the number of programs."""
    processors = torch.cuda.get_device_properties(x.q.device).multi_processor_count
    batch, heads, q_length, _ = x.q.shape
    kv_heads, k_length = x.k.shape[1:3]
    q_tiles, blocks = -(-q_length // queries), -(-k_length // keys)
    programs = min(batch * kv_heads * blocks, processors)
    seen = [0] * blocks  # the first tile of queries that may see a block: padding and documents are not known here
    if num.right >= 0:
        seen = [max(block * keys + q_length - k_length - num.right, 0) // queries for block in range(blocks)]
    costs = tuple(heads // kv_heads * max(q_tiles - first, 1) + BEYOND for first in seen)
    numbers, width = order_blocks(batch * kv_heads, costs, programs)
    return constant(numbers, x.q.device, torch.int32), width, programs


def run_backward(
    launch: Launch, do: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, x: Inputs, num: Numbers, scale: float,
    dq: Tensor, dk: Tensor, dv: Tensor, wants_bias: bool, wants_slopes: bool = False, schedule: Schedule | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Fills dq, dk and dv; the gradients of the bias and of the slopes by block of keys, [B, H, blocks, span] and [B, H, blocks, consumers]."""
    q, k, v = x.q, x.k, x.v
    batch, heads, q_length, size = q.shape
    kv_heads, k_length = k.shape[1:3]
    s = schedule or choose_schedule(size, x.slopes is not None)
    keys = KEYS.value
    q_tiles, blocks = -(-q_length // s.queries), -(-k_length // keys)
    stats = lse.new_empty(3 * batch * heads * q_tiles, 2 * s.queries)
    sums = lse.new_empty(batch, heads, q_tiles, s.queries * size)
    batch_rows = 1 if x.key_mask is None and x.doc_q is None and x.starts is None else batch
    tiles = lse.new_empty(batch_rows, blocks, NUMBERS.value, dtype=torch.int32)
    bias_row, width, table = 0, 0, None
    if x.bias is not None:
        bias_row, width = x.bias.stride(0), num.hi - num.lo + 1 + 2 * PAD.value
        table = lse.new_empty(heads, width)
    left, right = (None if limit < 0 else limit for limit in (num.left, num.right))
    made = None
    if x.doc_q is None:
        order, order_row, programs = order_keys(x, num, keys, s.queries)
    else:  # `prepare` makes it, which knows what each block sees
        programs = min(batch * kv_heads * blocks, torch.cuda.get_device_properties(q.device).multi_processor_count)
        order_row = 1 - (-batch * kv_heads * blocks // programs)
        order = made = tiles.new_empty(programs, order_row)
    prepared = batch * heads * q_tiles + batch_rows * blocks + (0 if table is None else heads)
    launch(
        prepare, prepared, view(out), view(do), d_lse, lse, stats, sums, tiles, batch_rows * blocks, blocks, position_args(x), make_masks(x),
        x.bias, bias_row, num.bias_lo, num.bias_hi, table, num.lo - PAD.value, width, heads, batch * heads, q_length, k_length,
        num.offset, left, right, num.lo, num.hi, scale, scale * LOG2E, made, order_row, programs, section_of(kv_heads), kv_heads,
        size, s.queries, keys, OWN.value, 512, num_warps=4,
    )  # fmt: skip

    wants_bias = wants_bias and x.bias is not None
    band = ends = parts = stats
    span = num.bias_hi - num.bias_lo + 1
    pitch = -(-span // COLUMNS) * COLUMNS
    if wants_bias:
        band = lse.new_empty(programs, KEY_CONSUMERS.value * ROWS.value, pitch)
        ends = lse.new_empty(programs, 2 * KEY_CONSUMERS.value)
        parts = lse.new_empty(batch, heads, blocks, span)
    wants_slopes = wants_slopes and x.slopes is not None
    d_slopes = lse.new_empty(batch, heads, blocks, KEY_CONSUMERS.value) if wants_slopes else stats
    masks, mask_rows = zip(*(_rows(y, lse) for y in (x.key_mask, x.doc_q, x.doc_k, x.doc_k_queries)), strict=True)
    layout = gl.NVMMASharedLayout(0, 32, 2)
    launch(
        backward, programs, _describe(k, OWN.value), _describe(v, OWN.value), _describe(q, s.queries),
        _describe(do, s.queries), _describe(dk, OWN.value), _describe(dv, OWN.value),
        TensorDescriptor(stats, list(stats.shape), [2 * s.queries, 1], [1, 2 * s.queries], layout),
        _describe_sums(sums, size, s.queries) if s.add == 3 else sums, tiles, order, lse if table is None else table,
        lse if x.slopes is None else x.slopes, *masks, band, ends, parts, d_slopes,
        scale * LOG2E, q_length, k_length, heads, heads // kv_heads, batch, s.spread,
        NO_LIMIT if left is None else left, NO_LIMIT if right is None else right, 0 if batch_rows == 1 else blocks * NUMBERS.value, order_row, width,
        *mask_rows, num.lo, num.hi, num.bias_lo, num.bias_hi, pitch,
        STAGES=s.stages, SLOTS=s.slots, LATE=s.late, ADD=s.add, TABLE=table is not None, SLOPES=x.slopes is not None, GRAD=wants_bias,
        SLOPES_GRAD=wants_slopes, WINDOW=left is not None,
        PADDED=x.key_mask is not None, DOCS=x.doc_q is not None,
        CONSUMER_REGISTERS=s.registers[0], ADDER_REGISTERS=s.registers[1], REGISTERS=s.registers[2], num_warps=4,
    )  # fmt: skip
    launch(
        finish, batch * heads * q_tiles, sums, view(dq), heads, q_length, scale, size, s.queries, s.add == 3, num_warps=4
    )  # fmt: skip
    return parts if wants_bias else None, d_slopes if wants_slopes else None


def _describe_sums(x: Tensor, size: int, queries: int) -> TensorDescriptor:
    """dq's sums in blocks of a tile, [channels, queries]."""
    block = [size, queries]
    rows = x.numel() // queries
    return TensorDescriptor(x, [rows, queries], [queries, 1], block, gl.NVMMASharedLayout(128, 32, 2))
