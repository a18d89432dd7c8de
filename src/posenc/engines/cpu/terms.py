"""Terms: a plan over contiguous positions, reduced to at most one table of each kind.

    s_ij = scale [ q_i·k_j + states_i·table_q[r] + k_j·table_k[r] ] + bias[r] + (decay_q_i - decay_k_j)
    o_i  = Σ_j a_ij ( v_j + table_v[r] )              r = clamp(j - i + offset, lo, hi) - lo

lowering.py makes the tables by ordinary differentiable operations: the operator reads distances only, and autograd
carries its gradients on to buckets, slopes and projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.tables import add
from .. import further_axes
from ..lowering import LoweredPlan
from ..rules_cpu import cpu_form
from .band import BandGeometry

WIDEST = 256  # head size with channels for further axes


class Terms(NamedTuple):
    """Everything but q, k and v. Tables are float32 or better and have a row for each distance of the band."""

    bias: Tensor | None  # [H or 1, n]
    table_q: Tensor | None  # [H or 1, n, E]
    states: Tensor | None  # [B, H, Lq, E]; None: q
    table_k: Tensor | None  # [H or 1, n, D]
    table_v: Tensor | None  # [H or 1, n, Dv]
    decay_q: Tensor | None  # [B or 1, H, Lq]; constant along a row, but decay_k alone would grow with the length
    decay_k: Tensor | None  # [B or 1, H, Lk]; both are given or neither
    key_mask: Tensor | None  # [B or 1, Lk]

    @property
    def has_content(self) -> bool:
        """Whether a term depends on the query or the key itself, so that no table by distance expresses it."""
        return any(t is not None for t in (self.table_q, self.table_k, self.table_v, self.decay_k))

    def select(self, batch: slice, heads: slice, copies: int) -> Terms:
        """The terms of some batch rows and heads, stacked: states [X, Lq, E], decays [X, L], and tables that differ from
        head to head once for each of `copies` batch rows."""

        def table(all_heads: Tensor | None) -> Tensor | None:
            if all_heads is None or all_heads.shape[0] == 1:
                return all_heads
            own = all_heads[heads]
            return own if copies == 1 else own.repeat(copies, *[1] * (own.dim() - 1))

        def stack(each_row: Tensor | None) -> Tensor | None:
            if each_row is None:
                return None
            own = each_row[:, heads] if each_row.shape[0] == 1 else each_row[batch, heads]
            return own.expand(copies, *own.shape[1:]).flatten(0, 1)

        tables = [table(t) for t in (self.bias, self.table_q, self.table_k, self.table_v)]
        bias, table_q, table_k, table_v = tables
        states, decay_q, decay_k = map(stack, (self.states, self.decay_q, self.decay_k))
        return Terms(bias, table_q, states, table_k, table_v, decay_q, decay_k, None)


def structure_reason(lowered: LoweredPlan) -> str | None:
    """Why tables by distance over contiguous positions, and channels for further axes, do not express this plan, or None."""
    facts = lowered.facts
    if facts.dropout and (torch.compiler.is_compiling() or cpu_form(facts) != "dense"):
        return "dropout needs the probabilities themselves"
    if facts.pair:
        return "pair is a function of positions"
    if facts.scale == "tensor" and any(x.dot_key is not None for x in lowered.plan.lookups):
        return "a scale for each query does not become part of the queries beside dot_key"
    if facts.documents or facts.has_dense_mask:
        if torch.compiler.is_compiling() or cpu_form(facts) != "dense":
            return "documents and dense masks are not functions of the distance"
    if facts.reads_distance and lowered.offset is None:
        return "the positions are not contiguous"
    if not facts.further_axes:
        return None
    reason = further_axes.supports(facts, lowered.plan, WIDEST)
    fewest = 4 if facts.reads_distance else 6  # keys a channel: 8 x 8 patches are faster in blocks, 14 x 14 as channels
    if reason is None and sum(further_axes.count_channels(facts.dtype, lowered.plan)) * fewest > facts.k_length:
        return "tokens have many different positions on further axes"
    return reason


def make_terms(q: Tensor, lowered: LoweredPlan) -> tuple[Terms, BandGeometry]:
    facts, plan = lowered.facts, lowered.plan
    offset = lowered.offset or 0
    reach = (offset - facts.q_length + 1, offset + facts.k_length - 1)
    spans = [span for span in facts.spans if span is not None]
    if facts.slopes:
        spans.append(reach)
    lo, hi = (min(lo for lo, _ in spans), max(hi for _, hi in spans)) if spans else (0, 0)
    # rows of distances that do not occur would only cost memory
    lo, hi = min(max(lo, reach[0]), reach[1]), max(min(hi, reach[1]), reach[0])
    band = BandGeometry(facts.q_length, facts.k_length, offset, lo, hi, facts.left, facts.right)

    precision = torch.promote_types(q.dtype, torch.float32)
    bias_span, query_span, key_span, value_span = facts.spans
    bias = None if bias_span is None else lowered.bias_table(lo, hi, precision)
    if plan.slopes is not None:
        steps = torch.arange(lo, hi + 1, device=q.device).abs().to(precision)
        bias = add(bias, -plan.slopes.to(precision)[:, None] * steps)
    table_q, states = (None, None) if query_span is None else lowered.query_table(q, lo, hi, precision)
    table_k = None if key_span is None else lowered.key_table(lo, hi, precision)
    table_v = None if value_span is None else lowered.value_table(lo, hi, precision)
    decay_q, decay_k = plan.decay_in(precision) or (None, None)
    return Terms(bias, table_q, states, table_k, table_v, decay_q, decay_k, lowered.mask.key_mask), band
