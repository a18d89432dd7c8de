"""Any plan, a block of queries at a time: the reference formula in O(block · Lk) memory, forward and backward.

Each block is checkpointed: nothing of size [block, Lk] outlives it, and autograd recomputes it for the gradients,
those of what `pair` closes over included. This is the way for plans without a structure that could be used:
explicit position tensors, documents, additive masks, dropout, tensor scales, grids, `pair`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...core.mask import Mask
from ...core.plan import Lookup, Plan
from .. import reference
from . import sizes


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float, with_lse: bool = False):
    batch, heads, q_length, _ = q.shape
    block = max(sizes.FEWEST, sizes.SCORES // max(1, batch * heads * k.shape[2]))
    if q_length <= block:
        return reference.run(q, k, v, plan, mask, dropout, with_lse=with_lse)
    precision = torch.promote_types(q.dtype, torch.float32)
    # in float32 here, so that the blocks' gradients are summed in float32
    k, v = k.to(precision), v.to(precision)
    plan = _precise(plan, precision)
    outs = []
    for start in range(0, q_length, block):
        rows = slice(start, min(start + block, q_length))
        arguments = (q[:, :, rows], k, v, plan, mask, dropout, rows, with_lse)
        if torch.is_grad_enabled():
            outs.append(checkpoint(reference.run, *arguments, use_reentrant=False))
        else:
            outs.append(reference.run(*arguments))
    return tuple(torch.cat(parts, 2) for parts in zip(*outs, strict=True)) if with_lse else torch.cat(outs, 2)


def _precise(plan: Plan, precision: torch.dtype) -> Plan:
    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(precision)

    lookups = tuple(
        Lookup(x.index, cast(x.bias), cast(x.dot_query), cast(x.states), cast(x.dot_key), cast(x.add_value))
        for x in plan.lookups
    )
    return replace(plan, lookups=lookups)
