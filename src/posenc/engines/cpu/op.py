"""The two passes as operators of PyTorch, so that autograd, torch.compile and fake tensors know them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.plan import holds_nan
from . import backward as backward_pass
from . import forward as forward_pass
from . import fused, short
from .band import Band
from .terms import Terms

NONE = -(1 << 62)
FIELDS = len(Terms._fields)


def attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: Band, scale: float) -> Tensor:
    given = [x for x in (q, k, v, *terms) if x is not None]
    if not torch.compiler.is_compiling() and not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return _output(q, k, v, terms, band, scale)[0]
    numbers = [
        band.q_length, band.k_length, band.offset, band.lo, band.hi,
        NONE if band.left is None else band.left, NONE if band.right is None else band.right,
    ]  # fmt: skip
    wanted = [t is not None and t.requires_grad for t in terms]
    split = wanted[0] and all(band.far) and fused.applies(q, k, terms, band, wanted)
    return _forward(q, k, v, *terms, numbers, scale, split)[0]


def _output(q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: Band, scale: float, split: bool = False):
    """`forward`, where what a query may not see does not reach it even as NaN or inf.

    A tile has keys that some of its rows may not see. Fused attention adds -inf there, and NaN stays NaN; pairs in
    memory are overwritten.
    """
    out, sums, left = forward_pass.forward(q, k, v, terms, band, scale, split)
    if (band.limited or terms.key_mask is not None) and holds_nan(out):
        out, sums = short.forward(q, k, v, terms, band, scale)
    return out, sums, left


def _band(numbers: list[int]) -> Band:
    q_length, k_length, offset, lo, hi, left, right = numbers
    return Band(q_length, k_length, offset, lo, hi, None if left == NONE else left, None if right == NONE else right)


@torch.library.custom_op("posenc::sdpa", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    table_q: Tensor | None,
    states: Tensor | None,
    table_k: Tensor | None,
    table_v: Tensor | None,
    decay_q: Tensor | None,
    decay_k: Tensor | None,
    key_mask: Tensor | None,
    band: list[int],
    scale: float,
    split: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    terms = Terms(bias, table_q, states, table_k, table_v, decay_q, decay_k, key_mask)
    out, sums, left = _output(q, k, v, terms, _band(band), scale, split)
    # The fused kernel answers a query that holds NaN with zeros; a fault upstream must stay visible.
    if bool(torch.isnan(q.sum())):
        out.masked_fill_(torch.isnan(q).any(-1, keepdim=True), float("nan"))
    return out, sums, left


@_forward.register_fake
def _(q, k, v, bias, table_q, states, table_k, table_v, decay_q, decay_k, key_mask, band, scale, split):
    precision = torch.promote_types(q.dtype, torch.float32)
    sums = q.new_empty(q.shape[:3], dtype=precision)
    return q.new_empty(*q.shape[:3], v.shape[3]), sums, torch.empty_like(sums) if split else sums.new_empty(0)


@torch.library.custom_op("posenc::sdpa_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    left: Tensor,
    bias: Tensor | None,
    table_q: Tensor | None,
    states: Tensor | None,
    table_k: Tensor | None,
    table_v: Tensor | None,
    decay_q: Tensor | None,
    decay_k: Tensor | None,
    key_mask: Tensor | None,
    band: list[int],
    scale: float,
    wanted: list[int],
) -> list[Tensor]:
    terms = Terms(bias, table_q, states, table_k, table_v, decay_q, decay_k, key_mask)
    flags = list(map(bool, wanted))
    if fused.applies(q, k, terms, _band(band), flags):
        own = fused.backward(grad, q, k, v, out, sums, left, terms, _band(band), scale, flags[0])
        if own is not None:
            return own
    result = backward_pass.backward(grad, q, k, v, out, terms, _band(band), scale, flags)
    grads = [result.q.to(q.dtype), result.k.to(k.dtype), result.v.to(v.dtype)]
    return grads + [grad.to(t.dtype) for t, grad in zip(terms, result.terms) if grad is not None]


@_backward.register_fake
def _(
    grad,
    q,
    k,
    v,
    out,
    sums,
    left,
    bias,
    table_q,
    states,
    table_k,
    table_v,
    decay_q,
    decay_k,
    key_mask,
    band,
    scale,
    wanted,
):
    terms = (bias, table_q, states, table_k, table_v, decay_q, decay_k, key_mask)
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (q, k, v, *(t for t, w in zip(terms, wanted) if w))
    ]


def _refuse(ctx, *grads):
    raise RuntimeError("the sdpa engine has first derivatives only; for second ones use engine='reference'")


_backward.register_autograd(_refuse)


def _setup(ctx, inputs, output):
    q, k, v, *terms, band, scale, _ = inputs
    out, sums, left = output
    ctx.save_for_backward(q, k, v, out, sums, left, *terms)
    ctx.band, ctx.scale = band, scale
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, *_):
    q, k, v, out, sums, left, *terms = ctx.saved_tensors
    empty = [None] * (3 + FIELDS + 3)
    if grad is None:
        return tuple(empty)
    wanted = [int(t is not None and ctx.needs_input_grad[3 + n]) for n, t in enumerate(terms)]
    grads = iter(_backward(grad, q, k, v, out, sums, left, *terms, ctx.band, ctx.scale, wanted))
    for n in range(3 + FIELDS):
        if n < 3 or wanted[n - 3]:
            empty[n] = next(grads)
    return tuple(empty)


_forward.register_autograd(_differentiate, setup_context=_setup)
