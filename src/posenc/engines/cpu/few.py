"""Some queries (decoding): one fused call with a ready mask, and as few other calls as can be, for a step is that short.

    one query      bias [H, n] ──rows──▶ blocks of distances, near and far ──copies──▶ [H, K] is the mask
    some, reversed                                                     [H, R + K - 1], strides (1, 1), is the mask

An index is constant outside its span, so all far blocks are copies of one. Which rows and copies a mask is made of are
whole numbers, and the next step's are mostly the same: they are kept. Nothing learned is.
What depends on the query or keys themselves is added to the mask of one query. Several with padding or content are
computed as in training: they would give other bits here.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.index import Grid, Index
from ...core.mask import Mask
from ...core.plan import Plan
from . import sizes
from .forward import one_size
from .slab import NEVER
from .terms import offset_of, sum_of


def applies(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask) -> bool:
    """For a structured plan: few queries, no gradient wanted, and no values of its own (they need the weights)."""
    rows = q.shape[2]
    if rows >= sizes.FEW:
        return False
    if rows > 1 and (mask.key_mask is not None or plan.decay is not None):
        return False
    for lookup in plan.lookups:
        if lookup.add_value is not None:
            return False
        if rows > 1 and (lookup.dot_query is not None or lookup.dot_key is not None):
            return False
    if not torch.is_grad_enabled():
        return True
    return not any(x.requires_grad for x in (q, k, v, *(tensor for _, tensor in plan.tensors())))


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, scale: float) -> Tensor:
    _, heads, rows, size = q.shape
    keys, v_size = k.shape[2], v.shape[3]
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    left, right = mask.limits
    first = 0 if left is None else max(0, keys - rows - left)  # keys before it are seen by no row
    if first:
        k, v, keys = k[:, :, first:], v[:, :, first:], keys - first
    if rows > 1:
        q = q.flip(2)
    lowest = (offset_of(plan.positions) or 0) + first - rows + 1  # the last query's distance to the first key
    added = _table(plan, lowest, rows + keys - 1, precision)
    if rows == 1:
        added = _with_content(added, q, k, plan, lowest, scale, precision)
        if added is not None and added.shape[1] != heads:
            added = added.expand(-1, heads, 1, -1)
    else:
        if left is not None or right is not None:
            added = _limited(q, added, rows, keys, left, right, precision)
        if added is not None:
            steps = (0, added.stride(1) if added.shape[1] > 1 else 0, 1, 1)
            added = added.as_strided((1, heads, rows, keys), steps)
    if mask.key_mask is not None:
        real = mask.key_mask[:, None, None, first:]
        added = torch.where(real, 0.0 if added is None else added, NEVER).to(precision)
        added = added.expand(-1, heads, 1, -1)
    if size != v_size or q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        q, k, v = one_size(q, k, v)
    out = scaled_dot_product_attention(q, k, v, added, scale=scale, enable_gqa=heads != k.shape[1])
    if rows > 1:
        out = out.flip(2)
    return out if size <= v_size else out[..., :v_size]


def _table(plan: Plan, lowest: int, count: int, precision: torch.dtype) -> Tensor | None:
    """[1, H or 1, 1, count]: the bias by distance."""
    table = None
    for lookup in plan.lookups:
        bias = lookup.bias
        if bias is not None:
            bias = bias if bias.dtype == precision else bias.to(precision)
            table = sum_of(table, _spread(bias, 1, lookup.index, lowest, count))
    if plan.slopes is not None:
        away = _some(_away, precision, lowest, count, plan.slopes.device)
        table = sum_of(table, plan.slopes.to(precision)[None, :, None, None] * away)
    return table


def _spread(table: Tensor, batch: int, index: Index | Grid, lowest: int, count: int) -> Tensor:
    """[X, n] -> [batch, X / batch, 1, count]: the numbers of the distances from the lowest on.

    Copies of whole blocks are made at memory speed, and by all cores: each then has its heads' part in its own cache.
    """
    size, each = sizes.COPIED, table.shape[0] // batch
    first, last = lowest // size, (lowest + count - 1) // size
    rows, copies = _blocks(index, first, last, size, batch * each, table.device)
    table = table.index_select(1, rows)
    if copies is not None:
        table = table.view(-1, size).index_select(0, copies)
    row = (last - first + 1) * size
    return table.as_strided((batch, each, 1, count), (each * row, row, row, 1), lowest - first * size)


@lru_cache(maxsize=16)
def _blocks(
    index: Index, first: int, last: int, size: int, tables: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The table rows of the blocks that differ among first .. last, and of which of them each table's blocks are copies.

    Block b holds the distances from b * size on; beyond the span's own blocks one on each side stands for all.
    """
    with torch.inference_mode(False), torch.no_grad():
        block = torch.arange(first, last + 1, device=device).clamp(index.lo // size - 1, index.hi // size + 1)
        a, b = int(block[0]), int(block[-1]) + 1
        rows = index.lookup(torch.arange(a * size, b * size, device=device))
        if b - a > last - first:
            return rows, None
        table = torch.arange(tables, device=device)
        return rows, (table[:, None] * (b - a) + block - a).flatten()


def _limited(
    q: Tensor,
    table: Tensor | None,
    rows: int,
    keys: int,
    left: int | None,
    right: int | None,
    precision: torch.dtype,
) -> Tensor:
    """-inf outside the limits, which are around the distance of the last query to the last key."""
    if table is None:
        table = torch.zeros(1, 1, 1, rows + keys - 1, dtype=precision, device=q.device)
    last = keys - 1
    if left is not None and last > left:
        table[..., : last - left] = NEVER
    if right is not None:
        table[..., last + right + 1 :] = NEVER
    return table


def _with_content(
    added: Tensor | None, q: Tensor, k: Tensor, plan: Plan, lowest: int, scale: float, precision: torch.dtype
) -> Tensor | None:
    """added and what depends on the query or on keys: [B or 1, H, 1, K]."""
    keys = k.shape[2]
    for lookup in plan.lookups:
        if lookup.dot_query is None and lookup.dot_key is None:
            continue
        if lookup.dot_query is not None:
            states = q if lookup.states is None else lookup.states
            dots = (states.to(precision) * scale) @ lookup.dot_query.to(precision).transpose(1, 2)
            # of a matrix: ten times as fast as of [B, H, 1, n]
            added = sum_of(added, _spread(dots.flatten(0, 2), len(dots), lookup.index, lowest, keys))
        if lookup.dot_key is not None:
            found = _key_dots(q.shape[1], k.to(precision), lookup.dot_key.to(precision), lookup.index, lowest)
            added = sum_of(added, found * scale)
    if plan.decay is not None:
        c_q, c_k = (c.to(precision) for c in plan.decay)
        added = sum_of(added, c_q[..., None] - c_k[..., -keys:].unsqueeze(2))
    return added


def _key_dots(heads: int, k: Tensor, table: Tensor, index: Index | Grid, lowest: int) -> Tensor:
    """k_j·table[r], [B, H, 1, K]: far keys share a row, so only the near ones need rows of their own."""
    keys, kv_heads = k.shape[2], k.shape[1]
    at = _look(index, lowest, keys, k.device)
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


def _look(index: Index | Grid, lowest: int, count: int, device: torch.device) -> Tensor:
    """[count]: the table rows of the distances from the lowest on."""
    return _some(_rows, index, lowest, count, device)


def _some(make, what, lowest: int, count: int, device: torch.device) -> Tensor:
    """make(...) of these distances, as a view of a longer run, which the next steps find made."""
    if count > sizes.KEPT:
        return make.__wrapped__(what, lowest, count, device)
    whole = 1 << count.bit_length()
    start = lowest // whole * whole
    return make(what, start, 2 * whole, device).narrow(0, lowest - start, count)


@lru_cache(maxsize=8)
def _rows(index: Index, start: int, count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return index.lookup(torch.arange(start, start + count, device=device))


@lru_cache(maxsize=4)
def _away(dtype: torch.dtype, start: int, count: int, device: torch.device) -> Tensor:
    """-|r|"""
    with torch.inference_mode(False), torch.no_grad():
        return -torch.arange(start, start + count, device=device).abs().to(dtype)
