"""Engine: what computes attention for a lowered plan. An engine reads the fields of plans and knows no encoding.

    attend ──lower_plan──▶ LoweredPlan ──choose_engine──▶ engine.supports(lowered) is None ──▶ engine.run(q, k, v, lowered)

A module with these two functions is an engine, and so is an object with these two methods; `register_engine` adds one.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .lowering import LoweredPlan


class Engine(Protocol):
    """q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv]."""

    def supports(self, lowered: LoweredPlan) -> str | None:
        """None if it can run this, else the reason why not. Cheap, without side effects, reads no tensor on a GPU."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor | None]:
        """out [B, H, Lq, Dv] in q's dtype, and the log-sum-exp of each query's scores [B, H, Lq], float32 or better,
        -inf for a fully masked query; the second may be None unless `lowered.facts.return_lse`.

        q and k are shifted and rotated already, except for an engine with `reads_raw_plan = True`, which does that itself.
        Gradients reach q, k, v and every tensor of the plan.
        """
