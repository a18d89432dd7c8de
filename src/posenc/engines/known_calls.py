"""Calls that came before: validated, lowered and chosen once, and from then on found by a key of plain facts.

    attend(q, k, v, plan, ..)  ─▶  describe  ─▶  key  ─▶  known?  ── yes ─▶  run
                                                            └── no ──▶  validate, lower, choose; keep it under the key

The key holds everything that these steps read: of each tensor its shape, strides, dtype, device, alignment and whether it needs
a gradient; numbers, positions and indices as values; modes of PyTorch. Values of tensors are not part of it: nothing is read from
the device. What is rare or of changing structure (further axes, token positions, functions, traced code) has no key, and
takes the long way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.mask import Mask, make_mask
from ..core.memo import Memo
from ..core.plan import Plan
from ..core.precision import autocast_is_on, no_autocast
from . import triton
from .base import Engine
from .lowering import Facts, LoweredPlan

PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
MASKS = frozenset(("causal", "window", "key_mask", "documents", "mask"))
MOST = 1024
_known = Memo(MOST, MOST)


def describe(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, engine: str, return_lse: bool, masks: dict[str, Any]
) -> tuple[tuple, list[Tensor | None]] | None:
    """A call's key and tensors (prepared.collect, then the phases); None: take the long way."""
    if not (getattr(q, "is_cuda", False) or triton.INTERPRETED) or type(plan) is not Plan:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0 or torch.is_anomaly_enabled() or type(dropout) not in (float, int):
        return None
    positions, rotate, scale = plan.positions, plan.rotate, plan.scale
    if positions.offset is None or len(positions.q_axes) > 1 or not masks.keys() <= MASKS:
        return None
    if (
        plan.shift is not None or plan.cosine is not None or plan.append is not None or plan.decay is not None
        or plan.pair is not None or plan.sinks is not None or isinstance(scale, Tensor)
    ):  # fmt: skip
        return None
    get = masks.get
    causal, window, documents = get("causal", False), get("window"), get("documents")
    if causal and positions.offset != positions.q_length - positions.k_length:
        return None  # a warning may be due
    if isinstance(documents, Tensor):
        documents = documents, documents
    tensors: list[Any] = [q, k, v]
    indices = []
    for x in plan.lookups:
        if x.query_shift is not None:
            return None
        indices.append(x.index)
        tensors += (x.bias, x.dot_query, x.states, x.dot_key, x.add_value)
    tensors += (plan.slopes, get("key_mask"), *(documents or (None, None)), get("mask"))
    rotation = None
    if rotate is not None:
        tensors += (*(rotate.q or (None, None)), *(rotate.k or (None, None)))
        rotation = rotate.layout, rotate.values, rotate.magnitude, rotate.polar, rotate.q is None, rotate.k is None
    facts: list[Any] = []
    for x in tensors:
        if type(x) not in PLAIN:
            return None  # subclasses have ways of their own; what is no tensor is wrong
        if x is None:
            facts.append(None)
        else:
            facts += (x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad, x.data_ptr() & 15)
    try:
        hash(window)
    except TypeError:
        return None
    key = (
        engine, dropout, return_lse, causal, window, scale, positions.offset, positions.q_length, positions.k_length, rotation,
        torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), *indices, *facts,
    )  # fmt: skip
    return key, tensors


def find(key: tuple) -> Known | None:
    return _known.get(key)


def keep(key: tuple, engine: Engine, lowered: LoweredPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
    """After the engine has run the call. q, k and v: as the engine got them."""
    call = None
    if engine is triton and lowered.plan.rotate is None:
        from .triton import decode_launch, prepared

        if not decode_launch.applies(lowered.facts):
            call = prepared.find(q, k, v, lowered)
    if not getattr(engine, "reads_raw_plan", False):
        _known.put(key, Known(engine, lowered.facts, call), 1)


class Known:
    """What was decided: the engine and its facts; call: what the triton engine has prepared."""

    __slots__ = ("call", "engine", "facts")

    def __init__(self, engine: Engine, facts: Facts, call):
        self.engine, self.facts, self.call = engine, facts, call

    def run(self, plan: Plan, dropout: float, masks: dict[str, Any], tensors: list[Tensor | None]):
        """out and lse."""
        q, k, v = tensors[:3]
        assert q is not None
        assert k is not None
        assert v is not None
        call = self.call
        if call is not None:
            if call.program is not None:
                return call.run(plan, None, tensors)
            return call.run(plan, make_mask(q, k, **masks), tensors)
        mask: Mask = make_mask(q, k, **masks)
        lowered = LoweredPlan(plan, mask, self.facts, dropout, False)
        rotate = plan.rotate
        if rotate is not None:
            if rotate.values:
                v = rotate.keys(v)
            q, k = rotate.both(q, k)
        if not autocast_is_on(q.device):
            return self.engine.run(q, k, v, lowered)
        with no_autocast(q.device):
            return self.engine.run(q, k, v, lowered)


def forget() -> None:
    """When the engines change."""
    _known.clear()
