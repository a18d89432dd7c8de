"""PyTorch's fused CPU attention plus O(L) views: position at the price of attention without it.

    contiguous, some queries         ->  few.py   (a mask of their own, one call)
    contiguous positions             ->  terms.py (one table of each kind)  ->  op.py: forward.py, backward.py
    few places on further axes       ->  ../further_axes.py (more channels), then as above

band.py says where the terms vary, slab.py which heads share a call, skew.py and mask.py make the masks.
Where terms hold content, pairs.py has the scores of a block in memory, for backward.py and for short.py (the forward
pass of short sequences), with the matrix products of products.py. Where they do not, fused.py is the backward pass on
PyTorch's own kernel, and diagonals.py adds the bias's gradient. sizes.py holds every block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.functions import transform_reason
from ...core.plan import holds_nan
from .. import blocked, further_axes
from ..lowering import LoweredPlan
from . import few, op
from .terms import structure_reason, terms_of

WIDEST = 256  # heads with channels for further axes


def supports(lowered: LoweredPlan) -> str | None:
    facts = lowered.facts
    if facts.device.type != "cpu":
        return f"it is built on PyTorch's fused CPU attention, the tensors are on {facts.device.type}"
    if 0 in (facts.batch, facts.q_length, facts.k_length, facts.head_dim, facts.value_dim):
        return "a tensor is empty"
    reason = transform_reason() or structure_reason(lowered)
    if reason is not None or not facts.further_axes:
        return reason
    reason = further_axes.supports(facts, lowered.plan, WIDEST)
    if reason is None and sum(further_axes.sizes(facts.dtype, lowered.plan)) * 4 > facts.k_length:
        return "tokens stand at many places on further axes"
    return reason


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor | None]:
    eager = not torch.compiler.is_compiling()
    # PyTorch's CPU kernel takes a query of NaN for a fully masked one and returns zeros: a fault would go unnoticed
    if eager and holds_nan(q):
        return blocked.run(q, k, v, lowered)
    facts = lowered.facts
    if facts.further_axes:
        q, k, v, lowered, finish = further_axes.widen(q, k, v, lowered)
        out, lse = run(q, k, v, lowered)
        return finish(out), lse
    scale = lowered.scale
    assert isinstance(scale, float)  # structure_reason
    if eager and few.applies(q, k, v, lowered):
        out = few.run(q, k, v, lowered, scale)
        hidden = facts.padding or (q.shape[2] > 1 and facts.is_limited)
        if not (hidden and holds_nan(out)):  # else the operator finds out whose it is
            return out, None
    terms, band = terms_of(q, lowered)
    return op.attend(q, k, v, terms, band, scale, facts.return_lse)
