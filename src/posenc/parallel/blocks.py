"""Attention of one segment of queries to one segment of keys of any two ranks: `attend` with their true positions, and masks cut
to the pair. A pair of segments whose distances all lie outside a table's span is plain attention plus a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.dropout import Dropout
from ..core.index import Index
from ..core.plan import Plan
from ..core.positions import Positions, Run
from ..core.tables import add
from ..functional import attend
from .context import ContextParallel
from .layout import Segment, Visible, visible_part
from .plan_tensors import PlanSource, Values

INF = float("inf")


@dataclass(frozen=True)
class Tokens:
    """The tokens of one rank (or of all): segments, positions, padding and documents."""

    segments: tuple[Segment, ...]
    axes: tuple[Tensor | None, ...]  # positions on each axis, [L] or [B, L]; None: slot numbers
    key_mask: Tensor | None = None  # bool [B or 1, L]
    documents: Tensor | None = None  # int [B or 1, L]

    def tensors(self) -> list[Tensor]:
        """Everything that travels with keys."""
        return [x for x in (*self.axes, self.key_mask, self.documents) if x is not None]

    def moved(self, segments: tuple[Segment, ...], tensors: Sequence[Tensor]) -> Tokens:
        """The tokens of another rank, whose tensors arrived."""
        rest = iter(tensors)
        axes = tuple(None if x is None else next(rest) for x in self.axes)
        key_mask, documents = (None if x is None else next(rest) for x in (self.key_mask, self.documents))
        return Tokens(segments, axes, key_mask, documents)

    def sides(self, segment: Segment, rows: slice, device: torch.device) -> list[Run | Tensor]:
        """Positions of some tokens of a segment on each axis."""
        found: list[Run | Tensor] = []
        for axis in self.axes:
            if axis is not None:
                found.append(axis[..., segment.first + rows.start : segment.first + rows.stop])
            elif segment.step == 1:
                found.append(Run(segment.start + rows.start, rows.stop - rows.start))
            else:
                found.append(torch.arange(rows.start, rows.stop, device=device) * segment.step + segment.start)
        return found

    def all_sides(self, device: torch.device) -> list[Run | Tensor]:
        """Positions of all tokens on each axis."""
        if len(self.segments) == 1:
            return self.sides(self.segments[0], slice(0, self.segments[0].length), device)
        slots = torch.cat([torch.arange(s.length, device=device) * s.step + s.start for s in self.segments])
        return [slots if axis is None else axis for axis in self.axes]


def positions_of(queries: list[Run | Tensor], keys: list[Run | Tensor], **options: Any) -> Positions:
    more: list[Any] = list(zip(queries[1:], keys[1:], strict=True))
    return Positions(queries[0], keys[0], more=more, **options)


@dataclass(frozen=True)
class Call:
    """What all pairs of a call share; no tensor in it has a gradient."""

    cp: ContextParallel
    source: PlanSource
    queries: Tokens
    keys: Tokens  # of this rank
    left: int | None
    right: int | None
    shift: int  # of the queries' slots, which aligns the last query with the last key
    dropout: float
    engine: str
    seed: Tensor | None = None
    first_head: int = 0
    all_heads: int | None = None
    return_lse: bool = False
    per_query: frozenset[str] = frozenset()
    """Names of the plan's tensors that have a number for each query."""


class Block(NamedTuple):
    """The visible part of a pair of segments."""

    q: Segment
    k: Segment
    visible: Visible

    def cut(self, values: Values) -> Values:
        """The parts of these tensors that this block reads."""
        return {name: self.select(name, x) for name, x in values.items()}

    def select(self, name: str, x: Tensor) -> Tensor:
        queries = slice(self.q.first + self.visible.queries.start, self.q.first + self.visible.queries.stop)
        keys = slice(self.k.first + self.visible.keys.start, self.k.first + self.visible.keys.stop)
        if name == "q" or name.startswith("states"):
            return x[:, :, queries]
        if name in ("k", "v"):
            return x[:, :, keys]
        if name == "decay_k":
            return x[..., keys]
        if name == "decay_q" or (name == "scale" and x.dim() and x.shape[-1] > 1):
            return x[..., queries]
        if name == "mask":
            start = self.k.start + self.k.step * self.visible.keys.start
            stop = self.k.start + self.k.step * (self.visible.keys.stop - 1) + 1
            x = x if x.shape[-2] == 1 else x[..., queries, :]
            return x if x.shape[-1] == 1 else x[..., start : stop : self.k.step]
        return x


def blocks_of(call: Call, keys: Tokens) -> list[Block]:
    """Every pair of a segment of this rank's queries and one of these keys that is not masked throughout."""
    found = []
    for q in call.queries.segments:
        for k in keys.segments:
            shifted = q._replace(start=q.start + call.shift)
            visible = visible_part(shifted, k, call.left, call.right)
            if visible is not None:
                found.append(Block(q, k, visible))
    return found


