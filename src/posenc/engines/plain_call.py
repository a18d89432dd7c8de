"""A shortcut for the most common calls: consecutive positions, no engine named, on a GPU no mask but causality.

For a decoding step or a text of a few tokens, general validation, lowering and choice would take longer than attention itself.
`run` makes the checks that apply here in one pass and then does what `choose_engine` would have chosen:

    no terms                                 `sdpa`: PyTorch's attention; with masks on a CPU `cpu`, which gives it one mask of them
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
from torch.nn.functional import scaled_dot_product_attention

from ..core.dropout import Dropout
from ..core.index import Index
from ..core.mask import Mask, MaskOptions, Window, make_mask
from ..core.plan import Lookup, Plan
from ..core.plan_checks import holds_nan
from ..core.tables import add
from . import dense_bias, rules_cpu, triton
from .cpu import block_sizes, decode, dense, dense_terms, dropped, joined_masks, packed
from .sdpa import fused_attention, hides_nan

PLAIN = (Tensor, torch.nn.Parameter)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def run(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, causal: bool, masks: MaskOptions | None = None, dropout: float = 0.0
) -> Tensor | None:  # fmt: skip
    """The output, or None: take the general path. masks: all of `attend`'s, on a CPU; None: causality alone. dropout: with its seed, on a
    CPU."""
    if triton.INTERPRETED or type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return None  # subclasses have ways of their own
    if q.is_nested or k.is_nested or v.is_nested or not (q.layout is k.layout is v.layout is torch.strided):
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if q.is_cuda:
        return _run_on_gpu(q, k, v, plan, causal) if masks is None else None
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    q_shape, k_shape, dtype = q.shape, k.shape, q.dtype
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != v.shape or 0 in q_shape or 0 in k_shape:
        return None
    batch, heads, q_length, size = q_shape
    k_batch, kv_heads, k_length, k_size = k_shape
    if k_batch != batch or k_size != size or heads % kv_heads or k.dtype != dtype or v.dtype != dtype:
        return None
    if dtype not in DTYPES:
        return None
    if dropout and not rules_cpu.keeps_dropped(batch, heads, q_length, k_length):
        return None
    if torch.is_autocast_enabled("cpu"):  # it would round the mask
        torch.set_autocast_enabled("cpu", False)
        try:
            return run(q, k, v, plan, causal, masks, dropout)
        finally:
            torch.set_autocast_enabled("cpu", True)
    if masks is not None and not dropout and packed.is_worth(masks, batch, heads, q_length, k_length):
        return None
    has_terms, offset = False, None
    mask = scale = hidden = is_empty = None
    if plan is not None:
        if not _is_simple(plan, q_length, k_length, causal):
            return None
        has_terms, offset, scale = bool(plan.lookups) or plan.slopes is not None, plan.positions.offset, plan.scale
        if plan.shift is not None or plan.rotate is not None:
            moved = _shift_and_rotate(q, k, v, plan)
            if moved is None:
                return None
            q, k, v = moved
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    limits: Window = (None, 0 if causal else None)
    if q_length == 1:
        limits = None, None
    if masks is not None:
        key = joined_masks.key_of(q, k_length, masks)
        known = joined_masks.find(key, masks)
        made = make_mask(q, k, **masks) if known is None else known.mask
        limits, first = made.limits, 0
        if limits[0] is not None and q_length + limits[0] < k_length:  # keys before these are visible to no query
            first = k_length - q_length - limits[0]
            k, v, k_length, offset = k[:, :, first:], v[:, :, first:], k_length - first, (offset or 0) + first
            if isinstance(dropout, Dropout):
                dropout = dropout.from_key(first)
        if q_length == 1:
            limits = None, None
        if not made.plain:
            if not _may_join(made, batch, heads, q_length, k_length, plan if has_terms else None):
                return None
            keys = slice(first, None)
            if known is None and key is None and q_length == 1 and not torch.is_grad_enabled():
                # PyTorch's attention gives zeros itself to a query that sees nothing
                allowed, added = made.allowed_by_token(columns=keys), made.added(columns=keys)
                hidden = dense_terms.hide(None, allowed, added, precision)
            else:
                known = known or joined_masks.join(made, limits, q_length, k_length, precision, columns=keys, key=key)
                hidden, is_empty = known.hidden, known.is_empty
    if plan is not None and has_terms:
        assert offset is not None
        mask = _mask(q, plan, offset, limits, k_length, hidden)
        if mask is None:
            return None
    elif hidden is not None:
        mask = hidden
    elif limits != (None, None) and (dropout or not (limits == (None, 0) and q_length == k_length)):
        mask = _limits(0 if dropout else heads, q_length, k_length, limits, precision)
        if mask is None:
            return None
    if hides_nan(q, k_length):
        return None
    if isinstance(mask, tuple):
        attend, *facts = mask
        out = attend(q, k, v, *facts, size**-0.5 if scale is None else float(scale), dropout)
    elif dropout:
        out = dropped.attend(q, k, v, mask, size**-0.5 if scale is None else float(scale), dropout)
    elif mask is not None and mask.requires_grad:
        out = dense.attend_with_mask(q, k, v, mask, size**-0.5 if scale is None else float(scale), True)
    else:
        is_causal = mask is None and limits == (None, 0)
        out = fused_attention(q, k, v, mask, 0.0, is_causal, None if scale is None else float(scale))
    if is_empty is not None:
        out = out.masked_fill(is_empty, 0.0)
    if (hidden is not None or (mask is not None and limits != (None, None))) and holds_nan(out):
        return None  # a masked key or value may hold NaN
    return out


def _may_join(mask: Mask, batch: int, heads: int, q_length: int, k_length: int, plan: Plan | None) -> bool:
    """Whether the masks, with the terms of the plan, are one mask (`cpu_form`)."""
    if mask.extra is not None and (mask.extra.requires_grad or mask.extra.shape[3] < k_length):
        return False
    return (plan is None or q_length <= k_length) and rules_cpu.fits(
        batch, heads, q_length, k_length, terms=plan is not None,
        content=plan is not None and any(lookup.dot_query is not None for lookup in plan.lookups),
        padding=mask.key_mask is not None, masked=mask.documents is not None or mask.extra is not None,
        limited=mask.limits != (None, None),
    )  # fmt: skip


def _limits(heads: int, q_length: int, k_length: int, limits: Window, precision: torch.dtype) -> Tensor | None:
    """Causality and window as a mask, [1, 1, Lq, Lk], where it is small and no query is fully masked. heads: for which tiles would do
    without it; 0: they would not."""
    if q_length > k_length or heads * q_length * dense_terms.kept_width(q_length, k_length) > rules_cpu.CONSTANT_PAIRS:
        return None
    return dense_terms.limits_of(*limits, q_length, k_length, precision)


def _run_on_gpu(q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, causal: bool) -> Tensor | None:
    """PyTorch's attention for a plan without terms, and for a table over the positions of an earlier call; the triton engine has the
    others."""
    if plan is not None and (plan.slopes is not None or (plan.lookups and plan.positions.offset is not None)):
        return None  # first: these calls are many, and each of the checks below takes its time
    q_shape, k_shape, dtype, device = q.shape, k.shape, q.dtype, q.get_device()
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != v.shape or k.dtype is not dtype or v.dtype is not dtype:
        return None
    batch, heads, q_length, size = q_shape
    k_batch, kv_heads, k_length, k_size = k_shape
    if k_batch != batch or k_size != size or not (batch and heads and q_length and k_length and size and kv_heads):
        return None
    if k.get_device() != device or v.get_device() != device or dtype not in GPU_DTYPES:
        return None
    if heads % kv_heads or (causal and 1 != q_length != k_length) or _autocast_changes(dtype, "cuda"):
        return None
    scale: float | None = None
    if plan is not None:
        if plan.lookups:
            bias = dense_bias.find_bias(q, k, plan) if heads == kv_heads and not causal else None
            if bias is None:
                return None
            scale = None if plan.scale is None else float(plan.scale)
            return scaled_dot_product_attention(q, k, v, bias.expand(batch, -1, -1, -1), scale=scale)
        if not _is_simple(plan, q_length, k_length, causal):
            return None
        scale = None if plan.scale is None else float(plan.scale)
        if plan.shift is not None or plan.rotate is not None:
            moved = _shift_and_rotate(q, k, v, plan)
            if moved is None:
                return None
            q, k, v = moved
    causal = causal and q_length > 1
    return scaled_dot_product_attention(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=heads != kv_heads)


def _autocast_changes(dtype: torch.dtype, device: str) -> bool:
    """Whether PyTorch's attention would compute in another dtype."""
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype


