"""Stick-breaking attention and contextual counts on a GPU: the kernels as autograd functions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.torch_modes import apply_function, is_exporting, transform_reason
from ..engines import triton


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels run this call: on a GPU with Triton, in float32 or half precision, outside of torch.func and export."""
    if triton.device_reason(q.device) is not None or q.numel() == 0 or max(q.shape[3], v.shape[3]) > triton.WIDEST:
        return False
    if q.dtype not in triton.DTYPES or not q.dtype == k.dtype == v.dtype:
        return False
    if torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled():
        return False  # the kernels add gradients of keys in no fixed order
    return transform_reason() is None and not is_exporting()


def stick_breaking(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, ids: Tensor | None, scale: float, strict: bool
) -> tuple[Tensor, Tensor]:
    out, left = apply_function(_StickBreaking, q, k, v, real, ids, scale, strict)
    return out, left.to(q.dtype)


def cope(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, position_scale: float, real: Tensor | None, ids: Tensor | None, scale: float
) -> Tensor:  # fmt: skip
    """rows: the table, [H or 1, n, D]."""
    by_count = (q.float() @ rows.float().mT) * position_scale
    return apply_function(_Counts, q, k, v, by_count.contiguous(), real, ids, scale)[0].to(q.dtype)


class _StickBreaking(torch.autograd.Function):
    """out in q's dtype, left in float32."""

    @staticmethod
    def forward(q, k, v, real, ids, scale, strict):
        from .operators import call, stick_forward

        return call(stick_forward, q, q, k, v, real, ids, scale, strict)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, real, ids, ctx.scale, ctx.strict = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, real, ids, output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_left):
        from .operators import call, stick_backward

        q, k, v, real, ids, left = ctx.saved_tensors
        given = q.new_zeros(*q.shape[:3], v.shape[3]) if d_out is None else d_out
        of_left = None if d_left is None else d_left.contiguous()
        grads = call(stick_backward, q, given, of_left, q, k, v, real, ids, left, ctx.scale, ctx.strict)
        return *(x.to(q.dtype) for x in grads), None, None, None, None


class _Counts(torch.autograd.Function):
    """out and log-sum-exp in float32; the second is for the backward pass alone."""

    @staticmethod
    def forward(q, k, v, by_count, real, ids, scale):
        from .operators import call, count_forward

        return call(count_forward, q, q, k, v, by_count, real, ids, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, by_count, real, ids, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, by_count, real, ids, *output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, _):
        from .operators import call, count_backward

        q, k, v, by_count, real, ids, out, lse = ctx.saved_tensors
        dq, dk, dv, d_counts = call(
            count_backward, q, d_out.to(q.dtype), q, k, v, by_count, real, ids, out, lse, ctx.scale
        )
        return *(x.to(q.dtype) for x in (dq, dk, dv)), d_counts, None, None, None
