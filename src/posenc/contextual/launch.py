"""Contextual attention on a GPU: the kernels as autograd functions."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..core.torch_modes import first_derivatives_only, is_exporting, transform_reason
from ..engines import triton


def supports(q: Tensor, k: Tensor, v: Tensor, widest: int = triton.WIDEST) -> bool:
    """Whether the kernels run this call: on a GPU with Triton, in float32 or half precision, outside of torch.func and export."""
    if triton.device_reason(q.device) is not None or q.numel() == 0 or max(q.shape[3], v.shape[3]) > widest:
        return False
    if q.dtype not in triton.DTYPES or not q.dtype == k.dtype == v.dtype:
        return False
    if torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled():
        return False  # the kernels add gradients of keys in no fixed order
    return transform_reason() is None and not is_exporting()


class Contextual(torch.autograd.Function):
    """The operators' forward and backward; the log-sum-exp of counts is for the backward pass alone."""

    @staticmethod
    def forward(q, k, v, by_count, real, ids, scale, strict):
        from .operators import call, forward

        return call(forward, q, q, k, v, by_count, real, ids, scale, strict)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.scale, ctx.strict = inputs
        out, rest = output
        ctx.set_materialize_grads(False)
        if inputs[3] is None:  # stick-breaking
            out = None
        else:
            ctx.mark_non_differentiable(rest)
        ctx.save_for_backward(*tensors, out, rest)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, d_out, d_left):
        from .operators import backward, call

        q, k, v, *more = ctx.saved_tensors
        given = q.new_zeros(*q.shape[:3], v.shape[3]) if d_out is None else d_out.to(q.dtype)
        of_left = None if d_left is None else d_left.contiguous()
        dq, dk, dv, *d_counts = call(backward, q, given, of_left, q, k, v, *more, ctx.scale, ctx.strict)
        return *(x.to(q.dtype) for x in (dq, dk, dv)), *(d_counts or [None]), None, None, None, None


def supports_path(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PaTH's kernels run this call. They hold products of a block's matrices, [D, D], whole: a program of theirs needs the shared
    memory of a Hopper or a data centre's Blackwell GPU."""
    return supports(q, k, v, PATH_WIDEST) and (not q.is_cuda or _shared_memory(q.device) >= PATH_MEMORY)


PATH_MEMORY = 229376
PATH_WIDEST = 64
"""Heads that were compared on a GPU; in bfloat16 the kernels compile for 128."""


@cache
def _shared_memory(device: torch.device) -> int:
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


class Path(torch.autograd.Function):
    """beta [B, Hkv, L] float32, total [B, H, L]: sums of log gates, float64; both contiguous."""

    @staticmethod
    def forward(q, k, v, w, beta, total, real, ids, scale):
        from .path_operators import call, forward

        return tuple(call(forward, q, q, k, v, w, beta, total, real, ids, scale))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.scale = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, d_out, *_):
        from .path_operators import backward, call

        if d_out is None:
            return (None,) * 9
        q, *tensors = ctx.saved_tensors[:8]
        grads = call(backward, q, d_out.to(q.dtype), q, *tensors, list(ctx.saved_tensors[8:]), ctx.scale)
        d_total = grads[5].double() if len(grads) > 5 else None
        return *grads[:5], d_total, None, None, None