def run_block(call: Call, keys: Tokens, block: Block, inputs: Values) -> tuple[Tensor, Tensor]:
    """out [B, H, lq, Dv] and log-sum-exp [B, H, lq] of a block; `inputs` are q, k, v and the plan's tensors, cut to it."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    rows, columns, window = block.visible
    positions = positions_of(call.queries.sides(block.q, rows, q.device), keys.sides(block.k, columns, q.device))
    values = {name: x for name, x in inputs.items() if name not in ("q", "k", "v", "mask")}
    plan = call.source.plan(positions, q, values)
    q, plan, constant = take_far_terms(q, plan, call.dropout)
    masks: dict[str, Any] = {"window": window, "mask": inputs.get("mask")}
    first, last = block.k.first + columns.start, block.k.first + columns.stop
    if keys.key_mask is not None:
        masks["key_mask"] = keys.key_mask[:, first:last]
    if keys.documents is not None and call.queries.documents is not None:
        own = call.queries.documents[:, block.q.first + rows.start : block.q.first + rows.stop]
        masks["documents"] = own, keys.documents[:, first:last]
    dropout = call.dropout
    if dropout and call.seed is not None:
        at_q = block.q.start + call.shift + block.q.step * rows.start
        at_k = block.k.start + block.k.step * columns.start
        heads = call.all_heads or q.shape[1]
        sides = {"q": (at_q, block.q.step), "k": (at_k, block.k.step)}
        dropout = Dropout(dropout, call.seed, **sides, heads=(call.first_head, heads))
    out, lse = attend(q, k, v, plan, dropout=dropout, engine=call.engine, return_lse=True, **masks)
    return constant.add(out, lse)


def pad_segment(rows: slice, length: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A block's result for all queries of its segment: those that were cut off have no visible key."""
    before, after = rows.start, length - rows.stop
    if not before and not after:
        return out, lse
    return pad(out, (0, 0, before, after)), pad(lse, (before, after), value=-INF)


class FarTerms(NamedTuple):
    """What lookups in the far field add equally to all keys of a query."""

    to_lse: Tensor | None = None  # [H, 1] or [B, H, lq]
    to_out: Tensor | None = None  # [H, 1, Dv]

    def add(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        if self.to_out is not None:
            visible = (lse > -INF)[..., None]
            out = out + torch.where(visible, self.to_out.to(out.dtype), 0.0)
        return out, lse if self.to_lse is None else lse + self.to_lse.to(lse.dtype)


def take_far_terms(q: Tensor, plan: Plan, dropout: float) -> tuple[Tensor, Plan, FarTerms]:
    """The plan without its lookups, where all distances read the same row of each table: then a bias and a product with the query
    are added to the log-sum-exp, a row for values to the output, and a product with keys is a shift of the queries."""
    rows = _single_rows(plan)
    scale = plan.scale_of(q.shape[3])
    precision = torch.promote_types(q.dtype, torch.float32)
    shifts = any(lookup.dot_key is not None for lookup in plan.lookups)
    drops = dropout > 0.0 and any(lookup.add_value is not None for lookup in plan.lookups)
    # in half precision the sum q + row would be rounded; dropout applies to the rows for values too
    if not rows or drops or (shifts and q.dtype != precision):
        return q, plan, FarTerms()
    to_lse = to_out = None
    shifted = q
    for lookup, row in zip(plan.lookups, rows, strict=True):
        if lookup.bias is not None:
            to_lse = add(to_lse, lookup.bias[:, row, None].to(precision))
        if lookup.dot_query is not None:
            states = q if lookup.states is None else lookup.states
            product = (states.to(precision) @ lookup.dot_query[:, row, :, None].to(precision)).squeeze(-1)
            factor = scale.squeeze(-1).to(precision) if isinstance(scale, Tensor) else scale
            to_lse = add(to_lse, product * factor)
        if lookup.dot_key is not None:
            shifted = shifted + lookup.dot_key[:, row, None, :].to(q.dtype)
        if lookup.add_value is not None:
            to_out = add(to_out, lookup.add_value[:, row, None, :].to(precision))
    return shifted, replace(plan, lookups=()), FarTerms(to_lse, to_out)


def _single_rows(plan: Plan) -> list[int]:
    """The row that all distances of a pair read, for each lookup; empty where some lookup has several rows."""
    positions, rows = plan.positions, []
    if not plan.lookups or any(not isinstance(x.index, Index) or x.index.axis != 0 for x in plan.lookups):
        return []
    sides = positions.q, positions.k  # explicit positions are read on a CPU only: elsewhere reading synchronises
    if positions.offset is None and any(isinstance(side, Tensor) and not side.is_cpu for side in sides):
        return []
    least, most = positions.reach
    for lookup in plan.lookups:
        index = lookup.index
        assert isinstance(index, Index)
        lo, hi = (min(max(r, index.lo), index.hi) - index.lo for r in (least, most))
        if lo != hi:
            return []
        rows.append(lo if index.rows is None else index.rows[lo])
    return rows
