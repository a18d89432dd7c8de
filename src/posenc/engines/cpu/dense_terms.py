"""The terms of a dense mask, each with one gradient of its own: autograd would go through five small functions instead.

    bias by distance [H, n]        ─ Toeplitz ─▶  [H, Lq, Lk]        n = Lq + Lk - 1 distances,
    states·table [B, H, Lq, n]     ─ skew ─────▶  [B, H, Lq, Lk]     key j of query i stands at j - i + Lq - 1

and back: sums along the diagonals, then over the distances that read one row of a table, in a fixed order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core.index import Index
from ...core.mask import Mask
from ...core.memo import STEP
from ...core.tables import add, select_rows, sum_rows
from ...core.torch_modes import direct_apply, first_derivatives_only
from .head_block import NEG_INF


# ---- biases ----------------------------------------------------------------------------------------------------------
def make_bias(
    tables: tuple[Tensor, ...], indices: tuple[Index, ...], offset: int, q_length: int, k_length: int, left: int | None,
    right: int | None, precision: torch.dtype,
) -> Tensor:  # fmt: skip
    """[1, H, Lq, Lk] with causality and windows, and a gradient where the tables have one. tables: a bias for each index, then
    the slopes."""
    facts = offset, q_length, k_length, left, right, precision
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        return _apply_bias(indices, facts, *tables)
    return _bias(tables, indices, *facts)


def _bias(
    tables: tuple[Tensor, ...], indices: tuple[Index, ...], offset: int, q_length: int, k_length: int, left: int | None,
    right: int | None, precision: torch.dtype,
) -> Tensor:  # fmt: skip
    lowest, highest = offset - q_length + 1, offset + k_length - 1
    total = None
    for index, table in zip(indices, tables, strict=False):
        rows = select_rows(table, index, lowest, highest)
        total = add(total, rows if rows.dtype == precision else rows.to(precision))
    if len(tables) > len(indices):
        total = add(total, tables[-1].to(precision)[:, None] * negative_distances(lowest, highest, precision))
    assert total is not None
    bias = total.unfold(1, k_length, 1).flip(1)[None]
    if left is not None or right is not None:
        bias = bias + limits_of(left, right, q_length, k_length, precision)
    return bias


class _Bias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indices: tuple[Index, ...], facts: tuple, *tables: Tensor) -> Tensor:
        ctx.given = indices, facts, [(table.shape, table.dtype) for table in tables]
        return _bias(tables, indices, *facts)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        indices, facts, tables = ctx.given
        return None, None, *bias_gradients(grad, indices, facts, tables, ctx.needs_input_grad[2:])


def bias_gradients(grad: Tensor, indices: tuple[Index, ...], facts: tuple, tables: list, wanted) -> list[Tensor | None]:
    """Of the tables (shape, dtype) by that of the mask, [1, H, Lq, Lk]."""
    offset, q_length, k_length, _, _, precision = facts
    lowest, highest = offset - q_length + 1, offset + k_length - 1
    heads = grad.shape[1]
    results: list[Tensor | None] = []
    total = None
    for number, (shape, dtype) in enumerate(tables):
        if not wanted[number]:
            results.append(None)
            continue
        index = indices[number] if number < len(indices) else None
        if index is not None and grad.numel() <= FEW_PAIRS:
            rows = _rows_of_pairs(index, lowest, q_length, k_length).expand(heads, -1)
            found = grad.new_zeros(heads, shape[1]).scatter_add_(1, rows, grad.reshape(heads, -1))
            found = found if shape[0] == heads else found.sum(0, keepdim=True)  # one table for all heads
        else:
            total = _sum_diagonals(grad[0]) if total is None else total
            if index is None:
                found = total @ negative_distances(lowest, highest, precision)
            else:
                found = total if shape[0] == heads else total.sum(0, keepdim=True)
                found = sum_rows(found, index, lowest, highest, shape[1])
        results.append(found if found.dtype == dtype else found.to(dtype))
    return results


def bias_by_pair(
    tables: tuple[Tensor, ...], indices: tuple[Index, ...], offset: int, q_length: int, k_length: int, left: int | None,
    right: int | None, precision: torch.dtype,
) -> Tensor:  # fmt: skip
    """`make_bias` of a few pairs, with the gradients of PyTorch's operations."""
    lowest, total = offset - q_length + 1, None
    for index, table in zip(indices, tables, strict=False):
        total = add(total, table.index_select(1, _rows_of_pairs(index, lowest, q_length, k_length)).to(precision))
    if len(tables) > len(indices):
        each = Index(lowest, lowest + q_length + k_length - 2)
        distances = negative_distances(each.lo, each.hi, precision)
        distances = distances[_rows_of_pairs(each, lowest, q_length, k_length)]
        total = add(total, tables[-1].to(precision)[:, None] * distances)
    assert total is not None
    bias = total.view(1, -1, q_length, k_length)
    if left is not None or right is not None:
        bias = bias + limits_of(left, right, q_length, k_length, precision)
    return bias


