"""A repeated call of a layer on a GPU: what `known_calls` would find by sixty facts is found by those that change within a layer.

    known_calls.describe   every tensor's shape, strides, dtype, place and alignment, every slot of the plan, all modes
    KnownText              the layer's own q, k and v, and the modes: tables and plan are those of the call before
    KnownToken             the same for one token after others, for any number of keys

The caller vouches for the plan: the same tables, at the same place (`Encoding.prepared_terms`). Without gradients only.
"""

from __future__ import annotations

from typing import Any

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
    def find(
        cls, q: Tensor, k: Tensor, v: Tensor, plan: Plan, masks: dict[str, Any]
    ) -> KnownText | KnownToken | Refused | None:
        """Of a call without gradients that `attend` has just run; None where it is not replayed yet."""
        described = known_calls.describe(q, k, v, plan, 0.0, "auto", False, masks)
        known = None if described is None else known_calls.find(described[0])
        if described is None or known is None or (known.step is None and known.call is None):
            return Refused()
        if known.step is None and known.call.program is None:
            return None
        if q.shape[2] == 1 < k.shape[2]:
            return Refused() if known.step is None else KnownToken(known.step, q, k, v, plan)
        return cls(known, plan, described[1])

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """The output, or None where something differs: take the general path."""
        if _layouts(q, k, v) != self.layouts or not _is_plain_mode():
            return None
        if self.step is not None:
            return self.step.run(q, k, v, self.plan, self.plan.positions.offset)
        return self.call.run(self.plan, None, [q, k, v, *self.others])[0]


class KnownToken:
    """A decoding step of one query (triton/decode_step.py), which looks at strides and alignment itself."""

    __slots__ = ("facts", "plan", "step")
    is_final = False

    def __init__(self, step, q: Tensor, k: Tensor, v: Tensor, plan: Plan):
        self.step, self.plan, self.facts = step, plan, _facts_of_token(q, k, v)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """The output, or None: take the general path. The query is the last token."""
        if _facts_of_token(q, k, v) != self.facts or not _is_plain_mode():
            return None
        return self.step.run(q, k, v, self.plan, 1 - k.shape[2])


class Refused:
    """In place of a KnownText, for calls that are not replayed."""

    is_final = True

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        return None


def _is_plain_mode() -> bool:
    """Whether nothing is differentiated, traced or transformed."""
    return not (
        torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0 or torch.is_anomaly_enabled()
    )  # fmt: skip


def _facts_of_token(q: Tensor, k: Tensor, v: Tensor) -> tuple:
    """What the key of a step (`known_calls.describe_step`) has of them: all but the number of keys."""
    rows, heads, keys, size = k.shape
    v_rows, v_heads, values, v_size = v.shape
    return (
        type(q), q.shape, q.dtype, q.get_device(), type(k), rows, heads, size, k.dtype, k.get_device(),
        type(v), v_rows, v_heads, v_size, v.dtype, v.get_device(), keys == values, keys > 1,
    )  # fmt: skip


def _layouts(q: Tensor, k: Tensor, v: Tensor) -> tuple:
    """What `known_calls.describe` reads of them, and the mode that changes what runs."""
    return (
        type(q), q.shape, q.stride(), q.dtype, q.get_device(), type(k), k.shape, k.stride(), k.dtype, k.get_device(),
        type(v), v.shape, v.stride(), v.dtype, v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
