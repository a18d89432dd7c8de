"""Gather: every rank gathers all keys and values and attends from its own queries.

    forward    all_gather of k and v                    backward   all_to_all of dk and dv

One message in each direction, and O(L) keys on every rank. Without stripes the keys are in the order of the sequence, and
`attend` applies causality and windows; with stripes each rank's keys are attended to separately and merged by log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional import merge
from .blocks import Call, Tokens, blocks_of, pad_segment, run_block
from .collectives import all_gather
from .layout import Segment, restore_order
from .plan_tensors import Values
from .ring import TRAVELLING


def attend_gather(call: Call, inputs: Values) -> tuple[Tensor, Tensor]:
    cp, keys = call.cp, call.keys
    local = inputs["k"].shape[2]
    gathered = {name: all_gather(cp, inputs[name], 2) for name in TRAVELLING if name in inputs}
    marks = [all_gather(cp, x, x.dim() - 1) for x in keys.tensors()]
    if cp.balance == "striped" and cp.size > 1:
        sources: list[tuple[Tokens, Values]] = []
        for rank in range(cp.size):
            rows = slice(rank * local, (rank + 1) * local)
            tokens = keys.moved(cp.segments(local, rank), [x[..., rows] for x in marks])
            sources.append((tokens, {name: x[:, :, rows] for name, x in gathered.items()}))
    else:
        gathered = {name: restore_order(x, cp.size, cp.balance, 2) for name, x in gathered.items()}
        marks = [restore_order(x, cp.size, cp.balance, x.dim() - 1) for x in marks]
        sources = [(keys.moved((Segment(0, 1, cp.size * local, 0),), marks), gathered)]
    q, v = inputs["q"], inputs["v"]
    results = []
    for segment in call.queries.segments:
        parts = []
        for tokens, values in sources:
            for block in [one for one in blocks_of(call, tokens) if one.q is segment]:
                cut = block.cut(inputs | values)
                parts.append(pad_segment(block.visible.queries, segment.length, *run_block(call, tokens, block, cut)))
        if not parts:
            shape = (*q.shape[:2], segment.length)
            zeros = q.new_zeros((*shape, v.shape[3]))
            parts = [(zeros, q.new_full(shape, float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32)))]
        results.append(parts[0] if len(parts) == 1 else merge(parts))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)
