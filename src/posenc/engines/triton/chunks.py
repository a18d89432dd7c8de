"""Content terms that tell apart more distances than fit in memory for each token: a block of queries at a time.

The row term of one block is [B, H, QUERIES, QUERIES + Lk], made by a matrix product and forgotten after its block
(autograd makes it again), so memory grows with QUERIES · L, not with L². A block sees only the keys it may see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...index import Index
from ...mask import Mask
from ...plan import Lookup, Plan
from ...where import Run, Side, Where

QUERIES = 512

Engine = Callable[[Tensor, Tensor, Tensor, Plan, Mask, float], Tensor]


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float, engine: Engine) -> Tensor:
    """`engine` over blocks of queries, their outputs in a row."""
    outs = []
    for one in blocks(q, k, v, plan, mask):
        if torch.is_grad_enabled():
            outs.append(checkpoint(engine, *one, dropout, use_reentrant=False, preserve_rng_state=dropout > 0.0))
        else:
            outs.append(engine(*one, dropout))
    return torch.cat(outs, 2)


def blocks(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask
) -> Iterator[tuple[Tensor, Tensor, Tensor, Plan, Mask]]:
    """Each block's q, k, v, plan and mask."""
    q_length, k_length = q.shape[2], k.shape[2]
    diff = k_length - q_length
    left, right = mask.limits
    for first in range(0, q_length, QUERIES):
        last = min(first + QUERIES, q_length)
        end = k_length if right is None else min(k_length, last + diff + right)
        end = max(end, 1) if k_length else 0
        # Slots count from the new corner, where the block's last query meets its last key.
        corner = end - (last + diff)
        rows, columns = slice(first, last), slice(0, end)
        window = (None if left is None else left + corner, None if right is None else max(right - corner, 0))
        seen = Mask(
            causal=False,
            window=window,
            key_mask=None if mask.key_mask is None else mask.key_mask[:, columns],
            documents=None if mask.documents is None else (mask.documents[0][:, rows], mask.documents[1][:, columns]),
            extra=None if mask.extra is None else _block(mask.extra, rows, columns),
        )
        where = Where(_part(plan.where.q, rows), _part(plan.where.k, columns))
        yield q[:, :, rows], k[:, :, columns], v[:, :, columns], _narrow(plan, where, rows, columns), seen


def _part(side: Side, part: slice) -> Side:
    if isinstance(side, Run):
        return Run(side.start + part.start, part.stop - part.start)
    return side[..., part]


def _block(extra: Tensor, rows: slice, columns: slice) -> Tensor:
    extra = extra if extra.shape[-2] == 1 else extra[..., rows, :]
    return extra if extra.shape[-1] == 1 else extra[..., columns]


def _narrow(plan: Plan, where: Where, rows: slice, columns: slice) -> Plan:
    scale = plan.scale
    if isinstance(scale, Tensor) and scale.dim() and scale.shape[-1] > 1:
        scale = scale[..., rows]
    return replace(
        plan,
        where=where,
        lookups=tuple(_lookup(lookup, where, rows) for lookup in plan.lookups),
        scale=scale,
        decay=None if plan.decay is None else (plan.decay[0][..., rows], plan.decay[1][..., columns]),
    )


def _lookup(lookup: Lookup, where: Where, rows: slice) -> Lookup:
    """Only the distances that occur in the block, where they are known without looking at a tensor."""
    index = lookup.index
    states = None if lookup.states is None else lookup.states[:, :, rows]
    runs = where.runs
    if runs is None or isinstance(runs[0].start, Tensor) or isinstance(runs[1].start, Tensor):
        return replace(lookup, states=states)
    reach = where.reach
    lo, hi = min(max(index.lo, reach[0]), index.hi), max(min(index.hi, reach[1]), index.lo)
    first, size = lo - index.lo, hi - lo + 1
    if index.rows is not None:
        return replace(lookup, index=Index(lo, hi, index.rows[first : first + size], index.n), states=states)
    cut = lambda table: None if table is None else table.narrow(1, first, size)  # noqa: E731
    return Lookup(
        Index(lo, hi), cut(lookup.bias), cut(lookup.dot_query), states, cut(lookup.dot_key), cut(lookup.add_value)
    )
