"""Decoding: a few queries in one fused call with a mask made for it, and few other calls, since a step is that short.

    one query        bias [H, n] ─ table rows ─▶ blocks of 64 distances ─ copies ─▶ mask [H, K]

        distance    ... far far far | near near near | far ...
        blocks           A   A   A       B  C  D        E          the far field is copies of one block

    a few queries    the bias by distance [H, R + K - 1] with strides (1, 1), queries reversed: a Hankel view (forward.py)

Which table rows and blocks a mask consists of are whole numbers, and mostly the same in the next step: they are cached.
Nothing learned is. With one query, terms that depend on the query or on keys are added to the mask. Several queries with
padding or content run as in training, because this path would round differently.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core.index import Grid, Index
from ...core.plan import Plan
from ...core.tables import add
from ..lowering import LoweredPlan
from ..sdpa import fused_attention
from . import block_sizes
from .forward import pad_head_sizes
from .head_block import NEG_INF


def applies(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> bool:
    """Whether queries are few, nothing needs a gradient, and no term needs the probabilities (positional values)."""
    facts, rows = lowered.facts, q.shape[2]
    _, query_span, key_span, value_span = facts.spans
    if rows >= block_sizes.DECODE_ROWS or value_span is not None or facts.gradient or facts.return_lse:
        return False
    return rows == 1 or not (facts.padding or facts.decay or query_span is not None or key_span is not None)


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan, scale: float) -> Tensor:
    plan, key_mask = lowered.plan, lowered.mask.key_mask
    _, heads, rows, size = q.shape
    keys, v_size = k.shape[2], v.shape[3]
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    left, right = lowered.facts.left, lowered.facts.right
    first = 0 if left is None else max(0, keys - rows - left)  # keys before it are visible to no query
    if first:
        k, v, keys = k[:, :, first:], v[:, :, first:], keys - first
    if rows > 1:
        q = q.flip(2)
    lowest = (lowered.offset or 0) + first - rows + 1  # the last query's distance to the first key
    mask = _bias_by_distance(plan, lowest, rows + keys - 1, precision)
    if rows == 1:
        mask = _add_content(mask, q, k, plan, lowest, scale, precision)
        if mask is not None and mask.shape[1] != heads:
            mask = mask.expand(-1, heads, 1, -1)
    else:
        if left is not None or right is not None:
            mask = _mask_limits(q, mask, rows, keys, left, right, precision)
        if mask is not None:
            steps = (0, mask.stride(1) if mask.shape[1] > 1 else 0, 1, 1)
            mask = mask.as_strided((1, heads, rows, keys), steps)
    if key_mask is not None:
        real = key_mask[:, None, None, first:]
        mask = torch.where(real, 0.0 if mask is None else mask, NEG_INF).to(precision)
        mask = mask.expand(-1, heads, 1, -1)
    if size != v_size or q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        q, k, v = pad_head_sizes(q, k, v)
    out = fused_attention(q, k, v, mask, 0.0, False, scale)
    if rows > 1:
        out = out.flip(2)
    return out if size <= v_size else out[..., :v_size]


def _bias_by_distance(plan: Plan, lowest: int, count: int, precision: torch.dtype) -> Tensor | None:
    """[1, H or 1, 1, count]: the bias by distance."""
    table = None
    for lookup in plan.lookups:
        bias = lookup.bias
        if bias is not None:
            bias = bias if bias.dtype == precision else bias.to(precision)
            table = add(table, expand_by_distance(bias, 1, lookup.index, lowest, count))
    if plan.slopes is not None:
        away = _slice_cached(_negative_distances, precision, lowest, count, plan.slopes.device)
        table = add(table, plan.slopes.to(precision)[None, :, None, None] * away)
    return table


def multiply_rows(states: Tensor, table: Tensor, scale: float) -> Tensor:
    """scale states·tableᵀ of one query: [B, H, 1, E], [H or 1, n, E] -> [B * H, n], by one product that scales as it goes. As
    matrices: ten times as fast as [B, H, 1, n]."""
    batch, heads, _, width = states.shape
    nothing = states.new_empty(())  # with beta 0 it is not read
    if table.shape[0] == 1:
        return torch.addmm(nothing, states.reshape(batch * heads, width), table[0].t(), beta=0, alpha=scale)
    if batch == 1:
        return torch.baddbmm(nothing, states[0], table.transpose(1, 2), beta=0, alpha=scale).squeeze(1)
    return ((states * scale) @ table.transpose(1, 2)).flatten(0, 2)


def expand_by_distance(table: Tensor, batch: int, index: Index | Grid, lowest: int, count: int) -> Tensor:
    """[X, n] -> [batch, X / batch, 1, count]: the table by distance, from the lowest on; perhaps a view of it.

    Whole blocks are copied at memory speed and by all cores, each of which then has its heads in its own cache; few numbers are
    picked one by one.
    """
    size, each = block_sizes.COPY_BLOCK, table.shape[0] // batch
    is_exact = isinstance(index, Index) and index.rows is None and index.lo <= lowest and lowest + count - 1 <= index.hi
    if is_exact and table.stride(1) == 1:  # a row for each distance: a view
        return table.narrow(1, lowest - index.lo, count).view(batch, each, 1, count)
    if table.shape[0] * count <= block_sizes.PICKED:
        return table.index_select(1, _find_rows(index, lowest, count, table.device)).view(batch, each, 1, count)
    first, last = lowest // size, (lowest + count - 1) // size
    rows, copies = _distance_blocks(index, first, last, size, batch * each, table.device)
    table = table.index_select(1, rows)
    if copies is not None:
        table = table.view(-1, size).index_select(0, copies)
    row = (last - first + 1) * size
    return table.as_strided((batch, each, 1, count), (each * row, row, row, 1), lowest - first * size)


@lru_cache(maxsize=16)
def _distance_blocks(
    index: Index, first: int, last: int, size: int, tables: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The table rows of the distinct blocks among first .. last, and for every block of every table which of them it copies.

    Block b holds the distances from b * size on. Outside the index's span, one block on each side serves for all.
    """
    with torch.inference_mode(False), torch.no_grad():
        block = torch.arange(first, last + 1, device=device).clamp(index.lo // size - 1, index.hi // size + 1)
        a, b = int(block[0]), int(block[-1]) + 1
        rows = index.lookup(torch.arange(a * size, b * size, device=device))
        if b - a > last - first:
            return rows, None
        table = torch.arange(tables, device=device)
        return rows, (table[:, None] * (b - a) + block - a).flatten()


def _mask_limits(
    q: Tensor, table: Tensor | None, rows: int, keys: int, left: int | None, right: int | None, precision: torch.dtype,
) -> Tensor:  # fmt: skip
    """-inf outside the limits, which are relative to the distance of the last query to the last key."""
    if table is None:
        table = torch.zeros(1, 1, 1, rows + keys - 1, dtype=precision, device=q.device)
    else:
        table = table.clone()  # it may be a view of a parameter
    last = keys - 1
    if left is not None and last > left:
        table[..., : last - left] = NEG_INF
    if right is not None:
        table[..., last + right + 1 :] = NEG_INF
    return table


def _add_content(
    mask: Tensor | None, q: Tensor, k: Tensor, plan: Plan, lowest: int, scale: float, precision: torch.dtype
) -> Tensor | None:
    """mask plus the terms that depend on the query or on keys: [B or 1, H, 1, K]."""
    keys = k.shape[2]
    for lookup in plan.lookups:
        if lookup.dot_query is None and lookup.dot_key is None:
            continue
        if lookup.dot_query is not None:
            states = q if lookup.states is None else lookup.states
            dots = multiply_rows(states.to(precision), lookup.dot_query.to(precision), scale)
            mask = add(mask, expand_by_distance(dots, len(states), lookup.index, lowest, keys))
        if lookup.dot_key is not None:
            found = _key_dots(q.shape[1], k.to(precision), lookup.dot_key.to(precision), lookup.index, lowest)
            mask = add(mask, found * scale)
    decay = plan.decay_in(precision)
    if decay is not None:
        c_q, c_k = decay
        mask = add(mask, (c_q[..., None] - c_k[..., -keys:].unsqueeze(2)).to(precision))
    return mask


def _key_dots(heads: int, k: Tensor, table: Tensor, index: Index | Grid, lowest: int) -> Tensor:
    """k_j·table[r], [B, H, 1, K]: far keys share a table row; only near ones need their own."""
    keys, kv_heads = k.shape[2], k.shape[1]
    at = _find_rows(index, lowest, keys, k.device)
    begin, end = 0, keys
    if isinstance(index, Index):
        begin = min(max(index.lo - lowest, 0), keys)
        end = min(max(index.hi - lowest + 1, begin), keys)
    own = table.index_select(1, at[begin:end])  # [H or 1, near, D]
    own = own.unflatten(0, (kv_heads, -1)) if own.shape[0] > 1 else own[None]
    parts = [(k[:, :, None, begin:end] * own).sum(-1)]  # [B, Hkv, 1 or H / Hkv, near]
    if begin > 0:
        parts.insert(0, _far_dots(k[:, :, :begin], table.index_select(1, at[:1])))
    if end < keys:
        parts.append(_far_dots(k[:, :, end:], table.index_select(1, at[-1:])))
    found = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return found.expand(-1, -1, heads // kv_heads, -1).flatten(1, 2).unsqueeze(2)


def _far_dots(k: Tensor, row: Tensor) -> Tensor:
    """k [B, Hkv, K, D] times one table row [H or 1, 1, D] -> [B, Hkv, 1 or H / Hkv, K]"""
    rows = row.unflatten(0, (k.shape[1], -1)).squeeze(2) if row.shape[0] > 1 else row
    return (k @ rows.transpose(-1, -2)).transpose(-1, -2)


def _find_rows(index: Index | Grid, lowest: int, count: int, device: torch.device) -> Tensor:
    """[count]: the table rows of the distances from the lowest on."""
    return _slice_cached(_rows_of_distances, index, lowest, count, device)


def _slice_cached(make, what, lowest: int, count: int, device: torch.device) -> Tensor:
    """make(...) of these distances: a view of a longer, cached run that serves the next steps too."""
    if count > block_sizes.CACHED_DISTANCES:
        return make.__wrapped__(what, lowest, count, device)
    whole = 1 << count.bit_length()
    start = lowest // whole * whole
    return make(what, start, 2 * whole, device).narrow(0, lowest - start, count)


@lru_cache(maxsize=8)
def _rows_of_distances(index: Index, start: int, count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return index.lookup(torch.arange(start, start + count, device=device))


@lru_cache(maxsize=4)
def _negative_distances(dtype: torch.dtype, start: int, count: int, device: torch.device) -> Tensor:
    """-|r|"""
    with torch.inference_mode(False), torch.no_grad():
        return -torch.arange(start, start + count, device=device).abs().to(dtype)
