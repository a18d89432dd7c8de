"""Tables with one row for each distance: buckets become a plain clip. Deterministic in both directions."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core.constants import constant
from ...core.index import Index
from .functions import quick


def expand(table: Tensor, index: Index, lo: int, hi: int, dim: int) -> Tensor:
    """The table's row for each distance lo .. hi (which may reach past the index's own span) along `dim`."""
    if index.rows is None and (lo, hi) == (index.lo, index.hi):
        return table
    return quick(_Expand, table, index, lo, hi, dim)


@lru_cache(maxsize=256)
def _rows(index: Index, lo: int, hi: int) -> tuple[int, ...]:
    steps = [min(max(r, index.lo), index.hi) - index.lo for r in range(lo, hi + 1)]
    return tuple(steps) if index.rows is None else tuple(index.rows[step] for step in steps)


@lru_cache(maxsize=256)
def _readers(index: Index, lo: int, hi: int, n: int) -> tuple[int, int, tuple[int, ...], tuple[bool, ...] | None]:
    """Who reads each of the table's n rows: how many distances before and after these repeat the first and the last row; the
    other distances, as many for each row; and which of them are there to fill up, or None.

    Repeated ends are summed first, where a row with many readers would fill up all others."""
    rows = _rows(index, lo, hi)
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
    filled = tuple(place >= len(own) for own in readers for place in range(most))
    return before, after, sources, filled if any(filled) else None


class _Expand(torch.autograd.Function):
    """index_select whose gradient is a gather and a sum: the usual one adds atomically, in any order."""

    @staticmethod
    def forward(table: Tensor, index: Index, lo: int, hi: int, dim: int) -> Tensor:
        return table.index_select(dim, constant(_rows(index, lo, hi), table.device))

    @staticmethod
    def setup_context(ctx, inputs, output):
        table, *ctx.distances, ctx.dim = inputs
        ctx.n = table.shape[ctx.dim]

    @staticmethod
    def backward(ctx, grad: Tensor):
        dim = ctx.dim % grad.dim()
        before, after, sources, filled = _readers(*ctx.distances, ctx.n)
        if before or after:
            last = grad.shape[dim] - after
            whole, grad = grad, grad.narrow(dim, before, last - before).clone()
            if before:
                grad.narrow(dim, 0, 1).add_(whole.narrow(dim, 0, before).sum(dim, keepdim=True))
            if after:
                grad.narrow(dim, grad.shape[dim] - 1, 1).add_(whole.narrow(dim, last, after).sum(dim, keepdim=True))
        picked = grad.index_select(dim, constant(sources, grad.device))
        if filled is not None:
            shape = [1] * picked.dim()
            shape[dim] = len(filled)
            picked = picked.masked_fill(constant(filled, grad.device).view(shape), 0.0)
        return picked.unflatten(dim, (ctx.n, -1)).sum(dim + 1), None, None, None, None
