"""Ulysses: an all-to-all gives each rank all tokens of some heads; another one brings the output back.

    q [B, H, L/N, D]  ──▶  [B, H/N, L, D]  ──  attend, tables of these heads  ──▶  [B, H/N, L, D]  ──▶  [B, H, L/N, D]

Attention itself is that of one device, kernels and table gradients included. The ranks must divide the heads. Fewer key heads
than ranks are repeated.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..core.errors import UnsupportedPlan
from .blocks import Call, blocks_of, pad_segment, run_block
from .collectives import all_gather, all_to_all, gather_tokens
from .layout import Segment, restore_order, take_order
from .plan_tensors import PlanSource, Values, cut_heads, cut_pair


def heads_reason(size: int, heads: int, kv_heads: int) -> str | None:
    """Why the ranks cannot divide the heads, or None."""
    if heads % size:
        return f"{heads} query heads cannot be divided among {size} ranks"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} key heads cannot be divided among {size} ranks, nor repeated to {size}"
    return None


def attend_ulysses(call: Call, inputs: Values) -> tuple[Tensor, Tensor | None]:
    cp = call.cp
    q, k = inputs["q"], inputs["k"]
    heads, kv_heads = q.shape[1], k.shape[1]
    reason = heads_reason(cp.size, heads, kv_heads)
    if reason is not None:
        raise UnsupportedPlan(f"strategy 'ulysses' cannot run this: {reason}; use strategy='ring' or 'gather'")
    own = heads // cp.size
    first = cp.rank * own
    swapped: Values = {}
    for name, x in inputs.items():
        if name in ("k", "v") and kv_heads % cp.size:
            x = x.repeat_interleave(cp.size // kv_heads, dim=1)
        if name == "scale" and name in call.per_query:
            x = x.reshape([1] * (3 - x.dim()) + list(x.shape))
        if name in ("q", "k", "v", "decay_q", "decay_k", *call.per_query) or name.startswith("states"):
            swapped[name] = _to_heads(call, x, heads)
        elif name == "mask":
            swapped[name] = _mask_of_heads(call, x, heads, first, own)
    lengths = (q.shape[2] * cp.size, k.shape[2] * cp.size)
    queries, keys = (
        side.moved((Segment(0, 1, length, 0),), [gather_tokens(cp, x, x.dim() - 1) for x in side.tensors()])
        for side, length in zip((call.queries, call.keys), lengths, strict=True)
    )
    tables = {name: x for name, x in inputs.items() if name not in swapped}
    source = _source_of_heads(call, q, first, own)
    whole = replace(
        call, source=source, queries=queries, keys=keys, first_head=call.first_head + first,
        all_heads=call.all_heads or heads,
    )  # fmt: skip
    blocks = blocks_of(whole, keys)
    swapped |= {name: x for name, x in tables.items() if name.startswith("leaf.")}
    swapped |= cut_heads({name: x for name, x in tables.items() if name not in swapped}, first, own, heads)
    if not blocks:  # every key of every query is masked
        return q.new_zeros((*q.shape[:3], inputs["v"].shape[3])), q.new_full(q.shape[:3], float("-inf"))
    (block,) = blocks
    results = pad_segment(block.visible.queries, block.q.length, *run_block(whole, keys, block, block.cut(swapped)))
    wanted = results if call.return_lse else results[:1]
    out, *more = (all_to_all(cp, take_order(x, cp.size, cp.balance, 2), 2, 1) for x in wanted)
    return out, more[0] if more else None


def _to_heads(call: Call, x: Tensor, heads: int) -> Tensor:
    """[B, H, L/N, ..] -> [B, H/N, L, ..], tokens in the order of the sequence; heads that are shared stay shared."""
    cp = call.cp
    x = all_gather(cp, x, 2) if x.shape[1] == 1 and heads > 1 else all_to_all(cp, x, 1, 2)
    return restore_order(x, cp.size, cp.balance, 2)


def _mask_of_heads(call: Call, mask: Tensor, heads: int, first: int, own: int) -> Tensor:
    """[B, H or 1, L/N or 1, L] -> [B, H/N or 1, L or 1, L]."""
    if mask.shape[2] > 1 or (mask.shape[2] == 1 and call.queries.segments[-1].rows.stop == 1):
        return _to_heads(call, mask, heads)
    return mask[:, first : first + own] if mask.shape[1] == heads else mask


def _source_of_heads(call: Call, q: Tensor, first: int, own: int) -> PlanSource:
    """The plan of some heads over all tokens."""
    source, heads = call.source, q.shape[1]
    pair = source.local.pair
    local = source.local if pair is None else replace(source.local, pair=cut_pair(pair, first, own, heads))
    if source.heads is not None:  # tensor parallelism has cut them already
        first, heads = first + source.heads[0], source.heads[2]
    return replace(source, local=local, heads=(first, own, heads))
