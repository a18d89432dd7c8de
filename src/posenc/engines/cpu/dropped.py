"""Attention with dropout: the formula over materialised scores, with one gradient.

    s = scale q·k + mask ─▶ p = softmax(s) ─▶ kept = p, or 0 where the hash drops it ─▶ out = kept·v / (1 - rate)

PyTorch has no kernel for it on a CPU. Its own formula draws a number for each probability, which takes ten times as long as the
hash, and keeps three numbers for backward. Here it is one, the probability, negative where it is dropped:

    x = ±p      p = |x|      kept = max(x, 0)      the gradient of kept reaches p where x > 0

A few scores keep the three numbers and PyTorch's own gradients: a function written in Python takes longer to call than they do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.dropout import Dropout, as_dropout
from ...core.tables import add
from ...core.torch_modes import direct_apply, first_derivatives_only
from .dense_terms import bias_by_pair, bias_gradients, make_bias
from .head_block import select_shared, share_blocks

BLOCK = 1 << 17
"""Scores of the heads that run together: 512 KiB of float32, which a core's cache holds beside their hashes."""
FEW = 1 << 15
"""Scores up to which PyTorch's own gradients take less time."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """[B, H, Lq, Dv], with gradients of q, k, v and the mask [B or 1, H or 1, Lq or 1, Lk], which is added to the scores in float32 or
    better."""
    drawn = as_dropout(dropout, q.device)
    return _attend_few(q, k, v, mask, scale, drawn) if _are_few(q, k) else _apply(q, k, v, mask, scale, drawn, (), ())


def attend_with_bias(
    q: Tensor, k: Tensor, v: Tensor, tables: tuple, indices: tuple, facts: tuple, hidden: Tensor | None, scale: float,
    dropout: float,
) -> Tensor:  # fmt: skip
    """`attend` with the mask `make_bias(tables, indices, *facts)` + hidden, as one function; hidden needs no gradient."""
    drawn = as_dropout(dropout, q.device)
    if _are_few(q, k):
        return _attend_few(q, k, v, add(hidden, bias_by_pair(tables, indices, *facts)), scale, drawn)
    return _apply(q, k, v, hidden, scale, drawn, indices, facts, *tables)


def _are_few(q: Tensor, k: Tensor) -> bool:
    batch, heads, q_length, _ = q.shape
    return batch * heads * q_length * k.shape[2] <= FEW


def _attend_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: Dropout) -> Tensor:
    batch, heads, q_length, _ = q.shape
    k_length = k.shape[2]
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    factors = dropout.factors(batch, heads, range(q_length), range(k_length), precision)
    rows, keys, values = (x.to(precision).reshape(batch * k.shape[1], -1, x.shape[3]) for x in (q, k, v))
    s = torch.bmm(rows, keys.transpose(1, 2)).view(batch, heads, q_length, k_length)
    s = s * scale if mask is None else torch.add(mask, s, alpha=scale)
    kept = (s.softmax(-1) * factors).view(rows.shape[0], -1, k_length)
    out = torch.bmm(kept, values).view(batch, heads, q_length, -1)
    return out if out.dtype == q.dtype else out.to(q.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: Dropout, indices: tuple,
        facts: tuple, *tables: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.more = (mask, *tables)
        if tables:
            mask = add(mask, make_bias(tables, indices, *facts))
        batch, heads, q_length, _ = q.shape
        _, kv_heads, k_length, v_size = v.shape
        precision = torch.float64 if q.dtype == torch.float64 else torch.float32
        hashes = dropout.hashes(batch, heads, range(q_length), range(k_length))
        ctx.facts = scale, dropout, None if mask is None else mask.shape
        ctx.given = indices, facts, [(table.shape, table.dtype) for table in tables]
        if batch * heads * q_length * k_length <= BLOCK:
            stacks = _stack_each(q, k, v, precision)
            out, x = _forward(*stacks, mask, hashes, (batch, heads, q_length, k_length), scale, dropout)
            ctx.save_for_backward(q, k, v, x, *stacks)
            out = out.view(batch, heads, q_length, v_size)
            return out if out.dtype == q.dtype else out.to(q.dtype)
        row, again, column = hashes
        out = q.new_empty(batch, q_length, heads, v_size).transpose(1, 2)  # as a layer's last projection reads it
        x = q.new_empty(batch, heads, q_length, k_length, dtype=precision)
        for at, own in share_blocks(batch, heads, kv_heads, q_length * k_length, BLOCK):
            stacks, some, (own_out, own_x) = (
                _stack_each(q[at], k[own], v[own], precision),
                (row[at], again[at], column),
                (out[at], x[at]),
            )
            added = None if mask is None else mask[select_shared(mask.shape, at)]
            found, made = _forward(*stacks, added, some, own_x.shape, scale, dropout)
            own_out.copy_(found.view(own_out.shape))
            own_x.copy_(made)
        ctx.save_for_backward(q, k, v, x)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad: Tensor):
        q, k, v, x, *stacks = ctx.saved_tensors
        scale, dropout, mask_shape = ctx.facts
        batch, heads, q_length, k_length = x.shape
        wants_mask, wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[8:]
        shared = mask_shape if wants_mask else (1, *x.shape[1:]) if any(wanted) else None
        kv_heads, precision = k.shape[1], x.dtype
        d_added: Tensor | None = None
        if stacks:
            rows, keys, values = stacks
            own_x, own_grad = _stack(x, kv_heads, precision), _stack(grad, kv_heads, precision)
            *found, d_s = _backward(rows, keys, values, own_x, own_grad, scale, dropout)
            d_q, d_k, d_v = (one.view(given.shape).to(given.dtype) for one, given in zip(found, (q, k, v)))
            if shared is not None:
                d_added = _sum_to(d_s.view(x.shape), shared)
        else:
            d_q, d_k, d_v = (torch.empty_like(one) for one in (q, k, v))
            d_added = None if shared is None else x.new_zeros(shared)
            for at, own in share_blocks(batch, heads, kv_heads, q_length * k_length, BLOCK):
                rows, keys, values = _stack_each(q[at], k[own], v[own], precision)
                own_heads = k[own].shape[1]
                own_x, own_grad = _stack(x[at], own_heads, precision), _stack(grad[at], own_heads, precision)
                *found, d_s = _backward(rows, keys, values, own_x, own_grad, scale, dropout)
                for one, part in zip(found, (d_q[at], d_k[own], d_v[own])):
                    part.copy_(one.view(part.shape))
                if d_added is not None:
                    part = d_added[select_shared(d_added.shape, at)]
                    part += _sum_to(d_s.view(x[at].shape), part.shape)
        if wants_mask or d_added is None:
            return d_q, d_k, d_v, d_added, None, None, None, None, *[None for _ in wanted]
        indices, facts, tables = ctx.given
        return d_q, d_k, d_v, None, None, None, None, None, *bias_gradients(d_added, indices, facts, tables, wanted)


_apply = direct_apply(_Attend)


def _forward(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, hashes: tuple[Tensor, ...], shape: tuple[int, ...],
    scale: float, dropout: Dropout,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, stacked as the queries are, and x [B, H, Lq, Lk], the shape."""
    scores = torch.bmm(rows, keys.transpose(1, 2))
    s = scores.view(shape)
    s = s.mul_(scale) if mask is None else torch.add(mask, s, alpha=scale, out=s)
    x = torch.copysign(s.softmax(-1), dropout.excess(*hashes), out=s)
    return torch.bmm(scores.relu(), values).mul_(1.0 / (1.0 - float(dropout))), x


