"""Tables with one row for each distance: buckets become a plain clip. Deterministic in both directions."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...constants import constant
from ...index import Index


def expand(table: Tensor, index: Index, lo: int, hi: int, dim: int) -> Tensor:
    """The table's row for each distance lo .. hi (which may reach past the index's own span) along `dim`."""
    rows = _rows(index, lo, hi)
    return table if rows is None else _Expand.apply(table, rows, dim)


@lru_cache(maxsize=256)
def _rows(index: Index, lo: int, hi: int) -> tuple[int, ...] | None:
    if index.rows is None and (lo, hi) == (index.lo, index.hi):
        return None
    steps = [min(max(r, index.lo), index.hi) - index.lo for r in range(lo, hi + 1)]
    return tuple(steps) if index.rows is None else tuple(index.rows[step] for step in steps)


@lru_cache(maxsize=256)
def _sources(rows: tuple[int, ...], n: int) -> tuple[tuple[int, ...], int]:
    """For each table row the distances that read it, filled up with len(rows) to the same count."""
    readers: list[list[int]] = [[] for _ in range(n)]
    for step, row in enumerate(rows):
        readers[row].append(step)
    most = max(1, max(map(len, readers)))
    return tuple(step for own in readers for step in own + [len(rows)] * (most - len(own))), most


class _Expand(torch.autograd.Function):
    """index_select whose gradient is a gather and a sum: the usual one adds atomically, in any order."""

    @staticmethod
    def forward(table: Tensor, rows: tuple[int, ...], dim: int) -> Tensor:
        return table.index_select(dim, constant(rows, table.device))

    @staticmethod
    def setup_context(ctx, inputs, output):
        table, ctx.rows, ctx.dim = inputs
        ctx.n = table.shape[ctx.dim]

    @staticmethod
    def backward(ctx, grad: Tensor):
        dim = ctx.dim % grad.dim()
        before, rows, after = _folded(ctx.rows)
        sources, most = _sources(rows, ctx.n)
        parts = [grad.narrow(dim, before, len(rows)), torch.zeros_like(grad.narrow(dim, 0, 1))]
        if before:
            parts[0] = parts[0].clone()
            parts[0].narrow(dim, 0, 1).add_(grad.narrow(dim, 0, before).sum(dim, keepdim=True))
        if after:
            parts[0] = parts[0] if before else parts[0].clone()
            parts[0].narrow(dim, len(rows) - 1, 1).add_(
                grad.narrow(dim, before + len(rows), after).sum(dim, keepdim=True)
            )
        picked = torch.cat(parts, dim).index_select(dim, constant(sources, grad.device))
        return picked.unflatten(dim, (ctx.n, most)).sum(dim + 1), None, None


@lru_cache(maxsize=256)
def _folded(rows: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
    """The rows without what repeats the first and the last: how many before, the rest, how many after. They are summed
    first, so that a row with many readers does not fill up all others."""
    before, after = 0, 0
    while before + 1 < len(rows) and rows[before + 1] == rows[0]:
        before += 1
    while after + 1 < len(rows) - before and rows[-after - 2] == rows[-1]:
        after += 1
    return before, rows[before : len(rows) - after], after