def _sum_diagonals(grad: Tensor) -> Tensor:
    """[H, Lq, Lk] -> [H, Lq + Lk - 1] by distance."""
    heads, rows, keys = grad.shape
    count = rows + keys - 1
    some = max(1, MOVED // (rows * count))
    moved = grad.new_zeros(1, min(some, heads), rows, count)
    if some >= heads:
        _skewed(moved, keys).copy_(grad)
        return moved[0].sum(1)
    found = grad.new_empty(heads, count)
    for own, sums in zip(grad.split(some), found.split(some), strict=True):
        whole = moved[:, : len(own)]
        _skewed(whole, keys).copy_(own)
        torch.sum(whole[0], 1, out=sums)
    return found


IN_ORDER = 1 << 17
"""Products of a text with a table that its heads share up to which they stay in the order of the projections, a query's next to those of all
heads: of more, the rows of a head lie so far apart that reading them takes longer than a copy (one text of 512 tokens 32 ms, 27 copied)."""
FEW_PAIRS = 1 << 13
"""Heads times pairs up to which a table's gradient is summed pair by pair: fewer operations than diagonal by diagonal."""


MOVED = 1 << 20
"""Numbers that are moved to their distances at once: 4 MiB of float32."""


@lru_cache(maxsize=8)
def _rows_of_pairs(index: Index, lowest: int, q_length: int, k_length: int) -> Tensor:
    """[Lq * Lk]: the table's row of each pair."""
    with torch.inference_mode(False), torch.no_grad():
        q_slots, k_slots = (torch.arange(length, device="cpu") for length in (q_length, k_length))
        distances = k_slots - q_slots[:, None] + (lowest + q_length - 1)
        return index.lookup(distances).flatten()


_apply_bias = direct_apply(_Bias)


@lru_cache(maxsize=16)
def negative_distances(lowest: int, highest: int, dtype: torch.dtype) -> Tensor:
    """-|r|"""
    with torch.inference_mode(False), torch.no_grad():
        return -torch.arange(lowest, highest + 1, device="cpu").abs().to(dtype)


def limits_of(left: int | None, right: int | None, q_length: int, k_length: int, dtype: torch.dtype) -> Tensor:
    """[1, 1, Lq, Lk]: 0 where causality and the window let a key be visible, else -inf."""
    width = kept_width(q_length, k_length)
    mask = _limits_of(left, right, q_length, width, dtype)
    return mask if width == k_length else mask.narrow(3, width - k_length, k_length)


@lru_cache(maxsize=8)
def _limits_of(left: int | None, right: int | None, q_length: int, k_length: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        allowed = Mask(window=(left, right)).allowed(q_length, k_length, torch.device("cpu"))
        assert allowed is not None
        return torch.zeros(1, 1, q_length, k_length, dtype=dtype, device="cpu").masked_fill_(~allowed, NEG_INF)


def kept_width(q_length: int, k_length: int) -> int:
    """Keys of a kept mask. That of fewer queries than keys is the end of a wider one, which serves the next steps too."""
    return k_length if q_length >= k_length else -(-k_length // STEP) * STEP


MANY = 1 << 14
"""Pairs from which arithmetic makes a mask of a boolean one: four passes by vectors take a third of PyTorch's `where`, which takes
one number after another."""


def hide(mask: Tensor | None, visible: Tensor | None, added: Tensor | None, precision: torch.dtype) -> Tensor:
    """mask + added where a key is visible, else -inf. mask: of zeros and -inf."""
    if visible is not None and added is None and visible.numel() >= MANY:
        hidden = visible.to(precision).reciprocal_().neg_().add_(1.0)  # 1 - 1 / 1 = 0, 1 - 1 / 0 = -inf
        if mask is None:
            return hidden
        fits = torch.broadcast_shapes(mask.shape, hidden.shape) == hidden.shape
        return hidden.add_(mask) if fits else hidden + mask
    mask = add(mask, added if added is None or added.dtype == precision else added.to(precision))
    if visible is None:
        assert mask is not None
        return mask
    return torch.where(visible, _zero(precision) if mask is None else mask, NEG_INF)


@lru_cache(maxsize=4)
def _zero(dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device="cpu")


# ---- products with a table ---------------------------------------------------------------------------------------------
def multiply_by_distance(
    states: Tensor, table: Tensor, index: Index, lowest: int, keys: int, scale: float, precision: torch.dtype
) -> Tensor:
    """scale states·table[row] by pair: [B, H, R, E], [H or 1, n, E] -> [B, H, R, K]; lowest: the distance of the last query to the
    first key."""
    facts = index, lowest, keys, scale, precision
    if torch.is_grad_enabled() and (states.requires_grad or table.requires_grad):
        return _apply_products(facts, states, table)
    return _multiply(states, table, *facts)


def _multiply(
    states: Tensor, table: Tensor, index: Index, lowest: int, keys: int, scale: float, precision: torch.dtype
) -> Tensor:
    rows = scaled_rows(table, index, lowest, states.shape[2], keys, scale, precision)
    return multiply_scaled(states, *rows, keys)


def scaled_rows(
    table: Tensor, index: Index, lowest: int, queries: int, keys: int, scale: float, precision: torch.dtype
) -> tuple[Tensor, int, int]:
    """[H or 1, m, E]: the rows that the queries reach, and how many distances before and after them read the first and the last. Where
    these are few, they have rows too."""
    highest = lowest + queries + keys - 2
    lo, hi = reached((index.lo, index.hi), lowest, highest)
    if 2 * (hi - lo + 1) >= highest - lowest + 1:
        lo, hi = lowest, highest
    return select_rows(table, index, lo, hi).to(precision) * scale, lo - lowest, highest - hi


def multiply_scaled(states: Tensor, rows: Tensor, before: int, after: int, keys: int) -> Tensor:
    """`multiply_by_distance` by `scaled_rows`, without a gradient."""
    if states.dtype != rows.dtype:
        states = states.to(rows.dtype)
    tokens = states.transpose(1, 2)
    in_order = not before and not after and tokens.is_contiguous()
    if not in_order or (rows.shape[0] == 1 and states[0].numel() // states.shape[3] * rows.shape[1] > IN_ORDER):
        return by_pair(multiply(states, rows), before, after, keys)
    # as projections write them: all heads of all tokens, or of one head all tokens, are rows of one matrix
    batch, queries, heads, width = tokens.shape
    count = rows.shape[1]
    if rows.shape[0] == 1:
        products = tokens.view(-1, width) @ rows[0].t()
        steps = (queries * heads * count, count, heads * count - 1, 1)
    else:
        products = torch.bmm(tokens.view(-1, heads, width).transpose(0, 1), rows.transpose(1, 2))
        steps = (queries * count, batch * queries * count, max(count - 1, 1), 1)
    return products.as_strided((batch, heads, queries, keys), steps, queries - 1)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, facts: tuple, states: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(states, table)
        ctx.facts = facts
        return _multiply(states, table, *facts)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        states, table = ctx.saved_tensors
        scale, precision = ctx.facts[3:]
        stacked = states.to(precision).reshape(-1, *states.shape[2:])
        d_states, d_table = product_gradients(grad * scale, stacked, table, ctx.facts, None, ctx.needs_input_grad[2])
        return None, d_states.view(states.shape).to(states.dtype), None if d_table is None else d_table.to(table.dtype)


_apply_products = direct_apply(_Products)


def product_gradients(
    grad: Tensor, states: Tensor, table: Tensor, facts: tuple, others: Tensor | None, wants_table: bool
) -> tuple[Tensor, Tensor | None]:
    """Of states [B * H, R, E] and of the table, by that of `multiply_by_distance` [B, H, R, K] times the scale. others: the states'
    gradient so far, to which this one is added in place. The first result has their shape or [B, H, R, E]."""
    index, lowest, keys, _, precision = facts
    batch, heads, queries, _ = grad.shape
    highest = lowest + queries + keys - 2
    lo, hi = reached((index.lo, index.hi), lowest, highest)
    count, width = hi - lo + 1, states.shape[2]
    rows = select_rows(table, index, lo, hi)
    rows = rows if rows.dtype == precision else rows.to(precision)
    by_head = rows.shape[0] > 1 and batch > 1  # the texts of a head are rows of one matrix
    d_products = sum_pairs(grad.transpose(0, 1) if by_head else grad, lo - lowest, highest - hi, count)
    d_table = None
    if rows.shape[0] == 1:
        flat = d_products.view(-1, count)
        if others is None:
            d_states = (flat @ rows[0]).view(states.shape)
        else:
            others.view(-1, width).addmm_(flat, rows[0])
            d_states = others
        if wants_table:
            d_table = (flat.t() @ states.reshape(-1, width))[None]
    else:
        stacked = d_products.view(heads, -1, count)
        if by_head:
            shape = (batch, heads, queries, width)
            found = torch.bmm(stacked, rows).view(heads, batch, queries, width).transpose(0, 1)
            d_states = found if others is None else others.view(shape).add_(found)
            states = states.view(shape).transpose(0, 1).reshape(heads, -1, width)
        else:
            d_states = torch.bmm(stacked, rows) if others is None else others.baddbmm_(stacked, rows)
        if wants_table:
            d_table = torch.bmm(stacked.transpose(1, 2), states)
    return d_states, None if d_table is None else sum_rows(d_table, index, lo, hi, table.shape[1])


def reached(span: tuple[int, int], lowest: int, highest: int) -> tuple[int, int]:
    lo, hi = span
    return min(max(lo, lowest), highest), max(min(hi, highest), lowest)


def multiply(states: Tensor, rows: Tensor) -> Tensor:
    """states·rowsᵀ: [B, H, R, E], [H or 1, m, E] -> [B, H, R, m], as one matrix product where heads share the table."""
    states = states if states.dtype == rows.dtype else states.to(rows.dtype)
    return states @ (rows[0].t() if rows.shape[0] == 1 else rows.transpose(1, 2))


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


def sum_pairs(grad: Tensor, before: int, after: int, columns: int) -> Tensor:
    """The gradient of `by_pair`: [B, H, R, K] -> [B, H, R, m], contiguous. Moved to their distances in memory that is used again and again,
    numbers take a tenth of the time of adding them to their columns one by one."""
    batch, heads, rows, keys = grad.shape
    count = before + columns + after
    if not before and not after:
        whole = grad.new_zeros(batch, heads, rows, count)
        _skewed(whole, keys).copy_(grad)
        return whole
    found = grad.new_empty(batch, heads, rows, columns)
    some = max(1, MOVED // (rows * count))
    moved = grad.new_zeros(1, min(some, batch * heads), rows, count)  # the corners stay zero
    parts = [(grad.flatten(0, 1), found.flatten(0, 1))] if grad.is_contiguous() else zip(grad, found, strict=True)
    for part, sums in parts:
        for own, own_sums in zip(part.split(some), sums.split(some), strict=True):
            whole = moved[:, : len(own)]
            _skewed(whole, keys).copy_(own)
            own_sums.copy_(whole[0, ..., before : before + columns])
            own_sums[..., 0] += whole[0, ..., :before].sum(-1)
            own_sums[..., -1] += whole[0, ..., before + columns :].sum(-1)
    return found


@lru_cache(maxsize=8)
def _columns(before: int, columns: int, rows: int, keys: int) -> Tensor:
    """[R, K]: the column of each pair."""
    with torch.inference_mode(False), torch.no_grad():
        steps = torch.arange(keys, device="cpu") - torch.arange(rows, device="cpu")[:, None] + (rows - 1 - before)
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
