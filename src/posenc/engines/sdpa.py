"""PyTorch's own attention as it is, on any device: for plans that add nothing to scores or values, or a small dense bias.

Positions that are added to the input or rotate queries and keys leave nothing else to do. Tables over a grid, as of windows of
images, become one bias for all windows (dense_bias.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..core.plan_checks import holds_nan
from ..core.torch_modes import transform_reason
from . import blocked, dense_bias, traced_bias
from .lowering import LoweredPlan

VECTOR = 16
"""Numbers in the widest vector register of a CPU, AVX-512's."""


def hides_nan(q: Tensor, keys: int) -> bool:
    """Whether PyTorch's CPU kernel returns zeros for a query of NaN, as if it were fully masked: a fault would go unnoticed. It
    takes the maximum of a query's scores by vectors, which keep NaN, and of what is left number by number, which does not."""
    return keys < VECTOR and holds_nan(q)


def supports(lowered: LoweredPlan) -> str | None:
    facts = lowered.facts
    if traced_bias.supports(lowered):
        return None
    if facts.has_terms:
        reason = dense_bias.supports(lowered)
        if reason is not None:
            return f"PyTorch's attention takes a dense bias only: {reason}"
        if lowered.mask.causal and facts.device.type != "cuda":
            return "on a CPU, PyTorch's attention takes a dense bias or causality, not both"
    if facts.padding or facts.documents or facts.has_dense_mask or lowered.mask.window is not None:
        return "causality is the only mask it takes"
    reason = transform_reason(plain_grad=True)
    if reason is not None:
        return reason
    if facts.return_lse:
        return "PyTorch's attention does not return the log-sum-exp"
    if 0 in (facts.batch, facts.q_length, facts.k_length, facts.head_dim):
        return "a tensor is empty"
    # PyTorch aligns causality at the top left, posenc at the bottom right: the same only for a square, or one query
    is_inside = facts.has_terms and facts.q_length < facts.k_length  # then causality is part of the bias
    if lowered.mask.causal and facts.q_length != 1 and facts.q_length != facts.k_length and not is_inside:
        return "causal attention of fewer queries than keys is aligned differently there"
    return None


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """PyTorch's attention. bias: [B or 1, H, Lq, Lk]"""
    batch, heads, queries, size = q.shape
    kv_heads = k.shape[1]
    if q.is_cpu and queries == 1 and heads > 2 * kv_heads and dropout == 0.0:
        # its CPU kernel reads keys once for each query head; heads as queries of one head read them together
        q = q.reshape(batch, kv_heads, heads // kv_heads, size)
        if bias is not None and bias.shape[1] > 1:
            bias = bias.reshape(bias.shape[0], kv_heads, heads // kv_heads, bias.shape[3])
        return scaled_dot_product_attention(q, k, v, bias, scale=scale).reshape(batch, heads, 1, v.shape[3])
    grouped = False
    if heads != kv_heads:  # a branch: with symbolic sizes the comparison itself is not a bool
        grouped = True
    return scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=grouped)


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> tuple[Tensor, Tensor | None]:
    if q.is_cpu and not torch.compiler.is_compiling() and hides_nan(q, k.shape[2]):
        return blocked.run(q, k, v, lowered)
    if traced_bias.supports(lowered):
        return traced_bias.run(q, k, v, lowered), None
    scale = lowered.scale
    assert isinstance(scale, float)
    causal = False
    if lowered.mask.causal and q.shape[2] > 1 and not lowered.facts.has_terms:  # a branch, as in `fused_attention`
        causal = True
    if causal and scale < 0.0:  # PyTorch's CPU kernel multiplies masked scores, -inf, with it
        q, scale = -q, -scale
    bias = None
    if lowered.facts.has_terms:
        bias = dense_bias.make_bias(q, lowered).expand(q.shape[0], q.shape[1], -1, -1)
    return fused_attention(q, k, v, bias, lowered.dropout, causal, scale), None
