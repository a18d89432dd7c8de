"""Matrix products of stacks: many small matrices at once, large ones one by one.

PyTorch multiplies a stack in one go only into memory without gaps, with the cores side by side on its matrices. A
large matrix keeps them busy by itself, and its rows had better have gaps: at a distance of a power of two they would
share cache sets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import sizes


def one_by_one(stack: Tensor | tuple[int, ...]) -> bool:
    """Whether the matrices of a stack [X, R, K] are multiplied one by one."""
    heads, rows, keys = stack if isinstance(stack, tuple) else stack.shape
    return heads == 1 or rows * keys >= sizes.LARGE


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out [X, R, K] <- a [X, R, D] bᵀ [X, D, K], added to what it holds or not; out may have gaps."""
    if one_by_one(out):
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


def add_product(to: Tensor, pairs: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """to += scale pairs b, for pairs [X, R, K] or their transpose; `to` may have gaps."""
    if one_by_one(pairs):
        for x in range(to.shape[0]):
            to[x].addmm_(pairs[x], b[x], alpha=scale)
    else:
        to.add_(torch.bmm(pairs, b), alpha=scale)
