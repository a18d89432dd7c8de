"""Short texts: all terms as one mask [B or 1, H, Lq, Lk], and one call of PyTorch's attention.

    bias by distance [H, n]        ─ Toeplitz ─▶  [H, Lq, Lk]        n = Lq + Lk - 1 distances,
    states·table [B, H, Lq, n]     ─ skew ─────▶  [B, H, Lq, Lk]     key j of query i stands at j - i + Lq - 1
    k·table      [B, H, Lk, n]     ─ skew ─────▶  [B, H, Lk, Lq]ᵀ

A mask of biases only that needs no gradient is kept with copies of the tables it was made from, and used again where the
tables' values are equal: no way of changing a parameter makes it stale. Kept masks are bounded in number and size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, wraps

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ...core.index import Index
from ...core.mask import Mask
from ...core.memo import STEP, Memo
from ...core.plan import holds_nan
from ...core.tables import expand_table
from .. import rules_cpu
from ..lowering import Facts, LoweredPlan, add
from .head_block import NEG_INF
from .ops import refuse_second_derivatives

ALL = slice(None)
BLOCK = 1 << 19  # scores of the backward pass that are in memory at once
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def applies(facts: Facts) -> bool:
    return rules_cpu.cpu_form(facts) == "dense"


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan, scale: float) -> Tensor | None:
    """The output, or None where a masked key or value holds NaN or inf, or a query is fully masked: the tiles handle these."""
    facts = lowered.facts
    mask = _bias(lowered)
    _, query_span, key_span, _ = facts.spans
    if query_span is not None or key_span is not None:
        mask = _add_content(q, k, mask, lowered, scale)
    key_mask = lowered.mask.key_mask
    if key_mask is not None:
        hidden = ~key_mask[:, None, None]
        precision = torch.promote_types(q.dtype, torch.float32)
        shape = (q.shape[0], facts.heads, q.shape[2], k.shape[2])
        mask = q.new_zeros(shape, dtype=precision) if mask is None else mask.expand(shape)
        mask = mask.masked_fill(hidden, NEG_INF)
    if k.shape[3] != v.shape[3]:
        return None
    may_hide_all = key_mask is not None or (facts.is_limited and facts.q_length > facts.k_length)
    if may_hide_all and mask is not None and bool((mask.detach().amax(-1) == NEG_INF).any()):
        return None  # its gradient would be NaN; without gradients too, for the same bits
    out = attend_with_mask(q, k, v, mask, scale, facts.gradient)
    if (facts.is_limited or key_mask is not None) and holds_nan(out):
        return None
    return out


def attend_with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, gradient: bool) -> Tensor:
    """PyTorch's attention, whose gradient reaches the mask too."""
    # the kernels read channels, and keys of a mask, side by side
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and ((gradient and mask.requires_grad) or grouped):  # grouped: the same bits without a gradient
        return _Attend.apply(q, k, v, mask, scale)
    if gradient and not grouped:
        return _Fused.apply(q, k, v, mask, scale)
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)


def first_derivatives_only(backward):
    """A backward whose results raise where they are differentiated again. PyTorch's `once_differentiable` silently returns
    zero second derivatives where the incoming gradient is a constant."""

    @wraps(backward)
    def call(ctx, *grads):
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        found = tuple([x for x in results if x is not None])
        marked = iter(_FirstOnly.apply(*[x.detach().requires_grad_() for x in found]))
        return tuple([None if x is None else next(marked) for x in results])

    return call


class _FirstOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([x.clone() for x in tensors])

    backward = staticmethod(refuse_second_derivatives)


# ---- biases ----------------------------------------------------------------------------------------------------------
_masks = Memo(most=64, numbers=1 << 23)
_rows = Memo(most=64, numbers=1 << 22)
"""Masks, and the bias by distance for single queries: (indices, copies of the tables, what was made of them)."""


def _bias(lowered: LoweredPlan) -> Tensor | None:
    """What depends on the distance alone, causality and windows included: [1, H or 1, Lq, Lk]."""
    plan, facts = lowered.plan, lowered.facts
    limits = (facts.left, facts.right)
    offset = lowered.offset or 0
    q_length, k_length = facts.q_length, facts.k_length
    precision = torch.float64 if facts.dtype == torch.float64 else torch.float32
    if facts.spans[0] is None and plan.slopes is None:
        return limits_of(*limits, q_length, k_length, precision) if facts.is_limited else None
    found = [(lookup.index, lookup.bias) for lookup in plan.lookups if lookup.bias is not None]
    tables = tuple(table for _, table in found)
    if plan.slopes is not None:
        tables = (*tables, plan.slopes)
    indices = tuple([index for index, _ in found])
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
    first, last = lowest // STEP * STEP, -(-(lowest + count) // STEP) * STEP
    key = _key(tables, first, last, precision)
    whole = _find(_rows, key, tables, indices)
    if whole is None:
        with torch.inference_mode(False), torch.no_grad():
            distances = torch.arange(first, last)
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
    return whole.narrow(3, lowest - first, count)


