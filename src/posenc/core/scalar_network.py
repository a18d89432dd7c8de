"""A small network of single numbers, 1 -> hidden, ReLU, hidden -> heads, for many of them.

Its hidden numbers, 32 for each pair of tokens, would take more time to write and to read than to compute. They are made for some numbers at a
time, which a cache holds, and again for the gradients:

    x [n]  . . ▒▒▒▒ . . . .  ──▶  hidden [32, some]  ──▶  heads [H, some]           on a CPU by matrix products, each a block of a long row
                                                                                     on a GPU by kernels (scalar_network_kernel.py)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from .launches import has_triton
from .precision import keep_dtypes, no_autocast
from .torch_modes import direct_apply, has_fake_tensors, transform_reason

LEAST = 1 << 12
"""Numbers from which blocks pay off."""
BLOCK = 1 << 12
"""Numbers of a block on a CPU: with 32 hidden ones each, 512 KiB in float32. Here x times one column of weights is a product of each pair of
numbers: as a matrix product it takes two to four times as long."""
PLAIN = (Tensor, torch.nn.Parameter)


def apply_network(x: Tensor, first: Tensor, bias: Tensor, last: Tensor, last_bias: Tensor) -> Tensor:
    """[H, *x.shape] of any x, by weights first [hidden], bias [hidden], last [H, hidden], last_bias [H] in its dtype."""
    weights = first, bias, last, last_bias
    with no_autocast(x.device):
        if _is_for_blocks(x, weights):
            return _apply(x, *weights)
        return _by_formula(x, *weights)


def _by_formula(x: Tensor, first: Tensor, bias: Tensor, last: Tensor, last_bias: Tensor) -> Tensor:
    return linear(torch.relu(x[..., None] * first + bias), last, last_bias).movedim(-1, 0)


def _is_for_blocks(x: Tensor, weights: tuple[Tensor, ...]) -> bool:
    if torch.compiler.is_compiling() or has_fake_tensors() or torch._C._len_torch_dispatch_stack():
        return False  # first: nothing may ask how many numbers there are
    if x.numel() < LEAST or transform_reason() is not None or any(type(one) not in PLAIN for one in (x, *weights)):
        return False
    return x.is_cpu or (x.is_cuda and has_triton() and _kernels().supports(x, weights))


def _kernels():
    from . import scalar_network_kernel

    return scalar_network_kernel


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        row = x.reshape(-1)
        if not x.is_cpu:
            return _kernels().forward(row, *weights).view(-1, *x.shape)
        return _forward(row, *weights).view(-1, *x.shape)

    @staticmethod
    @keep_dtypes
    def backward(ctx, grad: Tensor):
        x, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives
            wanted = [one for one, need in zip((x, *weights), ctx.needs_input_grad) if need]
            found = iter(torch.autograd.grad(_by_formula(x, *weights), wanted, grad, create_graph=True))
            return tuple([next(found) if need else None for need in ctx.needs_input_grad])
        row, grad = x.reshape(-1), grad.reshape(grad.shape[0], -1)
        d_x, *d_weights = (_gradients if x.is_cpu else _kernels().gradients)(row, grad, *weights)
        return d_x.view(x.shape), *d_weights


# ---- on a CPU ------------------------------------------------------------------------------------------------------------
def _forward(x: Tensor, first: Tensor, bias: Tensor, last: Tensor, last_bias: Tensor) -> Tensor:
    out = x.new_empty(last.shape[0], x.shape[0])
    for some, hidden in _blocks(x, first, bias):
        torch.mm(last, hidden, out=out[:, some]).add_(last_bias[:, None])
    return out


def _gradients(
    x: Tensor, grad: Tensor, first: Tensor, bias: Tensor, last: Tensor, last_bias: Tensor
) -> tuple[Tensor, ...]:
    """Of x and of each weight."""
    d_x, transposed = torch.empty_like(x), last.t()
    d_first, d_bias, d_last = torch.zeros_like(first), torch.zeros_like(bias), torch.zeros_like(last)
    for some, hidden in _blocks(x, first, bias):
        part = grad[:, some]
        d_last.addmm_(part, hidden.t())
        d_hidden = torch.ops.aten.threshold_backward(torch.mm(transposed, part), hidden, 0)
        torch.mv(d_hidden.t(), first, out=d_x[some])
        d_first.addmv_(d_hidden, x[some])
        d_bias.add_(d_hidden.sum(1))
    return d_x, d_first, d_bias, d_last, grad.sum(1)


def _blocks(x: Tensor, first: Tensor, bias: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Each block, and its hidden numbers [hidden, some], which the next one overwrites."""
    buffer = x.new_empty(first.shape[0], min(BLOCK, x.shape[0]))
    for start in range(0, x.shape[0], BLOCK):
        some = slice(start, min(start + BLOCK, x.shape[0]))
        hidden = buffer[:, : some.stop - start]
        yield some, torch.mul(first[:, None], x[some], out=hidden).add_(bias[:, None]).relu_()


_apply = direct_apply(_Network)
