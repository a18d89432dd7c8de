"""Slab: some heads of some batch rows, with the keys that padding leaves and their share of every table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import sizes
from .band import Tile
from .terms import Terms

NEVER = float("-inf")


@dataclass
class Slab:
    rows: slice  # of the batch
    heads: slice
    kv_heads: slice
    keys: tuple[int, int]  # the first and one past the last real key
    holes: Tensor | None  # [Lk], -inf at padding between real keys
    terms: Terms  # this slab's; decays [X, L], states [X, Lq, E], X heads: those of all rows where they are stacked

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

    def value_constant(self, end: int, grad: Tensor) -> Tensor | None:
        """What a far tile adds to dO·v of a row, [X, R]."""
        table = self.terms.table_v
        return None if table is None else (grad * table[:, None, end]).sum(-1)

    def columns(self, end: int, keys: Tensor, tile: Tile, scale: float, base: Tensor | None) -> Tensor | None:
        """What a far tile adds to every score of a key, [X, 1, keys]. base: `decay_base` of the tile."""
        t, total = self.terms, None
        if t.table_k is not None:
            total = (keys @ t.table_k[:, end, :, None]).transpose(1, 2) * scale
        if t.decay_k is not None and base is not None:
            total = add(total, (base - t.decay_k[:, tile.j0 : tile.j1])[:, None])
        return add(total, self.padding(tile.j0, tile.j1))

    def decay_base(self, tile: Tile) -> Tensor | None:
        """[X, 1]: a number between a tile's decays, so that a row's part (decay_q - base) and a key's (base - decay_k)
        may be rounded apart. None where that would cost digits: a part may be long only if it leads the way of the whole.

        Gates that forget fall along the sequence, so the past has one: decay_q <= base <= decay_k, and neither part is
        longer than both together. Both parts of rows that hardly differ are as long as the whole.
        """
        decay_q, decay_k = self.terms.decay_q, self.terms.decay_k
        assert decay_q is not None
        assert decay_k is not None
        low, high = decay_q[:, tile.i0 : tile.i1].aminmax(dim=-1, keepdim=True)
        lowest, highest = decay_k[:, tile.j0 : tile.j1].aminmax(dim=-1, keepdim=True)
        rising = low >= highest
        good = rising | (high <= lowest) | (high - low <= 1.0)
        return torch.where(rising, low, high) if bool(good.all()) else None

    def padding(self, j0: int, j1: int) -> Tensor | None:
        """[1, 1, keys]: -inf at padding between real keys."""
        return None if self.holes is None else self.holes[None, None, j0:j1]


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
    stacked: bool = False,
) -> Iterator[Slab]:
    """The batch and its heads, cut so that what they need at once is at most `memory` numbers (or `least` heads).

    rows, width: a dense mask's, where one is needed; every: what a head needs in any case.
    Without terms of their own the batch's rows share a slab, unless they need too much.
    stacked: with a dense mask in any case, and as many of the batch's rows as fit share a slab as one stack of heads.
    """
    batch, heads, _, _ = q.shape
    kv_heads, k_length = k.shape[1], k.shape[2]
    group = heads // kv_heads
    precision = torch.promote_types(q.dtype, torch.float32)
    together = not terms.content and terms.key_mask is None and not stacked
    together = together and batch * every * least <= sizes.TOGETHER
    step, b = batch if together else 1, 0
    while b < batch:
        keys, holes = (0, k_length), None
        if terms.key_mask is not None:
            keys, holes = _real(terms.key_mask[b if terms.key_mask.shape[0] > 1 else 0], precision)
        each = every * (batch if together else 1)
        if terms.content or holes is not None or stacked:
            each += rows * (rows + min(keys[1] - keys[0], width))
            if terms.table_k is not None:
                each += (keys[1] - keys[0]) * (terms.table_k.shape[1] + 2 * sizes.CHUNK)
        fit = max(least, memory // each) if each else heads
        if stacked and terms.key_mask is None and fit >= 2 * heads:
            parts = -(-batch // (fit // heads))
            step = -(-batch // parts)
        rows_of_batch = slice(b, min(b + step, batch))
        fit = min(max(group, fit // group * group), heads)
        for h in range(0, heads, fit):
            end = min(h + fit, heads)
            some = slice(h, end)
            own = terms.of(rows_of_batch, some, copies=rows_of_batch.stop - b if stacked else 1)
            yield Slab(rows_of_batch, some, slice(h // group, end // group), keys, holes, own)
        b += step


def _real(mask: Tensor, precision: torch.dtype) -> tuple[tuple[int, int], Tensor | None]:
    """The range of the real keys, and where there is padding inside it."""
    at = mask.nonzero()
    if not at.numel():
        return (0, 0), None
    a, c = int(at[0]), int(at[-1]) + 1
    if at.numel() == c - a:
        return (a, c), None
    return (a, c), torch.zeros(mask.shape, dtype=precision, device=mask.device).masked_fill_(~mask, NEVER)
