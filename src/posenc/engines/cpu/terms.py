"""Terms: a plan over contiguous positions, reduced to at most one table of each sort.

    s_ij = scale [ q_i·k_j + states_i·table_q[r] + k_j·table_k[r] ] + bias[r] + (decay_q_i - decay_k_j)
    o_i  = Σ_j a_ij ( v_j + table_v[r] )              r = clamp(j - i + offset, lo, hi) - lo

Lookups that share a factor are added (or laid side by side) here, by ordinary differentiable operations, so that
the operator sees distances only and autograd carries its gradients on to buckets, slopes and projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.index import Index
from ...core.mask import Mask
from ...core.plan import Plan
from ...core.positions import Positions, Run, Side
from .band import Band


class Terms(NamedTuple):
    """Everything but q, k and v. Tables are float32 or better and have a row for each distance of the band."""

    bias: Tensor | None  # [H or 1, n]
    table_q: Tensor | None  # [H or 1, n, E]
    states: Tensor | None  # [B, H, Lq, E]; None: q
    table_k: Tensor | None  # [H or 1, n, D]
    table_v: Tensor | None  # [H or 1, n, Dv]
    decay_q: Tensor | None  # [B or 1, H, Lq]; it moves whole rows, but decay_k alone would grow with the length
    decay_k: Tensor | None  # [B or 1, H, Lk]; both are given or neither
    key_mask: Tensor | None  # [B or 1, Lk]

    @property
    def content(self) -> bool:
        """Whether a row's or a column's own numbers enter, so that the scores' addition is no plain table."""
        return any(t is not None for t in (self.table_q, self.table_k, self.table_v, self.decay_k))

    def of(self, rows: slice, heads: slice, copies: int) -> Terms:
        """Those of some of the batch's rows and some heads, one head after the other: states [X, Lq, E],
        decays [X, L], and tables that differ from head to head once for each of `copies` rows."""

        def table(all_heads: Tensor | None) -> Tensor | None:
            if all_heads is None or all_heads.shape[0] == 1:
                return all_heads
            own = all_heads[heads]
            return own if copies == 1 else own.repeat(copies, *[1] * (own.dim() - 1))

        def stack(each_row: Tensor | None) -> Tensor | None:
            if each_row is None:
                return None
            own = each_row[:, heads] if each_row.shape[0] == 1 else each_row[rows, heads]
            return own.expand(copies, *own.shape[1:]).flatten(0, 1)

        tables = [table(t) for t in (self.bias, self.table_q, self.table_k, self.table_v)]
        bias, table_q, table_k, table_v = tables
        states, decay_q, decay_k = map(stack, (self.states, self.decay_q, self.decay_k))
        return Terms(bias, table_q, states, table_k, table_v, decay_q, decay_k, None)


def unstructured(q: Tensor, plan: Plan, mask: Mask, dropout: float) -> str | None:
    """Why a plan is not one over contiguous positions that a table by distance expresses, or None."""
    if dropout > 0.0:
        return "dropout needs the weights themselves"
    if plan.pair is not None:
        return "pair is a function of positions"
    if isinstance(plan.scale, Tensor):
        return "the scale is a tensor"
    if mask.documents is not None or mask.extra is not None:
        return "documents and arbitrary masks are no function of the distance"
    if (
        plan.positions.offset is None
        and (plan.lookups or plan.slopes is not None)
        and offset_of(plan.positions) is None
    ):
        return "the positions are not contiguous"
    for lookup in plan.lookups:
        if not isinstance(lookup.index, Index) or lookup.index.axis != 0:
            return "a lookup reads another axis than the first"
    return None


def offset_of(positions: Positions) -> int | None:
    """p_k - p_q of slots 0 and 0, where positions are consecutive and every row of the batch has the same offset.

    Explicit positions often are (`position_ids`): a look at L numbers, where L² scores follow.
    """
    if positions.offset is not None or torch.compiler.is_compiling():
        return positions.offset
    q_start = _start(positions.q)
    k_start = q_start if positions.k is positions.q else _start(positions.k)
    if q_start is None or k_start is None:
        return None
    lowest, highest = torch.aminmax(k_start - q_start)
    return int(lowest) if lowest == highest else None


