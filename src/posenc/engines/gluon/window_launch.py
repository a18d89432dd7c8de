"""Launch the Gluon kernel with a content term: tiles, padding and descriptors as in launch.py, and the table with its ends repeated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.arguments import Inputs, Numbers
from ..triton.band_layout import Band
from ..triton.launch import make_masks, position_args
from ..triton.launcher import Launch
from . import bad_strides
from .kernel import CONSUMERS, NUMBERS, ROWS
from .launch import ELEMENTS, LOG2E, NO_LIMIT, REGISTERS, _describe, _rows
from .prepare import prepare
from .window import CHUNK, SIDE, forward_content

SHARED = 232448 - 1024  # bytes of shared memory that a program may have, less the barriers


class WindowTile(NamedTuple):
    keys: int
    stages: int  # tiles of keys and values that the producer may be ahead
    windows: int  # of the table


def choose_tile(size: int, width: int, has_states: bool, has_keys_term: bool = False) -> WindowTile | None:
    """The deepest that fits in shared memory, or None; width: of the table's rows. A column term leaves no registers for 128 keys."""
    keys, width = 128 if size == 64 and not has_keys_term else 64, _channels(width)
    rest = 2 * ROWS.value * CONSUMERS.value * (2 * size + width * has_states)  # bytes of queries, output and states
    for tile in (WindowTile(keys, 4, 1), WindowTile(keys, 3, 1), WindowTile(keys, 2, 1)):
        ring = 2 * (tile.stages * 2 * keys * size + tile.windows * (keys + 3 * CHUNK.value) * width)
        if rest + ring <= SHARED:
            return tile
    return None


def run_forward(
    launch: Launch, x: Inputs, num: Numbers, scale: float, out: Tensor, lse: Tensor, tile: WindowTile | None = None, cols: Band | None = None
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """launch.run_forward, with a row term. A bias, if there is one, has the same distances, and so has the band of a column term."""
    q, k, v = x.q, x.k, x.v
    states = q if x.states is None else x.states
    if bad_strides(states):  # as of states that the batch shares
        states = states.contiguous()
    batch, heads, q_length, size = q.shape
    k_length, group = k.shape[2], heads // k.shape[1]
    tile = tile or choose_tile(size, states.shape[3], x.states is not None, cols is not None)
    queries = ROWS.value * CONSUMERS.value
    count = -(-q_length // queries)

    lo, hi = num.rows_lo, num.rows_hi
    width = hi - lo + 1 + 2 * SIDE.value
    batch_rows = 1 if x.key_mask is None and x.doc_q is None and x.starts is None else batch
    tiles = lse.new_empty(batch_rows, count, NUMBERS.value, dtype=torch.int32)
    bias = None if x.bias is None else lse.new_empty(heads, width)
    bits = None
    if x.key_mask is not None:
        bits = lse.new_empty(x.key_mask.shape[0], -(-k_length // tile.keys), 8, dtype=torch.int32)
    left, right = (None if limit < 0 else limit for limit in (num.left, num.right))
    programs = batch_rows * count, 0 if bias is None else heads, 0 if bits is None else bits.shape[0] * bits.shape[1]
    launch(
        prepare, sum(programs), tiles, programs[0], count, position_args(x), make_masks(x), q_length, k_length, num.offset, left, right,
        num.lo, num.hi, x.bias, 0 if x.bias is None else x.bias.stride(0), num.bias_lo, num.bias_hi, bias, programs[1], lo - SIDE.value, width, scale,
        bits, queries, tile.keys, 512,
    )  # fmt: skip

    table = x.table.to(q.dtype)
    first, last = (end.expand(-1, SIDE.value, -1) for end in (table[:, :1], table[:, -1:]))
    table = torch.cat((first, table, last), 1)
    masks, mask_rows = zip(*(_rows(y, lse) for y in (bits, x.doc_q, x.doc_k, x.doc_q_keys)), strict=True)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    section = batch * heads if num.right == 0 else 1
    launch(
        forward_content, min(batch * heads * count, processors), _describe(q, ROWS.value), _describe(k, tile.keys), _describe(v, tile.keys),
        _describe(out, ROWS.value), _describe_states(states), _describe_table(table), lse, tiles, lse if bias is None else bias,
        *((lse, q, 0, 0, 0, 0, 0, 0) if cols is None else (cols.ends, cols.ptr, cols.rows, cols.h, cols.pitch, cols.origin, cols.lo, cols.hi)), *masks,
        scale * LOG2E, q_length, k_length, heads, group, batch * heads, section, NO_LIMIT if left is None else left,
        NO_LIMIT if right is None else right, 0 if batch_rows == 1 else count * NUMBERS.value, table.shape[0], width, *mask_rows, lo, hi,
        STAGES=tile.stages, WINDOWS=tile.windows, STATES=x.states is not None, BIAS=bias is not None, COLS=cols is not None, WINDOW=left is not None,
        PADDED=bits is not None, DOCS=x.doc_q is not None, CONSUMER_REGISTERS=REGISTERS[0], PRODUCER_REGISTERS=REGISTERS[1], num_warps=4,
    )  # fmt: skip
    return out, lse, None


def _describe_states(states: Tensor) -> TensorDescriptor:
    """states [B, H, Lq, E], like queries. Channels after the last are copied as zeros."""
    made = _describe(states, ROWS.value)
    block = [*made.block_shape[:3], _channels(states.shape[3])]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[states.dtype])
    return TensorDescriptor(states, made.shape, made.strides, block, layout)


def _describe_table(table: Tensor) -> TensorDescriptor:
    """table [H or 1, rows, E] in chunks."""
    block = [1, CHUNK.value, _channels(table.shape[2])]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[table.dtype])
    return TensorDescriptor(table, list(table.shape), list(table.stride()), block, layout)


def _channels(width: int) -> int:
    """At least 32: ptxas serialises all products where one has a single step of 16 channels (C7514)."""
    return max(width, 32)
