"""Layout: which tokens of a sequence each rank holds, and which pairs of two segments are visible.

Slots of L = 12 tokens on N = 3 ranks:

    balance="none"      rank 0   0 1 2 3        rank 1   4 5 6 7        rank 2   8 9 10 11
    balance="zigzag"    rank 0   0 1 | 10 11    rank 1   2 3 | 8 9      rank 2   4 5 | 6 7
    balance="striped"   rank 0   0 3 6 9        rank 1   1 4 7 10       rank 2   2 5 8 11

A causal query at slot i has i + 1 keys: without balance the last rank has twice the average work. Every part is made of
`Segment`s, slots start, start + step, ..., so causality and windows between two segments are causality and a window again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Balance = Literal["none", "zigzag", "striped"]
BALANCES = ("none", "zigzag", "striped")


class Segment(NamedTuple):
    """Tokens at the slots start, start + step, ..., and where they lie among the rank's own tokens."""

    start: int
    step: int
    length: int
    first: int  # of the rank's tokens

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.length)


def segments_of(rank: int, size: int, local: int, balance: Balance) -> tuple[Segment, ...]:
    """The pieces of the `local` tokens that a rank holds."""
    if balance == "striped" and size > 1:
        return (Segment(rank, size, local, 0),)
    if balance == "zigzag" and size > 1:
        half = local // 2
        return Segment(rank * half, 1, half, 0), Segment((2 * size - 1 - rank) * half, 1, half, half)
    return (Segment(rank * local, 1, local, 0),)


def unit(size: int, balance: Balance) -> int:
    """A length must be a multiple of this."""
    return 2 * size if balance == "zigzag" and size > 1 else size


def slots_of(rank: int, size: int, local: int, balance: Balance, device=None) -> Tensor:
    """The slots of a rank's tokens, in its order, [local]."""
    pieces = segments_of(rank, size, local, balance)
    return torch.cat([torch.arange(s.length, device=device) * s.step + s.start for s in pieces])


def restore_order(x: Tensor, size: int, balance: Balance, dim: int) -> Tensor:
    """Tokens of all ranks, one rank after another along `dim`, in the order of the sequence."""
    if balance == "none" or size == 1:
        return x
    local = x.shape[dim] // size
    if balance == "striped":
        return x.unflatten(dim, (size, local)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    halves = x.unflatten(dim, (size, 2, local // 2))
    return torch.cat((halves.select(dim + 1, 0), halves.select(dim + 1, 1).flip(dim)), dim).flatten(dim, dim + 1)


def take_order(x: Tensor, size: int, balance: Balance, dim: int) -> Tensor:
    """The inverse: tokens in the order of the sequence, as those of one rank after another."""
    if balance == "none" or size == 1:
        return x
    local = x.shape[dim] // size
    if balance == "striped":
        return x.unflatten(dim, (local, size)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    halves = x.unflatten(dim, (2, size, local // 2))
    first, second = halves.select(dim, 0), halves.select(dim, 1).flip(dim)
    return torch.stack((first, second), dim + 1).flatten(dim, dim + 2)


class Visible(NamedTuple):
    """The part of a pair of segments that is not masked throughout, and the window within it, as `attend` takes both:
    aligned at the last query and the last key."""

    queries: slice
    keys: slice
    window: tuple[int | None, int | None] | None


def visible_part(q: Segment, k: Segment, left: int | None, right: int | None) -> Visible | None:
    """Which queries see which keys where key slot - query slot lies in [-left, right]; None: no pair does.

    Query i and key j of the two segments are D + step (j - i) slots apart. `attend` aligns the ends: o = j - i - (lk - lq).
    Cutting keys or queries off the end changes that alignment, so that `attend` can express a window that begins past the
    diagonal. What is cut off has no visible key, or is not visible.
    """
    assert q.step == k.step
    lq, lk, step = q.length, k.length, q.step
    if not lq or not lk:
        return None
    distance = k.start - q.start
    hi = lk - 1 if right is None else min((right - distance) // step, lk - 1)
    lo = 1 - lq if left is None else max(-((left + distance) // step), 1 - lq)
    if hi < 1 - lq or lo > lk - 1 or lo > hi:
        return None
    shift = lk - lq
    if hi < shift:
        lk, shift = lq + hi, hi
    if lo > shift:
        lq, shift = lk - lo, lo
    first_query, first_key = max(0, -hi), max(0, lo)
    if lq <= first_query or lk <= first_key:
        return None
    # limits that mask nothing are left out
    sides = (None if lo <= first_key - (lq - 1) else shift - lo, None if hi >= lk - 1 - first_query else hi - shift)
    return Visible(slice(first_query, lq), slice(first_key, lk), None if sides == (None, None) else sides)