def _backward(
    rows: Tensor, keys: Tensor, values: Tensor, x: Tensor, grad: Tensor, scale: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values and scores; all are stacked."""
    grad = grad * (1.0 / (1.0 - float(dropout)))
    d_v = torch.bmm(x.relu().transpose(1, 2), grad)
    d_p = torch.ops.aten.threshold_backward(torch.bmm(grad, values.transpose(1, 2)), x, 0.0)
    d_s = torch._softmax_backward_data(d_p, x.abs(), -1, x.dtype)
    return torch.bmm(d_s, keys).mul_(scale), torch.bmm(d_s.transpose(1, 2), rows).mul_(scale), d_v, d_s


def _stack_each(q: Tensor, k: Tensor, v: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[1]
    return _stack(q, heads, precision), _stack(k, heads, precision), _stack(v, heads, precision)


def _stack(x: Tensor, kv_heads: int, precision: torch.dtype) -> Tensor:
    """[B, H, L, n] -> [B * Hkv, H / Hkv * L, n]: the queries of all heads that share keys are rows of one matrix."""
    x = x if x.dtype == precision else x.to(precision)
    if x.shape[0] == 1 and x.shape[1] == kv_heads:
        return x[0]
    return x.reshape(x.shape[0] * kv_heads, -1, x.shape[3])


def _sum_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x if x.shape == shape else x.sum_to_size(shape)
