"""The forward pass of short sequences whose terms hold content: pairs in memory, a block of rows of many heads at once.

PyTorch's fused attention would want a mask of the same size, and cannot give the weights that values by distance need.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import reference
from . import sizes
from .band import Band
from .pairs import Block, Buffers, Pairs, rows_of
from .slab import NEVER, slabs
from .terms import Terms


def applies(q: Tensor, terms: Terms, band: Band) -> bool:
    """Where terms hold content and keys are few: with values, which need the weights; else for many light batch rows,
    each of which would cost fused calls of its own."""
    if not terms.content or band.q_length < sizes.FEW or band.k_length > sizes.PAIRS:
        return False
    batch, heads, _, size = q.shape
    light = heads * band.q_length * band.k_length * size <= sizes.LIGHT
    return terms.table_v is not None or (batch >= sizes.MANY and light)


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] in q's dtype, log-sums [B, H, Lq] in float32 or better (0 where nothing is seen)."""
    precision = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=precision, device=q.device)
    sums = torch.zeros(q.shape[:3], dtype=precision, device=q.device)
    buffers = Buffers(sums)
    rows = rows_of(band)
    for slab in slabs(q, k, terms, memory=sizes.BACKWARD, rows=rows, width=band.k_length, stacked=True):
        if slab.keys[0] >= slab.keys[1]:
            continue
        pairs = Pairs(q, k, slab, band, scale, buffers, rows)
        values = pairs.of_keys(v[slab.rows, slab.kv_heads])
        at = (slab.rows, slab.heads)
        to, to_sums = out[at].view(-1, *out.shape[2:]), sums[at].view(-1, sums.shape[2])
        for block in pairs.blocks():
            scores = pairs.scores(block)
            top = scores.amax(-1, keepdim=True)
            top.masked_fill_(top == NEVER, 0.0)
            weights = pairs.to_weights(scores.sub_(top))
            total = weights.sum(-1, keepdim=True)
            own = reference.weigh(weights[:, :, block.real], values[:, block.keys], partial(pairs.allowed, block))
            if pairs.table_v is not None:
                _add_table(own, pairs, weights, total, block)
            total.masked_fill_(total == 0.0, 1.0)
            torch.div(own, total, out=to[:, block.at])
            torch.add(top, total.log_(), out=to_sums[:, block.at].unsqueeze(-1))
    return out.to(q.dtype), sums


def _add_table(out: Tensor, pairs: Pairs, weights: Tensor, total: Tensor, block: Block) -> None:
    """out [X, R, Dv] += Σ_j weight_ij table_v[r]"""
    table, own = pairs.table_v, pairs.slab.terms.table_v
    assert table is not None
    assert own is not None
    if block.some is not None:
        out += torch.bmm(pairs.band_of(weights, block), table[:, block.some])
    if pairs.base is not None:
        out.addcmul_(total, own[:, pairs.base, None])
    if pairs.far_right:
        out.addcmul_(pairs.sum_right(weights, block), table[:, -1:])
