"""Band: where the positional terms of contiguous positions vary, as whole numbers.

    query slot i, key slot j:   r = j - i + offset            outside [lo, hi] every term is that of the nearest end

            keys ->      | far left |  band  | far right |    of one block of query rows
    rows i0 .. i1-1      | constant | varies | constant  |

Limits (causality, windows) are by slot: -left <= j - i - (Lk - Lq) <= right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from . import sizes


class Tile(NamedTuple):
    """Rows [i0, i1) against keys [j0, j1). kind: -1 far left, 0 band, 1 far right."""

    i0: int
    i1: int
    j0: int
    j1: int
    kind: int


class Pieces(NamedTuple):
    """How `count` distances from r0 on map to table rows: `before` times row `first`, rows first .. last-1 one by one,
    `after` times row last - 1. before + (last - first) + after = count."""

    before: int
    first: int
    last: int
    after: int


@dataclass(frozen=True)
class Band:
    q_length: int
    k_length: int
    offset: int
    lo: int
    hi: int
    left: int | None = None
    right: int | None = None

    @property
    def limited(self) -> bool:
        return self.left is not None or self.right is not None

    def visible(self, i0: int, i1: int, a: int, c: int) -> tuple[int, int]:
        """Keys of [a, c) that some of the rows may see."""
        diagonal = self.k_length - self.q_length
        a = a if self.left is None else max(a, i0 + diagonal - self.left)
        c = c if self.right is None else min(c, i1 + diagonal + self.right)
        return a, max(a, c)

    def common(self, i0: int, i1: int, a: int, c: int) -> tuple[int, int]:
        """Keys of [a, c) that all of the rows may see."""
        diagonal = self.k_length - self.q_length
        a = a if self.left is None else max(a, i1 - 1 + diagonal - self.left)
        c = c if self.right is None else min(c, i0 + 1 + diagonal + self.right)
        return a, max(a, c)

    def blocks(self) -> list[tuple[int, int]]:
        """The query rows in blocks of nearly one size; smaller ones inside a window."""
        block = sizes.BLOCK if self.left is None else sizes.SMALL
        count = max(1, (self.q_length + block // 2) // block)
        size = -(-self.q_length // count)
        return [(i, min(i + size, self.q_length)) for i in range(0, self.q_length, size)]

    @property
    def far(self) -> tuple[bool, bool]:
        """Whether some pair is far left, and whether one is far right."""
        slot = self.offset + self.k_length - self.q_length  # r of slot distance 0
        lowest, highest = self.offset - self.q_length + 1, self.offset + self.k_length - 1
        if self.left is not None:
            lowest = max(lowest, slot - self.left)
        if self.right is not None:
            highest = min(highest, slot + self.right)
        return lowest < self.lo, highest > self.hi

    def tiles(self, i0: int, i1: int, a: int, c: int, far: bool, fine: bool = False) -> list[Tile]:
        """Rows [i0, i1) against the keys of [a, c): each visible pair is in one tile.

        far: far keys get tiles of their own. fine: the band is cut into small blocks of rows, so that its tiles
        have few far pairs. Rows of two tiles are the same, or one's are among the other's.
        """
        va, vc = self.visible(i0, i1, a, c)
        ca, cc = self.common(i0, i1, va, vc)
        if va >= vc:
            return []
        if i1 - i0 < sizes.FEW:
            return [Tile(i0, i1, va, vc, 0)]
        large = i1 - i0 > sizes.SMALL
        diagonal = cc < vc and ca == va and large
        if diagonal:
            cc -= 1  # so that every row has a key left beyond the common ones
        tiles, start, stop = [], va, vc
        if far and ca == va:  # no window ends inside these rows
            end = min(cc, i0 + self.lo - self.offset + 1)
            if end - va >= sizes.FAR:
                tiles.append(Tile(i0, i1, va, end, -1))
                start = end
        if far and cc == vc:
            end = max(ca, i1 - 1 + self.hi - self.offset, start)
            if vc - end >= sizes.FAR:
                tiles.append(Tile(i0, i1, end, vc, 1))
                stop = end
        if not diagonal and not (fine and large):
            return [Tile(i0, i1, start, stop, 0), *tiles] if start < stop else tiles
        if diagonal and not tiles and not fine and cc - va >= sizes.FAR:
            tiles.append(Tile(i0, i1, va, cc, 0))
            start = cc
        for i in range(i0, i1, sizes.SMALL):
            tiles += self.tiles(i, min(i + sizes.SMALL, i1), start, stop, far and fine)
        return tiles

    def inner(self, tile: Tile) -> tuple[int, int]:
        """The keys of a tile where the terms vary or the limits cut; the others are far left and far right."""
        ca, cc = self.common(tile.i0, tile.i1, tile.j0, tile.j1)
        left = tile.j0 if ca > tile.j0 else min(cc, tile.i0 + self.lo - self.offset + 1)
        left = min(max(left, tile.j0), tile.j1)
        right = tile.j1 if cc < tile.j1 else max(ca, tile.i1 - 1 + self.hi - self.offset)
        return left, min(max(right, left), tile.j1)

    def first_distance(self, i1: int, j0: int) -> int:
        """The smallest r of a tile: its last row against its first key."""
        return j0 - (i1 - 1) + self.offset

    def pieces(self, r0: int, count: int) -> Pieces:
        """Distances r0 .. r0 + count - 1 as table rows."""
        first = min(max(r0, self.lo), self.hi) - self.lo
        last = min(max(r0 + count - 1, self.lo), self.hi) - self.lo + 1
        before = min(max(self.lo - r0, 0), count - 1)
        return Pieces(before, first, last, count - before - (last - first))

    def forbidden(self, r0: int, count: int) -> tuple[int, int]:
        """(n, m): the first n and all from m on of the distances r0 .. are outside the limits."""
        slot = self.offset + self.k_length - self.q_length  # r of slot distance 0
        n = 0 if self.left is None else min(max(slot - self.left - r0, 0), count)
        m = count if self.right is None else min(max(slot + self.right + 1 - r0, 0), count)
        return n, m
