"""Calls as one autograd function of the plan's own tensors: tables of buckets are expanded, and their gradients summed, by launches.

    PyTorch's operations    table -> t() -> index_select -> float -> expand -> attention        a dozen nodes of autograd, each way
    here                    table -> t() -> attention                                           one, replayed (replay.py)

What a call needs besides the values of its tensors is found at its first sight and kept under a key of plain facts. The second
equal call is recorded, the third replays the record. `find` serves engines that hold a lowered plan; `known_calls.py` skips
validation and lowering too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import Tensor

from ...core.mask import Mask
from ...core.memo import Memo
from ...core.plan import Lookup, Plan
from ..lowering import Facts, LoweredPlan
from . import launcher
from .alignment import is_padded
from .arguments import GRADIENTS, INPUTS, Inputs, Numbers, Tables, kernel_arguments
from .device import is_traced, launch_on
from .launch import run_backward, run_forward
from .ops import FirstDerivative
from .replay import Recorder, describe
from .tables import Parts, add_shift, expand, fold_shift, sum_parts, unfold_shift

TABLES = ("bias", "dot_query", "states", "dot_key", "add_value")
"""Of each lookup, in this order."""
MOST = 1024
_calls = Memo(MOST, MOST)


def collect(q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: Mask) -> list[Tensor | None]:
    """q, k, v, each lookup's TABLES, the slopes, padding, documents, the dense mask."""
    tensors: list[Tensor | None] = [q, k, v]
    for x in plan.lookups:
        tensors += (x.bias, x.dot_query, x.states, x.dot_key, x.add_value)
    tensors += (plan.slopes, mask.key_mask, *(mask.documents or (None, None)), mask.extra)
    return tensors


def supports(lowered: LoweredPlan) -> bool:
    """Whether every gradient that is wanted is one of those below."""
    facts, plan = lowered.facts, lowered.plan
    if facts.positions != "run" or facts.further_axes or facts.decay or facts.scale != "number" or facts.pair:
        return False
    if is_padded(facts.dtype, facts.head_dim, facts.value_dim):
        return False
    if type(lowered.dropout) not in (float, int) or facts.mask == "learned" or float(lowered.scale) <= 0.0:
        return False
    for name in TABLES[1:]:
        if sum(getattr(lookup, name) is not None for lookup in plan.lookups) > 1:
            return False
    shape = (facts.batch, facts.heads, facts.q_length)
    return all(x.states is None or x.states.shape[:3] == shape for x in plan.lookups)


def find_shifted(plan: Plan, tensors: Sequence[Tensor | None], lowered: LoweredPlan) -> Call | None:
    """A call that adds the plan's shifts to queries and scores itself, where it can. plan, tensors: as they were given, the shift
    and each query_shift last; the lowered plan is not folded."""
    q = tensors[0]
    assert q is not None
    if is_traced(q) or torch._C._are_functorch_transforms_active() or not supports(lowered):
        return None
    heads, size = q.shape[1], q.shape[3]
    if plan.shift is not None and plan.shift.shape != (heads, size):
        return None
    folded = [x for x in plan.lookups if x.query_shift is not None]
    for x in folded:
        assert x.dot_query is not None
        assert x.query_shift is not None
        if len(folded) > 1 or x.bias is not None or not x.dot_query.shape[0] == x.query_shift.shape[0] == heads:
            return None
    graph = torch.is_grad_enabled()
    return Call(lowered, tensors, tuple([graph and x is not None and x.requires_grad for x in tensors]))


