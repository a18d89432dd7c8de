"""Decoding on the host: which calls it serves, their arguments, and the launches.

    query_rows (if queries have a row term over a wide span) -> decode -> merge_shares (if keys are shared out)

One table of biases goes to the kernel as it is, with the row of each distance; several are added first.

A call allocates its output and one buffer for the shares, reads nothing from the device, and its launches depend on shapes alone:
a step can be captured as a CUDA graph. With a cache of fixed size, `key_mask` gives the length on the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.constants import constant
from ...core.index import Index
from ...core.torch_modes import pack_tensors, transform_reason, unpack_tensors
from ..lowering import Facts, LoweredPlan
from . import decode_schedule
from .arguments import FAR, Numbers, row_tensors
from .decode import decode, merge_shares, query_rows
from .device import define_operator, is_traced, launch_on
from .launcher import describe_variant, launch_known
from .schedule import cdiv, next_power_of_2

MERGED_AT_ONCE = 16
SCANNED = 1024
MOST_OWN_ROWS = 256
"""Distances of a row term that each program makes for itself; more are made by a kernel of their own."""
NO_ROWS = (16, 16, 16, True)
"""E to SHARED of the kernel where there is no row term."""


class DecodeInputs(NamedTuple):
    """All tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # [H or 1, n]
    bias_rows: Tensor | None = None  # int32 [span]: the row of the table for each distance; None: one for each
    states: Tensor | None = None  # [B, H, Lq, E]; None: q
    table: Tensor | None = None  # [H or 1, span, E]
    slopes: Tensor | None = None
    scales: Tensor | None = None
    decay_q: Tensor | None = None
    decay_k: Tensor | None = None
    starts: Tensor | None = None
    key_mask: Tensor | None = None
    extra: Tensor | None = None
    shift: Tensor | None = None  # [H, D], added to q
    row_shift: Tensor | None = None  # float32 [H, D], added to q beyond that in the row term


def applies(facts: Facts) -> bool:
    """Whether queries are few, nothing needs a gradient, and no term depends on the keys' or values' content."""
    if facts.q_length > decode_schedule.MOST_QUERIES or facts.gradient:
        return False
    if facts.dropout or facts.documents or facts.further_axes:
        return False
    _, _, key_span, value_span = facts.spans
    if key_span is not None or value_span is not None or (facts.positions == "tokens" and facts.reads_distance):
        return False
    return transform_reason() is None


def adds_shifts(lowered: LoweredPlan) -> bool:
    """Whether the kernels add the plan's shifts themselves: those of the queries, and of one table that is multiplied with them."""
    plan, facts = lowered.plan, lowered.facts
    if len(plan.lookups) != 1 or plan.rotate is not None or plan.cosine is not None or plan.append is not None:
        return False
    lookup = plan.lookups[0]
    if lookup.dot_query is None or type(lookup.index) is not Index or lookup.index.axis or facts.scale != "number":
        return False
    if not (lookup.bias is None and lookup.states is None and lookup.dot_key is None and lookup.add_value is None):
        return False
    shifts = [x for x in (plan.shift, lookup.query_shift) if x is not None]
    return bool(shifts) and all(x.shape == (facts.heads, facts.head_dim) for x in shifts)


def run(
    q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan, with_shifts: bool = False
) -> tuple[Tensor, Tensor | None]:
    """with_shifts: the plan's shifts are not in q and in a bias yet (`adds_shifts`)."""
    inputs, numbers, scale = decode_arguments(q, k, v, lowered)
    if with_shifts:
        (lookup,), shift = lowered.plan.lookups, lowered.plan.shift
        row_shift = None if lookup.query_shift is None else lookup.query_shift.contiguous()
        inputs = inputs._replace(shift=None if shift is None else shift.contiguous(), row_shift=row_shift)
    if not is_traced(q):
        return run_decode(inputs, numbers, scale, lowered.facts.return_lse)
    out, lse = decode_op(*pack_tensors(inputs), list(numbers), scale, lowered.facts.return_lse)
    return out, lse if lowered.facts.return_lse else None


