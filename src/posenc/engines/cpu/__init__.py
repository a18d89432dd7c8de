"""PyTorch's fused CPU attention with positional terms: for contiguous positions in O(L) extra memory where tables allow it.

    __init__.run ─┬─ packed documents ──────────▶ packed.py          each as a call of its own
                  ├─ few queries, no gradient ──▶ decode.py          one fused call with a mask made for it
                  ├─ short texts ───────────────▶ dense.py           one call with one mask (rules_cpu.py: which are short)
                  │                               dropped.py         the same with dropout
                  ├─ biases by anything else ───▶ pairs.py           any positions and masks, in blocks (pair_blocks.py);
                  │                                                  in inference functions of positions
                  ├─ further axes ──────────────▶ ../further_axes.py  more channels, then as below
                  └─ terms.py (one table of each kind) ──▶ ops.py (PyTorch operators)
                        forward    forward.py          fused attention in tiles, merged by log-sum-exp
                                   short_forward.py    materialised scores, for short sequences with content
                        backward   fused_backward.py   PyTorch's kernel and bias_gradient.py, for terms without content
                                   backward.py         materialised scores, for all others

band.py knows where the terms vary, head_block.py which heads run together, band_mask.py and skewed_buffer.py make the masks,
block_scores.py materialises scores, matmul.py multiplies stacks, block_sizes.py holds every block size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...core.dropout import draw_once
from ...core.plan import Plan
from ...core.plan_checks import holds_nan
from ...core.torch_modes import transform_reason
from .. import blocked, further_axes, sdpa
from ..lowering import LoweredPlan, lower_plan
from . import block_sizes, decode, dense, ops, packed, pairs
from .terms import make_terms, structure_reason

reads_raw_plan = False


def supports(lowered: LoweredPlan) -> str | None:
    facts = lowered.facts
    if facts.device.type != "cpu":
        return f"it is built on PyTorch's fused CPU attention, the tensors are on {facts.device.type}"
    if 0 in (facts.batch, facts.q_length, facts.k_length, facts.head_dim, facts.value_dim):
        return "a tensor is empty"
    reason = transform_reason()
    if reason is not None:
        return reason
    if facts.documents and packed.find_in(lowered) is not None:
        return None
    reason = structure_reason(lowered)
    other = None if reason is None else pairs.refusal(lowered)
    return None if reason is None or other is None else reason if other in reason else f"{reason}, and {other}"


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor | None]:
    eager = not torch.compiler.is_compiling()
    facts = lowered.facts
    documents = packed.find_in(lowered) if facts.documents else None
    if documents is not None:
        return packed.run(q, k, v, lowered, documents, _attend_document)
    if structure_reason(lowered) is not None:
        is_plain = type(q) in (Tensor, torch.nn.Parameter) and not holds_nan(q)
        return (pairs if is_plain else blocked).run(q, k, v, lowered)
    if facts.further_axes:
        q, k, v, lowered, finish = further_axes.widen(q, k, v, lowered)
        out, lse = run(q, k, v, lowered)
        return finish(out), lse
    if facts.dropout and eager:
        lowered.dropout = draw_once(lowered.dropout, q.device)  # whichever form runs
    scale = lowered.scale
    if isinstance(scale, Tensor):
        if facts.dtype.itemsize < 4:  # the product of queries and scale would be rounded
            wide = q.float(), k.float(), v.float()
            plan = _widen_states(lowered.plan)
            out, lse = run(*wide, lower_plan(*wide, plan, lowered.mask, lowered.dropout, facts.return_lse))
            return out.to(q.dtype), lse
        q, plan = further_axes.prescale(q, lowered.plan)
        return run(q, k, v, lower_plan(q, k, v, plan, lowered.mask, lowered.dropout, facts.return_lse))
    # a dense mask of as many queries as keys is kept; one of a few queries after many keys would be new in each step. Whether
    # a gradient is wanted does not matter here, so that an output has the same bits either way
    few = facts.q_length < block_sizes.DECODE_ROWS and not facts.q_length == facts.k_length > 1
    is_masked = facts.documents or facts.has_dense_mask or facts.dropout  # nothing else here takes these
    short = eager and (is_masked or not few) and type(q) in (Tensor, torch.nn.Parameter) and dense.applies(facts)
    # as in `hides_nan`; a tile may have few keys even in a long text
    if eager and (not short or facts.k_length < sdpa.VECTOR) and holds_nan(q):
        return blocked.run(q, k, v, lowered)
    if eager and not short and not is_masked and decode.applies(q, k, v, lowered):
        out = decode.run(q, k, v, lowered, scale)
        hides = facts.padding or (q.shape[2] > 1 and facts.is_limited)
        if not (hides and holds_nan(out)):  # NaN may come from a masked key, which the operator below ignores
            return out, None
    if short:
        whole = dense.run(q, k, v, lowered, scale)
        if whole is not None:
            return whole, None
    if is_masked:
        return blocked.run(q, k, v, lowered)
    terms, band = make_terms(q, lowered)
    return ops.attend(q, k, v, terms, band, scale, facts.return_lse)


def _attend_document(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor | None]:
    """By the engine that runs such a call alone."""
    if not lowered.facts.has_terms and sdpa.supports(lowered) is None:
        return sdpa.run(q, k, v, lowered)
    return (run if supports(lowered) is None else blocked.run)(q, k, v, lowered)


def _widen_states(plan: Plan) -> Plan:
    """The plan for queries and keys in float32."""
    lookups = [x if x.states is None else replace(x, states=x.states.float()) for x in plan.lookups]
    return replace(plan, lookups=tuple(lookups))
