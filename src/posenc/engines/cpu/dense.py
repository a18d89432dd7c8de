"""Short texts: all terms as one mask [B or 1, H, Lq, Lk] (dense_terms.py), and one call of PyTorch's attention.

A mask of biases only that needs no gradient is kept with copies of the tables it was made from, and used again where the
tables' values are equal: no way of changing a parameter makes it stale. Kept masks are bounded in number and size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.index import Index
from ...core.memo import STEP, Memo
from ...core.plan_checks import holds_nan
from ...core.tables import add
from ...core.torch_modes import direct_apply, first_derivatives_only
from .. import rules_cpu
from ..lowering import Facts, LoweredPlan
from . import dense_terms, dropped
from .dense_terms import bias_gradients, by_pair, limits_of, make_bias, multiply, reached
from .head_block import NEG_INF, select_shared, share_blocks
from .joined_masks import join_masks

BLOCK = 1 << 19  # scores of the backward pass that are in memory at once
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def applies(facts: Facts) -> bool:
    return rules_cpu.cpu_form(facts) == "dense"


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan, scale: float) -> Tensor | None:
    """The output, or None where a masked key or value holds NaN or inf: the tiles or blocks handle these."""
    facts = lowered.facts
    if k.shape[3] != v.shape[3] and not facts.dropout:
        return None
    hidden = is_empty = None
    if not lowered.mask.plain or (facts.is_limited and facts.q_length > facts.k_length):
        hidden, is_empty = join_masks(lowered.mask, lowered.mask.limits, facts.q_length, facts.k_length, _precision(q))
    mask = add(_bias(lowered, hidden is None), hidden)
    _, query_span, key_span, _ = facts.spans
    if query_span is not None or key_span is not None:
        mask = _add_content(q, k, mask, lowered, scale)
    if facts.dropout:
        out = dropped.attend(q, k, v, mask, scale, lowered.dropout)
    else:
        out = attend_with_mask(q, k, v, mask, scale, facts.gradient)
    if is_empty is not None:
        out = out.masked_fill(is_empty, 0.0)
    if (facts.is_limited or hidden is not None) and holds_nan(out):
        return None
    return out


def _precision(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def attend_with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, gradient: bool) -> Tensor:
    """PyTorch's attention, whose gradient reaches the mask too."""
    # the kernels read channels, and keys of a mask, side by side
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and gradient and mask.requires_grad:
        return _apply_attend(q, k, v, mask, scale)
    if gradient and not grouped:
        return _apply_fused(q, k, v, mask, scale)
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)


# ---- biases ----------------------------------------------------------------------------------------------------------
_masks = Memo(most=64, numbers=1 << 25)  # 16 layers of the largest
_rows = Memo(most=64, numbers=1 << 22)
"""Masks, and the bias by distance for single queries: (indices, copies of the tables, what was made of them)."""


def _bias(lowered: LoweredPlan, with_limits: bool) -> Tensor | None:
    """What depends on the distance alone, causality and windows included where they are wanted: [1, H or 1, Lq, Lk]."""
    plan, facts = lowered.plan, lowered.facts
    limits = (facts.left, facts.right) if with_limits else (None, None)
    offset = lowered.offset or 0
    q_length, k_length = facts.q_length, facts.k_length
    precision = torch.float64 if facts.dtype == torch.float64 else torch.float32
    if facts.spans[0] is None and plan.slopes is None:
        return limits_of(*limits, q_length, k_length, precision) if limits != (None, None) else None
    found = [(lookup.index, lookup.bias) for lookup in plan.lookups if lookup.bias is not None]
    tables = tuple(table for _, table in found)
    if plan.slopes is not None:
        tables = (*tables, plan.slopes)
    indices: tuple = tuple([index for index, _ in found])  # no Grid: the positions have one axis
    facts_of_mask = (offset, q_length, k_length, *limits, precision)
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        return make_bias(tables, indices, *facts_of_mask)
    mask = find_bias(tables, indices, *facts_of_mask)
    return keep_bias(tables, indices, *facts_of_mask) if mask is None else mask


def keep_bias(tables: tuple[Tensor, ...], indices: tuple, *facts) -> Tensor:
    """`make_bias` without gradients, kept for `find_bias`, which takes the same."""
    with torch.inference_mode(False), torch.no_grad():
        mask = make_bias(tables, indices, *facts)
        _keep(_masks, _key(tables, *facts), tables, indices, mask)
    return mask


