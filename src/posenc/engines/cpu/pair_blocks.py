"""Blocks of queries whose pairs are read one by one: which row of each table a pair reads, and what hides it.

    keys ──▶                          a block of queries, and the keys that its masks leave visible
    queries  . ╲▒▒▒▒╲ . . . .         rows [R, K]     the table's row of each pair; one more, of -inf, where a key is hidden
             . . . ╲▒▒▒▒╲ . .         table [H, n + 1]  ── rows ──▶  mask [H, R, K]

The rows of a batch share a block where positions and masks are the same for all of them; otherwise as many as have few pairs in all.
The blocks of numbered patches, whose positions are kept, are kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.index import Grid, Index
from ...core.mask import Mask
from ...core.memo import Memo
from ...core.tables import add
from .. import blocked, dense_bias, reference
from ..lowering import LoweredPlan
from . import block_sizes
from .head_block import NEG_INF

CPU = torch.device("cpu")


class Texts(NamedTuple):
    """Rows of the batch that run together."""

    batch: slice
    positions: dict[int, tuple[Tensor, Tensor]]
    """Of queries [b or 1, Lq] and keys [b or 1, Lk], on each axis that is read."""
    mask: Mask


class Terms(NamedTuple):
    """What is added to the scores, beside masks."""

    precision: torch.dtype
    slopes: Tensor | None  # [H]
    decay_q: Tensor | None  # [B or 1, H, Lq], in the digits that they were given in
    decay_k: Tensor | None  # [B or 1, H, Lk]
    tables: list[Tensor]  # [H or 1, n + 1]; the last row hides
    pair: Callable[[slice, slice], Tensor] | None  # of queries and keys: [R, K] or [B or 1, H or 1, R, K]


def make_terms(
    precision: torch.dtype, slopes: Tensor | None, decay_q: Tensor | None, decay_k: Tensor | None, tables: tuple[Tensor, ...],
    pair: Callable[[slice, slice], Tensor] | None = None,
) -> Terms:  # fmt: skip
    exact = [None if x is None else x.to(torch.promote_types(x.dtype, precision)) for x in (decay_q, decay_k)]
    padded = [pad(table.to(precision), (0, 1), value=NEG_INF) for table in tables]
    return Terms(precision, None if slopes is None else slopes.to(precision), exact[0], exact[1], padded, pair)


class Block:
    """Some queries of some texts, and the keys that they see. Each array is [b or 1, H or 1, R, K], or without the heads."""

    def __init__(
        self, texts: Texts, indices: tuple[Index | Grid, ...], slopes: bool, rows: slice, sizes: tuple[int, int],
        precision: torch.dtype,
    ):  # fmt: skip
        q_length, k_length = sizes
        mask, limits = texts.mask, texts.mask.limits
        columns = blocked.visible_keys(rows, k_length - q_length, k_length, limits)
        allowed, added = mask.allowed(q_length, k_length, CPU, rows, columns), mask.added(rows, columns)
        if added is not None:
            added = added.to(precision)
            seen = added != NEG_INF
            if not bool(seen.all()):
                allowed = seen if allowed is None else allowed & seen
        self.empty: Tensor | None = None
        """[b or 1, H or 1, R or 1, 1]: which queries see no key; None: each sees one."""
        if allowed is not None:
            allowed = allowed.view((1,) * (4 - allowed.dim()) + allowed.shape)
            if limits[0] is not None or not mask.plain or q_length > k_length:
                columns, allowed, added = self._cut(columns, allowed, added)
        self.rows, self.columns = rows, columns
        hidden = None if allowed is None or bool(allowed.all()) else ~allowed

        def distance(axis: int) -> Tensor:
            q, k = texts.positions[axis]
            return k[:, None, columns] - q[:, rows, None]

        self.at = [index.rows_of(distance) for index in indices]
        self.distance = distance(0).abs().to(precision) if slopes else None
        if hidden is not None and self.at and hidden.shape[:2] == (1, 1):
            self.at[0] = self.at[0].masked_fill(hidden[0], indices[0].n)
            hidden = None
        # -inf by an addition, which is faster than by a choice, and whose gradient costs nothing
        if hidden is not None:
            added = add(added, torch.zeros(hidden.shape, dtype=precision, device=CPU).masked_fill_(hidden, NEG_INF))
        self.added = added

    def _cut(self, columns: slice, allowed: Tensor, added: Tensor | None) -> tuple[slice, Tensor, Tensor | None]:
        """From the first to the last key that a query sees, and the masks of these."""
        empty = ~allowed.any(-1, keepdim=True)
        self.empty = empty if bool(empty.any()) else None
        if allowed.shape[3] == 1:
            return columns, allowed, added
        seen = allowed.flatten(0, 2).any(0).nonzero()
        first, last = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
        if added is not None and added.shape[3] > 1:
            added = added[..., first:last]
        return slice(columns.start + first, columns.start + last), allowed[..., first:last], added

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def sees_none(self) -> bool:
        return self.columns.start == self.columns.stop

    def mask(self, terms: Terms, texts: Texts, heads: slice) -> Tensor:
        """[b or 1, h or 1, R, K], what is added to the scores of these heads; 0 for a query that sees no key."""
        total: Tensor | None = None
        for at, table in zip(self.at, terms.tables, strict=True):
            picked = own_heads(table, heads, 0).index_select(1, at.view(-1))
            total = add(total, picked.view(-1, *at.shape).transpose(0, 1))
        if terms.slopes is not None and self.distance is not None:
            total = add(total, -terms.slopes[heads, None, None] * self.distance[:, None])
        if terms.decay_q is not None and terms.decay_k is not None:
            c_q, c_k = (own_heads(own_texts(x, texts.batch), heads) for x in (terms.decay_q, terms.decay_k))
            # their difference first: each alone is as large as the text is long
            total = add(total, (c_q[..., self.rows, None] - c_k[..., None, self.columns]).to(terms.precision))
        if terms.pair is not None:
            pair = terms.pair(self.rows, self.columns).to(terms.precision)
            pair = pair.view((1,) * (4 - pair.dim()) + pair.shape)
            total = add(total, own_heads(own_texts(pair, texts.batch), heads))
        if self.added is not None:
            total = add(total, own_heads(self.added, heads))
        if total is None:
            total = torch.zeros(1, 1, 1, 1, dtype=terms.precision, device=CPU)
        if self.empty is not None:
            total = total.masked_fill(own_heads(self.empty, heads), 0.0)
        total = total.expand(-1, -1, *self.shape)
        return total if total.stride(3) == 1 else total.contiguous()


def own_heads(x: Tensor, heads: slice, axis: int = 1) -> Tensor:
    """These heads of a tensor that may serve all of them."""
    return x if x.shape[axis] == 1 else x[heads] if axis == 0 else x[:, heads]


def own_texts(x: Tensor, batch: slice) -> Tensor:
    """These rows of the batch of a tensor that may serve all of them."""
    return x if x.shape[0] == 1 else x[batch]


# ---- the blocks of a call --------------------------------------------------------------------------------------------------
class Blocks:
    """Iterates over the texts of a call with each of their blocks, the same ones each time."""

    def __init__(self, lowered: LoweredPlan):
        plan, facts, self.mask = lowered.plan, lowered.facts, lowered.mask
        self.pair = None if plan.pair is None else partial(reference.pair_block, plan, CPU)
        self.positions = plan.positions
        self.indices = tuple([x.index for x in plan.lookups])
        self.slopes = plan.slopes is not None
        self.axes = sorted({axis for index in self.indices for axis in index.axes} | ({0} if self.slopes else set()))
        self.batch, self.heads, self.sizes = facts.batch, facts.heads, (facts.q_length, facts.k_length)
        self.precision = torch.promote_types(facts.dtype, torch.float32)
        pairs = facts.batch * facts.heads * facts.q_length * facts.k_length
        self.are_few = (
            facts.gradient
            and pairs <= block_sizes.KEPT_SCORES
            and facts.dtype == self.precision
            and not facts.return_lse
        )
        """Whether the probabilities are kept for backward."""
        self.decays_differ = plan.decay is not None and any(x.shape[0] > 1 for x in plan.decay)
        self._key: tuple | None = None
        is_constant = plan.positions.is_constant and lowered.mask.plain and not self.decays_differ and self.pair is None
        if is_constant and 2 * self._count_numbers() <= _kept.numbers:  # others would not be kept
            sides = [side for axis in self.axes for side in (plan.positions.q_axes[axis], plan.positions.k_axes[axis])]
            known = tuple(map(dense_bias.identity, sides))
            self._key = (known, self.indices, self.slopes, lowered.mask.limits, self.sizes, self.heads, self.precision)

    def given(self) -> list[Tensor]:
        """The tensors that it reads each time, which a caller may change."""
        return self.mask.tensors() + ([] if self.positions.is_constant else self.positions.tensors())

    def __iter__(self) -> Iterator[tuple[Texts, Block]]:
        if self._key is None:
            return self._make()
        made = _kept.find_or_make(self._key, lambda: list(self._make()), lambda _: self._count_numbers())
        return iter([(texts._replace(batch=slice(0, self.batch)), block) for texts, block in made])

    def _count_numbers(self) -> int:
        """Of all blocks, where the rows of the batch share them."""
        q_length, k_length = self.sizes
        count = 0
        for rows in self._rows(1):
            columns = blocked.visible_keys(rows, k_length - q_length, k_length, self.mask.limits)
            count += (rows.stop - rows.start) * (columns.stop - columns.start)
        return count * max(1, len(self.indices) + self.slopes)  # at least the hidden pairs

    def _rows(self, texts: int) -> list[slice]:
        """The queries of each block of so many texts."""
        q_length = self.sizes[0]
        step = blocked.block_rows(self.heads * texts, *self.sizes, self.mask.limits)
        if self.pair is not None:
            step = min(step, blocked.function_rows(self.sizes[1]))
        return [slice(first, min(first + step, q_length)) for first in range(0, q_length, step)]

    def _make(self) -> Iterator[tuple[Texts, Block]]:
        q, k = self.positions.q_positions, self.positions.k_positions
        positions = {axis: (_two_dims(q(CPU, axis)), _two_dims(k(CPU, axis))) for axis in self.axes}
        given = (self.mask.key_mask, *(self.mask.documents or ()), self.mask.extra)
        differ = self.decays_differ or any(
            x is not None and x.shape[0] > 1 for both in (given, *positions.values()) for x in both
        )
        pairs = self.heads * self.sizes[0] * self.sizes[1]
        count = self.batch  # a function of positions is called for all texts at once
        if differ and self.pair is None:
            count = min(count, max(1, block_sizes.VARIED_SCORES // pairs))
        for start in range(0, self.batch, count):
            texts = self._select(slice(start, min(start + count, self.batch)), positions)
            for rows in self._rows(count if differ else 1):
                yield texts, Block(texts, self.indices, self.slopes, rows, self.sizes, self.precision)

    def _select(self, batch: slice, positions: dict[int, tuple[Tensor, Tensor]]) -> Texts:
        key_mask, documents, extra = self.mask.key_mask, self.mask.documents, self.mask.extra
        own = replace(
            self.mask,
            key_mask=None if key_mask is None else own_texts(key_mask, batch),
            documents=None if documents is None else (own_texts(documents[0], batch), own_texts(documents[1], batch)),
            extra=None if extra is None else own_texts(extra, batch),
        )
        return Texts(batch, {a: (own_texts(q, batch), own_texts(k, batch)) for a, (q, k) in positions.items()}, own)


_kept = Memo(most=64, numbers=1 << 23)
"""Blocks of positions that are kept, by these, the indices and the limits."""


def _two_dims(positions: Tensor) -> Tensor:
    return positions if positions.dim() == 2 else positions[None]