def _shift_and_rotate(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor] | None:
    if plan.shift is not None:
        if plan.shift.shape != (q.shape[1], q.shape[3]) or not plan.shift.is_floating_point():
            return None
        q = q + plan.shift.to(q.dtype)[:, None]
    if plan.rotate is None:
        return q, k, v
    again = plan.rotate.rotate_again(q, k) if q.is_cuda else None
    if again is not None:
        return again[0], again[1], v
    plan.rotate.check(q, k, v)
    return plan.rotate.rotate_qkv(q, k, v)


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


def _mask(
    q: Tensor, plan: Plan, offset: int, limits: Window, k_length: int, hidden: Tensor | None
) -> Tensor | tuple | None:
    """All terms and masks as one mask, where they fit. With a gradient: the function of `dense` that attends with them, and what it takes
    between q, k, v and the scale."""
    batch, heads, q_length, size = q.shape
    if limits != (None, None) and q_length > k_length:
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
    trains = torch.is_grad_enabled() and (content is not None or any(table.requires_grad for table in tables))
    is_token = q_length == 1 and not trains
    is_last = offset == q_length - k_length
    if not is_token and not is_last and q_length < block_sizes.DECODE_ROWS and q_length != k_length:
        return None  # a few queries after many keys: their mask would be new in each step
    width = dense_terms.kept_width(q_length, k_length) if is_last and not trains else k_length
    if hidden is None:  # else `_may_join` has asked already
        constant = rules_cpu.OPEN_PAIRS if limits == (None, None) else rules_cpu.CONSTANT_PAIRS
        most, count = (constant, 1) if content is None else (rules_cpu.VARIED_PAIRS, batch)
        if count * heads * q_length * width > most:
            return None
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    mask = None
    if tables and is_token:
        mask = dense.row_of_query(tuple(tables), tuple(indices), offset, k_length, precision)
    elif tables:
        facts = tuple(tables), tuple(indices), offset + k_length - width, q_length, width, *limits, precision
        mask = None if trains else dense.find_bias(*facts)
        if mask is None:
            for table in tables:
                if holds_nan(table):
                    return None
            if trains and content is None:
                return dense.attend_with_bias, facts[0], facts[1], facts[2:], hidden
            mask = dense_terms.make_bias(*facts) if trains else dense.keep_bias(*facts)
        if width != k_length:
            mask = mask.narrow(3, width - k_length, k_length)
    elif limits != (None, None) and hidden is None:
        mask = _limits(0, q_length, k_length, limits, precision)
        if mask is None:
            return None
    if hidden is not None and (mask is not None or not tables):
        mask = add(mask, hidden)
    if content is None or (mask is None and tables):
        return mask
    scale = size**-0.5 if plan.scale is None else plan.scale
    assert not isinstance(scale, Tensor)  # _is_simple
    found = _content_of(q, content, is_token)
    if found is None:
        return None
    states, table, index = found
    if is_token:
        dots = decode.multiply_rows(states.to(precision), table.to(precision), scale)
        if holds_nan(dots):  # as a table does that holds NaN in any row
            return None
        return add(mask, decode.expand_by_distance(dots, batch, index, offset, k_length))
    facts_of_content = index, offset - q_length + 1, k_length, scale, precision
    if trains and not (mask is not None and mask.requires_grad):
        return dense.attend_with_table, states, table, facts_of_content, mask
    return add(mask, dense_terms.multiply_by_distance(states, table, *facts_of_content))


