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


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, causal: bool) -> Tensor | None:
    """The output, or None: take the long way."""
    if triton.INTERPRETED:
        return None
    has_terms = plan.slopes is not None
    for lookup in plan.lookups:
        if lookup.dot_query is not None or lookup.dot_key is not None or lookup.add_value is not None:
            return None
        has_terms = True
    if has_terms and torch.is_grad_enabled():
        return None  # kept masks have no gradient
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return None  # subclasses have ways of their own
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or torch._C._are_functorch_transforms_active():
        return None
    q_shape, k_shape = q.shape, k.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != v.shape or 0 in q_shape or 0 in k_shape:
        return None
    batch, heads, q_length, size = q_shape
    k_batch, kv_heads, k_length, k_size = k_shape
    dtype = q.dtype
    if k_batch != batch or k_size != size or heads % kv_heads or k.dtype != dtype or v.dtype != dtype:
        return None
    if dtype not in DTYPES or torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0:
        return None
    positions = plan.positions
    if positions.offset is None or positions.q_length != q_length or positions.k_length != k_length:
        return None
    if causal and positions.offset != q_length - k_length:
        return None  # a warning may be due
    if isinstance(plan.scale, Tensor) or (causal and plan.scale is not None and plan.scale <= 0.0):
        return None  # PyTorch's causal kernel makes NaN of a negative scale
    if (
        plan.shift is not None or plan.cosine is not None or plan.append is not None or plan.decay is not None
        or plan.pair is not None or plan.sinks is not None or len(positions.q_axes) > 1
    ):  # fmt: skip
        return None
    mask = None
    if has_terms:
        mask = _bias(q, plan, causal, batch, heads, q_length, k_length)
        if mask is None:
            return None
    elif causal and 1 != q_length != k_length:
        return None
    rotation = plan.rotate
    if rotation is not None:
        rotation.check(q, k, v)
        q, k, v = rotation.every(q, k, v)
    if hides_nan(q, k_length):
        return None
    scale = plan.scale
    out = fused_attention(
        q, k, v, mask, 0.0, causal and mask is None and q_length > 1, None if scale is None else float(scale)
    )
    if mask is not None and causal and q_length > 1 and holds_nan(out):
        return None  # a masked key or value may hold NaN
    return out


def _bias(q: Tensor, plan: Plan, causal: bool, batch: int, heads: int, q_length: int, k_length: int) -> Tensor | None:
    """The kept mask of a plan of biases, where all of them fit."""
    if heads * q_length * k_length > rules_cpu.CONSTANT_PAIRS:
        return None
    if causal and q_length > k_length:
        return None  # the first queries are fully masked
    tables = []
    indices = []
    for lookup in plan.lookups:
        index, table = lookup.index, lookup.bias
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
