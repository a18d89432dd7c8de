"""The commonest calls on a CPU, decided at a glance: consecutive positions, no mask but causality, no engine named.

A decoding step or a text of a few tokens is shorter than the validation, lowering and choice of a call that may hold anything.
`run` makes the checks that can fail here in one pass and then does what `choose_engine` would have chosen:

    no terms                                 `sdpa`: PyTorch's attention
    biases by distance, in no_grad           the dense form of `cpu`: PyTorch's attention with one mask, which is kept

It returns None for every other call, and for every call that is wrong: the long way explains what is. Tests compare the two
(tests/engines/test_plain_call.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.index import Index
from ..core.plan import Plan, holds_nan
from . import rules_cpu, triton
from .cpu import dense
from .sdpa import fused_attention, hides_nan

PLAIN = (Tensor, torch.nn.Parameter)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, causal: bool) -> Tensor | None:
    """The output, or None: take the long way."""
    if triton.INTERPRETED or type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return None  # subclasses have ways of their own
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or torch._C._are_functorch_transforms_active():
        return None
    q_shape, k_shape, dtype = q.shape, k.shape, q.dtype
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != v.shape or 0 in q_shape or 0 in k_shape:
        return None
    batch, heads, q_length, size = q_shape
    k_batch, kv_heads, k_length, k_size = k_shape
    if k_batch != batch or k_size != size or heads % kv_heads or k.dtype != dtype or v.dtype != dtype:
        return None
    if dtype not in DTYPES or torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0:
        return None
    mask = scale = None
    if plan is not None:
        if not _is_simple(plan, q_length, k_length, causal):
            return None
        scale = plan.scale
        if plan.lookups or plan.slopes is not None:
            mask = _bias(q, plan, causal, heads, q_length, k_length)
            if mask is None:
                return None
        if plan.rotate is not None:
            plan.rotate.check(q, k, v)
            q, k, v = plan.rotate.every(q, k, v)
    if mask is None and causal and 1 != q_length != k_length:
        return None
    if hides_nan(q, k_length):
        return None
    out = fused_attention(
        q, k, v, mask, 0.0, causal and mask is None and q_length > 1, None if scale is None else float(scale)
    )
    if mask is not None and causal and q_length > 1 and holds_nan(out):
        return None  # a masked key or value may hold NaN
    return out


def _is_simple(plan: Plan, q_length: int, k_length: int, causal: bool) -> bool:
    """Whether a plan has nothing but rotation and biases by distance, and fits."""
    positions, scale = plan.positions, plan.scale
    if positions.offset is None or positions.q_length != q_length or positions.k_length != k_length:
        return False
    if causal and positions.offset != q_length - k_length:
        return False  # a warning may be due
    if isinstance(scale, Tensor) or (causal and scale is not None and scale <= 0.0):
        return False  # PyTorch's causal kernel makes NaN of a negative scale
    return (
        plan.shift is None and plan.cosine is None and plan.append is None and plan.decay is None and plan.pair is None
        and plan.sinks is None and len(positions.q_axes) == 1
    )  # fmt: skip


def _bias(q: Tensor, plan: Plan, causal: bool, heads: int, q_length: int, k_length: int) -> Tensor | None:
    """The kept mask of a plan of biases, where all of them fit."""
    if torch.is_grad_enabled():
        return None  # kept masks have no gradient
    if heads * q_length * k_length > rules_cpu.CONSTANT_PAIRS:
        return None
    if causal and q_length > k_length:
        return None  # the first queries are fully masked
    tables = []
    indices = []
    for lookup in plan.lookups:
        index, table = lookup.index, lookup.bias
        if lookup.dot_query is not None or lookup.dot_key is not None or lookup.add_value is not None:
            return None
        if table is None or type(index) is not Index or index.axis or table.shape != (heads, index.n):
            return None
        tables.append(table)
        indices.append(index)
    if plan.slopes is not None:
        if plan.slopes.shape != (heads,):
            return None
        tables.append(plan.slopes)
    for table in tables:
        if not table.is_cpu or not table.is_floating_point():
            return None
    assert plan.positions.offset is not None
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    offset = plan.positions.offset
    if q_length == 1:
        return dense.row_of_query(tuple(tables), tuple(indices), offset, k_length, precision)
    right = 0 if causal else None
    return dense.find_bias(tuple(tables), tuple(indices), offset, q_length, k_length, None, right, precision)
