"""A repeated call of a layer on a GPU: what `known_calls` would find by sixty facts is found by those that change within a layer.

    known_calls.describe   every tensor's shape, strides, dtype, place and alignment, every slot of the plan, all modes
    here                   the layer's own q, k and v, and the modes: tables and plan are those of the call before

The caller vouches for the plan: the same tables, at the same place (`Encoding.prepared_terms`). Without gradients only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.plan import Plan
from . import known_calls


class KnownText:
    """A call of `attend` that was recognised, and what it takes besides q, k and v."""

    __slots__ = ("call", "layouts", "others", "plan", "step")
    is_final = False
    """Whether a further search is useless."""

    def __init__(self, known: known_calls.Known, plan: Plan, tensors: list[Tensor | None]):
        self.call, self.step, self.plan = known.call, known.step, plan
        self.layouts, self.others = _layouts(*tensors[:3]), tensors[3:]  # type: ignore[arg-type]

    @classmethod
    def find(cls, q: Tensor, k: Tensor, v: Tensor, plan: Plan, causal: bool) -> KnownText | Refused | None:
        """Of a call without gradients that `attend` has just run; None where it is not replayed yet."""
        described = known_calls.describe(q, k, v, plan, 0.0, "auto", False, {"causal": causal})
        known = None if described is None else known_calls.find(described[0])
        if described is None or known is None or (known.step is None and known.call is None):
            return Refused()
        if known.step is None and known.call.program is None:
            return None
        return cls(known, plan, described[1])

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """The output, or None where something differs: take the general path."""
        if torch.is_grad_enabled() or _layouts(q, k, v) != self.layouts:
            return None
        if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
            return None
        if forward_ad._current_level >= 0 or torch.is_anomaly_enabled():
            return None
        if self.step is not None:
            return self.step.run(q, k, v, self.plan)
        return self.call.run(self.plan, None, [q, k, v, *self.others])[0]


class Refused:
    """In place of a KnownText, for calls that are not replayed."""

    is_final = True

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        return None


def _layouts(q: Tensor, k: Tensor, v: Tensor) -> tuple:
    """What `known_calls.describe` reads of them, and the mode that changes what runs."""
    return (
        type(q), q.shape, q.stride(), q.dtype, q.get_device(), type(k), k.shape, k.stride(), k.dtype, k.get_device(),
        type(v), v.shape, v.stride(), v.dtype, v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
