"""Attention with dropout: the formula over materialised scores, with one gradient.

    s = scale q·k + mask ─▶ p = softmax(s) ─▶ kept = p, or 0 where the hash drops it ─▶ out = kept·v / (1 - rate)

PyTorch has no kernel for it on a CPU. Its own formula draws a number for each probability, which takes ten times as long as the
hash, and keeps three numbers for backward. Here it is one, the probability, negative where it is dropped:

    x = ±p      p = |x|      kept = max(x, 0)      the gradient of kept reaches p where x > 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.dropout import Dropout, as_dropout
from ...core.torch_modes import direct_apply
from .dense_terms import first_derivatives_only
from .head_block import select_shared, share_blocks

BLOCK = 1 << 17
"""Scores of the heads that run together: 512 KiB of float32, which a core's cache holds beside their hashes."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """[B, H, Lq, Dv], with gradients of q, k, v and the mask [B or 1, H or 1, Lq or 1, Lk], which is added to the scores in float32 or
    better."""
    return _apply(q, k, v, mask, scale, as_dropout(dropout, q.device))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: Dropout) -> Tensor:
        batch, heads, q_length, _ = q.shape
        _, kv_heads, k_length, v_size = v.shape
        hashes = dropout.hashes(batch, heads, range(q_length), range(k_length))
        if batch * heads * q_length * k_length <= BLOCK:
            out, x = _forward(q, k, v, mask, hashes, scale, dropout)
            out = out if out.dtype == q.dtype else out.to(q.dtype)
        else:
            row, again, column = hashes
            out = q.new_empty(batch, q_length, heads, v_size).transpose(1, 2)  # as the layer's last projection reads it
            x = q.new_empty(batch, heads, q_length, k_length, dtype=_precision(q))
            for at, own in share_blocks(batch, heads, kv_heads, q_length * k_length, BLOCK):
                added = None if mask is None else mask[select_shared(mask.shape, at)]
                out[at], x[at] = _forward(q[at], k[own], v[own], added, (row[at], again[at], column), scale, dropout)
        ctx.save_for_backward(q, k, v, x)
        ctx.facts = scale, dropout, None if mask is None else mask.shape
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        q, k, v, x = ctx.saved_tensors
        scale, dropout, shape = ctx.facts
        wants_mask = ctx.needs_input_grad[3]
        if x.numel() <= BLOCK:
            d_q, d_k, d_v, d_s = _backward(q, k, v, x, grad, scale, dropout)
            if q.dtype != x.dtype:
                d_q, d_k, d_v = d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype)
            return d_q, d_k, d_v, d_s.sum_to_size(shape) if wants_mask else None, None, None
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        d_mask = x.new_zeros(shape) if wants_mask else None
        for at, own in share_blocks(*q.shape[:2], k.shape[1], x.shape[2] * x.shape[3], BLOCK):
            d_q[at], d_k[own], d_v[own], d_s = _backward(q[at], k[own], v[own], x[at], grad[at], scale, dropout)
            if d_mask is not None:
                part = d_mask[select_shared(shape, at)]
                part += d_s.sum_to_size(part.shape)
        return d_q, d_k, d_v, d_mask, None, None


_apply = direct_apply(_Attend)


def _precision(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, hashes: tuple[Tensor, ...], scale: float, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """The output [B, H, Lq, Dv] and x [B, H, Lq, Lk]."""
    precision, kv_heads = _precision(q), k.shape[1]
    rows, keys, values = (_stack(one, kv_heads, precision) for one in (q, k, v))
    scores = torch.bmm(rows, keys.transpose(1, 2))
    s = scores.view(*q.shape[:3], k.shape[2])
    s = s.mul_(scale) if mask is None else torch.add(mask, s, alpha=scale, out=s)
    p = s.softmax(-1)
    x = torch.copysign(p, dropout.excess(*hashes), out=s)
    out = torch.bmm(torch.clamp(x, min=0.0, out=p).view(scores.shape), values)
    return out.mul_(1.0 / (1.0 - float(dropout))).view(*q.shape[:3], v.shape[3]), x


def _backward(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, grad: Tensor, scale: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the scores [B, H, Lq, Lk]."""
    kv_heads = k.shape[1]
    rows, keys, values, grad = (_stack(one, kv_heads, x.dtype) for one in (q, k, v, grad))
    x = _stack(x, kv_heads, x.dtype)
    grad = grad * (1.0 / (1.0 - float(dropout)))
    d_v = torch.bmm(x.relu().transpose(1, 2), grad)
    d_p = torch.ops.aten.threshold_backward(torch.bmm(grad, values.transpose(1, 2)), x, 0.0)
    d_s = torch._softmax_backward_data(d_p, x.abs(), -1, x.dtype)
    d_q, d_k = torch.bmm(d_s, keys).mul_(scale), torch.bmm(d_s.transpose(1, 2), rows).mul_(scale)
    return d_q.view(q.shape), d_k.view(k.shape), d_v.view(v.shape), d_s.view(*q.shape[:3], k.shape[2])


def _stack(x: Tensor, kv_heads: int, precision: torch.dtype) -> Tensor:
    """[B, H, L, n] -> [B * Hkv, H / Hkv * L, n]: the queries of all heads that share keys are rows of one matrix."""
    x = x if x.dtype == precision else x.to(precision)
    if x.shape[0] == 1 and x.shape[1] == kv_heads:
        return x[0]
    return x.reshape(x.shape[0] * kv_heads, -1, x.shape[3])
