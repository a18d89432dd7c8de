"""Calls like an earlier one: validated, lowered and chosen once, and from then on found by a key of plain facts.

    attend(q, k, v, plan, ..)  ─▶  describe  ─▶  key  ─▶  known?  ── yes ─▶  run
                                                            └── no ──▶  validate, lower, choose; keep it under the key

The key holds everything that these steps read: of each tensor its shape, strides, dtype, device, alignment and whether it needs
a gradient; numbers, positions and indices as values; modes of PyTorch. Values of tensors are not part of it: nothing is read from
the device. Rare calls and calls whose structure changes (further axes, token positions, functions, traced code) have no key
and take the general path. A few queries without gradients decode: their keys grow with every step, so the key leaves their number out.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.index import Index
from ..core.mask import make_mask
from ..core.memo import Memo
from ..core.plan import Plan
from ..core.precision import autocast_is_on, no_autocast
from . import triton
from .base import Engine
from .lowering import Facts, LoweredPlan

PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
SLOTS = ("positions", "shift", "rotate", "lookups", "scale", "slopes", "pair_axes")
OTHER_SLOTS = tuple(slot.name for slot in fields(Plan) if slot.name not in SLOTS)
"""Fields of a plan that must be None here, including those that are added later."""
MASKS = frozenset(("causal", "window", "key_mask", "documents", "mask"))
MOST = 1024
FEW, DECODING = 16, "decoding"
"""Up to this many queries without a gradient are a decoding step."""
SHIFTED = "shifted"
"""In the key of a plan with shifts, which `attend` adds to queries and scores where the triton engine does not."""
_known = Memo(MOST, MOST)
_steps: dict[tuple, Any] = {}
"""Decoding steps (triton/decode_step.py) by the key of `describe_step`."""


def describe(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, engine: str, return_lse: bool, masks: dict[str, Any]
) -> tuple[tuple, list[Tensor | None]] | None:
    """A call's key and tensors (prepared.collect, then the phases); None: take the general path."""
    if not (getattr(q, "is_cuda", False) or triton.INTERPRETED) or type(plan) is not Plan:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0 or torch.is_anomaly_enabled() or type(dropout) not in (float, int):
        return None
    positions, rotate, scale = plan.positions, plan.rotate, plan.scale
    if positions.offset is None or len(positions.q_axes) > 1 or not masks.keys() <= MASKS:
        return None
    if isinstance(scale, Tensor):
        return None
    for slot in OTHER_SLOTS:
        if getattr(plan, slot) is not None:
            return None
    get = masks.get
    causal, window, documents = get("causal", False), get("window"), get("documents")
    if causal and positions.offset != positions.q_length - positions.k_length:
        return None  # a warning may be due
    if isinstance(documents, Tensor):
        documents = documents, documents
    tables: list[Any] = []
    indices = []
    shifts: list[Any] = [] if plan.shift is None else [plan.shift]
    has_key_terms = False
    for x in plan.lookups:
        if x.query_shift is not None:
            shifts.append(x.query_shift)
        indices.append(x.index)
        tables += (x.bias, x.dot_query, x.states, x.dot_key, x.add_value)
        has_key_terms = has_key_terms or x.dot_key is not None or x.add_value is not None
    tables.append(plan.slopes)
    hiding = (get("key_mask"), *(documents or (None, None)), get("mask"))
    phases: tuple = ()
    rotation = None
    if rotate is not None:
        phases = (*(rotate.q or (None, None)), *(rotate.k or (None, None)))
        rotation = rotate.layout, rotate.values, rotate.magnitude, rotate.polar
    tensors = [q, k, v, *tables, *hiding, *phases, *shifts]
    for x in tensors:
        if type(x) not in PLAIN:
            return None  # subclasses may override operations; anything else is invalid
    graph = torch.is_grad_enabled()
    if window is not None and not isinstance(window, int):
        window = tuple(window)
    facts: list[Any] = [
        engine, dropout, return_lse, causal, window, scale, rotation, graph, torch.are_deterministic_algorithms_enabled(),
        positions.q_length, *indices,
    ]  # fmt: skip
    few = positions.q_length <= FEW and not graph and not dropout and documents is None
    if few and has_key_terms and positions.q_length != positions.k_length:
        return None  # the decoding kernels have none of these terms
    if few and not has_key_terms:
        if shifts or k.dim() != 4 or k.shape[:3] != v.shape[:3] or not 0 < k.shape[2] == positions.k_length:
            return None
        facts += (DECODING, positions.offset + positions.k_length, positions.k_length == positions.q_length)
        facts += (k.shape[:2], k.shape[3], k.dtype, k.get_device(), v.shape[3], v.dtype, v.get_device())
        for x in (q, *tables, *phases):
            facts += (None,) if x is None else (x.shape, x.dtype, x.get_device())
        for x in hiding:  # `make_mask` looks at their shapes
            facts += (None,) if x is None else (x.dtype, x.requires_grad)
        return tuple(facts), tensors
    facts += (positions.offset, positions.k_length)
    if shifts:
        facts += (SHIFTED, plan.shift is not None, tuple([x.query_shift is not None for x in plan.lookups]))
    for x in tensors:
        if x is None:
            facts.append(None)
        else:
            facts += (x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad, x.data_ptr() & 15)
    return tuple(facts), tensors


