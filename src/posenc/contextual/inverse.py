"""The inverse of unit lower triangular matrices: of each block of tokens of PaTH attention.

cuBLAS solves many small triangular systems slowly, so on a GPU a kernel substitutes forward, one program for each matrix:

    x_i = e_i - Σ_{j < i} a_ij x_j          rows i from the first to the last

The gradient of X = A^-1 is dA = -Xᵀ dX Xᵀ: two products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.torch_modes import apply_function, is_exporting, transform_reason
from ..engines import triton


def invert(a: Tensor) -> Tensor:
    """(I + a)^-1 of strictly lower triangular matrices [.., n, n]."""
    if transform_reason() is not None:
        return _solve(a)
    fits = a.dtype == torch.float32 and a.shape[-1] in (16, 32, 64) and a.numel() > 0
    by_kernel = fits and triton.device_reason(a.device) is None and not is_exporting()
    return apply_function(_Inverse, a, by_kernel)


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(a, by_kernel):
        if not by_kernel:
            return _solve(a)
        from .operators import call, substitute

        return call(substitute, a, a)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -(x.mT @ grad @ x.mT).tril(-1), None


def _solve(a: Tensor) -> Tensor:
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False, unitriangular=True)
