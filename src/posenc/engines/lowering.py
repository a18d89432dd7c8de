"""Lowering: plan + mask + shapes -> facts and at most one table of each kind, once a call, for every engine.

    Plan ─┐                    ┌─ facts     hashable, no tensor is read: what a choice or a prepared launch depends on
    Mask ─┼─▶ LoweredPlan ─────┤
    q k v ┘                    └─ tables    bias [H, n], query table [H, n, E] with states, key table, value table

A plan may have several lookups with different indices. Over a span lo .. hi of distances they become one table of each
kind, with a row for each distance:

    index a   rows 0 0 1 2 2          distance   lo  ..  hi
    index b   rows   0 1 1            bias       a0+b0 a0+b0 a1+b1 a2+b1 a2+b1

Expansion and sums are ordinary differentiable PyTorch, so autograd carries an engine's gradients on to buckets, slopes and
projections. The gradient of an expanded row is summed in a fixed order, without atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.index import Grid, Index
from ..core.mask import Mask
from ..core.plan import Lookup, Plan
from ..core.positions import Positions, Run, Side
from ..core.tables import add, expand_table

Span = tuple[int, int]


class Facts(NamedTuple):
    """What is known of a call without reading a tensor. Hashable: the key under which prepared work may be kept."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    q_length: int
    k_length: int
    head_dim: int
    value_dim: int
    spans: tuple[Span | None, Span | None, Span | None, Span | None]
    """Distances that the tables for bias, queries, keys and values distinguish, lookups on the first axis only; None: no
    such table."""
    states: bool
    """Whether a query table is multiplied with other states than q."""
    further_axes: bool
    """Whether lookups read other axes than the first, or a grid."""
    slopes: bool
    decay: bool
    pair: bool
    scale: Literal["number", "tensor"]
    positions: Literal["run", "starts", "tokens"]
    """Consecutive positions at one offset; a start for each batch row; a position for each token."""
    left: int | None
    right: int | None
    padding: bool
    documents: bool
    mask: Literal["none", "bool", "float", "learned"]
    dropout: bool
    gradient: bool
    """Whether any tensor requires a gradient."""
    return_lse: bool

    @property
    def bias_span(self) -> Span | None:
        return self.spans[0]

    @property
    def reads_distance(self) -> bool:
        """Whether any term depends on the distance on the first axis."""
        return self.slopes or self.spans != NO_SPANS

    @property
    def has_content(self) -> bool:
        """Whether a table is multiplied with queries, keys or probabilities."""
        _, query, key, value = self.spans
        return query is not None or key is not None or value is not None

    @property
    def has_terms(self) -> bool:
        """Whether anything is added to scores or values, or the scale is a tensor."""
        return self.reads_distance or self.further_axes or self.decay or self.pair or self.scale == "tensor"

    @property
    def has_dense_mask(self) -> bool:
        return self.mask != "none"

    @property
    def is_limited(self) -> bool:
        """Whether causality or a window hides keys."""
        return self.left is not None or self.right is not None


NO_SPANS = (None, None, None, None)


