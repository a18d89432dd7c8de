"""Tables of relative encodings, projected by linear layers: rows [n, d_model] -> [H, n, D] each.

On a GPU the rows are few (a text of 128 tokens has 255 distances), and the products take less time than the host takes to ask for
them: two linear maps are eight operations in a training step and a dozen nodes of autograd. Here they are one function and three
launches (projection_kernel.py), where both are plain linear layers in half precision; everywhere else the layers are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from .launches import find_allocation

MOST = 1 << 29
"""Products of one projection from which PyTorch's own matrix products are faster."""
PLAIN = (Tensor, nn.Parameter)


def project_heads(rows: Tensor, projections: Sequence[nn.Module], heads: int) -> tuple[Tensor, ...]:
    """[H, n, D] for each projection of rows [n, d_model]."""
    if len(projections) <= 2 and not torch.compiler.is_compiling() and _is_served(rows, projections):
        weights = [x for projection in projections for x in _parameters(projection)]
        if torch.is_grad_enabled():
            return _apply(heads, rows, *weights)
        return _project(heads, rows, weights)
    return tuple([as_heads(projection(rows), heads) for projection in projections])


def as_heads(x: Tensor, heads: int) -> Tensor:
    """[n, H D] -> [H, n, D]"""
    return x.view(x.shape[0], heads, -1).transpose(0, 1)


def _parameters(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    own: dict[str, Any] = projection._parameters
    return own["weight"], own["bias"]


def _is_served(rows: Tensor, projections: Sequence[nn.Module]) -> bool:
    if (
        not rows.is_cuda
        or type(rows) not in PLAIN
        or rows.dtype not in (torch.bfloat16, torch.float16)
        or not _triton()
    ):
        return False
    if rows.stride(1) != 1 or not rows.numel() or torch.is_autocast_enabled("cuda") or _has_any_global_hook():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    if forward_ad._current_level >= 0:
        return False
    shape = None
    for projection in projections:
        own = projection.__dict__
        if (
            type(projection) is not nn.Linear or own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
            or own["_backward_pre_hooks"] or "forward" in own
        ):  # fmt: skip
            return False
        weight, bias = _parameters(projection)
        if type(weight) not in PLAIN or weight.dtype is not rows.dtype or weight.get_device() != rows.get_device():
            return False
        if not weight.is_contiguous() or weight.shape[1] != rows.shape[1] or weight.shape != (shape or weight.shape):
            return False
        if bias is not None and (type(bias) not in PLAIN or bias.dtype is not rows.dtype or not bias.is_contiguous()):
            return False
        shape = weight.shape
    if shape is None or shape[0] % 16 or shape[1] % 16 or rows.stride(0) % 16:
        return False  # loads of single numbers
    return rows.shape[0] * shape.numel() <= MOST


@lru_cache(maxsize=1)
def _triton() -> bool:
    return find_spec("triton") is not None


def _project(
    heads: int, rows: Tensor, weights: Sequence[Tensor | None], needs: Sequence[bool] = ()
) -> tuple[Tensor, ...]:
    """needs: which gradients of rows and weights the backward pass will want: its kernels are compiled with this one."""
    from .projection_kernel import launch, project, tiles

    w = weights[0]
    assert w is not None
    (width, size), n = w.shape, rows.shape[0]
    outs = [_empty((n, width), rows) for _ in weights[::2]]
    other: tuple = (None, 0, None, None)
    if len(outs) == 2:
        other = (weights[2], size, weights[3], outs[1])
    strides = rows.stride(0), width, size
    args = (rows, rows.stride(0), w, size, weights[1], outs[0], *other, n, width, size)
    launch(project, tiles(n, width) * len(outs), strides, args, lambda: _launch_both(heads, rows, weights, needs))
    return tuple([as_heads(x, heads) for x in outs])


def _launch_both(heads: int, rows: Tensor, weights: Sequence[Tensor | None], needs: Sequence[bool]) -> None:
    """The launches of both passes, to be recorded."""
    outs = _project(heads, rows, weights)
    if any(needs):
        _gradients(rows, weights, [torch.empty_like(x.transpose(0, 1)).flatten(1) for x in outs], needs)


class _Project(torch.autograd.Function):
    """`_project`; weights: each projection's weight and bias or None."""

    @staticmethod
    def forward(ctx, heads: int, rows: Tensor, *weights):
        ctx.save_for_backward(rows, *weights)
        ctx.set_materialize_grads(False)
        return _project(heads, rows, weights, ctx.needs_input_grad[1:])

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        rows, *weights = ctx.saved_tensors
        given = [x.transpose(0, 1).reshape(rows.shape[0], -1) for x in grads if x is not None]
        if len(given) == len(grads) and not torch.is_grad_enabled():
            return None, *_gradients(rows, weights, given, ctx.needs_input_grad[1:])
        flat = iter(given)
        every = [None if x is None else next(flat) for x in grads]
        return None, *_by_formula(rows, weights, every, ctx.needs_input_grad[1:])


_apply = super(torch.autograd.Function, _Project).apply
"""Function.apply without its inspection of each argument for torch.func, which `_is_served` has excluded."""


def _by_formula(rows: Tensor, weights, grads, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients by differentiable operations."""
    total = None
    found: list[Tensor | None] = []
    for number, d in enumerate(grads):
        weight = weights[2 * number]
        if d is None:
            found += (None, None)
            continue
        if needs[0]:
            part = d @ weight
            total = part if total is None else total + part
        found.append(d.t() @ rows if needs[1 + 2 * number] else None)
        found.append(d.sum(0) if needs[2 + 2 * number] else None)
    return [total, *found]


def _gradients(rows: Tensor, weights, grads: list[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    from .projection_kernel import launch, row_gradient, tiles, weight_gradient

    (width, size), n = weights[0].shape, rows.shape[0]
    found: list[Tensor | None] = [None] * (1 + len(weights))
    two = len(grads) == 2
    if any(needs[1:]):
        for number, x in enumerate(weights):
            if needs[1 + number]:
                found[1 + number] = _empty(tuple(x.shape), rows)
        other: tuple = (grads[1], found[3], found[4]) if two else (None, None, None)
        args = (rows, rows.stride(0), grads[0], found[1], found[2], *other, n, width, size)
        launch(weight_gradient, tiles(width, size) * len(grads), (rows.stride(0), width, size), args)
    if needs[0]:
        found[0] = _empty((n, size), rows)
        other = (grads[1], weights[2], size) if two else (None, None, 0)
        args = (grads[0], weights[0], size, *other, found[0], n, width, size)
        launch(row_gradient, tiles(n, size), (width, size), args)
    return found


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    allocate = find_allocation(like.device)
    if allocate is None or like.get_device() != torch.cuda.current_device():
        return like.new_empty(shape)
    return allocate(shape, (shape[1], 1) if len(shape) == 2 else (1,), like.dtype)
