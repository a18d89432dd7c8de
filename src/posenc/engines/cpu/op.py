"""The two passes as operators of PyTorch, so that autograd, torch.compile and fake tensors know them.

An operator takes the tensors that are there, and their places in (q, k, v, *Terms).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.plan import holds_nan
from . import backward as backward_pass
from . import forward as forward_pass
from . import fused, short
from .band import Band
from .slab import NEVER
from .terms import Terms

NONE = -(1 << 62)


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: Band, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output, and the log-sum-exp, -inf for fully masked queries."""
    given = [x for x in (q, k, v, *terms) if x is not None]
    if not torch.compiler.is_compiling() and not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        out, sums, _ = _attend(q, k, v, terms, band, scale)
    else:
        numbers = [
            band.q_length, band.k_length, band.offset, band.lo, band.hi,
            NONE if band.left is None else band.left, NONE if band.right is None else band.right,
        ]  # fmt: skip
        wanted = [t is not None and t.requires_grad for t in terms]
        split = wanted[0] and all(band.far) and fused.applies(q, k, terms, band, wanted)
        everything = (q, k, v, *terms)
        present = [place for place, t in enumerate(everything) if t is not None]
        tensors = [t for t in everything if t is not None]
        out, sums, _ = _forward(tensors, present, numbers, scale, split)
    if not return_lse:
        return out, None
    return out, sums.masked_fill(_fully_masked(terms.key_mask, band, q.device), NEVER)


def _fully_masked(key_mask: Tensor | None, band: Band, device: torch.device) -> Tensor:
    """[B or 1, 1, Lq]: queries that see no key."""
    slots = torch.arange(band.q_length, device=device) + (band.k_length - band.q_length)
    first = torch.zeros_like(slots) if band.left is None else (slots - band.left).clamp(0, band.k_length)
    last = torch.full_like(slots, band.k_length)
    if band.right is not None:
        last = (slots + band.right + 1).clamp(0, band.k_length)
    if key_mask is None:
        return (last <= first)[None, None]
    real = torch.nn.functional.pad(key_mask.long().cumsum(-1), (1, 0))
    return (real[:, last] <= real[:, first])[:, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: Band, scale: float, split: bool = False):
    """`forward`, where a masked key does not reach a query even as NaN or inf.

    A tile has keys that are masked for some of its rows. Fused attention adds -inf there, and NaN stays NaN; pairs in
    memory are overwritten.
    """
    out, sums, left = forward_pass.forward(q, k, v, terms, band, scale, split)
    if (band.limited or terms.key_mask is not None) and holds_nan(out):
        out, sums = short.forward(q, k, v, terms, band, scale)
    return out, sums, left


def _unpack(tensors: Sequence[Tensor], present: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Terms]:
    everything: list[Tensor | None] = [None] * (3 + len(Terms._fields))
    for place, tensor in zip(present, tensors, strict=True):
        everything[place] = tensor
    q, k, v, *terms = everything
    return q, k, v, Terms(*terms)  # type: ignore[return-value]


def _band(numbers: list[int]) -> Band:
    q_length, k_length, offset, lo, hi, left, right = numbers
    return Band(q_length, k_length, offset, lo, hi, None if left == NONE else left, None if right == NONE else right)


@torch.library.custom_op("posenc::cpu", mutates_args=())
def _forward(
    tensors: list[Tensor], present: list[int], band: list[int], scale: float, split: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp (0 for a fully masked query), and that of the far field on the left (`split`) or nothing."""
    q, k, v, terms = _unpack(tensors, present)
    out, sums, left = _attend(q, k, v, terms, _band(band), scale, split)
    # The fused kernel answers a query that holds NaN with zeros; a fault upstream must stay visible.
    if bool(torch.isnan(q.sum())):
        out.masked_fill_(torch.isnan(q).any(-1, keepdim=True), float("nan"))
    return out, sums, left


@_forward.register_fake
def _(tensors, present, band, scale, split):
    q, _, v, *_ = tensors
    precision = torch.promote_types(q.dtype, torch.float32)
    sums = q.new_empty(q.shape[:3], dtype=precision)
    return q.new_empty(*q.shape[:3], v.shape[3]), sums, torch.empty_like(sums) if split else sums.new_empty(0)


@torch.library.custom_op("posenc::cpu_backward", mutates_args=())
def _backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, sums: Tensor, left: Tensor, tensors: list[Tensor],
    present: list[int], band: list[int], scale: float, wanted: list[int],
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and of the terms at the places `wanted`."""
    q, k, v, terms = _unpack(tensors, present)
    flags = [3 + number in wanted for number in range(len(terms))]
    if grad_lse is None and fused.applies(q, k, terms, _band(band), flags):
        own = fused.backward(grad, q, k, v, out, sums, left, terms, _band(band), scale, flags[0])
        if own is not None:
            return own
    result = backward_pass.backward(grad, grad_lse, q, k, v, out, terms, _band(band), scale, flags)
    grads = [result.q.to(q.dtype), result.k.to(k.dtype), result.v.to(v.dtype)]
    return grads + [grad.to(t.dtype) for t, grad in zip(terms, result.terms) if t is not None and grad is not None]


@_backward.register_fake
def _(grad, grad_lse, out, sums, left, tensors, present, band, scale, wanted):
    q, k, v, terms = _unpack(tensors, present)
    given = (q, k, v, *(terms[place - 3] for place in wanted))
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given if t is not None]


def _refuse(ctx, *grads):
    raise RuntimeError("the cpu engine has first derivatives only; for second ones use engine='reference'")


_backward.register_autograd(_refuse)


def _setup(ctx, inputs, output):
    tensors, ctx.present, ctx.band, ctx.scale, _ = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, grad_lse, _):
    out, sums, left, *tensors = ctx.saved_tensors
    nothing: list[Tensor | None] = [None] * len(tensors)
    if grad is None and grad_lse is None:
        return nothing, None, None, None, None
    grad = torch.zeros_like(out) if grad is None else grad
    needs = ctx.needs_input_grad[0]
    wanted = [place for place, need in zip(ctx.present, needs, strict=True) if need and place >= 3]
    found = iter(_backward(grad, grad_lse, out, sums, left, tensors, ctx.present, ctx.band, ctx.scale, wanted))
    grads = [next(found) if number < 3 or need else None for number, need in enumerate(needs)]
    return grads, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)
