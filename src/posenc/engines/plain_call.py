"""A shortcut for the most common calls: consecutive positions, no mask but causality, no engine named.

For a decoding step or a text of a few tokens, general validation, lowering and choice would take longer than attention itself.
`run` makes the checks that apply here in one pass and then does what `choose_engine` would have chosen:

    no terms                                 `sdpa`: PyTorch's attention
    biases by distance, one table that is multiplied with queries or other states, on a CPU
                                             the dense form of `cpu`: PyTorch's attention with one mask, which is kept where
                                             it is the same for every query and needs no gradient

It returns None for every other call and for every invalid one, which the general path runs or explains. Tests compare the two
(tests/engines/test_plain_call.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.index import Index
from ..core.plan import Lookup, Plan, holds_nan
from ..core.tables import expand_table
from . import rules_cpu, triton
from .cpu import block_sizes, decode, dense
from .lowering import add
from .sdpa import fused_attention, hides_nan

PLAIN = (Tensor, torch.nn.Parameter)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def run(q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, causal: bool) -> Tensor | None:
    """The output, or None: take the general path."""
    if triton.INTERPRETED or type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return None  # subclasses have ways of their own
    on_gpu = not q.is_cpu
    if on_gpu and plan is not None and (plan.lookups or plan.slopes is not None):
        return None  # the triton engine's
    if torch._C._are_functorch_transforms_active():
        return None
    if on_gpu and not (q.is_cuda and k.is_cuda and v.is_cuda and q.get_device() == k.get_device() == v.get_device()):
        return None
    if not on_gpu and not (k.is_cpu and v.is_cpu):
        return None
    q_shape, k_shape, dtype = q.shape, k.shape, q.dtype
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != v.shape or 0 in q_shape or 0 in k_shape:
        return None
    batch, heads, q_length, size = q_shape
    k_batch, kv_heads, k_length, k_size = k_shape
    if k_batch != batch or k_size != size or heads % kv_heads or k.dtype != dtype or v.dtype != dtype:
        return None
    if dtype not in DTYPES and not (on_gpu and dtype == torch.float16):
        return None
    if torch.is_autocast_enabled("cuda" if on_gpu else "cpu") or forward_ad._current_level >= 0:
        return None
    mask = scale = None
    if plan is not None:
        if not _is_simple(plan, q_length, k_length, causal):
            return None
        scale = plan.scale
        if plan.shift is not None:
            if plan.shift.shape != (heads, size) or not plan.shift.is_floating_point():
                return None
            q = q + plan.shift.to(dtype)[:, None]
        if plan.rotate is not None:
            plan.rotate.check(q, k, v)
            q, k, v = plan.rotate.rotate_qkv(q, k, v)
        if plan.lookups or plan.slopes is not None:
            mask = _mask(q, plan, causal, heads == kv_heads, k_length)
            if mask is None:
                return None
    if mask is None and causal and 1 != q_length != k_length:
        return None
    if not on_gpu and hides_nan(q, k_length):
        return None
    if mask is not None and mask.requires_grad:
        out = dense.attend_with_mask(q, k, v, mask, size**-0.5 if scale is None else float(scale), True)
    else:
        out = fused_attention(
            q, k, v, mask, 0.0, causal and mask is None and q_length > 1, None if scale is None else float(scale)
        )
    if mask is not None and causal and q_length > 1 and holds_nan(out):
        return None  # a masked key or value may hold NaN
    return out


def _is_simple(plan: Plan, q_length: int, k_length: int, causal: bool) -> bool:
    """Whether a plan has nothing but rotation, lookups and slopes, for these lengths."""
    positions, scale = plan.positions, plan.scale
    if positions.offset is None or positions.q_length != q_length or positions.k_length != k_length:
        return False
    if causal and positions.offset != q_length - k_length:
        return False  # a warning may be due
    if isinstance(scale, Tensor) or (causal and scale is not None and scale <= 0.0):
        return False  # PyTorch's causal kernel makes NaN of a negative scale
    return (
        plan.cosine is None and plan.append is None and plan.decay is None and plan.pair is None
        and plan.sinks is None and len(positions.q_axes) == 1
    )  # fmt: skip


def _mask(q: Tensor, plan: Plan, causal: bool, own_keys: bool, k_length: int) -> Tensor | None:
    """All terms and causality as one mask, where they fit."""
    batch, heads, q_length, size = q.shape
    if causal and q_length > k_length:
        return None  # the first queries are fully masked
    tables, indices = [], []
    content = None
    for lookup in plan.lookups:
        index, table = lookup.index, lookup.bias
        if type(index) is not Index or index.axis or lookup.dot_key is not None or lookup.add_value is not None:
            return None
        if table is not None:
            if table.shape != (heads, index.n):
                return None
            tables.append(table)
            indices.append(index)
        if lookup.dot_query is not None:
            if content is not None:
                return None
            content = lookup
    if plan.slopes is not None:
        if plan.slopes.shape != (heads,):
            return None
        tables.append(plan.slopes)
    for table in tables:
        if not table.is_cpu or not table.is_floating_point():
            return None
    offset = plan.positions.offset
    assert offset is not None
    trains = torch.is_grad_enabled() and (content is not None or any(table.requires_grad for table in tables))
    is_token = q_length == 1 and not trains
    if not is_token and q_length < block_sizes.DECODE_ROWS and q_length != k_length:
        return None  # a few queries after many keys: their mask would be new in each step
    if (trains or content is not None) and not own_keys:
        return None
    most, count = (rules_cpu.CONSTANT_PAIRS, 1) if content is None else (rules_cpu.VARIED_PAIRS, batch)
    if count * heads * q_length * k_length > most:
        return None
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    right = 0 if causal else None
    mask = None
    if tables and is_token:
        mask = dense.row_of_query(tuple(tables), tuple(indices), offset, k_length, precision)
    elif tables:
        facts = tuple(tables), tuple(indices), offset, q_length, k_length, None, right, precision
        mask = None if trains else dense.find_bias(*facts)
        if mask is None:
            if any(holds_nan(table) for table in tables):
                return None
            mask = dense.make_bias(*facts) if trains else dense.keep_bias(*facts)
    elif causal and not is_token:
        mask = dense.limits_of(None, right, q_length, k_length, precision)
    if content is None or (mask is None and tables):
        return mask
    scale = size**-0.5 if plan.scale is None else plan.scale
    assert not isinstance(scale, Tensor)  # _is_simple
    products = _products(q, content, scale, precision, offset, k_length, is_token)
    return None if products is None else add(mask, products)


def _products(
    q: Tensor, lookup: Lookup, scale: float, precision: torch.dtype, offset: int, k_length: int, is_token: bool
) -> Tensor | None:
    """scale states·table by pair, [B, H, Lq, Lk], where the table fits."""
    batch, heads, q_length, _ = q.shape
    index, table, states = lookup.index, lookup.dot_query, lookup.states
    assert isinstance(index, Index)
    assert table is not None
    if states is None:
        states = q
    elif states.shape[:3] != q.shape[:3]:
        return None
    if table.shape[1:] != (index.n, states.shape[3]) or table.shape[0] not in (1, heads):
        return None
    if not (table.is_cpu and states.is_cpu and table.is_floating_point() and states.is_floating_point()):
        return None
    if holds_nan(table):
        return None
    if lookup.query_shift is not None:
        if lookup.query_shift.shape != (heads, states.shape[3]):
            return None
        states = states + lookup.query_shift.to(states.dtype)[:, None]
    if is_token:
        dots = (states.to(precision) * scale) @ table.to(precision).transpose(1, 2)
        return decode.expand_by_distance(dots.flatten(0, 2), batch, index, offset, k_length)
    lowest, highest = offset - q_length + 1, offset + k_length - 1
    lo, hi = dense.reached((index.lo, index.hi), lowest, highest)
    products = dense.multiply(states, expand_table(table, index, lo, hi).to(precision), scale)
    return dense.by_pair(products, lo - lowest, highest - hi, k_length)
