"""Slab: some heads of some batch rows, with the keys that padding leaves and their share of every table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import sizes
from .terms import Terms

NEVER = float("-inf")


@dataclass
class Slab:
    rows: slice  # of the batch
    heads: slice
    kv_heads: slice
    keys: tuple[int, int]  # the first and one past the last real key
    holes: Tensor | None  # [Lk], -inf at padding between real keys
    terms: Terms  # this slab's; key_bias [H, Lk], states [H, Lq, E]

    @property
    def dense(self) -> bool:
        """Whether a band tile's mask is more than a table."""
        return self.terms.content or self.holes is not None

    @cached_property
    def table_and_bias(self) -> Tensor:
        """[H or 1, n, E + 1]"""
        table, bias = self.terms.table_q, self.terms.bias
        assert table is not None
        assert bias is not None
        heads = max(table.shape[0], bias.shape[0])
        return torch.cat([table.expand(heads, -1, -1), bias[..., None].expand(heads, -1, 1)], -1)

    def row_constant(self, end: int, states: Tensor, scale: float) -> Tensor | None:
        """What a far tile adds to every score of a row, [X, R] or [X, 1]. end: 0 the lowest distance, -1 the highest."""
        t, constant = self.terms, None
        if t.table_q is not None:
            constant = (states * t.table_q[:, None, end]).sum(-1) * scale
        if t.bias is not None:
            edge = t.bias[:, end, None]
            constant = edge if constant is None else constant + edge
        return constant

    def columns(self, end: int, keys: Tensor, j0: int, j1: int, scale: float) -> Tensor | None:
        """What a far tile adds to every score of a key, [X, 1, keys]."""
        t, total = self.terms, None
        if t.table_k is not None:
            total = (keys @ t.table_k[:, end, :, None]).transpose(1, 2) * scale
        return add(total, self.key_columns(j0, j1))

    def key_columns(self, j0: int, j1: int) -> Tensor | None:
        total = None if self.terms.key_bias is None else self.terms.key_bias[:, None, j0:j1]
        return add(total, None if self.holes is None else self.holes[None, None, j0:j1])


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def slabs(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    *,
    memory: int,
    rows: int = 0,
    width: int = 0,
    every: int = 0,
    least: int = 1,
    single: bool = False,
) -> Iterator[Slab]:
    """The batch and its heads, cut so that what they need at once is at most `memory` numbers (or `least` heads).

    rows, width: a dense mask's, where one is needed; every: what a head needs in any case.
    single: one row of the batch at a time even where all could share a call, with a dense mask.
    Without terms of their own the batch's rows share a slab, unless they need too much.
    """
    batch, heads, _, _ = q.shape
    kv_heads, k_length = k.shape[1], k.shape[2]
    group = heads // kv_heads
    precision = torch.promote_types(q.dtype, torch.float32)
    together = not terms.content and terms.key_mask is None and not single
    together = together and batch * every * least <= sizes.TOGETHER
    for b in range(1 if together else batch):
        rows_of_batch = slice(0, batch) if together else slice(b, b + 1)
        keys, holes = (0, k_length), None
        if terms.key_mask is not None:
            keys, holes = _real(terms.key_mask[b if terms.key_mask.shape[0] > 1 else 0], precision)
        each = every * (batch if together else 1)
        if terms.content or holes is not None or single:
            each += rows * (rows + min(keys[1] - keys[0], width))
            if terms.table_k is not None:
                each += (keys[1] - keys[0]) * (terms.table_k.shape[1] + 2 * sizes.CHUNK)
        fit = max(least, memory // each) if each else heads
        fit = min(max(group, fit // group * group), heads)
        for h in range(0, heads, fit):
            end = min(h + fit, heads)
            some = slice(h, end)
            own = Terms(
                bias=_heads(terms.bias, some),
                table_q=_heads(terms.table_q, some),
                states=None if terms.states is None else terms.states[b, some],
                table_k=_heads(terms.table_k, some),
                table_v=_heads(terms.table_v, some),
                key_bias=None
                if terms.key_bias is None
                else terms.key_bias[b if terms.key_bias.shape[0] > 1 else 0, some],
                key_mask=None,
            )
            yield Slab(rows_of_batch, some, slice(h // group, end // group), keys, holes, own)


def _heads(table: Tensor | None, heads: slice) -> Tensor | None:
    return table if table is None or table.shape[0] == 1 else table[heads]


def _real(mask: Tensor, precision: torch.dtype) -> tuple[tuple[int, int], Tensor | None]:
    """The range of the real keys, and where there is padding inside it."""
    at = mask.nonzero()
    if not at.numel():
        return (0, 0), None
    a, c = int(at[0]), int(at[-1]) + 1
    if at.numel() == c - a:
        return (a, c), None
    return (a, c), torch.zeros(mask.shape, dtype=precision, device=mask.device).masked_fill_(~mask, NEVER)