def _content_of(q: Tensor, lookup: Lookup, is_token: bool) -> tuple[Tensor, Tensor, Index] | None:
    """The states [B, H, Lq, E] that are multiplied with a table, the table and its index, where they fit."""
    heads = q.shape[1]
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
    if not is_token and holds_nan(table):
        return None
    if lookup.query_shift is not None:
        if lookup.query_shift.shape != (heads, states.shape[3]):
            return None
        states = states + lookup.query_shift.to(states.dtype)[:, None]
    return states, table, index


def run_without_terms(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor | None:
    """`run` without a plan for q, k and v of one layer: heads of the same tokens, so that what `run` compares is known. causal: one query, or
    as many as keys."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor or triton.INTERPRETED:
        return None
    _, heads, q_length, _ = q.shape
    k_shape, dtype = k.shape, q.dtype
    _, kv_heads, k_length, _ = k_shape
    if v.shape != k_shape or k.dtype != dtype or v.dtype != dtype:
        return None
    on_cpu = q.is_cpu
    if dtype not in DTYPES and (on_cpu or dtype != torch.float16):
        return None
    if _autocast_changes(dtype, "cpu" if on_cpu else "cuda") or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0 or (on_cpu and hides_nan(q, k_length)):
        return None
    if heads == kv_heads:
        return scaled_dot_product_attention(q, k, v, None, 0.0, causal and q_length > 1)
    return None if heads % kv_heads else fused_attention(q, k, v, None, 0.0, causal and q_length > 1, None)
