"""Workloads: an encoding with its options, causal or not, one query or all. A case is a workload at one shape."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.encoding import Encoding
from ..core.plan import Plan
from ..core.positions import Positions
from ..encodings.registry import create
from ..encodings.relative_logits import RelativeLogits

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    name: str
    encoding: str
    options: dict
    causal: bool = False
    queries: int | None = None  # None: as many as keys
    size: int = 64
    longest: int | None = None  # measured up to this length


@dataclass(frozen=True)
class Case:
    """A workload at one shape, on one device."""

    workload: Workload
    length: int
    batch: int = 1
    heads: int = 8
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def size(self) -> int:
        return self.workload.size

    @property
    def queries(self) -> int:
        return self.workload.queries or self.length

    @property
    def shape(self) -> str:
        return f"B{self.batch} H{self.heads} L{self.length} D{self.size}"

    def positions(self) -> Positions:
        return Positions((self.length - self.queries, self.queries), self.length)


class Problem:
    """A case's tensors: the encoding, q, k, v, the output's gradient, and states if the encoding needs them.

    All contenders share them; a run does not modify them.
    """

    def __init__(self, case: Case):
        self.case = case
        heads, size = case.heads, case.size
        torch.manual_seed(0)
        made = create(case.workload.encoding, d_model=heads * size, heads=heads, head_dim=size, **case.workload.options)
        self.encoding: Encoding = made.to(device=case.device, dtype=case.dtype)
        torch.manual_seed(1)
        self.q, self.k, self.v, self.g = (
            self._random(case.batch, heads, n, size) for n in (case.queries, case.length, case.length, case.queries)
        )
        width = made.d_rel if isinstance(made, RelativeLogits) else None
        self.states = None if width is None else self._random(case.batch, heads, case.queries, width)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.case.device).to(self.case.dtype)

    def exact(self) -> Problem:
        """The same numbers in float64."""
        other = copy.copy(self)
        other.encoding = copy.deepcopy(self.encoding).double()
        other.q, other.k, other.v, other.g = (x.double() for x in (self.q, self.k, self.v, self.g))
        other.states = None if self.states is None else self.states.double()
        return other

    def leaves(self) -> list[tuple[str, Tensor]]:
        """The tensors that a training step differentiates besides q, k and v, by name."""
        found: list[tuple[str, Tensor]] = list(self.encoding.named_parameters())
        if self.states is not None:
            found.append(("states", self.states.requires_grad_()))
        return found

    def plan(self) -> Plan:
        positions = self.case.positions()
        if self.states is None:
            return self.encoding.plan(positions)
        return self.encoding.plan_states(positions, self.states)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("t5", "t5", {}),
        Workload("clipped", "clipped", {"max_distance": 128, "std": 0.1}),
        Workload("alibi", "alibi", {}),
        Workload("alibi-learned", "alibi", {"learnable": True}),
        Workload("t5-causal", "t5", {"causal": True}, causal=True),
        Workload("clipped-causal", "clipped", {"max_distance": 128, "std": 0.1}, causal=True),
        Workload("alibi-causal", "alibi", {}, causal=True),
        Workload("alibi-learned-causal", "alibi", {"learnable": True}, causal=True),
        Workload("shaw", "shaw", {"max_distance": 64}),
        Workload("shaw-causal", "shaw", {"max_distance": 64}, causal=True),
        Workload("shaw-values", "shaw", {"max_distance": 64, "values": True}),
        Workload("shaw-values-causal", "shaw", {"max_distance": 64, "values": True}, causal=True),
        Workload("deberta", "deberta", {"buckets": 256, "max_distance": 512}),
        Workload("transformer_xl", "transformer_xl", {}),
        Workload("relative_logits", "relative_logits", {"max_distance": 1024}, causal=True, size=128, longest=4096),
        Workload("rope", "rope", {}),
        Workload("rope-causal", "rope", {}, causal=True),
        Workload("t5-decode", "t5", {"causal": True}, causal=True, queries=1),
    )
}

SETS = {
    "cpu": ["t5", "clipped", "alibi", "t5-causal", "clipped-causal", "alibi-causal", "shaw", "shaw-values", "deberta",
            "transformer_xl", "t5-decode"],
    "cuda": ["t5", "t5-causal", "clipped", "clipped-causal", "alibi-learned", "alibi-learned-causal", "shaw",
             "shaw-causal", "shaw-values", "shaw-values-causal", "relative_logits", "deberta", "transformer_xl", "rope",
             "rope-causal"],
}  # fmt: skip
"""The default workloads."""
LENGTHS = {"cpu": [512, 1024, 2048, 4096], "cuda": [4096, 16384]}


def make_case(workload: Workload, length: int, device: str, dtype: torch.dtype) -> Case:
    """One sequence of 8 heads on a CPU; on a GPU 16 heads and 16384 tokens in all (4 sequences of 4096)."""
    if device == "cpu":
        return Case(workload, length, 1, 8, device, dtype)
    return Case(workload, length, max(1, 16384 // length), 16, device, dtype)