class LoweredPlan:
    """A plan and a mask for given tensors. `facts` are plain values; tables are made when an engine asks for them."""

    __slots__ = ("_has_query_shifts", "_offset", "_offset_is_known", "dropout", "facts", "mask", "plan")

    def __init__(self, plan: Plan, mask: Mask, facts: Facts, dropout: float, has_query_shifts: bool):
        self.plan, self.mask, self.facts, self.dropout = plan, mask, facts, dropout
        self._has_query_shifts = has_query_shifts
        self._offset = plan.positions.offset
        self._offset_is_known = facts.positions == "run"

    def fold_query_shifts(self, q: Tensor) -> None:
        """Turn each lookup's query_shift into a bias (or into states, where the scale is a tensor); q is shifted and rotated
        already, so the plan loses its shift. The facts describe the plan after this step."""
        if self.plan.shift is not None:
            self.plan = replace(self.plan, shift=None)
        if self._has_query_shifts:
            self.plan = self.plan.fold_query_shifts(q)
            self._has_query_shifts = False

    # ---- tables over a span of distances --------------------------------------------------------------------------
    def bias_table(self, lo: int, hi: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """[H or 1, n]"""
        return self._sum_tables("bias", lo, hi, dtype)

    def key_table(self, lo: int, hi: int, dtype: torch.dtype | None = None) -> Tensor | None:
        """[H or 1, n, D]"""
        return self._sum_tables("dot_key", lo, hi, dtype)

    def value_table(self, lo: int, hi: int, dtype: torch.dtype | None = None) -> Tensor | None:
        """[H or 1, n, Dv]"""
        return self._sum_tables("add_value", lo, hi, dtype)

    def query_table(
        self, q: Tensor, lo: int, hi: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Table [H or 1, n, E] and states [B, H, Lq, E] whose product is what all lookups add; states None: q itself.

        Tables for q are added; tables for other states are laid side by side, as are the states:
        q·a + q·b + s·c  =  [q, s]·[a + b, c].
        """
        own: Tensor | None = None
        others: list[tuple[Tensor, Tensor]] = []
        for lookup in self._lookups("dot_query"):
            assert lookup.dot_query is not None
            table = expand_table(lookup.dot_query, lookup.index, lo, hi)
            table = table if dtype is None else table.to(dtype)
            if lookup.states is None:
                own = add(own, table)
            else:
                others.append((table, lookup.states.to(dtype or q.dtype).expand(q.shape[0], -1, -1, -1)))
        if not others:
            return own, None
        if own is not None:
            others.insert(0, (own, q.to(dtype or q.dtype)))
        if len(others) == 1:
            return others[0]
        heads = max(table.shape[0] for table, _ in others)
        tables = [table.expand(heads, -1, -1) for table, _ in others]
        return torch.cat(tables, -1), torch.cat([states for _, states in others], -1)

    def _sum_tables(self, kind: str, lo: int, hi: int, dtype: torch.dtype | None) -> Tensor | None:
        total: Tensor | None = None
        for lookup in self._lookups(kind):
            table = expand_table(getattr(lookup, kind), lookup.index, lo, hi)
            total = add(total, table if dtype is None else table.to(dtype))
        return total

    def _lookups(self, kind: str) -> list[Lookup]:
        return [x for x in self.plan.lookups if getattr(x, kind) is not None and not reads_further_axes(x)]

    # ---- the rest -------------------------------------------------------------------------------------------------
    @property
    def scale(self) -> float | Tensor:
        """A number, or a tensor [.., H, Lq, 1]."""
        return self.plan.scale_of(self.facts.head_dim)

    @property
    def offset(self) -> int | None:
        """p_k - p_q of slots 0 and 0 where positions are consecutive and every batch row has the same offset, else None.

        Explicit positions often are consecutive (`position_ids`): on a CPU they are read once, in O(L).
        """
        if not self._offset_is_known:
            self._offset_is_known = True
            if not torch.compiler.is_compiling():
                self._offset = _read_offset(self.plan.positions)
        return self._offset


def lower_plan(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float = 0.0, return_lse: bool = False
) -> LoweredPlan:
    """q, k and v before or after their rotation: only shapes and flags are read."""
    batch, heads, q_length, size = q.shape
    head_dim = plan.width(size)
    _, kv_heads, k_length, value_dim = v.shape
    has_tensor_scale = isinstance(plan.scale, Tensor)
    bias = query = key = value = None
    states = further_axes = has_query_shifts = False
    for lookup in plan.lookups:
        index = lookup.index
        has_query_shifts = has_query_shifts or lookup.query_shift is not None
        if isinstance(index, Grid) or index.axis != 0:
            further_axes = True
            continue
        has_bias = lookup.bias is not None
        if lookup.query_shift is not None:  # what `fold_query_shifts` makes of it
            has_bias, states = has_bias or not has_tensor_scale, states or has_tensor_scale
        if has_bias:
            bias = _widen_span(bias, index)
        if lookup.dot_query is not None:
            query = _widen_span(query, index)
            states = states or lookup.states is not None
        if lookup.dot_key is not None:
            key = _widen_span(key, index)
        if lookup.add_value is not None:
            value = _widen_span(value, index)
    has_pair = plan.pair is not None
    if plan.pair is not None:
        plan = replace(plan, pair=partial(_call_pair, plan.pair, batch, heads, bool(plan.pair_axes)))
    left, right = mask.limits
    extra: Literal["none", "bool", "float", "learned"] = "none"
    if mask.extra is not None:
        extra = "bool" if mask.extra.dtype == torch.bool else "learned" if mask.extra.requires_grad else "float"
    positions: Literal["run", "starts", "tokens"] = "run"
    if plan.positions.offset is None:
        positions = "tokens" if plan.positions.runs is None else "starts"
    gradient = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or extra == "learned" or _requires_grad(plan)
    )
    facts = Facts(
        q.device, q.dtype, batch, heads, kv_heads, q_length, k_length, head_dim, value_dim, (bias, query, key, value),
        states, further_axes, plan.slopes is not None, plan.decay is not None, has_pair,
        "tensor" if has_tensor_scale else "number", positions, left, right,
        mask.key_mask is not None, mask.documents is not None, extra, dropout > 0.0, gradient, return_lse,
    )  # fmt: skip
    return LoweredPlan(plan, mask, facts, dropout, has_query_shifts)


def _widen_span(span: Span | None, index: Index) -> Span:
    return (index.lo, index.hi) if span is None else (min(span[0], index.lo), max(span[1], index.hi))


def _requires_grad(plan: Plan) -> bool:
    """Whether any tensor of a plan does, those of the pre-pass included."""
    tensors = [plan.shift, plan.cosine, plan.scale, plan.slopes, *(plan.append or ()), *(plan.decay or ())]
    if plan.rotate is not None:
        tensors += [*(plan.rotate.q or ()), *(plan.rotate.k or ())]
    if any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        return True
    return any(tensor.requires_grad for lookup in plan.lookups for _, tensor in lookup.tensors())


def _call_pair(pair: Callable, batch: int, heads: int, every_axis: bool, p_q: Tensor, p_k: Tensor) -> Tensor:
    """The result of `pair`, with its shape validated: broadcasting would hide a mistake."""
    added = pair(p_q, p_k)
    length = -2 if every_axis else -1
    shape = [batch, heads, p_q.shape[length], p_k.shape[length]]
    expected = f"pair must return [lq, lk] or [B or 1, H or 1, lq, lk] = {shape}"
    if not isinstance(added, Tensor):
        raise TypeError(f"{expected}, got {type(added).__name__}")
    leading = [(1, batch), (1, heads)][4 - added.dim() :]
    fits = 2 <= added.dim() <= 4 and list(added.shape[-2:]) == shape[2:]
    if not fits or any(size not in sizes for size, sizes in zip(added.shape, leading, strict=False)):
        raise ValueError(f"{expected}, got {list(added.shape)}")
    return added


def reads_further_axes(lookup: Lookup) -> bool:
    """Whether it reads other axes than the first."""
    return isinstance(lookup.index, Grid) or lookup.index.axis != 0


def _read_offset(positions: Positions) -> int | None:
    q_start = _consecutive_start(positions.q)
    k_start = q_start if positions.k is positions.q else _consecutive_start(positions.k)
    if q_start is None or k_start is None:
        return None
    lowest, highest = torch.aminmax(k_start - q_start)
    return int(lowest) if lowest == highest else None


def _consecutive_start(side: Side) -> Tensor | None:
    """[1] or [B]: the first position of each row, if those after it follow one by one."""
    if isinstance(side, Run):
        start = side.start if isinstance(side.start, Tensor) else torch.tensor(side.start, device="cpu")
        return start.reshape(-1).to(torch.int64) if start.device.type == "cpu" else None
    if side.device.type != "cpu":
        return None
    side = side.to(torch.int64)
    first = side[..., :1]
    return first.reshape(-1) if torch.equal(side, first + torch.arange(side.shape[-1], device="cpu")) else None
