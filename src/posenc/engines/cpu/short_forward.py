"""The forward pass of short sequences whose terms have content: materialised scores of a block of rows of many heads at once.

PyTorch's fused attention would need a mask of the same size, and does not return the probabilities that positional values
need. It also serves calls with NaN in masked keys or values: it overwrites their scores.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import reference
from . import block_sizes
from .band import BandGeometry
from .block_scores import BlockScores, Buffers, RowBlock, choose_block_rows
from .head_block import NEG_INF, split_heads
from .terms import Terms


def applies(q: Tensor, terms: Terms, band: BandGeometry) -> bool:
    """Whether keys are few and terms have content: positional values, which need the probabilities, or many small batch
    rows, each of which would need separate fused calls."""
    if not terms.has_content or band.q_length < block_sizes.DECODE_ROWS or band.k_length > block_sizes.SHORT_KEYS:
        return False
    batch, heads, _, size = q.shape
    is_small = heads * band.q_length * band.k_length * size <= block_sizes.LIGHT_PRODUCTS
    return terms.table_v is not None or (batch >= block_sizes.MANY_BATCH_ROWS and is_small)


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: BandGeometry, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, H, Lq, Dv] in q's dtype, log-sum-exp [B, H, Lq] in float32 or better (0 for fully masked queries)."""
    precision = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=precision, device=q.device)
    lse = torch.zeros(q.shape[:3], dtype=precision, device=q.device)
    buffers = Buffers(lse)
    rows = choose_block_rows(band)
    for head_block in split_heads(
        q, k, terms, memory=block_sizes.SCORE_MEMORY, rows=rows, width=band.k_length, stacked=True
    ):
        if head_block.keys[0] >= head_block.keys[1]:
            continue
        block_scores = BlockScores(q, k, head_block, band, scale, buffers, rows)
        values = block_scores.stack_keys(v[head_block.batch, head_block.kv_heads])
        at = (head_block.batch, head_block.heads)
        to, to_lse = out[at].view(-1, *out.shape[2:]), lse[at].view(-1, lse.shape[2])
        for block in block_scores.blocks():
            scores = block_scores.scores(block)
            m_i = scores.amax(-1, keepdim=True)
            m_i.masked_fill_(m_i == NEG_INF, 0.0)
            p = block_scores.exponentiate(scores.sub_(m_i))
            l_i = p.sum(-1, keepdim=True)
            o_i = reference.weigh_values(
                p[:, :, block.visible], values[:, block.keys], partial(block_scores.inside_limits, block)
            )
            if block_scores.table_v is not None:
                _add_value_table(o_i, block_scores, p, l_i, block)
            l_i.masked_fill_(l_i == 0.0, 1.0)
            torch.div(o_i, l_i, out=to[:, block.rows])
            torch.add(m_i, l_i.log_(), out=to_lse[:, block.rows].unsqueeze(-1))
    return out.to(q.dtype), lse


def _add_value_table(out: Tensor, block_scores: BlockScores, p: Tensor, l_i: Tensor, block: RowBlock) -> None:
    """out [X, R, Dv] += Σ_j p_ij table_v[r]"""
    table, o_i = block_scores.table_v, block_scores.head_block.terms.table_v
    assert table is not None and o_i is not None
    if block.table_rows is not None:
        out += torch.bmm(block_scores.band_view(p, block), table[:, block.table_rows])
    if block_scores.base is not None:
        out.addcmul_(l_i, o_i[:, block_scores.base, None])
    if block_scores.far_right:
        out.addcmul_(block_scores.sum_far_right(p, block), table[:, -1:])
