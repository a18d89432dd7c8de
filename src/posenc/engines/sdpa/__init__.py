"""PyTorch's own fused attention plus O(L) views: position at the price of attention without it, on a CPU first.

    plan over contiguous positions  ->  terms.py (one table of each sort)  ->  op.py: forward.py, backward.py
    anything else                   ->  rows.py  (the reference formula in blocks of queries)

band.py says where the terms vary, slab.py which heads share a call, skew.py and mask.py make the masks.
"""

from __future__ import annotations

from torch import Tensor

from ...mask import Mask
from ...plan import Plan
from . import op, rows
from .terms import terms_of, unstructured


def refuses(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float) -> str | None:
    return None


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float) -> Tensor:
    if not fused(q, k) or unstructured(q, plan, mask, dropout) is not None:
        return rows.run(q, k, v, plan, mask, dropout)
    # the fused kernel reads channels as neighbours in memory and does not look whether they are
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    terms, band = terms_of(q, plan, mask)
    scale = plan.scale_of(q.shape[3])
    assert isinstance(scale, float)
    return op.attend(q, k, v, terms, band, scale)


def fused(q: Tensor, k: Tensor) -> bool:
    """Whether PyTorch's CPU kernel takes these."""
    return q.device.type == "cpu" and 0 not in q.shape and 0 not in k.shape
