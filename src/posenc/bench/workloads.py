"""What is attended. A workload is a scheme with its options, and how it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import Plan
from ..registry import create
from ..scheme import Scheme
from ..where import Where

BATCH, HEADS, SIZE = 1, 8, 64


@dataclass(frozen=True)
class Workload:
    name: str
    scheme: str
    options: dict
    causal: bool = False
    queries: int | None = None  # None: as many as keys

    def make(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Scheme:
        torch.manual_seed(0)
        scheme = create(self.scheme, d_model=HEADS * SIZE, heads=HEADS, head_dim=SIZE, **self.options)
        return scheme.to(device=device, dtype=dtype)

    def where(self, length: int) -> Where:
        return Where(length) if self.queries is None else Where((length - self.queries, self.queries), length)

    def inputs(self, length: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """q, k, v and the output's gradient."""
        torch.manual_seed(1)
        rows = length if self.queries is None else self.queries
        made = [torch.randn(BATCH, HEADS, n, SIZE) for n in (rows, length, length, rows)]
        return tuple(x.to(device=device, dtype=dtype) for x in made)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("t5", "t5", {}),
        Workload("clipped", "clipped", {"k": 64, "std": 0.1}),
        Workload("alibi", "alibi", {}),
        Workload("t5-causal", "t5", {"causal": True}, causal=True),
        Workload("clipped-causal", "clipped", {"k": 64, "std": 0.1}, causal=True),
        Workload("alibi-causal", "alibi", {}, causal=True),
        Workload("shaw", "shaw", {"k": 64}),
        Workload("shaw-values", "shaw", {"k": 64, "values": True}),
        Workload("deberta", "deberta", {"buckets": 256, "max_distance": 512}),
        Workload("transformer_xl", "transformer_xl", {}),
        Workload("t5-decode", "t5", {"causal": True}, causal=True, queries=1),
    )
}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def positions(plan: Plan, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Everything but scale q·k of the scores, dense [B, H, Lq, Lk]: what a textbook adds."""
    from ..dispatch import scores

    with_all = scores(q, k, plan, causal=causal)
    scale = plan.scale_of(q.shape[3])
    return with_all - (q if plan.shift is None else q + plan.shift[:, None]) @ k.transpose(-1, -2) * scale