def find(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> Call | None:
    """The prepared call of this plan, kept for equal ones; None where the call is traced or not supported."""
    if is_traced(q) or torch._C._are_functorch_transforms_active() or not supports(lowered):
        return None
    tensors = collect(q, k, v, lowered.plan, lowered.mask)
    graph = torch.is_grad_enabled()
    key = (
        lowered.facts, lowered.offset, lowered.dropout, lowered.scale, torch.are_deterministic_algorithms_enabled(),
        tuple([x.index for x in lowered.plan.lookups]), describe(tensors),
        tuple([graph and x is not None and x.requires_grad for x in tensors]),
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        call = Call(lowered, tensors, key[-1])
        _calls.put(key, call, 1)
    return call


class Call:
    """What equal calls share: their facts, and the records of both passes."""

    def __init__(self, lowered: LoweredPlan, tensors: Sequence[Tensor | None], needs: tuple[bool, ...]):
        self.facts: Facts = lowered.facts
        self.dropout, self.needs, self.has_gradient = lowered.dropout, needs, any(needs)
        self.indices = [x.index for x in lowered.plan.lookups]
        self.shifts = lowered.plan.shift is not None
        self.folded = next((n for n, x in enumerate(lowered.plan.lookups) if x.query_shift is not None), None)
        """The lookup whose query_shift becomes a bias here."""
        self.layouts = [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]
        self.numbers, self.scale = Numbers(), 1.0
        self.present: list[int] = []
        self.program: Callable | None = None
        self.runs = 0
        self.packed: dict[int, tuple[int, torch.Size, torch.dtype]] = {}
        """Which of the program's results are bytes of its last one."""
        self.count = 0
        """Results without that one."""
        self.backwards: dict[tuple, Callable | None] = {}

    def run(self, plan: Plan, mask: Mask, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """out, and lse where the facts ask for it."""
        if self.has_gradient:
            results = _apply(self, plan, mask, *tensors)
            if not self.facts.return_lse:
                return results, None
            out, lse = results
        else:
            out, lse, *_ = self.forward(plan, mask, tensors)
            if not self.facts.return_lse:
                return out, None
        lse = lse[..., : self.facts.q_length]  # base 2, +inf for a fully masked query
        return out, torch.where(lse == float("inf"), float("-inf"), lse * log(2.0))

    # ---- forward ------------------------------------------------------------------------------------------------------
    def forward(self, plan: Plan, mask: Mask, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """out, lse, and what the backward pass needs besides."""
        q = tensors[0]
        assert q is not None
        with launch_on(q):
            if self.program is not None:
                return self.program(*tensors)
            self.runs += 1
            if self.runs == 1:
                launch = launcher.launch_first(q.device, lambda: self._launch_both(plan, mask, tensors))
                return self._forward(launch, plan, mask, tensors)
            recorder = Recorder(tensors)
            with recorder:
                results = self._forward(recorder.launch, plan, mask, recorder.inputs)
            program = recorder.finish(results, range(2 if self.facts.return_lse else 1, len(results)))
            self.packed, self.count = recorder.packed, len(results)
            self.program = program  # last of all: other threads may read it
            # in place of the recorder's copies: autograd knows its own inputs
            given = {id(copy): x for copy, x in zip(recorder.inputs, tensors) if copy is not None}
            return tuple([given.get(id(x), x) for x in results])

    def _launch_both(self, plan: Plan, mask: Mask, tensors: Sequence[Tensor | None]) -> None:
        """The launches of both passes, to be recorded."""
        saved = self._forward(launcher.launch, plan, mask, tensors)
        if self.has_gradient:
            self._backward(launcher.launch, self.needs, torch.empty_like(saved[0]), None, saved)

    def _forward(self, launch, plan: Plan, mask: Mask, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        q, k, v, *others = tensors
        plan, mask = _with_tensors(plan, mask, others)
        folded: tuple = ()
        if plan.shift is not None:
            q = add_shift(launch, q, plan.shift)
        if self.folded is not None:
            table, query_shift = folded = plan.lookups[self.folded].dot_query, plan.lookups[self.folded].query_shift
            lookups = list(plan.lookups)
            bias = fold_shift(launch, table, query_shift, plan.scale_of(q.shape[3]))
            lookups[self.folded] = replace(lookups[self.folded], bias=bias, query_shift=None)
            plan = replace(plan, lookups=tuple(lookups))
        lowered = LoweredPlan(plan, mask, self.facts, self.dropout, False)
        tables = _LaunchedTables(lowered, launch)
        inputs, self.numbers, self.scale = kernel_arguments(q, k, v, lowered, tables, launch)  # type: ignore[arg-type]
        out, lse, mass = run_forward(launch, inputs, self.numbers, self.scale, self.dropout)
        if not self.has_gradient:
            return out, lse if self.facts.return_lse else None
        self.present = [number for number, x in enumerate(inputs) if x is not None]
        return out, lse, *folded, *[x for x in (*inputs, mass) if x is not None]

    # ---- backward -----------------------------------------------------------------------------------------------------
    def backward(self, needs: tuple[bool, ...], d_out, d_lse, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """A gradient, or None, for each of the call's tensors."""
        if d_lse is None and d_out is not None:
            key: tuple = (needs, len(saved), d_out.stride(), d_out.dtype, d_out.data_ptr() & 15)
        else:
            key = (needs, len(saved), describe((d_out, d_lse)))
        given = (d_out, d_lse, *saved)

        def run(launch, d_out, d_lse, *saved):
            return self._backward(launch, needs, d_out, d_lse, saved)

        with launch_on(saved[0]):
            program = self.backwards.get(key)
            if program is not None:
                return program(*given)
            if key not in self.backwards:
                if len(self.backwards) >= 16:
                    self.backwards.clear()
                self.backwards[key] = None
                return run(launcher.launch, *given)
            recorder = Recorder(given)
            with recorder:
                results = run(recorder.launch, *recorder.inputs)
            self.backwards[key] = recorder.finish(results)
            return results

    def _backward(self, launch, needs, d_out, d_lse, saved) -> tuple[Tensor | None, ...]:
        if self.packed and len(saved) > self.count:
            *saved, kept = saved
            for number, (first, shape, dtype) in self.packed.items():
                part = kept[first : first + shape.numel() * dtype.itemsize]
                saved[number] = part.view(dtype).view(shape)
        out, lse, *tensors = saved
        if self.folded is not None:
            table, query_shift, *tensors = tensors
        mass = tensors.pop() if len(tensors) > len(self.present) else None
        inputs: list[Tensor | None] = [None] * len(INPUTS)
        for number, tensor in zip(self.present, tensors, strict=True):
            inputs[number] = tensor
        x = Inputs(*inputs)  # type: ignore[arg-type]
        num = self.numbers
        spans = {
            "bias": ("bias", num.bias_lo, num.bias_hi, False), "dot_query": ("table", num.rows_lo, num.rows_hi, False),
            "states": ("states", 0, 0, False), "dot_key": ("key_table", -num.cols_hi, -num.cols_lo, True),
            "add_value": ("value", num.mass_lo, num.mass_hi, False),
        }  # fmt: skip
        wanted = dict.fromkeys(GRADIENTS, False)
        wanted["q"], wanted["k"], wanted["v"] = needs[:3]
        owners = [(name, number) for number in range(len(self.indices)) for name in TABLES]
        for (name, _), needed in zip(owners, needs[3:]):
            wanted[spans[name][0]] |= needed
        wanted["slopes"], shifts = needs[3 + len(owners)], list(needs[8 + len(owners) :])
        wanted["q"] |= self.shifts and shifts.pop(0)
        if self.folded is not None:
            needs_table = needs[3 + len(TABLES) * self.folded + TABLES.index("dot_query")]
            wanted["bias"] |= shifts[0] or needs_table
        if d_out is None:
            d_out = torch.zeros_like(out)
        grads = dict(zip(GRADIENTS, run_backward(
            launch, d_out, d_lse, out, lse, mass, x, num, self.scale, self.dropout, wanted
        )))  # fmt: skip
        results: list[Tensor | None] = [
            _cast(grads[name], tensor.dtype) if need else None
            for name, tensor, need in zip("qkv", (x.q, x.k, x.v), needs)
        ]
        if self.folded is not None and wanted["bias"]:  # of query_shift · table · scale
            parts = _as_parts(grads["bias"])
            parts = parts._replace(factor=parts.factor * self.scale)
            into = out.new_empty(table.shape[:2], dtype=torch.float32)
            fold = sum_parts(launch, parts, into, self.indices[self.folded], num.bias_lo, num.bias_hi)
            if not needs_table:
                d_shift = unfold_shift(launch, None, fold, table, query_shift, None, True)
        for (name, number), needed in zip(owners, needs[3:]):
            at = len(results)
            if not needed:
                results.append(None)
                continue
            slot, lo, hi, flip = spans[name]
            shape, stride, dtype = self.layouts[at]
            if name == "states":
                results.append(_cast(grads[slot], dtype))
                continue
            into = torch.empty_strided(shape, stride, dtype=dtype, device=out.device)
            parts = _as_parts(grads[slot])
            if name == "dot_query" and number == self.folded:
                other, index = grads[slot], self.indices[number]
                if isinstance(other, Parts) or index.rows is not None or (lo, hi) != (index.lo, index.hi):
                    other = sum_parts(launch, parts, out.new_empty(shape, dtype=torch.float32), index, lo, hi)
                d_shift = unfold_shift(launch, other, fold, table, query_shift, into, shifts[0])
            else:
                sum_parts(launch, parts, into, self.indices[number], lo, hi, flip)
            results.append(into)
        results += [_cast(grads["slopes"], self.layouts[len(results)][2]) if needs[len(results)] else None, *[None] * 4]
        if self.shifts:
            needed, dtype = needs[len(results)], self.layouts[len(results)][2]
            results.append(grads["q"].sum((0, 2), dtype=dtype) if needed else None)  # in float32, rounded once
        if self.folded is not None:
            results.append(d_shift if shifts[0] else None)
        return tuple(results)


def _cast(grad, dtype: torch.dtype) -> Tensor:
    return grad if grad.dtype == dtype else grad.to(dtype)


def _as_parts(grad) -> Parts:
    """A gradient that is summed up already has one part."""
    if isinstance(grad, Parts):
        return grad
    return Parts(grad[None, :, None], 1) if grad.dim() == 2 else Parts(grad[:, None], 0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, plan: Plan, mask: Mask, *tensors):
        out, lse, *kept = call.forward(plan, mask, tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *kept)
        ctx.call = call
        return (out, lse) if call.facts.return_lse else out

    @staticmethod
    def backward(ctx, d_out, d_lse=None):  # type: ignore[override]
        needs = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            grads = FirstDerivative.apply(_backward, (ctx.call, needs), d_out, d_lse, *ctx.saved_tensors)
            return None, None, None, *grads
        return None, None, None, *ctx.call.backward(needs, d_out, d_lse, ctx.saved_tensors)


def _backward(arguments: tuple[Call, tuple[bool, ...]], d_out, d_lse, *saved) -> tuple[Tensor | None, ...]:
    call, needs = arguments
    return call.backward(needs, d_out, d_lse, saved)


_apply = super(torch.autograd.Function, _Attention).apply
"""Function.apply looks at each argument first, for torch.func, inside which `find` finds nothing."""


class _LaunchedTables(Tables):
    """By launches; `supports` allows one table of each kind, and biases of several lookups."""

    def __init__(self, lowered: LoweredPlan, launch):
        super().__init__(lowered)
        self.launch = launch

    def bias(self, lo: int, hi: int) -> Tensor | None:
        total: Any = None
        for lookup in self.lowered.plan.lookups:
            if lookup.bias is not None:
                table = expand(self.launch, lookup.bias, lookup.index, lo, hi, torch.float32)
                total = table if total is None else total + table
        return total

    def query(self, q: Tensor, lo: int, hi: int) -> tuple[Tensor | None, Tensor | None]:
        lookup = self._only("dot_query")
        if lookup is None:
            return None, None
        states = None if lookup.states is None else lookup.states.to(q.dtype)
        return expand(self.launch, lookup.dot_query, lookup.index, lo, hi, q.dtype), states

    def key(self, lo: int, hi: int) -> Tensor | None:
        return self._expand("dot_key", lo, hi, True)

    def value(self, lo: int, hi: int) -> Tensor | None:
        return self._expand("add_value", lo, hi, False)

    def _expand(self, name: str, lo: int, hi: int, flip: bool) -> Tensor | None:
        lookup = self._only(name)
        if lookup is None:
            return None
        return expand(self.launch, getattr(lookup, name), lookup.index, lo, hi, self.lowered.facts.dtype, flip)

    def _only(self, name: str) -> Lookup | None:
        return next((x for x in self.lowered.plan.lookups if getattr(x, name) is not None), None)


def _with_tensors(plan: Plan, mask: Mask, tensors: Sequence[Tensor | None]) -> tuple[Plan, Mask]:
    """The same with other tensors, as `collect` gave them after q, k and v, shifts behind them."""
    count = len(TABLES) * len(plan.lookups)
    slopes, key_mask, doc_q, doc_k, extra, *shifts = tensors[count:]
    shift = None if plan.shift is None else shifts.pop(0)
    lookups = []
    for number, lookup in enumerate(plan.lookups):
        own = dict(zip(TABLES, tensors[len(TABLES) * number : len(TABLES) * (number + 1)]))
        query_shift = None if lookup.query_shift is None else shifts.pop(0)
        lookups.append(Lookup(lookup.index, **own, query_shift=query_shift))
    documents = None if doc_q is None or doc_k is None else (doc_q, doc_k)
    plan = Plan(
        plan.positions, shift, lookups=tuple(lookups), scale=plan.scale, slopes=slopes, cosine=plan.cosine
    )  # fmt: skip
    return plan, Mask(mask.causal, mask.window, key_mask, documents, extra)
