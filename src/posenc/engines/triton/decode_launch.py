"""Decoding on the host: which calls it serves, their arguments, and the launches.

    query_rows (if queries have a row term) -> decode -> merge_shares (if keys are shared out)

A call allocates its output and one buffer for the shares, reads nothing from the device, and its launches depend on shapes alone:
a step can be captured as a CUDA graph. With a cache of fixed size, `key_mask` gives the length on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.functions import transform_reason
from ..lowering import Facts, LoweredPlan
from . import decode_schedule
from .arguments import FAR, INPUTS, Inputs, Numbers
from .decode import decode, merge_shares, query_rows
from .device import is_traced, launch_on
from .schedule import cdiv, next_power_of_2

MERGED_AT_ONCE = 16
SCANNED = 1024


def applies(facts: Facts) -> bool:
    """Whether queries are few, nothing needs a gradient, and no term depends on the keys' or values' content."""
    if (
        facts.q_length > decode_schedule.MOST_QUERIES
        or facts.gradient
        or facts.dropout
        or facts.documents
        or facts.further_axes
    ):
        return False
    _, _, key_span, value_span = facts.spans
    if key_span is not None or value_span is not None or (facts.positions == "tokens" and facts.reads_distance):
        return False
    return transform_reason() is None


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor | None]:
    inputs, numbers, scale = decode_arguments(q, k, v, lowered)
    if not is_traced(q):
        return run_decode(inputs, numbers, scale, lowered.facts.return_lse)
    present = [number for number, tensor in enumerate(inputs) if tensor is not None]
    tensors = [inputs[number] for number in present]
    out, lse = decode_op(tensors, present, list(numbers), scale, lowered.facts.return_lse)
    return out, lse if lowered.facts.return_lse else None


def decode_arguments(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Inputs, Numbers, float]:
    """Tensors, integers and the scale (1 where it is a tensor). Spans are the tables' own, whatever the length: their rows by
    distance are the same in each step."""
    facts, plan, mask = lowered.facts, lowered.plan, lowered.mask
    bias_span, query_span, _, _ = facts.spans
    offset, bias_lo, bias_hi, rows_lo, rows_hi = 0, 0, 0, 0, 0
    bias = table = states = slopes = scales = decay_q = decay_k = starts = key_mask = extra = None
    if bias_span is not None:
        bias_lo, bias_hi = bias_span
        bias = lowered.bias_table(bias_lo, bias_hi)
    if query_span is not None:
        rows_lo, rows_hi = query_span
        table, states = lowered.query_table(q, rows_lo, rows_hi)
    if plan.slopes is not None:
        slopes = plan.slopes.float().contiguous()
    if facts.reads_distance:
        assert plan.positions.runs is not None
        q_run, k_run = plan.positions.runs
        if facts.positions == "run":
            offset = plan.positions.offset
        else:
            starts = torch.as_tensor(k_run.start - q_run.start, device=q.device)
            starts = starts.to(torch.int32).expand(facts.batch).contiguous()
    scale = lowered.scale
    if isinstance(scale, Tensor):
        scales = scale.squeeze(-1).float().expand(q.shape[:3]).contiguous()
        scale = 1.0
    if plan.decay is not None:
        decay_q, decay_k = (
            one.float().expand(facts.batch, facts.heads, length).contiguous()
            for one, length in zip(plan.decay, (facts.q_length, facts.k_length), strict=True)
        )
    if mask.key_mask is not None:
        key_mask = _bytes(mask.key_mask if mask.key_mask.stride(1) == 1 else mask.key_mask.contiguous())
    if mask.extra is not None:
        extra = _bytes(mask.extra) if mask.extra.dtype == torch.bool else mask.extra
        extra = extra.expand(facts.batch, facts.heads, facts.q_length, facts.k_length)
    left = FAR if facts.left is None else facts.left
    right = FAR if facts.right is None else facts.right
    inputs = Inputs(
        q, k, v, bias, states, table, slopes=slopes, scales=scales, decay_q=decay_q, decay_k=decay_k, starts=starts,
        key_mask=key_mask, extra=extra,
    )  # fmt: skip
    return inputs, Numbers(offset, left, right, 0, 0, bias_lo, bias_hi, rows_lo, rows_hi), scale


def _bytes(mask: Tensor) -> Tensor:
    """A view, except for Inductor, which (in torch 2.11) cannot view a boolean tensor as bytes."""
    return mask.to(torch.uint8) if torch.compiler.is_compiling() else mask.view(torch.uint8)


def run_decode(x: Inputs, num: Numbers, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """out [B, H, Lq, Dv] and lse [B, H, Lq]."""
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (x.q, x.k, x.v))
    batch, heads, q_length, size = q.shape
    kv_heads, k_length, v_size = k.shape[1], k.shape[2], v.shape[3]
    out = q.new_empty(batch, heads, q_length, v_size)
    lse = q.new_empty(batch, heads, q_length, dtype=torch.float32) if return_lse else None
    if out.numel() == 0 or k_length == 0:
        return out.zero_(), None if lse is None else lse.fill_(float("-inf"))
    group = heads // kv_heads
    tile = decode_schedule.choose_decode_tile(group * q_length, max(size, v_size), q.dtype, q.device)
    programs = batch * kv_heads * cdiv(group * q_length, tile.rows)
    visible = min(
        k_length, num.left + q_length + num.right
    )  # keys between the first query's left and the last one's right
    splits = decode_schedule.choose_decode_shares(programs, visible, tile, q.device)
    with launch_on(q):
        shares = None
        if splits > 1:
            shares = q.new_empty(batch * heads * q_length * splits * (v_size + 2), dtype=torch.float32)
        rows = None if x.table is None else _make_rows(x, num)
        bias_h = 0 if x.bias is None or x.bias.shape[0] == 1 else x.bias.stride(0)
        key_mask_b = 0 if x.key_mask is None or x.key_mask.shape[0] == 1 else x.key_mask.stride(0)
        extra = (0, 0, 0, 0) if x.extra is None else x.extra.stride()
        decode[(programs * splits,)](
            q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], out, lse, shares,
            x.bias, bias_h, num.bias_lo, num.bias_hi, rows, num.rows_lo, num.rows_hi,
            x.slopes, x.scales, x.decay_q, x.decay_k, x.starts, x.key_mask, key_mask_b, x.extra, *extra,
            heads, group, q_length, k_length, num.offset, num.left, num.right, splits, scale,
            size, v_size, _block(size), _block(v_size), tile.rows, tile.keys,
            x.extra is not None and x.extra.dtype == torch.uint8, SCANNED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if shares is not None:
            merge_shares[(batch * heads * q_length,)](
                shares, out, lse, splits, v_size, _block(v_size), MERGED_AT_ONCE, num_warps=4
            )
    return out, lse


def _make_rows(x: Inputs, num: Numbers) -> Tensor:
    """float32 [B, H, Lq, n]: the row term of every query, by distance."""
    states, table = x.q if x.states is None else x.states, x.table
    assert table is not None
    states, table = (one if one.stride(-1) == 1 else one.contiguous() for one in (states, table))
    batch, heads, q_length, size = states.shape
    n = num.rows_hi - num.rows_lo + 1
    rows = states.new_empty(batch, heads, q_length, n, dtype=torch.float32)
    shared = table.shape[0] == 1
    count = batch * q_length * (heads if shared else 1)
    single = states.dtype == torch.float32
    block_m, block_n, block_e = (16, 32, 16) if single else (16 if count <= 16 else 64, 64, min(64, _block(size)))
    programs = cdiv(count, block_m) * (1 if shared else heads) * cdiv(n, block_n)
    query_rows[(programs,)](
        states, *states.stride()[:3], table, table.stride(0), table.stride(1), rows, batch, heads, q_length, n,
        size, block_e, block_m, block_n, shared, num_warps=4, num_stages=2,
    )  # fmt: skip
    return rows


def _block(size: int) -> int:
    return max(16, next_power_of_2(size))


# ---- as an operator, where operators are traced ------------------------------------------------------------------------
def _decode(
    tensors: list[Tensor], present: list[int], numbers: list[int], scale: float, return_lse: bool
) -> tuple[Tensor, Tensor]:
    inputs: list[Tensor | None] = [None] * len(INPUTS)
    for number, tensor in zip(present, tensors, strict=True):
        inputs[number] = tensor
    out, lse = run_decode(Inputs(*inputs), Numbers(*numbers), scale, return_lse)  # type: ignore[arg-type]
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


decode_op = torch.library.custom_op("posenc::decode", _decode, mutates_args=())


@decode_op.register_fake
def _(tensors, present, numbers, scale, return_lse):
    q, _, v, *_ = tensors
    lse = q.shape[:3] if return_lse else (0,)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(lse, dtype=torch.float32)