def find(key: tuple) -> Known | None:
    return _known.get(key)


def run_step(q: Tensor, k: Tensor, v: Tensor, plan: Plan, causal: bool) -> Tensor | None:
    """The output of a decoding step like an earlier one, without a mask but causality, for any number of keys; else None."""
    if not _steps or not (plan.lookups or plan.slopes is not None):
        return None
    if torch.is_grad_enabled() or plan.positions.q_length > FEW:
        return None
    key = describe_step(q, k, v, plan, causal)
    step = None if key is None else _steps.get(key)
    return None if step is None else step.run(q, k, v, plan, plan.positions.offset)


def describe_step(q: Tensor, k: Tensor, v: Tensor, plan: Plan, causal: bool) -> tuple | None:
    """The key of a decoding step: what `describe` has in its key, for the few slots that a Step serves."""
    positions, lookups, slopes, scale = plan.positions, plan.lookups, plan.slopes, plan.scale
    if positions.offset is None or len(positions.q_axes) > 1 or len(lookups) > 1:
        return None
    if not (
        plan.rotate is None and plan.cosine is None and plan.append is None and plan.decay is None
        and plan.pair is None and plan.sinks is None and (scale is None or type(scale) is float)
    ):  # fmt: skip
        return None
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN or q is None or k is None or v is None:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0:
        return None
    k_shape, v_shape, k_length, dtype, device = k.shape, v.shape, positions.k_length, q.dtype, q.get_device()
    if q.dim() != 4 or len(k_shape) != 4 or len(v_shape) != 4 or not k_shape[2] == v_shape[2] == k_length:
        return None
    if k.dtype is not dtype or v.dtype is not dtype or k.get_device() != device or v.get_device() != device:
        return None
    index = shifts = states = None
    tables: tuple | None = None
    shift = plan.shift
    if lookups:
        x = lookups[0]
        if not (x.dot_key is None and x.add_value is None):
            return None
        index, bias, table, row_shift, states = x.index, x.bias, x.dot_query, x.query_shift, x.states
        if type(bias) not in PLAIN or type(table) not in PLAIN or type(states) not in PLAIN:
            return None
        if shift is not None or row_shift is not None:
            shifts = _describe_shifts(q, shift, row_shift, bias)
            if shifts is None:
                return None
        if table is not None and type(index) is Index and index.rows is None and not index.axis:
            heads, n, width = table.shape  # a row for each distance: how many there are changes from step to step
            if n != index.n:
                return None
            of_bias = bias is not None and (bias.shape, bias.dtype, bias.get_device())
            tables = of_bias, heads, width, table.dtype, table.get_device()
            index = None if bias is None else index
        else:
            tables = (
                None if bias is None else (bias.shape, bias.dtype, bias.get_device()),
                None if table is None else (table.shape, table.dtype, table.get_device()),
            )
    elif shift is not None:
        return None
    sloped = None
    if slopes is not None:
        if type(slopes) not in PLAIN:
            return None
        sloped = slopes.shape, slopes.dtype, slopes.get_device()
    return (
        index, tables, shifts, sloped, None if states is None else (states.shape, states.dtype, states.get_device()), scale, causal, dtype, device, q.shape, positions.q_length, positions.offset + k_length,
        k_length == positions.q_length, k_shape[0], k_shape[1], k_shape[3], v_shape[0], v_shape[1], v_shape[3],
    )  # fmt: skip


def _describe_shifts(q: Tensor, shift: Tensor | None, row_shift: Tensor | None, bias: Tensor | None) -> tuple | None:
    """Of shifts that the kernels add themselves (triton.decode_launch.adds_shifts)."""
    facts: list[Any] = []
    for x in (shift, row_shift):
        if x is None:
            facts.append(None)
        elif type(x) not in PLAIN or x.shape != (q.shape[1], q.shape[3]) or not x.is_contiguous() or bias is not None:
            return None
        else:
            facts += (x.dtype, x.get_device())
    return tuple(facts)


