"""SkewedBuffer: the same memory indexed by (row, distance) and by (row, key), without a copy.

    buffer [X, R, W]: row i, distance step t        scores() [X, R, K]: row i, key j,  t = j - i + R - 1

        t   0 1 2 3 4                                   j   0 1 2
     i = 0  . . a b c        strides (W, 1)          i = 0  a b c        strides (W - 1, 1), from R - 1
         1  . d e f .                                    1  d e f
         2  g h i .  .                                   2  g h i

Distances are columns of the first view and diagonals of the second: a table fills columns, a matrix product fills
scores, a gradient sums columns. The corners (.) belong to no query-key pair.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .band import TableRows


def padded_stride(count: int) -> int:
    """A row stride that is neither a power of two nor next to one (cache sets would collide)."""
    return (count + 31) // 16 * 16 + 8


class SkewedBuffer:
    """A buffer for `heads` × `rows` × `keys` scores, allocated once and reused for smaller blocks."""

    def __init__(self, heads: int, rows: int, keys: int, like: Tensor):
        self.stride = padded_stride(rows + keys - 1)
        self.step = rows * self.stride
        self.heads, self.rows, self.keys = heads, rows, keys
        self.memory = torch.empty(heads * self.step, dtype=like.dtype, device=like.device)

    def holds(self, heads: int, rows: int, keys: int) -> bool:
        return heads <= self.heads and rows <= self.rows and rows + keys <= self.rows + self.keys

    def distances(self, heads: int, rows: int, keys: int) -> Tensor:
        """[X, R, R + K - 1]"""
        return self.memory.as_strided((heads, rows, rows + keys - 1), (self.step, self.stride, 1))

    def scores(self, heads: int, rows: int, keys: int) -> Tensor:
        """[X, R, K]"""
        return self.memory.as_strided((heads, rows, keys), (self.step, self.stride - 1, 1), rows - 1)


def clear_corners(distances: Tensor, keys: int) -> None:
    """Zero the corners of [X, R, R + K - 1]."""
    rows = distances.shape[1]
    if rows > 1:
        left, right = _corners(rows, distances.device)
        distances[:, :, : rows - 1].masked_fill_(left, 0.0)
        distances[:, :, keys:].masked_fill_(right, 0.0)


@lru_cache(maxsize=16)
def _corners(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    steps = torch.arange(rows, device=device)
    left = steps[:, None] + steps[None, :-1] < rows - 1
    return left, ~left


def fill(buffer: Tensor, table: Tensor, table_rows: TableRows) -> None:
    """buffer [X, R, count] <- table [X, R or 1, last - first], its ends repeated."""
    before, first, last, after = table_rows
    middle = buffer.shape[2] - after
    if before:
        buffer[:, :, :before] = table[:, :, :1]
    buffer[:, :, before:middle] = table
    if after:
        buffer[:, :, middle:] = table[:, :, -1:]


def fold(buffer: Tensor, table_rows: TableRows) -> Tensor:
    """The transpose of `fill`: [X, R, count] -> [X, R, last - first], what was repeated is summed."""
    before, first, last, after = table_rows
    if not before and not after:
        return buffer
    middle = buffer.shape[2] - after
    table = buffer[:, :, before:middle].clone()
    if before:
        table[:, :, 0] += buffer[:, :, :before].sum(-1)
    if after:
        table[:, :, -1] += buffer[:, :, middle:].sum(-1)
    return table
