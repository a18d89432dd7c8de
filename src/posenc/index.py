"""Distance -> table row, with a span: outside [lo, hi] every index is constant.

r = p_k - p_q          -3 -2 -1  0  1  2  3
clip(2, 1) row          0  0  1  2  3  3  3        lo = -2, hi = 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import formulas
from .constants import constant
from .where import Where


@dataclass(frozen=True)
class Index:
    """row = rows[clamp(r, lo, hi) - lo], r = p_k - p_q on `axis`; rows=None is the identity.

    A plain value: the rows are Python integers, so an index is hashable, exact, and on no device.
    `n` is the number of table rows it may name.
    """

    lo: int
    hi: int
    rows: tuple[int, ...] | None = None
    n: int = 0
    axis: int = 0

    def __post_init__(self):
        if self.lo > self.hi:
            raise ValueError(f"an index spans lo <= hi, got lo={self.lo}, hi={self.hi}")
        span = self.hi - self.lo + 1
        if self.rows is not None and len(self.rows) != span:
            raise ValueError(f"an index over [{self.lo}, {self.hi}] needs {span} rows, got {len(self.rows)}")
        if self.n == 0:
            object.__setattr__(self, "n", span if self.rows is None else max(self.rows) + 1)

    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")  # an index is a key of caches at every call
        if found is None:
            found = hash((self.lo, self.hi, self.rows or (), self.n, self.axis))
            object.__setattr__(self, "_hash", found)
        return found

    @property
    def span(self) -> int:
        """How many distances it tells apart."""
        return self.hi - self.lo + 1

    def rows_on(self, device: torch.device) -> Tensor | None:
        """The rows as an int64 tensor [span], or None for the identity."""
        return None if self.rows is None else constant(self.rows, device)

    def look(self, r: Tensor) -> Tensor:
        """Rows of the distances r, same shape."""
        steps = r.clamp(self.lo, self.hi) - self.lo
        rows = self.rows_on(r.device)
        return steps if rows is None else rows[steps]

    def expand(self, table: Tensor, dim: int) -> Tensor:
        """The table with one row for each distance lo .. hi along `dim`: buckets become a plain clip."""
        rows = self.rows_on(table.device)
        return table if rows is None else table.index_select(dim, rows)

    def rows_of(self, distance: Callable[[int], Tensor]) -> Tensor:
        """Rows where distance(axis) gives the distances on each axis."""
        return self.look(distance(self.axis))

    def of(self, where: Where, device, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Table row of every pair (or of a block of pairs): [Lq, Lk] or [B, Lq, Lk]."""
        return self.rows_of(lambda axis: where.distance(device, axis, rows, columns))


@dataclass(frozen=True)
class Grid:
    """Row-major product of one index per axis: row = (row_0 * n_1 + row_1) * n_2 + ... (Swin's windows)."""

    parts: tuple[Index, ...]

    @property
    def n(self) -> int:
        product = 1
        for part in self.parts:
            product *= part.n
        return product

    def rows_of(self, distance: Callable[[int], Tensor]) -> Tensor:
        result = None
        for part in self.parts:
            row = part.rows_of(distance)
            result = row if result is None else result * part.n + row
        assert result is not None
        return result

    def of(self, where: Where, device, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        return self.rows_of(lambda axis: where.distance(device, axis, rows, columns))


def exact(where: Where, *, axis: int = 0, most: int | None = None, future: bool = True) -> Index:
    """One row for each distance that occurs; `most` clamps |r|; future=False gives every r > 0 the row of 0."""
    lo, hi = where.axis(axis).reach
    if most is not None:
        if most < 0:
            raise ValueError(f"distances cannot be clamped to {most}; give 0 or more")
        lo, hi = max(lo, -most), min(hi, most)
        lo, hi = min(lo, most), max(hi, -most)
    if not future:
        lo, hi = min(lo, 0), min(hi, 0)
    return Index(lo, hi, axis=axis)


def clip(left: int, right: int, *, axis: int = 0) -> Index:
    """clamp(r, -left, right): left + 1 + right rows."""
    if left < 0 or right < 0:
        raise ValueError(f"clip distances must be 0 or more, got left={left}, right={right}")
    return Index(-left, right, axis=axis)


def log_buckets(buckets: int, max_distance: int, *, causal: bool, axis: int = 0) -> Index:
    """T5's buckets."""
    lo, hi, rows = formulas.t5_rows(buckets, max_distance, causal)
    return Index(lo, hi, rows, buckets, axis)


def deberta_buckets(
    size: int, max_distance: int | None = None, *, reversed_sign: bool = False, axis: int = 0
) -> Index:
    """DeBERTa's 2 * size rows of query - key; without max_distance v1's plain clip."""
    lo, hi, rows = formulas.deberta_rows(size, max_distance, reversed_sign)
    return Index(lo, hi, rows, 2 * size, axis)
