"""Which blocks of keys a program of the Gluon backward kernel takes, and the order of their tiles of queries (drawn in backward.py)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .kernel import near_tile

KEY_CONSUMERS = gl.constexpr(2)  # of a block of keys
OWN = gl.constexpr(64)  # keys of a consumer
KEYS = gl.constexpr(128)  # of a block
LEFT = gl.constexpr(0)  # copies of lse, by tile
RIGHT = gl.constexpr(1)
NEAR = gl.constexpr(2)


@gluon.jit
def grid(x):
    """The row and the column of each element of a tile."""
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    return gl.expand_dims(row, 1), gl.expand_dims(column, 0)


@gluon.jit
def count_turns(order_ptr, width):
    """How many blocks a program takes."""
    return gl.load(order_ptr + gl.program_id(0) * width)


@gluon.jit
def find_keys(order_ptr, width, turn, blocks):
    """The head of keys (of all batch rows) and the block that a program takes in its turn (backward_launch.order_blocks)."""
    index = gl.load(order_ptr + gl.program_id(0) * width + 1 + turn)
    return index // blocks, index % blocks


@gluon.jit
def far_query_tile(t, begin, end, block, blocks):
    """The t-th of the tiles begin .. end. Each block of keys begins at another one, so that blocks of one head, which run at the
    same time, do not all add to the same dQ."""
    t += block * (end - begin) // blocks
    return begin + t - gl.where(t >= end - begin, end - begin, 0)


@gluon.jit
def find_queries(t, first, right0, right1, left0, left1, block, blocks):
    """The t-th tile, and which copy of lse it needs."""
    right = right1 - right0
    far = right + left1 - left0
    near = near_tile(t - far, first, right0, right1, left0, left1)
    far_left = far_query_tile(t - right, left0, left1, block, blocks)
    tile = gl.where(t < right, far_query_tile(t, right0, right1, block, blocks), gl.where(t < far, far_left, near))
    return tile, gl.where(t < right, RIGHT, gl.where(t < far, LEFT, NEAR))
