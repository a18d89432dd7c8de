"""Batched matrix products: small matrices in one bmm, large ones one by one.

bmm needs contiguous output and gives each core a matrix. A large matrix keeps all cores busy by itself, and its rows should
have gaps: at a stride of a power of two they would share cache sets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_sizes


def is_large(stack: Tensor | tuple[int, ...]) -> bool:
    """Whether the matrices of a stack [X, R, K] are large enough to be multiplied one by one."""
    heads, rows, keys = stack if isinstance(stack, tuple) else stack.shape
    return heads == 1 or rows * keys >= block_sizes.LARGE_MATRIX


def matmul_into(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out [X, R, K] <- a [X, R, D] bᵀ [X, D, K], added to what it holds or not; out may have gaps."""
    if is_large(out):
        for x in range(out.shape[0]):
            if add:
                out[x].addmm_(a[x], b[x].t())
            else:
                torch.mm(a[x], b[x].t(), out=out[x])
    elif add:
        out.baddbmm_(a, b.mT)
    elif out.is_contiguous():
        torch.bmm(a, b.mT, out=out)
    else:
        out.copy_(torch.bmm(a, b.mT))


def add_matmul(to: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """to += scale a b, for a [X, R, K] or their transpose; `to` may have gaps."""
    if is_large(a):
        for x in range(to.shape[0]):
            to[x].addmm_(a[x], b[x], alpha=scale)
    else:
        to.add_(torch.bmm(a, b), alpha=scale)
