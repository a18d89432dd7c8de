"""HeadBlock: the heads and batch rows that one call processes together, with their real keys and their part of every table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...core.tables import add
from . import block_sizes
from .band import ScoreTile
from .terms import Terms

NEG_INF = float("-inf")


@dataclass
class HeadBlock:
    batch: slice  # rows of the batch
    heads: slice
    kv_heads: slice
    keys: tuple[int, int]  # the first and one past the last real key
    padding: Tensor | None  # [Lk], -inf at padding between real keys
    terms: Terms
    """Of these heads: decays [X, L], states [X, Lq, E]. X: the heads, of every batch row where rows are stacked."""

    @property
    def needs_dense_mask(self) -> bool:
        """Whether the mask of a band tile is more than a Hankel view of a table."""
        return self.terms.has_content or self.padding is not None

    @cached_property
    def table_and_bias(self) -> Tensor:
        """[H or 1, n, E + 1]"""
        table, bias = self.terms.table_q, self.terms.bias
        assert table is not None and bias is not None
        heads = max(table.shape[0], bias.shape[0])
        return torch.cat([table.expand(heads, -1, -1), bias[..., None].expand(heads, -1, 1)], -1)

    def row_constant(self, end: int, states: Tensor, scale: float) -> Tensor | None:
        """What a far tile adds to all scores of a row, [X, R] or [X, 1]. end: 0 for the lowest distance, -1 for the highest."""
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

    def column_constants(
        self, end: int, keys: Tensor, tile: ScoreTile, scale: float, base: Tensor | None
    ) -> Tensor | None:
        """What a far tile adds to all scores of a key, [X, 1, keys]. base: `decay_base` of the tile."""
        t, total = self.terms, None
        if t.table_k is not None:
            total = (keys @ t.table_k[:, end, :, None]).transpose(1, 2) * scale
        if t.decay_k is not None and base is not None:
            total = add(total, (base - t.decay_k[:, tile.j0 : tile.j1])[:, None])
        return add(total, self.padding_of(tile.j0, tile.j1))

    def decay_base(self, tile: ScoreTile) -> Tensor | None:
        """[X, 1]: a number between a tile's decays, which splits decay_q - decay_k into a row's part and a key's:

            decay_q - decay_k = (decay_q - base) + (base - decay_k)

        Each part is rounded on its own, so neither may be larger than the sum. Forget gates accumulate to a falling
        sequence, and a past tile has such a base: decay_q <= base <= decay_k. Rows whose decays differ by at most 1 lose
        little with any base. None: no base keeps the digits.
        """
        decay_q, decay_k = self.terms.decay_q, self.terms.decay_k
        assert decay_q is not None and decay_k is not None
        low, high = decay_q[:, tile.i0 : tile.i1].aminmax(dim=-1, keepdim=True)
        lowest, highest = decay_k[:, tile.j0 : tile.j1].aminmax(dim=-1, keepdim=True)
        rising = low >= highest
        keeps_digits = rising | (high <= lowest) | (high - low <= 1.0)
        return torch.where(rising, low, high) if bool(keeps_digits.all()) else None

    def padding_of(self, j0: int, j1: int) -> Tensor | None:
        """[1, 1, keys]: -inf at padding between real keys."""
        return None if self.padding is None else self.padding[None, None, j0:j1]


def split_heads(
    q: Tensor, k: Tensor, terms: Terms, *, memory: int, rows: int = 0, width: int = 0, every: int = 0, least: int = 1,
    stacked: bool = False,
) -> Iterator[HeadBlock]:  # fmt: skip
    """Head blocks that need at most `memory` numbers at once (or have `least` heads).

    rows, width: of the dense mask of a head that needs one. every: numbers that each head needs besides.
    stacked: every head has a dense mask, and as many batch rows as fit share a head block as one stack of heads.
    Otherwise all batch rows share their head blocks if no term differs from row to row and SHARED_MEMORY allows it.
    """
    batch, heads, _, _ = q.shape
    kv_heads, k_length = k.shape[1], k.shape[2]
    group = heads // kv_heads
    precision = torch.promote_types(q.dtype, torch.float32)
    shares_batch = not terms.has_content and terms.key_mask is None and not stacked
    shares_batch = shares_batch and batch * every * least <= block_sizes.SHARED_MEMORY
    step, b = batch if shares_batch else 1, 0
    while b < batch:
        keys, padding = (0, k_length), None
        if terms.key_mask is not None:
            keys, padding = _find_real_keys(terms.key_mask[b if terms.key_mask.shape[0] > 1 else 0], precision)
        each = every * (batch if shares_batch else 1)
        if terms.has_content or padding is not None or stacked:
            each += rows * (rows + min(keys[1] - keys[0], width))
            if terms.table_k is not None:
                each += (keys[1] - keys[0]) * (terms.table_k.shape[1] + 2 * block_sizes.SKEW_ROWS)
        fit = max(least, memory // each) if each else heads
        if stacked and terms.key_mask is None and fit >= 2 * heads:
            parts = -(-batch // (fit // heads))
            step = -(-batch // parts)
        batch_rows = slice(b, min(b + step, batch))
        fit = min(max(group, fit // group * group), heads)
        for h in range(0, heads, fit):
            end = min(h + fit, heads)
            some = slice(h, end)
            own = terms.select(batch_rows, some, copies=batch_rows.stop - b if stacked else 1)
            yield HeadBlock(batch_rows, some, slice(h // group, end // group), keys, padding, own)
        b += step


def _find_real_keys(mask: Tensor, precision: torch.dtype) -> tuple[tuple[int, int], Tensor | None]:
    """The range from the first to the last real key, and -inf at padding inside it (None: there is none)."""
    at = mask.nonzero()
    if not at.numel():
        return (0, 0), None
    a, c = int(at[0]), int(at[-1]) + 1
    if at.numel() == c - a:
        return (a, c), None
    return (a, c), torch.zeros(mask.shape, dtype=precision, device=mask.device).masked_fill_(~mask, NEG_INF)


def share_blocks(
    batch: int, heads: int, kv_heads: int, pairs: int, most: int
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Batch rows and heads with at most this many scores together, or one key head: (rows, heads) of queries and of keys. pairs: scores of
    a head."""
    group = heads // kv_heads
    own = min(kv_heads, max(1, most // (group * pairs)))
    rows = max(1, most // (heads * pairs))
    for row in range(0, batch, rows):
        some = slice(row, min(row + rows, batch))
        for head in range(0, kv_heads, own):
            last = min(head + own, kv_heads)
            yield (some, slice(head * group, last * group)), (some, slice(head, last))


def select_shared(shape: tuple[int, ...], at: tuple[slice, slice]) -> tuple[slice, ...]:
    """Those rows and heads of a tensor [B or 1, H or 1, ..] that may serve all."""
    return tuple([x if n > 1 else slice(None) for n, x in zip(shape, at)])