def _keep_step(key: tuple | None, step) -> None:
    if key is None:
        return
    if len(_steps) >= MOST:
        _steps.clear()
    _steps[key] = step


def run_with_shifts(
    engine: Engine, name: str, q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan
) -> tuple[Tensor, Tensor | None] | None:
    """out and lse of a decoding step with shifts, before `attend` adds them, where the kernels of the triton engine do; `run_step` finds
    the next steps. name: the engine's, as it was asked for."""
    plan, facts = lowered.plan, lowered.facts
    if engine is not triton or (plan.shift is None and not any(x.query_shift is not None for x in plan.lookups)):
        return None
    from .triton import decode_launch
    from .triton.decode_step import Step
    from .triton.device import is_traced

    if not decode_launch.applies(facts) or is_traced(q) or plan.sinks is not None:
        return None
    if not decode_launch.adds_shifts(lowered):
        return None
    with no_autocast(q.device):
        results = decode_launch.run(q, k, v, lowered, with_shifts=True)
    causal, positions = lowered.mask.causal, plan.positions
    is_plain = lowered.mask.plain and lowered.mask.window is None
    if name != "auto" or not is_plain or not Step.supports(lowered) or torch.is_grad_enabled():
        return results
    if not causal or positions.offset == positions.q_length - positions.k_length:  # else a warning is due, each time
        key = describe_step(q, k, v, plan, causal)
        if key not in _steps:
            _keep_step(key, Step(q, v, lowered))
    return results


def keep(key: tuple, engine: Engine, lowered: LoweredPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
    """After the engine has run the call. q, k and v: as the engine got them."""
    if getattr(engine, "reads_raw_plan", False):
        return
    call = step = None
    if SHIFTED in key:
        return  # `prepare_shifted` has kept it, where it could
    decodes = DECODING in key
    if engine is triton:
        from .triton import decode_launch, prepared

        if decode_launch.applies(lowered.facts):
            from .triton.decode_step import Step

            step = Step(q, v, lowered) if decodes and Step.supports(lowered) else None
            if step is not None and key[0] == "auto" and lowered.mask.plain and lowered.mask.window is None:
                _keep_step(describe_step(q, k, v, lowered.plan, lowered.mask.causal), step)
        else:
            call = None if decodes or lowered.plan.rotate is not None else prepared.find(q, k, v, lowered)
            if call is None:
                return
    _known.put(key, Known(engine, lowered.facts, call, step, decodes), 1)


def prepare_shifted(
    key: tuple, engine: Engine, plan: Plan, lowered: LoweredPlan, tensors: list[Tensor | None]
) -> Known | None:
    """Before the engine runs a plan with shifts for the first time: what runs it, where the triton engine adds them itself."""
    if engine is not triton or SHIFTED not in key:
        return None
    from .triton import decode_launch, prepared

    call = None if decode_launch.applies(lowered.facts) else prepared.find_shifted(plan, tensors, lowered)
    if call is None:
        return None
    known = Known(engine, lowered.facts, call, None, False)
    _known.put(key, known, 1)
    return known


class Known:
    """What was decided: the engine and its facts; call, step: what the triton engine has prepared; decodes: for any number of
    keys."""

    __slots__ = ("call", "decodes", "engine", "facts", "step")

    def __init__(self, engine: Engine, facts: Facts, call, step, decodes: bool):
        self.engine, self.facts, self.call, self.step, self.decodes = engine, facts, call, step, decodes

    def run(self, plan: Plan, dropout: float, masks: dict[str, Any], tensors: list[Tensor | None]):
        """out and lse."""
        q, k, v = tensors[:3]
        assert q is not None and k is not None and v is not None
        call = self.call
        if call is not None:
            if call.program is not None:
                return call.run(plan, None, tensors)
            return call.run(plan, make_mask(q, k, **masks), tensors)
        if self.step is not None:
            out = self.step.run(q, k, v, plan, plan.positions.offset, masks.get("key_mask"))
            if out is not None:
                return out, None
        mask = make_mask(q, k, **masks)
        facts = self.facts._replace(k_length=k.shape[2]) if self.decodes else self.facts
        lowered = LoweredPlan(plan, mask, facts, dropout, False)
        if plan.rotate is not None:
            q, k, v = plan.rotate.rotate_qkv(q, k, v)
        if not autocast_is_on(q.device):
            return self.engine.run(q, k, v, lowered)
        with no_autocast(q.device):
            return self.engine.run(q, k, v, lowered)


def forget() -> None:
    """When the engines change."""
    _known.clear()
    _steps.clear()
