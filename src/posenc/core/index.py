"""Distance -> table row, with a span: outside [lo, hi] every index is constant.

r = p_k - p_q          -3 -2 -1  0  1  2  3
clip(2, 1) row          0  0  1  2  3  3  3        lo = -2, hi = 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from . import formulas
from .constants import constant
from .options import require_int
from .positions import WHOLE, Positions
from .printing import short_repr


@dataclass(frozen=True)
class Index:
    """row = rows[clamp(r, lo, hi) - lo], r = p_k - p_q on `axis`; rows=None is the identity.

    A plain value: the rows are Python integers, so an index is hashable, exact, and on no device.
    `n` is the number of table rows it may name.

    Raises ValueError where lo > hi or rows are missing.

        >>> posenc.Index(-2, 2).lookup(torch.arange(-4, 5))  # distances [n] -> rows [n]
        tensor([0, 0, 0, 1, 2, 3, 4, 4, 4])
    """

    lo: int
    hi: int
    rows: tuple[int, ...] | None = None
    n: int = 0
    axis: int = 0
    __repr__ = short_repr

    def __post_init__(self):
        for name in ("lo", "hi", "n", "axis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, WHOLE):
                raise TypeError(f"{name}={value!r} of an index must be an integer")
        if self.lo > self.hi:
            raise ValueError(f"an index spans lo <= hi, got lo={self.lo}, hi={self.hi}")
        if self.axis < 0:
            raise ValueError(f"axis={self.axis} of an index must be 0 or more")
        last = self.span - 1 if self.rows is None else self._check_rows(self.span)
        if self.n == 0:
            object.__setattr__(self, "n", last + 1)
        elif last >= self.n:
            raise ValueError(f"an index names row {last} of a table with n={self.n} rows; give n > {last}, or no n")

    def _check_rows(self, span: int) -> int:
        """Rows become a tuple of integers; returns the largest."""
        rows = self.rows
        if isinstance(rows, list):
            rows = tuple(rows)
            object.__setattr__(self, "rows", rows)
        if not isinstance(rows, tuple):
            raise TypeError(f"rows of an index must be a tuple of integers, got {type(self.rows).__name__}")
        if len(rows) != span:
            raise ValueError(f"an index over [{self.lo}, {self.hi}] needs {span} rows, got {len(rows)}")
        if not torch.compiler.is_compiling() and set(map(type, rows)) != {int}:
            wrong = next(row for row in rows if type(row) is not int)
            raise TypeError(f"rows of an index must be integers, got {wrong!r}")
        if min(rows) < 0:
            raise ValueError(f"rows of an index must be 0 or more, got {min(rows)}")
        return max(rows)

    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")  # an index is a key of caches at every call
        if found is None:
            found = hash((self.lo, self.hi, self.rows or (), self.n, self.axis))
            object.__setattr__(self, "_hash", found)
        return found

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of positions that it reads."""
        return (self.axis,)

    @property
    def span(self) -> int:
        """Number of distances that it distinguishes."""
        return self.hi - self.lo + 1

    def distances_on(self, device: torch.device) -> Tensor:
        """The distances lo .. hi, [span]."""
        return torch.arange(self.lo, self.hi + 1, device=device)

    def rows_on(self, device: torch.device) -> Tensor | None:
        """The rows as an int64 tensor [span], or None for the identity."""
        return None if self.rows is None else constant(self.rows, device)

    def lookup(self, distances: Tensor) -> Tensor:
        """The table rows of `distances`, same shape."""
        steps = distances.clamp(self.lo, self.hi) - self.lo
        rows = self.rows_on(distances.device)
        return steps if rows is None else rows[steps]

    def rows_of(self, distance: Callable[[int], Tensor]) -> Tensor:
        """Rows where distance(axis) gives the distances on each axis."""
        return self.lookup(distance(self.axis))

    def of(self, positions: Positions, device, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Table row of every pair (or of a block of pairs): [Lq, Lk] or [B, Lq, Lk]."""
        return self.rows_of(lambda axis: positions.distance(device, axis, rows, columns))


@dataclass(frozen=True)
class Grid:
    """Row-major product of one index per axis: row = (row_0 * n_1 + row_1) * n_2 + ... (Swin's windows).

    Raises nothing itself: its parts are validated.

        >>> posenc.Grid((posenc.Index(-1, 1), posenc.Index(-2, 2, axis=1))).n
        15
    """

    parts: tuple[Index, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of positions that it reads."""
        return tuple(dict.fromkeys(part.axis for part in self.parts))

    @property
    def n(self) -> int:
        return prod(part.n for part in self.parts)

    def rows_of(self, distance: Callable[[int], Tensor]) -> Tensor:
        """Rows where distance(axis) gives the distances on each axis; the last index varies fastest."""
        first, *others = self.parts
        row = first.rows_of(distance)
        for part in others:
            row = row * part.n + part.rows_of(distance)
        return row

    def of(self, positions: Positions, device, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Table row of every pair (or of a block of pairs): [Lq, Lk] or [B, Lq, Lk]."""
        return self.rows_of(lambda axis: positions.distance(device, axis, rows, columns))


@dataclass(frozen=True, eq=False)
class Sparse(Grid):
    """Rows for a few distances far apart: row = the number of clamp(r, lo, hi) among the sorted `distances` [n].

    `parts` holds Index(lo, hi). Engines that need the structure of an Index take it for a grid.

    Raises nothing itself: `exact` makes it.

        >>> posenc.index.exact(posenc.Positions(torch.tensor([0, 10**6]))).n
        3
    """

    distances: Tensor

    @property
    def n(self) -> int:
        return self.distances.shape[0]

    def distances_on(self, device: torch.device) -> Tensor:
        return self.distances.to(device)

    def rows_of(self, distance: Callable[[int], Tensor]) -> Tensor:
        (part,) = self.parts
        r = distance(part.axis).clamp(part.lo, part.hi)
        known = self.distances.to(r.device)
        return torch.searchsorted(known, r.contiguous()).clamp(max=known.shape[0] - 1)


def exact(positions: Positions, *, axis: int = 0, most: int | None = None, future: bool = True) -> Index | Sparse:
    """One row for each distance; `most` clamps |r|; future=False gives every r > 0 the row of 0.

    Where positions jump, only distances that occur get a row: two tokens 10^6 apart need three.

    Raises OptionError for a negative `most`.

        >>> posenc.index.exact(posenc.Positions(4)).n  # distances -3 to 3
        7
    """
    one = positions.axis(axis)
    lo, hi = one.reach
    if most is not None:
        if most < 0:
            raise ValueError(f"distances cannot be clamped to {most}; give 0 or more")
        lo, hi = max(lo, -most), min(hi, most)
        lo, hi = min(lo, most), max(hi, -most)
    if not future:
        lo, hi = min(lo, 0), min(hi, 0)
    is_traced = torch.compiler.is_compiling()
    if is_traced:
        torch._check(lo <= hi)  # the tracer does not know the values of position tensors
    keeps = not is_traced and type(lo) is int and type(hi) is int
    index = _identity(lo, hi, axis) if keeps else Index(lo, hi, axis=axis)
    if one.offset is not None or is_traced or index.span <= max(DENSE, 8 * (one.q_length + one.k_length)):
        return index
    distances = _occurring(one, lo, hi)
    return index if distances is None or 2 * len(distances) > index.span else Sparse((index,), distances)


@lru_cache(maxsize=4096)
def _identity(lo: int, hi: int, axis: int) -> Index:
    """A layer asks for the same one in every call."""
    return Index(lo, hi, axis=axis)


DENSE = 2**14
"""Spans up to this size get a row for every distance without reading the positions, and so do positions with few gaps:
engines are fastest with an Index."""
PAIRS = 2**22
"""Distances sorted at a time."""


def _occurring(positions: Positions, lo: int, hi: int) -> Tensor | None:
    """The distances between queries and keys, clamped, sorted [n]; None where they cannot be read."""
    starts = [getattr(side, "start", side) for side in (positions.q, positions.k)]
    device = next((x.device for x in starts if isinstance(x, Tensor)), None)
    if device is None or device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    found = torch.empty(0, dtype=torch.int64, device=device)
    rows = max(PAIRS // max(positions.distance(device, rows=slice(1)).numel(), 1), 1)
    with torch.inference_mode(False), torch.no_grad():
        for start in range(0, positions.q_length, rows):
            block = positions.distance(device, rows=slice(start, start + rows))
            found = torch.unique(torch.cat((found, block.clamp(lo, hi).flatten())))
    return found


def restrict(index: Index, positions: Positions, table: Tensor) -> tuple[Index, slice]:
    """The index of the distances that can occur between these positions, and the table rows that it reads, so that only those
    need to be projected. All rows where the distances are not known without reading a tensor.

    Not on a GPU, where lengths must not change which kernels run. A part of a longer sequence keeps all rows, because the
    other parts use the same table.

    Returns rows of a table [.., n, ..] as a slice. Raises nothing.

        >>> posenc.index.restrict(posenc.index.clip(8, 8), posenc.Positions(3), torch.zeros(1))[1]
        slice(6, 11, None)
    """
    unknown = positions.offset is None or torch.compiler.is_compiling()
    if unknown or table.is_cuda or positions.has_total or index.axis != 0:
        return index, slice(None)
    lo, hi = positions.reach
    if positions.q_length == 1:  # a decoding step: the same rows for STEPS steps, so that results can be kept
        lo = lo // STEPS * STEPS
    return _restricted(index, min(max(lo, index.lo), index.hi), max(min(hi, index.hi), index.lo))


STEPS = 64
"""Decoding steps that read the same rows of a restricted table."""


@lru_cache(maxsize=256)
def _restricted(index: Index, lo: int, hi: int) -> tuple[Index, slice]:
    if index.rows is None:
        return Index(lo, hi), slice(lo - index.lo, hi - index.lo + 1)
    rows = index.rows[lo - index.lo : hi - index.lo + 1]
    first, last = min(rows), max(rows)
    return Index(lo, hi, tuple(row - first for row in rows), last - first + 1), slice(first, last + 1)


def clip(left: int, right: int, *, axis: int = 0) -> Index:
    """clamp(r, -left, right): left + 1 + right rows.

    Raises OptionError for negative bounds.

        >>> posenc.index.clip(2, 1).lookup(torch.arange(-3, 4))  # distances [n] -> rows [n]
        tensor([0, 0, 1, 2, 3, 3, 3])
    """
    require_int("the clip distance left", left)
    require_int("the clip distance right", right)
    return Index(-left, right, axis=axis)


def log_buckets(buckets: int, max_distance: int, *, causal: bool, axis: int = 0) -> Index:
    """T5's buckets.

    Raises OptionError for buckets that do not fit.

        >>> posenc.index.log_buckets(8, 32, causal=True).lookup(torch.tensor([-40, -5, 0]))  # distances [n] -> rows [n]
        tensor([7, 4, 0])
    """
    require_int("buckets", buckets, least=2)
    require_int("max_distance", max_distance, least=1)
    lo, hi, rows = formulas.t5_rows(buckets, max_distance, causal)
    return Index(lo, hi, rows, buckets, axis)


def deberta_buckets(size: int, max_distance: int | None = None, *, reversed_sign: bool = False, axis: int = 0) -> Index:
    """DeBERTa's 2 * size rows of query - key; without max_distance v1's plain clip.

    Raises OptionError for sizes that do not fit.

        >>> posenc.index.deberta_buckets(4, 16).lookup(torch.tensor([-20, 0, 20]))  # distances [n] -> rows [n]
        tensor([7, 4, 0])
    """
    require_int("buckets" if max_distance is not None else "max_distance", size, least=1)
    if max_distance is not None:
        require_int("max_distance", max_distance, least=1)
    lo, hi, rows = formulas.deberta_rows(size, max_distance, reversed_sign)
    return Index(lo, hi, rows, 2 * size, axis)
