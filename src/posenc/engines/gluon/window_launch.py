"""Launch the Gluon kernel with a content term: tiles, padding and descriptors as in launch.py, and the table with its ends repeated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.arguments import Inputs, Numbers
from ..triton.band_layout import Band
from ..triton.launcher import Launch
from . import bad_strides
from .bands import can_copy, describe_band
from .kernel import CONSUMERS, ROWS
from .launch import ELEMENTS, _describe, describe_table, launch_forward
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
    states = x.q if x.states is None else x.states
    if bad_strides(states):  # as of states that the batch shares
        states = states.contiguous()
    tile = tile or choose_tile(x.q.shape[3], states.shape[3], x.states is not None, cols is not None)
    table = x.table.to(x.q.dtype)
    first, last = (end.expand(-1, SIDE.value, -1) for end in (table[:, :1], table[:, -1:]))
    table = torch.cat((first, table, last), 1)
    band, tiles_of_keys = (lse, x.q, 0, 0, 0, 0, 0, 0, 0), x.q  # unused
    copied = cols is not None and bool(num.wide) and x.q.shape[3] == 64 and can_copy(cols, x.q.shape[2])
    if cols is not None:
        band = (cols.ends, cols.ptr, cols.rows, cols.h, cols.pitch, cols.origin, cols.lo, cols.hi, cols.shift)
    if cols is not None and copied:
        tiles_of_keys = describe_band(cols, x.k.shape[2], x.q.shape[2], [tile.keys, ROWS.value])
    return launch_forward(
        launch, forward_content, x, num, scale, out, lse, tile.keys, (num.lo, num.hi), (num.rows_lo, num.rows_hi), SIDE.value,
        descriptors=(_describe_states(states), describe_table(table, CHUNK.value, _channels(table.shape[2])), tiles_of_keys), tables=band, table_heads=(table.shape[0],),
        STAGES=tile.stages, WINDOWS=tile.windows, STATES=x.states is not None, BIAS=x.bias is not None, COLS=cols is not None, COPIED=copied,
    )  # fmt: skip


def _describe_states(states: Tensor) -> TensorDescriptor:
    """states [B, H, Lq, E], like queries. Channels after the last are copied as zeros."""
    made = _describe(states, ROWS.value)
    block = [*made.block_shape[:3], _channels(states.shape[3])]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[states.dtype])
    return TensorDescriptor(states, made.shape, made.strides, block, layout)


def _channels(width: int) -> int:
    """At least 32: ptxas serialises all products where one has a single step of 16 channels (C7514)."""
    return max(width, 32)