def _start(side: Side) -> Tensor | None:
    """[1] or [B]: the first position of each row, if those after it follow one by one."""
    if isinstance(side, Run):
        start = torch.as_tensor(side.start).reshape(-1).to(torch.int64)
        return start if start.device.type == "cpu" else None
    if side.device.type != "cpu":
        return None
    side = side.to(torch.int64)
    first = side[..., :1]
    return first.reshape(-1) if torch.equal(side, first + torch.arange(side.shape[-1])) else None


def terms_of(q: Tensor, plan: Plan, mask: Mask) -> tuple[Terms, Band]:
    q_length, k_length = plan.positions.q_length, plan.positions.k_length
    offset = offset_of(plan.positions) or 0
    reach = (offset - q_length + 1, offset + k_length - 1)
    left, right = mask.limits
    spans = [(lookup.index.lo, lookup.index.hi) for lookup in plan.lookups if isinstance(lookup.index, Index)]
    if plan.slopes is not None:
        spans.append(reach)
    lo, hi = spans[0] if spans else (0, 0)
    for span in spans[1:]:
        lo, hi = min(lo, span[0]), max(hi, span[1])
    # rows that no pair reaches would only cost memory
    lo, hi = min(max(lo, reach[0]), reach[1]), max(min(hi, reach[1]), reach[0])
    band = Band(q_length, k_length, offset, lo, hi, left, right)

    precision = torch.promote_types(q.dtype, torch.float32)
    bias: Tensor | None = None
    queries: list[tuple[Tensor, Tensor | None]] = []
    table_k: Tensor | None = None
    table_v: Tensor | None = None
    for lookup in plan.lookups:
        assert isinstance(lookup.index, Index)  # `unstructured` said so
        if lookup.bias is not None:
            bias = sum_of(bias, _by_distance(lookup.bias, 1, lookup.index, lo, hi).to(precision))
        if lookup.dot_query is not None:
            queries.append((_by_distance(lookup.dot_query, 1, lookup.index, lo, hi).to(precision), lookup.states))
        if lookup.dot_key is not None:
            table_k = sum_of(table_k, _by_distance(lookup.dot_key, 1, lookup.index, lo, hi).to(precision))
        if lookup.add_value is not None:
            table_v = sum_of(table_v, _by_distance(lookup.add_value, 1, lookup.index, lo, hi).to(precision))
    if plan.slopes is not None:
        steps = torch.arange(lo, hi + 1, device=q.device).abs().to(precision)
        bias = sum_of(bias, -plan.slopes.to(precision)[:, None] * steps)
    table_q, states = _side_by_side(q, queries, precision)
    decay_q, decay_k = (None, None) if plan.decay is None else (c.to(precision) for c in plan.decay)
    return Terms(bias, table_q, states, table_k, table_v, decay_q, decay_k, mask.key_mask), band


def sum_of(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def _by_distance(table: Tensor, dim: int, index: Index, lo: int, hi: int) -> Tensor:
    """The table with one row for each distance lo .. hi."""
    if (index.lo, index.hi) == (lo, hi):
        return index.expand(table, dim)
    distances = torch.arange(lo, hi + 1, device=table.device)
    return table.index_select(dim, index.lookup(distances))


def _side_by_side(q: Tensor, queries: list[tuple[Tensor, Tensor | None]], precision: torch.dtype):
    """Σ states·table as one product: tables for q are added, others are laid side by side with their states."""
    table: Tensor | None = None
    others: list[tuple[Tensor, Tensor]] = []
    for own, states in queries:
        if states is None:
            table = sum_of(table, own)
        else:
            others.append((own, states.to(precision).expand(q.shape[0], -1, -1, -1)))
    if not others:
        return table, None
    if table is not None:
        others.append((table, q.to(precision)))
    heads = max(own.shape[0] for own, _ in others)
    tables = [own.expand(heads, -1, -1) for own, _ in others]
    return torch.cat(tables, -1), torch.cat([states for _, states in others], -1)
