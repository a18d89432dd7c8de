"""Any plan, a block of queries at a time: the reference formula in O(block · Lk) memory, forward and backward.

Each block is checkpointed: nothing of size [block, Lk] outlives it, and autograd recomputes it for the gradients,
those of what `pair` closes over included. This is the path for plans without a structure that could be used:
arbitrary position tensors, documents, dense masks, dropout, a scale for each query, grids, `pair`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.dropout import as_dropout
from ..core.functions import transform_reason
from ..core.plan import Lookup, Plan
from . import reference
from .lowering import LoweredPlan

reads_raw_plan = False
SCORES = 1 << 22
"""Scores of one block: 16 MiB of float32 ..."""
FEWEST = 64
"""... but at least this many query rows."""


def supports(lowered: LoweredPlan) -> str | None:
    return transform_reason()


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor]:
    """q and k are rotated already."""
    plan, mask, dropout = lowered.plan, lowered.mask, lowered.dropout
    batch, heads, q_length, _ = q.shape
    block = max(FEWEST, SCORES // max(1, batch * heads * k.shape[2]))
    if q_length <= block:
        return reference.attention(q, k, v, plan, mask, dropout)
    if dropout and not torch.compiler.is_compiling():
        dropout = as_dropout(dropout, q.device)  # one draw for all blocks
    precision = torch.promote_types(q.dtype, torch.float32)
    # in float32 here, so that the blocks' gradients are summed in float32
    k, v = k.to(precision), v.to(precision)
    plan = _cast_tables(plan, precision)
    parts = []
    for start in range(0, q_length, block):
        rows = slice(start, min(start + block, q_length))
        arguments = (q[:, :, rows], k, v, plan, mask, dropout, rows)
        if torch.is_grad_enabled():
            parts.append(checkpoint(reference.attention, *arguments, use_reentrant=False))
        else:
            parts.append(reference.attention(*arguments))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _cast_tables(plan: Plan, precision: torch.dtype) -> Plan:
    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(precision)

    lookups = tuple(
        Lookup(x.index, cast(x.bias), cast(x.dot_query), cast(x.states), cast(x.dot_key), cast(x.add_value))
        for x in plan.lookups
    )
    return replace(plan, lookups=lookups)
