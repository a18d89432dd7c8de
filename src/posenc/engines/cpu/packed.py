"""Packed documents of long texts: each of them is a call of its own, since what its tokens see is one piece of the text.

    ids   0 0 0 0 1 1 1 2 2          x x x x . . . . .
                                     x x x x . . . . .          x: computed
                                     . . . . x x x . .
                                     . . . . . . . x x

Distances within a piece are those of the whole text, so that every term is what it was. `python -m tests.engines.packed_times` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.mask import Mask, MaskOptions
from ...core.positions import FurtherAxis, Positions, Run, Side, consecutive
from ..lowering import LoweredPlan, lower_plan

LEAST = 1 << 18
"""Scores of a text for each thread, from which its documents are looked at."""
PIECE = 3 << 13
"""Scores that take a thread as long as what the calls of a piece take the host."""


class Row(NamedTuple):
    """Rows of the batch with the same documents, and how many tokens each of these has, in their order."""

    rows: slice
    sizes: list[int]


Attend = Callable[[Tensor, Tensor, Tensor, LoweredPlan], tuple[Tensor, Tensor | None]]


def find_in(lowered: LoweredPlan) -> list[Row] | None:
    """The documents of a call, where each is one piece of its text and pieces are worth it."""
    facts = lowered.facts
    if facts.dropout or facts.pair:  # these count tokens of the whole text
        return None
    return find(lowered.mask, facts.batch, facts.heads, facts.q_length, facts.k_length)


def is_worth(masks: MaskOptions, batch: int, heads: int, q_length: int, k_length: int) -> bool:
    """Whether `find` finds them in masks that were not validated yet."""
    given, batches = masks.get("documents"), (1, batch)
    if given is None or masks.get("mask") is not None or heads * q_length * k_length < LEAST * torch.get_num_threads():
        return False
    both = given if isinstance(given, tuple) else (given, given)
    if len(both) != 2 or not all(
        isinstance(x, Tensor) and x.is_cpu and x.dim() == 2 and x.shape[0] in batches for x in both
    ):
        return False
    return find(Mask(documents=both), batch, heads, q_length, k_length) is not None


def find(mask: Mask, batch: int, heads: int, q_length: int, k_length: int) -> list[Row] | None:
    """The same of a mask."""
    whole = heads * q_length * k_length
    if (
        mask.documents is None
        or mask.extra is not None
        or q_length != k_length
        or whole < LEAST * torch.get_num_threads()
    ):
        return None
    ids, others = mask.documents
    if ids.shape[1] != q_length:
        return None
    if torch.compiler.is_compiling() or (ids is not others and not torch.equal(ids, others)):
        return None
    sizes = _sizes(ids)
    if sizes is None:
        return None
    found = [Row(slice(n, n + 1) if len(ids) > 1 else slice(0, batch), own) for n, own in enumerate(sizes)]
    scores = sum((row.rows.stop - row.rows.start) * heads * sum(n * n for n in row.sizes) for row in found)
    host = sum(len(row.sizes) for row in found) * PIECE * torch.get_num_threads()
    return found if scores + host <= batch * whole * 3 // 4 else None


def _sizes(ids: Tensor) -> list[list[int]] | None:
    """Of the documents of each row [B or 1, L]; None where one has more than one piece."""
    places = (ids[:, 1:] != ids[:, :-1]).nonzero()
    later = ids[places[:, 0], places[:, 1] + 1].tolist()
    starts, seen = [[0] for _ in ids], [{x} for x in ids[:, 0].tolist()]
    for (row, before), name in zip(places.tolist(), later, strict=True):
        if name in seen[row]:
            return None
        seen[row].add(name)
        starts[row].append(before + 1)
    length = ids.shape[1]
    return [[stop - start for start, stop in zip(own, [*own[1:], length])] for own in starts]


def run(
    q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan, found: list[Row], attend: Attend
) -> tuple[Tensor, Tensor | None]:
    """attend(queries, keys, values, lowered) of each document."""
    plan, mask, return_lse = lowered.plan, lowered.mask, lowered.facts.return_lse
    tensors = [_split(x, found) for x in (q, k, v)]
    states = [None if x.states is None else _split(x.states, found) for x in plan.lookups]
    decays = None if plan.decay is None else [_split(x, found) for x in plan.decay]
    scales = _split(plan.scale, found) if isinstance(plan.scale, Tensor) else None
    outs, lses = [], []
    for number, row in enumerate(found):
        last = 0
        for at, size in enumerate(row.sizes):
            first, last = last, last + size
            tokens = slice(first, last)
            part = replace(
                plan,
                positions=_cut_positions(plan.positions, row.rows, tokens),
                lookups=tuple(
                    x if own is None else replace(x, states=own[number][at]) for x, own in zip(plan.lookups, states)
                ),
                decay=None if decays is None else (decays[0][number][at], decays[1][number][at]),
                scale=plan.scale if scales is None else scales[number][at],
            )
            own_mask = replace(mask, documents=None, key_mask=_cut_padding(mask, row.rows, tokens))
            q_, k_, v_ = (x[number][at] for x in tensors)
            out, lse = attend(q_, k_, v_, lower_plan(q_, k_, v_, part, own_mask, 0.0, return_lse))
            outs.append(out.transpose(1, 2))  # as a layer's last projection reads it
            lses.append(lse)
    counts = [len(row.sizes) for row in found]
    whole = _join(outs, counts, 1).transpose(1, 2)
    return whole, _join([x for x in lses if x is not None], counts, 2) if return_lse else None


def _join(parts: list[Tensor], counts: list[int], axis: int) -> Tensor:
    """The documents of each row, then the rows."""
    if len(counts) == 1:
        return torch.cat(parts, axis)
    pieces = iter(parts)
    return torch.cat([torch.cat([next(pieces) for _ in range(count)], axis) for count in counts])


def _split(x: Tensor, found: list[Row]) -> list[Sequence[Tensor]]:
    """The documents of each row of x [B or 1, H or 1, L or 1, ..], or of what broadcasts to [B, H, L]. The gradient of a slice is as large
    as the whole, that of a split is one copy."""
    if x.dim() < 3:
        x = x.view((1,) * (3 - x.dim()) + x.shape)
    rows = x.split(1) if len(found) > 1 and x.shape[0] > 1 else [x] * len(found)
    if x.shape[2] == 1:
        return [[own] * len(row.sizes) for own, row in zip(rows, found, strict=True)]
    return [own.split(row.sizes, 2) for own, row in zip(rows, found, strict=True)]


def _cut_positions(positions: Positions, rows: slice, tokens: slice) -> Positions:
    """The positions of some tokens of some rows."""
    count = tokens.stop - tokens.start
    if positions.offset is not None and len(positions.q_axes) == 1:
        return consecutive(0, count, positions.offset, count)  # terms read distances alone

    def cut(side: Side) -> Side:
        if isinstance(side, Run):
            start = side.start
            start = start[rows] if isinstance(start, Tensor) and start.dim() and len(start) > 1 else start
            return Run(start + tokens.start, count)
        return (side[rows] if side.dim() == 2 and len(side) > 1 else side)[..., tokens]

    def both(q: Side, k: Side) -> tuple[Side, Side]:
        own = cut(q)
        return own, own if k is q else cut(k)

    more: list[FurtherAxis] = []
    for axis in range(1, len(positions.q_axes)):
        pair = both(positions.q_axes[axis], positions.k_axes[axis])
        if positions.bounded((axis,)):
            q_bounds, k_bounds = positions.bounds(axis)
            more.append((*pair, (min(q_bounds[0], k_bounds[0]), max(q_bounds[1], k_bounds[1]))))
        else:
            more.append(pair)
    return Positions(*both(positions.q, positions.k), more=more)


def _cut_padding(mask: Mask, rows: slice, tokens: slice) -> Tensor | None:
    """The padding of some tokens; None: there is none."""
    if mask.key_mask is None:
        return None
    own = (mask.key_mask[rows] if len(mask.key_mask) > 1 else mask.key_mask)[:, tokens]
    return None if bool(own.all()) else own
