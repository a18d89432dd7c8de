"""Lookups on further axes (segments, the rows of an image) and on grids, as a few more channels of q, k and v.

Tokens have few different positions on such an axis. A query adds one number for each position c, and a key selects its own:

    scores     q' = [q, a_i0, a_i1, ...]            k' = [k, [p_j = 0], [p_j = 1], ...]     a_ic = states_i . t[row(c - p_i)]
    dot_key    q' = [.., [p_i = 0], ...]            k' = [.., k_j . t[row(p_j - c)], ...]
    values     v' = [v, [p_j = 0], ...]             out' = [out, m_i0, ...]      out + sum_c m_ic t[row(c - p_i)]

An engine then runs attention with slightly wider heads and the terms of axis 0 only. All of this is ordinary differentiable
PyTorch, with sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.index import Grid, Index
from ..core.plan import Lookup, Plan
from ..core.positions import Positions, Run
from .lowering import Facts, LoweredPlan, lower_plan, reads_further_axes
from .reference import repeat_heads

UNIT = 16  # channels come in multiples of this, so that rows stay aligned
HUGE = {torch.float16: 6e4}  # instead of infinity, which times zero is NaN; other dtypes: 1e30


def supports(facts: Facts, plan: Plan, widest: int) -> str | None:
    """Why these lookups cannot become channels, or None. Reads explicit positions once for each Positions."""
    lookups = [lookup for lookup in plan.lookups if reads_further_axes(lookup)]
    axes = sorted({axis for lookup in lookups for axis in lookup.index.axes})
    positions = plan.positions
    if _needs_prescaling(plan) and any(lookup.dot_key is not None for lookup in plan.lookups):
        return f"the plan has a bias on axis {axes[-1]}, dot_key, and a scale for each query"
    if not positions.bounded(axes) and _cannot_be_read(positions, axes):
        return f"it needs the bounds of the positions on axes {axes}, which cannot be read while compiling or capturing"
    scores, values = count_channels(facts.dtype, plan)
    if max(facts.head_dim + scores, facts.value_dim + values) > widest:
        return (
            f"lookups on axes {axes} need a channel for each different position: {scores} for scores and {values} for "
            f"values, with heads of {facts.head_dim} and {facts.value_dim} at most {widest}"
        )
    return None


def widen(
    q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan
) -> tuple[Tensor, Tensor, Tensor, LoweredPlan, Callable[[Tensor], Tensor]]:
    """Wider q, k and v, the lowered plan of axis 0 alone, and a function that makes the output from theirs."""
    plan = lowered.plan
    size, v_size = q.shape[3], v.shape[3]
    lookups = [lookup for lookup in plan.lookups if reads_further_axes(lookup)]
    if k.shape[1] != q.shape[1] and any(x.dot_key is not None and x.dot_key.shape[0] > 1 for x in lookups):
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    if _needs_prescaling(plan):
        q, plan = prescale(q, plan)
        lookups = [lookup for lookup in plan.lookups if reads_further_axes(lookup)]
    scale = plan.scale_of(size)
    q_more: list[Tensor] = []
    k_more: list[Tensor] = []
    v_more: list[Tensor] = []
    mass = []
    for axes in dict.fromkeys(lookup.index.axes for lookup in lookups):
        some = [lookup for lookup in lookups if lookup.index.axes == axes]
        ours, theirs = (AxisPositions(plan.positions, axes, number, q.device) for number in (0, 1))
        added = [
            _query_numbers(lookup, q, scale, theirs.rows(lookup.index, 1), _are_distinct(lookup.index, plan.positions))
            for lookup in some
            if _adds_to_query(lookup)
        ]
        if added:
            numbers = sum(added[1:], added[0])
            parts = _split_precision(numbers, q.dtype, any(lookup.bias is not None for lookup in some))
            q_more += [_expand_batch(part, q) for part in parts]
            k_more += [theirs.one_hot(k)] * len(parts)
        for lookup in some:
            if lookup.dot_key is not None:
                numbers = _product(k, lookup.dot_key)
                rows = ours.rows(lookup.index, -1)
                distinct = _are_distinct(lookup.index, plan.positions)
                picked = GatherRows.apply(numbers, _expand_rows(rows, numbers), distinct)
                k_more.append(_expand_batch(picked.to(k.dtype), k))
                q_more.append(ours.one_hot(q))
            if lookup.add_value is not None:
                mass.append((v_size + sum([x.shape[3] for x in v_more]), lookup, theirs.rows(lookup.index, 1)))
                v_more.append(theirs.one_hot(v))

    def finish(out: Tensor) -> Tensor:
        result = out[..., :v_size]
        for begin, lookup, rows in mass:
            share = out[..., begin : begin + rows.shape[-1]]
            distinct = _are_distinct(lookup.index, plan.positions)
            binned = ScatterRows.apply(_precise(share), _expand_rows(rows, share), lookup.index.n, distinct)
            result = result + (binned @ lookup.add_value.to(binned.dtype)).to(out.dtype)
        return result

    wider, wider_v = _append_channels(q, q_more), _append_channels(v, v_more)
    kept = tuple(
        replace(
            lookup,
            states=q if lookup.dot_query is not None and lookup.states is None else lookup.states,
            dot_key=_pad_table(lookup.dot_key, wider.shape[3]),
            add_value=_pad_table(lookup.add_value, wider_v.shape[3]),
        )
        for lookup in plan.lookups
        if not reads_further_axes(lookup)
    )
    plan = replace(plan, lookups=kept, scale=scale if plan.scale is None else plan.scale)
    wider_k = _append_channels(k, k_more)
    again = lower_plan(wider, wider_k, wider_v, plan, lowered.mask, lowered.dropout, lowered.facts.return_lse)
    return wider, wider_k, wider_v, again, finish


def _needs_prescaling(plan: Plan) -> bool:
    """Whether a bias becomes channels although the scale, which multiplies them, is a tensor: it cannot be divided out."""
    return isinstance(plan.scale, Tensor) and any(x.bias is not None for x in plan.lookups if reads_further_axes(x))


def prescale(q: Tensor, plan: Plan) -> tuple[Tensor, Plan]:
    """q and states times the scale, which becomes 1."""
    scale = plan.scale_of(q.shape[3])
    assert isinstance(scale, Tensor)
    lookups = [
        lookup if lookup.states is None else replace(lookup, states=(lookup.states * scale).to(q.dtype))
        for lookup in plan.lookups
    ]
    return (q * scale).to(q.dtype), replace(plan, lookups=tuple(lookups), scale=1.0)


class AxisPositions:
    """The positions of tokens on some axes as one number 0 .. count - 1: every combination between the lowest and highest."""

    def __init__(self, positions: Positions, axes: tuple[int, ...], side: int, device: torch.device):
        """side: 0 for queries, 1 for keys."""
        bounds = [positions.bounds(axis)[side] for axis in axes]
        sizes = [high - low + 1 for low, high in bounds]
        own, other = (positions.q_positions, positions.k_positions)[:: 1 if side == 0 else -1]
        self.count = prod(sizes)
        self.others = {axis: _two_dims(other(device, axis)) for axis in axes}
        self.own = torch.zeros((), dtype=torch.int64, device=device)
        self.at: dict[int, Tensor] = {}  # [count], the position on each axis
        self.steps, rest = torch.arange(self.count, device=device), self.count
        for axis, size, (low, _) in zip(axes, sizes, bounds, strict=True):
            rest //= size
            self.own = self.own * size + (_two_dims(own(device, axis)) - low)
            self.at[axis] = self.steps // rest % size + low

    def rows(self, index: Index | Grid, sign: int) -> Tensor:
        """Table row for each token of the other side and each position, [B or 1, L, count]; sign: of position - token."""
        return index.rows_of(lambda axis: sign * (self.at[axis] - self.others[axis][..., None]))

    def one_hot(self, like: Tensor) -> Tensor:
        """One-hot positions of the tokens, [B, heads, L, count]."""
        return _expand_batch((self.own[..., None] == self.steps).to(like.dtype)[:, None], like)


class GatherRows(torch.autograd.Function):
    """x [.., n] at rows [.., count]. Its backward pass adds without atomics, in a fixed order. distinct: no two rows of a token are
    the same."""

    @staticmethod
    def forward(x: Tensor, rows: Tensor, distinct: bool) -> Tensor:
        return x.gather(-1, rows)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, rows, ctx.distinct = inputs
        ctx.save_for_backward(rows)
        ctx.n = x.shape[-1]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ScatterRows.apply(grad, ctx.saved_tensors[0], ctx.n, ctx.distinct), None, None


class ScatterRows(torch.autograd.Function):
    """The transpose of GatherRows: y [.., count] summed into its rows, [.., n], one column after another."""

    @staticmethod
    def forward(y: Tensor, rows: Tensor, n: int, distinct: bool) -> Tensor:
        x = y.new_zeros(*y.shape[:-1], n)
        if distinct:
            return x.scatter_(-1, rows, y)
        for column in range(y.shape[-1]):
            at = slice(column, column + 1)
            x.scatter_add_(-1, rows[..., at], y[..., at])
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.distinct = inputs[3]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad: Tensor):
        return GatherRows.apply(grad, ctx.saved_tensors[0], ctx.distinct), None, None, None


def _are_distinct(index: Index | Grid, positions: Positions) -> bool:
    """Whether a token reads another row for each position on the axis: a row for each distance, and none clamped."""
    if not isinstance(index, Index) or index.rows is not None:
        return False
    (low_q, high_q), (low_k, high_k) = positions.bounds(index.axis)
    return index.lo <= low_k - high_q and high_k - low_q <= index.hi


def _query_numbers(lookup: Lookup, q: Tensor, scale: float | Tensor, rows: Tensor, distinct: bool) -> Tensor:
    """What a query adds for each position of a key, inside the scale, [B or 1, H, Lq, count]."""
    x = _precise(q.new_zeros(()))
    if lookup.dot_query is not None:
        x = _product(q if lookup.states is None else lookup.states, lookup.dot_query)
    if lookup.bias is not None:
        assert isinstance(scale, float)
        x = x + (lookup.bias.to(x.dtype) / scale)[None, :, None, :]
    x = x.expand(x.shape[0], q.shape[1], q.shape[2], -1)
    if rows.shape[0] > 1:
        x = x.expand(rows.shape[0], -1, -1, -1)
    return GatherRows.apply(x, _expand_rows(rows, x), distinct)


def _product(states: Tensor, table: Tensor) -> Tensor:
    """states [B, H, L, E] and table [H or 1, n, E] -> [B, H, L, n], float32 or better."""
    states = _precise(states)
    return states @ table.to(states.dtype).transpose(-1, -2)


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _split_precision(numbers: Tensor, dtype: torch.dtype, precise: bool) -> list[Tensor]:
    """The numbers in dtype; a bias in half precision as a sum of two of them. Gradients pass through the first."""
    huge = HUGE.get(dtype, 1e30)
    numbers = numbers.clamp(-huge, huge)
    first = numbers.to(dtype)
    if not precise or dtype.itemsize >= 4:
        return [first]
    return [first, (numbers - first.to(numbers.dtype)).detach().to(dtype)]


def count_channels(dtype: torch.dtype, plan: Plan) -> tuple[int, int]:
    """Channels for scores and for values."""
    scores = values = 0
    positions, lookups = plan.positions, [lookup for lookup in plan.lookups if reads_further_axes(lookup)]
    for axes in dict.fromkeys(lookup.index.axes for lookup in lookups):
        some = [lookup for lookup in lookups if lookup.index.axes == axes]
        bounds = [positions.bounds(axis) for axis in axes]
        ours, theirs = (prod([both[side][1] - both[side][0] + 1 for both in bounds]) for side in (0, 1))
        if any(map(_adds_to_query, some)):
            scores += theirs * (2 if dtype.itemsize < 4 and any(x.bias is not None for x in some) else 1)
        scores += ours * len([lookup for lookup in some if lookup.dot_key is not None])
        values += theirs * len([lookup for lookup in some if lookup.add_value is not None])
    return -(-scores // UNIT) * UNIT, -(-values // UNIT) * UNIT


def _cannot_be_read(positions: Positions, axes: list[int]) -> bool:
    sides = [side for axis in axes for side in (positions.q_axes[axis], positions.k_axes[axis])]
    starts = [side.start if isinstance(side, Run) else side for side in sides]
    tensors = [x for x in starts if isinstance(x, Tensor)]
    if tensors and (torch.compiler.is_compiling() or any(x.is_meta for x in tensors)):
        return True
    return any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing()


def _adds_to_query(lookup: Lookup) -> bool:
    return lookup.bias is not None or lookup.dot_query is not None


def _two_dims(positions: Tensor) -> Tensor:
    return positions if positions.dim() == 2 else positions[None]


def _expand_rows(rows: Tensor, x: Tensor) -> Tensor:
    """Rows [B or 1, L, count] for every batch row and head of x [B, H, L, ..]."""
    return rows[:, None].expand(*x.shape[:3], -1)


def _expand_batch(x: Tensor, like: Tensor) -> Tensor:
    return x.expand(*like.shape[:3], -1)


def _append_channels(x: Tensor, more: list[Tensor]) -> Tensor:
    if not more:
        return x
    wide = torch.cat([x, *more], -1)
    return pad(wide, (0, -sum([part.shape[3] for part in more]) % UNIT))


def _pad_table(table: Tensor | None, size: int) -> Tensor | None:
    return None if table is None else pad(table, (0, size - table.shape[-1]))