def find_bias(
    tables: tuple[Tensor, ...], indices: tuple, offset: int, q_length: int, k_length: int, left: int | None,
    right: int | None, precision: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """The kept mask of these numbers, or None. tables: a bias for each index, then the slopes."""
    return _find(_masks, _key(tables, offset, q_length, k_length, left, right, precision), tables, indices)


def _key(tables: tuple[Tensor, ...], *facts) -> tuple:
    """Each layer's tables have an entry of their own, found by their address; the values are compared before it is used."""
    return (tables[0].data_ptr(), *facts)


def _keep(memo: Memo, key: tuple, tables: tuple[Tensor, ...], indices: tuple, made: Tensor) -> None:
    memo.put(key, (indices, tuple([table.clone() for table in tables]), made), made.numel())


def _find(memo: Memo, key: tuple, tables: tuple[Tensor, ...], indices: tuple) -> Tensor | None:
    """What was kept under the key, where it was made of the same numbers."""
    found = memo.get(key)
    if found is None or found[0] != indices or len(found[1]) != len(tables):
        return None
    for kept, table in zip(found[1], tables):
        if not kept.equal(table):
            return None
    return found[2]


def row_of_query(
    tables: tuple[Tensor, ...], indices: tuple[Index, ...], lowest: int, count: int, precision: torch.dtype
) -> Tensor | None:
    """[1, H, 1, count]: the bias of one query whose distances are `lowest` and on; a view of a kept row that serves the next
    steps too. None where a table holds NaN. tables: a bias for each index, then the slopes."""
    whole = whole_row(tables, indices, lowest, count, precision)
    return None if whole is None else whole.narrow(3, lowest - first_of_row(lowest), count)


def first_of_row(lowest: int) -> int:
    """The first distance of the row that `whole_row` keeps."""
    return lowest // STEP * STEP


def whole_row(
    tables: tuple[Tensor, ...], indices: tuple[Index, ...], lowest: int, count: int, precision: torch.dtype
) -> Tensor | None:
    """[1, H, 1, at least count], kept: from `first_of_row(lowest)` on."""
    first, last = first_of_row(lowest), -(-(lowest + count) // STEP) * STEP
    key = _key(tables, first, last, precision)
    whole = _find(_rows, key, tables, indices)
    if whole is None:
        with torch.inference_mode(False), torch.no_grad():
            distances = torch.arange(first, last, device="cpu")
            row = None
            for index, table in zip(indices, tables, strict=False):
                row = add(row, table.to(precision).index_select(1, index.lookup(distances)))
            if len(tables) > len(indices):
                row = add(row, tables[-1].to(precision)[:, None] * -distances.abs().to(precision))
            assert row is not None
            if any(holds_nan(table) for table in tables):
                return None
            whole = row[None, :, None]
            _keep(_rows, key, tables, indices, whole)
    return whole


# ---- content -----------------------------------------------------------------------------------------------------------
def _add_content(q: Tensor, k: Tensor, mask: Tensor | None, lowered: LoweredPlan, scale: float) -> Tensor:
    """mask plus the terms that depend on queries and keys: [B, H, Lq, Lk]."""
    facts = lowered.facts
    offset, q_length, k_length = lowered.offset or 0, facts.q_length, facts.k_length
    lowest, highest = offset - q_length + 1, offset + k_length - 1
    precision = torch.promote_types(q.dtype, torch.float32)
    _, query_span, key_span, _ = facts.spans
    if query_span is not None:
        lo, hi = reached(query_span, lowest, highest)
        table, states = lowered.query_table(q, lo, hi, precision)
        assert table is not None
        products = multiply(q if states is None else states, table * scale)
        mask = add(mask, by_pair(products, lo - lowest, highest - hi, k_length))
    if key_span is not None:
        lo, hi = reached(key_span, lowest, highest)
        found = lowered.key_table(lo, hi, precision)
        assert found is not None
        products = multiply(k, found.flip(1) * scale)
        mask = add(mask, by_pair(products, highest - hi, lo - lowest, q_length).transpose(2, 3))
    assert mask is not None
    return mask


# ---- attention whose second derivatives say where they are -----------------------------------------------------------------
class _Fused(torch.autograd.Function):
    """PyTorch's fused attention, forward and backward."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        out, lse = flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        q, k, v, mask, out, lse = ctx.saved_tensors
        grads = flash_backward(grad, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=ctx.scale)
        return (*grads, None, None)


# ---- attention with a mask that needs a gradient -------------------------------------------------------------------------
def attend_with_bias(
    q: Tensor, k: Tensor, v: Tensor, tables: tuple, indices: tuple, facts: tuple, hidden: Tensor | None, scale: float,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """`attend_with_mask` of `make_bias(tables, indices, *facts)` + hidden, as one function with one gradient, which hidden has not."""
    if dropout:
        return dropped.attend_with_bias(q, k, v, tables, indices, facts, hidden, scale, dropout)
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return attend_with_mask(q, k, v, add(hidden, make_bias(tables, indices, *facts)), scale, True)
    return _apply_attend_with_bias(q, k, v, scale, indices, facts, hidden, *tables)


class _AttendWithBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, indices: tuple, facts: tuple, hidden: Tensor | None,
        *tables: Tensor,
    ) -> Tensor:  # fmt: skip
        mask = add(hidden, make_bias(tables, indices, *facts))
        ctx.save_for_backward(q, k, v, mask)
        ctx.more = tables
        ctx.scale = scale
        ctx.given = indices, facts, [(table.shape, table.dtype) for table in tables]
        return without_gradients(q, k, v, mask, scale)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        q, k, v, mask = ctx.saved_tensors
        *grads, d_mask = all_gradients(q, k, v, mask, grad, ctx.scale, (1, *mask.shape[1:]))
        assert d_mask is not None
        indices, facts, tables = ctx.given
        return *grads, None, None, None, None, *bias_gradients(d_mask, indices, facts, tables, ctx.needs_input_grad[7:])


def attend_with_table(
    q: Tensor, k: Tensor, v: Tensor, states: Tensor, table: Tensor, facts: tuple, mask: Tensor | None, scale: float,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """`attend_with_mask` of mask + `multiply_by_distance(states, table, *facts)`, as one function with one gradient where q and k have the
    same heads. The mask needs no gradient."""
    if dropout:
        mask = add(mask, dense_terms.multiply_by_distance(states, table, *facts))
        return dropped.attend(q, k, v, mask, scale, dropout)
    is_long = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] > BLOCK
    if is_long or q.shape[1] != k.shape[1] or q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return attend_with_mask(
            q, k, v, add(mask, dense_terms.multiply_by_distance(states, table, *facts)), scale, True
        )
    return _apply_attend_with_table(q, k, v, None if states is q else states, table, facts, mask, scale)


class _AttendWithTable(torch.autograd.Function):
    """A score is scale (q·k + states·table[row]) and what needs no gradient, so that all gradients have the factor of the scores'."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, states: Tensor | None, table: Tensor, facts: tuple, mask: Tensor | None,
        scale: float,
    ) -> Tensor:  # fmt: skip
        mask = add(mask, dense_terms.multiply_by_distance(q if states is None else states, table, *facts))
        ctx.save_for_backward(q, k, v, states, table, mask)
        ctx.facts, ctx.scale = facts, scale
        return without_gradients(q, k, v, mask, scale)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        q, k, v, states, table, mask = ctx.saved_tensors
        given, more = (q, k, v, states, table), (ctx.facts, ctx.scale, ctx.needs_input_grad[4])
        found = _table_gradients(*given, mask, grad, *more)
        if holds_nan(found[0]):
            shown = _show_empty(mask, grad)
            found = found if shown is None else _table_gradients(*given, *shown, *more)
        if q.dtype != mask.dtype or table.dtype != mask.dtype:
            found = tuple([None if x is None else x.to(own.dtype) for x, own in zip(found, given)])
        return *found, None, None, None


def _table_gradients(
    q: Tensor, k: Tensor, v: Tensor, states: Tensor | None, table: Tensor, mask: Tensor, grad: Tensor, facts: tuple,
    scale: float, wanted: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Of q, k, v, states and the table, where wanted."""
    rows, keys, values = stack(q, k, v, mask.dtype)
    p = probabilities(rows, keys, mask, q.shape, scale)
    d_v, d_s = _stacked_gradients(values, p, grad)
    d_s.mul_(scale)
    d_q, d_k = torch.bmm(d_s, keys), torch.bmm(d_s.transpose(1, 2), rows)
    d_s, d_states = d_s.view(*q.shape[:3], k.shape[2]), None
    if states is None:
        d_q, d_table = dense_terms.product_gradients(d_s, rows, table, facts, d_q, wanted)
    else:
        own = states.to(p.dtype).reshape(p.shape[0], p.shape[1], -1)
        d_states, d_table = dense_terms.product_gradients(d_s, own, table, facts, None, wanted)
        d_states = d_states.view(states.shape)
    return d_q.view(q.shape), d_k.view(k.shape), d_v.view(v.shape), d_states, d_table


class _Attend(torch.autograd.Function):
    """PyTorch's fused backward pass gives no gradient of its mask. Forward it is the same call as without gradients, with the
    same bits; backward the scores are made again, and all products are of stacked heads. Heads that share keys are rows of
    one matrix."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        return without_gradients(q, k, v, mask, scale)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        q, k, v, mask = ctx.saved_tensors
        return *all_gradients(q, k, v, mask, grad, ctx.scale, mask.shape if ctx.needs_input_grad[3] else None), None


def without_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    # PyTorch looks at requires_grad even inside a function, and would take its unfused form
    q, k, v, mask = q.detach(), k.detach(), v.detach(), mask.detach()
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def all_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor, scale: float, shape: tuple[int, ...] | None
) -> tuple[Tensor | None, ...]:
    """Of q, k, v and what is added to the scores, by its shape [B or 1, H or 1, ..]; None: not of that."""
    found = _block_gradients(q, k, v, mask, grad, scale, shape)
    if holds_nan(found[0]):
        shown = _show_empty(mask, grad)
        found = found if shown is None else _block_gradients(q, k, v, *shown, scale, shape)
    return found


def _show_empty(mask: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | None:
    """The mask and the output's gradient for queries that the mask hides from all keys, whose gradients are zeros; None: there are none."""
    empty = mask.amax(-1, keepdim=True) == NEG_INF
    return (mask.masked_fill(empty, 0.0), grad.masked_fill(empty, 0.0)) if bool(empty.any()) else None


def _block_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor, scale: float, shape: tuple[int, ...] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same, of the scores of some heads at a time."""
    if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= BLOCK:
        d_q, d_k, d_v, d_s = gradients(q, k, v, mask, grad, scale)
        d_mask = None if shape is None else d_s if d_s.shape == shape else d_s.sum_to_size(shape)
        if q.dtype != d_s.dtype:
            d_q, d_k, d_v = d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)
        return d_q, d_k, d_v, d_mask
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_mask = None if shape is None else mask.new_zeros(shape)
    for at, own in share_blocks(q.shape[0], q.shape[1], k.shape[1], q.shape[2] * k.shape[2], BLOCK):
        added = mask[select_shared(mask.shape, at)]
        d_q[at], d_k[own], d_v[own], d_s = gradients(q[at], k[own], v[own], added, grad[at], scale)
        if shape is not None and d_mask is not None:
            part = d_mask[select_shared(shape, at)]
            part += d_s.sum_to_size(part.shape)
    return d_q, d_k, d_v, d_mask


def gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor, scale: float, *, p: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of q, k, v and the scores [B, H, Lq, Lk]. p: the stacked probabilities, if they were kept; then only the mask's dtype counts.
    grad_lse: of the log-sum-exp [B, H, Lq]."""
    q_rows, keys, values = stack(q, k, v, mask.dtype)
    p = probabilities(q_rows, keys, mask, q.shape, scale) if p is None else p
    d_v, d_s = _stacked_gradients(values, p, grad)
    if grad_lse is not None:
        d_s.addcmul_(p, grad_lse.reshape(*p.shape[:2], 1))
    d_q, d_k = torch.bmm(d_s, keys).mul_(scale), torch.bmm(d_s.transpose(1, 2), q_rows).mul_(scale)
    return d_q.view(q.shape), d_k.view(k.shape), d_v.view(v.shape), d_s.view(*q.shape[:3], k.shape[2])


def stack(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B * Hkv, rows, ..] in a dtype, where the queries of all heads that share keys are rows of one matrix."""
    batch, heads, q_length, size = q.shape
    _, kv_heads, k_length, v_size = v.shape
    if q.dtype != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if batch == 1 and heads == kv_heads:
        return q[0], k[0], v[0]
    stacks, rows = batch * kv_heads, heads // kv_heads * q_length
    return q.reshape(stacks, rows, size), k.reshape(stacks, k_length, size), v.reshape(stacks, k_length, v_size)


def probabilities(q: Tensor, k: Tensor, mask: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
    """Of stacked queries and keys, [B * Hkv, rows, Lk]. shape: of the queries, [B, H, Lq, ..]."""
    mask = mask.expand(*shape[:3], k.shape[1])
    mask = mask[0] if shape[:2] == (1, q.shape[0]) else mask.reshape(*q.shape[:2], k.shape[1])
    return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale).softmax(-1)


def _stacked_gradients(v: Tensor, p: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of values and scores, stacked as they are. grad: of the output [B, H, Lq, Dv]."""
    if grad.dtype != p.dtype:
        grad = grad.to(p.dtype)
    grad = grad[0] if grad.shape[0] == 1 and grad.shape[1] == p.shape[0] else grad.reshape(*p.shape[:2], v.shape[2])
    d_p = torch.bmm(grad, v.transpose(1, 2))
    return torch.bmm(p.transpose(1, 2), grad), torch._softmax_backward_data(d_p, p, -1, p.dtype)


_apply_fused, _apply_attend, _apply_attend_with_bias, _apply_attend_with_table = map(
    direct_apply, (_Fused, _Attend, _AttendWithBias, _AttendWithTable)
)