def make_bias(
    tables: tuple[Tensor, ...], indices: tuple, offset: int, q_length: int, k_length: int, left: int | None,
    right: int | None, precision: torch.dtype,
) -> Tensor:  # fmt: skip
    """The mask of these numbers, with gradients where they have. tables: a bias for each index, then the slopes."""
    lowest, highest = offset - q_length + 1, offset + k_length - 1
    total = None
    for index, table in zip(indices, tables, strict=False):
        total = add(total, expand_table(table, index, lowest, highest).to(precision))
    if len(tables) > len(indices):
        total = add(total, tables[-1].to(precision)[:, None] * _distances(lowest, highest, precision))
    assert total is not None
    bias = _Toeplitz.apply(total, k_length)[None]
    if left is not None or right is not None:
        bias = bias + limits_of(left, right, q_length, k_length, precision)
    return bias


@lru_cache(maxsize=16)
def _distances(lowest: int, highest: int, dtype: torch.dtype) -> Tensor:
    """-|r|"""
    with torch.inference_mode(False), torch.no_grad():
        return -torch.arange(lowest, highest + 1).abs().to(dtype)


@lru_cache(maxsize=8)
def limits_of(left: int | None, right: int | None, q_length: int, k_length: int, dtype: torch.dtype) -> Tensor:
    """[1, 1, Lq, Lk]: 0 where causality and the window let a key be visible, else -inf."""
    with torch.inference_mode(False), torch.no_grad():
        allowed = Mask(window=(left, right)).allowed(q_length, k_length, torch.device("cpu"))
        assert allowed is not None
        return torch.zeros(1, 1, q_length, k_length, dtype=dtype).masked_fill_(~allowed, NEG_INF)


class _Toeplitz(torch.autograd.Function):
    """[H, Lq + Lk - 1] by distance -> [H, Lq, Lk]."""

    @staticmethod
    def forward(ctx, table: Tensor, k_length: int) -> Tensor:
        return table.unfold(1, k_length, 1).flip(1)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        heads, q_length, k_length = grad.shape
        count = q_length + k_length - 1
        # row i' = Lq - 1 - i has its distance 0 at column 0: one more number a row moves row i' by i'
        moved = pad(grad.flip(1), (0, q_length)).view(heads, -1)[:, : q_length * count]
        return moved.view(heads, q_length, count).sum(1), None


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
        products = multiply(q if states is None else states, table, scale)
        mask = add(mask, by_pair(products, lo - lowest, highest - hi, k_length))
    if key_span is not None:
        lo, hi = reached(key_span, lowest, highest)
        found = lowered.key_table(lo, hi, precision)
        assert found is not None
        products = multiply(k, found.flip(1), scale)
        mask = add(mask, by_pair(products, highest - hi, lo - lowest, q_length).transpose(2, 3))
    assert mask is not None
    return mask


def reached(span: tuple[int, int], lowest: int, highest: int) -> tuple[int, int]:
    lo, hi = span
    return min(max(lo, lowest), highest), max(min(hi, highest), lowest)


def multiply(states: Tensor, table: Tensor, scale: float) -> Tensor:
    """scale states·tableᵀ: [B, H, R, E], [H or 1, m, E] -> [B, H, R, m], as one matrix product where heads share the table."""
    states = states if states.dtype == table.dtype else states.to(table.dtype)
    table = table * scale
    return states @ (table[0].t() if table.shape[0] == 1 else table.transpose(1, 2))


def by_pair(products: Tensor, before: int, after: int, keys: int) -> Tensor:
    """[B, H, R, m] of the distances within a span -> [B, H, R, K]; `before` and `after` are how many lie outside, where the
    first and the last column hold."""
    rows, columns = products.shape[2:]
    if 2 * columns < before + columns + after:
        return products.gather(-1, _columns(before, columns, rows, keys).expand(*products.shape[:2], -1, -1))
    if before or after:
        parts = [products]
        if before:
            parts.insert(0, products[..., :1].expand(*products.shape[:3], before))
        if after:
            parts.append(products[..., -1:].expand(*products.shape[:3], after))
        products = torch.cat(parts, -1)
    if products.requires_grad:
        return _Skew.apply(products, keys)
    return _skewed(products.contiguous(), keys)


