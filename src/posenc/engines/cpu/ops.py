"""The forward and the backward pass as PyTorch operators, for autograd, torch.compile and fake tensors.

An operator takes the tensors that are not None, and which of (q, k, v, *Terms) they are (`present`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.plan_checks import holds_nan
from ...core.precision import no_autocast
from ...core.torch_modes import pack_tensors, unpack_tensors
from . import backward as backward_pass
from . import forward as forward_pass
from . import fused_backward, short_forward
from .band import BandGeometry, ScoreTile
from .band_mask import count_visible
from .head_block import NEG_INF
from .terms import Terms

NO_LIMIT = -(1 << 62)


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: BandGeometry, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output, and the log-sum-exp, -inf for fully masked queries."""
    tensors, present = pack_tensors((q, k, v, *terms))
    if not torch.compiler.is_compiling() and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        out, lse, _ = _attend(q, k, v, terms, band, scale)
    else:
        numbers = [
            band.q_length, band.k_length, band.offset, band.lo, band.hi,
            NO_LIMIT if band.left is None else band.left, NO_LIMIT if band.right is None else band.right,
        ]  # fmt: skip
        needs_grad = [t is not None and t.requires_grad for t in terms]
        split = needs_grad[0] and all(band.has_far_fields) and fused_backward.applies(q, k, terms, band, needs_grad)
        out, lse, _ = _forward(tensors, present, numbers, scale, split)
    if not return_lse:
        return out, None
    whole = ScoreTile(0, band.q_length, 0, band.k_length, 0)
    count = count_visible(band, whole, terms.key_mask, q.device)  # [Lq] or [B or 1, Lq]
    return out, lse.masked_fill(count.unsqueeze(-2) <= 0, NEG_INF)


def _attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms, band: BandGeometry, scale: float, split: bool = False):
    """`forward`, except that NaN or inf in a masked key or value does not reach the output.

    A tile has keys that are masked for some of its rows. Fused attention adds -inf to their scores, and NaN stays NaN;
    materialised scores are overwritten.
    """
    out, lse, far_left = forward_pass.forward(q, k, v, terms, band, scale, split)
    if (band.is_limited or terms.key_mask is not None) and holds_nan(out):
        out, lse = short_forward.forward(q, k, v, terms, band, scale)
    return out, lse, far_left


def _unpack(tensors: Sequence[Tensor], present: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Terms]:
    q, k, v, *terms = unpack_tensors(tensors, present, 3 + len(Terms._fields))
    return q, k, v, Terms(*terms)  # type: ignore[return-value]


def _band(numbers: list[int]) -> BandGeometry:
    q_length, k_length, offset, lo, hi, left, right = numbers
    return BandGeometry(
        q_length, k_length, offset, lo, hi, None if left == NO_LIMIT else left, None if right == NO_LIMIT else right
    )


@torch.library.custom_op("posenc::cpu", mutates_args=())
def _forward(
    tensors: list[Tensor], present: list[int], band: list[int], scale: float, split: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp (0 for a fully masked query), and that of the far field on the left (`split`) or nothing."""
    q, k, v, terms = _unpack(tensors, present)
    out, lse, far_left = _attend(q, k, v, terms, _band(band), scale, split)
    # The fused kernel returns zeros for a query that holds NaN; a fault upstream must stay visible.
    if bool(torch.isnan(q.sum())):
        out.masked_fill_(torch.isnan(q).any(-1, keepdim=True), float("nan"))
    return out, lse, far_left


@_forward.register_fake
def _(tensors, present, band, scale, split):
    q, _, v, *_ = tensors
    precision = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=precision)
    return q.new_empty(*q.shape[:3], v.shape[3]), lse, torch.empty_like(lse) if split else lse.new_empty(0)


@torch.library.custom_op("posenc::cpu_backward", mutates_args=())
def _backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, far_left: Tensor, tensors: list[Tensor],
    present: list[int], band: list[int], scale: float, needed: list[int],
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and of those of (q, k, v, *Terms) whose numbers are in `needed`."""
    q, k, v, terms = _unpack(tensors, present)
    flags = [3 + number in needed for number in range(len(terms))]
    with no_autocast(q.device):
        if grad_lse is None and fused_backward.applies(q, k, terms, _band(band), flags):
            own = fused_backward.backward(grad, q, k, v, out, lse, far_left, terms, _band(band), scale, flags[0])
            if own is not None:
                return own
        result = backward_pass.backward(grad, grad_lse, q, k, v, out, terms, _band(band), scale, flags)
    grads = [result.q.to(q.dtype), result.k.to(k.dtype), result.v.to(v.dtype)]
    return grads + [grad.to(t.dtype) for t, grad in zip(terms, result.terms) if t is not None and grad is not None]


@_backward.register_fake
def _(grad, grad_lse, out, lse, far_left, tensors, present, band, scale, needed):
    q, k, v, terms = _unpack(tensors, present)
    given = (q, k, v, *(terms[number - 3] for number in needed))
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given if t is not None]


def refuse_second_derivatives(ctx, *grads):
    raise RuntimeError("the cpu engine has first derivatives only; for second ones use engine='reference'")


_backward.register_autograd(refuse_second_derivatives)


def _setup(ctx, inputs, output):
    tensors, ctx.present, ctx.band, ctx.scale, _ = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, grad_lse, _):
    out, lse, far_left, *tensors = ctx.saved_tensors
    nothing: list[Tensor | None] = [None] * len(tensors)
    if grad is None and grad_lse is None:
        return nothing, None, None, None, None
    grad = torch.zeros_like(out) if grad is None else grad
    needs = ctx.needs_input_grad[0]
    needed = [number for number, need in zip(ctx.present, needs, strict=True) if need and number >= 3]
    found = iter(_backward(grad, grad_lse, out, lse, far_left, tensors, ctx.present, ctx.band, ctx.scale, needed))
    grads = [next(found) if number < 3 or need else None for number, need in enumerate(needs)]
    return grads, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)
