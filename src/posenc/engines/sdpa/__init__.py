"""PyTorch's own fused attention plus O(L) views: position at the price of attention without it, on a CPU first."""

from __future__ import annotations

from torch import Tensor

from ...mask import Mask
from ...plan import Plan
from . import rows


def refuses(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float) -> str | None:
    return None


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask, dropout: float) -> Tensor:
    return rows.run(q, k, v, plan, mask, dropout)
