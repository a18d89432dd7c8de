"""merge(): one attention out of several over different keys.

    near = attend_lse(q, k, v, plan, window=127)
    far = attend_lse(q, summaries_k, summaries_v, other_plan)
    out, lse = merge([near, far])                                what one softmax over all of these keys gives

A key may be in one part only. Gradients pass through outputs and log-sum-exps alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out [B, H, Lq, Dv], lse [B, H, Lq]) of each part, as `attend_lse` gives them, -> those of all keys together."""
    if not parts:
        raise ValueError("merge needs at least one (out, lse), as attend_lse gives them")
    for out, lse in parts:
        if out.shape[:-1] != lse.shape or out.shape != parts[0][0].shape:
            shapes = [(list(out.shape), list(lse.shape)) for out, lse in parts]
            raise ValueError(f"merge needs outputs [B, H, Lq, Dv] with lse [B, H, Lq], all alike, got {shapes}")
    every = torch.stack([lse for _, lse in parts])
    top = every.detach().amax(0)
    top = top.masked_fill(top == float("-inf"), 0.0)  # a query that sees nothing in any part
    weights = (every - top).exp()
    total = weights.sum(0)
    blind = total == 0.0
    weights = weights / total.masked_fill(blind, 1.0)
    out = sum(weight[..., None] * one.to(weight.dtype) for weight, (one, _) in zip(weights, parts, strict=True))
    lse = (total.masked_fill(blind, 1.0).log() + top).masked_fill(blind, float("-inf"))
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype), lse