def decode_arguments(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[DecodeInputs, Numbers, float]:
    """Tensors, integers and the scale (1 where it is a tensor). Spans are the tables' own, whatever the length: their rows by
    distance are the same in each step."""
    facts, plan, mask = lowered.facts, lowered.plan, lowered.mask
    bias_span, query_span, _, _ = facts.spans
    offset, bias_lo, bias_hi, rows_lo, rows_hi = 0, 0, 0, 0, 0
    tensors: dict[str, Tensor | None] = {**row_tensors(plan, facts, lowered.scale)}
    if bias_span is not None:
        bias, tensors["bias_rows"] = _bias_table(lowered, *bias_span)
        tensors["bias"] = bias
        bias_lo, bias_hi = (0, 0) if bias is None else bias_span  # a shift that is not folded has a span and no table
    if query_span is not None:
        rows_lo, rows_hi = query_span
        tensors["table"], tensors["states"] = lowered.query_table(q, rows_lo, rows_hi)
    if facts.reads_distance:
        assert plan.positions.runs is not None
        q_run, k_run = plan.positions.runs
        if facts.positions == "run":
            offset = plan.positions.offset
        else:
            starts = torch.as_tensor(k_run.start - q_run.start, device=q.device)
            tensors["starts"] = starts.to(torch.int32).expand(facts.batch).contiguous()
    if mask.key_mask is not None:
        tensors["key_mask"] = _bytes(mask.key_mask if mask.key_mask.stride(1) == 1 else mask.key_mask.contiguous())
    if mask.extra is not None:
        extra = _bytes(mask.extra) if mask.extra.dtype == torch.bool else mask.extra
        tensors["extra"] = extra.expand(facts.batch, facts.heads, facts.q_length, facts.k_length)
    left = FAR if facts.left is None else facts.left
    right = FAR if facts.right is None else facts.right
    scale = 1.0 if isinstance(lowered.scale, Tensor) else lowered.scale
    numbers = Numbers(offset, left, right, 0, 0, bias_lo, bias_hi, rows_lo, rows_hi)
    return DecodeInputs(q, k, v, **tensors), numbers, scale


def _bias_table(lowered: LoweredPlan, lo: int, hi: int) -> tuple[Tensor | None, Tensor | None]:
    """A table, and which of its rows each distance reads."""
    lookups = lowered.plan.lookups
    if len(lookups) == 1 and isinstance(lookups[0].index, Index):  # its span is lo .. hi then
        lookup = lookups[0]
        return lookup.bias, None if lookup.index.rows is None else bias_rows_of(lookup.index, lowered.facts.device)
    return lowered.bias_table(lo, hi), None


def bias_rows_of(index: Index, device: torch.device) -> Tensor:
    return constant(index.rows, device, torch.int32)


def _bytes(mask: Tensor) -> Tensor:
    """A view, except for Inductor, which (in torch 2.11) cannot view a boolean tensor as bytes."""
    return mask.to(torch.uint8) if torch.compiler.is_compiling() else mask.view(torch.uint8)


def run_decode(x: DecodeInputs, num: Numbers, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """out [B, H, Lq, Dv] and lse [B, H, Lq]."""
    q, k, v = _last_stride_1(x.q), _last_stride_1(x.k), _last_stride_1(x.v)
    batch, heads, q_length, size = q.shape
    _, kv_heads, k_length, v_size = v.shape
    out = torch.empty_strided(
        (batch, heads, q_length, v_size), out_strides(heads, q_length, v_size, *q.stride()[1:3]), dtype=q.dtype, device=q.device
    )  # fmt: skip
    lse = q.new_empty(batch, heads, q_length, dtype=torch.float32) if return_lse else None
    if out.numel() == 0 or k_length == 0:
        return out.zero_(), None if lse is None else lse.fill_(float("-inf"))
    group, device = heads // kv_heads, q.device
    tile = decode_schedule.choose_decode_tile(group * q_length, max(size, v_size), q.dtype, device, batch * kv_heads)
    programs = batch * kv_heads * cdiv(group * q_length, tile.rows)
    visible = min(k_length, num.left + q_length + num.right)  # from the first query's left to the last one's right
    splits = decode_schedule.choose_decode_shares(programs, visible, tile, device)
    with launch_on(q):
        shares = rows = states = table = None
        if splits > 1:
            shares = q.new_empty(batch * heads * q_length * splits * (v_size + 2), dtype=torch.float32)
        bias_h = bias_n = key_mask_b = 0
        states_strides, table_strides = (0, 0, 0), (0, 0)
        blocks = NO_ROWS
        if x.bias is not None:
            bias_h, bias_n = x.bias.stride()
            bias_h = 0 if x.bias.shape[0] == 1 else bias_h
        if x.table is not None:
            n = num.rows_hi - num.rows_lo + 1
            states, table = _last_stride_1(q if x.states is None else x.states), _last_stride_1(x.table)
            if n <= MOST_OWN_ROWS:
                rows = q.new_empty(batch * heads * q_length * splits * n, dtype=torch.float32)
                states_strides, table_strides = states.stride()[:3], table.stride()[:2]
                blocks = row_blocks(states.shape[3], q.dtype, table.shape[0] == 1)
            else:
                rows = q.new_empty(batch, heads, q_length, n, dtype=torch.float32)
                _launch_query_rows(states, x.shift, x.row_shift, table, rows)
                states = table = None
        if x.key_mask is not None and x.key_mask.shape[0] > 1:
            key_mask_b = x.key_mask.stride(0)
        extra, extra_strides = x.extra, (0, 0, 0, 0) if x.extra is None else x.extra.stride()
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        tensors = (
            q, k, v, out, lse, shares, x.bias, x.bias_rows, rows, states, table, x.slopes, x.scales, x.decay_q, x.decay_k,
            x.starts, x.key_mask, extra, x.shift, x.row_shift,
        )  # fmt: skip
        key = (
            "decode", device, tile, size, v_size, blocks, tuple([None if one is None else one.dtype for one in tensors]),
            describe_variant(strides + states_strides + table_strides + out.stride()[:3], tensors),
        )  # fmt: skip
        arguments = (
            q, *strides[:3], k, *strides[3:6], v, *strides[6:], out, *out.stride()[:3], lse, shares,
            x.bias, bias_h, bias_n, x.bias_rows, num.bias_lo, num.bias_hi, rows, num.rows_lo, num.rows_hi,
            states, *states_strides, table, *table_strides, x.shift, x.row_shift,
            x.slopes, x.scales, x.decay_q, x.decay_k, x.starts, x.key_mask, key_mask_b, extra, *extra_strides,
            heads, group, q_length, k_length, num.offset, num.left, num.right, splits, scale,
            size, v_size, block_size(size), block_size(v_size), tile.rows, tile.keys,
            extra is not None and extra.dtype == torch.uint8, SCANNED, *blocks,
        )  # fmt: skip
        launch_known(key, decode, programs * splits, device, arguments, num_warps=tile.warps, num_stages=tile.stages)
        if shares is not None:
            merged = (
                shares, out, *out.stride()[:3], lse, heads, q_length, splits, v_size, block_size(v_size), MERGED_AT_ONCE
            )  # fmt: skip
            variant = describe_variant(out.stride()[:3], (shares, out, lse))
            key = "merge_shares", device, q.dtype, return_lse, v_size, variant
            launch_known(key, merge_shares, batch * heads * q_length, device, merged, num_warps=4)
    return out, lse


def out_strides(heads: int, q_length: int, size: int, q_head: int, q_row: int) -> tuple[int, int, int, int]:
    """In memory as the queries are where the heads of a token lie side by side (launch.empty_in_order)."""
    if q_length > 1 and q_head < q_row:
        return q_length * heads * size, size, heads * size, 1
    return heads * q_length * size, q_length * size, size, 1


def _last_stride_1(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def row_blocks(size: int, dtype: torch.dtype, shared: bool) -> tuple[int, int, int, bool]:
    """E to SHARED of the kernel."""
    if dtype == torch.float32:
        return size, 16, 32, shared
    return size, min(128, block_size(size)), 64, shared


def _launch_query_rows(
    states: Tensor, shift: Tensor | None, row_shift: Tensor | None, table: Tensor, rows: Tensor
) -> None:
    batch, heads, q_length, n = rows.shape
    size, shared = states.shape[3], table.shape[0] == 1
    programs, constants = row_tiles(batch, heads, q_length, size, states.dtype, shared)
    strides = (*states.stride()[:3], *table.stride()[:2])
    variant = describe_variant(strides, (states, shift, row_shift, table, rows))
    dtypes = tuple([None if x is None else x.dtype for x in (states, shift, row_shift, table)])
    launch_known(
        ("query_rows", states.device, dtypes, constants, variant), query_rows, programs * cdiv(n, constants[3]), states.device,
        (states, *strides[:3], shift, row_shift, table, *strides[3:], rows, batch, heads, q_length, n, *constants), num_warps=4, num_stages=2,
    )  # fmt: skip


def row_tiles(
    batch: int, heads: int, q_length: int, size: int, dtype: torch.dtype, shared: bool
) -> tuple[int, tuple[int, int, int, int, bool]]:
    """Programs for a block of distances, and E to SHARED of query_rows; the fourth is that block's size."""
    count = batch * q_length * (heads if shared else 1)
    single = dtype == torch.float32
    block_m, block_n, block_e = (16, 32, 16) if single else (16 if count <= 16 else 64, 64, min(64, block_size(size)))
    return cdiv(count, block_m) * (1 if shared else heads), (size, block_e, block_m, block_n, shared)


@cache
def block_size(size: int) -> int:
    return max(16, next_power_of_2(size))


# ---- as an operator, where operators are traced ------------------------------------------------------------------------
def _decode(
    tensors: list[Tensor], present: list[int], numbers: list[int], scale: float, return_lse: bool
) -> tuple[Tensor, Tensor]:
    inputs: Any = DecodeInputs(*unpack_tensors(tensors, present, len(DecodeInputs._fields)))  # type: ignore[arg-type]
    out, lse = run_decode(inputs, Numbers(*numbers), scale, return_lse)
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


decode_op = define_operator("decode", _decode)


@torch.library.register_fake("posenc::decode")
def _(tensors, present, numbers, scale, return_lse):
    q, _, v, *_ = tensors
    lse = q.shape[:3] if return_lse else (0,)
    _, heads, q_length, _ = q.shape
    strides = out_strides(heads, q_length, v.shape[3], q.stride(1), q.stride(2))
    return q.new_empty_strided((*q.shape[:3], v.shape[3]), strides), q.new_empty(lse, dtype=torch.float32)
