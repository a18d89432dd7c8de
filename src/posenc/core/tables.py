"""Tables with one row for each distance.

index  rows 0 0 1 2 2          distance   lo  ..  hi
table  t0 t1 t2                expanded   t0 t0 t1 t2 t2
"""

from __future__ import annotations

from functools import lru_cache
from typing import overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from .constants import constant
from .index import Grid, Index
from .torch_modes import apply_function, cache_in_eager_mode


@overload
def add(a: Tensor | None, b: Tensor) -> Tensor: ...
@overload
def add(a: Tensor | None, b: Tensor | None) -> Tensor | None: ...
def add(a, b):
    """a + b, where None adds nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def expand_table(table: Tensor, index: Index | Grid, lo: int, hi: int) -> Tensor:
    """[X, n, ..] -> [X, hi - lo + 1, ..]: the table's row for each distance lo .. hi, which may reach past the index's span."""
    assert isinstance(index, Index)
    if index.rows is None and index.lo <= lo and hi <= index.hi:
        table = table if (lo, hi) == (index.lo, index.hi) else table[:, lo - index.lo : hi - index.lo + 1]
        # kernels read rows with contiguous numbers
        return table if table.stride(-1) == 1 else table.contiguous()
    if torch.compiler.is_compiling() and table.is_cpu:  # index_add is deterministic on a CPU
        return _select(table, index, lo, hi)
    return apply_function(_Expand, table, index, lo, hi)


def _select(table: Tensor, index: Index, lo: int, hi: int) -> Tensor:
    """For traced code, where lo and hi may depend on symbolic lengths."""
    return table.index_select(1, index.lookup(torch.arange(lo, hi + 1, device=table.device)))


def _within_span(grad: Tensor, index: Index, lo: int, hi: int) -> Tensor:
    """The gradient of the distances lo .. hi as one of index.lo .. index.hi, for traced code: no length is compared."""
    shape = (1, -1, *[1] * (grad.dim() - 2))
    steps = torch.arange(index.lo - lo, index.hi - lo + 1, device=grad.device)
    own = grad.index_select(1, steps.clamp(0, hi - lo))
    own = own.masked_fill(((steps < 0) | (steps > hi - lo)).view(shape), 0.0)
    given, kept = torch.arange(lo, hi + 1, device=grad.device).view(shape), steps.view(shape) + lo
    before = grad.masked_fill(given >= index.lo, 0.0).sum(1, keepdim=True)
    after = grad.masked_fill(given <= index.hi, 0.0).sum(1, keepdim=True)
    return own + before.masked_fill(kept != index.lo, 0.0) + after.masked_fill(kept != index.hi, 0.0)


@cache_in_eager_mode(maxsize=256)
def rows_of(index: Index, lo: int, hi: int) -> tuple[int, ...]:
    steps = [min(max(r, index.lo), index.hi) - index.lo for r in range(lo, hi + 1)]
    return tuple(steps) if index.rows is None else tuple(index.rows[step] for step in steps)


@cache_in_eager_mode(maxsize=256)
def _readers(index: Index, lo: int, hi: int, n: int) -> tuple[int, int, tuple[int, ...], tuple[bool, ...] | None]:
    """Which distances read each of the table's n rows: how many at the start and at the end repeat the first and the last
    row; the other distances, padded to the same number for each row; and which of those are padding, or None.

    Repeated ends are summed first, because every row is padded to the one with the most readers.
    """
    rows = rows_of(index, lo, hi)
    before, after = 0, 0
    while before + 1 < len(rows) and rows[before + 1] == rows[0]:
        before += 1
    while after + 1 < len(rows) - before and rows[-after - 2] == rows[-1]:
        after += 1
    if n * max(before, after) < 4 * len(rows):
        before, after = 0, 0
    readers: list[list[int]] = [[] for _ in range(n)]
    for step, row in enumerate(rows[before : len(rows) - after]):
        readers[row].append(step)
    most = max(1, max(map(len, readers)))
    sources = tuple(step for own in readers for step in own + [0] * (most - len(own)))
    filled = tuple(step >= len(own) for own in readers for step in range(most))
    return before, after, sources, filled if any(filled) else None


def select_rows(table: Tensor, index: Index, lo: int, hi: int) -> Tensor:
    """`expand_table` in eager code, inside functions that have a gradient of their own: `sum_rows`."""
    if index.rows is None and index.lo <= lo and hi <= index.hi:
        return table[:, lo - index.lo : hi - index.lo + 1]
    return table.index_select(1, _rows_on(index, lo, hi, table.device))


@lru_cache(maxsize=64)
def _rows_on(index: Index, lo: int, hi: int, device: torch.device) -> Tensor:
    """`constant`, found without reading each row."""
    return constant(rows_of(index, lo, hi), device)


def sum_rows(grad: Tensor, index: Index, lo: int, hi: int, n: int) -> Tensor:
    """[X, hi - lo + 1, ..] -> [X, n, ..]: the sum over the distances that read each row, in a fixed order."""
    if index.rows is None and index.lo <= lo and hi <= index.hi:  # a row for each distance
        first, last = lo - index.lo, n - (hi + 1 - index.lo)
        return pad(grad, (*[0, 0] * (grad.dim() - 2), first, last)) if first or last else grad
    before, after, sources, filled = _readers(index, lo, hi, n)
    if before or after:
        last = grad.shape[1] - after
        whole, grad = grad, grad[:, before:last].clone()
        if before:
            grad[:, :1] += whole[:, :before].sum(1, keepdim=True)
        if after:
            grad[:, -1:] += whole[:, last:].sum(1, keepdim=True)
    picked = grad.index_select(1, constant(sources, grad.device))
    if filled is not None:
        shape = [1] * picked.dim()
        shape[1] = len(filled)
        picked = picked.masked_fill(constant(filled, grad.device).view(shape), 0.0)
    return picked.unflatten(1, (n, -1)).sum(2)


class _Expand(torch.autograd.Function):
    """index_select along dim 1 whose gradient is a gather and a sum: PyTorch's own adds atomically, in any order."""

    @staticmethod
    def forward(table: Tensor, index: Index, lo: int, hi: int) -> Tensor:
        if torch.compiler.is_compiling():
            return _select(table, index, lo, hi)
        return table.index_select(1, constant(rows_of(index, lo, hi), table.device))

    @staticmethod
    def setup_context(ctx, inputs, output):
        table, *ctx.distances = inputs
        ctx.n = table.shape[1]

    @staticmethod
    def backward(ctx, grad: Tensor):
        index, lo, hi = ctx.distances
        if torch.compiler.is_compiling():
            grad, lo, hi = _within_span(grad, index, lo, hi), index.lo, index.hi
        return sum_rows(grad, index, lo, hi, ctx.n), None, None, None
