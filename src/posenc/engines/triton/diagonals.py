"""Sums of a tile along its diagonals: the gradient of a bias table, one number per distance, in registers.

All pairs of a diagonal have one distance r = j - i + offset. Rolling row i of a tile by i turns diagonals into columns
(a tile of 4 keys and 4 queries; the digit is j - i):

     0  1  2  3                0  1  2  3
    -1  0  1  2    roll row i   0  1  2 -1
    -2 -1  0  1    by i         0  1 -2 -1
    -3 -2 -1  0                0 -3 -2 -1
                       column c has the distances c (not wrapped) and c - 4 (wrapped once)

With twice as many queries as keys a row wraps up to two times, so column c has three sums: of c - 2 W, c - W and c, W being
the tile's width. The loop goes over key tiles from left to right, and the next tile is W keys further: its sums of c - 2 W
are distances to which this tile contributes c - W. So two vectors of W sums wait for the next tiles, and each step
finishes and stores W distances. Nothing is added atomically.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_diagonals(ds, pending_0, pending_1, WIDTH: tl.constexpr):
    """ds [BLOCK_M, WIDTH] -> sums of the distances c - 2 WIDTH (complete), c - WIDTH and c, for the columns c."""
    rows, columns = tl.arange(0, ds.shape[0])[:, None], tl.arange(0, WIDTH)[None, :]
    source = (columns + rows) % WIDTH
    rolled = tl.gather(ds, source, 1)  # [row, c] comes from the column with column - row = c + wrap
    wrap = source - rows - columns
    complete = pending_0 + tl.sum(tl.where(wrap == -2 * WIDTH, rolled, 0.0), 0)
    next_0 = pending_1 + tl.sum(tl.where(wrap == -WIDTH, rolled, 0.0), 0)
    next_1 = tl.sum(tl.where(wrap == 0, rolled, 0.0), 0)
    return complete, next_0, next_1


@triton.jit
def store_diagonals(ptr, r, sums, lo, hi, enabled, WIDTH: tl.constexpr):
    """Store the sums of the distances r .. r + WIDTH that lie strictly between lo and hi; the ends are summed elsewhere."""
    step = r + tl.arange(0, WIDTH)
    tl.store(ptr + (step - lo), sums, mask=(step > lo) & (step < tl.where(enabled, hi, lo)))
