"""BandGeometry: where the terms of contiguous positions vary (the band) and where they are constant (the far fields).

    query slot i, key slot j:   r = j - i + offset            outside [lo, hi] every term is that of the nearest end

            keys ->      | far left |  band  | far right |    of one block of query rows
    rows i0 .. i1-1      | constant | varies | constant  |

Limits (causality, windows) are by slot: -left <= j - i - (Lk - Lq) <= right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from . import block_sizes


class ScoreTile(NamedTuple):
    """Rows [i0, i1) against keys [j0, j1). kind: -1 far left, 0 band, 1 far right."""

    i0: int
    i1: int
    j0: int
    j1: int
    kind: int


class TableRows(NamedTuple):
    """How `count` distances from r0 on map to table rows: `before` times row `first`, rows first .. last-1 one by one,
    `after` times row last - 1. before + (last - first) + after = count."""

    before: int
    first: int
    last: int
    after: int


@dataclass(frozen=True)
class BandGeometry:
    """Lengths, offset, span and limits of one call: whole numbers, no tensors."""

    q_length: int
    k_length: int
    offset: int
    lo: int
    hi: int
    left: int | None = None
    right: int | None = None

    @property
    def is_limited(self) -> bool:
        return self.left is not None or self.right is not None

    def visible_keys(self, i0: int, i1: int, a: int, c: int) -> tuple[int, int]:
        """Keys of [a, c) that are visible to some of the rows."""
        diagonal = self.k_length - self.q_length
        a = a if self.left is None else max(a, i0 + diagonal - self.left)
        c = c if self.right is None else min(c, i1 + diagonal + self.right)
        return a, max(a, c)

    def fully_visible_keys(self, i0: int, i1: int, a: int, c: int) -> tuple[int, int]:
        """Keys of [a, c) that are visible to all of the rows."""
        diagonal = self.k_length - self.q_length
        a = a if self.left is None else max(a, i1 - 1 + diagonal - self.left)
        c = c if self.right is None else min(c, i0 + 1 + diagonal + self.right)
        return a, max(a, c)

    def blocks(self) -> list[tuple[int, int]]:
        """The query rows in blocks of nearly one size; smaller ones inside a window."""
        block = block_sizes.QUERY_BLOCK if self.left is None else block_sizes.EDGE_BLOCK
        count = max(1, (self.q_length + block // 2) // block)
        size = -(-self.q_length // count)
        return [(i, min(i + size, self.q_length)) for i in range(0, self.q_length, size)]

    @property
    def has_far_fields(self) -> tuple[bool, bool]:
        """Whether some visible key is far left of its query, and whether one is far right."""
        slot = self.offset + self.k_length - self.q_length  # r of slot distance 0
        lowest, highest = self.offset - self.q_length + 1, self.offset + self.k_length - 1
        if self.left is not None:
            lowest = max(lowest, slot - self.left)
        if self.right is not None:
            highest = min(highest, slot + self.right)
        return lowest < self.lo, highest > self.hi

    def tiles(self, i0: int, i1: int, a: int, c: int, far: bool, fine: bool = False) -> list[ScoreTile]:
        """Rows [i0, i1) against the keys of [a, c): each visible query-key pair is in exactly one tile.

        far: far keys get separate tiles. fine: the band is cut into small blocks of rows, so that its tiles hold few
        far keys. The rows of two tiles are equal, or one's are a subset of the other's.
        """
        va, vc = self.visible_keys(i0, i1, a, c)
        ca, cc = self.fully_visible_keys(i0, i1, va, vc)
        if va >= vc:
            return []
        if i1 - i0 < block_sizes.DECODE_ROWS:
            return [ScoreTile(i0, i1, va, vc, 0)]
        large = i1 - i0 > block_sizes.EDGE_BLOCK
        diagonal = cc < vc and ca == va and large
        if diagonal:
            cc -= 1  # so that every row has a visible key in the diagonal tiles
        tiles, start, stop = [], va, vc
        if far and ca == va:  # no window ends inside these rows
            end = min(cc, i0 + self.lo - self.offset + 1)
            if end - va >= block_sizes.MIN_FAR_KEYS:
                tiles.append(ScoreTile(i0, i1, va, end, -1))
                start = end
        if far and cc == vc:
            end = max(ca, i1 - 1 + self.hi - self.offset, start)
            if vc - end >= block_sizes.MIN_FAR_KEYS:
                tiles.append(ScoreTile(i0, i1, end, vc, 1))
                stop = end
        if not diagonal and not (fine and large):
            return [ScoreTile(i0, i1, start, stop, 0), *tiles] if start < stop else tiles
        if diagonal and not tiles and not fine and cc - va >= block_sizes.MIN_FAR_KEYS:
            tiles.append(ScoreTile(i0, i1, va, cc, 0))
            start = cc
        for i in range(i0, i1, block_sizes.EDGE_BLOCK):
            tiles += self.tiles(i, min(i + block_sizes.EDGE_BLOCK, i1), start, stop, far and fine)
        return tiles

    def varying_keys(self, tile: ScoreTile) -> tuple[int, int]:
        """The keys of a tile where the terms vary or the limits mask; the others are far left and far right."""
        ca, cc = self.fully_visible_keys(tile.i0, tile.i1, tile.j0, tile.j1)
        left = tile.j0 if ca > tile.j0 else min(cc, tile.i0 + self.lo - self.offset + 1)
        left = min(max(left, tile.j0), tile.j1)
        right = tile.j1 if cc < tile.j1 else max(ca, tile.i1 - 1 + self.hi - self.offset)
        return left, min(max(right, left), tile.j1)

    def first_distance(self, i1: int, j0: int) -> int:
        """The smallest r of a tile: its last row against its first key."""
        return j0 - (i1 - 1) + self.offset

    def table_rows(self, r0: int, count: int) -> TableRows:
        """Distances r0 .. r0 + count - 1 as table rows."""
        first = min(max(r0, self.lo), self.hi) - self.lo
        last = min(max(r0 + count - 1, self.lo), self.hi) - self.lo + 1
        before = min(max(self.lo - r0, 0), count - 1)
        return TableRows(before, first, last, count - before - (last - first))

    def masked_ends(self, r0: int, count: int) -> tuple[int, int]:
        """(n, m): of the distances from r0 on, the first n and those from m on are outside the limits."""
        slot = self.offset + self.k_length - self.q_length  # r of slot distance 0
        n = 0 if self.left is None else min(max(slot - self.left - r0, 0), count)
        m = count if self.right is None else min(max(slot + self.right + 1 - r0, 0), count)
        return n, m