@lru_cache(maxsize=8)
def _columns(before: int, columns: int, rows: int, keys: int) -> Tensor:
    """[R, K]: the column of each pair."""
    with torch.inference_mode(False), torch.no_grad():
        steps = torch.arange(keys) - torch.arange(rows)[:, None] + (rows - 1 - before)
        return steps.clamp_(0, columns - 1)


class _Skew(torch.autograd.Function):
    """[B, H, R, R + K - 1] by distance -> [B, H, R, K]: row i without its first R - 1 - i numbers, as a view."""

    @staticmethod
    def forward(ctx, products: Tensor, keys: int) -> Tensor:
        ctx.shape = products.shape
        return _skewed(products.contiguous(), keys)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        whole = grad.new_zeros(ctx.shape)
        _skewed(whole, grad.shape[3]).copy_(grad)
        return whole, None


def _skewed(products: Tensor, keys: int) -> Tensor:
    batch, heads, rows, count = products.shape
    steps = (heads * rows * count, rows * count, max(count - 1, 1), 1)
    return products.as_strided((batch, heads, rows, keys), steps, rows - 1)


# ---- attention that refuses second derivatives --------------------------------------------------------------------------------
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
class _Attend(torch.autograd.Function):
    """PyTorch's fused backward pass gives no gradient of its mask. Forward it is the same call as without gradients, with the
    same bits; backward the scores are made again, and all products are of stacked heads. Heads that share keys are rows of
    one matrix."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        # PyTorch looks at requires_grad even here, and would take its unfused form
        q, k, v, mask = q.detach(), k.detach(), v.detach(), mask.detach()
        return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        q, k, v, mask = ctx.saved_tensors
        if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= BLOCK:
            d_q, d_k, d_v, d_s = _gradients(q, k, v, mask, grad, ctx.scale)
            d_mask = d_s.sum_to_size(mask.shape) if ctx.needs_input_grad[3] else None
            return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_mask, None
        d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        d_mask = torch.zeros_like(mask, memory_format=torch.contiguous_format) if ctx.needs_input_grad[3] else None
        group = q.shape[1] // k.shape[1]
        for rows, heads in _blocks(k.shape[0], k.shape[1], group * q.shape[2] * k.shape[2]):
            own = slice(heads.start * group, heads.stop * group)
            at, at_mask = (rows, own), tuple([x if n > 1 else ALL for n, x in zip(mask.shape, (rows, own))])
            found = _gradients(q[at], k[rows, heads], v[rows, heads], mask[at_mask], grad[at], ctx.scale)
            d_q[at], d_k[rows, heads], d_v[rows, heads], d_s = found
            if d_mask is not None:
                d_mask[at_mask] += d_s.sum_to_size(mask[at_mask].shape)
        return d_q, d_k, d_v, d_mask, None


def _blocks(batch: int, kv_heads: int, numbers: int) -> Iterator[tuple[slice, slice]]:
    """Batch rows and key heads whose scores stay in a core's cache together. numbers: scores of a key head."""
    heads = min(kv_heads, max(1, BLOCK // numbers))
    rows = max(1, BLOCK // (kv_heads * numbers))
    for row in range(0, batch, rows):
        for head in range(0, kv_heads, heads):
            yield slice(row, min(row + rows, batch)), slice(head, min(head + heads, kv_heads))


def _gradients(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Of q, k, v and the scores [B, H, Lq, Lk]."""
    batch, heads, q_length, size = q.shape
    _, kv_heads, k_length, v_size = v.shape
    stacks, rows = batch * kv_heads, heads // kv_heads * q_length
    scaled = q.to(mask.dtype).reshape(stacks, rows, size) * scale
    keys = k.to(mask.dtype).reshape(stacks, k_length, size)
    values = v.to(mask.dtype).reshape(stacks, k_length, v_size)
    whole = mask.expand(batch, heads, q_length, k_length).reshape(stacks, rows, k_length)
    p = torch.baddbmm(whole, scaled, keys.transpose(1, 2)).softmax(-1)
    g = grad.to(p.dtype).reshape(stacks, rows, v_size)
    d_v = torch.bmm(p.transpose(1, 2), g)
    d_s = torch._softmax_backward_data(torch.bmm(g, values.transpose(1, 2)), p, -1, p.dtype)
    d_q = torch.bmm(d_s, keys).mul_(scale)
    d_k = torch.bmm(d_s.transpose(1, 2), scaled)
    return d_q.view(q.shape), d_k.view(k.shape), d_v.view(v.shape), d_s.view(batch, heads, q_length, k_length)
